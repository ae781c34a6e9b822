"""Data loaders as they are: grain's, and what the Estimator sees of tf.data and torch."""

import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import refused
from testing.estimators import Linear, make, step_of

from estimator.inputs._input_fn import batches
from estimator.inputs._prefetch import Prefetcher

grain = pytest.importorskip("grain")
pygrain = pytest.importorskip("grain.python")

N = 20
X = np.arange(2 * N, dtype=np.float32).reshape(N, 2) / N
Y = X.sum(axis=1, keepdims=True)


class Row(pygrain.MapTransform):
    def map(self, i):
        return X[i], Y[i]


def map_dataset(shuffle=True):
    dataset = grain.MapDataset.range(N)
    return (dataset.shuffle(seed=1) if shuffle else dataset).repeat(2).map(Row()).batch(4)


def iter_dataset():
    rows = grain.MapDataset.range(N).shuffle(seed=2).repeat(2).to_iter_dataset()
    noisy = rows.seed(3).random_map(lambda i, rng: (i + rng.integers(N)) % N)  # its state has the random numbers too
    return noisy.map(Row()).batch(4)


def data_loader():
    sampler = pygrain.IndexSampler(N, shard_options=pygrain.NoSharding(), shuffle=True, num_epochs=2, seed=4)
    return pygrain.DataLoader(
        data_source=pygrain.RangeDataSource(0, N, 1),
        sampler=sampler,
        operations=[Row(), pygrain.Batch(4)],
        worker_count=0,
    )


LOADERS = [map_dataset, iter_dataset, data_loader]


def as_stored(state):
    """A state as a checkpoint can hold it: grain's are bytes or dicts of numbers."""
    return state if isinstance(state, bytes) else json.loads(json.dumps(state))


def numbers(pairs):
    """Which rows the batches have."""
    return [round(float(x[0]) * N / 2) for features, _ in pairs for x in features]


@pytest.mark.slow
@pytest.mark.covers("1.6 returns")
@pytest.mark.parametrize("loader", LOADERS)
def test_a_grain_loader_is_an_input_fn(tmp_path, loader):
    estimator = make(tmp_path)
    assert step_of(estimator.train(loader)) == 2 * N // 4
    assert estimator.evaluate(loader)["global_step"] == 10


def test_predictions_come_in_the_order_of_a_grain_loader(tmp_path):
    predicted = make(tmp_path).predict(lambda: map_dataset(shuffle=False))
    assert [row["x"].tolist() for row in predicted] == [*X.tolist(), *X.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@given(peek=st.booleans(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), more=st.integers(1, 3))
@settings(max_examples=6, deadline=None)
def test_a_grain_loader_resumes_exactly_after_any_chunk(loader, peek, sizes, more):
    expected = numbers(batches(loader()))
    assert sorted(expected) != expected and len(expected) == 2 * N
    source = batches(loader())
    assert source.has_position
    if peek:
        source.peek()
    states = [(0, as_stored(source.get_state()))]
    taken = 0
    with Prefetcher(source, numbers) as ready:
        ready.request(sizes[0])
        for n in [*sizes[1:], more]:  # the thread is always ahead of the position
            ready.request(n)
            piece = ready.get()
            assert (piece.batches or []) == expected[taken : taken + 4 * piece.size]
            taken += 4 * piece.size
            states.append((taken, as_stored(piece.position)))
            if taken == len(expected):  # nothing is asked for after the end
                break
    for taken, state in (states[0], states[-1]):
        again = batches(loader())
        if peek:
            again.peek()
        again.set_state(state)
        assert numbers(again) == expected[taken:]


# tf.data and torch, without them.


class EagerTensor:
    """What a TensorFlow or torch tensor is to those who do not know it: numpy can read it, jax cannot."""

    def __init__(self, array):
        self._array = np.asarray(array)
        self.shape = self._array.shape
        self.dtype = object()  # tf.float32 is not a numpy dtype

    def __array__(self, dtype=None, copy=None):
        return self._array

    def __iter__(self):
        return map(EagerTensor, self._array)

    def __len__(self):
        return len(self._array)


class Dataset:
    """Like a tf.data.Dataset: iterable again and again, of tuples with dicts in them."""

    def __init__(self, element, count=5):
        self.element, self.count = element, count

    def __iter__(self):
        return itertools.repeat(jax.tree.map(EagerTensor, self.element), self.count)


def model_fn(features, labels, mode):
    return Linear()(features["x"], labels, mode)


@pytest.mark.slow
@pytest.mark.covers("1.6 returns")
def test_tensors_of_other_libraries_train_evaluate_and_predict(tmp_path):
    theirs, ours = make(tmp_path / "theirs", model_fn), make(tmp_path / "ours", model_fn)
    theirs.train(lambda: map(list, Dataset(({"x": X}, Y))))  # pairs as torch has them
    ours.train(lambda: [({"x": X}, Y)] * 5)
    np.testing.assert_array_equal(theirs.get_variable_value("w"), ours.get_variable_value("w"))
    assert theirs.evaluate(lambda: Dataset(({"x": X}, Y))) == ours.evaluate(lambda: [({"x": X}, Y)] * 5)
    for predict_fn in (lambda: Dataset({"x": X}, 1), lambda: Dataset(({"x": X}, Y), 1), lambda: {"x": EagerTensor(X)}):
        np.testing.assert_array_equal([row["x"] for row in theirs.predict(predict_fn)], X)


def test_one_tensor_of_another_library_is_one_batch():
    [(features, labels)] = batches(EagerTensor(X))
    assert type(features) is np.ndarray and labels is None
    np.testing.assert_array_equal(features, X)


@pytest.mark.slow
@pytest.mark.covers("1.6 exhausted")
def test_an_input_fn_is_called_once_and_its_end_ends_the_verb(tmp_path):
    calls = []

    def input_fn(mode):
        calls.append(str(mode))
        return iter(Dataset((X, Y), 3))

    estimator = make(tmp_path).train(input_fn)
    assert step_of(estimator) == 3 and calls == ["train"]
    assert estimator.evaluate(input_fn)["global_step"] == 3 and calls == ["train", "eval"]
    assert len(list(estimator.predict(input_fn))) == 3 * N and calls == ["train", "eval", "infer"]


MISUSED = {
    ValueError: [
        (lambda: [(X, Y, Y)], r"input_fn should return \(features, labels\) as a len 2 tuple.*tuple of len 3"),
        (lambda: [[EagerTensor(X)]], r"as a len 2 tuple\. Put several.*got a list of len 1"),
    ],
    TypeError: [
        (lambda: None, "input_fn should return an iterable of batches.*; got None"),
        ([(X, Y)], r"`input_fn` must be callable: a function that returns the batches.*; got \[\("),
        (lambda batch_size: [(X, Y)], r"nothing else without a default; .* takes \['batch_size'\]"),
    ],
}


@pytest.mark.covers("1.6 arity")
@pytest.mark.parametrize("verb", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("error, input_fn, message", refused.rows(MISUSED))
def test_misuse_of_input_fn_is_an_error_in_every_verb(tmp_path, verb, input_fn, error, message):
    with pytest.raises(error, match=message):
        list(getattr(make(tmp_path), verb)(input_fn))
