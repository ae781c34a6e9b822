"""Gradients clipped by their global norm, which the step reports."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing, ones, zeros
from testing.towers import assert_close, one_step, replicate

import estimator as est
from replicate import BlockSync, VariableDistribution

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32) * 10
Y = X.sum(1)


def model_fn_with(optimizer, **options):
    return minimizing(lambda x, y: jnp.mean((x @ zeros("w", (3,)) + zeros("b") - y) ** 2), optimizer, **options)


def clipped_by_hand(steps):
    def loss(params):
        return jnp.mean((X @ params["w"] + params["b"] - Y) ** 2)

    params, norms = {"w": jnp.zeros(3), "b": jnp.zeros(())}, []
    for _ in range(steps):
        gradients = jax.grad(loss)(params)
        norms.append(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))))
        params = jax.tree.map(lambda p, g: p - 0.1 * g / norms[-1], params, gradients)  # the norms are above 1
    return params, norms


SHARDED, IN_TURN = (
    {"variable_distribution": each} for each in (VariableDistribution.SHARDED, VariableDistribution.SHARED_ROUND_ROBIN)
)


@pytest.mark.quick
@pytest.mark.parametrize(
    "towers, options, where",
    [
        (2, {"accumulate_steps": 2, "loss_scale": est.DynamicLossScale(2.0**10)}, {}),
        (4, {}, SHARDED),
        (2, {}, IN_TURN),
    ],
)
def test_the_norm_is_of_the_gradients_of_the_whole_batch(towers, options, where):
    optimizer = optax.chain(est.clip_by_global_norm(1.0), optax.sgd(0.1))
    model = est.transform(replicate(model_fn_with(optimizer, **options), towers, **where))
    state, norms = model.init(jax.random.key(0), X, Y), []
    for _ in range(3):
        state, spec = model.train_step(state, X, Y)
        norms.append(spec.train_op.gradient_norms["optimizer"])
    params, want = clipped_by_hand(3)
    np.testing.assert_allclose(norms, want, rtol=2e-5)
    for name, value in params.items():
        np.testing.assert_allclose(state.variables[name], value, rtol=2e-4)


def test_towers_that_train_on_their_own_report_the_norm_of_the_first():
    optimizer = optax.chain(est.clip_by_global_norm(None), optax.sgd(0.1))
    _, got = one_step(replicate(model_fn_with(optimizer), 2, block_sync=BlockSync(block_steps=4)), X, Y)
    _, want = one_step(replicate(model_fn_with(optimizer), 1), X[:4], Y[:4])
    assert_close(got.train_op.gradient_norms, want.train_op.gradient_norms, rtol=1e-5)


def test_the_norm_of_looked_up_rows_is_the_norm_of_the_table(messages):
    ids, y = np.array([[3, 5, 3], [7, 7, 9]]), np.ones(2, np.float32)
    chain = optax.chain(est.clip_by_global_norm(1.0), optax.sgd(0.5))
    results = []

    def loss_of(features, labels):
        rows = est.embedding_lookup("words", features, (50, 2), initializer=jax.nn.initializers.ones)
        return jnp.mean((10 * rows @ ones("w", (2,)) - labels[:, None]) ** 2)

    for optimizer in (chain, est.lazy(chain), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))):
        state, spec = one_step(minimizing(loss_of, est.Optimizer(optimizer)), ids, y)
        results.append((state.variables, spec.train_op.gradient_norms))
    assert results[0][1] == results[1][1] and results[0][1]["optimizer"] > 1
    for variables, _ in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, variables, results[0][0])
    assert not any("as dense arrays" in message for message in messages())


KINDS = {  # gradients, the norm to clip to, their norm, what they become
    "not at all where the norm is smaller": ([np.float32([3, 4])], 6.0, 5, [[3, 4]]),
    "not at all by None": ([np.float32([3, 4])], None, 5, [[3, 4]]),
    "in half precision where the norm overflows": ([np.full(4, 300, np.float16)], 3.0, 600, [np.full(4, 1.5)]),
    "complex by their absolute value": ([np.array([3 + 4j], np.complex64)], 1.0, 5, [[0.6 + 0.8j]]),
    "all to nan where the norm is not finite": ([np.float32([np.inf]), np.ones(2)], 1.0, np.inf, [np.nan, np.nan]),
}


@pytest.mark.parametrize(("gradients", "max_norm", "norm", "want"), KINDS.values(), ids=KINDS)
def test_gradients_are_clipped(gradients, max_norm, norm, want):
    gradients, transformation = jax.tree.map(jnp.asarray, gradients), est.clip_by_global_norm(max_norm)
    with jax.numpy_dtype_promotion("standard"):
        clipped, state = transformation.update(gradients, transformation.init(gradients))
    assert state.gradient_norm == norm and state.gradient_norm.dtype == jnp.float32
    for got, wanted, given in zip(clipped, want, gradients, strict=True):
        assert got.dtype == given.dtype
        np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=1e-6)


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), True, "1", jnp.ones(())])
def test_refused(max_norm):
    with pytest.raises(ValueError, match="`est.clip_by_global_norm` needs a number larger than 0, or None; got"):
        est.clip_by_global_norm(max_norm)


def test_a_call_as_in_tensorflow_says_what_to_write():
    with pytest.raises(TypeError, match=r"write `est.Optimizer\(optax.chain\(est.clip_by_global_norm\(5.0\), .*got 2"):
        est.clip_by_global_norm([jnp.ones(2)], 5.0)


@pytest.mark.quick
def test_the_log_and_summaries_show_it_beside_the_loss(tmp_path, messages):
    def model_fn(features, labels, mode):
        w = zeros("w", (3,))
        losses = {name: jnp.mean((features @ w - labels * size) ** 2) for name, size in (("a", 1.0), ("b", 2.0))}
        chain = optax.chain(est.clip_by_global_norm(1.0), optax.sgd(0.1))
        train_ops = [est.Optimizer(chain, name=name).minimize(loss) for name, loss in losses.items()]
        return est.EstimatorSpec(mode, loss=losses["a"], train_op=est.group(*train_ops))

    config = est.RunConfig(log_step_count_steps=1, save_summary_steps=1)
    est.Estimator(model_fn, str(tmp_path), config).train(lambda: iter([(X, Y)] * 3), steps=3)
    norm = 2 * np.linalg.norm(X.T @ Y) / len(X)  # of a, whose residuals are the labels in the first step
    first = next(message for message in messages() if message.startswith("loss ="))
    assert f"gradient_norm/a = {norm:.3f}"[:-1] in first and "gradient_norm/b = " in first
    history = est.read_history(str(tmp_path))
    assert [line["step"] for line in history] == [1, 2, 3]
    np.testing.assert_allclose([history[0]["gradient_norm/a"], history[0]["gradient_norm/b"]], [norm, 2 * norm], 1e-5)
