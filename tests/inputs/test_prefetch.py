import itertools
import math
import queue
import signal
import threading
import time
import traceback
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.inputs import _prefetch
from estimator.inputs._input_fn import batches
from estimator.inputs._numpy import numpy_input_fn
from estimator.inputs._prefetch import Prefetcher, pull_batches

FOREVER = 30  # seconds; longer than any wait that goes well


class Counted:
    """Numbers, counting how many were taken."""

    def __init__(self, stop=None):
        self.taken, self.stop, self.changed = 0, stop, threading.Condition()

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self.stop:
            raise StopIteration
        with self.changed:
            self.taken += 1
            self.changed.notify()
            return self.taken - 1

    def wait_for(self, n):
        with self.changed:
            assert self.changed.wait_for(lambda: self.taken >= n, FOREVER)


class Blocking:
    """An input that is stuck in its first batch until it is released."""

    def __init__(self):
        self.entered, self.release, self.closed_by = threading.Event(), threading.Event(), None

    def batches(self):
        try:
            self.entered.set()
            self.release.wait(FOREVER)
            yield 1
            yield 2
        finally:
            self.closed_by = threading.current_thread().name


def pieces(ready, sizes):
    """The pieces of requests of these sizes, two of them outstanding."""
    sizes = list(sizes)
    for n in sizes[:1]:
        ready.request(n)
    for n in [*sizes[1:], None]:
        if n is not None:
            ready.request(n)
        yield ready.get()


@pytest.mark.covers("10 input thread")
@given(total=st.integers(0, 30), sizes=st.lists(st.integers(1, 8), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_pieces_are_the_input_in_its_order(total, sizes):
    with Prefetcher(iter(range(total)), list) as ready:
        got = list(pieces(ready, sizes))
        if total < sum(sizes):  # the end comes as often as it is asked for
            assert ready.get().batches is None and ready.wait(0)
    numbers = iter(range(total))
    expected = [list(itertools.islice(numbers, n)) for n in sizes]
    assert [piece.batches or [] for piece in got] == expected
    assert [piece.size for piece in got] == [len(piece) for piece in expected]


@pytest.mark.covers("10 input thread")
def test_no_more_is_taken_than_was_requested():
    numbers = Counted()
    with Prefetcher(numbers, list) as ready:
        assert not ready.wait(0.05) and numbers.taken == 0
        ready.request(3)
        ready.request(4)
        numbers.wait_for(7)  # made while nobody waits for it
        assert ready.get().batches == [0, 1, 2]
        time.sleep(0.05)
        assert numbers.taken == 7
        ready.request(2)
        numbers.wait_for(9)
    assert numbers.taken == 9


@pytest.mark.covers("10 input thread")
@pytest.mark.parametrize("by_caller", [False, True])
@given(
    total=st.integers(0, 12),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    parts=st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_a_piece_that_takes_long_comes_in_parts(by_caller, total, sizes, parts):
    most = itertools.cycle(parts)

    def pull(pairs, n, closed):
        return pull_batches(pairs, min(n, next(most)), closed)

    with Prefetcher(iter(range(total)), list, pull, by_caller) as ready:
        for n in sizes:
            ready.request(n)
        got, expected = [], list(range(min(total, sum(sizes))))
        while sum(map(len, got)) < len(expected):
            got.append(ready.get().batches)
        if total < sum(sizes):
            assert ready.get().size == 0
    assert list(itertools.chain(*got)) == expected
    assert {end for end in itertools.accumulate(sizes) if end <= total} <= set(itertools.accumulate(map(len, got)))


def test_reading_for_a_piece_ends_after_a_time_but_not_without_a_batch(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(_prefetch, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    numbers = iter(range(9))
    sizes = [len(pull_batches(numbers, 4, threading.Event(), secs)[0]) for secs in (2, 0, math.inf, math.inf)]
    assert sizes == [2, 1, 4, 2]


def test_make_is_called_in_the_thread_and_its_result_handed_over():
    def make(pairs):
        return threading.current_thread().name, jax.device_put(np.stack([features for features, _ in pairs]))

    source = batches([np.full(2, i, np.float32) for i in range(4)])
    with Prefetcher(source, make) as ready:
        ready.request(4)
        name, stacked = ready.get().batches
    assert name == "estimator-input" != threading.current_thread().name
    assert isinstance(stacked, jax.Array) and stacked[:, 0].tolist() == [0, 1, 2, 3]


def test_batches_that_were_handed_over_are_not_kept():
    class Batch:
        pass

    with Prefetcher((Batch() for _ in range(4)), lambda pairs: list(map(weakref.ref, pairs))) as ready:
        ready.request(2)
        ready.request(2)
        first, second = ready.get(), ready.get()
        until = time.monotonic() + FOREVER
        while any(ref() for ref in first.batches + second.batches) and time.monotonic() < until:
            time.sleep(0.001)
        assert not any(ref() for ref in first.batches + second.batches)


def broken_after_four():
    yield from range(4)
    raise ValueError("from the user's code")


@pytest.mark.covers("10 input thread")
@pytest.mark.parametrize("by_caller", [False, True])
@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 3], [5]])
def test_an_error_comes_after_all_batches_from_before_with_its_traceback(sizes, by_caller):
    with Prefetcher(broken_after_four(), list, by_caller=by_caller) as ready:
        seen = []
        with pytest.raises(ValueError, match="from the user's code") as caught:
            for piece in pieces(ready, [*sizes, 1]):
                assert piece.size
                seen += piece.batches
        assert seen == [0, 1, 2, 3]
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[0] == "test_an_error_comes_after_all_batches_from_before_with_its_traceback"
        assert frames[-1] == "broken_after_four"
        with pytest.raises(ValueError) as again:
            ready.get()
        assert again.value is caught.value
        assert len(traceback.extract_tb(again.value.__traceback__)) <= len(frames)


@pytest.mark.parametrize("error", [StopIteration("not the end"), KeyboardInterrupt(), SystemExit(3)])
def test_errors_of_make_are_raised_as_they_are(error):
    def make(pairs):
        if pairs == [2]:
            raise error
        return pairs

    numbers = Counted()
    with Prefetcher(numbers, make) as ready:
        assert next(pieces(ready, [2, 1, 1])).batches == [0, 1]
        ready._thread.join(FOREVER)
        assert not ready._thread.is_alive() and numbers.taken == 3  # nothing is read after it
        with pytest.raises(type(error)) as caught:
            ready.get()
    assert caught.value is error


# The end of the thread.


def test_closing_ends_the_thread_and_closes_the_input_in_it():
    blocking = Blocking()
    blocking.release.set()
    with pytest.raises(KeyError), Prefetcher(blocking.batches(), list) as ready:
        ready.request(1)
        assert ready.get().batches == [1]
        raise KeyError
    assert not ready._thread.is_alive()
    assert blocking.closed_by == "estimator-input"
    ready.close()  # once more does nothing


@pytest.mark.covers("10 input thread")
def test_closing_does_not_wait_for_an_input_that_blocks(monkeypatch, messages):
    monkeypatch.setattr(_prefetch, "_SECONDS_TO_END", 0.05)
    blocking, made = Blocking(), []
    with Prefetcher(blocking.batches(), made.append) as ready:
        ready.request(2)
        assert blocking.entered.wait(FOREVER)
        start = time.monotonic()
    assert time.monotonic() - start < FOREVER / 2 and blocking.closed_by is None
    assert "The input is still busy with a batch that nobody waits for" in messages()[-1]
    blocking.release.set()
    ready._thread.join(FOREVER)
    assert blocking.closed_by == "estimator-input" and made == []


def test_the_generator_of_an_input_fn_is_closed_in_the_thread_unless_the_user_keeps_it():
    fresh, kept = Blocking(), Blocking()
    fresh.release.set()
    kept.release.set()
    mine = kept.batches()
    for source in (batches(fresh.batches()), batches(mine)):
        with Prefetcher(source, list) as ready:
            ready.request(1)
            assert ready.get().batches == [(1, None)]
    assert fresh.closed_by == "estimator-input"
    assert kept.closed_by is None and next(mine) == 2


def test_a_signal_whose_handler_takes_longer_than_the_wait_does_not_make_it_endless():
    old = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.2))
    try:
        with Prefetcher(Counted(), make=list) as ready:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert not ready.wait(0.2)
            assert not ready.wait(0.01)
    finally:
        signal.signal(signal.SIGALRM, old)


