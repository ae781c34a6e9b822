"""Processes on this host, one or several that work together, which a test starts, sends signals to and waits for.

They are copies of one process, since to start one takes seconds. It has imported what scenarios need, and has one
thread: a copy of a process of several can hang. OpenBLAS, which NumPy uses, must start none. For each line of its
input, JSON, it makes copies with two CPU devices each; several of them have their places in TF_CONFIG. It answers with
their ids, and when all have ended, with how they did. What it has imported is left out of the collections of garbage of
its copies, and those are rare: else they take a sixth of the CPU seconds of a script.
"""

import atexit
import builtins
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from testing import compiled
from testing.signals import wait_until

TESTS = pathlib.Path(__file__).parents[1]
LIMIT_SECS = 120  # of processes, which are killed then
REPORT_SECS = 25  # before it, and before a test stops to wait, they say what each of their threads is doing


class Ended(NamedTuple):
    code: int  # negative: the signal that ended it
    lines: list[str]  # all it wrote, to stdout and stderr
    secs: float  # after the start
    pid: int


class Cluster:
    """Makes groups of processes, one group at a time.

    Args:
      modules: what they have imported when they begin, beside this library.

    Attributes:
      pids: of the group, in its order.
    """

    def __init__(self, *modules):
        own = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
        command, pipes = [sys.executable, "-m", __name__, *modules], dict.fromkeys(["stdin", "stdout"], subprocess.PIPE)
        self._server = subprocess.Popen(command, **pipes, text=True, env=os.environ | own)
        self.pids = []

    def run(self, function, *args, processes=2, timeout=LIMIT_SECS):
        """Calls "module.function" with args (JSON) in each process; returns a list of `Ended`.

        Those that are left after `timeout` seconds are killed.
        """
        self.start(function, *args, processes=processes, timeout=timeout)
        return self.ended()

    def start(self, function, *args, processes=2, moment=None, timeout=LIMIT_SECS):
        """As `run`, but waits at most for a moment, a process and a line of it; call `ended` for the result."""
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
        if moment:
            self.wait_for(*moment)

    def end(
        self, function, *args, processes=1, moment=(0, "blocked"), kills=((0, signal.SIGKILL),), within=40, later=0
    ):
        """Starts processes, ends them at a moment, and returns a list of `Ended`.

        Args:
          kills: pairs of a process and the signal that it gets then, in this order; None waits for its end instead.
          within: the seconds in which all must have ended: many, for busy machines, but fewer than inputs block for.
          later: the seconds between the moment and the first signal.
        """
        self.start(function, *args, processes=processes, moment=moment)
        time.sleep(later)
        began = time.monotonic()
        for index, number in kills:
            if number is None:
                self.wait_until(lambda index=index: not self.is_alive(index), f"process {index} has not ended")
            else:
                self.kill(index, number)
        ended = self.ended()
        assert time.monotonic() - began < within, [process.lines for process in ended]
        return ended

    def wait_for(self, index, line):
        """Waits until a process has written a line."""
        has_ended = False

        def has_written():
            nonlocal has_ended
            lines = self.lines(index)
            assert line in lines or not has_ended, self._report(f"process {index} has ended without {line!r}")
            has_ended = not self.is_alive(index)  # looked at again: what it wrote last comes before its end
            return line in lines

        self.wait_until(has_written, f"process {index} has not written {line!r}")

    def wait_until(self, is_so, otherwise):
        """Waits for what processes do; returns what `is_so()` does at last."""
        return wait_until(is_so, lambda: self._report(otherwise), LIMIT_SECS - REPORT_SECS + 5)

    def _report(self, what):
        lines = (f"{index}: {line}" for index in range(len(self.pids)) for line in self.lines(index))
        return "\n".join([what, *lines])

    def lines(self, index=0):
        return pathlib.Path(self._folder.name, str(index)).read_text(errors="replace").splitlines()

    def kill(self, index=0, number=signal.SIGKILL):
        """Sends a signal to a process, and to those of its group, if it has made one."""
        pid = self.pids[index]
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)

    def is_alive(self, index=0):
        with contextlib.suppress(ProcessLookupError):
            self.kill(index, 0)
            return True
        return False

    def ended(self, kill=False):
        if kill:
            self._kill_all()
        codes, secs = self._read()
        processes = [Ended(code, self.lines(i), secs[i], self.pids[i]) for i, code in enumerate(codes)]
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


# In the process that makes the others, and in these.


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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where a shell runs the tests beside it
    faulthandler.dump_traceback_later(request["timeout"] - REPORT_SECS)
    if request["processes"] > 1:
        addresses = [f"127.0.0.1:{request['port']}"] * request["processes"]
        task = {"type": "worker", "index": index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    os.environ.update({"XLA_FLAGS": ""} | request["env"])
    compiled.use_folder()
    builtins.print = functools.partial(print_at_once, print)
    module, _, function = request["function"].rpartition(".")
    getattr(importlib.import_module(module), function)(*request["args"])


def print_at_once(write, *words, sep=" ", end="\n", file=None, flush=False):
    """Prints with one write: Python makes one of each word, so that two threads can mix theirs."""
    write(sep.join(map(str, words)) + end, end="", file=file, flush=flush)


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

    for each in ("optax", "orbax.checkpoint", "tensorboardX", "estimator", "replicate", *sys.argv[1:]):
        importlib.import_module(each)
    jax.config.update("jax_num_cpu_devices", 2)
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000)
    serve()
