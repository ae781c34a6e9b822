"""The evaluator of `train_and_evaluate`, and `checkpoints_iterator`: checkpoints of training that runs elsewhere."""

import json
import os
import re
import signal
import threading
import time
import uuid

import pytest
from testing.cluster import shared_cluster
from testing.estimators import X, Y, make, saved_steps, times
from testing.hooks import At, When
from testing.scenarios.evaluator import EVAL, Calls, evaluate, evaluated, spec_of
from testing.signals import terminate, wait_until

import estimator as est
from estimator.checkpoint import _checkpoints_iterator
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.multihost._cluster import find_cluster

pytestmark = pytest.mark.covers("5 evaluator task")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """An evaluator looks often, also into a store."""
    monkeypatch.setattr(_checkpoints_iterator, "_POLL_SECS", 0.02)
    monkeypatch.setattr(_checkpoints_iterator, "_STORE_POLL_SECS", 0.05)


def train(estimator, max_steps=40, batches=1000, hooks=()):
    return est.train_and_evaluate(estimator, est.TrainSpec(times(batches), max_steps, hooks), EVAL, role="trainer")


class Task(threading.Thread):
    """Calls a function in a thread; `result` returns, or raises, what that does."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self.call = lambda: function(*args, **kwargs)
        self.start()

    def run(self):
        try:
            self.value, self.error = self.call(), None
        except BaseException as error:
            self.error = error

    def result(self):
        self.join(60)
        assert not self.is_alive(), "it has not ended"
        if self.error is not None:
            raise self.error
        return self.value


@pytest.mark.quick
@pytest.mark.parametrize("store", [False, True])
def test_an_evaluator_records_what_evaluations_within_the_training_record(tmp_path, store):
    whole = make(tmp_path / "whole", save_checkpoints_steps=20)
    expected = est.train_and_evaluate(whole, est.TrainSpec(times(1000), 40), EVAL)
    model_dir = f"memory://{uuid.uuid4().hex}" if store else tmp_path / "apart"
    trainer = make(model_dir, save_checkpoints_steps=20)
    assert train(trainer) == ({}, [])
    assert not os.path.exists(trainer.eval_dir())
    exporter = Calls()
    estimator = make(model_dir)
    assert evaluate(estimator, 40, spec_of(exporter)) == (expected[0], ["40"])
    assert evaluated(estimator) == [0, 20, 40]
    recorded = est.read_eval_metrics(estimator.eval_dir())
    assert {step: recorded[step] for step in (20, 40)} == est.read_eval_metrics(whole.eval_dir())
    assert exporter.calls == [(0, 0, False), (20, 20, False), (40, 40, True)]


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.slow
def test_training_may_remove_checkpoints_while_they_are_evaluated(tmp_path, store):
    model_dir = f"memory://{uuid.uuid4().hex}" if store else tmp_path / "model"
    os.makedirs(tmp_path / "model")
    begun, waited = threading.Event(), []

    def input_fn():
        """The first evaluation lasts until training has saved ten checkpoints, and keeps two."""
        begun.set()
        while not waited and est.checkpoints(model_dir)[-1].step < 10:
            time.sleep(0.02)
        waited.append(1)
        return [(X, Y)] * 2

    trainer = make(model_dir, save_checkpoints_steps=1, keep_checkpoint_max=2, steps_per_loop=1)
    exporter = Calls()
    spec = est.EvalSpec(input_fn, steps=None, exporters=exporter)
    evaluator = Task(evaluate, make(model_dir), 15, spec)
    train(trainer, 15, hooks=[At(3, lambda: begun.wait(60))])
    assert evaluator.result() == (trainer.evaluate(times(2)), ["15"])
    steps = evaluated(trainer)
    # In a store nothing holds what is being read: its evaluation may be lost, but is never another one's.
    assert steps[-1] == 15 and len(steps) < 15 and (store or steps[0] < 5)
    assert exporter.calls[-1] == (15, 15, True) and all(step == saved for step, saved, _ in exporter.calls)
    trainer.train(times(1))
    assert [each.step for each in est.checkpoints(model_dir)] == [15, 16]
    reference = make(tmp_path / "reference", save_checkpoints_steps=1, keep_checkpoint_max=None)
    train(reference, 15)
    for step in steps:
        expected = reference.evaluate(times(2), checkpoint_path=f"{reference.model_dir}/ckpt-{step}")["loss"]
        assert est.read_eval_metrics(trainer.eval_dir())[step]["loss"] == expected


RUN = "testing.scenarios.evaluator.run"


@pytest.mark.slow
def test_an_evaluator_that_is_killed_continues_where_it_was(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=10, keep_checkpoint_max=None)
    train(estimator)
    cluster = shared_cluster()
    # Before it evaluates the third one; after that, before it exports it; and not at all.
    for stop, moment in ((20, "evaluates"), (20, "exports"), (40, "exports")):
        assert cluster.end(RUN, tmp_path, 40, stop, moment)[0].code == -signal.SIGKILL
    (ended,) = cluster.run(RUN, tmp_path, 40, None, None, processes=1)
    assert ended.code == 0 and "result 40 ['40']" in ended.lines
    assert evaluated(estimator) == [0, 10, 20, 30, 40]
    with open(tmp_path / "evaluations") as file:
        assert [int(line) for line in file] == [0, 10, 20, 20, 20, 30, 40, 40]
    with open(tmp_path / "exports") as file:
        assert [line.rstrip() for line in file] == ["0 False", "10 False", "20 False", "30 False", "40 True"]


def test_an_evaluator_that_is_started_after_all_is_done_ends_at_once_and_repeats_nothing(tmp_path, monkeypatch):
    train(make(tmp_path))
    monkeypatch.setattr(_checkpoints_iterator, "_POLL_SECS", 60.0)
    monkeypatch.setattr(time, "sleep", lambda secs: pytest.fail(f"it sleeps for {secs} s"))
    metrics, _ = evaluate(make(tmp_path), 40)
    assert metrics["global_step"] == 40
    exporter = Calls()
    again = evaluate(make(tmp_path), 40, est.EvalSpec(lambda: pytest.fail("evaluated"), exporters=exporter))
    assert again == (metrics, []) and exporter.calls == []


@pytest.mark.slow
def test_several_evaluators_share_the_work_and_do_nothing_twice(tmp_path):
    calls = []

    def spec(name):
        def input_fn():
            calls.append(name)
            time.sleep(0.05)
            return [(X, Y)] * 2

        return est.EvalSpec(input_fn, steps=None, name=name)

    specs = [spec("a"), spec("b")]
    evaluators = [Task(evaluate, make(tmp_path), 40, specs) for _ in range(3)]
    train(make(tmp_path, save_checkpoints_steps=10, keep_checkpoint_max=None))
    results = [each.result() for each in evaluators]
    assert calls.count("a") == calls.count("b") == 5
    for name in "ab":
        assert list(est.read_eval_metrics(make(tmp_path).eval_dir(name))) == [0, 10, 20, 30, 40]
        assert all(metrics[name] == results[0][0][name] for metrics, _ in results)


def test_an_evaluator_takes_over_from_one_that_is_killed(tmp_path):
    train(make(tmp_path, save_checkpoints_steps=20))
    shared_cluster().start(RUN, tmp_path, 40, 20, "evaluates", processes=1, moment=(0, "blocked"))
    second = Task(evaluate, make(tmp_path), 40)
    time.sleep(0.2)
    assert second.is_alive() and evaluated(make(tmp_path)) == [0]
    shared_cluster().ended(kill=True)
    assert second.result()[0]["global_step"] == 40
    assert evaluated(make(tmp_path)) == [0, 20, 40]


@pytest.mark.slow
def test_early_stopping_reads_what_the_evaluator_records_and_ends_both(tmp_path):
    def train_until_stopped():
        estimator = make(tmp_path, save_checkpoints_steps=10, steps_per_loop=1)
        hook = est.stop_if_lower_hook(estimator, "loss", 1e9, min_steps=20, run_every_steps=1)

        def save_and_wait(context):
            context.save()
            wait_until(lambda: 20 in est.read_eval_metrics(estimator.eval_dir()))

        train(estimator, 100_000, 100_000, [When(20, after_run=save_and_wait), hook])
        return estimator

    exporter = Calls()
    evaluator = Task(evaluate, make(tmp_path), 100_000, spec_of(exporter))
    estimator = train_until_stopped()
    last = saved_steps(estimator)[-1]
    metrics, _ = evaluator.result()
    assert metrics["global_step"] == last == 20
    assert exporter.calls[-1] == (last, last, True)
    assert evaluated(estimator) == [0, 10, 20]


def test_an_evaluator_that_waits_ends_when_it_is_asked_to_stop(tmp_path):
    evaluator = Task(evaluate, make(tmp_path), 40)
    wait_until(est.request_stop)
    with pytest.raises(est.Preempted):
        evaluator.result()


@pytest.mark.quick
@pytest.mark.parametrize("max_steps", [None, 40])
def test_the_end_of_the_input_ends_the_evaluator(tmp_path, max_steps):
    train(make(tmp_path, save_checkpoints_steps=10), max_steps, batches=15)
    exporter = Calls()
    metrics, _ = evaluate(make(tmp_path), max_steps, spec_of(exporter))
    assert metrics["global_step"] == 15 and exporter.calls[-1] == (15, 15, True)


def test_training_that_was_terminated_failed_or_made_fewer_steps_has_not_ended(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=10)
    # Before the evaluator begins, which the signal would end as well, in this process.
    with pytest.raises(est.Preempted):
        train(estimator, hooks=[At(5, terminate)])
    evaluator = Task(evaluate, make(tmp_path), 40)

    def check(step):
        wait_until(lambda: step in est.read_eval_metrics(estimator.eval_dir()))
        time.sleep(0.1)
        assert evaluator.is_alive()

    check(5)
    with pytest.raises(ZeroDivisionError):
        train(estimator, hooks=[At(15, lambda: 1 / 0)])
    check(15)
    train(estimator, 30)
    check(30)
    train(estimator, 40)
    assert evaluator.result()[0]["global_step"] == 40
    assert evaluated(estimator) == [0, 5, 15, 25, 30, 40]


def test_the_mark_of_the_end_goes_when_training_continues_and_is_no_damage(tmp_path):
    estimator = make(tmp_path)
    estimator.train(times(10))
    first = Checkpoint(estimator.latest_checkpoint())
    assert first.is_training_end(None) and first.is_training_end(40)
    estimator.train(times(10))
    assert not first.is_training_end(None) and Checkpoint(estimator.latest_checkpoint()).is_training_end(None)
    assert [each.damage for each in est.checkpoints(tmp_path)] == [None] * 3


def test_throttle_secs_leaves_out_all_but_the_first_and_the_last(tmp_path):
    train(make(tmp_path, save_checkpoints_steps=20))
    evaluate(make(tmp_path), 40, est.EvalSpec(times(2), throttle_secs=600))
    assert evaluated(make(tmp_path)) == [40]


def test_start_delay_secs_is_the_time_before_the_first_evaluation(tmp_path):
    make(tmp_path).train(times(10))
    started = time.monotonic()
    evaluator = Task(evaluate, make(tmp_path), 20, est.EvalSpec(times(2), start_delay_secs=0.5))
    while not evaluated(make(tmp_path)):
        time.sleep(0.02)
    assert time.monotonic() - started >= 0.5
    make(tmp_path).train(times(10))
    evaluator.result()


def test_a_damaged_checkpoint_is_named_and_left_out(tmp_path, messages):
    estimator = make(tmp_path, save_checkpoints_steps=10)
    train(estimator)
    file = max((tmp_path / "ckpt-20").glob("arrays/**/d/*"), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    evaluate(make(tmp_path), 40)
    assert evaluated(estimator) == [0, 10, 30, 40]
    assert any("ckpt-20 is damaged" in line for line in messages())


def task(kind, **cluster):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})


def test_tf_config_names_the_roles(tmp_path, monkeypatch):
    cluster = {"chief": ["localhost:1"], "evaluator": ["localhost:2"]}
    spec = est.TrainSpec(times(100), 20)
    monkeypatch.setenv("TF_CONFIG", task("chief", **cluster))
    assert est.train_and_evaluate(make(tmp_path), spec, EVAL) == ({}, [])
    assert not os.path.exists(make(tmp_path).eval_dir())
    # As Kubeflow's TFJob writes it: the cluster does not name the evaluator, and the script gives all one role.
    for text, role in ((task("evaluator", **cluster), None), (task("evaluator", chief=["localhost:1"]), "trainer")):
        monkeypatch.setenv("TF_CONFIG", text)
        assert find_cluster(None, None, None, None)[:3] == (None, 1, 0)
        assert est.train_and_evaluate(make(tmp_path), spec, EVAL, role=role)[0]["global_step"] == 20
    assert evaluated(make(tmp_path)) == [0, 20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": "chief"},
         "`role` of train_and_evaluate must be 'trainer', 'evaluator', or None to train and evaluate in one "
         "process; given: 'chief'."),
        ({"role": "trainer", "eval_every_steps": 5},
         "`eval_every_steps` is for evaluations of the variables in memory, but an evaluator reads checkpoints; "
         "given: 5 with role='trainer'. Leave it out, and write RunConfig(save_checkpoints_steps=5)."),
        ({"role": "evaluator", "eval_spec": est.EvalSpec(times(1), eval_every_steps=7)},
         "given: 7 with role='evaluator'."),
    ],
)  # fmt: skip
def test_what_no_evaluator_can_do_is_refused(tmp_path, arguments, message):
    arguments = {"eval_spec": EVAL, **arguments}
    with pytest.raises(ValueError, match=re.escape(message)):
        est.train_and_evaluate(make(tmp_path), est.TrainSpec(times(1), 1), **arguments)
    assert os.listdir(tmp_path) == []


def test_the_best_variables_are_not_restored_where_another_process_evaluates(tmp_path):
    estimator = make(tmp_path)
    hook = est.stop_if_no_decrease_hook(estimator, "loss", max_evals_without_decrease=3, restore_best=True)
    message = (
        "stop_if_no_decrease_hook has restore_best=True, for which training has to wait for each evaluation; given "
        "with role='trainer'. Leave it out, and take the best model from an `est.BestExporter`."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        train(estimator, hooks=[hook])


def test_the_newest_checkpoint_is_yielded_once_and_min_interval_secs_lie_between_two(tmp_path, monkeypatch):
    estimator, steps, sleeps = make(tmp_path, save_checkpoints_steps=1).train(times(3)), [], []
    monkeypatch.setattr(_checkpoints_iterator, "sleep", sleeps.append)
    for path in est.checkpoints_iterator(tmp_path, min_interval_secs=600, timeout=0.1):
        steps.append(Checkpoint(path).step)
        if len(steps) < 3:
            estimator.train(times(3))
    assert steps == [3, 6, 9] and sum(400 < secs <= 600 for secs in sleeps) == 3


@pytest.mark.quick
@pytest.mark.parametrize("store", [False, True])
def test_checkpoints_of_another_thread_are_yielded_as_they_appear(tmp_path, store):
    model_dir = f"memory://{uuid.uuid4().hex}" if store else tmp_path / "not yet"
    steps, estimator = [], make(model_dir)
    training = Task(estimator.train, lambda: [(X, Y)] * 3)
    for path in est.checkpoints_iterator(model_dir, timeout=30):
        steps.append(Checkpoint(path).step)
        if steps[-1] == 3:
            break
    training.result()
    assert steps[-1] == 3


def test_the_iterator_ends_when_timeout_fn_says_so(tmp_path, messages):
    answers = iter([False, False, True])
    started = time.monotonic()
    assert list(est.checkpoints_iterator(tmp_path / "empty", timeout=0.1, timeout_fn=lambda: next(answers))) == []
    assert time.monotonic() - started >= 0.3 and next(answers, None) is None
    assert f"No new checkpoint in {tmp_path / 'empty'} within 0.1 s." in messages()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_interval_secs": -1}, "Must specify min_interval_secs >= 0 for checkpoints_iterator, given: -1."),
        ({"timeout": 0}, "Must specify timeout > 0, or None, for checkpoints_iterator, given: 0."),
    ],
)
def test_times_that_make_no_sense_are_refused_at_once(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        est.checkpoints_iterator(tmp_path, **arguments)
