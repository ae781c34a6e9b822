"""`est.embedding_lookup`: the rows that it finds, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import refused

import estimator as est

IDS = np.zeros((2, 3), np.int32)
words = functools.partial(est.embedding_lookup, "words")


def look_up_in(body, ids=IDS):
    """Runs `body(ids)`, which returns rows, in a model_fn."""
    model = est.transform(lambda features, labels, mode: est.EstimatorSpec(mode, predictions=body(features)))
    return model.predict_step(model.init(jax.random.key(0), ids, mode="infer"), ids).predictions


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_ids_of_any_integer_type_and_shape_find_their_rows(dtype):
    table = np.arange(600, dtype=np.float32).reshape(300, 2)
    ids = np.array([[[0, 100], [7, 127]]], dtype)
    got = look_up_in(lambda ids: words(ids, initializer=table), ids)
    np.testing.assert_array_equal(got, table[ids])


def test_padding_is_zeros_and_ids_beyond_the_table_are_nan():
    ids = np.array([0, -1, 2, 3, -7, 2**30])
    got = look_up_in(lambda ids: words(ids, initializer=jnp.ones((3, 2))), ids)
    np.testing.assert_array_equal(got[:, 0], [1, 0, 1, np.nan, 0, np.nan])


def test_lookups_are_shared_within_a_scope():
    def body(ids):
        with est.variable_scope("a"):
            rows = words(ids, (4, 2)), words(ids), words(ids, (4, 2)), est.read_variable("words")[ids]
        return rows + (est.get_variable("a", (4, 2))[ids],)

    *same, other = look_up_in(body)
    for rows in same[1:]:
        np.testing.assert_array_equal(rows, same[0])
    assert np.abs(other - same[0]).max() > 0


REUSED = r"asks for float32\[5, 2\], but in the first call the variable is float32\[4, 2\]"
REFUSED = {
    TypeError: [(lambda ids: words(ids / 2, (4, 2)), r"needs integer ids; got float32\[2, 3\]")],
    ValueError: [
        (lambda ids: words(ids), r"names no variable .* got none so far. Give the shape"),
        (lambda ids: words(ids, (4,)), r"needs .* at least two dimensions.*float32\[4\].*\(rows, 1\)"),
        (lambda ids: words(ids, (4, 2), jnp.int32), r"needs a floating table .*int32\[4, 2\]"),
        (lambda ids: [words(ids, (n, 2)) for n in (4, 5)], REUSED),
    ],
}


@pytest.mark.parametrize("error, lookup, message", refused.rows(REFUSED))
def test_a_lookup_that_makes_no_sense_is_refused(lookup, error, message):
    with pytest.raises(error, match="`est.embedding_lookup\\('words'\\)` " + message):
        look_up_in(lookup)
