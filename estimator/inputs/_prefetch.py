"""Batches made ready by a background thread, while the devices are busy with those before."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from estimator.core._typing import PyTree
from estimator.runtime._jax_settings import with_settings_of_this_thread

Pull = Callable[[Any, int, threading.Event], tuple[list[Any], BaseException | None]]

_SECONDS_TO_END = 1.0
_SECONDS_BETWEEN_QUESTIONS = 0.2


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some batches, made ready together.

    Attributes:
      batches: what `make` returned for them; None where there are none.
      size: how many there are.
      position: the input's position right after the last of them; None where it has no position, or failed there.
    """

    batches: Any
    size: int
    position: Any


class Prefetcher:
    """Reads and prepares batches in a thread of its own, as many as it is asked for and in their order.

    Nothing is read that was not requested. A piece smaller than requested is the last one; what follows it tells
    whether the input ended (a piece of size 0) or failed (its exception, with the traceback into the user's code).

    The thread sees the context variables of the thread that creates the Prefetcher, and what jax's `default_device`,
    `enable_x64`, `numpy_dtype_promotion`, `numpy_rank_promotion`, `default_matmul_precision` and `default_prng_impl`
    are there. Other contexts of jax (a mesh, a transfer guard) do not reach into it.

    >>> pairs = iter([(1, 2), (3, 4), (5, 6)])
    >>> with Prefetcher(pairs, make=list) as ready:
    ...     ready.request(2)
    ...     ready.request(2)
    ...     [ready.get(), ready.get(), ready.get().size]
    [Piece(batches=[(1, 2), (3, 4)], size=2, position=None), Piece(batches=[(5, 6)], size=1, position=None), 0]

    Args:
      pairs: an iterator over `(features, labels)`; where it has `get_state`, pieces have a position. From now on the
        thread alone uses it, and calls its `close`, if it has one, as the last thing.
      make: function of a list of pairs, not empty, called in the thread; makes one piece's `batches`.
      ahead: how many pieces may be requested and not yet taken.
      pull: takes the batches of a piece, in the thread: `pull(pairs, n, closed)` returns up to `n` of them, and the
        exception that came instead of more. Default: `pull_batches`.
    """

    def __init__(
        self,
        pairs: Iterator[tuple[PyTree, PyTree]],
        make: Callable[[list[tuple[PyTree, PyTree]]], Any],
        ahead: int = 2,
        pull: Pull | None = None,
    ) -> None:
        self._ahead = ahead
        self._requested: collections.deque[int] = collections.deque()  # and not yet taken
        self._arrived: Piece | _Failure | None = None
        self._last: Piece | _Failure | None = None  # what every further `get` gives
        self._ending = False
        self._closed = threading.Event()
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # No SimpleQueue: its `get(timeout)` waits for ever after a signal whose handler takes until the timeout.
        self._results: queue.Queue[Piece | _Failure] = queue.Queue()
        self._thread = threading.Thread(
            target=with_settings_of_this_thread(_work),
            args=(pairs, pull or pull_batches, make, self._requests, self._results, self._closed),
            name="estimator-input",
            daemon=True,  # an input may block for ever
        )
        self._thread.start()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def request(self, n: int) -> None:
        """Asks for the next `n` batches, as one piece. Returns at once.

        Raises:
          ValueError: `n` is below 1.
          RuntimeError: as many pieces as `ahead` allows were requested and not taken; or it is closed.
        """
        self._check_open("request")
        if n < 1:
            raise ValueError(f"`request` must ask for at least 1 batch; got {n}.")
        if len(self._requested) >= self._ahead:
            raise RuntimeError(
                f"`request` was called for more than ahead={self._ahead} pieces. Take one by `get` first, "
                "or set `ahead` higher."
            )
        self._requested.append(n)
        self._requests.put(n)

    def wait(self, timeout: float) -> bool:
        """Whether `get` can return at once, after waiting for that up to `timeout` seconds.

        For a loop that has to look at something else meanwhile; signals (Ctrl-C) come through in any case.
        """
        self._check_open("wait")
        if self._last is None and self._arrived is None:
            with contextlib.suppress(queue.Empty):
                self._arrived = self._results.get(timeout=timeout)
        return self._last is not None or self._arrived is not None

    def get(self) -> Piece:
        """The piece of the oldest request, waiting for it. After the last one: pieces of size 0.

        Raises:
          BaseException: what the input or `make` raised, once all pieces from before were taken.
          RuntimeError: nothing was requested; or it is closed.
        """
        self._check_open("get")
        found = self._last or self._arrived
        if found is None:
            if not self._requested and not self._ending:
                raise RuntimeError("`get` needs a `request` before it; none is left.")
            found = self._results.get()
        self._arrived = None
        asked = self._requested.popleft() if self._requested else 0
        if isinstance(found, Piece) and found.size:
            self._ending = found.size < asked
            return found
        self._last = found
        if isinstance(found, _Failure):
            raise found.error.with_traceback(found.traceback)
        return found

    def get_unless(self, stopped: Callable[[], bool]) -> Piece | None:
        """What `get` gives; None as soon as `stopped()`, which is asked while the input takes its time."""
        while not self.wait(_SECONDS_BETWEEN_QUESTIONS):
            if stopped():
                return None
        return self.get()

    def close(self) -> None:
        """Drops what is ready and ends the thread; where the input blocks, without waiting for more than a second."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._requests.put(None)
        self._thread.join(_SECONDS_TO_END)
        if self._thread.is_alive():
            logging.warning(
                "The input is still busy with a batch that nobody waits for; it is closed as soon as it has made it."
            )
        self._arrived = self._last = None
        self._results = queue.Queue()

    def _check_open(self, called: str) -> None:
        if self._closed.is_set():
            raise RuntimeError(f"`{called}` was called on a Prefetcher that is closed.")


@dataclasses.dataclass(frozen=True)
class _Failure:
    error: BaseException
    traceback: Any  # as it was in the thread; raising it adds the frames of the main thread


def _work(
    pairs: Any,
    pull: Pull,
    make: Callable[[list[Any]], Any],
    requests: queue.SimpleQueue[int | None],
    results: queue.Queue[Piece | _Failure],
    closed: threading.Event,
) -> None:
    with contextlib.ExitStack() as stack:
        if hasattr(pairs, "close"):
            stack.callback(pairs.close)
        try:
            _serve(pairs, pull, make, requests, results, closed)
        except BaseException as error:  # SystemExit too: the main thread decides what comes of it
            results.put(_Failure(error, error.__traceback__))


def _serve(
    pairs: Any,
    pull: Pull,
    make: Callable[[list[Any]], Any],
    requests: queue.SimpleQueue[int | None],
    results: queue.Queue[Piece | _Failure],
    closed: threading.Event,
) -> None:
    """Fulfils requests until it is closed, or the input ends or fails."""
    position_of = getattr(pairs, "get_state", lambda: None)
    for n in iter(requests.get, None):
        pulled, error = pull(pairs, n, closed)
        if closed.is_set():
            return
        ended = isinstance(error, StopIteration)
        position = position_of() if error is None or ended else None
        if pulled:
            results.put(Piece(make(pulled), len(pulled), position))
        if ended:
            results.put(Piece(None, 0, position))
            return
        if error is not None:
            raise error
        del pulled  # before the wait for the next request: they may be large


def pull_batches(pairs: Iterator[Any], n: int, closed: threading.Event) -> tuple[list[Any], BaseException | None]:
    """Up to `n` batches, and what the input raised instead of more; nothing more once `closed` is set."""
    pulled: list[Any] = []
    if hasattr(pairs, "expect"):
        pairs.expect(n)
    try:
        while len(pulled) < n and not closed.is_set():
            pulled.append(next(pairs))
    except BaseException as error:
        return pulled, error
    return pulled, None
