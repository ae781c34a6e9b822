"""The time of a training by what it was spent on, noted in checkpoints, over restarts; rates from the same clock."""

import io
import re
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.estimators import X, Y, endless, make, times
from testing.hooks import When
from testing.scenarios.early_stopping import KillAt
from testing.summaries import scalars

import estimator as est
from estimator import inspect
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.hooks import _rates
from estimator.inputs._prefetch import Prefetcher
from estimator.loop import _context, _flops, _programs, _read_ahead, _stopwatch, _training_log
from estimator.loop._context import RunContext
from estimator.loop._programs import InFlight
from estimator.loop._stopwatch import Stopwatch
from estimator.loop._train import Training
from estimator.loop._training_log import TrainingLog, _describe_slowest

PARTS = ["input", "host", "device", "checkpoint", "evaluation", "compilation", "other"]
NAP = 0.05


def naps():
    """Sleeps in the host's time."""
    return When(5, 10, 15, 20, after_run=lambda context: time.sleep(NAP))


class NapsOnce(est.Hook):
    def begin(self):
        time.sleep(NAP)


def napping(n):
    for i in range(n):
        if i % 5 == 0:
            time.sleep(NAP)
        yield X, Y


def test_each_part_has_what_was_spent_on_it(tmp_path):
    estimator = make(tmp_path)
    spec = est.TrainSpec(lambda: napping(20), max_steps=20, hooks=[naps()])
    est.train_and_evaluate(estimator, spec, est.EvalSpec(times(1), hooks=[NapsOnce()]), eval_every_steps=10)
    spent = est.goodput(tmp_path)
    (row,) = spent.rows
    assert list(row) == PARTS and spent.step == 20
    assert row["host"] >= 4 * NAP and row["input"] >= NAP  # before the first batch; then a thread reads ahead
    assert row["evaluation"] >= NAP  # the last one follows the checkpoint
    assert row["compilation"] > 0 and row["checkpoint"] > 0
    assert sum(row.values()) == pytest.approx(spent.seconds) and row["other"] < 0.1 * spent.seconds
    assert spent.goodput == pytest.approx((row["host"] + row["device"]) / spent.seconds)
    assert spent.start + spent.seconds <= time.time()


def test_a_restart_continues_and_what_was_lost_is_in_other(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, save_checkpoints_steps=5).train(endless, hooks=[naps(), KillAt(13)])
    first = est.goodput(tmp_path)
    time.sleep(NAP)
    make(tmp_path, save_checkpoints_steps=5, resume_input=None).train(endless, max_steps=15)
    second = est.goodput(tmp_path)
    assert (first.step, second.step, first.start) == (10, 15, second.start)
    (before,), (after,) = first.rows, second.rows
    assert all(after[part] >= before[part] for part in PARTS)
    # The steps after the checkpoint, with a nap, count for nothing, and neither does the time until the next run.
    assert after["other"] >= before["other"] + NAP


def test_evaluations_between_runs_count_and_predictions_are_other(tmp_path):
    estimator = make(tmp_path).train(times(2))
    (before,) = est.goodput(tmp_path).rows
    estimator.evaluate(times(1), hooks=[NapsOnce()])
    list(estimator.predict(times(1), hooks=[NapsOnce()]))
    (after,) = est.goodput(estimator.train(times(2)).model_dir).rows
    assert after["evaluation"] >= before["evaluation"] + NAP
    assert after["other"] >= before["other"] + NAP
    estimator.train(times(2))  # in memory, where it is more than in the checkpoint
    assert est.goodput(tmp_path).rows[0]["evaluation"] == after["evaluation"]


def test_it_is_printed_as_a_table_of_shares(capsys):
    row = dict(zip(PARTS, (1.0, 2.0, 4.0, 1.0, 0.5, 0.5, 1.0), strict=True))
    spent = est.Goodput(7, 0.0, 10.0, (row, row | {"input": 2.0, "device": 3.0}))
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    assert str(spent).splitlines() == [
        f"10.0 s from {began} to the checkpoint of step 7: goodput 55.0%",
        "process  input   host  device  checkpoint  evaluation  compilation  other",
        "      0  10.0%  20.0%   40.0%       10.0%        5.0%         5.0%  10.0%",
        "      1  20.0%  20.0%   30.0%       10.0%        5.0%         5.0%  10.0%",
    ]
    assert sum(spent.shares.values()) == pytest.approx(1)


