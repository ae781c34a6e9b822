"""Who dies, how, and when, and what must hold then: of processes alone, and of several that work together.

Each case starts processes, waits for a moment of one of them, sends signals, and looks at how all have ended and at
what is on the disk.
"""

import os
import random
import re
from signal import SIGABRT, SIGCONT, SIGINT, SIGKILL, SIGSTOP, SIGTERM
from typing import NamedTuple

import numpy as np
import pytest
from soak.kills import WITHIN, Soak
from testing.cluster import shared_cluster
from testing.estimators import make, saved_at, step_of, times, unfinished
from testing.outcomes import merged, run, said
from testing.scenarios import killed_training

from estimator.checkpoint._checkpoint import Checkpoint

pytestmark = pytest.mark.covers("1.3 preemption", "13 10 no end and no checkpoint on errors and signals")
CODES = {SIGTERM: 75, SIGINT: -SIGINT}  # of what saves and ends


# Alone.


class Alone(NamedTuple):
    function: str  # which blocks, of testing.scenarios.preempted
    args: list[int]  # the batches before it blocks
    ends: list[str]  # of its runs: their stop_reason, step and error
    saved: list[int]
    steps: int = 0  # of a training before
    code: int = 75


ALONE = {
    "a training": Alone("train", [5], ["training {} 5 -"], [0, 5]),
    "a training before there is a batch": Alone("train", [0], [], []),
    "an evaluation before there is a batch": Alone("evaluate", [0], [], []),
    "an evaluation": Alone("evaluate", [2], ["evaluation {} 3 Preempted"], [0, 3], 3),
    "a prediction": Alone("predict", [2], ["prediction {} 3 -"], [0, 3], 3),
    "a reader of predictions": Alone("read_predictions", [], ["prediction {} 3 -"], [0, 3], 3),
    "an evaluation in a training": Alone(
        "evaluate_in_training", [2], ["evaluation {} 4 Preempted", "training {} 4 -"], [0, 4]
    ),
    "one before there is a batch": Alone("evaluate_in_training", [0], ["training {} 4 -"], [0, 4]),
    "an exporter after a training": Alone("export_after_training", [], [], [0, 3]),
    "predictions that nobody reads on": Alone("leave_predictions", [], ["training {} 6 -"], [0, 3, 6], 3),
    "what follows all runs": Alone("distill", [], [], [0, 2], code=-SIGTERM),
    "a training in another thread": Alone("in_a_thread", [], [], [0], code=-SIGTERM),
    "a training with a handler of the user's own": Alone(
        "with_own_handler", [], ["own handler", "training input 6 -"], [2, 3, 4, 5, 6], code=0
    ),
    # All of its processes get the signal.
    "a training with forked workers": Alone("pool_in_input", [], ["training {} 5 -"], [0, 5]),
}
AT_ONCE = {  # what Ctrl-C does not end as SIGTERM does
    "an evaluation": ["evaluation SIGINT 3 KeyboardInterrupt"],
    "a reader of predictions": ["prediction closed 3 -"],
    "an evaluation in a training": ["evaluation SIGINT 4 KeyboardInterrupt", "training SIGINT 4 -"],
}


BY_CTRL_C = [*AT_ONCE, "a training", "an evaluation before there is a batch", "what follows all runs"]
BY_CTRL_C += ["a training with a handler of the user's own"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "number"), [*((case, SIGTERM) for case in ALONE), *((case, SIGINT) for case in BY_CTRL_C)]
)
def test_a_signal_ends_what_blocks_and_saves_the_last_step_of_a_training(tmp_path, case, number):
    function, args, ends, saved, steps, code = ALONE[case]
    if steps:
        make(tmp_path).train(times(steps))
    (ended,) = shared_cluster().end(f"testing.scenarios.preempted.{function}", tmp_path, *args, kills=[(0, number)])
    lines = ended.lines[ended.lines.index("blocked") :]
    is_interrupt = number == SIGINT
    ends = AT_ONCE[case] if is_interrupt and case in AT_ONCE else [end.format(number.name) for end in ends]
    assert [line.removeprefix("end: ") for line in lines if line.startswith("end: ")] == ends
    assert ended.code == (-SIGINT if is_interrupt and code else code), lines
    assert saved_at(tmp_path) == saved
    assert saved or os.listdir(tmp_path) == []
    last = "".join(map(str, saved[-1:]))
    says = f"KeyboardInterrupt: Training ended after step {last}. It is saved as {tmp_path}/ckpt-{last}: call "
    assert any(line.startswith(says) for line in lines) == any("training SIGINT" in end for end in ends)
    assert ended.code != 75 or not (tmp_path / "training.lock").exists()


