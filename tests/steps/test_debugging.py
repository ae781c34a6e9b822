"""Looking into a model_fn: prints, towers on one device, no jit, tracebacks, the search for NaN."""

import collections
import contextlib
import functools
import sys
import tempfile
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from testing.estimators import make, saved_steps
from testing.model_fns import ones, zeros
from testing.towers import assert_close, one_step, replicate, started

import estimator as est
from replicate import TowerOptimizer, num_towers, replicate_model_fn, tower_index

X = np.arange(8, dtype=np.float32).reshape(8, 1)
Y = X[:, 0]


def linear_model_fn(look):
    """y = x w; calls `look(features, loss)`, and takes the loss that it returns."""

    def model_fn(features, mode, labels=None):
        output = features @ ones("w", (1,))
        if mode == est.ModeKeys.PREDICT:
            look(features, output.sum())
            return est.EstimatorSpec(mode, output)
        loss = look(features, jnp.mean((output - 2.0 * labels) ** 2))
        train_op = TowerOptimizer(optax.sgd(0.01)).minimize(loss)
        return est.EstimatorSpec(mode, output, loss, train_op)

    return model_fn


# Prints.


@pytest.mark.slow
def test_a_debug_print_prints_once_per_tower(capfd):
    def look(features, loss):
        jax.debug.print("tower {} of {}: {}", tower_index(), num_towers(), features.sum())
        return loss

    def printed():
        jax.effects_barrier()
        return sorted(capfd.readouterr().out.splitlines())

    model, state = started(replicate(linear_model_fn(look), 2), X, Y)
    printed()
    expected = [f"tower {i} of 2: {total}" for i, total in enumerate(X.reshape(2, -1).sum(1))]
    state, _ = model.train_step(state, X, Y)
    assert printed() == expected
    model.train_loop(state, [(X, Y)] * 2)
    assert printed() == sorted(expected * 2)
    model.eval_step(state, X, Y)
    assert printed() == expected
    model.predict_step(state, X)
    assert printed() == expected


# Towers on one device, and no jit.


def on_one_device(model_fn):
    return replicate_model_fn(model_fn, devices=["cpu:0"] * 2)


def everything_model_fn(features, labels, mode):
    """Random keys, written variables, a metric."""
    w = ones("w", (1,))
    zeros("mean", trainable=False), zeros("first", trainable=False, aggregation="only_first_tower")
    est.get_variable("rows", initializer=np.int32(0), trainable=False)
    est.assign("mean", 0.9 * est.read_variable("mean") + 0.1 * features.mean())
    est.assign("first", features[0, 0])
    est.assign_add("rows", features.shape[0])
    output = (features + jax.random.uniform(est.make_rng())) @ w
    loss = jnp.mean((output - labels) ** 2)
    train_op = TowerOptimizer(optax.sgd(0.01, momentum=0.9)).minimize(loss)
    return est.EstimatorSpec(mode, output, loss, train_op, {"mean": est.metrics.mean(output)})


def all_numbers(model_fn):
    """What a training step, and an evaluation of a batch that does not divide by two towers, compute."""
    model, state = started(model_fn, X, Y)
    state, trained = model.train_step(state, X, Y)
    specs = trained, model.eval_step(state, X[:7], Y[:7])
    return [(spec.loss, spec.predictions, spec.eval_metric_ops["mean"]) for spec in specs], state[:3]


@functools.cache
def numbers_of_two_towers():
    return all_numbers(replicate(everything_model_fn, 2))


@pytest.mark.slow
@pytest.mark.parametrize("disable_jit", [False, True])
def test_towers_on_one_device_give_the_same_numbers(disable_jit):
    want = numbers_of_two_towers()
    with jax.disable_jit(disable_jit):
        got = all_numbers(on_one_device(everything_model_fn))
    assert_close(got, want)


@pytest.mark.slow
@pytest.mark.covers("1.3 eager/graph", "13 21 graph mode only")
def test_without_jit_the_real_pmap_gives_the_same_numbers():
    (trained, _), want = numbers_of_two_towers()
    with jax.disable_jit():
        state, spec = one_step(replicate(everything_model_fn, 2), X, Y)
    assert_close((state[:3], spec.loss, spec.predictions), (want, *trained[:2]))


