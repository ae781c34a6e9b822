"""Processes that get together, and those that cannot: real ones, which end by themselves."""

import re
import socket
import time
from concurrent import futures

import jax
import pytest
from testing.cluster import free_port, shared_cluster

import replicate
from estimator.multihost import _initialize, _supervisor, _supervisor_client
from estimator.multihost._cluster import Job
from estimator.multihost._runtime import RUNTIME


def test_processes_meet_and_end_at_different_times():
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
    ended = shared_cluster().run("testing.scenarios.distributed.refused", [free_port() for _ in range(7)], processes=3)
    assert [process.code for process in ended] == [1, 1, 1]
    cases = {}
    for process in ended:
        for name, lines in re.findall(r"^case (\w+)\n(.*?)(?=^case |\Z)", "\n".join(process.lines) + "\n", re.M | re.S):
            cases.setdefault(name, []).append(lines.splitlines())
    assert all(len(answer) == 3 for answer in cases.values())
    return cases


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "count",
            r"process 2 \(host \S+, pid \d+\) was started with num_processes=4, process 0 with num_processes=3\. "
            r"Give all of them the same\.",
        ),
        (
            "id",
            r"two processes were started with process_id=1: process 1 \(host \S+, pid \d+\) and process 1 "
            r"\(host \S+, pid \d+\)\. Give each its own, 0 to 2\.",
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
def test_all_processes_are_told_at_once_why_they_do_not_fit(refused, case, message):
    for lines in refused[case]:
        assert len(lines) == 1
        match = re.fullmatch(r"(\S+) RuntimeError: initialize_distributed: " + message, lines[0])
        assert match and float(match[1]) < 10, lines


def test_a_missing_process_is_named_within_the_timeout(refused):
    wanted = r"(\S+) TimeoutError: initialize_distributed: of 3 processes these have not come within 2 s: 2\. Were .*"
    for (line,) in refused["missing"][:2]:
        match = re.fullmatch(wanted, line)
        assert match and float(match[1]) < 8, line


def test_a_wrong_port_is_an_error_within_the_timeout(refused):
    ((line,),) = refused["missing"][2:]
    match = re.fullmatch(
        r"(\S+) TimeoutError: initialize_distributed: nobody answers at coordinator_address='127\.0\.0\.1:1' for 2 s "
        r"\(.*refused\)\. Process 0 must run on that host, with the same address\. A loopback address reaches no other "
        r"host\.",
        line,
    )
    assert match and float(match[1]) < 6, line


def test_a_port_in_use_is_an_error_at_once(refused):
    (waits,), (second,), (other,) = refused["port"]
    match = re.fullmatch(
        r"(\S+) OSError: initialize_distributed: port \d+ of coordinator_address='127\.0\.0\.1:\d+' is in use on this "
        r"host, by another program or another process 0\. Give another port, to all processes, or end the one that has "
        r"it\.",
        second,
    )
    assert match and float(match[1]) < 6, second
    assert "these have not come within 2 s: 1. Were" in waits
    assert "these have not come within 2 s: 1. Were" in other


def test_an_error_is_the_last_line_of_the_process(refused):
    for lines in refused["uncaught"]:
        assert re.fullmatch(
            r"RuntimeError: initialize_distributed: process 2 .* with num_processes=3\. Give .*", lines[-1]
        )


@pytest.mark.parametrize("where", ["connection", "sum"])
def test_a_start_that_hangs_ends_within_the_timeout(where):
    for process in shared_cluster().run("testing.scenarios.distributed.hangs", where):
        assert (process.code, process.secs < 10) == (1, True)
        assert (
            "TimeoutError: initialize_distributed: the first sum over all devices has not come within 3 s."
            in (process.lines[-1])
        )


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (lambda: (7, 6), RuntimeError, "the sum over all 8 devices is wrong: 7 instead of 6. Their connections"),
        (lambda: {}["no"], KeyError, "no"),
    ],
)
def test_a_first_sum_that_fails_is_an_error(monkeypatch, work, error, message):
    monkeypatch.setattr(_initialize, "_sum_of_device_numbers", work)
    with pytest.raises(error, match=message):
        _initialize._start_devices(lambda: None, time.monotonic() + 5, 5)


def test_the_first_sum_is_that_of_the_numbers_of_all_devices():
    assert _initialize._sum_of_device_numbers() == (36, 36)


def hello(process_id, num_processes, **given):
    versions = {"jax": "1", "jaxlib": "1", "python": "3"}
    rest = {"host": "a", "pid": 100 + process_id, "address": "a:1", "loopback": False, "visible": ""}
    return {"process_id": process_id, "num_processes": num_processes, **versions, **rest, **given}


@pytest.fixture
def hub():
    """Starts one; returns its address."""
    hubs = []

    def start(num_processes):
        address = f"127.0.0.1:{free_port()}"
        hubs.append(_supervisor_client.start_hub(address, num_processes, 20, 60))
        return address

    yield start
    for hub in hubs:
        hub.kill()
        hub.wait()


def introduce(address, hello, secs=20):
    deadline = time.monotonic() + secs
    channel = _supervisor_client.connect(address, deadline)
    return channel, _supervisor_client.introduce(channel, address, hello, deadline)


