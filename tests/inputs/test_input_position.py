"""Looking into an input, skipping in it, and taking it up again where it was."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.estimators import Numbers

import estimator as est
from estimator.inputs._input_fn import batches
from estimator.inputs._prefetch import Prefetcher


def values(source):
    return [int(features[0]) for features, labels in source]


def restored(state, make=Numbers):
    source = batches(make())
    source.set_state(state)
    return source


def plain():
    return (np.full(1, n) for n in range(10))


@pytest.mark.parametrize("make", [plain, Numbers])
def test_looking_at_the_next_batch_changes_nothing(make):
    source = batches(make())
    assert source.peek() is source.peek() and values([source.peek()]) == [0]
    assert values(itertools.islice(source, 4)) == [0, 1, 2, 3]
    assert values([source.peek()]) == [4]
    assert values(source) == [4, 5, 6, 7, 8, 9]
    assert source.peek() is None and list(source) == []


@given(peek=st.booleans(), n=st.integers(0, 12), before=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("make", [plain, Numbers])
def test_skipping_is_taking_and_dropping(make, peek, n, before):
    source = batches(make())
    list(itertools.islice(source, before))
    if peek:
        source.peek()
    assert source.skip(n) == min(n, 10 - before)
    assert values(source) == list(range(min(before + n, 10), 10))


def test_what_is_skipped_is_not_converted():
    class Tensor:
        converted = 0

        def __array__(self, dtype=None, copy=None):
            Tensor.converted += 1
            return np.zeros(1)

    source = batches([Tensor() for _ in range(4)])
    assert source.skip(3) == 3 and Tensor.converted == 0
    assert values(source) == [0] and Tensor.converted == 1


def test_only_an_iterator_with_both_methods_has_a_position():
    class Half(Numbers):
        set_state = property()

    assert (
        batches(Numbers()).has_position and batches(est.inputs.numpy_input_fn(np.ones(3), shuffle=True)()).has_position
    )
    for result in (plain(), [np.ones(1)], Half()):
        source = batches(result)
        assert not source.has_position and source.get_state() is None
        with pytest.raises(ValueError, match="`set_state` needs an iterator.*lacks them. Skip its batches by count"):
            source.set_state({"next": 1})


@pytest.mark.parametrize("taken", [0, 4, 10])
@pytest.mark.parametrize("peek", [False, True])
def test_the_position_counts_the_batches_taken_not_the_ones_looked_at(taken, peek):
    source = batches(Numbers())
    got = values(itertools.islice(source, taken))
    if peek:
        source.peek()
    state = source.get_state()
    list(itertools.islice(source, 3))  # must not change the state we hold
    assert got + values(restored(state)) == list(range(10))


def test_setting_the_position_forgets_what_was_looked_at():
    source = batches(Numbers())
    source.peek()
    source.set_state({"next": 7})
    assert values([source.peek()]) == [7] and source.get_state() == {"next": 7}
    assert values(source) == [7, 8, 9]


def test_each_piece_has_the_position_after_its_last_batch():
    with Prefetcher(batches(Numbers()), list) as ready:
        ready.request(4)
        ready.request(4)
        pieces = [ready.get()]
        for _ in range(3):
            ready.request(4)
            pieces.append(ready.get())
    assert [piece.size for piece in pieces] == [4, 4, 2, 0]
    assert [piece.position for piece in pieces] == [{"next": 4}, {"next": 8}, {"next": 10}, {"next": 10}]
    with Prefetcher(batches(plain()), list) as ready:
        ready.request(4)
        assert ready.get().position is None


def test_where_the_input_failed_it_has_no_position():
    class Broken(Numbers):
        def __next__(self):
            if self.state["next"] == 2:
                self.state["next"] += 1
                raise ValueError("broken")
            return super().__next__()

    with Prefetcher(batches(Broken()), list) as ready:
        ready.request(4)
        piece = ready.get()
        assert piece.size == 2 and piece.position is None
        with pytest.raises(ValueError, match="broken"):
            ready.get()


# The position of the input functions for arrays.


def rows(batches):
    return [row for batch in batches for row in batch.tolist()]


@pytest.mark.covers("13 2 input position is never saved")
@given(
    n=st.integers(1, 7),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    epochs=st.integers(1, 4),
    cut=st.integers(0, 12),
    shuffle=st.booleans(),
    seed=st.one_of(st.none(), st.integers(0, 2**70)),
)
@settings(max_examples=80, deadline=None)
def test_rows_resume_exactly_where_they_were_cut_in_any_batch_size(n, sizes, epochs, cut, shuffle, seed):
    def make(batch_size, seed):
        return est.inputs.numpy_input_fn(np.arange(n), None, batch_size, epochs, shuffle, seed=seed)()

    whole = make(sizes[0], seed)
    batches = list(itertools.islice(whole, cut))
    assert all(len(batch) == sizes[0] for batch in batches[:-1])
    taken = rows(batches)
    state = json.loads(json.dumps(whole.get_state()))
    rest = rows(whole)
    for epoch in range(epochs):
        assert sorted((taken + rest)[epoch * n : (epoch + 1) * n]) == list(range(n))
    for size in sizes:
        other = make(size, None)  # a new process: the seed comes from the state
        other.set_state(state)
        assert rows(other) == rest
        assert other.get_state() == whole.get_state()


@pytest.mark.covers("13 2 input position is never saved")
@pytest.mark.parametrize("seed", [None, 5])
def test_the_estimator_s_input_resumes_in_the_middle_of_a_shuffled_epoch(seed):
    """Through all layers: pieces made in the thread, their position, and another run from there."""
    input_fn = est.inputs.numpy_input_fn({"x": np.arange(10)}, np.arange(10) * 2, 4, 3, shuffle=True, seed=seed)

    def run(source, pieces):
        with Prefetcher(source, lambda pairs: [features["x"] for features, _ in pairs]) as ready:
            for _ in range(pieces):
                ready.request(2)
                piece = ready.get()
                yield piece.position, rows(piece.batches or [])

    source = batches(input_fn())
    source.peek()
    whole = list(run(source, 5))
    assert sorted(sum((x for _, x in whole), [])) == sorted([*range(10)] * 3)
    for i, (position, _) in enumerate(whole[:-1]):
        again = restored(position, input_fn)
        again.peek()
        assert list(run(again, 4 - i)) == whole[i + 1 :]


def test_a_far_position_costs_one_epoch_only(monkeypatch):
    source = est.inputs.numpy_input_fn(np.arange(50), None, 4, None, shuffle=True, seed=1)()
    made = []
    monkeypatch.setattr(np.random, "default_rng", lambda key, real=np.random.default_rng: made.append(key) or real(key))
    source.set_state({**source.get_state(), "epoch": 10**9, "offset": 48})
    assert len(next(source)) == 4
    assert made == [[1, 10**9], [1, 10**9 + 1]]  # the batch straddles two


@pytest.mark.parametrize(
    "change", [{"rows": 4}, {"more": 1}, "seed", None, 3], ids=["rows", "keys", "unshuffled", "none", "int"]
)
def test_a_position_of_another_input_is_an_error(change):
    source = est.inputs.numpy_input_fn(np.arange(5), shuffle=True, seed=1)()
    state = source.get_state()
    assert state == {"epoch": 0, "offset": 0, "rows": 5, "seed": 1}
    other = {k: v for k, v in state.items() if k != "seed"} if change == "seed" else change
    other = {**state, **other} if isinstance(change, dict) else other
    with pytest.raises(ValueError, match="is not one of this input, whose position is now.*same `shuffle`, or start"):
        source.set_state(other)
