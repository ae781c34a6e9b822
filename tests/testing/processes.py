"""Processes to send signals to. To start one takes seconds: so one that has imported everything makes copies of itself.
It has one thread, since a copy of a process of several can hang: OpenBLAS, which NumPy uses, must start none.

As a script it is that one: for each line `[function, *args]` of its input, JSON, it makes a copy, which calls the
function of a module, and tells how the copy ended.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile

from testing import compiled

LIMIT_SECS = 120  # of a copy; then it ends, and says what each of its threads was doing
TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def start_server(*command, stderr=None):
    """A process that makes copies of itself, as it is asked to by lines, and answers by lines."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(TESTS), TESTS]),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
    return subprocess.Popen([sys.executable, "-m", *command], **pipes, text=True, env=os.environ | environment)


class Processes:
    """Copies of a process that has imported a module; one at a time."""

    def __init__(self, module):
        self._errors = tempfile.TemporaryFile("a+")
        self._server = start_server("testing.processes", module, stderr=self._errors)
        self._pid = None

    def start(self, function, *args):
        self._server.stdin.write(json.dumps([function, *args]) + "\n")
        self._server.stdin.flush()
        word, pid = self.read().split()
        assert word == "started"
        self._pid = int(pid)

    def read(self):
        """A line that the copy has printed; at last "ended <exit code>"."""
        line = self._server.stdout.readline().strip()
        assert line, f"the process that makes the others has ended: {self._said()}"
        return line

    def read_until(self, last):
        """The lines before `last`, which the copy has to print."""
        lines = []
        while (line := self.read()) != last:
            assert not line.startswith("ended "), f"{line}, without {last!r}; printed {lines}: {self._said()}"
            lines.append(line)
        return lines

    def read_to_end(self):
        """The lines that are left, and the exit code; negative: the signal that ended it."""
        lines = []
        while not (line := self.read()).startswith("ended "):
            lines.append(line)
        return lines, int(line.removeprefix("ended "))

    def is_alive(self):
        with contextlib.suppress(ProcessLookupError):
            self.send(0)
            return True
        return False

    def send(self, number):
        os.kill(self._pid, number)

    def send_to_group(self, number):
        os.killpg(self._pid, number)

    def ended(self):
        """The exit code, after the lines that are left; negative: the signal that ended it."""
        return self.read_to_end()[1]

    def close(self):
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGKILL)
        self._server.kill()
        self._server.communicate()
        self._errors.close()

    def _said(self):
        self._errors.seek(0)
        return self._errors.read()[-5000:]


def serve(module):
    for line in sys.stdin:
        function, *args = json.loads(line)
        pid = os.fork()
        if not pid:
            faulthandler.dump_traceback_later(LIMIT_SECS, exit=True)
            compiled.use_folder()
            return getattr(module, function)(*args)
        print("started", pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
    return None


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]))
