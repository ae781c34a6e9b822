"""How many steps go into one program: by arithmetic, by time, and never past a moment that a hook requests."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.estimators import make, same_bits
from testing.hooks import When
from testing.model_fns import minimizing
from testing.towers import cpus

import estimator as est
from estimator.loop import _programs, _steps_per_loop
from estimator.loop._context import RunContext
from estimator.loop._flops import steps_that_fit
from estimator.loop._plan import Bounds, Plan
from estimator.loop._train import Training
from replicate import TowerOptimizer, replicate_model_fn


class Asking(When):
    def before_run(self, context):
        return "loss"


@pytest.mark.covers("4 steps_per_loop")
@settings(max_examples=100, deadline=None)
@given(
    quiet=st.lists(st.sets(st.integers(1, 60), max_size=6), max_size=3),
    asking=st.lists(st.sets(st.integers(1, 60), max_size=6), max_size=2),
    start=st.integers(0, 30),
    length=st.integers(1, 40),
    is_bounded=st.booleans(),
    most=st.lists(st.integers(1, 25), min_size=1, max_size=5),
)
def test_a_plan_stops_at_every_moment_and_nowhere_else(quiet, asking, start, length, is_bounded, most):
    hooks = [When(*steps) for steps in quiet] + [Asking(*steps) for steps in asking]
    step, end = start, start + length
    bounds, sizes = [], itertools.cycle(most)
    plan = Plan(hooks, start, end if is_bounded else None, lambda: bounds.append(next(sizes)) or Bounds(bounds[-1]))
    while step < end:
        chunk = plan.next()
        assert 1 <= chunk.steps <= bounds[-1]
        assert not any(step < at < step + chunk.steps for hook in hooks for at in hook.steps)
        step += chunk.steps
        assert list(chunk.due) == [hook for hook in hooks if step in hook.steps]
        assert chunk.alone == any(isinstance(hook, Asking) for hook in chunk.due)
        assert chunk.steps == 1 or not chunk.alone
    assert not is_bounded or (step == end and plan.next() is None)


def test_a_plan_has_as_few_chunks_as_the_moments_allow():
    plan = Plan([When(100), Asking(1, 101)], 0, 200, lambda: Bounds(100))
    assert [chunk.steps for chunk in iter(plan.next, None)] == [1, 99, 1, 99]


class Clock:
    """The seconds that a run has worked: as many more at each look as the test says."""

    def __init__(self, monkeypatch, seconds=(1e-6,)):
        self.now, self.seconds = 0.0, itertools.cycle(seconds)
        monkeypatch.setattr(_steps_per_loop, "_working_seconds", lambda context: self.read())

    def read(self):
        self.now += next(self.seconds)
        return self.now


@pytest.fixture
def calls(monkeypatch):
    """The programs that were started, in their order. All steps are quick, be the machine ever so busy."""
    calls = []
    start = Training._start

    def noted(training, run, reporting):
        calls.append(run)
        return start(training, run, reporting)

    Clock(monkeypatch)
    monkeypatch.setattr(Training, "_start", noted)
    return calls


def lengths(calls):
    return [call.steps for call in calls]


def rooms(calls):
    """The numbers of steps for which the programs have room; 0 for a step without a loop."""
    return [len(jax.tree.leaves(call.args[1:])[0]) if np.ndim(call.args[0]) == 0 else 0 for call in calls]


def wide(width):
    return minimizing(lambda x, y: jnp.mean(jnp.tanh(x @ est.get_variable("w", (x.shape[-1], width))) ** 2))


def of_width(n, count):
    batch = np.ones((64, n), np.float32), np.ones(64, np.float32)
    return lambda: [batch] * count


@pytest.mark.quick
@pytest.mark.covers("4 steps_per_loop")
@pytest.mark.parametrize(("width", "room"), [(4, 30), (256, 5), (2048, 0)])
def test_auto_goes_by_the_arithmetic_of_a_step(tmp_path, calls, width, room):
    config = {"save_checkpoints_steps": None, "save_summary_steps": None, "log_step_count_steps": 30}
    make(tmp_path, wide(width), **config).train(of_width(width, 30))
    assert set(rooms(calls)) == {room}
    assert sum(lengths(calls)) == 30 and max(lengths(calls)) <= max(room, 1)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1e-6], [1, 1, 1, 1, 2, 4, 4, 4, 8, 16, 16, 16, 9]),
        ([0.6], [1] * 83),  # the input
        ([0, 0, 0, 0, 9, 0], [1, 1, 1, 1, 2, 4, 4, 4, 8, 1, 1, 2, 4, 4, 4, 8]),  # a slow one now and then
    ],
)
def test_a_chunk_has_as_many_steps_as_a_second_and_the_first_one_has_one(
    tmp_path, monkeypatch, calls, seconds, expected
):
    Clock(monkeypatch, seconds)
    make(tmp_path, wide(2), save_checkpoints_steps=None, save_summary_steps=None).train(of_width(2, 83))
    assert lengths(calls)[: len(expected)] == expected
    assert set(rooms(calls)) == {100}


def noisy(features, labels, mode):
    k = est.get_variable("k", (3, 3, 1, 4))
    w = est.get_variable("w", (4 * 64, 1))
    seen = jax.lax.conv_general_dilated(features, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    kept = jnp.where(jax.random.bernoulli(est.make_rng(), 0.5, seen.shape), jax.nn.relu(seen), 0)
    loss = est.losses.mean_squared_error(labels, kept.reshape(len(kept), -1) @ w)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.adam(0.01)).minimize(loss))


@pytest.mark.slow
@pytest.mark.covers("1.3 auto-resume", "4 steps_per_loop")
@pytest.mark.usefixtures("users_compiler")
def test_the_bits_do_not_depend_on_where_a_run_is_cut_nor_on_what_hooks_ask_for(
    tmp_path, monkeypatch, calls, compilations
):
    """By measured time, by the time for which an input is read, and by a stop, in no more programs; and by hooks, each
    of whose steps is a program of its own."""
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 4, 8, 8, 1)).astype(np.float32)
    batches = list(zip(x, x.mean((2, 3)), strict=True))
    model_fn = replicate_model_fn(noisy, devices=cpus(2))
    seen = []

    def train(name, *parts, hooks=()):
        for part in parts or (slice(None),):
            make(tmp_path / name, model_fn, steps_per_loop=12).train(lambda part=part: batches[part], hooks=hooks)
        seen.append((lengths(calls), len(compilations)))
        calls.clear(), compilations.clear()
        return tmp_path / name

    whole = train("whole")
    Clock(monkeypatch, random.choice([0.0, 0.1, 3.0, 6.0], 99))
    cut = [train("asked", hooks=[Asking(1, 11, 21)])]
    seen.pop()
    cut += [train("measured"), train("stopped", slice(17), slice(17, None))]
    monkeypatch.setattr(_steps_per_loop, "SECONDS_OF_A_CHUNK", 0.0)
    cut.append(train("read"))
    straight = make(whole, model_fn)
    assert all(same_bits(straight, make(path, model_fn)) for path in cut)
    runs, compiled = zip(*seen, strict=True)
    assert len(set(map(tuple, runs))) == 4 and runs[-1] == [1] * 40 and max(runs[0]) == 12
    assert max(compiled) == compiled[0]


def test_auto_leaves_a_step_with_a_loop_of_unknown_length_alone(tmp_path, calls):
    def loss_of(features, labels):
        w = est.get_variable("w", (2,))
        far = jax.lax.while_loop(lambda x: (x < 1).all(), jnp.exp, jax.lax.stop_gradient(w))
        return jnp.mean(features @ (w + far))

    make(tmp_path, minimizing(loss_of)).train(of_width(2, 3))
    assert rooms(calls) == [0, 0, 0]


@pytest.mark.parametrize("lengths, fits", [((), 100), ((4,), 25), ((4, 5), 5), ((4, 5, 100), 1)])
def test_auto_counts_what_is_in_loops_as_often_as_they_run(lengths, fits):
    step = jnp.sin
    for length in lengths:
        step = functools.partial(
            lambda x, step, length: jax.lax.scan(lambda x, _: (step(x), None), x, length=length)[0],
            step=step,
            length=length,
        )
    traced = jax.jit(jax.grad(lambda x: step(x).sum())).trace(jnp.ones(2))
    assert steps_that_fit(traced, "cpu", count=lambda _: 1e6) == fits


@pytest.mark.parametrize(
    "limit, batches, room",
    [
        *(("_MOST_BYTES", 12, 10), ("_MOST_BYTES", 1, 0)),
        *(("_MOST_BYTES_OF_A_STACKED_BATCH", 1, 30), ("_MOST_BYTES_OF_A_STACKED_BATCH", 0.9, 0)),
    ],
)
def test_auto_stacks_no_more_than_so_many_bytes_of_batches(tmp_path, monkeypatch, calls, limit, batches, room):
    monkeypatch.setattr(_programs, limit, int(batches * 64 * (4 + 1) * 4))
    config = {"save_checkpoints_steps": None, "save_summary_steps": None, "log_step_count_steps": 30}
    make(tmp_path, wide(4), **config).train(of_width(4, 30))
    assert set(rooms(calls)) == {room}


@pytest.mark.parametrize("platform, fits", [("cpu", 3), ("gpu", 1000), ("tpu", 333), ("METAL", 1000)])
def test_auto_sees_no_loop_that_only_another_platform_has(platform, fits):
    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x)

    def step(x):
        return jax.lax.platform_dependent(x, cpu=looped, tpu=looped, cuda=jnp.sin, default=jnp.sin).sum()

    assert steps_that_fit(jax.jit(jax.grad(step)).trace(jnp.ones(2)), platform, count=lambda _: 1e7) == fits


@pytest.mark.slow
@pytest.mark.covers("4 SummarySaverHook")
def test_auto_does_not_count_what_is_shown_now_and_then(tmp_path, calls):
    def loss_of(features, labels):
        w = est.get_variable("w", (2,))
        est.summary.histogram("products", features * w)  # finds its buckets in a loop
        est.summary.scalar("product", jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), w).sum())
        return jnp.mean(features @ w)

    config = {"save_checkpoints_steps": None, "save_summary_steps": 20, "log_step_count_steps": 30}
    make(tmp_path, replicate_model_fn(minimizing(loss_of), devices=cpus(2)), **config).train(of_width(2, 41))
    assert set(rooms(calls)) == {20}


def test_auto_passes_no_moment(tmp_path, calls):
    config = {"save_checkpoints_steps": 25, "save_summary_steps": None, "log_step_count_steps": 10}
    called = []
    hook = When(7, 8, 30, after_run=lambda context: called.append(context.global_step))
    estimator = make(tmp_path, wide(2), **config).train(of_width(2, 32), hooks=[hook])
    ends = set(np.cumsum(lengths(calls)).tolist())
    assert {7, 8, 25, 30, 32} <= ends
    assert called == [7, 8, 30]
    assert estimator.latest_checkpoint().endswith("ckpt-32")


def test_auto_is_one_where_a_hook_wants_every_step(tmp_path, calls):
    called = []
    hook = When(after_run=lambda context: called.append(context.global_step))
    make(tmp_path, wide(2)).train(of_width(2, 12), hooks=[hook])
    assert rooms(calls) == [0] * 12
    assert called == list(range(1, 13))


def test_a_training_with_loops_compiles_each_program_once(tmp_path, compilations):
    estimator = make(tmp_path, wide(2), save_checkpoints_steps=None)
    estimator.train(of_width(2, 250))
    before = len(compilations)
    estimator.train(of_width(2, 250))
    assert len(compilations) == before


def test_a_step_that_is_counted_and_runs_alone_is_lowered_once(tmp_path, request):
    lowered = []

    def listen(event, seconds, *, fun_name="", **_):
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            lowered.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    request.addfinalizer(lambda: jax.monitoring.unregister_event_duration_listener(listen))
    make(tmp_path, wide(2048), log_step_count_steps=30).train(of_width(2048, 2))
    assert [name for name in lowered if "step" in name or "loop" in name] == ["jit(step)"]


@pytest.mark.covers("4 steps_per_loop")
@pytest.mark.parametrize(
    ("requested", "per_step", "expected"), [("0.2s", 0.001, 128), ("1s", 0.3, 2), ("0.01s", 1.0, 1)]
)
def test_a_time_becomes_the_steps_that_fit_into_it(monkeypatch, requested, per_step, expected):
    clock = Clock(monkeypatch, [0.0])
    programs = types.SimpleNamespace(steps_per_program=0, loops=False, info=types.SimpleNamespace(is_one_program=True))
    size = _steps_per_loop.choose(requested, programs, (), RunContext("train"), 100)
    assert size.bounds().room == 1
    step, sizes = 0, []
    for _ in range(60):
        size.measure(step)
        step += max(10, size.bounds().room)
        clock.now += per_step * max(10, size.bounds().room)
        sizes.append(size.bounds().room)
    assert sizes[-1] == expected
    assert len(set(sizes)) <= 2  # compiled once more


def test_debugging_means_one_step_at_a_time(tmp_path, calls):
    with jax.debug_nans(True):
        make(tmp_path, wide(2)).train(of_width(2, 3))
    assert rooms(calls) == [0, 0, 0]


def test_batches_of_other_shapes_run_one_by_one(tmp_path, calls):
    features, labels = of_width(2, 1)()[0]
    mixed = [(features, labels)] * 4 + [(features[:8], labels[:8]), (features, labels)]
    make(tmp_path, wide(2), steps_per_loop=3).train(lambda: mixed)
    assert lengths(calls) == [1] * 6 and rooms(calls) == [3] * 4 + [1, 1]
