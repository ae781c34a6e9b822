"""Training continues while a checkpoint is written, and nobody sees the checkpoint before it is on disk."""

import concurrent.futures
import contextlib
import os
import re
import resource
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from testing.estimators import Linear, X, Y, endless, make, same_bits, saved_at, saved_steps, times
from testing.hooks import At, AtSteps, raising

import estimator as est
from estimator.checkpoint import _checkpoints
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints, CheckpointWriteError

SECONDS = 30


class Disk:
    """Lets a test say when a checkpoint is completed; notes the steps whose writing begins and ends, in order."""

    def __init__(self):
        self.completes = threading.Event()
        self.notes = []

    def write(self, path, *args, write=_checkpoints.save_checkpoint, **kwargs):
        step = int(path.rsplit("-")[-1])
        self.notes.append(("begin", step))
        write(path, *args, **kwargs)
        self.notes.append(("end", step))


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    finalize = ocp.PyTreeCheckpointHandler.finalize

    def finalize_later(self, directory):
        assert disk.completes.wait(SECONDS)
        finalize(self, directory)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", finalize_later)
    monkeypatch.setattr(_checkpoints, "save_checkpoint", disk.write)
    yield disk
    disk.completes.set()


@contextlib.contextmanager
def files_of_at_most(size):
    """Within the block to write more is an error, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def state_of(size, sharding=None):
    values = jax.device_put(jnp.arange(size, dtype=jnp.float32), sharding)
    return est.State({"w": values}, {"adam": optax.adam(0.1).init({"w": values})}, jnp.int32(3), jax.random.key(5))


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("spec", [None, PartitionSpec(), PartitionSpec("d")])
def test_the_memory_of_a_state_may_be_donated_while_it_is_written(tmp_path, disk, spec):
    sharding = None if spec is None else NamedSharding(Mesh(jax.devices(), "d"), spec)
    state = state_of(8000, sharding)
    expected = {"w": np.arange(8000), "adam/0/mu/w": np.zeros(8000)}
    program = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(state, wait=False)
    changed = state[:2]
    for _ in range(3):
        changed = jax.block_until_ready(program(changed))
    assert saved_at(tmp_path) == []
    disk.completes.set()
    assert checkpoints.latest() == path
    for name, values in expected.items():
        np.testing.assert_array_equal(Checkpoint(path).read(name), values)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(lambda: state_of(8000)))
    assert Checkpoint(path).restore(like).global_step == 3


def test_training_continues_while_a_checkpoint_is_written(tmp_path, disk):
    seen = []

    def look(context):
        seen.append((context.global_step, saved_at(tmp_path)))
        if context.global_step == 4:
            disk.completes.set()

    estimator = make(tmp_path, save_checkpoints_steps=5)
    estimator.train(times(7), hooks=[AtSteps({0: look, 2: look, 4: look})])
    assert seen == [(0, []), (2, []), (4, [])]
    assert saved_steps(estimator) == [0, 5, 7]
    assert Checkpoint(str(tmp_path / "ckpt-0")).read("w").tolist() == [[0], [0]]


def test_checkpoints_match_a_training_that_waits_for_them(tmp_path):
    seen = []
    hook = AtSteps({n: lambda context: seen.append(saved_at(context.model_dir)) for n in (2, 3)})
    for saves_async, hooks in ((False, [hook]), (True, [])):
        config = {"save_checkpoints_async": saves_async, "save_checkpoints_steps": 2}
        make(tmp_path / str(saves_async), **config).train(times(5), hooks=hooks)
    assert seen == [[0, 2], [0, 2]]
    for step in (2, 4, 5):
        one, other = (Checkpoint(str(tmp_path / name / f"ckpt-{step}")).read_all(["*"]) for name in ("False", "True"))
        assert {k: v.tobytes() for k, v in one.items()} == {k: v.tobytes() for k, v in other.items()}


@pytest.mark.slow
def test_trainings_in_threads_match_the_same_trainings_alone(tmp_path):
    def train(where, rate, **config):
        linear = Linear(lambda: optax.adam(rate))
        return make(tmp_path / where / str(rate), linear, **config).train(endless, steps=24)

    rates = (0.1, 0.2)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        config = {"save_checkpoints_steps": 6, "keep_checkpoint_max": None}
        together = [*threads.map(lambda rate: train("threads", rate, **config), rates)]
    assert [saved_steps(each) for each in together] == [[*range(0, 25, 6)]] * 2
    assert all(same_bits(each, train("alone", rate)) for each, rate in zip(together, rates, strict=True))


def test_one_checkpoint_is_written_at_a_time(tmp_path, disk):
    disk.completes.set()
    make(tmp_path, save_checkpoints_steps=1).train(times(6))
    assert disk.notes == [(what, step) for step in range(7) for what in ("begin", "end")]
    assert saved_at(tmp_path) == [2, 3, 4, 5, 6]  # the last one was waited for


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_save_checkpoints_async_is_true_or_false(value):
    with pytest.raises(ValueError, match=re.escape(f"`save_checkpoints_async` should be True or False; got {value!r}")):
        est.RunConfig(save_checkpoints_async=value)


def test_what_reads_the_newest_checkpoint_during_training_waits_for_it(tmp_path, disk):
    estimator = make(tmp_path, save_checkpoints_steps=2)
    seen = []
    reads = {
        2: lambda _: os.path.basename(estimator.latest_checkpoint()),
        4: lambda _: estimator.evaluate(times(1))["global_step"],
        6: lambda _: estimator.get_variable_value("global_step"),
        8: lambda context: os.path.basename(context.save()),
    }

    def reading(step):
        def call(context):
            disk.completes.clear()
            threading.Timer(0.1, disk.completes.set).start()
            seen.append(reads[step](context))

        return call

    def read_by_its_name(context):
        estimator.latest_checkpoint()  # is there
        disk.completes.clear()
        path = context.save(wait=False)
        assert not os.path.exists(path)
        threading.Timer(0.1, disk.completes.set).start()
        seen.append(estimator.evaluate(times(1), checkpoint_path=path)["global_step"])

    disk.completes.set()
    estimator.train(times(10), hooks=[AtSteps({step: reading(step) for step in reads} | {9: read_by_its_name})])
    assert seen == ["ckpt-2", 4, 6, "ckpt-8", 9]


def test_a_listener_without_after_save_makes_nobody_wait(tmp_path, disk):
    class Before(est.CheckpointSaverListener):
        def end(self, context, step):
            seen.append(saved_at(tmp_path))

    seen = []
    hook = AtSteps({1: lambda _: seen.append(saved_at(tmp_path)), 2: lambda _: disk.completes.set()})
    make(tmp_path).train(times(3), hooks=[hook], saving_listeners=[Before()])
    assert seen == [[], [0, 3]]


def full_from(step):
    """A hook after whose step the disk is full; and what ends that."""
    stack = contextlib.ExitStack()

    def fill(context):
        while context.global_step - 1 not in saved_at(context.model_dir):
            time.sleep(0.01)
        stack.enter_context(files_of_at_most(10_000))

    return AtSteps({step: fill}), stack


class Wide(Linear):
    """Has a variable that does not fit on a full disk."""

    def __call__(self, features, labels, mode):
        est.get_variable("wide", (10_000,), initializer=jax.nn.initializers.ones, trainable=False)
        return super().__call__(features, labels, mode)


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("saves_async", [True, False])
def test_a_full_disk_is_an_error_at_the_next_save_and_the_newest_checkpoint_stays(tmp_path, saves_async):
    estimator = make(tmp_path, Wide(), save_checkpoints_steps=3, save_checkpoints_async=saves_async)
    hook, full = full_from(4)
    ends = []
    hook.end = lambda context: ends.append((type(context.error).__name__, context.global_step))
    path = re.escape(str(tmp_path / "ckpt-6"))
    message = rf"(?s)checkpoint of step 6 could not be written to {path}: .*The newest checkpoint is .*ckpt-3\. Look"
    with full, pytest.raises(CheckpointWriteError, match=message):
        estimator.train(endless, hooks=[hook], max_steps=100)
    assert ends == [("CheckpointWriteError", 9 if saves_async else 6)]
    assert saved_steps(estimator) == [0, 3]
    os.makedirs(tmp_path / "ckpt-6.unfinished" / "ckpt-6", exist_ok=True)  # as TensorStore, which may be late
    assert estimator.train(endless, max_steps=8).get_variable_value("global_step") == 8
    assert sorted(x for x in os.listdir(tmp_path) if "ckpt" in x) == [f"ckpt-{step}" for step in (0, 3, 6, 8)]


def test_a_full_disk_is_an_error_at_the_end_of_the_run(tmp_path):
    estimator = make(tmp_path, Wide(), save_checkpoints_steps=3)
    hook, full = full_from(4)
    with full, pytest.raises(CheckpointWriteError, match="of step 6 could not be written"):
        estimator.train(endless, hooks=[hook], max_steps=7)
    assert saved_steps(estimator) == [0, 3]


def test_an_error_of_the_run_comes_before_one_of_its_checkpoint(tmp_path, messages):
    estimator = make(tmp_path, Wide(), save_checkpoints_steps=3)
    hook, full = full_from(4)
    with full, pytest.raises(ValueError, match="broken"):
        estimator.train(endless, hooks=[hook, At(7, raising(ValueError("broken")))])
    assert any("The checkpoint of step 6 could not be written" in message for message in messages())
    assert estimator.latest_checkpoint() == str(tmp_path / "ckpt-3")


def test_a_run_that_fails_waits_for_its_checkpoint(tmp_path, disk):
    def fail(context):
        threading.Timer(0.2, disk.completes.set).start()
        raise ValueError("broken")

    seen = []
    hook = AtSteps({2: fail})
    hook.end = lambda context: seen.append(saved_at(tmp_path))
    with pytest.raises(ValueError, match="broken"):
        make(tmp_path).train(endless, hooks=[hook])
    assert seen == [[0]] == [saved_at(tmp_path)]


def test_nan_names_the_newest_checkpoint_that_is_on_disk(tmp_path, disk):
    threading.Timer(0.3, disk.completes.set).start()
    batches = [(X, Y)] * 3 + [(X * np.nan, Y)] * 2
    with pytest.raises(est.NanLossDuringTrainingError, match="The newest checkpoint is from step 0; nothing later"):
        make(tmp_path, log_step_count_steps=1).train(lambda: batches)
    assert saved_at(tmp_path) == [0]


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="this system does not say")
def test_the_thread_that_writes_has_the_priority_of_the_one_that_trains(tmp_path, monkeypatch):
    """With less it could not run on a busy machine, and training would wait for the lock of Python that it holds."""

    def priority():
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)  # of the calling thread

    write, seen = _checkpoints.save_checkpoint, []
    monkeypatch.setattr(
        _checkpoints, "save_checkpoint", lambda *args, **kw: (seen.append(priority()), write(*args, **kw))
    )
    make(tmp_path).train(times(2))
    assert seen == [priority()] * 2


def test_the_log_has_nothing_of_orbax(tmp_path, messages, caplog):
    make(tmp_path, save_checkpoints_steps=2).train(times(6))
    est.load_variable(tmp_path, "w")
    make(tmp_path).evaluate(times(1))
    assert messages()
    assert [record.pathname for record in caplog.records if "orbax" in record.pathname] == []


def test_a_save_that_was_left_for_later_is_written_by_who_waits_for_it_and_not_if_it_is_given_up(caplog):
    written = []

    def save():
        return _checkpoints.AsyncSave("ckpt-7", lambda copied: written.append("ckpt-7"))

    given_up, waited_for = save(), save()
    given_up.give_up()
    given_up.finish()
    assert written == [] and "ckpt-7 is still being written" in caplog.text
    waited_for.finish()
    waited_for.start()
    assert written == ["ckpt-7"]