@pytest.mark.slow
def test_ctrl_c_while_a_program_is_compiled_ends_the_process_and_can_be_caught(tmp_path):
    how = {"kills": [(0, SIGINT)], "within": 20, "later": 2.5}
    (ended,) = shared_cluster().end("testing.scenarios.lives.compile_long", tmp_path, **how)
    assert "caught" in ended.lines and ended.code in (-SIGINT, 130)


@pytest.mark.slow
def test_ctrl_c_while_checkpoints_are_written_ends_the_process(tmp_path):
    how = {"kills": [(0, SIGINT)], "later": 0.7}
    (ended,) = shared_cluster().end("testing.scenarios.lives.endless_training", tmp_path, **how)
    assert ended.code == -SIGINT
    assert saved_at(tmp_path)[-1] == step_of(make(tmp_path))


ENDS = {  # of each training, one after the other
    "a generator": [SIGKILL, SIGTERM, SIGINT],
    "grain's DataLoader": [SIGKILL] * 3,
    "grain's MapDataset": [SIGINT, SIGKILL, SIGTERM],
    "numpy_input_fn": [WITHIN] * 3,
}


@pytest.mark.covers("1.3 auto-resume")
@pytest.mark.quick
@pytest.mark.usefixtures("users_compiler")
@pytest.mark.parametrize("name", ENDS)
def test_trainings_killed_at_twelve_points_are_those_that_were_not(tmp_path, name):
    assert sum(map(len, ENDS.values())) == 12 and ENDS.keys() == killed_training.RUNS.keys()
    soak = Soak(tmp_path, seed=name)
    ended = soak.run(name, ENDS[name], compiles_all=name == "grain's MapDataset")
    assert (soak.differ, soak.codes) == ([], [(way, CODES.get(way, -SIGKILL)) for way in ENDS[name]])
    assert len(ended) > 5 and ended["global_step"] == killed_training.STEPS
    assert len(np.unique(ended["seen"])) == killed_training.ROWS and len(np.unique(ended["seen"], axis=0)) > 200


@pytest.mark.covers("10 input thread")
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_a_signal_interrupts_the_wait_and_the_process_ends_at_once_though_the_input_blocks(number):
    (ended,) = shared_cluster().end("testing.scenarios.lives.wait_for_input", kills=[(0, number)], later=0.2)
    assert (ended.code, ended.lines) == (0, ["blocked", "interrupted 2"])


# Together, where one is lost: the others end, and name it.

WORK, TRAIN = "testing.scenarios.distributed.work", "testing.scenarios.team_deaths.train"
DEAD = r" has died, or its host has: .*"
SILENT = r" has died, or its host has: nothing was heard of it for 2 s"
ERROR = " ended with ValueError: no such file"
AGAIN = ". Start all processes again: training resumes from the last checkpoint."


def assert_misses(process, lost, why):
    """A process has ended since another was lost: by an error of Python, by its own exit code where a collective cannot
    be interrupted, or by jax where it is process 0; with one line that says why."""
    lines = "\n".join(process.lines)
    if why is None:
        assert process.code == -SIGABRT and "the leader task" in lines.lower(), lines
        return
    loss = rf"process \d \(host {os.uname().nodename}, pid {lost.pid}\){why}"
    if process.code == 76:
        late = r"; this process still waits for it after \d s\. It ends with exit code 76\."
        assert re.search(f"^initialize_distributed: {loss}{late}$", lines, re.M), lines
    else:
        error = r"estimator\.multihost\._supervisor\.ProcessLostError: "
        assert process.code == 1 and re.fullmatch(error + loss + re.escape(AGAIN), process.lines[-1]), lines
    assert "Check failure stack trace" not in lines


DIES = {  # who, how, of how many, what the test does; its exit codes; what the others say of it, if jax lets them
    "killed, not a copy that holds its connection": (1, "fork", 2, [], [-SIGKILL], SILENT),
    "killed, and seen from Python, and caught": (1, "poll", 2, [], [-SIGKILL], SILENT),
    "process 0 killed": (0, "kill", 3, [], [-SIGKILL], None),
    "an error": (1, "raise", 2, [], [1], ERROR),
    "an error of process 0": (0, "raise", 3, [], [1], ERROR),
    # It counts as dead, and when it wakes it says so, or jax does before.
    "stopped": (2, "stop", 3, [(2, SIGSTOP), (1, None), (0, None), (2, SIGCONT)], [76, -SIGABRT], SILENT),
}


