"""Gradients that are inf or NaN in a tower: named by step, tower and variable, or skipped and counted."""

import contextlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import make
from testing.model_fns import minimizing, ones, zeros
from testing.towers import assert_close, bits, cpus

import estimator as est
from estimator.optim import _finite
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn
from replicate.cross_tower_ops import AllReduce

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3) / 8
W = np.array([-0.0, 1.0, 2.0], np.float32)
WHERE = [{"variable_distribution": each} for each in list(VariableDistribution)[1:]]
WHERE += [{"cross_tower_ops": AllReduce("ring")}]
COUNTERS = ("skipped", "first_step", "tower", "variable")


def with_row(row, value):
    rows = ROWS.copy()
    rows[row, 1] = value
    return rows


def model_fn(features, labels, mode, loss_scale=None, parts=1):
    """The gradient of "w" is the mean of the rows, the one of "b" is always 1."""
    b, w = ones("b"), est.get_variable("w", lambda key: jnp.array(W))
    zeros("seen", (3,), trainable=False), zeros("last", trainable=False)
    est.assign_add("seen", features.sum(0))
    est.assign("last", features.max())
    loss = jnp.mean(features @ w) + b
    optimizer = TowerOptimizer(optax.adam(0.1), accumulate_steps=parts, loss_scale=loss_scale)
    return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))


def replicate(towers, on_nan, fn=model_fn, **where):
    return replicate_model_fn(fn, devices=cpus(towers), on_nan=on_nan, **where)


def started(towers, on_nan, fn=model_fn, **where):
    model = est.transform(replicate(towers, on_nan, fn, **where))
    return model, model.init(jax.random.key(0), ROWS)


