"""Trainings of two processes, which a launcher or an engine starts, and what they leave in a folder."""

import functools
import os
import pathlib
import subprocess
import tempfile

from testing.cluster import shared_cluster
from testing.estimators import saved_at
from testing.signals import wait_until

ROOT = pathlib.Path(__file__).parents[3]
# Two devices in all: their sum has one order.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}


def training(folder):
    """The arguments of Python in each process."""
    return [str(ROOT / "tests" / "testing" / "scenarios" / "launched_training.py"), str(folder), "150"]


@functools.cache
def whole():
    """The result of one process with as many devices, which nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        (ended,) = shared_cluster().run("testing.scenarios.launched_training.alone", folder, 150, processes=1)
        assert ended.code == 0, ended.lines
        return pathlib.Path(folder, "result").read_text()


class Launched:
    """A training in a folder.

    Args:
      command: what starts it, unless the caller does, with an output into the file "out".
    """

    def __init__(self, folder, command=None):
        folder.mkdir(exist_ok=True)
        self.folder, self._seen = folder, set()
        self._out = folder / (f"out-{len([*folder.glob('out-*')])}" if command else "out")
        if command:
            with open(self._out, "w") as out:
                self.process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT)

    @property
    def out(self):
        return self._out.read_text() if self._out.exists() else ""

    @property
    def result(self):
        return (self.folder / "result").read_text()

    def wait_until(self, is_so, secs=120):
        return wait_until(is_so, lambda: self.out, secs)

    def wait_for_steps(self, step):
        """Waits until it has saved a later step."""
        self.wait_until(lambda: saved_at(self.folder / "model")[-1:] > [step])

    def new_processes(self, secs=120):
        """The ids of two processes that have both started since the last call."""

        def new():
            pids = [int(file.read_text()) for file in sorted(self.folder.glob("started-?"))]
            return len(pids) == 2 and self._seen.isdisjoint(pids) and all(map(is_alive, pids)) and pids

        pids = self.wait_until(new, secs)
        self._seen.update(pids)
        return pids

    def finish(self, code=0):
        """Lets it end, and waits for it."""
        (self.folder / "enough").touch()
        assert self.process.wait(120) == code, self.out


def is_alive(pid):
    """A process that has ended but was not waited for yet, whose parent is not this one, does not count."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
