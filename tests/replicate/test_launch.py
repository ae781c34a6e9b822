"""`python -m replicate.launch`: what it starts, what it says, and that nothing it started is left."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from testing.engines.launched import Launched, is_alive, training, whole
from testing.signals import wait_until

from replicate import launch

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "replicate.launch"]


HEAD = """import os, signal, sys, time
rank, folder = int(os.environ['JAX_PROCESS_ID']), {folder!r}

def wait_for(name):
    deadline = time.monotonic() + 60
    while not os.path.exists(folder + '/' + name) and time.monotonic() < deadline:
        time.sleep(0.01)

"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(HEAD.format(folder=str(tmp_path)) + textwrap.dedent(text))
        return str(path)

    return write


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        launch.main([str(argument) for argument in arguments])
    return ended.value.code


def ended_in_time(pids, secs=10):
    return wait_until(lambda: not any(map(is_alive, pids)), secs=secs)


def test_each_process_gets_its_number_and_one_address_and_the_lines_say_which_it_was(script, capsys, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR_ADDRESS"
    path = script(f"print(*[os.environ[name] for name in {names}], sys.argv[1:])\nprint('warning', file=sys.stderr)")
    assert run("--processes", 3, "--devices-per-process", 2, path, "--steps", "10") == 0
    out, err = capsys.readouterr()
    (address,) = {line.split()[4] for line in out.splitlines()}
    assert address.startswith("localhost:")
    assert sorted(out.splitlines()) == [f"[{i}] {i} 3 2 {address} ['--steps', '10']" for i in range(3)]
    assert sorted(err.splitlines()) == [f"[{i}] warning" for i in range(3)]


@pytest.mark.parametrize("given, shares", [((), ["0,1", "5,7"]), (("--devices-per-process", 1), ["0", "1"])])
def test_gpus_are_divided_among_the_processes(script, capsys, monkeypatch, given, shares):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5,7")
    assert run("--processes", 2, *given, script("print(os.environ['CUDA_VISIBLE_DEVICES'])")) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{i}] {share}" for i, share in enumerate(shares)]


def test_a_module_is_started_as_python_does(capsys):
    assert run("--processes", 1, "-m", "platform", "--terse") == 0
    assert capsys.readouterr().out.startswith("[0] Linux")


@pytest.mark.parametrize(
    "death, how, code",
    [("sys.exit(3)", "exit code 3", 3), ("os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL", 137)],
)
def test_the_first_that_fails_is_named_and_gives_the_exit_code(script, capsys, death, how, code):
    path = script(f"""
        if rank == 1:
            open(folder + "/dies", "w")
            {death}
        wait_for("dies")
        time.sleep(0.5)
        sys.exit(5)  # as those that miss it end
    """)
    assert run("--processes", 3, path) == code
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("replicate.launch: process 1 (pid ") and first.endswith(f" ended with {how}.")
    assert second == "replicate.launch: waits up to 5 s for the others, which miss it."


@pytest.mark.quick
@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: The input of process 0 failed: OSError: the disk is gone. See there.",
        "RuntimeError: Process 0 failed in `train(steps=None, max_steps=None)`: OSError: the disk is gone",
        "estimator.ProcessLostError: process 0 (host a, pid 4711) ended with OSError: the disk is gone. Start all",
        "RuntimeError: Process 0 called `train(steps=2, max_steps=None)`, process 1 `train(steps=3, max_steps=None)`.",
    ],
)
def test_the_failure_that_others_follow_from_is_named_though_it_ends_last(script, capsys, said):
    path = script(f"""
        if rank == 1:
            print({said!r}, file=sys.stderr)
            open(folder + "/dies", "w")
            sys.exit(1)
        wait_for("dies")
        time.sleep(0.5)  # process 0 waits for the others at its exit
        sys.exit(3)
    """)
    follows = " called " not in said
    assert run("--processes", 2, path) == (3 if follows else 1)
    last = capsys.readouterr().err.splitlines()[-1]
    assert (last == "replicate.launch: process 1 failed since process 0 did: see the error of [0].") == follows


