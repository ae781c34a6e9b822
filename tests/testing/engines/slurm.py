"""A SLURM of one host, in a folder, as long as a block runs: of Debian's packages `slurm-wlm` and `munge`."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile

from testing.cluster import free_port
from testing.signals import wait_until

PROGRAMS = "munged", "slurmctld", "slurmd", "sbatch"
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A SLURM that runs.

    Args:
      folder: of its files.
    """

    def __init__(self, folder):
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}

    def call(self, *command):
        """Calls a program of SLURM; returns what it prints."""
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended
        return ended.stdout

    def submit(self, script, folder, *options):
        """Submits a batch script that writes to `folder`/out; returns the number of its job."""
        (folder / "job.sh").write_text(script)
        return self.call("sbatch", "--parsable", f"--output={folder}/out", *options, f"{folder}/job.sh").strip()

    def state(self, job):
        """The state of a job, such as RUNNING, with its exit code, "75:0"."""
        text = self.call("scontrol", "show", "job", job)
        return tuple(re.search(rf"{field}=(\S+)", text)[1] for field in ("JobState", "ExitCode"))


@contextlib.contextmanager
def running_slurm():
    """Starts a SLURM, and ends it after the block."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm"))
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(_CONF.format(host=host, folder=folder, ports=(free_port(), free_port())))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    slurm = Slurm(folder)
    files = {name: f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "pid-file")}
    own = [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", *files.values()]
    daemons = []
    try:
        for command in (["munged", "--foreground", "--force", *own], ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = open(folder / f"{command[0]}.out", "w")
            path = shutil.which(command[0], path=_PATH)
            daemons.append(subprocess.Popen([path, *command[1:]], env=slurm.environment, stdout=log, stderr=log))
            log.close()
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)
        wait_until(lambda: _is_idle(slurm))
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _is_idle(slurm):
    with contextlib.suppress(AssertionError):
        return "idle" in slurm.call("sinfo", "--noheader", "--format=%T")
