"""A headless Chromium, spoken to over a pipe by its DevTools protocol: opens pages, and says what went wrong on them.

The protocol is lines of JSON that end in a zero byte, on the file descriptors 3 and 4 of the process, so no package is
needed to drive it.
"""

import contextlib
import functools
import http.server
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"]
FLAGS += ["--disable-dev-shm-usage", "--remote-debugging-pipe"]
# A `preexec_fn` instead would fork this process, which jax warns of. The pipes may be 3 and 4, in either order.
LAUNCH = """import os, sys
read, write = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))
os.dup2(read, 3), os.dup2(write, 4)
os.set_inheritable(3, True), os.set_inheritable(4, True)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One window of a Chromium of its own, with an empty profile.

    Args:
      seconds: how long a command may take, and a page to load.
    """

    def __init__(self, path: str, seconds: float = 30):
        self.seconds, self.errors, self._ids, self._rest, self._loaded = seconds, [], itertools.count(1), b"", False
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_read, self._write = os.pipe()
        self._read, theirs_write = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(theirs_read), str(theirs_write), path, *FLAGS]
        command += [f"--user-data-dir={self._profile.name}"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(theirs_read, theirs_write), **pipes)
        os.close(theirs_read), os.close(theirs_write)
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **params: object) -> dict:
        """What a method of the protocol returns."""
        message = {"id": next(self._ids), "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.seconds
        while True:
            reply = self._next(deadline, method)
            if reply.get("id") == message["id"]:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]

    def open(self, address: str, width: int) -> None:
        """Loads a page in a window of this width, and waits until its scripts and pictures are there."""
        self.resize(width)
        self.errors, self._loaded = [], False
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + self.seconds
        while not self._loaded:
            self._next(deadline, address)
        self.value("new Promise(requestAnimationFrame)")

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> object:
        """The value of an expression of JavaScript on the page; a promise is awaited."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        os.close(self._write), os.close(self._read)
        self._profile.cleanup()

    def _next(self, deadline: float, waiting_for: str) -> dict:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            received = os.read(self._read, 1 << 20) if ready else b""
            assert ready, f"{waiting_for} took more than {self.seconds} s."
            assert received, f"The browser ended while it was to do {waiting_for}."
            self._rest += received
        line, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, event: dict) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(event["exceptionDetails"].get("exception", event["exceptionDetails"]).get("description"))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")


@contextlib.contextmanager
def opened(path: str) -> Iterator[Browser]:
    window = Browser(path)
    try:
        yield window
    finally:
        window.close()


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[str]:
    """The address of a folder, while it is served: pages opened as files have no search."""
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
