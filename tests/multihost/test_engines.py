"""The recipes of docs/how_to/engines.md for SLURM and MPI, in real ones on this host, where their packages are."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from testing.cluster import free_port
from testing.engines.slurm import PROGRAMS, running_slurm
from testing.estimators import saved_at

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "testing" / "scenarios" / "launched_training.py"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
}  # two in all: their sum has one order
PATH = f"{os.environ['PATH']}:/usr/sbin"
LAUNCHERS = {"Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"), "MPICH": ("mpirun.mpich",)}

pytestmark = pytest.mark.slow


def recipe(name, folder, **changes):
    """The script of an engine in the docs, for two processes that train on this host."""
    text = (ROOT / "docs" / "how_to" / "engines.md").read_text()
    script = re.search(rf"^## {name}$.*?```bash\n(.*?)```", text, re.M | re.S)[1]
    exports = "\n".join(f"export {key}={value}" for key, value in ENVIRONMENT.items())
    changes = {"python train.py": f"{sys.executable} {SCRIPT} {folder} 150", "export MODEL_DIR=.*": exports, **changes}
    for old, new in changes.items():
        script, count = re.subn(old, new, script)
        assert count, (old, script)
    return script


def wait_until(is_so, otherwise, secs=120):
    deadline = time.monotonic() + secs
    while not (value := is_so()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.1)
    return value


def pids(folder):
    return [int(file.read_text()) for file in sorted(folder.glob("started-?"))]


def trains_beyond(folder, step):
    return lambda: saved_at(folder / "model")[-1:] > [step]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of one process with as many devices, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "enough").touch()
    environment = os.environ | ENVIRONMENT | {"RANK": "0", "WORLD_SIZE": "1", "JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run([sys.executable, SCRIPT, folder, "150"], env=environment, check=True, capture_output=True)
    return (folder / "result").read_text()


@pytest.fixture(scope="module")
def slurm():
    if not all(shutil.which(program, path=PATH) for program in PROGRAMS):
        pytest.skip("needs SLURM and munge, of Debian's packages slurm-wlm and munge, and root")
    with running_slurm() as slurm:
        yield slurm


def submit(slurm, folder, *options, srun="srun"):
    host = {"#SBATCH --nodes=16": "#SBATCH --nodes=1", "--ntasks-per-node=1": "--ntasks-per-node=2"}
    script = recipe("SLURM", folder, **host, **{"#SBATCH --gpus-per-node=8\n": "", "srun": srun})
    return slurm.submit(script, folder, *options)


def end(slurm, job, folder, secs=120):
    """Waits until a job is at its end, and returns its state."""
    (folder / "enough").touch()
    states = "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"
    wait_until(lambda: slurm.state(job)[0] in states, lambda: (slurm.state(job), (folder / "out").read_text()), secs)
    return slurm.state(job)


def disturb(slurm, job, folder, what):
    """Does what ends the processes, once they have saved something."""
    wait_until(trains_beyond(folder, 10), lambda: (folder / "out").read_text())
    if what.startswith("kill"):
        return os.kill(pids(folder)[int(what[-1])], signal.SIGKILL)
    slurm.call(*what.split(), job)


@pytest.mark.parametrize("what", ["nothing", "kill 0", "kill 1", "scontrol requeue", "scancel --signal=TERM"])
def test_slurm_ends_with_the_bits_of_one_process(tmp_path, slurm, whole, what):
    """Where a task is killed or gets SIGTERM, the script of the docs requeues the job, which begins two minutes later;
    `scontrol requeue` here ends that pause."""
    job = submit(slurm, tmp_path)
    if what != "nothing":
        before = wait_until(lambda: len(pids(tmp_path)) == 2 and pids(tmp_path), lambda: slurm.state(job))
        disturb(slurm, job, tmp_path, what)
        wait_until(lambda: slurm.state(job)[0] == "PENDING", lambda: slurm.state(job), 90)
        time.sleep(10)  # while SLURM ends the run before: a job that begins earlier gets the exit code of that
        slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_until(lambda: not set(pids(tmp_path)) & set(before), lambda: slurm.state(job), 200)
    assert end(slurm, job, tmp_path, 240) == ("COMPLETED", "0:0"), (tmp_path / "out").read_text()
    assert (tmp_path / "result").read_text() == whole
    assert what.startswith("sc") == (tmp_path / "preempted-0").exists()


def test_slurm_sends_sigterm_before_the_time_is_over(tmp_path, slurm):
    """`--signal`, which SLURM may send up to a minute early: the processes save, and end with 75."""
    job = submit(slurm, tmp_path, "--time=1", "--signal=TERM@30", "--no-requeue")
    wait_until((tmp_path / "preempted-0").exists, lambda: (tmp_path / "out").read_text(), 180)
    slurm.call("scancel", job)
    assert (tmp_path / "preempted-1").exists() and "ProcessLostError" not in (tmp_path / "out").read_text()
    assert saved_at(tmp_path / "model")[-1] % 10 or saved_at(tmp_path / "model")[-1] > 10


def test_scancel_saves_and_ends(tmp_path, slurm):
    job = submit(slurm, tmp_path)
    disturb(slurm, job, tmp_path, "scancel")
    assert end(slurm, job, tmp_path)[0] == "CANCELLED"
    wait_until((tmp_path / "preempted-1").exists, lambda: (tmp_path / "out").read_text(), 30)
    assert not (tmp_path / "model" / "training.lock").exists()


@pytest.mark.parametrize("srun", ["srun", "srun --kill-on-bad-exit=1"])
def test_the_others_end_before_slurm_kills_them_when_a_task_dies(tmp_path, slurm, srun):
    """By themselves, or by SIGTERM, which SIGKILL follows 30 s later."""
    job = submit(slurm, tmp_path, srun=srun)
    disturb(slurm, job, tmp_path, "kill 1")
    began = time.monotonic()
    wait_until(lambda: slurm.state(job)[0] == "PENDING", lambda: slurm.state(job))
    print(f"{srun}: ended {time.monotonic() - began:.1f} s after a task was killed")
    slurm.call("scancel", job)
    out = (tmp_path / "out").read_text()
    assert re.search(r"process 1 \(host .*\) has died, or its host has: ", out), out


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("victim", [0, 1])
def test_mpirun_ends_all_when_a_rank_is_killed_and_the_loop_resumes(tmp_path, whole, name, victim):
    launcher, *options = LAUNCHERS[name]
    if not shutil.which(launcher):
        pytest.skip(f"needs {launcher}")
    changes = {
        "mpirun -n 16 --map-by node": " ".join([launcher, *options, "-n 2"]),
        "host0:1234": f"localhost:{free_port()}",
    }
    if name == "MPICH":  # it passes on all variables
        changes |= {"-x MODEL_DIR -x JAX_COORDINATOR_ADDRESS=(\\S*)": r"-env JAX_COORDINATOR_ADDRESS \1"}
    script = recipe("MPI", tmp_path, **changes)
    with open(tmp_path / "out", "w") as log:
        loop = subprocess.Popen(["bash", "-c", script], stdout=log, stderr=log)
    wait_until(trains_beyond(tmp_path, 10), lambda: (tmp_path / "out").read_text())
    before = pids(tmp_path)
    os.kill(before[victim], signal.SIGKILL)
    wait_until(lambda: not set(pids(tmp_path)) & set(before), lambda: (tmp_path / "out").read_text())
    (tmp_path / "enough").touch()
    assert loop.wait(120) == 0, (tmp_path / "out").read_text()
    assert (tmp_path / "result").read_text() == whole
