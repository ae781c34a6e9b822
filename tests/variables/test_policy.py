"""A policy makes of a model the one that is cast by hand, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import bits, replicate, started

import estimator as est
from replicate import TowerOptimizer

RNG = np.random.default_rng(0)
STEPS, ROWS = 3, 8
PIXELS = RNG.normal(size=(STEPS, ROWS, 6, 6, 1)).astype(np.float32)
IDS = RNG.integers(0, 5, size=(STEPS, ROWS, 2)).astype(np.int32)
LABELS = RNG.integers(0, 3, size=(STEPS, ROWS)).astype(np.int32)
MIXED = {"a": np.ones(2, np.float32), "n": np.arange(2)}
BATCHES = ({"pixels": PIXELS, "ids": IDS}, LABELS)


def spec_of(mode, labels, logits, loss_scale):
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    loss = loss + est.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits).mean()
    onehot = jax.nn.one_hot(labels, 3)
    metrics = {
        "accuracy": est.metrics.accuracy(labels, logits.argmax(-1)),
        "error": est.metrics.mean_squared_error(onehot, logits),
    }
    optimizer = TowerOptimizer(optax.adam(1e-2), loss_scale=loss_scale)
    return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss), eval_metric_ops=metrics)


def make_model_fn(policy):
    """With layers of several kinds and variables of its own: under a policy, or cast by hand."""
    half, loss_scale = jnp.float16, est.DynamicLossScale(2.0**20)

    def under_policy(features, labels, mode):
        x = est.layers.conv2d(features["pixels"], 4, 3, name="conv", activation=jax.nn.relu)
        x = est.layers.batch_normalization(x, name="norm")
        rows = est.layers.embed(features["ids"], 5, 4, scope="words").reshape(-1, 8)
        x = jnp.concatenate([est.layers.flatten(x), rows], -1)
        x = est.layers.layer_norm(x, scope="layer_norm")
        x = est.layers.dense(x, 8, name="dense") * est.get_variable("scale", (8,), initializer=jax.nn.initializers.ones)
        net = est.get_variable("net", lambda key: {"w": jax.random.normal(key, (8, 3))})
        shift = est.get_variable("shift", (3,), dtype=jnp.float32)
        assert x.dtype == net["w"].dtype == half and shift.dtype == jnp.float32
        return spec_of(mode, labels, x @ net["w"] + shift.astype(half), loss_scale)

    def by_hand(features, labels, mode):
        def get(name, shape, initializer=None):
            return est.get_variable(name, shape, initializer=initializer).astype(half)

        zeros = jax.nn.initializers.zeros
        with est.variable_scope("conv"):
            kernel, bias = get("kernel", (3, 3, 1, 4)), get("bias", (4,), zeros)
        x = jax.lax.conv_general_dilated(
            features["pixels"].astype(half), kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = est.layers.batch_normalization(jax.nn.relu(x + bias), name="norm")
        rows = est.layers.embed(features["ids"], 5, 4, scope="words").astype(half).reshape(-1, 8)
        x = jnp.concatenate([est.layers.flatten(x), rows], -1)
        x = est.layers.layer_norm(x, scope="layer_norm")
        with est.variable_scope("dense"):
            x = x @ get("kernel", (x.shape[-1], 8)) + get("bias", (8,), zeros)
        x = x * get("scale", (8,), jax.nn.initializers.ones)
        net = est.get_variable("net", lambda key: {"w": jax.random.normal(key, (8, 3))})
        logits = x @ net["w"].astype(half) + est.get_variable("shift", (3,)).astype(half)
        return spec_of(mode, labels, logits.astype(jnp.float32), loss_scale)

    return est.Policy(half)(under_policy) if policy else by_hand


def train(model_fn):
    model, state = started(model_fn, *jax.tree.map(lambda x: x[0], BATCHES))
    return model.train_loop(state, BATCHES)


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_policy_is_what_casts_by_hand_are():
    state, spec = train(replicate(make_model_fn(policy=True), 2))
    want_state, want = train(replicate(make_model_fn(policy=False), 2))
    assert bits(state.variables) == bits(want_state.variables) and bits(state.slots) == bits(want_state.slots)
    assert bits((spec.loss, spec.eval_metric_ops)) == bits((want.loss, want.eval_metric_ops))
    floats = jax.tree.leaves((state.variables, spec.loss))
    assert {x.dtype for x in floats} == {np.dtype("float32")}
    # Gradients have overflowed at first, and updates are made later.
    assert 0 < state.slots["optimizer"].scale < 2.0**20


@pytest.mark.slow
def test_a_policy_around_towers_is_one_within_each():
    def inner(features, labels, mode):
        logits = est.layers.dense(features, 3, name="logits")
        assert logits.dtype == jnp.bfloat16
        return spec_of(mode, labels, logits, None)

    def run(model_fn):
        batch = PIXELS[0].reshape(ROWS, -1), LABELS[0]
        model, state = started(model_fn, *batch)
        return bits(model.train_step(state, *batch)[0].variables)

    policy = est.Policy("bfloat16")
    assert run(policy(replicate(inner, 2))) == run(replicate(policy(inner), 2))


def predicted(model_fn):
    x = np.ones((2, 3), np.float32)
    model, state = started(model_fn, x, mode="infer")
    return model.predict_step(state, x).predictions, state.variables


def test_the_innermost_policy_counts_and_ends_with_its_block():
    def model_fn(features, labels, mode):
        dtypes = []
        for number, policy in enumerate([est.Policy("bfloat16"), est.Policy("float32"), est.Policy("float16")]):
            with policy, est.variable_scope(f"block_{number}"):
                with est.variable_scope("inner") as scope:
                    dtypes.append(est.get_variable("w", (2,)).dtype)
                with est.Policy("float32"), est.variable_scope(scope):
                    dtypes.append(est.get_variable("v", (2,)).dtype)
                with pytest.raises(ZeroDivisionError), est.Policy("float16"):
                    raise ZeroDivisionError
                dtypes.append(est.layers.dropout(features).dtype)
        dtypes += [est.get_variable("w", (2,)).dtype, est.layers.dropout(features).dtype]
        assert [str(dtype) for dtype in dtypes] == [
            *("bfloat16", "float32", "bfloat16", "float32", "float32", "float32", "float16", "float32", "float16"),
            *("float32", "float32"),
        ]
        return est.EstimatorSpec(mode, predictions=features)

    predicted(model_fn)


def test_what_a_policy_leaves_as_it_is():
    @est.Policy("bfloat16")
    def model_fn(features, labels, mode):
        half = est.get_variable("half", (2,), jnp.bfloat16)
        assert half.dtype == jnp.bfloat16 and est.read_variable("half").dtype == jnp.float32
        assert est.get_variable("mean", (2,), trainable=False).dtype == jnp.float32
        assert est.get_variable("n", (2,), jnp.int32).dtype == jnp.int32
        # As of a network of Haiku, whose weights have the dtype of its inputs.
        whole = est.get_variable("whole", lambda key: {"w": jnp.ones(2, jnp.bfloat16)})
        assert whole["w"].dtype == jnp.bfloat16 and est.read_variable("whole")["w"].dtype == jnp.float32
        mixed = est.get_variable("mixed", initializer=MIXED, trainable=False)
        assert [mixed["a"].dtype, mixed["n"].dtype] == [jnp.float32, jnp.int32]
        frozen = est.layers.dense(features, 2, trainable=False)
        table = est.embedding_lookup("table", jnp.arange(2), (5, 2))
        assert frozen.dtype == jnp.bfloat16 and table.dtype == jnp.float32
        assert jax.tree.leaves(est.trainable_variables())[0].dtype == jnp.float32
        return est.EstimatorSpec(mode, predictions=frozen)

    predictions, variables = predicted(model_fn)
    assert predictions.dtype == jnp.bfloat16
    assert {str(x.dtype) for x in jax.tree.leaves(variables)} == {"float32", "int32"}


def test_shared_variables_keep_float32():
    @est.Policy("bfloat16")
    def model_fn(features, labels, mode):
        first = est.layers.dense(features, 3, name="shared")
        return est.EstimatorSpec(mode, predictions=est.layers.dense(first, 3, name="shared", reuse=True))

    assert {str(x.dtype) for x in predicted(model_fn)[1].values()} == {"float32"}


def test_the_gradient_of_an_embedding_stays_sparse():
    @est.Policy("bfloat16")
    def model_fn(features, labels, mode):
        rows = est.layers.embed(features, 100, 2)
        loss = est.losses.mean_squared_error(jnp.ones((2,)), rows.sum(-1))
        optimizer = est.Optimizer(optax.sgd(0.1))
        ((gradient, _),) = optimizer.compute_gradients(loss)
        assert isinstance(gradient, est.IndexedSlices) and gradient.values.dtype == jnp.float32
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients([(gradient, _)]))

    model, state = started(model_fn, np.array([3, 5]))
    after, _ = model.train_step(state, np.array([3, 5]))
    changed = np.asarray(after.variables["EmbedSequence/embeddings"] != state.variables["EmbedSequence/embeddings"])
    assert np.flatnonzero(changed.any(-1)).tolist() == [3, 5]


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float64", jnp.int32, None, 3])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match='`est.Policy` needs "bfloat16", "float16" or "float32"; got '):
        est.Policy(dtype)


def test_a_block_outside_of_a_model_fn_is_refused():
    with pytest.raises(RuntimeError, match="`est.Policy` must be called inside a model_fn"), est.Policy("bfloat16"):
        pass


@pytest.mark.slow
def test_a_canned_estimator_trains_under_a_policy(tmp_path):
    columns = [est.feature_column.numeric_column("x", (3,))]
    canned = est.DNNClassifier([4], columns, tmp_path / "canned")
    estimator = est.Estimator(est.Policy("bfloat16")(canned.model_fn), tmp_path / "model")
    x, y = {"x": np.ones((4, 3), np.float32)}, np.array([0, 1, 1, 1])
    estimator.train(lambda: [(x, y)])
    assert np.isfinite(estimator.evaluate(lambda: [(x, y)])["loss"])
    assert all(
        estimator.get_variable_value(n).dtype == np.float32 for n in estimator.get_variable_names() if "kernel" in n
    )
