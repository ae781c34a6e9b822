"""Processes on this host, one or several that work together, which a test starts, sends signals to and waits for."""

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import tempfile
import time
from typing import NamedTuple

from testing.processes import start_server

LIMIT_SECS = 120  # of processes; then they say what each of their threads was doing, and are killed


class Ended(NamedTuple):
    code: int  # negative: the signal that ended it
    lines: list[str]  # all it wrote, to stdout and stderr
    secs: float  # after the start


class Cluster:
    """Makes groups of processes, one group at a time.

    Args:
      modules: what they have imported when they begin, beside this library.

    Attributes:
      pids: of the group, in its order.
    """

    def __init__(self, *modules):
        self._server = start_server(modules)
        self.pids = []

    def run(self, function, *args, processes=2, timeout=LIMIT_SECS):
        """Calls "module.function" with args (JSON) in each process; returns a list of `Ended`.

        Those that are left after `timeout` seconds are killed.
        """
        self.start(function, *args, processes=processes, timeout=timeout)
        return self.ended()

    def start(self, function, *args, processes=2, timeout=LIMIT_SECS):
        """As `run`, without waiting; call `ended` for the result."""
        if self.pids:  # of a test that failed between the two
            self.ended(kill=True)
        self._folder = tempfile.TemporaryDirectory()
        request = {"function": function, "args": args, "processes": processes, "timeout": timeout}
        # What a test may have set since the process that makes the others was started.
        request["env"] = {name: os.environ[name] for name in os.environ if name.startswith(("XLA_FLAGS", "AWS_"))}
        request |= {"folder": self._folder.name, "port": free_port()}
        self._server.stdin.write(json.dumps(request, default=str) + "\n")
        self._server.stdin.flush()
        self.pids = self._read()

    def start_one(self, function, *args):
        """Starts a single process, and waits until it blocks."""
        self.start(function, *args, processes=1)
        self.wait_for(0, "blocked")

    def end(
        self, function, *args, processes=1, moment=(0, "blocked"), kills=((0, signal.SIGKILL),), within=40, later=0
    ):
        """Starts processes, ends them at a moment, and returns a list of `Ended`.

        Args:
          moment: the process that is waited for, and the line of it.
          kills: pairs of a process and the signal that it gets then, in this order; None waits for its end instead.
          within: the seconds in which all must have ended: many, for busy machines, but fewer than inputs block for.
          later: the seconds between the moment and the first signal.
        """
        self.start(function, *args, processes=processes)
        self.wait_for(*moment)
        time.sleep(later)
        began = time.monotonic()
        for index, number in kills:
            self.wait_for_end(index) if number is None else self.kill(index, number)
        ended = self.ended()
        assert time.monotonic() - began < within, [process.lines for process in ended]
        return ended

    def wait_for(self, index, line):
        """Waits until a process has written a line."""
        self.wait_until(lambda: line in self.lines(index), f"process {index} has not written {line!r}")

    def wait_for_end(self, index):
        """Waits until a process has ended."""
        self.wait_until(lambda: not self.is_alive(index), f"process {index} has not ended")

    def wait_until(self, is_so, otherwise):
        """Waits for what processes do; returns what `is_so()` does at last."""
        deadline = time.monotonic() + LIMIT_SECS - 20
        while not (value := is_so()):
            assert time.monotonic() < deadline, f"{otherwise}: {[self.lines(i) for i in range(len(self.pids))]}"
            time.sleep(0.01)
        return value

    def lines(self, index=0):
        path = os.path.join(self._folder.name, str(index))
        if not os.path.exists(path):  # it has only begun
            return []
        with open(path, errors="replace") as file:
            return file.read().splitlines()

    def kill(self, index=0, number=signal.SIGKILL):
        os.kill(self.pids[index], number)

    def is_alive(self, index=0):
        with contextlib.suppress(ProcessLookupError):
            self.kill(index, 0)
            return True
        return False

    def ended(self, kill=False):
        if kill:
            self._kill_all()
        codes, secs = self._read()
        processes = [Ended(code, self.lines(i), secs[i]) for i, code in enumerate(codes)]
        self.pids = []
        self._folder.cleanup()
        return processes

    def close(self):
        self._kill_all()
        self._server.kill()
        self._server.communicate()

    def _kill_all(self):
        for index in range(len(self.pids)):
            with contextlib.suppress(ProcessLookupError):
                self.kill(index)

    def _read(self):
        line = self._server.stdout.readline()
        assert line, "the process that makes the others has ended"
        return json.loads(line)


@functools.cache
def shared_cluster(*modules):
    """One for all tests of this process, since its start takes seconds."""
    cluster = Cluster(*modules)
    atexit.register(cluster.close)
    return cluster


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
