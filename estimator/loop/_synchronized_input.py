"""The inputs of several processes, read in step: before each chunk they agree on what is in it.

In training all of them give batches of the same shapes, and stop with the first whose input ends. In evaluation each
may have as many rows and batches as it likes: the i-th batch is made of the i-th batches of all.

Each chunk has a round of its own in the channel "input" of the group:

    main thread                     input thread                        other processes
    next_chunk <------------------------------------------------------> next_chunk: process 0 decides
    request ----------------------> pull_batches: up to n
    steps of the chunks before      start_gather: an offer -----------> finish_gather
                                    finish_gather <-------------------- start_gather: their offers
    get_unless <------------------- the batches that all have, or Stopped

At a signal, its own or another's, a main thread that waits for input publishes a stop as its value of the first round
that its input thread has not begun. The chunks of the rounds before are still run: others may have begun with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import logging

from estimator.core._mode_keys import ModeKeys
from estimator.inputs._prefetch import pull_batches
from estimator.loop._batch_shape import BatchShape, Pair, check_alike
from estimator.loop._context import RunContext
from estimator.loop._plan import Chunk, Plan
from estimator.multihost._preemption import SIGNALS
from estimator.multihost._process_group import ProcessGroup


def first_batch(group: ProcessGroup, batch: Pair | None, mode: ModeKeys) -> Pair | None:
    """The first batch of this process, or, where it has none, zeros like the one of another process; None if there
    is none in any process, or, in training, in one of them.

    Raises:
      TypeError: there are several processes, and it is sparse.
      ValueError: the batches of the processes do not fit together.
    """
    if group.count == 1:
        return batch
    trains = mode == ModeKeys.TRAIN
    gathered = group.all_gather(None if batch is None else BatchShape.of(batch))
    shapes = [BatchShape(*shape) for shape in gathered if shape is not None]
    if not shapes or (trains and len(shapes) < group.count):
        return None
    check_alike(shapes, with_rows=trains)
    # Zeros are enough to build the model; the batches that are evaluated come from the inputs.
    return shapes[0].zeros(shapes[0].rows) if batch is None else batch


class Uneven(NamedTuple):
    """A batch with different numbers of rows in the processes.

    Attributes:
      pair: features and labels of this process, maybe without a row.
      rows: the number of rows of each process.
    """

    pair: Pair
    rows: list[int]


class Stopped(Exception):
    """The processes have agreed to stop before a chunk; holds why."""


class _Offer(NamedTuple):
    """The part of a process in a chunk.

    Attributes:
      batches: its batches.
      ended: whether its input ends with them.
      failure: what its input raised after them.
      stop_reason: why it wants to stop, if it does.
      own_seconds: on reading its input and on its host, since the run began.
    """

    batches: Sequence[BatchShape]
    ended: bool = False
    failure: str | None = None
    stop_reason: str | None = None
    own_seconds: tuple[float, float] = (0.0, 0.0)


Pulled = tuple[list[Any], BaseException | None]  # pairs or `Uneven`s, and what came instead of more


def next_chunk(plan: Plan, group: ProcessGroup) -> Chunk | None:
    """The next chunk of process 0's plan, in all processes: hooks that go by the clock would make others elsewhere.

    Args:
      plan: of this process; its hooks are of the same classes in all processes.
      group: the processes.
    """
    if group.count == 1:
        return plan.next()

    def make() -> dict[str, Any] | None:
        """The fields of the chunk, with its hooks by their numbers."""
        chunk = plan.next()
        if chunk is None:
            return None
        due = {id(hook) for hook in chunk.due}
        return {**chunk._asdict(), "due": [i for i, hook in enumerate(plan.hooks) if id(hook) in due]}

    fields = group.broadcast_from_chief(make)
    return None if fields is None else Chunk(**{**fields, "due": tuple(plan.hooks[i] for i in fields["due"])})


class SynchronizedInput:
    """Keeps the input threads of several processes in step."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._channel = context.group.channel("input")
        self._lock = threading.Lock()
        self._stop_at: int | None = None  # the round that the main thread has answered
        self._stop_reason = ""  # why it has
        self._reading = 0.0  # seconds, without the wait for other processes

    def pull(self, pairs: Iterator[Pair], n: int, closed: threading.Event) -> Pulled:
        """Up to `n` batches, and what came instead of more; called in the thread of the input."""
        start = time.perf_counter()
        pulled, error = pull_batches(pairs, n, closed)
        self._reading += time.perf_counter() - start
        own_seconds = self._reading, self._context.stopwatch.read()["host"]
        shapes: list[BatchShape] = []
        for pair in pulled:
            try:
                shapes.append(BatchShape.of(pair))
            except Exception as wrong:
                error = wrong
                break
        ended = isinstance(error, StopIteration)
        failure = None if error is None or ended else f"{type(error).__name__}: {error}"
        with self._lock:
            # The main thread has published a stop for this round: an offer now would be one for the next round.
            if self._stop_at is not None or closed.is_set():
                return [], Stopped(self._stop_reason)
            offer = _Offer(shapes, ended, failure, self._context.local_stop_reason, own_seconds)
            number = self._channel.start_gather(offer)
        # Without the lock, which the main thread needs to answer a signal while this waits for other processes.
        gathered = self._channel.finish_gather(number, closed)
        offers = [_Offer([BatchShape(*shape) for shape in shapes], *rest) for shapes, *rest in gathered]
        self._context.own_seconds = [offer.own_seconds for offer in offers]
        if reasons := [offer.stop_reason for offer in offers if offer.stop_reason]:
            return [], Stopped(next((name for name in SIGNALS if name in reasons), reasons[0]))
        # An error counts once all have come to it: not where the inputs of others end before.
        count = self._count(offers)
        failed = {i: offer.failure for i, offer in enumerate(offers) if offer.failure and len(offer.batches) == count}
        try:
            ready, end = self._merge(pulled, offers, count)
        # All processes compare the same offers, so that all raise this.
        except ValueError as wrong:
            return [], wrong
        if failed and self._context.group.index not in failed:
            i = min(failed)
            error = RuntimeError(f"The input of process {i} failed: {failed[i]}. See there.")
        return ready, error if failed else end

    def raise_if_stopped(self, taken: int) -> None:
        """Stops all processes if a signal came to one; called in the main thread while it waits for input.

        Chunks that were agreed on before are still run: other processes may have begun with them.

        Args:
          taken: the number of chunks that this process has taken.

        Raises:
          Stopped: all stop here.
        """
        if self._stop_at is None:
            reason = self._context.signal or self._channel.read_flag()
            if reason is None:
                return
            # The main threads of the others see the flag even where their inputs block, and publish a stop as well.
            self._channel.flag(reason)
            with self._lock:
                self._stop_reason = reason
                self._stop_at = self._channel.start_gather(_Offer([], stop_reason=reason))
        if taken >= self._stop_at:
            self._channel.finish_gather(self._stop_at)
            raise Stopped(self._stop_reason)

    def _count(self, offers: list[_Offer]) -> int:
        """The number of batches of a chunk that there are for all."""
        sizes = [len(offer.batches) for offer in offers]
        if self._context.mode == ModeKeys.TRAIN:
            return min(sizes)
        return min((size for size, offer in zip(sizes, offers, strict=True) if offer.failure), default=max(sizes))

    def _merge(self, pulled: list[Pair], offers: list[_Offer], count: int) -> Pulled:
        merge = self._in_training if self._context.mode == ModeKeys.TRAIN else self._in_evaluation
        return merge(pulled, offers, count)

    def _in_training(self, pulled: list[Pair], offers: list[_Offer], count: int) -> Pulled:
        for i in range(count):
            check_alike([offer.batches[i] for offer in offers], with_rows=True)
        ended = [i for i, offer in enumerate(offers) if offer.ended and len(offer.batches) == count]
        if not ended:
            return pulled[:count], None
        if len(ended) < len(offers):
            logging.info("The input of process %d has ended, and the training of all with it.", ended[0])
        return pulled[:count], StopIteration()

    def _in_evaluation(self, pulled: list[Pair], offers: list[_Offer], count: int) -> Pulled:
        merged: list[Pair | Uneven] = []
        for i in range(count):
            shapes = [offer.batches[i] for offer in offers if i < len(offer.batches)]
            check_alike(shapes, with_rows=False)
            rows = [offer.batches[i].rows if i < len(offer.batches) else 0 for offer in offers]
            pair = pulled[i] if i < len(pulled) else shapes[0].zeros(0)
            # Even batches stay in their processes; others are gathered in all of them (`EvalSteps.on_devices`).
            even = len(set(rows)) == 1 and rows[0] % self._context.group.towers == 0
            merged.append(pair if even else Uneven(pair, rows))
        return merged, StopIteration() if all(offer.ended for offer in offers) else None