def meet_all(address, hellos):
    with futures.ThreadPoolExecutor(len(hellos)) as threads:
        return list(threads.map(lambda each: introduce(address, each), hellos))


def close_all(answers):
    for channel, _ in answers:
        channel.socket.close()


def test_many_meet_among_strangers_and_one_more_is_told_so(hub):
    address = hub(64)
    strangers = [socket.create_connection(_supervisor_client.split_address(address)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(b'{"goodbye": 1}\n')
    answers = meet_all(address, [hello(i, 64) for i in range(64)])
    assert len({answer["begin"] for _, answer in answers}) == 1
    assert [each["pid"] for each in answers[0][1]["processes"]] == list(range(100, 164))
    assert all(
        answer["chief"] == "process 0 (host a, pid 100)" and not answer["processes"] for _, answer in answers[1:]
    )
    with pytest.raises(
        RuntimeError,
        match=r"process 5 \(host b, pid 105\) has come too late: 64 processes have begun already, process 5 \(host a, "
        r"pid 105\) among them\.",
    ):
        introduce(address, hello(5, 64, host="b"))
    close_all([*answers, *((_supervisor.Channel(stranger), None) for stranger in strangers)])


@pytest.mark.parametrize(
    ("hosts", "visible", "shares"),
    [
        ("ab", ("", ""), [False, False]),
        ("aa", ("", ""), [True, True]),
        ("aa", ("0", "1"), [False, False]),
        ("aab", ("0,1", "0,1", "0,1"), [True, True, False]),
    ],
)
def test_processes_that_see_the_same_devices_are_told_so(hub, hosts, visible, shares):
    hellos = [
        hello(i, len(hosts), host=host, visible=devices)
        for i, (host, devices) in enumerate(zip(hosts, visible, strict=True))
    ]
    answers = meet_all(hub(len(hosts)), hellos)
    assert [answer["shares_devices"] for _, answer in answers] == shares
    close_all(answers)


def test_one_that_gives_up_is_named_to_all_and_to_those_that_come_later(hub):
    address = hub(3)
    left = r"process 1 \(host a, pid 101\) has left before all 3 processes were there\."
    with futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(introduce, address, hello(0, 3))
        with pytest.raises(TimeoutError, match="these processes have not come in time: (0, )?2\\."):
            introduce(address, hello(1, 3), 2)
        with pytest.raises(RuntimeError, match=left):
            first.result()
    with pytest.raises(RuntimeError, match=left):
        introduce(address, hello(2, 3))


@pytest.mark.parametrize(
    ("ids", "local_process_id", "shares_devices", "chosen"),
    [
        (None, 1, True, "1"),  # as SLURM and MPI start one process per GPU
        (None, 1, False, None),  # alone on its host, or its scheduler has given it GPUs of its own
        (None, None, True, None),
        ([2, 3], 1, True, "2,3"),
        ([2, 3], None, False, "2,3"),
    ],
)
def test_the_gpus_of_a_process(monkeypatch, ids, local_process_id, shares_devices, chosen):
    updates = {}
    monkeypatch.setattr("jax.config.update", updates.__setitem__)
    job = Job("a:1", 2, 1, "SLURM", ids, local_process_id)
    _initialize._choose_devices(job, shares_devices)
    assert updates.get("jax_cuda_visible_devices") == updates.get("jax_rocm_visible_devices") == chosen


def test_something_else_at_the_address_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener, futures.ThreadPoolExecutor(1) as threads:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        answers = threads.submit(introduce, address, hello(1, 2))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")
            with pytest.raises(
                RuntimeError, match="what answers at coordinator_address='127.* is not process 0 of this"
            ):
                answers.result()


def test_something_silent_at_the_address_is_an_error_within_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TimeoutError, match="at coordinator_address='127.* there is no answer in time"):
            introduce(address, hello(1, 2), 0.5)


def test_it_comes_before_the_devices_are_started():
    (ended,) = shared_cluster().run("testing.scenarios.distributed.too_late_to_meet", processes=1)
    assert ended.lines[-1].endswith(
        "RuntimeError: initialize_distributed must be called before jax starts its devices;"
        " they have been started, by a computation, jax.devices() or the like. Call it at the start of the script."
    )


@pytest.fixture
def new_process(monkeypatch):
    """As if nothing had been done yet, and nothing named other processes."""
    monkeypatch.setattr(RUNTIME, "is_initialized", False)
    monkeypatch.setattr("estimator.multihost._coordination_client.devices_are_started", lambda: False)
    for name in ("TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_alone_goes_on(new_process, messages):
    replicate.initialize_distributed()
    assert messages() == [
        "initialize_distributed: one process (nothing names others: no arguments, TF_CONFIG, SLURM, MPI or Kubernetes)."
    ]
    with pytest.raises(RuntimeError, match="initialize_distributed was called before"):
        replicate.initialize_distributed()


def test_one_process_by_arguments(new_process, messages):
    replicate.initialize_distributed(num_processes=1)
    assert messages() == ["initialize_distributed: one process (the arguments)."]


@pytest.mark.parametrize("name", ["timeout_secs", "heartbeat_timeout_secs", "grace_secs"])
def test_seconds_are_positive(new_process, name):
    with pytest.raises(ValueError, match=f"{name} of initialize_distributed must be a positive number; got 0"):
        replicate.initialize_distributed(**{name: 0})
