"""The loss scale: exact where nothing overflows, a skipped update where something does, half precision cured."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import make
from testing.model_fns import minimizing, ones, zeros
from testing.towers import FOUR, assert_close, bits, mlp_model_fn, regression, replicate, started

import estimator as est
from replicate import TowerOptimizer, VariableDistribution
from replicate.cross_tower_ops import AllReduce

ROWS = np.ones((8, 3), np.float32) * np.array([0, 1, 2], np.float32)
W = np.array([-0.0, 1.0, 2.0], np.float32)


def with_row(row, value):
    rows = ROWS.copy()
    rows[row, 1] = value
    return rows


def linear(loss_scale, optimizer=optax.adam):
    """The gradient of a tower is the mean of its rows; "seen" is the sum of all it saw."""

    def loss_of(features, labels):
        w = est.get_variable("w", lambda key: jnp.array(W))
        zeros("seen", (3,), trainable=False)
        est.assign_add("seen", features.sum(0))
        return jnp.mean(features @ w)

    return minimizing(loss_of, optimizer(0.1), loss_scale=loss_scale)


def trained(model_fn, *batches):
    model, state = started(model_fn, *(x[0] for x in batches))
    return model.train_loop(state, batches if len(batches) > 1 else (*batches, None))


def scales(model_fn, batches):
    model, state = started(model_fn, batches[0])
    scales = []
    for batch in batches:
        state, _ = model.train_step(state, batch)
        scales.append(float(state.slots["optimizer"].scale))
    return scales


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_loss_scale_changes_no_bit_in_float32():
    """Where an optimizer adds two products, the compiler may fuse either with the sum: that can change the last bit."""

    def run(loss_scale):
        model_fn = mlp_model_fn(est.Optimizer(optax.sgd(0.1, momentum=0.9), loss_scale=loss_scale))
        return trained(replicate(model_fn, 4), *regression(8, steps=3))

    want_state, want = run(None)
    state, spec = run(est.DynamicLossScale(growth_interval=2))
    assert bits(state.variables) == bits(want_state.variables)
    seen, wanted = ((each.loss, each.predictions, each.eval_metric_ops) for each in (spec, want))
    assert bits(seen) == bits(wanted)
    slots = state.slots["optimizer"]
    assert bits(slots.inner) == bits(want_state.slots["optimizer"])
    assert (slots.scale, slots.good_steps) == (2.0**16, 1)


@pytest.mark.quick
@pytest.mark.parametrize("towers, bad_row, value", [(None, 0, np.nan), (8, 5, np.inf)])
@pytest.mark.usefixtures("users_compiler")
def test_an_update_that_is_not_finite_is_skipped(towers, bad_row, value):
    model, state = started(replicate(linear(est.DynamicLossScale(initial_scale=8.0)), towers), ROWS)
    before, _ = model.train_step(state, ROWS)
    before = before._replace(variables={**before.variables, "w": jnp.array(W)})  # with its -0.0
    after, _ = model.train_step(before, with_row(bad_row, value))
    assert bits(after.variables) == bits(before.variables)
    slots, slots_before = after.slots["optimizer"], before.slots["optimizer"]
    assert bits(slots.inner) == bits(slots_before.inner)
    assert (slots_before.scale, slots_before.good_steps) == (8.0, 1)
    assert (slots.scale, slots.good_steps) == (4.0, 0)
    assert after.global_step == 2
    resumed, _ = model.train_step(after, ROWS)
    want, _ = model.train_step(before, ROWS)
    assert bits(resumed.variables) == bits(want.variables)


@pytest.mark.quick
@pytest.mark.parametrize("where", [*list(VariableDistribution)[1:], "compressed"])
def test_wherever_the_variables_live(where):
    def run(**where):
        model_fn = linear(est.DynamicLossScale(initial_scale=8.0), optax.sgd)
        state, spec = trained(replicate(model_fn, 4, **where), np.stack([ROWS, with_row(5, np.inf), ROWS]))
        return state.variables, state.slots, spec.loss[::2]

    compressed = {"cross_tower_ops": AllReduce("recursive_halving_doubling", compress_dtype=jnp.bfloat16)}
    got, want = run(**(compressed if where == "compressed" else {"variable_distribution": where})), run()
    assert want[1]["optimizer"].scale == 4.0
    assert_close(got, want)


def test_the_scale_grows_shrinks_and_has_a_floor():
    bad, good = with_row(5, np.inf), ROWS
    loss_scale = est.DynamicLossScale(initial_scale=4.0, growth_interval=2, min_scale=2.0)
    batches = [good, good, good, bad, good, good, bad, bad, bad, good, good]
    assert scales(linear(loss_scale), batches) == [4, 8, 8, 4, 4, 8, 4, 2, 2, 2, 4]


def test_the_factor_is_the_users_and_the_scale_stays_finite():
    loss_scale = est.DynamicLossScale(initial_scale=2.0**126, growth_interval=1, factor=4.0)
    small = ROWS / 8
    assert scales(linear(loss_scale), [small, with_row(0, np.nan), small]) == [2.0**126, 2.0**124, 2.0**126]


@pytest.mark.quick
def test_compute_gradients_are_unscaled():
    def model_fn(features, labels, mode):
        w = est.get_variable("w", lambda key: jnp.array(W))
        loss = jnp.mean(features @ w)
        optimizer = TowerOptimizer(optax.sgd(1.0), loss_scale=est.DynamicLossScale())
        pairs = optimizer.compute_gradients(loss)
        mine = jnp.broadcast_to(pairs[0][0], features.shape)
        return est.EstimatorSpec(mode, mine, loss, optimizer.apply_gradients(pairs))

    model, state = started(replicate(model_fn, 8), ROWS)
    state, spec = model.train_step(state, ROWS)
    np.testing.assert_array_equal(spec.predictions, ROWS / 8)
    np.testing.assert_array_equal(state.variables["w"], W - ROWS[0])
    assert state.slots["optimizer"].good_steps == 1
    # There is no scale in evaluation, and none is needed.
    np.testing.assert_array_equal(model.eval_step(state, ROWS).predictions, ROWS / 8)


def test_optimizers_that_all_compute_before_they_apply_have_their_own_scales():
    """The backward pass overflows in float16 with either scale, of which each shrinks until its own fits."""

    def model_fn(features, labels, mode):
        a, b = ones("a"), ones("b")
        half = features.astype(jnp.float16)
        optimizers = [TowerOptimizer(optax.sgd(0.0), loss_scale=est.DynamicLossScale(2.0**18)) for _ in "ab"]
        losses = [jnp.mean(a.astype(jnp.float16) * half, dtype=jnp.float32) * 4.0, b * features.mean()]
        pairs = [o.compute_gradients(x, [n]) for o, x, n in zip(optimizers, losses, "ab", strict=True)]
        # Applied in the other order: an entry stays with its optimizer.
        ops = [o.apply_gradients(p) for o, p in zip(optimizers[::-1], pairs[::-1], strict=True)]
        return est.EstimatorSpec(mode, loss=losses[0], train_op=est.group(*ops))

    state, _ = trained(replicate(model_fn, 2), np.ones((8, 8), np.float32))
    slots = state.slots
    assert slots["optimizer"].scale < 2.0**18 and slots["optimizer"].good_steps > 0
    assert (slots["optimizer_1"].scale, slots["optimizer_1"].good_steps) == (2.0**18, 8)


@pytest.mark.parametrize("scale_of_b", [None, est.DynamicLossScale()])
def test_a_gradient_with_a_loss_scale_is_applied_by_its_optimizer_alone(scale_of_b):
    """Another one would not skip what has overflowed, and an optimizer that applies nothing scales nothing."""

    def model_fn(features, labels, mode):
        loss = jnp.mean(features * est.get_variable("w", ()))
        a = TowerOptimizer(optax.sgd(1.0), loss_scale=est.DynamicLossScale())
        b = TowerOptimizer(optax.sgd(1.0), loss_scale=scale_of_b)
        return est.EstimatorSpec(mode, loss=loss, train_op=b.apply_gradients(a.compute_gradients(loss)))

    message = r"`TowerOptimizer.apply_gradients` got gradients for \['w'\] that another optimizer has computed"
    with pytest.raises(ValueError, match=message):
        started(model_fn, ROWS)


def half_precision(dtype, loss_scale):
    def loss_of(features, labels):
        return 1e-8 * jnp.mean(ones("w").astype(dtype) * features.astype(dtype), dtype=jnp.float32)

    return minimizing(loss_of, optax.sgd(1e7), loss_scale=loss_scale)


@pytest.mark.quick
def test_gradients_that_vanish_in_float16_come_through_with_a_scale():
    rows = np.ones((1, 8), np.float32)

    def w(dtype, loss_scale):
        state, _ = trained(replicate(half_precision(dtype, loss_scale), 8), rows)
        assert state.variables["w"].dtype == jnp.float32
        return float(state.variables["w"])

    assert w(jnp.float16, None) == 1.0
    assert w(jnp.float16, est.DynamicLossScale()) == pytest.approx(0.9, abs=1e-3)
    assert w(jnp.bfloat16, None) == pytest.approx(0.9, abs=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_sum_over_towers_is_in_float32(dtype):
    model, state = started(replicate(half_precision(dtype, est.DynamicLossScale()), 4), FOUR)
    program = jax.jit(model.train_step).lower(state, FOUR).as_text("hlo")
    assert {"f16", "bf16"} & set(re.findall(r"= (\w+)\[", program))
    assert set(re.findall(r"= (\w+)\[.*? all-reduce\(", program)) == {"f32"}


def test_a_scale_beyond_float16_unscales_variables_in_float16():
    def loss_of(features, labels):
        return jnp.mean(ones("w", dtype=jnp.float16).astype(jnp.float32) * features) / 1024

    model_fn = minimizing(loss_of, optax.sgd(1.0), loss_scale=est.DynamicLossScale(2.0**17))
    state, _ = trained(model_fn, np.ones((1, 4), np.float32))
    assert state.variables["w"] == 1 - 2.0**-10


def test_slots_are_listed_under_the_scale():
    seen = []

    def model_fn(features, labels, mode):
        w = est.get_variable("w", lambda key: jnp.array(W))
        loss = jnp.mean(features @ w)
        optimizer = TowerOptimizer(optax.adam(0.1), loss_scale=est.DynamicLossScale())
        train_op = optimizer.minimize(loss)
        seen.append((optimizer.get_slot_names(), len(optimizer.variables())))
        mu = jnp.broadcast_to(optimizer.get_slot("w", "mu"), features.shape)
        return est.EstimatorSpec(mode, mu, loss, train_op)

    state, spec = trained(replicate(model_fn, 2), np.stack([ROWS, ROWS]))
    np.testing.assert_allclose(spec.predictions[1], 0.1 * ROWS, rtol=1e-6)
    assert all(entry == (["mu", "nu"], 5) for entry in seen)


@pytest.mark.slow
def test_a_checkpoint_holds_the_scale(tmp_path):
    model_fn = linear(est.DynamicLossScale(initial_scale=64.0, growth_interval=2))
    batches = [ROWS, with_row(5, np.inf), ROWS, ROWS, ROWS]
    for towers, part in ((8, batches[:3]), (2, batches[3:])):
        estimator = make(tmp_path, replicate(model_fn, towers)).train(lambda part=part: part)
    values = [estimator.get_variable_value(f"optimizer/{name}") for name in ("scale", "good_steps", "inner/0/mu/w")]
    state, _ = trained(model_fn, np.stack(batches))
    slots = state.slots["optimizer"]
    assert values[:2] == [slots.scale, slots.good_steps] == [64, 1]
    np.testing.assert_allclose(values[2], slots.inner[0].mu["w"], rtol=1e-6)
    assert np.isfinite(estimator.evaluate(lambda: [ROWS])["loss"])  # which knows no scale


def test_an_optimizer_keeps_its_scale_when_it_is_wrapped():
    loss_scale = est.DynamicLossScale(2.0)
    wrapped = est.Optimizer(optax.sgd(0.1), loss_scale=loss_scale)
    assert TowerOptimizer(wrapped).loss_scale is loss_scale
    assert TowerOptimizer(est.Optimizer(optax.sgd(0.1)), loss_scale=loss_scale).loss_scale is loss_scale
    with pytest.raises(ValueError, match=r"`TowerOptimizer` got loss_scale=.* that has .* already\. Give it once\."):
        TowerOptimizer(wrapped, loss_scale=loss_scale)


@pytest.mark.parametrize("optimizer", [est.Optimizer, TowerOptimizer])
def test_a_number_as_a_loss_scale(optimizer):
    message = (
        rf"`{optimizer.__name__}` takes a loss_scale such as `est\.DynamicLossScale\(\)`; got 128\.0\. "
        r"Give a number as `est\.DynamicLossScale\(initial_scale=\.\.\.\)`\."
    )
    with pytest.raises(TypeError, match=message):
        optimizer(optax.sgd(0.1), loss_scale=128.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"initial_scale": 0.5}, r"needs 0 < min_scale <= initial_scale, .* got min_scale=1\.0 and initial_scale=0\.5"),
        ({"initial_scale": 1e39}, r"must be finite in float32; got min_scale=1\.0 and initial_scale=1e\+39"),
        ({"min_scale": 0.0}, r"needs 0 < min_scale <= initial_scale, .* got min_scale=0\.0"),
        ({"factor": 1.0}, r"needs a finite factor > 1, such as 2\.0; got 1\.0"),
        ({"growth_interval": 0}, r"needs growth_interval, a number of steps, to be an int >= 1; got 0"),
        ({"growth_interval": 2.5}, r"to be an int >= 1; got 2\.5"),
    ],
)
def test_numbers_out_of_range(arguments, message):
    with pytest.raises(ValueError, match="`DynamicLossScale` " + message if message.startswith("needs") else message):
        est.DynamicLossScale(**arguments)
