"""`est.inputs.pad_batches`: sequences of varying length in batches of few shapes."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.columns import to_sparse
from testing.estimators import make, step_of
from testing.model_fns import regressing, zeros

from estimator.inputs import numpy_input_fn, pad_batches
from estimator.inputs._input_fn import batches, call_input_fn

I32 = np.int32


def one(*args, **kwargs):
    """The first batch of what pads it."""
    element, *args = args
    return next(iter(pad_batches([element], *args, **kwargs)))


@pytest.mark.covers("1.6 padded_batch")
@given(rows=st.lists(st.integers(0, 20), min_size=1, max_size=6), multiple=st.integers(1, 9), value=st.integers(-3, 3))
@settings(max_examples=60, deadline=None)
def test_rows_come_first_then_padding_up_to_the_multiple(rows, multiple, value):
    given = {"x": [np.arange(n, dtype=I32) + 1 for n in rows]}
    result = one(given, multiple, values=value, lengths="n")
    assert result["n"].tolist() == rows and result["n"].dtype == result["x"].dtype == I32
    length = result["x"].shape[1]
    assert length % multiple == 0 and 0 <= length - max(max(rows), 1) < multiple
    for n, row in zip(rows, result["x"], strict=True):
        assert row.tolist() == [*range(1, n + 1), *[value] * (length - n)]


def test_arrays_are_made_longer_in_the_dimensions_named():
    x = np.arange(12.0).reshape(2, 3, 2)
    result = one({"x": x, "other": x}, 4, axes={"x": (1, 2)}, values={"x": -1.0}, lengths={"x": "n"})
    assert result["x"].shape == (2, 4, 4) and result["other"] is x and result["n"].tolist() == [3, 3]
    np.testing.assert_array_equal(result["x"][:, :3, :2], x)
    assert (result["x"].sum(), x.sum()) == (x.sum() - 20, 66)
    assert one(x, 2, axes=1).shape == (2, 4, 2) == one(x, 2).shape


def test_without_a_number_the_longest_row_decides():
    assert one({"x": [[1, 2, 3], [4]]})["x"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert one(np.ones((2, 3))).shape == (2, 3)


@pytest.mark.parametrize(("pad_to", "lengths"), [((32, 8, 16), [8, 8, 16, 32]), (40, [40] * 4)])
def test_lengths_may_be_chosen_from_some(pad_to, lengths):
    result = pad_batches((np.ones((1, n)) for n in (1, 8, 9, 32)), pad_to=pad_to)
    assert [x.shape[1] for x in result] == lengths


def test_rows_may_be_lists_arrays_or_an_array_of_objects_and_keep_their_dtype():
    ragged = np.empty(2, object)
    ragged[:] = [np.ones(2, np.float16), np.ones(1, np.float16)]
    result = one({"a": ragged, "b": [[], [True]], "c": [[], []], "d": [np.ones(0, I32)] * 2, "e": [[1], [0.5]]})
    assert {name: (x.dtype.name, x.shape) for name, x in result.items()} == {
        "a": ("float16", (2, 2)),
        "b": ("bool", (2, 1)),
        "c": ("int64", (2, 1)),
        "d": ("int32", (2, 1)),
        "e": ("float64", (2, 1)),
    }
    assert one({"c": [[], []]}, values=0.0)["c"].dtype == np.float64
    images = one([[np.ones((2, 3, 1)), np.ones((4, 1, 1))], np.zeros(2)], 4, axes=(1, 2))
    assert images[0].shape == (2, 4, 4, 1) and images[0].sum() == 10


def test_labels_are_padded_where_they_are_rows_or_named():
    words, tags = {"words": [[1, 2], [3]]}, [[0, 1], [1]]
    features, labels = one((words, tags), 4, label_values=-1)
    assert features["words"].tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]
    assert labels.tolist() == [[0, 1, -1, -1], [1, -1, -1, -1]]
    y = np.ones((2, 3))
    assert one((words, y), 4)[1] is y and one((words, y), 4, label_axes=1)[1].shape == (2, 4)
    _, labels = one((words, {"tags": tags, "y": y}), 4, label_values={"tags": 7})
    assert labels["tags"][1].tolist() == [1, 7, 7, 7] and labels["y"] is y
    assert one((words, None))[1] is None


def test_the_batch_given_is_not_changed():
    x = {"x": [[1], [2, 3]], "y": np.ones((2, 1))}
    one(x, 4, axes={"y": 1}, lengths={"x": "n"})
    assert x == {"x": [[1], [2, 3]], "y": x["y"]} and x["y"].shape == (2, 1)


# What is given comes back.


def rows_of(result):
    return [features.shape for features, _ in batches(result)]


def test_an_input_fn_stays_one_with_its_arguments():
    def input_fn(params, mode):
        yield np.ones((2, params["n"]))
        yield np.ones((2, len(mode)))

    assert rows_of(call_input_fn(pad_batches(input_fn, 4), "train", {"n": 9}, None)) == [(2, 12), (2, 8)]
    assert rows_of(pad_batches(lambda: np.ones((2, 3)), 4)()) == [(2, 4)]
    assert batches(pad_batches(lambda: (np.ones((2, 3)), None), 4)()).is_one_batch
    with pytest.raises(TypeError, match="input_fn should return an iterable of batches.*got 3"):
        pad_batches(lambda: 3)()
    with pytest.raises(TypeError, match="input_fn should return an iterable of batches.*got None"):
        pad_batches(None)


def test_an_iterable_can_be_gone_through_again():
    padded = pad_batches([np.ones((2, 3)), np.ones((2, 5))], 4)
    assert rows_of(padded) == rows_of(padded) == [(2, 4), (2, 8)]


def test_the_position_of_the_input_goes_through():
    x = np.arange(20).reshape(10, 2)
    padded = pad_batches(numpy_input_fn({"x": x}, batch_size=3, shuffle=True, num_epochs=2), 4, axes={"x": 1})
    source = batches(padded())
    assert source.has_position
    next(source), next(source)
    state, rest = json.loads(json.dumps(source.get_state())), [f["x"].tolist() for f, _ in source]
    again = batches(padded())
    again.set_state(state)
    assert [f["x"].tolist() for f, _ in again] == rest and len(rest[0][0]) == 4
    assert not batches(pad_batches(iter([x]))).has_position


def test_a_generator_is_closed_with_its_training(tmp_path):
    closed = []

    def input_fn():
        try:
            while True:
                yield [[1.0], [2.0, 3.0]], np.ones(2, np.float32)
        finally:
            closed.append(True)

    make(tmp_path, masked_mean).train(pad_batches(input_fn, 4), steps=3)
    assert closed == [True]


@regressing
def masked_mean(features):
    """The mean of each row without its padding, times a weight."""
    if not isinstance(features, dict):
        features = {"x": features, "n": jnp.full(features.shape[0], features.shape[1])}
    mask = jnp.arange(features["x"].shape[1]) < features["n"][:, None]
    return zeros("w") * jnp.where(mask, features["x"], 0).sum(1) / features["n"].astype(jnp.float32)


def varying():
    """Each batch has rows of a length of its own."""
    random = np.random.default_rng(0)
    for n in range(1, 13):
        rows = [random.normal(size=n).astype(np.float32), *random.normal(size=(3, 1)).astype(np.float32)]
        yield {"x": rows}, np.array([row.mean() for row in rows])


@pytest.mark.slow
@pytest.mark.covers("1.6 padded_batch")
def test_padding_compiles_few_programs_and_trains_the_same(tmp_path, compilations):
    weights, counts = [], []
    for i, multiple in enumerate((1, 16)):
        before = len(compilations)
        estimator = make(tmp_path / str(i), masked_mean, steps_per_loop=1)
        estimator.train(pad_batches(varying, multiple, lengths="n"))
        counts.append(len(compilations) - before)
        weights.append(float(estimator.get_variable_value("w")))
        assert step_of(estimator) == 12
    assert weights[0] == pytest.approx(weights[1], rel=1e-5) and weights[0] > 0.01
    assert counts[1] <= counts[0] - 10


# Errors.

X = np.ones((2, 3))
ROWS = [[1, 2], [3]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"multiple_of": 0}, "multiple_of must be an int >= 1; got 0"),
        ({"multiple_of": 2.0}, "multiple_of must be an int >= 1; got 2.0"),
        ({"multiple_of": 2, "pad_to": 4}, "Only one of multiple_of and pad_to may be given; got multiple_of=2 and pa"),
        ({"pad_to": ()}, r"pad_to must be an int >= 1, or several of them; got \(\)"),
        ({"pad_to": (4, 0)}, "pad_to must be an int >= 1"),
        ({"axes": 0}, "axes must be an int >= 1, a tuple of such.*got 0. The first dimension, 0, counts the rows"),
        ({"axes": {"x": (1, "2")}}, "axes must be an int >= 1"),
        ({"label_axes": True}, "label_axes must be an int >= 1"),
    ],
)
def test_bad_arguments_are_errors_at_once(args, message):
    with pytest.raises(ValueError, match=message):
        pad_batches(lambda: None, **args)


@pytest.mark.parametrize(
    ("element", "args", "message"),
    [
        ({"x": X}, {}, r"needs the names of what to pad where features are a dict.*\['x'\]. Give.*`axes=\{'x': 1\}`"),
        ({"x": X}, {"axes": 1}, r"features are a dict, \['x'\], so that their axes must be one by name.*`\{'x': 1\}`"),
        ({"x": X}, {"axes": {"y": 1}}, r"got \['y'\] by name, which features have not; they have \['x'\]"),
        ({"x": ROWS}, {"values": {"y": 1}}, r"got \['y'\] by name, which features have not"),
        ((X, X), {"label_axes": {"y": 1}}, r"got \['y'\] by name, which labels have not; they have \[\]"),
        (X, {"axes": 2}, "features has 2 dimensions, and so no dimension 2 to be padded"),
        ({"x": ROWS}, {"pad_to": 1}, r"features\['x'\] has the length 2, and pad_to=1 has none as large. Cut it"),
        ({"x": [1, 2]}, {}, r"The rows of features\['x'\] must be sequences, or arrays of one.*\[\(\), \(\)\]"),
        ({"x": [[1], [[2]]]}, {}, r"The rows of features\['x'\] must be sequences"),
        ({"x": []}, {}, r"features\['x'\] has no rows. Let input_fn leave the batch out"),
        ({"x": [np.ones((1, 2)), np.ones((1, 3))]}, {}, r"rows of features\['x'\] differ in dimension 2: .2, 3"),
        ({"x": ROWS}, {"values": 0.5}, r"features\['x'\] is of dtype int64, which has no 0.5 to be padded with"),
        ((X, np.ones((2, 1), np.uint8)), {"label_axes": 1, "label_values": -1}, "labels is of dtype uint8.* no -1"),
        ({"x": ROWS}, {"values": "a"}, "which has no 'a' to be padded with"),
        (X, {"lengths": "n"}, "lengths='n' adds a feature, for which features must be a dict; got ndarray"),
        ({"x": ROWS, "y": ROWS}, {"lengths": "n"}, r"names the lengths of one feature; 2 are padded: \['x', 'y'\]"),
        ({"x": ROWS, "y": X}, {"lengths": {"y": "n"}}, r"has the feature 'y', which is not padded; padded are \['x'\]"),
        ({"x": ROWS, "y": X}, {"lengths": "y"}, "adds a feature 'y', which the batch has already"),
        ({"x": to_sparse(np.eye(2))}, {"axes": {"x": 1}}, r"features\['x'\] is sparse: one program"),
    ],
)
def test_what_does_not_fit_a_batch_is_an_error(element, args, message):
    with pytest.raises(ValueError, match=message):
        one(element, **args)


def test_nan_may_be_padded_with():
    result = one({"x": [[1.0], [2.0, 3.0]]}, values=np.nan)["x"]
    assert np.isnan(result[0, 1]) and list(itertools.chain(*result.tolist()))[2:] == [2.0, 3.0]
