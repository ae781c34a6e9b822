"""What processes exchange about a batch comes back from JSON as a batch of the same structure."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from estimator.loop._batch_shape import BatchShape, check_alike

PAIRS = [
    ({"x": np.ones((4, 3), np.float32), "ids": np.ones((4, 2), np.int32)}, np.ones((4, 1))),
    ({"nested": [np.ones((2, 1)), (np.ones(2), None)], "by number": {7: np.ones((2, 5), jnp.bfloat16)}}, None),
    (jnp.ones((3, 2), jnp.int8), {}),
]


def sent(pair):
    return BatchShape(*json.loads(json.dumps(BatchShape.of(pair))))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rows", [0, 2])
def test_zeros_have_the_structure_the_dtypes_and_the_rows(pair, rows):
    zeros = sent(pair).zeros(rows)
    assert jax.tree.structure(zeros) == jax.tree.structure(pair)
    for zero, x in zip(jax.tree.leaves(zeros), jax.tree.leaves(pair), strict=True):
        assert (zero.shape, zero.dtype) == ((rows, *x.shape[1:]), x.dtype)
        assert not zero.any()
    assert sent(pair).rows == len(jax.tree.leaves(pair)[0])


def test_batches_are_alike_but_for_their_rows():
    one, other = [sent((np.ones((n, 3)), None)) for n in (2, 4)]
    check_alike([one, other], with_rows=False)
    with pytest.raises(ValueError, match=r"features is float64\[2,3\] in process 0, float64\[4,3\] in process 1"):
        check_alike([one, other], with_rows=True)


def test_containers_of_the_users_own_are_refused_where_a_batch_is_missing():
    class Point(NamedTuple):
        x: np.ndarray

    shape = sent((Point(np.ones((2, 3))), None))
    check_alike([shape, shape], with_rows=True)
    with pytest.raises(TypeError, match="has no batch where others have some, and cannot make one of a Point. Give"):
        shape.zeros(0)