def test_wait_says_whether_a_piece_is_there():
    blocking = Blocking()
    with Prefetcher(blocking.batches(), list) as ready:
        ready.request(1)
        assert not ready.wait(0.01)
        blocking.release.set()
        assert ready.wait(FOREVER) and ready.wait(0)
        assert ready.get().batches == [1]


# What the thread sees of its creator.


@pytest.mark.parametrize(
    ("context", "see"),
    [
        (lambda: jax.default_device(jax.devices()[3]), lambda: jnp.ones(1).devices()),
        (lambda: jax.enable_x64(True), lambda: np.dtype(jnp.arange(2).dtype)),
        (lambda: jax.numpy_dtype_promotion("standard"), lambda: jax.config.jax_numpy_dtype_promotion),
        (lambda: np.errstate(divide="raise"), lambda: np.geterr()["divide"]),
    ],
    ids=["default_device", "enable_x64", "dtype_promotion", "context_variables"],
)
def test_the_thread_sees_the_contexts_it_was_created_in(context, see):
    def look():
        while True:
            yield see()

    with context():
        here = see()
        ready = Prefetcher(look(), list)
    with ready:
        ready.request(1)
        assert ready.get().batches == [here]
    assert see() != here  # or this would show nothing


# In the thread of the caller.


def test_an_input_in_memory_is_read_where_it_is_taken_as_long_as_that_is_quick(monkeypatch):
    monkeypatch.setattr(_prefetch, "_SECONDS_TO_HAND_OVER", FOREVER)
    here, slow_from = threading.get_ident(), 4

    def make(pairs):
        if pairs[-1] >= slow_from:
            monkeypatch.setattr(_prefetch, "_SECONDS_TO_HAND_OVER", -FOREVER)
        return threading.get_ident(), pairs

    with Prefetcher(Counted(stop=13), make, by_caller=True) as ready:
        got = [piece.batches for piece in pieces(ready, [2, 2, 2, 2, 2, 2, 2])]
    assert [pairs for _, pairs in got[:-1]] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert [thread == here for thread, _ in got] == [True, True, True, False, False, False, False]


def test_only_inputs_that_cannot_block_are_in_memory():
    arrays = numpy_input_fn({"x": np.zeros(3)}, None, 2, shuffle=False)()
    for result in ([1], (np.zeros(1), np.zeros(1)), itertools.repeat(1), arrays):
        assert batches(result).is_in_memory
    for result in ((i for i in range(3)), map(np.zeros, [1]), iter(queue.SimpleQueue().get, None)):
        assert not batches(result).is_in_memory