@pytest.mark.slow
def test_towers_on_one_device_call_back_with_the_values_of_every_tower():
    seen = []

    def look(features, loss):
        jax.debug.callback(lambda i, x: seen.append((int(i), float(x))), tower_index(), features.sum())
        return loss

    with jax.disable_jit():
        model, state = started(on_one_device(linear_model_fn(look)), X, Y)
        seen.clear()
        model.train_step(state, X, Y)
        jax.effects_barrier()
    assert sorted(seen) == [(0, 6.0), (1, 22.0)]


@pytest.mark.slow
def test_without_jit_a_breakpoint_sees_values(monkeypatch, tmp_path):
    """In every run of the model_fn, the first one included, of one device."""
    stops = []

    def stop():
        names = sys._getframe(1).f_locals
        stops.append((np.asarray(names["features"]).sum(), names["value"]))

    def look(features, loss):
        value = float(jax.lax.stop_gradient(loss))  # as jax has it, what is differentiated is no float
        if value > 1.0:
            breakpoint()
        return loss

    monkeypatch.setattr(sys, "breakpointhook", stop)
    model_fn = replicate(linear_model_fn(look), 1)
    model = est.transform(model_fn)
    with jax.disable_jit():
        state = model.init(jax.random.key(0), X, Y)
        model.train_step(state, X, Y)
        model.train_loop(state, [(X, Y)] * 2)
        model.eval_step(state, X, Y)
        model.predict_step(state, X)
        make(tmp_path, model_fn).train(lambda: [(X, Y)] * 2)
    assert len(stops) >= 9
    assert {total for total, _ in stops} == {28.0}
    assert {17.5, 28.0} < {loss for _, loss in stops}


# The settings of jax.

CONTEXTS = {
    "set_mesh": lambda: jax.set_mesh(jax.make_mesh((4,), ("data",))),
    "set_mesh_of_two_axes": lambda: jax.set_mesh(
        jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    ),
    "use_abstract_mesh": lambda: jax.sharding.use_abstract_mesh(jax.make_mesh((4,), ("data",)).abstract_mesh),
    "checking_leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "default_device": lambda: jax.default_device(jax.devices()[1]),
    "default_matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "default_prng_impl": lambda: jax.default_prng_impl("rbg"),
    "legacy_prng_key": lambda: jax.legacy_prng_key("error"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "array_garbage_collection_guard": lambda: jax.array_garbage_collection_guard("log"),
    "named_scope": lambda: jax.named_scope("mine"),
}
VALUES = {
    "jax_transfer_guard": "disallow", "jax_traceback_filtering": "off",
    "jax_check_static_indices": True, "jax_use_direct_linearize": False, "jax_use_shardy_partitioner": False,
    "jax_enable_compilation_cache": False,
    "jax_disallow_mesh_context_manager": True, "jax_pallas_enable_debug_checks": True,
}  # fmt: skip
# Nothing here looks at these: they hold together.
TOGETHER = """log_compiles explain_cache_misses softmax_custom_jvp allow_f16_reductions auto_pcast named_scope
    default_matmul_precision array_garbage_collection_guard jax_check_static_indices jax_use_direct_linearize
    jax_pallas_enable_debug_checks jax_traceback_filtering jax_enable_compilation_cache jax_use_shardy_partitioner
    threefry_partitionable"""
# These raise an error where what they look for is done: together, too.
GUARDS = """checking_leaks legacy_prng_key numpy_dtype_promotion numpy_rank_promotion enable_checks debug_key_reuse
    thread_guard jax_transfer_guard jax_disallow_mesh_context_manager"""
SETTINGS = [  # towers, and what holds together: of CONTEXTS, of VALUES, or switches of jax
    (4, "set_mesh remove_size_one_mesh_axis_from_type"),
    (4, "set_mesh_of_two_axes"),
    (4, "use_abstract_mesh"),
    (4, "transfer_guard default_device"),
    (1, "set_mesh transfer_guard default_device remove_size_one_mesh_axis_from_type"),
    (4, "debug_nans debug_infs"),
    (1, "disable_jit"),
    (4, "enable_x64 enable_custom_prng default_prng_impl"),
    (4, TOGETHER),
    (4, GUARDS),
]


@contextlib.contextmanager
def value_of_config(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def under(name):
    if name in VALUES:
        return value_of_config(name, VALUES[name])
    return CONTEXTS[name]() if name in CONTEXTS else getattr(jax, name)(not getattr(jax.config, f"jax_{name}"))


@functools.cache
def numbers(towers, *names):
    """What an Estimator computes under settings."""

    def look(features, loss):
        return loss * jax.random.uniform(est.make_rng(), (), loss.dtype, 1.0, 1.001)

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(under(name))
        estimator = make(folder, replicate(linear_model_fn(look), towers))
        estimator.train(lambda: [(X, Y)] * 3)
        return [estimator.evaluate(lambda: [(X, Y)])["loss"], *estimator.predict(lambda: X)]


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "names"), SETTINGS)
def test_an_estimator_works_under_each_setting_of_jax(towers, names):
    np.testing.assert_allclose(numbers(towers, *names.split()), numbers(4), rtol=1e-3)


