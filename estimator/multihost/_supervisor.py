"""Brings all processes together and notices when one has died: a small process beside process 0.

It holds jax's coordination service too. The clients of that service abort their process, with a stack trace of C++,
when the service goes away; here it outlives process 0, so that the others can say in their own words who died.

`_lifeline.py` starts this file as a script. It needs the standard library, and jaxlib for the service; never jax.
The messages are lines of JSON.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

FOREVER = 100_000_000  # seconds: the service takes nobody for dead, that is done here
LINGER_SECS = 5.0  # for those that come after the others have been refused
_LONGEST = 1 << 20  # bytes of a line; more is not a message


class Channel:
    """Messages over a socket; several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What has come, once there is something, maybe in parts.

        Raises:
          EOFError: the other side has closed.
          ValueError: the other side does not speak this language.
        """
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError("closed")
        *lines, self._received = (self._received + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if len(self._received) > _LONGEST or not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages


def describe(hello: dict[str, Any]) -> str:
    return f"process {hello['process_id']} (host {hello['host']}, pid {hello['pid']})"


class _Member(Channel):
    """A connection, and what is known of the process at its other end."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.hello: dict[str, Any] | None = None
        self.seen = time.monotonic()
        self.has_ended = False


class Hub:
    """Waits until all processes are there, checks that they agree, and then watches them until the last has ended."""

    def __init__(self, listener: socket.socket, num_processes: int, timeout_secs: float, heartbeat_secs: float) -> None:
        self._listener = listener
        self._num_processes = num_processes
        self._deadline = time.monotonic() + timeout_secs
        self._timeout = timeout_secs
        self._heartbeat = heartbeat_secs
        self._members: set[_Member] = set()
        self._joined: dict[int, _Member] = {}
        self._refusal: dict[str, Any] | None = None
        self._complete = self._lost = False
        self._next_beat = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._service, self._service_port = _start_service(num_processes)

    def run(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select(min(1.0, self._heartbeat / 8)):
                if key.data is None:
                    self._accept()
                elif key.data in self._members:
                    self._read(key.data)
            self._look_at_the_clock()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(2.0)  # one that does not read must not keep the others waiting
        member = _Member(connection)
        self._members.add(member)
        self._selector.register(connection, selectors.EVENT_READ, member)

    def _read(self, member: _Member) -> None:
        try:
            for message in member.receive():
                member.seen = time.monotonic()
                if "hello" in message:
                    self._join(member, message["hello"])
                elif member.hello is None:
                    raise ValueError("not one of us")
                elif "failed" in message:
                    member.has_ended = True
                    self._lose(member, f"ended with {message['failed']}")
                elif "goodbye" in message:
                    member.has_ended = True
                    self._tell_all(ended=describe(member.hello))
        except (EOFError, OSError, ValueError):
            self._drop(member)

    def _join(self, member: _Member, hello: dict[str, Any]) -> None:
        member.hello = hello
        if not self._complete and self._refusal is None:
            self._check(member, hello)
        elif self._refusal is not None:
            _send(member, **self._refusal)
        else:
            text = f"{describe(hello)} has come too late: {self._num_processes} processes have begun already"
            _send(member, refused=f"{text}, {self._name(hello['process_id'])} among them.")

    def _check(self, member: _Member, hello: dict[str, Any]) -> None:
        index, count = hello["process_id"], hello["num_processes"]
        if count != self._num_processes:
            self._refuse(
                f"{describe(hello)} was started with num_processes={count}, process 0 with "
                f"num_processes={self._num_processes}. Give all of them the same."
            )
        elif index in self._joined:
            self._refuse(
                f"two processes were started with process_id={index}: {self._name(index)} and {describe(hello)}. "
                f"Give each its own, 0 to {count - 1}."
            )
        else:
            self._joined[index] = member
            if waiting_for := [i for i in range(count) if i not in self._joined]:
                self._tell_all(waiting_for=waiting_for)
            elif problem := disagreement([self._joined[i].hello for i in range(count)]):
                self._refuse(problem)
            else:
                self._begin()

    def _begin(self) -> None:
        self._complete = True
        hellos = [self._joined[i].hello or {} for i in range(self._num_processes)]
        for hello in hellos:
            member = self._joined[hello["process_id"]]
            member.seen = time.monotonic()
            neighbours = [other["visible"] for other in hellos if other["host"] == hello["host"]]
            _send(
                member,
                begin=self._service_port,
                chief=describe(hellos[0]),
                # They share their devices if there are several that see the same ones.
                shares_devices=len(neighbours) > len(set(neighbours)),
                processes=hellos if hello["process_id"] == 0 else [],
            )
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # whoever reads what process 0 writes sees it end

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if self._complete:
            if now >= self._next_beat:
                self._next_beat = now + self._heartbeat / 4
                self._tell_all(beat=1)
            for member in [m for m in self._members if m.hello and now - m.seen > self._heartbeat]:
                if not member.has_ended:  # it is notified as well, in case it has only slept
                    self._lose(member, f"has died, or its host has: nothing was heard of it for {self._heartbeat:g} s")
                self._drop(member)
            if not any(member.hello for member in self._members):
                os._exit(0)
        elif now >= self._deadline and self._refusal is None:
            missing = ", ".join(str(i) for i in range(self._num_processes) if i not in self._joined)
            self._refuse(
                f"of {self._num_processes} processes these have not come within {self._timeout:g} s: {missing}. "
                "Were they started, with the coordinator_address of process 0?",
                timeout=True,
            )
        elif now >= self._deadline:  # of the lingering
            os._exit(1)

    def _refuse(self, text: str, timeout: bool = False) -> None:
        self._refusal = {"refused": text, "timeout": timeout}
        self._deadline = time.monotonic() + (0.0 if timeout else LINGER_SECS)
        self._tell_all(**self._refusal)

    def _lose(self, member: _Member, how: str) -> None:
        """Only the first loss is sent; what comes after follows from it."""
        assert member.hello is not None
        if not self._lost:
            self._lost = True
            self._tell_all(lost=f"{describe(member.hello)} {how}")

    def _drop(self, member: _Member) -> None:
        self._members.remove(member)
        self._selector.unregister(member.socket)
        member.socket.close()
        if member.hello is None or member.has_ended or member not in self._joined.values():
            return
        if self._complete:
            self._lose(member, "has died: its connection closed")
        elif self._refusal is None:
            self._refuse(f"{describe(member.hello)} has left before all {self._num_processes} processes were there.")

    def _tell_all(self, **message: Any) -> None:
        for member in [member for member in self._members if member.hello]:
            _send(member, **message)

    def _name(self, index: int) -> str:
        return describe(self._joined[index].hello or {})


def disagreement(hellos: list[Any]) -> str | None:
    """Why processes that say these things of themselves cannot work together."""
    first = hellos[0]
    for package in ("jax", "jaxlib"):
        for hello in hellos:
            if hello[package] != first[package]:
                return (
                    f"different versions of {package}: {first[package]} in {describe(first)}, "
                    f"{hello[package]} in {describe(hello)}. Install the same everywhere."
                )
    for hello in hellos:
        if hello["host"] != first["host"] and hello["loopback"]:
            return (
                f"coordinator_address={hello['address']!r} is a loopback address, which every host has for itself, "
                f"but {describe(hello)} is on another host than {describe(first)}. "
                "Give the name of process 0's host, as the others know it."
            )
    return None


def _send(member: _Member, **message: Any) -> None:
    try:
        member.send(**message)
    except OSError:
        pass  # it has gone, which is noticed where it is read


def _start_service(num_processes: int) -> tuple[Any, int]:
    """jax's coordination service, on a port that is free."""
    from jaxlib import _jax

    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as reserved:  # gRPC can share the port with it, others cannot
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", 0))
        port = reserved.getsockname()[1]
        return _jax.get_distributed_runtime_service(f"[::]:{port}", num_processes, heartbeat_timeout=FOREVER), port


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends after all others
    arguments = json.loads(sys.argv[1])
    sys.path[:] = arguments["path"]
    Hub(socket.socket(fileno=arguments["fd"]), *arguments["settings"]).run()