def test_the_command_prints_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspect.jax.config, "update", lambda *args: None)
    estimator = make(tmp_path).train(times(2))
    inspect.main([str(tmp_path), "--time"])
    assert capsys.readouterr().out == f"{est.goodput(estimator.model_dir)}\n"
    assert est.goodput(Checkpoint(tmp_path / "ckpt-0").path).step == 0


def test_without_times_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no checkpoint in '.*', where `est.goodput` looks"):
        est.goodput(tmp_path)
    variables = {"w": jnp.ones(1)}
    Checkpoints(tmp_path).save(est.State(variables, {}, jnp.int32(1), jax.random.key(0)))
    with pytest.raises(ValueError, match="ckpt-1 has no times. It was saved before this was noted, or not by `train`"):
        est.goodput(tmp_path)


def test_log_lines_have_examples_and_the_wait_for_input_and_so_have_summaries(tmp_path, messages):
    config = {"log_step_count_steps": 20, "save_summary_steps": 10, "steps_per_loop": 1}
    make(tmp_path, **config).train(lambda: napping(60))
    lines = [line for line in messages() if "steps/sec" in line]
    pattern = r"loss = \S+, step = \d+ \((\S+) steps/sec, (\S+) examples/sec, (\d+)% waiting for input\)"
    found = [re.fullmatch(pattern, line) for line in lines]
    assert len(found) == 3 and all(found), lines
    for steps, examples, _ in (each.groups() for each in found):
        assert float(examples) == pytest.approx(len(X) * float(steps), rel=1e-2)
    assert any(int(each[3]) > 50 for each in found)
    waits = [value for _, value in scalars(tmp_path)["input_wait"]]
    assert waits and all(0 <= wait <= 1 for wait in waits) and max(waits) > 0.5


@pytest.mark.parametrize(
    ("reading", "step", "during", "share"),
    [
        (3, 1, "the wait", 75),
        (1, 49, "the wait", 2),
        (2, 3, "a step", 0),
        (3, 1, "work of devices", 0),
    ],
)
def test_the_wait_for_input_is_what_a_clock_beside_the_input_says(
    tmp_path, messages, monkeypatch, reading, step, during, share
):
    now, may_read, has_read, n = [0.0], threading.Semaphore(0), threading.Semaphore(0), 35
    clock = types.SimpleNamespace(time=time.time, perf_counter=lambda: now[0], monotonic=lambda: now[0])
    for module in (_stopwatch, _rates, _context):
        monkeypatch.setattr(module, "time", clock)

    def input_fn():
        for i in range(n):
            if i:  # the first one is read before the run
                may_read.acquire()
                now[0] += reading
                has_read.release()
            yield X, Y

    class Waiting(Prefetcher):
        asked = False

        def ask(self):
            if now[0] and during != "a step" and not self.asked:
                may_read.release()
                self.asked = True

        def wait(self, timeout):
            if during == "work of devices":
                self.ask()
                timeout = 60.0
            return super().wait(timeout)

        def get_unless(self, stopped):
            self.ask()
            ready = super().get_unless(stopped)
            self.asked = False
            return ready

    class Working(est.Hook):
        def after_run(self, context, values):
            now[0] += step
            if during == "a step" and context.global_step < n:  # the thread reads the next batch meanwhile
                now[0] -= reading
                may_read.release()
                has_read.acquire()

    monkeypatch.setattr(_read_ahead, "Prefetcher", Waiting)
    if during == "work of devices":
        monkeypatch.setattr(Training, "devices_are_busy", lambda run: True)
    make(tmp_path, log_step_count_steps=10, steps_per_loop=1).train(input_fn, hooks=[Working()])
    lines = [line for line in messages() if "steps/sec" in line]
    assert len(lines) == 3
    assert all(line.endswith(f" {share}% waiting for input)") for line in lines), lines


def test_devices_are_busy_until_the_newest_program_is_done():
    programs = InFlight()
    assert not programs.is_busy()
    x = jnp.ones((300, 300))  # the program of a small array would run before its call returns
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: x @ y / 300, x)).lower(x).compile()
    outputs = [work(x) for _ in range(3)]
    programs.add(outputs[-1])
    assert programs.is_busy()
    jax.block_until_ready(outputs)
    assert not programs.is_busy()