def message(variable, tower, step):
    return (
        rf"Non-finite gradient of the variable '{variable}' in tower {tower}, at step {step}\. That step changed "
        r"nothing\. Look for a division by zero, .*; on_nan=\"skip\" skips such steps and continues"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_skipped_step_changes_no_bit():
    model, state = started(8, "skip")
    before, spec = model.train_step(state, ROWS)
    assert not spec.train_op.skipped and est.skipped_steps(before) == 0
    before = before._replace(variables={**before.variables, "w": jnp.array(W)})  # with its -0.0
    after, spec = model.train_step(before, with_row(5, np.inf))
    assert spec.train_op.skipped and not np.isfinite(spec.loss)
    assert bits(after.variables) == bits(before.variables)
    assert bits(after.slots["optimizer"]) == bits(before.slots["optimizer"])
    assert tuple(map(int, after.slots["on_nan"])) == (1, 2, 5, sorted(after.variables).index("w"))
    assert est.skipped_steps(after) == 1
    assert after.global_step == 2
    again, _ = model.train_step(after, with_row(0, np.nan))
    assert tuple(map(int, again.slots["on_nan"]))[:3] == (2, 2, 5)
    resumed, _ = model.train_step(after, ROWS)
    assert bits(resumed.variables) == bits(model.train_step(before, ROWS)[0].variables)


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.usefixtures("users_compiler")
def test_a_loop_skips_its_bad_steps_alone_wherever_the_variables_live(where):
    model, state = started(4, "skip", **where)
    after = state
    for bad in (with_row(5, np.inf), with_row(2, np.nan)):
        after, spec = model.train_loop(after, (np.stack([ROWS, bad]), None))
        np.testing.assert_array_equal(spec.train_op.skipped, [False, True])
    want, _ = model.train_loop(state, (np.stack([ROWS, ROWS]), None))
    assert bits(after.variables) == bits(want.variables)
    assert bits(after.slots["optimizer"]) == bits(want.slots["optimizer"])
    assert tuple(map(int, after.slots["on_nan"])) == (2, 2, 2, sorted(after.variables).index("w"))


@pytest.mark.slow
def test_raise_names_step_tower_and_variable():
    model, state = started(8, "raise")
    state, _ = model.train_step(state, ROWS)
    state, _ = model.train_step(state, ROWS)
    with pytest.raises(est.NonFiniteGradientError, match=message("w", 5, 3)):
        model.train_step(state, with_row(5, np.inf))
    batches = np.stack([ROWS, with_row(5, np.nan), with_row(0, np.nan)])
    with pytest.raises(est.NonFiniteGradientError, match=message("w", 5, 4)):
        model.train_loop(state, (batches, None))
    state, _ = model.train_step(state, ROWS)
    assert state.global_step == 3 and est.skipped_steps(state) == 0


def test_raise_passes_over_what_an_earlier_run_has_skipped():
    model, state = started(2, "skip")
    state, _ = model.train_step(state, with_row(0, np.nan))
    model, _ = started(2, "raise")
    state, _ = model.train_step(state, ROWS)
    assert est.skipped_steps(state) == 1
    with pytest.raises(est.NonFiniteGradientError, match=message("w", 1, 3)):
        model.train_step(state, with_row(7, np.nan))


def test_under_an_outer_jit_raise_skips_and_leaves_the_check_to_the_caller():
    model, state = started(2, "raise")
    after, _ = jax.jit(model.train_step)(state, with_row(7, np.nan))
    assert bits(after.variables) == bits(state.variables)
    assert tuple(map(int, after.slots["on_nan"]))[:3] == (1, 1, 1)


def test_the_first_tower_and_its_first_variable_are_named():
    fn = minimizing(lambda x, y: jnp.mean(ones("b") * x[:, 1] + ones("a") * x[:, 0]))
    rows = ROWS.copy()
    rows[4, 1] = rows[6, 0] = rows[6, 1] = np.nan
    model, state = started(4, "raise", fn)
    with pytest.raises(est.NonFiniteGradientError, match=message("b", 2, 1)):
        model.train_step(state, rows)
    rows[4, 0] = np.nan
    with pytest.raises(est.NonFiniteGradientError, match=message("a", 2, 1)):
        model.train_step(state, rows)


@pytest.mark.quick
def test_one_of_several_optimizers_is_enough():
    def fn(features, labels, mode):
        good, bad = jnp.mean(ones("a") * features[:, 0]), jnp.mean(ones("b") * features[:, 1])
        ops = [TowerOptimizer(optax.adam(0.1)).minimize(loss, [n]) for loss, n in ((good, "a"), (bad, "b"))]
        return est.EstimatorSpec(mode, loss=good, train_op=est.group(*ops))

    model, state = started(4, "skip", fn)
    after, spec = model.train_step(state, with_row(7, np.inf))
    assert np.isfinite(spec.loss) and spec.train_op.skipped
    assert bits(after.variables) == bits(state.variables)
    for name in ("optimizer", "optimizer_1"):
        assert bits(after.slots[name]) == bits(state.slots[name])
    assert sorted(after.variables)[after.slots["on_nan"].variable] == "b"


@pytest.mark.quick
@pytest.mark.parametrize("towers", [1, 8])
def test_what_is_summed_counts_and_not_what_was_computed(towers):
    def fn(features, labels, mode, cure=False):
        w = est.get_variable("w", lambda key: jnp.array(W))
        loss = jnp.mean(features @ w)
        optimizer = TowerOptimizer(optax.sgd(0.5))
        pairs = [(jnp.nan_to_num(g, nan=4.0) if cure else g, name) for g, name in optimizer.compute_gradients(loss)]
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))

    model, state = started(towers, "raise", fn)
    with pytest.raises(est.NonFiniteGradientError, match=message("w", 5 if towers == 8 else 0, 1)):
        model.train_step(state, with_row(5, np.nan))
    cured = lambda features, labels, mode: fn(features, labels, mode, cure=True)  # noqa: E731
    model, state = started(towers, "raise", cured)
    after, _ = model.train_step(state, with_row(5, np.nan))
    assert after.variables["w"][1] != state.variables["w"][1]


def test_gradients_of_a_train_op_that_is_left_out_do_not_count():
    def fn(features, labels, mode):
        loss = jnp.mean(features @ est.get_variable("w", lambda key: jnp.array(W)))
        optimizer, other = TowerOptimizer(optax.sgd(0.5)), TowerOptimizer(optax.sgd(0.5))
        pairs = optimizer.compute_gradients(loss)
        other.apply_gradients([(jnp.nan * g, name) for g, name in pairs])
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))

    model, state = started(2, "raise", fn)
    after, spec = model.train_step(state, ROWS)
    assert not spec.train_op.skipped
    assert_close(after.variables["w"], W - 0.5 * ROWS.mean(0))


