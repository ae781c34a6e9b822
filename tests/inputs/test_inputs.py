import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from testing import refused

from estimator.inputs import numpy_input_fn
from estimator.inputs._input_fn import batches, call_input_fn


class Tensor:
    """What batches knows of a torch or TensorFlow tensor."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values


class Loader:
    """Iterable again and again, yielding lists, like torch's DataLoader."""

    def __iter__(self):
        return iter([[Tensor([1, 2]), Tensor([3, 4])], [Tensor([5, 6]), Tensor([7, 8])]])


@jax.tree_util.register_pytree_node_class
class Node:
    def tree_flatten(self):
        return (1,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls()


@pytest.mark.covers("1.6 args injected")
def test_input_fn_gets_what_it_names():
    def call(input_fn):
        return call_input_fn(input_fn, "m", "p", "c")

    assert call(lambda: 1) == 1
    assert call(lambda config, mode: (config, mode)) == ("c", "m")
    assert call(lambda params, *, other=2: (params, other)) == ("p", 2)
    assert call(functools.partial(lambda mode, params: (mode, params), mode="mine")) == ("mine", "p")


def test_input_fn_that_needs_other_arguments_is_an_error():
    def input_fn(mode, path, batch_size=3, *args, **kwargs):
        return path, args, kwargs

    with pytest.raises(TypeError, match=r"may take mode, params and config.*input_fn at .*takes \['path'\]. Bind"):
        call_input_fn(input_fn, "m", "p", "c")
    assert call_input_fn(functools.partial(input_fn, path="here"), "m", "p", "c") == ("here", (), {})


@pytest.mark.covers("1.5 infinite input", "1.6 returns")
@pytest.mark.parametrize("x", [np.ones((2, 3)), jnp.ones(2), {"a": np.ones(2)}, {"a": {"b": (1, [2])}}, Node()])
def test_one_pytree_is_one_batch_of_features(x):
    source = batches(x)
    [(features, labels)] = source
    assert source.is_one_batch and labels is None
    assert jax.tree.structure(features) == jax.tree.structure(x)
    assert all(map(np.array_equal, jax.tree.leaves(features), jax.tree.leaves(x)))


def test_a_pair_is_one_batch():
    assert list(batches((1, 2))) == [(1, 2)]


@pytest.mark.covers("1.6 returns", "1.6 Python iterators")
@pytest.mark.parametrize("make", [list, iter, lambda x: (e for e in x), collections.deque])
def test_any_iterable_holds_batches(make):
    elements = [(1, 2), [3, 4], {"x": 5}]
    assert list(batches(make(elements))) == [(1, 2), (3, 4), ({"x": 5}, None)]


def test_an_empty_iterable_has_no_batches():
    assert list(batches([])) == []


def test_nothing_is_read_ahead_of_an_endless_generator():
    count = itertools.count()
    iterator = batches({"x": n} for n in count)
    assert next(count) == 0
    assert next(iterator) == ({"x": 1}, None)
    assert next(count) == 2


@pytest.mark.covers("1.6 arity")
@pytest.mark.parametrize("result", [(1, 2, 3), (1,), [(1, 2, 3)], [[1]]])
def test_another_length_than_two_is_an_error(result):
    message = r"input_fn should return \(features, labels\) as a len 2 tuple.*got a .* of len [13]"
    with pytest.raises(ValueError, match=message):
        list(batches(result))


@pytest.mark.parametrize("result", [None, 3, "abc", object()])
def test_what_holds_no_batches_is_an_error(result):
    with pytest.raises(TypeError, match="input_fn should return an iterable of batches.*; got"):
        batches(result)


def test_foreign_tensors_become_numpy_arrays():
    got = list(batches(Loader()))
    assert [type(leaf) for leaf in jax.tree.leaves(got)] == [np.ndarray] * 4
    np.testing.assert_array_equal(got, [[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    [(features, _)] = batches({"x": Tensor([1]), "n": 1})
    assert type(features["x"]) is np.ndarray and features["n"] == 1


def test_numpy_arrays_are_copied_and_jax_arrays_passed_through():
    x, y = np.ones(2, np.float32), jnp.ones(2)
    [(features, labels)] = batches([({"x": x}, y)])
    assert not np.shares_memory(features["x"], x) and labels is y
    np.testing.assert_array_equal(features["x"], x, strict=True)


def rows(input_fn):
    return [batch.tolist() for batch in input_fn()]


@pytest.mark.covers("10 numpy_input_fn")
def test_the_last_partial_batch_is_kept_unless_dropped():
    x = np.arange(5)
    assert rows(numpy_input_fn(x, None, 2, shuffle=False)) == [[0, 1], [2, 3], [4]]
    dropped = numpy_input_fn(x, None, 2, shuffle=False, drop_remainder=True)
    assert rows(dropped) == [[0, 1], [2, 3]]


@pytest.mark.covers("10 numpy_input_fn")
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_straddle_epochs(shuffle):
    got = rows(numpy_input_fn(np.arange(10), None, 4, num_epochs=2, shuffle=shuffle, seed=1))
    assert [len(batch) for batch in got] == [4] * 5
    order = sum(got, [])
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert shuffle == (order[:10] != order[10:])


@pytest.mark.covers("10 numpy_input_fn")
@pytest.mark.parametrize("shuffle", [False, True])
def test_num_epochs_none_repeats_forever(shuffle):
    input_fn = numpy_input_fn(np.arange(3), None, 2, num_epochs=None, shuffle=shuffle)
    assert [len(b) for b in itertools.islice(input_fn(), 100)] == [2] * 100


@pytest.mark.covers("10 numpy_input_fn")
def test_features_and_labels_keep_their_rows_and_their_form():
    x, y = {"a": np.arange(6), "b": jnp.arange(12.0).reshape(6, 2)}, {"c": np.arange(6) * 10}
    for features, labels in numpy_input_fn(x, y, 4, shuffle=True)():
        np.testing.assert_array_equal(labels["c"], features["a"] * 10)
        np.testing.assert_array_equal(features["b"][:, 0], features["a"] * 2)
    features, labels = next(numpy_input_fn(x, np.arange(6), 4, shuffle=False)())
    assert sorted(features) == ["a", "b"] and labels.tolist() == [0, 1, 2, 3]


@pytest.mark.covers("10 numpy_input_fn", "13 20 numpy_input_fn")
def test_a_seed_repeats_the_order_and_none_does_not():
    seeded = numpy_input_fn(np.arange(100), shuffle=True, seed=3)
    assert rows(seeded) == rows(seeded)
    fresh = numpy_input_fn(np.arange(100), shuffle=True)
    assert rows(fresh) != rows(fresh)


def test_later_changes_of_the_dict_do_not_matter():
    x = {"a": np.arange(2)}
    input_fn = numpy_input_fn(x, shuffle=False)
    x["b"] = 1
    assert list(next(input_fn())) == ["a"]


ONES = np.ones(3)


REFUSED = {
    ValueError: [
        ({"shuffle": None}, "shuffle must be provided and explicitly set.*got None"),
        ({"shuffle": 1}, "explicitly set as boolean.*got 1"),
        ({"x": {}}, "x cannot be an empty dict, give"),
        ({"x": np.ones((0, 2))}, r"x cannot be an empty array; .*\(0, 2\)"),
        ({"x": np.ones((3, 0))}, r"x cannot be an empty array; got shape \(3, 0\)"),
        ({"x": {"a": np.ones((0, 2))}}, r"x cannot be an empty array; .*'a': \(0, 2\)"),
        ({"y": {}}, "y cannot be an empty dict, use None instead"),
        ({"x": {"a": ONES}, "y": {"a": ONES}}, r"1 duplicate keys are found in both x and y: \['a'\]. Rename"),
        (
            {"x": {"a": ONES}, "y": np.ones(4)},
            r"Length of tensors in x and y is mismatched.*x: 'a': \(3,\), shapes in y: \(4,\)",
        ),
        ({"x": np.array(3.0)}, r"Length of tensors .* shapes in x: \(\)"),
        ({"y": np.ones((0, 2))}, r"Length of tensors .*x: \(3,\), shapes in y: \(0, 2\)"),
        ({"batch_size": 0}, "batch_size must be an int >= 1; got 0"),
        ({"batch_size": True}, "batch_size must be an int >= 1; got True"),
        ({"batch_size": 2.0}, "batch_size must be an int >= 1; got 2.0"),
        ({"seed": -1}, "seed must be an int >= 0; got -1"),
        ({"seed": "a"}, "seed must be an int >= 0; got 'a'"),
        ({"num_epochs": 0}, "num_epochs must be an int >= 1; got 0"),
    ],
    TypeError: [
        ({"x": [1, 2]}, "x must be a dict or array; got list"),
        ({"y": 3}, "y must be a dict or array; got int"),
    ],
}


@pytest.mark.covers("10 numpy_input_fn")
@pytest.mark.parametrize("error, args, message", refused.rows(REFUSED))
def test_bad_arguments_are_errors_at_once(args, error, message):
    with pytest.raises(error, match=message):
        numpy_input_fn(**{"x": ONES, "shuffle": False} | args)


def test_sparse_arrays_are_refused_where_they_are_given():
    x = BCOO.fromdense(jnp.eye(3))
    with pytest.raises(TypeError, match=r"x\['words'\] is sparse \(BCOO\), and numpy cannot cut it into batches"):
        numpy_input_fn({"words": x}, batch_size=2, shuffle=False)