# Errors.


class Mine(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, code, *, reason):
        super().__init__(reason)
        self.code = code


def frames_of_this_file(error):
    return [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]


def use(model_fn, how, tmp_path):
    if how == "Estimator.train":
        make(tmp_path, model_fn).train(lambda: [(X, Y)] * 3)
    else:
        model, state = started(model_fn, X, Y)
        model.train_step(state, X, Y) if how == "train_step" else model.eval_step(state, X, Y)


@pytest.mark.quick
@pytest.mark.parametrize("filtering", ["auto", "remove_frames"])
def test_an_error_in_the_towers_shows_the_users_line(filtering, tmp_path):
    errors = collections.deque([Mine(3, reason="mine"), TypeError("mine"), Mine(4, reason="mine")])

    def look(features, loss):
        if num_towers() == 2:
            raise errors[0]
        return loss

    for how in ("train_step", "eval_step", "Estimator.train"):
        filtered = value_of_config("jax_traceback_filtering", filtering)
        with filtered, pytest.raises(type(errors[0]), match="^mine") as raised:
            use(replicate(linear_model_fn(look), 2), how, tmp_path)
        assert raised.value is errors.popleft()
        assert frames_of_this_file(raised.value)[-2:] == [
            "loss = look(features, jnp.mean((output - 2.0 * labels) ** 2))",
            "raise errors[0]",
        ]


@pytest.mark.parametrize(("towers", "how"), [(1, "Estimator.train"), (2, "train_step")])
def test_an_error_of_jax_shows_the_users_line(towers, how, tmp_path):
    def look(features, loss):
        return loss + jnp.sum(features @ jnp.ones((7, 7)))

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as raised:
        use(replicate(linear_model_fn(look), towers), how, tmp_path)
    assert "return loss + jnp.sum(features @ jnp.ones((7, 7)))" in frames_of_this_file(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "how"), [(1, "train_step"), (2, "eval_step")])
def test_debug_nans_shows_the_line_that_makes_a_nan(towers, how, tmp_path):
    def look(features, loss):
        return jnp.log(-1.0 - loss)

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="(?i)invalid value") as raised:
        use(replicate(linear_model_fn(look), towers), how, tmp_path)
    assert "return jnp.log(-1.0 - loss)" in frames_of_this_file(raised.value)


@pytest.mark.slow
def test_debug_nans_finds_a_nan_that_comes_late_in_training(tmp_path):
    def look(features, loss):
        return jnp.where(est.global_step() == 4, jnp.log(-1.0 - loss), loss)

    with jax.debug_nans(True), pytest.raises(FloatingPointError) as raised:
        estimator = make(tmp_path, replicate(linear_model_fn(look), 2), save_checkpoints_steps=2)
        estimator.train(lambda: [(X, Y)] * 9)
    assert any("jnp.log(-1.0 - loss)" in line for line in frames_of_this_file(raised.value))
    assert saved_steps(estimator) == [0, 2, 4]