def test_a_wrapper_around_the_replicated_model_fn_is_kept_out_too():
    """Its optimizer acts once, outside of the towers, in the same step."""
    inner = replicate(2, "skip")

    def fn(features, labels, mode):
        mine = est.Optimizer(optax.adam(0.5), name="on_nan_too").minimize(ones("extra") ** 2, ["extra"])
        spec = inner(features, labels, mode)
        return spec._replace(train_op=est.group(mine, spec.train_op))

    model = est.transform(fn)
    state = model.init(jax.random.key(0), ROWS)
    after, _ = model.train_step(state, with_row(5, np.nan))
    assert bits(after.variables) == bits(state.variables)
    assert bits(after.slots["on_nan_too"]) == bits(state.slots["on_nan_too"])
    assert est.skipped_steps(after) == 1
    assert model.train_step(after, ROWS)[0].variables["extra"] < 0.51


@pytest.mark.quick
def test_a_loss_scale_shrinks_in_a_skipped_step():
    """With micro-batches too: what a tower gives to the sum is the sum of theirs."""

    def fn(features, labels, mode):
        return model_fn(features, labels, mode, est.DynamicLossScale(8.0), parts=4)

    model, state = started(2, "skip", fn)
    state, _ = model.train_step(state, ROWS)
    plain, start = started(1, None)
    assert_close(state.variables["w"], plain.train_step(start, ROWS)[0].variables["w"])
    after, _ = model.train_step(state, with_row(5, np.inf))
    assert after.slots["on_nan"].tower == 1
    assert bits(after.variables) == bits(state.variables)
    assert bits(after.slots["optimizer"].inner) == bits(state.slots["optimizer"].inner)
    assert (after.slots["optimizer"].scale, after.slots["optimizer"].good_steps) == (4.0, 0)
    assert est.skipped_steps(after) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_sparse_gradients_are_looked_at_and_unscaled_as_dense_ones():
    def loss_of(features, labels):
        rows = est.embedding_lookup("table", jnp.arange(len(features)), (9, 3), initializer=jax.nn.initializers.ones)
        return jnp.mean(rows * features)

    fn = minimizing(loss_of, optax.sgd(0.1, momentum=0.9))
    scaled = minimizing(loss_of, optax.sgd(0.1, momentum=0.9), loss_scale=est.DynamicLossScale(8.0))
    batches = np.stack([ROWS, with_row(5, np.inf), ROWS])
    plain, start = started(4, None, fn)
    want, _ = plain.train_loop(start, (np.stack([ROWS, ROWS]), None))
    for candidate in (fn, scaled):
        model, state = started(4, "skip", candidate)
        got, _ = model.train_loop(state, (batches, None))
        assert tuple(map(int, got.slots["on_nan"])) == (1, 2, 2, 0)
        assert bits(got.variables) == bits(want.variables)
    assert got.slots["optimizer"].scale == 4.0


