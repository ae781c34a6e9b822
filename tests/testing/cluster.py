"""Several processes that work together, on this host: copies of one that has imported jax and not started its devices.

As a script it is that one. For each line of its input, JSON, it makes copies, each with two CPU devices and its place
in TF_CONFIG, and calls a function in all of them. Their output goes to files; their exit codes come last.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from typing import NamedTuple

from testing import compiled
from testing.processes import LIMIT_SECS, start_server


class Ended(NamedTuple):
    code: int  # negative: the signal that ended it
    lines: list[str]  # all it wrote, to stdout and stderr
    secs: float  # after the start


class Cluster:
    """Makes groups of processes, one group at a time."""

    def __init__(self):
        self._server = start_server("testing.cluster")
        self._pids = []

    def run(self, function, *args, processes=2, timeout=LIMIT_SECS):
        """Calls "module.function" with args (JSON) in each process; returns a list of `Ended`.

        Those that are left after `timeout` seconds are killed.
        """
        self.start(function, *args, processes=processes, timeout=timeout)
        return self.ended()

    def start(self, function, *args, processes=2, timeout=LIMIT_SECS):
        """As `run`, without waiting; call `ended` for the result."""
        if self._pids:  # of a test that failed between the two
            self.ended(kill=True)
        self._folder = tempfile.TemporaryDirectory()
        request = {"function": function, "args": args, "processes": processes, "timeout": timeout}
        # What a test may have set since the process that makes the others was started.
        request["env"] = {name: os.environ[name] for name in os.environ if name.startswith(("XLA_FLAGS", "AWS_"))}
        self._server.stdin.write(json.dumps(request | {"folder": self._folder.name, "port": free_port()}) + "\n")
        self._server.stdin.flush()
        self._pids = self._read()

    def wait_for(self, index, line):
        """Waits until a process has written a line."""
        self.wait_until(lambda: line in self.lines(index), f"process {index} has not written {line!r}")

    def wait_for_end(self, index):
        """Waits until a process has ended."""
        self.wait_until(lambda: not self._is_alive(index), f"process {index} has not ended")

    def wait_until(self, is_so, otherwise):
        """Waits for what processes do; returns what `is_so()` does at last."""
        deadline = time.monotonic() + LIMIT_SECS - 20
        while not (value := is_so()):
            assert time.monotonic() < deadline, f"{otherwise}: {[self.lines(i) for i in range(len(self._pids))]}"
            time.sleep(0.01)
        return value

    def lines(self, index):
        path = os.path.join(self._folder.name, str(index))
        if not os.path.exists(path):  # it has only begun
            return []
        with open(path, errors="replace") as file:
            return file.read().splitlines()

    def kill(self, index, number=signal.SIGKILL):
        os.kill(self._pids[index], number)

    def ended(self, kill=False):
        if kill:
            self._kill_all()
        codes, secs = self._read()
        processes = [Ended(code, self.lines(i), secs[i]) for i, code in enumerate(codes)]
        self._pids = []
        self._folder.cleanup()
        return processes

    def close(self):
        self._kill_all()
        self._server.kill()
        self._server.communicate()

    def _is_alive(self, index):
        with contextlib.suppress(ProcessLookupError):
            self.kill(index, 0)
            return True
        return False

    def _kill_all(self):
        for index in range(len(self._pids)):
            with contextlib.suppress(ProcessLookupError):
                self.kill(index)

    def _read(self):
        line = self._server.stdout.readline()
        assert line, "the process that makes the others has ended"
        return json.loads(line)


@functools.cache
def shared_cluster():
    """One for all tests of this process, since its start takes seconds."""
    cluster = Cluster()
    atexit.register(cluster.close)
    return cluster


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def serve():
    for line in sys.stdin:
        request = json.loads(line)
        began = time.monotonic()
        pids = []
        for index in range(request["processes"]):
            open(os.path.join(request["folder"], str(index)), "w").close()
            pids.append(os.fork())
            if not pids[-1]:
                return call(request, index)
        print(json.dumps(pids), flush=True)
        print(json.dumps(wait(pids, began, request["timeout"])), flush=True)
    return None


def call(request, index):
    """The work of a copy; it ends as every script does, by the end of its main module or by an error that leaves it."""
    output = os.open(os.path.join(request["folder"], str(index)), os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    addresses = [f"127.0.0.1:{request['port']}"] * request["processes"]
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    os.environ.update({"XLA_FLAGS": ""} | request["env"])
    compiled.use_folder()
    module, _, function = request["function"].rpartition(".")
    getattr(importlib.import_module(module), function)(*request["args"])


def wait(pids, began, timeout):
    """The exit codes, and the seconds after which they came; what runs too long is killed."""
    ended = {}
    while len(ended) < len(pids):
        late = time.monotonic() - began > timeout
        for pid in set(pids) - set(ended):
            if late:
                os.kill(pid, signal.SIGKILL)
            child, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if child:
                ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - began
        time.sleep(0.01)
    return [ended[pid][0] for pid in pids], [ended[pid][1] for pid in pids]


if __name__ == "__main__":
    import jax

    import estimator  # noqa: F401
    import replicate  # noqa: F401

    jax.config.update("jax_num_cpu_devices", 2)
    serve()
