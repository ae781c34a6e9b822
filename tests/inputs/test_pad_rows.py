"""Single rows are batched and padded as the lists of rows that they make."""

import itertools
import re

import numpy as np
import pytest
from testing.estimators import Numbers

import estimator as est

ROWS = [({"words": list(range(1, n + 1)), "age": 10 * n, "box": np.ones((2, n))}, n % 2) for n in (3, 1, 4, 2, 5)]
AXES = {"words": 1, "box": 2}


def lists_of_rows(size):
    for start in range(0, len(ROWS), size):
        group = ROWS[start : start + size]
        features = {name: [row[name] for row, _ in group] for name in ("words", "box")}
        features["age"] = np.array([row["age"] for row, _ in group])
        yield features, np.array([label for _, label in group])


@pytest.mark.covers("1.6 padded_batch")
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("options", [{}, {"multiple_of": 4}, {"pad_to": (4, 8), "lengths": {"words": "n"}}])
def test_rows_are_padded_as_the_lists_that_they_make(size, options):
    ours = list(est.inputs.pad_batches(ROWS, axes=AXES, batch_size=size, **options))
    theirs = list(est.inputs.pad_batches(lists_of_rows(size), axes=AXES, **options))
    for (features, labels), (expected, expected_labels) in zip(ours, theirs, strict=True):
        assert features.keys() == expected.keys()
        for name in features:
            np.testing.assert_array_equal(features[name], expected[name])
        np.testing.assert_array_equal(labels, expected_labels)


def test_a_remainder_can_be_dropped():
    batches = list(est.inputs.pad_batches(lambda: ROWS, axes=AXES, batch_size=2, drop_remainder=True)())
    assert [len(labels) for _, labels in batches] == [2, 2]


def test_features_alone_may_be_sequences_of_any_length():
    (one, two) = est.inputs.pad_batches([[1, 2], [], [4, 5, 6]], batch_size=2)
    assert one.tolist() == [[1, 2], [0, 0]] and two.tolist() == [[4, 5, 6]]
    assert one.dtype == two.dtype == int  # an empty row has none


def test_labels_that_are_sequences_are_padded_too():
    rows = [([1], [1, 2]), ([2, 3], [3])]
    ((features, labels),) = est.inputs.pad_batches(rows, batch_size=2, label_values=-1)
    assert features.tolist() == [[1, 0], [2, 3]] and labels.tolist() == [[1, 2], [3, -1]]


def test_the_position_is_the_one_after_the_last_row_of_a_batch():
    class Rows(Numbers):
        def __next__(self):
            return {"n": np.repeat(super().__next__(), 2)}

    batches = iter(est.inputs.pad_batches(Rows(stop=7), axes={"n": 1}, batch_size=2))
    first = [next(batches)["n"][:, 0].tolist() for _ in range(2)]
    position = dict(batches.get_state())
    rest = [each["n"][:, 0].tolist() for each in batches]
    assert first + rest == [[0, 1], [2, 3], [4, 5], [6]]
    batches = iter(est.inputs.pad_batches(Rows(stop=7), axes={"n": 1}, batch_size=2))
    batches.set_state(position)
    assert [each["n"][:, 0].tolist() for each in batches] == rest


@pytest.mark.parametrize(
    "rows, options, message",
    [
        (ROWS, {"batch_size": 0}, "batch_size must be an int >= 1, the number of rows of a batch; got 0."),
        (ROWS, {"drop_remainder": True}, "drop_remainder=True without a batch_size. Give both where it reads rows."),
        (ROWS[0], {"batch_size": 2},
         "is for an iterable of single rows, and one batch, a tuple. Leave batch_size out."),
        ([{"a": [1]}, {"b": [1]}], {"batch_size": 2}, "differ in their names: ['a'] and ['b']. Give all rows the same"),
        (ROWS, {"batch_size": 2, "axes": {"words": 1}},
         "The rows of features['box'] have the shapes [(2, 1), (2, 3)]."),
    ],
)  # fmt: skip
def test_mistakes_are_errors(rows, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        list(itertools.islice(est.inputs.pad_batches(rows, **options), 3))
