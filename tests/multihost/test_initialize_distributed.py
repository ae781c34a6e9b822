"""Processes that get together, and those that cannot: real ones, which end by themselves."""

import inspect
import re
import time

import jax
import pytest
from testing.cluster import free_port, shared_cluster

import replicate
from estimator.multihost import _initialize
from estimator.multihost._cluster import ClusterSpec
from estimator.multihost._introduction import Introduction, find_disagreement


def test_processes_join_and_end_at_different_times():
    ended = shared_cluster().run("testing.scenarios.distributed.join", processes=3)
    assert [process.code for process in ended] == [0, 0, 0]
    for i, process in enumerate(ended):
        assert f"process {i} of 3 devices 6" in process.lines
        assert "RuntimeError: initialize_distributed was called before; call it once" in "\n".join(process.lines)
        assert ("mean 299999.5" in process.lines) == (i > 0)
        assert process.lines[-1] == "end"
    table = [
        line for line in ended[0].lines if re.fullmatch(rf"\d +\S+ +\d+ +{re.escape(jax.__version__)} .* 2 x cpu", line)
    ]
    assert [line[0] for line in table] == ["0", "1", "2"]
    assert not any("python" in line for process in ended[1:] for line in process.lines)


@pytest.fixture(scope="module")
def refused():
    """By case, the answer to each of three processes."""
    ended = shared_cluster().run("testing.scenarios.distributed.refused", [free_port() for _ in range(4)], processes=3)
    assert [process.code for process in ended] == [1, 1, 1], ended
    cases = {}
    for process in ended:
        for name, lines in re.findall(r"^case (\w+)\n(.*?)(?=^case |\Z)", "\n".join(process.lines) + "\n", re.M | re.S):
            cases.setdefault(name, []).append([line for line in lines.splitlines() if not of_jax(line)])
    assert all(len(answer) == 3 for answer in cases.values())
    return cases


def of_jax(line):
    """Whether jax's coordination service has written a line of the log, or what belongs to it."""
    return re.match(r"[WEF]\d{4} .*coordination_service", line)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "count",
            r"process 2 \(host \S+, pid \d+\) was started with num_processes=4, process 0 \(host \S+, pid \d+\) with "
            r"num_processes=3\. Give all of them the same\.",
        ),
        (
            "version",
            r"different versions of jax: 0\.10\.2 in process 0 \(host \S+, pid \d+\), 0\.9\.9 in process 2 "
            r"\(host \S+, pid \d+\)\. Install the same everywhere\.",
        ),
        (
            "loopback",
            r"coordinator_address='127\.0\.0\.1:\d+' is a loopback address, which every host has for itself, but "
            r"process 2 \(host b, pid \d+\) is on another host than process 0 \(host a, pid \d+\)\. "
            r"Give the name of process 0's host, as the others know it\.",
        ),
    ],
)
def test_all_processes_say_at_once_and_alike_why_they_do_not_fit(refused, case, message):
    for lines in refused[case]:
        assert len(lines) == 1, lines
        match = re.fullmatch(r"(\S+) RuntimeError: initialize_distributed: " + message, lines[0])
        assert match and float(match[1]) < 10, lines


def test_an_error_is_the_last_line_of_the_process(refused):
    for lines in refused["uncaught"]:
        assert re.fullmatch(
            r"RuntimeError: initialize_distributed: process 2 .* with num_processes=3\. Give .*", lines[-1]
        )


def test_different_numbers_of_devices_are_an_error_in_all():
    for process in shared_cluster().run("testing.scenarios.distributed.different_devices"):
        assert process.code == 1
        assert re.fullmatch(
            r"RuntimeError: initialize_distributed: different devices: 1 x cpu in process 0 \(host \S+, pid \d+\), 2 x "
            r"cpu in process 1 \(host \S+, pid \d+\)\. Give each process as many, of one platform, by "
            r"local_device_ids, CUDA_VISIBLE_DEVICES or jax_num_cpu_devices\.",
            process.lines[-1],
        ), process.lines


