"""Starts a script in several processes of this host, as `torchrun`, `accelerate launch` and `mpirun` do.

    python -m replicate.launch --processes 4 train.py --steps 1000

starts `train.py --steps 1000` four times, with the environment that `replicate.initialize_distributed()` reads. Lines
of output begin with the number of their process. GPUs are divided among the processes. The first process that fails is
named, the others are ended, and with `--max-restarts` all start again: an Estimator resumes from its last checkpoint.
Several hosts are the work of torchrun, SLURM or Kubeflow, whose variables `initialize_distributed()` reads too.

It imports only the standard library, and leaves the devices to the processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import pathlib
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, NoReturn

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE_SECS = 5.0  # for the others to end by themselves; what they could say of the loss is said here

# Arguments of a Python that becomes the script, after it has asked Linux to be killed when the launcher dies
# (PR_SET_PDEATHSIG is 1). A `preexec_fn` would do this too, but forks, which jax warns of once it has devices.
_BOUND_TO_PARENT = (
    "-ISc",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The script to start, and how often.

    Attributes:
      command: without the interpreter, as after `python`.
      processes: how many.
      devices_per_process: GPUs, or CPU devices where there is no GPU; if None, GPUs are divided evenly.
      max_restarts: how often all processes are started again after a failure.
      max_pause_secs: the pause before a restart doubles each time, from 1 second up to this.
    """

    command: tuple[str, ...]
    processes: int
    devices_per_process: int | None = None
    max_restarts: int = 0
    max_pause_secs: float = 60.0


# The last line of a process that fails since another one did, as `estimator` writes it.
# "Process 0 called" is of calls that differ, where no process has failed before.
_BLAMES = re.compile(
    r"(?:RuntimeError|ProcessLostError|initialize_distributed): (?:The input of )?process (\d+)(?! called)\b", re.I
)


class _End:
    """The end of a process of the script."""

    def __init__(self, rank: int, pid: int, code: int) -> None:
        self.rank = rank
        self.exit_code = code if code >= 0 else 128 - code  # as a shell gives it for a signal
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        self.text = f"process {rank} (pid {pid}) ended with {how}"


class Launcher:
    """The processes of a script on this host, from the first start to the last."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._children: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[_End] = queue.SimpleQueue()
        self._signal: int | None = None
        self._write_lock = threading.Lock()
        self._blamed: dict[int, int] = {}  # by process, the one whose failure it says it follows from

    def run(self) -> int:
        """Runs the script; returns 0, or the exit code of the process whose failure was the first."""
        before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        try:
            for attempt in range(self._options.max_restarts + 1):
                failure = self._run_once()
                if failure is None:
                    return 0
                left = self._options.max_restarts - attempt
                if self._signal is not None or not left:
                    return failure.exit_code
                secs = min(2.0**attempt, self._options.max_pause_secs)
                self._say(f"starts all processes again in {secs:g} s; {left - 1} more times at most")
                self._pause(secs)
                if self._signal is not None:
                    return failure.exit_code
            raise AssertionError  # the last attempt returns
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_once(self) -> _End | None:
        """Starts all processes and waits for them; returns the failure that the others follow from."""
        # A new port for each start: the one before may still be in use.
        # Nothing holds the port until process 0 opens it: if another program is faster, all fail, and may start again.
        address, gpus = f"localhost:{_find_free_port()}", _list_gpus()
        for rank in range(self._options.processes):
            self._start(rank, _make_environment(self._options, rank, address, gpus))
        running, failures = self._options.processes, list[_End]()
        self._blamed.clear()
        deadline, has_killed = math.inf, False
        while running:
            try:
                ended = self._ended.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > deadline and not has_killed:
                    self._say(f"ends the {running} processes that still run, {_GRACE_SECS:g} s after the failure")
                    self._end_all()
                    has_killed = True
                continue
            running -= 1
            if not ended.exit_code:
                continue
            failures.append(ended)
            if not has_killed:
                self._say(ended.text)
            if len(failures) == 1:
                deadline = time.monotonic() + _GRACE_SECS
                if running:
                    without = "which jax aborts without it" if ended.rank == 0 else "which miss it"
                    self._say(f"waits up to {_GRACE_SECS:g} s for the others, {without}")
        self._end_all()  # also processes that they have started, which may hold their pipes open
        for reader in self._readers:
            # A process that has left its session is not killed, and may hold a pipe open for ever.
            reader.join(timeout=5.0)
        self._children, self._readers = [], []
        return self._find_cause(failures) if failures else None

    def _find_cause(self, failures: list[_End]) -> _End:
        """Finds the failure that others follow from."""
        # By their messages, not by time: process 0 ends last, even if its error was the first.
        by_rank = {ended.rank: ended for ended in failures}
        cause = failures[0]
        while (blamed := self._blamed.get(cause.rank)) in by_rank and blamed is not None:
            cause = by_rank.pop(blamed)
        if cause is not failures[0]:
            self._say(
                f"process {failures[0].rank} failed since process {cause.rank} did: see the error of [{cause.rank}]"
            )
        return cause

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        child = subprocess.Popen(
            [sys.executable, *(_BOUND_TO_PARENT if sys.platform == "linux" else ()), *self._options.command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches it only from here, and all it starts can be ended
        )
        self._children.append(child)
        # A thread for each stream: one that nobody reads fills its pipe, and then blocks the process.
        for stream, out in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            assert stream is not None
            reader = threading.Thread(target=self._copy_lines, args=(rank, stream, out), daemon=True)
            reader.start()
            self._readers.append(reader)

        def wait() -> None:
            self._ended.put(_End(rank, child.pid, child.wait()))

        threading.Thread(target=wait, daemon=True).start()

    def _copy_lines(self, rank: int, stream: IO[bytes], out: IO[str]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                if out is sys.stderr and (blames := _BLAMES.search(text)):
                    self._blamed[rank] = int(blames[1])
                with self._write_lock:
                    print(f"[{rank}] {text}", file=out, flush=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on to all processes; at the second one they are killed."""
        again = self._signal is not None
        self._signal = number
        self._send_all(signal.SIGKILL if again else number)

    def _send_all(self, number: int) -> None:
        for child in self._children:
            try:
                # Other signals go only to the process, which ends what it has started in its own order.
                os.killpg(child.pid, number) if number == signal.SIGKILL else child.send_signal(number)
            except ProcessLookupError:
                pass  # it has ended, and so has all that it started

    def _end_all(self) -> None:
        self._send_all(signal.SIGKILL)

    def _pause(self, secs: float) -> None:
        deadline = time.monotonic() + secs
        while self._signal is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.1, left))

    def _say(self, words: str) -> None:
        with self._write_lock:
            print(f"replicate.launch: {words}.", file=sys.stderr, flush=True)