@pytest.mark.parametrize("seconds", [5e-3, 0.1, 1.7, 12])
def test_lines_come_by_time_unless_their_steps_are_given(monkeypatch, messages, seconds):
    now = [0.0]
    monkeypatch.setattr(_training_log, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def logged(steps, **config):
        before = len(messages())
        log = TrainingLog(est.RunConfig(**config).log_step_count_steps, RunContext("train"), None, shows_bar=False)
        log.add_first(1, np.ones(1), {})
        for step in range(2, steps + 1):
            now[0] += seconds
            log.add(step, np.ones(1), {})
        return [int(line.split("step = ")[1]) for line in messages()[before:]]

    times = [(step - 1) * seconds for step in logged(int(60 / seconds) + 2)]
    gaps = np.diff(times)
    assert times[0] == 0 and len(gaps) > 3 and min(gaps) > 0.999
    assert gaps[0] <= 1.01 + seconds and max(gaps) < max(10, 1.01 * seconds)
    assert logged(200, log_step_count_steps=100) == [1, 100, 200]


def test_the_bar_shows_a_step_after_a_second_though_those_before_were_quick(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with TrainingLog(None, RunContext("train"), 2001, shows_bar=True) as log:
        now = log._bar.last_print_t
        log._bar._time = lambda: now
        for _ in range(2000):
            now += 1e-4
            log.advance(1)
        now += 1.0
        log.advance(1)
        assert log._bar.last_print_n == 2001


def test_where_the_peak_is_known_its_share_is_shown(tmp_path, messages, monkeypatch):
    monkeypatch.setitem(_flops._PEAKS, "cpu", 1e3 * est.summarize(make(tmp_path), X, Y).flops)
    make(tmp_path, log_step_count_steps=50, save_summary_steps=50).train(endless, steps=200)
    lines = [line for line in messages() if "of peak FLOPs" in line]
    assert lines
    for steps, share in (re.search(r"\((\S+) steps/sec, .*, (\S+)% of peak FLOPs\)", line).groups() for line in lines):
        assert float(share) == pytest.approx(float(steps) / 1e3 * 100, rel=1e-2)
    written = scalars(tmp_path)
    for (_, rate), (_, share) in zip(written["global_step/sec"], written["flops_utilization"], strict=True):
        assert share == pytest.approx(rate / 1e3, rel=1e-5)


def test_a_step_is_not_lowered_for_a_share_that_nobody_reads(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setitem(_flops._PEAKS, "cpu", 1e12)
    monkeypatch.setattr(_programs, "count_flops", lambda traced: counted.append(traced) or 1.0)
    config = {"steps_per_loop": 1, "log_step_count_steps": None}
    make(tmp_path, save_summary_steps=None, **config).train(endless, steps=20)
    assert not counted
    make(tmp_path, save_summary_steps=5, **config).train(endless, steps=20)
    assert len(counted) == 1


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 9999", None),
        ("cpu", None),
    ],
)
def test_peaks_are_of_whole_gpus_by_their_kind(kind, peak):
    assert _flops.peak_flops(kind) == peak


def test_the_slowest_process_is_compared_with_the_median():
    before = [(1.0, 1.0), (1.0, 2.0), (0.0, 0.0)]
    slow_input = [(1.5, 1.25), (5.0, 2.5), (1.0, 0.5)]
    assert _describe_slowest(before, slow_input) == ", process 1 slowest: 3 s longer reading its input"
    slow_host = [(1.5, 4.0), (1.25, 2.25), (0.5, 0.25)]
    assert _describe_slowest(before, slow_host) == ", process 0 slowest: 2.8 s longer on its host"
    assert _describe_slowest(before[:2], slow_input[:2]) == ", process 1 slowest: 3.8 s longer reading its input"
    assert _describe_slowest([], slow_input) == _describe_slowest([(1.0, 1.0)], [(2.0, 2.0)]) == ""


def test_the_stopwatch_stands_still_between_runs(tmp_path):
    stopwatch = make(tmp_path).train(times(3))._runs.stopwatch
    before = stopwatch.read()
    assert all(before[part] > 0 for part in ("input", "host", "compilation"))
    time.sleep(0.01)
    assert stopwatch.read() == before


def test_one_thread_is_measured_at_a_time():
    stopwatch, inside, leave = Stopwatch(), threading.Event(), threading.Event()

    def evaluate():
        with stopwatch.part("evaluation"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=evaluate)
    with stopwatch.part("host"):
        thread.start()
        inside.wait()
    leave.set()
    thread.join()
    seconds = stopwatch.read()
    assert seconds["evaluation"] == 0 and seconds["host"] > 0
    assert stopwatch.read() == seconds  # it stands still