def said_within(process, secs, wanted):
    """Whether a process has said, within some seconds, how its call ended."""
    (line,) = [line for line in process.lines if re.match(r"\d+\.\d ", line)]
    match = re.fullmatch(r"(\S+) " + wanted, line)
    assert match and float(match[1]) < secs, line


def test_a_missing_process_and_a_wrong_port_are_errors_within_the_timeout():
    *there, lost = shared_cluster().run("testing.scenarios.distributed.incomplete", free_port(), processes=3)
    for process in there:
        wanted = (
            r"TimeoutError: initialize_distributed: not all of 3 processes have come to "
            r"coordinator_address='127\.0\.0\.1:\d+' within 2 s\. Start each of them once, with this address and its "
            r"own process_id, 0 to 2; see their logs for those that have failed\."
        )
        said_within(process, 10, wanted)
    wanted = (
        r"TimeoutError: initialize_distributed: nobody answers at coordinator_address='127\.0\.0\.1:1' for 2 s "
        r"\(.*refused\)\. Process 0 must run on that host, with the same address\. A loopback address reaches no other "
        r"host\."
    )
    said_within(lost, 10, wanted)
    assert not any("Check failure" in line for process in [*there, lost] for line in process.lines)


def test_a_port_in_use_is_an_error_at_once():
    first, second = shared_cluster().run("testing.scenarios.distributed.port_in_use", free_port())
    said_within(first, 10, "TimeoutError: .*not all of 2 processes have come .*")
    said_within(
        second,
        2.5,  # before its timeout
        r"OSError: initialize_distributed: port \d+ of coordinator_address='127\.0\.0\.1:\d+' is in use on this "
        r"host, by another program or another process 0\. Give another port, to all processes, or end the one that has "
        r"it\.",
    )


def test_a_process_of_another_run_on_the_same_port_ends_with_an_error(tmp_path):
    scenario = "testing.scenarios.distributed.second_run"
    _, second, third = shared_cluster().run(scenario, free_port(), str(tmp_path), processes=3)
    said_within(
        third,
        10,
        r"RuntimeError: initialize_distributed: process 1 \(host \S+, pid \d+\) has come too late: process 1 "
        r"\(host \S+, pid \d+\) runs already at coordinator_address='127\.0\.0\.1:\d+'\. Give each run a port of its "
        r"own, and each process its own process_id\.",
    )
    # jax lets it take the place of the other one, which says so.
    assert second.code == 76
    replaced = r"process 1 \(host \S+, pid \d+\) was replaced by process 1 \(host \S+, pid \d+\) of another run, which"
    assert any(re.match(f"initialize_distributed: {replaced}", line) for line in second.lines), second.lines


@pytest.mark.parametrize(
    ("where", "late"),
    [
        ("connection", "not all of 2 processes have come to"),
        ("sum", "the first sum over all devices has not come within 3 s."),
    ],
)
def test_a_start_that_hangs_ends_within_the_timeout(where, late):
    for process in shared_cluster().run("testing.scenarios.distributed.hangs", where):
        assert (process.code, process.secs < 30) == (1, True)
        assert f"TimeoutError: initialize_distributed: {late}" in process.lines[-1]


def test_a_first_sum_that_is_wrong_is_an_error():
    with pytest.raises(RuntimeError, match="the sum over all 8 devices is wrong: 7 instead of 6. Their connections"):
        _initialize._check_sum(7, 6)


def test_the_first_sum_is_the_sum_of_the_numbers_of_all_devices():
    assert _initialize._sum_device_numbers() == (36, 36)


def test_an_error_of_the_start_is_raised_in_the_thread_that_calls():
    with pytest.raises(KeyError, match="no"):
        cluster, times = ClusterSpec("a:1", 2, 1, "SLURM"), _initialize._Times(time.monotonic() + 5, 5, 2, 1)
        _initialize._run_in_time(lambda: {}["no"], cluster, times, "late")