def _make_environment(options: Options, rank: int, address: str, gpus: list[str]) -> dict[str, str]:
    environment = os.environ | {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(options.processes),
        "JAX_PROCESS_ID": str(rank),
        "PYTHONUNBUFFERED": "1",
    }
    count = options.devices_per_process
    if gpus:
        count = count or len(gpus) // options.processes
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[rank * count : (rank + 1) * count])
    elif count:
        environment["JAX_NUM_CPU_DEVICES"] = str(count)
    return environment


def _list_gpus() -> list[str]:
    """Lists the NVIDIA GPUs that processes of this host may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    # Linux is asked: CUDA or jax would take memory of each GPU for as long as the launcher runs.
    folder = pathlib.Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(folder.iterdir())))] if folder.is_dir() else []


def _find_free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


class _SeveralHosts(argparse.Action):
    """The options for several hosts of other launchers: an error that says what to use."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        parser.error(
            f"{option_string}: replicate.launch starts the processes of one host. For several hosts use "
            "`torchrun --nnodes`, `srun` of SLURM, or Kubeflow's Trainer: `replicate.initialize_distributed()` reads "
            "their variables; see docs/many_hosts.md"
        )


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m replicate.launch", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, required=True, help="how many to start")
    parser.add_argument("--devices-per-process", type=int, help="GPUs of each, or CPU devices where there is no GPU")
    parser.add_argument("--max-restarts", type=int, default=0, help="how often to start all again after a failure")
    parser.add_argument("--max-pause-secs", type=float, default=60.0, help="the longest pause before a restart")
    parser.add_argument("--hosts", "--host-index", "--coordinator", action=_SeveralHosts, help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="what to run, as after `python`")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(arguments)
    least = {"processes": 1, "devices_per_process": 1, "max_restarts": 0, "max_pause_secs": 0}
    for name, smallest in least.items():
        value = getattr(given, name)
        if value is not None and value < smallest:
            parser.error(f"--{name.replace('_', '-')} must be at least {smallest}; got {value}")
    gpus, count = len(_list_gpus()), given.devices_per_process or 1
    if 0 < gpus < given.processes * count:
        parser.error(
            f"{given.processes} processes with {count} GPUs each need {given.processes * count}; this host has {gpus}"
        )
    command = (*(["-m"] if given.module else []), given.script, *given.arguments)
    return Options(command, **{name: getattr(given, name) for name in least})


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`python -m replicate.launch`."""
    sys.exit(Launcher(_parse(arguments)).run())


if __name__ == "__main__":
    main()
