"""The recipes of docs/how_to/engines.md for SLURM and MPI, in real ones on this host, where their packages are."""

import os
import re
import shutil
import signal
import sys
import time

import pytest
from testing.cluster import free_port
from testing.engines.launched import ENVIRONMENT, ROOT, Launched, training, whole
from testing.engines.slurm import PROGRAMS, running_slurm
from testing.estimators import saved_at
from testing.signals import wait_until

PATH = f"{os.environ['PATH']}:/usr/sbin"
LAUNCHERS = {"Open MPI": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"), "MPICH": ("mpirun.mpich",)}

pytestmark = pytest.mark.slow


def recipe(name, folder, **changes):
    """The script of an engine in the docs, for two processes that train on this host."""
    text = (ROOT / "docs" / "how_to" / "engines.md").read_text()
    script = re.search(rf"^## {name}$.*?```bash\n(.*?)```", text, re.M | re.S)[1]
    exports = "\n".join(f"export {key}={value}" for key, value in ENVIRONMENT.items())
    call = " ".join([sys.executable, *training(folder)])
    changes = {"python train.py": call, "export MODEL_DIR=.*": exports, **changes}
    for old, new in changes.items():
        script, count = re.subn(old, new, script)
        assert count, (old, script)
    return script


@pytest.fixture(scope="module")
def slurm():
    if not all(shutil.which(program, path=PATH) for program in PROGRAMS):
        pytest.skip("needs SLURM and munge, of Debian's packages slurm-wlm and munge, and root")
    with running_slurm() as slurm:
        yield slurm


class Job(Launched):
    """A training that a SLURM starts by the script of the docs."""

    def __init__(self, slurm, folder, *options, srun="srun"):
        super().__init__(folder)
        host = {"#SBATCH --nodes=16": "#SBATCH --nodes=1", "--ntasks-per-node=1": "--ntasks-per-node=2"}
        script = recipe("SLURM", folder, **host, **{"#SBATCH --gpus-per-node=8\n": "", "srun": srun})
        self.slurm, self.job = slurm, slurm.submit(script, folder, *options)

    def call(self, *command):
        self.slurm.call(*command, self.job)

    def state(self):
        return self.slurm.state(self.job)

    def wait_for_state(self, *states, secs=120):
        """Waits for a state of the job; returns it, and the exit code."""
        wait_until(lambda: self.state()[0] in states, lambda: (self.state(), self.out), secs)
        return self.state()

    def end(self, secs=120):
        (self.folder / "enough").touch()
        return self.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", secs=secs)

    def disturb(self, what):
        """Does what ends the processes, once they have saved something."""
        pids = self.new_processes()
        self.wait_for_steps(10)
        if what.startswith("kill"):
            os.kill(pids[int(what[-1])], signal.SIGKILL)
        else:
            self.call(*what.split())

    def has(self, name):
        return (self.folder / name).exists()


@pytest.mark.parametrize("what", ["nothing", "kill 0", "kill 1", "scontrol requeue", "scancel --signal=TERM"])
def test_slurm_ends_with_the_bits_of_one_process(tmp_path, slurm, what):
    """Where a task is killed or gets SIGTERM, the script of the docs requeues the job, which begins two minutes later;
    `scontrol requeue` here ends that pause."""
    job = Job(slurm, tmp_path)
    if what != "nothing":
        job.disturb(what)
        job.wait_for_state("PENDING", secs=90)
        time.sleep(10)  # while SLURM ends the run before: a job that begins earlier gets the exit code of that
        slurm.call("scontrol", "update", f"JobId={job.job}", "StartTime=now")
        job.new_processes(200)
    assert job.end(240) == ("COMPLETED", "0:0"), job.out
    assert job.result == whole()
    assert what.startswith("sc") == job.has("preempted-0")


def test_slurm_sends_sigterm_before_the_time_is_over(tmp_path, slurm):
    """`--signal`, which SLURM may send up to a minute early: the processes save, and end with 75."""
    job = Job(slurm, tmp_path, "--time=1", "--signal=TERM@30", "--no-requeue")
    job.wait_until(lambda: job.has("preempted-0"), 180)
    job.call("scancel")
    assert job.has("preempted-1") and "ProcessLostError" not in job.out
    assert saved_at(tmp_path / "model")[-1] % 10 or saved_at(tmp_path / "model")[-1] > 10


def test_scancel_saves_and_ends(tmp_path, slurm):
    job = Job(slurm, tmp_path)
    job.disturb("scancel")
    assert job.end()[0] == "CANCELLED"
    job.wait_until(lambda: job.has("preempted-1"), 30)
    assert not job.has("model/training.lock")


@pytest.mark.parametrize("srun", ["srun", "srun --kill-on-bad-exit=1"])
def test_the_others_end_before_slurm_kills_them_when_a_task_dies(tmp_path, slurm, srun):
    """By themselves, or by SIGTERM, which SIGKILL follows 30 s later."""
    job = Job(slurm, tmp_path, srun=srun)
    job.disturb("kill 1")
    began = time.monotonic()
    job.wait_for_state("PENDING")
    print(f"{srun}: ended {time.monotonic() - began:.1f} s after a task was killed")
    job.call("scancel")
    assert re.search(r"process 1 \(host .*\) has died, or its host has: ", job.out), job.out


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("victim", [0, 1])
def test_mpirun_ends_all_when_a_rank_is_killed_and_the_loop_resumes(tmp_path, name, victim):
    launcher, *options = LAUNCHERS[name]
    if not shutil.which(launcher):
        pytest.skip(f"needs {launcher}")
    mpirun, address = " ".join([launcher, *options, "-n 2"]), f"localhost:{free_port()}"
    changes = {"mpirun -n 16 --map-by node": mpirun, "host0:1234": address}
    if name == "MPICH":  # it passes on all variables
        changes |= {"-x MODEL_DIR -x JAX_COORDINATOR_ADDRESS=(\\S*)": r"-env JAX_COORDINATOR_ADDRESS \1"}
    loop = Launched(tmp_path, ["bash", "-c", recipe("MPI", tmp_path, **changes)])
    pids = loop.new_processes()
    loop.wait_for_steps(10)
    os.kill(pids[victim], signal.SIGKILL)
    loop.new_processes()
    loop.finish()
    assert loop.result == whole()