def test_those_that_do_not_end_by_themselves_are_ended_with_all_that_they_started(
    script, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(launch, "_GRACE_SECS", 0.5)
    path = script("""
        import subprocess
        if rank == 0:
            wait_for("pids")
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(folder + "/new", "w").write(f"{os.getpid()} {child.pid}")
        os.rename(folder + "/new", folder + "/pids")
        time.sleep(600)
    """)
    assert run("--processes", 2, path) == 1
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and ended_in_time(pids)
    assert "ends the 1 processes that still run, 0.5 s after the failure." in capsys.readouterr().err


def test_all_start_again_until_they_succeed(script, capsys, monkeypatch, tmp_path):
    pauses = []
    monkeypatch.setattr(launch.Launcher, "_pause", lambda self, secs: pauses.append(secs))
    path = script("""
        with open(folder + f"/starts{rank}", "a") as file:
            file.write("x")
        starts = os.path.getsize(file.name)
        if rank == 1 and starts <= 3:
            sys.exit(9)
    """)
    assert run("--processes", 2, "--max-restarts", 5, path) == 0
    assert [(tmp_path / f"starts{rank}").read_text() for rank in (0, 1)] == ["xxxx"] * 2
    assert pauses == [1.0, 2.0, 4.0]
    assert "starts all processes again in 4 s; 2 more times at most." in capsys.readouterr().err


def test_after_the_last_restart_the_exit_code_matches_the_failure(script, monkeypatch):
    monkeypatch.setattr(launch.Launcher, "_pause", lambda self, secs: None)
    assert run("--processes", 1, "--max-restarts", 2, script("sys.exit(7)")) == 7


READY = "open(folder + f'/ready{rank}', 'w').write(str(os.getpid()))\n"


@pytest.fixture
def launched(script, tmp_path):
    """Starts the launcher in a process of its own; `(launcher, pids)` once all its processes run."""
    launchers = []

    def start(text, processes=2, restarts=0):
        path = script(textwrap.dedent(text).replace("READY", READY))
        command = [*LAUNCH, f"--processes={processes}", f"--max-restarts={restarts}", path]
        launchers.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        files = [tmp_path / f"ready{rank}" for rank in range(processes)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return launchers[-1], [int(file.read_text()) for file in files]

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_and_nothing_starts_again(launched, number):
    launcher, pids = launched(
        f"""
        signal.signal({int(number)}, lambda *_: sys.exit(75))
        READY
        time.sleep(600)
        """,
        restarts=3,
    )
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 75
    assert err.count("ended with exit code 75") == 2 and "again" not in err
    assert ended_in_time(pids)


def test_a_second_signal_kills(launched):
    launcher, pids = launched("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nREADY\ntime.sleep(600)\n")
    launcher.terminate()
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.terminate()
    launcher.communicate(timeout=30)
    assert launcher.returncode == 137 and ended_in_time(pids)


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not end the children of a process that was killed"
)
def test_no_process_outlives_a_launcher_that_was_killed(launched):
    launcher, pids = launched("READY\ntime.sleep(600)\n", processes=3)
    launcher.kill()
    assert ended_in_time(pids)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--processes", "0"], "--processes must be at least 1; got 0"),
        (["--processes", "2", "--devices-per-process", "2"], "2 processes with 2 GPUs each need 4; this host has 3"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert run(*arguments, "script.py") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--hosts", "2"], ["--host-index=0"], ["--coordinator=host0:1234"]])
def test_several_hosts_are_refused_with_what_to_use_instead(option, capsys):
    assert run("--processes", 2, *option, "script.py") == 2
    message = capsys.readouterr().err
    assert f"error: {option[0].partition('=')[0]}: replicate.launch starts the processes of one host" in message
    assert all(name in message for name in ("torchrun --nnodes", "srun", "Kubeflow", "docs/many_hosts.md"))


def test_it_imports_the_standard_library_alone():
    text = pathlib.Path(launch.__file__).read_text()
    modules = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert modules <= sys.stdlib_module_names | {"__future__"}


@pytest.mark.slow
def test_a_training_whose_processes_are_killed_ends_with_the_bits_of_one_that_is_not(tmp_path):
    """`LAUNCH_KILLS=20` kills more often."""
    kills, random = int(os.environ.get("LAUNCH_KILLS", "2")), np.random.default_rng(0)
    options = "--processes=2", "--devices-per-process=1", f"--max-restarts={kills + 10}", "--max-pause-secs=1"
    launched = Launched(tmp_path, [*LAUNCH, *options, *training(tmp_path)])
    for _ in range(kills):
        pids = launched.new_processes()
        time.sleep(random.uniform(0, 5))
        os.kill(pids[random.integers(2)], signal.SIGKILL)
    launched.finish()
    assert launched.out.count("signal SIGKILL") == kills
    assert launched.result == whole()


def test_signal_handlers_are_as_before():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert run("--processes", 1, os.devnull) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
