"""The connection of a process to the hub, which brings all together and says when one of them has died."""

from __future__ import annotations

import atexit
import errno
import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from estimator.multihost import _coordination_client, _liveness, _supervisor
from estimator.multihost._runtime import RUNTIME

_CALLER = "initialize_distributed"


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f'{_CALLER}: coordinator_address must be "host:port"; got {address!r}.')
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a name, as this host resolves it, leads back to this host by its loopback device."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(x.partition("%")[0]).is_loopback for x in addresses)


def start_hub(address: str, num_processes: int, timeout_secs: float, heartbeat_secs: float) -> subprocess.Popen[bytes]:
    """The hub, on the port of the address on all interfaces.

    Raises:
      OSError: the port is in use.
    """
    _, port = split_address(address)
    dual = socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=1024
        )
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            f"{_CALLER}: port {port} of coordinator_address={address!r} is in use on this host, by another program "
            "or another process 0. Give another port, to all processes, or end the one that has it."
        ) from e
    with listener:
        settings = [num_processes, timeout_secs, heartbeat_secs]
        arguments = {"fd": listener.fileno(), "settings": settings, "path": sys.path}
        return subprocess.Popen(
            [sys.executable, "-S", _supervisor.__file__, json.dumps(arguments)],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


def connect(address: str, deadline: float) -> _supervisor.Channel:
    """The connection to the hub; tries until process 0 is there.

    Raises:
      TimeoutError: nobody answers.
    """
    began = time.monotonic()
    host, port = split_address(address)
    while True:
        left = deadline - time.monotonic()
        try:
            return _supervisor.Channel(socket.create_connection((host, port), timeout=max(0.1, min(5.0, left))))
        except OSError as e:
            if left <= 0:
                hint = " A loopback address reaches no other host." if is_loopback(host) else ""
                raise TimeoutError(
                    f"{_CALLER}: nobody answers at coordinator_address={address!r} for {deadline - began:.0f} s "
                    f"({e}). Process 0 must run on that host, with the same address.{hint}"
                ) from e
        time.sleep(max(0.0, min(0.2, left)))


def introduce(channel: _supervisor.Channel, address: str, hello: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Says to the hub who this is, and waits until all are there.

    Returns:
      The answer of the hub: where jax's service is, and who the others are.

    Raises:
      TimeoutError: processes have not come.
      RuntimeError: the processes do not fit together, and all of them get this; or the other side is not a hub.
    """
    try:
        channel.send(hello=hello)
        return _wait_for_all(channel, address, deadline)
    except BaseException as e:
        channel.socket.close()
        if isinstance(e, EOFError | OSError | ValueError | KeyError) and not isinstance(e, TimeoutError):
            raise RuntimeError(
                f"{_CALLER}: what answers at coordinator_address={address!r} is not process 0 of this program, or it "
                f"has ended ({type(e).__name__}: {e}). Give the address of process 0, with a port of its own."
            ) from e
        raise


def _wait_for_all(channel: _supervisor.Channel, address: str, deadline: float) -> dict[str, Any]:
    waiting_for: list[int] = []
    while (left := deadline - time.monotonic()) > 0:
        channel.socket.settimeout(left)
        try:
            messages = channel.receive()
        except TimeoutError:
            break
        for message in messages:
            if "begin" in message:
                return message
            if "refused" in message:
                kind = TimeoutError if message.get("timeout") else RuntimeError
                raise kind(f"{_CALLER}: {message['refused']}")
            waiting_for = message["waiting_for"]
    missing = ", ".join(map(str, waiting_for))
    what = f"these processes have not come in time: {missing}" if missing else "there is no answer in time"
    raise TimeoutError(f"{_CALLER}: at coordinator_address={address!r} {what}.")


class Lifeline:
    """Answers the hub, notes in the `RUNTIME` who died, and tells the hub how this process ends.

    A process that still waits for a dead one after `grace_secs` is ended by the thread here, since a collective
    cannot be interrupted: with one line on stderr and the exit code 76.
    """

    def __init__(self, channel: _supervisor.Channel, chief: str, heartbeat_secs: float, grace_secs: float) -> None:
        self._channel = channel
        self._chief = chief
        self._heartbeat = heartbeat_secs
        self._grace = grace_secs
        self._pid = os.getpid()
        self._has_failed = False
        self._excepthook: Callable[..., Any] = sys.excepthook
        channel.socket.settimeout(heartbeat_secs)
        RUNTIME.is_watched = True
        sys.excepthook = self._fail
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=channel.socket.close)  # a copy that lives on must not hold it open
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                for message in self._channel.receive():
                    if "beat" in message:
                        self._send(beat=1)
                    elif "lost" in message and not self._has_failed:
                        self._note_loss(message["lost"])
                    elif "ended" in message:
                        RUNTIME.ended = message["ended"]
            except TimeoutError:
                self._note_loss(
                    f"the host of {self._chief} has died: nothing was heard of it for {self._heartbeat:g} s"
                )
                return
            except (EOFError, OSError, ValueError):
                # jax's client is about to abort the process for the same reason.
                self._end_now(RUNTIME.loss or f"{self._chief} has died, and its hub: the connection closed")

    def _note_loss(self, text: str) -> None:
        _liveness.note_loss(text)
        self._end_later(self._grace, unless_reported=True)

    def _end_later(self, secs: float, unless_reported: bool) -> None:
        def wait() -> None:
            if unless_reported and RUNTIME.loss_raised.wait(secs):
                return
            if not unless_reported:
                time.sleep(secs)
            self._end_now(f"{RUNTIME.loss}; this process still waits for it after {secs:g} s")

        threading.Thread(target=wait, name="lifeline-end", daemon=True).start()

    def _end_now(self, why: str) -> None:
        line = f"{_CALLER}: {why}. It ends with exit code {_liveness.EXIT_CODE}.\n"
        os.write(2, line.encode())
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # whoever hangs may hold its lock
        flush.start()
        flush.join(1.0)
        os._exit(_liveness.EXIT_CODE)

    def _fail(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Tells the hub of the error that ends this process; where it follows from a loss, says so here."""
        if os.getpid() == self._pid:
            if isinstance(error, jax.errors.JaxRuntimeError):
                error = _liveness.explained(error)
            self._has_failed = True
            text = " ".join(str(error).split("\n", 1)[0].split())[:300]
            self._send(failed=f"{type(error).__name__}: {text}" if text else type(error).__name__)
            if RUNTIME.loss:
                self._end_later(self._grace, unless_reported=False)
        self._excepthook(type(error), error, error.__traceback__ or traceback)

    def _leave(self) -> None:
        """At the exit: nobody needs to wait for the others, as jax's own end does, since the service outlives all."""
        if os.getpid() != self._pid:
            return
        _coordination_client.forget()
        if RUNTIME.loss:
            self._end_later(self._grace, unless_reported=False)
        elif not self._has_failed:
            self._send(goodbye=1)

    def _send(self, **message: Any) -> None:
        try:
            self._channel.send(**message)
        except OSError:
            pass  # the hub has gone, which the thread notices