@pytest.mark.parametrize("case", DIES)
def test_one_that_dies_is_named_by_the_others_which_end(case):
    victim, way, processes, kills, codes, why = DIES[case]
    moment = (processes - 1, "working")
    ended = shared_cluster().end(WORK, victim, way, processes=processes, moment=moment, kills=kills)
    lost, others = ended[victim], ended[:victim] + ended[victim + 1 :]
    assert lost.code in codes, lost.lines
    assert way != "raise" or lost.lines[-2:] == ["ValueError: no such file", "in the folder"]
    assert "the copy ends" not in lost.lines
    for other in others:
        assert other.secs - lost.secs < 12  # the heartbeat's time and 10 seconds
        assert_misses(other, lost, why)
        assert way != "stop" or other.code == 76
    if way == "poll":
        lines, loss = "\n".join(others[0].lines), rf"process 1 \(host \S+, pid {lost.pid}\){why}"
        assert re.search(f"^lost: {loss}$", lines, re.M), lines
        caught = re.escape(f"{AGAIN} from JaxRuntimeError('closed by peer')")
        assert re.search(f"^caught: {loss}{caught}$", lines, re.M), lines
        assert others[0].code == 1  # the error of jax that leaves the process is explained there


def test_a_process_that_is_to_stop_asks_who_lives_and_does_not_wait_for_heartbeats(tmp_path):
    """As under `srun --kill-on-bad-exit=1`, which kills it 30 s later: the other one, whose input blocks, has died."""
    does, group = [*ENDLESS, [1, "input 30", "hang"]], {"heartbeat_timeout_secs": 600.0}
    how = {"processes": 2, "moment": (1, "hangs"), "kills": [(1, SIGKILL), (0, SIGTERM)]}
    one, lost = shared_cluster().end(TRAIN, tmp_path, does, 60, group, AT_THE_END, **how)
    assert one.code == 1
    assert_misses(one, lost, r" has died, or its host has: it does not answer within 5 s")


# Together, where one gets a signal: all save the same step, and end.

AT_THE_END = {"save_checkpoints_steps": 1000, "steps_per_loop": "auto"}
ENDLESS = [[None, "input", 0.05], [None, "input 55", "hang"]]  # on a machine too busy to send the signal before
TERMINATED = {  # what they do, which process is waited for and who gets the signal then, and the step that may be saved
    "all": (ENDLESS, (1, "step 6"), (1, 0), range(6, 60)),
    "one, the other after its training": ([*ENDLESS, [0, "after", "signal"]], (1, "step 6"), (1,), range(6, 60)),
    "one, where the other's input blocks": ([*ENDLESS, [0, "input 30", "hang"]], (0, "hangs"), (1,), range(20, 60)),
    "one within an evaluation of all": (None, (1, "evaluating"), (1,), range(5, 10)),
    "one before its first batch": ([[1, "begin", "signal"]], None, (), None),
}


@pytest.mark.parametrize(
    ("case", "number"),
    [*((case, SIGTERM) for case in TERMINATED), ("all", SIGINT), ("one, where the other's input blocks", SIGINT)],
)
def test_a_signal_to_any_process_ends_all_with_a_checkpoint_of_the_same_step(tmp_path, case, number):
    does, moment, who, steps = TERMINATED[case]
    scenario = [TRAIN, tmp_path, does, 60, None, AT_THE_END]
    if does is None:
        scenario = ["testing.scenarios.team_deaths.evaluate_until_terminated", tmp_path]
    else:
        scenario[2] = [[*when, number.name if what == "signal" else what] for *when, what in does]
    ended = shared_cluster().end(*scenario, processes=2, moment=moment, kills=[(index, number) for index in who])
    for process in ended:
        assert process.code == CODES[number], "\n".join(process.lines)
    if steps:
        report, other = (said(process.lines)[-1] for process in ended)
        assert report == other and report["at"] in steps
        assert (report["ended"], report["error"]) == (number.name, "NoneType")
        assert saved_at(tmp_path) == [0, report["at"]]


# Together, again and again: each in the run that resumes the one before; the last one comes to the end.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return values_of(tmp_path_factory.mktemp("undisturbed"))


def values_of(model_dir):
    """The variables at the end of a training where nothing happens, the same in both processes."""
    one, other = (merged(rows)["values"] for rows in run(TRAIN, model_dir))
    assert one == other and saved_at(model_dir)[-1] == 28 and not unfinished(model_dir)
    return one