@pytest.mark.parametrize("shape", [(8,), (2048,), (1, 2048), (3, 3, 33, 5)])
def test_all_finite_sees_each_element_and_takes_none_for_an_inf(shape):
    all_finite = jax.jit(_finite.all_finite)
    x = np.linspace(-1, 1, np.prod(shape), dtype=np.float32)
    for scale in np.float32([1, np.finfo(np.float32).max, np.finfo(np.float32).tiny]):
        assert all_finite((x * scale).reshape(shape))
    for position, value in itertools.product((0, 1, x.size // 2, x.size - 1), (np.nan, np.inf, -np.inf)):
        bad = x.copy()
        bad[position] = value
        assert not all_finite(bad.reshape(shape))
    assert not all_finite(np.append(np.float32([np.inf, -np.inf]), x[2:]).reshape(shape))


def operations(on_nan):
    model, state = started(4, on_nan)
    text = jax.jit(model.train_step).lower(state, ROWS).compile().as_text()
    return len(re.findall(r" all-reduce(?:-start)?\(", text)), text.count("is-finite")


@pytest.mark.quick
def test_nothing_is_looked_for_unless_it_is_asked_for():
    (sums, looks), (sums_watched, looks_watched) = operations(None), operations("skip")
    assert looks == 0 < looks_watched
    assert sums_watched == sums == 1, "The flags go with the gradients."


def train(tmp_path, on_nan, batches, towers=8, **config):
    return make(tmp_path, replicate(towers, on_nan), **config).train(lambda: batches)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_steps")
def test_skipping_continues_and_is_logged_once_per_look(tmp_path, messages):
    batches = [with_row(5, np.nan) if i in (4, 5, 7) else ROWS for i in range(12)]
    estimator = train(tmp_path, "skip", batches, log_step_count_steps=6, steps_per_loop=3)
    skips = [line for line in messages() if "non-finite" in line]
    place = "the first was of the variable 'w' in tower 5, at step 5."
    assert skips == [
        f"Skipped 2 steps with non-finite gradients, 2 in all; {place}",
        f"Skipped 1 steps with non-finite gradients, 3 in all; {place}",
    ]
    assert [estimator.get_variable_value(f"on_nan/{name}") for name in COUNTERS][:3] == [3, 5, 5]
    model, state = started(8, None)
    want, _ = model.train_loop(state, (np.stack([ROWS] * 9), None))
    np.testing.assert_allclose(estimator.get_variable_value("w"), want.variables["w"], rtol=1e-6)
    assert np.isfinite(estimator.evaluate(lambda: [ROWS])["loss"])


def test_raise_in_an_estimator_comes_before_the_loss_and_saves_nothing(tmp_path):
    batches = [with_row(5, np.nan) if i >= 3 else ROWS for i in range(8)]
    with pytest.raises(est.NonFiniteGradientError, match=message("w", 5, 4)):
        train(tmp_path, "raise", batches, save_checkpoints_steps=2)
    assert int(make(tmp_path, replicate(8, "raise")).get_variable_value("global_step")) == 2


def test_a_loss_that_is_nan_with_finite_gradients_still_stops(tmp_path):
    def fn(features, labels, mode):
        spec = model_fn(features, labels, mode)
        return spec._replace(loss=spec.loss + jax.lax.stop_gradient(jnp.log(features[0, 0] - 1)))

    estimator = make(tmp_path, replicate(1, "skip", fn))
    with pytest.raises(est.NanLossDuringTrainingError, match="NaN loss during training, at step 1"):
        estimator.train(lambda: [ROWS])


@pytest.mark.slow
def test_on_nan_can_be_switched_on_and_off_in_one_model_dir(tmp_path):
    """By any number of towers: the count lives in the checkpoint, and stays there as long as it is looked after."""
    bad = [with_row(5, np.nan)]
    train(tmp_path, None, [ROWS], towers=2)
    estimator = train(tmp_path, "skip", bad, towers=8)
    assert [int(estimator.get_variable_value(f"on_nan/{name}")) for name in COUNTERS][:3] == [1, 2, 5]
    with pytest.raises(est.NonFiniteGradientError, match=message("w", 2, 4)):
        train(tmp_path, "raise", [ROWS, *bad], towers=4)
    estimator = train(tmp_path, None, [ROWS], towers=1)
    assert "on_nan/skipped" not in estimator.get_variable_names()


@pytest.mark.parametrize("on_nan", ["foo", True, "", 0])
def test_an_unknown_on_nan(on_nan):
    with pytest.raises(ValueError, match=re.escape(f'on_nan must be None, "raise" or "skip"; got {on_nan!r}.')):
        replicate(2, on_nan)


@pytest.mark.parametrize("dtype, fits", [(jnp.float16, False), (jnp.float8_e4m3fn, False), (jnp.bfloat16, True)])
def test_sums_in_a_dtype_that_overflows_are_refused(dtype, fits):
    given = f"sums gradients in {jnp.dtype(dtype)}.* but their sum"
    error = pytest.raises(ValueError, match=f"on_nan='skip' was given with a cross_tower_ops that {given}")
    with contextlib.nullcontext() if fits else error:
        replicate(2, "skip", cross_tower_ops=AllReduce(compress_dtype=dtype))


def test_a_state_that_does_not_count():
    _, state = started(1, None)
    expected = r"The state does not count skipped steps; its slots are \['optimizer'\]\. Initialize it in mode 'train'"
    with pytest.raises(ValueError, match=expected):
        est.skipped_steps(state)
    for on_nan in ("skip", "raise"):
        with pytest.raises(ValueError, match=expected):
            started(1, on_nan)[0].train_step(state, ROWS)


def test_an_optimizer_of_the_same_name():
    fn = minimizing(lambda x, y: jnp.mean(x @ ones("w", (3,))), optax.adam(0.1), name="on_nan")
    _, state = started(2, "skip", fn)
    assert sorted(state.slots) == ["on_nan", "on_nan_1"]
    assert sorted(started(2, None, fn)[1].slots) == ["on_nan"]

    def around(features, labels, mode):
        est.Optimizer(optax.sgd(0.1), "on_nan").minimize(ones("x"))
        return replicate(2, "skip")(features, labels, mode)

    with pytest.raises(ValueError, match="An optimizer must not be named 'on_nan' where on_nan is set"):
        est.transform(around).init(jax.random.key(0), ROWS)