def introduction(process_id, num_processes=2, **given):
    rest = {"host": "a", "pid": 100 + process_id, "address": "a:1", "loopback": False, "visible_devices": ""}
    versions = {"jax": "1", "jaxlib": "1", "python": "3"}
    return Introduction(process_id, num_processes, **(rest | versions | given))


@pytest.mark.parametrize("difference", [{"python": "4"}, {"visible_devices": "1"}, {"host": "b"}])
def test_processes_may_differ(difference):
    assert find_disagreement([introduction(0), introduction(1, **difference)]) is None


@pytest.mark.parametrize("difference", [{"jax": "2"}, {"jaxlib": "2"}, {"host": "b", "loopback": True}])
def test_processes_that_do_not_fit_are_named(difference):
    text = find_disagreement([introduction(0), introduction(1, **difference)])
    assert "process 0 (host a, pid 100)" in text and "process 1 (host" in text


@pytest.mark.parametrize(
    ("ids", "local_process_id", "hosts", "visible", "chosen"),
    [
        (None, 1, "aa", ("", ""), "1"),  # as SLURM and MPI start one process per GPU
        (None, 1, "ba", ("", ""), None),  # alone on its host
        (None, 1, "aa", ("0", "1"), None),  # its scheduler has given it GPUs of its own
        (None, 1, "aa", ("0,1", "0,1"), "1"),
        (None, None, "aa", ("", ""), None),
        ([2, 3], 1, "aa", ("", ""), "2,3"),
        ([2, 3], None, "ab", ("", ""), "2,3"),
    ],
)
def test_the_gpus_of_a_process(monkeypatch, ids, local_process_id, hosts, visible, chosen):
    updates = {}
    monkeypatch.setattr("jax.config.update", updates.__setitem__)
    cluster = ClusterSpec("a:1", 2, 1, "SLURM", ids, local_process_id)
    processes = [introduction(i, host=hosts[i], visible_devices=visible[i]) for i in range(2)]
    _initialize._choose_devices(cluster, processes)
    assert updates.get("jax_cuda_visible_devices") == updates.get("jax_rocm_visible_devices") == chosen


def test_it_comes_before_the_devices_are_started():
    (ended,) = shared_cluster().run("testing.scenarios.distributed.too_late_to_join", processes=1)
    assert ended.lines[-1].endswith(
        "RuntimeError: initialize_distributed must be called before jax starts its devices;"
        " they have been started, by a computation, jax.devices() or the like. Call it at the start of the script."
    )


@pytest.fixture
def new_process(monkeypatch):
    """As if nothing had been done yet, and nothing named other processes."""
    monkeypatch.setattr(_initialize, "_is_initialized", False)
    monkeypatch.setattr("estimator.multihost._coordination_client.devices_are_started", lambda: False)
    for name in ("TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_may_be_alone(new_process, messages):
    replicate.initialize_distributed()
    assert messages() == [
        "initialize_distributed: one process (nothing names others: no arguments, TF_CONFIG, SLURM, MPI or Kubernetes)."
    ]
    with pytest.raises(RuntimeError, match="initialize_distributed was called before"):
        replicate.initialize_distributed()


def test_one_process_by_arguments(new_process, messages):
    replicate.initialize_distributed(num_processes=1)
    assert messages() == ["initialize_distributed: one process (the arguments)."]


def test_a_process_counts_as_lost_after_thirty_seconds_unless_told_otherwise():
    assert inspect.signature(replicate.initialize_distributed).parameters["heartbeat_timeout_secs"].default == 30


@pytest.mark.parametrize("name", ["timeout_secs", "heartbeat_timeout_secs", "grace_secs"])
def test_seconds_are_positive(new_process, name):
    with pytest.raises(ValueError, match=f"{name} of initialize_distributed must be a positive number; got 0"):
        replicate.initialize_distributed(**{name: 0})