KILLED = [  # who, after which step or within the write of a checkpoint
    (1, 10),
    (0, 16),
    (0, "write"),
    (1, "write"),
]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_and_the_next_run_resumes(tmp_path, undisturbed):
    newest, when, group = 0, random.Random(0), {"grace_secs": 5.0, "heartbeat_timeout_secs": 6.0}
    for victim, at in KILLED:
        is_within = at == "write"
        does = [[None, "input", 0.15], *([[victim, "write", "hang"]] if is_within else [])]
        moment, later = (victim, "hangs" if is_within else f"step {at}"), when.uniform(0, 0.2)
        how = {"processes": 2, "moment": moment, "kills": [(victim, SIGKILL)], "within": 30, "later": later}
        ended = shared_cluster().end(TRAIN, tmp_path, does, 28, group, **how)
        lost, other = ended[victim], ended[1 - victim]
        assert lost.code == -SIGKILL
        by_jax = victim == 0 and (not is_within or other.code == -SIGABRT)
        assert_misses(other, lost, None if by_jax else DEAD)
        last, newest = newest, saved_at(tmp_path)[-1]
        assert Checkpoint(f"{tmp_path}/ckpt-{newest}").read_all(["*"])["global_step"] == newest
        assert newest == last if is_within else newest >= at - 2 * 4
    assert values_of(tmp_path) == undisturbed


LIMITS = {"begin": 10.0, "checkpoint": 6.0, "end": 6.0}  # in seconds; in other phases 3
HANGS = {  # who, when, how, and in which phase
    "in training": [
        *((1, "input 6", "hang", "input"), (0, "hook", "allgather", "hook"), (1, "hook", "stop", "hook")),
    ],
    "at its ends": [
        *((0, "save", "hang", "checkpoint"), (1, "restore", "hang", "begin")),
        *((0, "hook", "stop", "hook"), (1, "end", "hang", "end")),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGS)
def test_a_process_that_hangs_ends_with_the_others_and_the_next_run_is_equal(tmp_path, undisturbed, name):
    for who, when, what, phase in HANGS[name]:
        is_stopped, limit = what == "stop", LIMITS.get(phase, 3.0)
        kills = [(who, SIGSTOP), (1 - who, None), (who, SIGKILL)] if is_stopped else []
        how = {"processes": 2, "moment": (who, "hangs"), "kills": kills, "within": limit + 30}
        # jax ends a process that does not hear of process 0 for so long.
        given = [[who, when, "hang" if is_stopped else what]], 28, {"heartbeat_timeout_secs": 100.0}
        ended = shared_cluster().end(TRAIN, tmp_path, *given, {"limits": {phase: limit}}, **how)
        does = "does not answer" if is_stopped else "waits for no other"
        why = rf"process {who} \(host \S+, pid \d+\) {does}, and the limit of .* has passed"
        for index, process in enumerate(ended):
            lines = "\n".join([f"{when} in {who}:", *process.lines])
            if is_stopped and index == who:
                assert process.code == -SIGKILL, lines
                continue
            assert process.code == 76, lines
            assert re.search(rf"^initialize_distributed: {why}\. It ends with exit code 76\.$", lines, re.M), lines
            report = lines[re.search(rf"{why}\.$", lines, re.M).start() :]
            assert re.search(rf"^Process {index} on \S+: For the last \d+\.\d s it is in phase '{phase}'", report, re.M)
            assert "Thread 'MainThread' (the run), most recent call last:" in report
        assert saved_at(tmp_path)[-1] == (28 if when == "end" else 4)
    assert values_of(tmp_path) == undisturbed


# Together, where all ends well.


def assert_well(processes):
    for process in processes:
        assert process.code == 0, "\n".join(process.lines)
        assert not [line for line in process.lines if line[:1] != "{" and re.search(r"\b[eE]rror|Error", line)]


@pytest.mark.parametrize("slow", [0, 2])
def test_processes_may_end_at_different_times(tmp_path, slow):
    assert_well(shared_cluster().run(TRAIN, tmp_path, [[slow, "after", 3]], 2, processes=3))
    assert saved_at(tmp_path) == [0, 2]


def test_processes_may_disconnect_by_themselves_before_they_end():
    assert_well(shared_cluster().run("testing.scenarios.team_lives.disconnect"))


@pytest.mark.slow
def test_processes_that_wait_hardly_ask_the_service(tmp_path):
    """Each request costs both sides some 60 context switches; polling made 30 of them per second."""
    for (each,) in run("testing.scenarios.team_deaths.wait", str(tmp_path), 6):
        assert each["calls"] < 20
