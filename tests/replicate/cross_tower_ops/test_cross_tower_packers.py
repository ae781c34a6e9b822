"""Packers: what goes together, in which order, and that it comes apart again."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicate.cross_tower_ops import AggregateSmallTensorPacker, ConcatAndSplitPacker

DTYPES = (np.float32, jnp.bfloat16, np.int32)


@st.composite
def arrays(draw):
    """Arrays no two elements of which are equal, unless rounded."""
    shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    kinds = draw(st.lists(st.tuples(shape, st.sampled_from(DTYPES)), max_size=8))
    sizes = [int(np.prod(shape)) for shape, _ in kinds]
    begins = [0, *itertools.accumulate(sizes)]
    return [
        np.arange(begin, begin + size).reshape(shape).astype(dtype)
        for begin, size, (shape, dtype) in zip(begins, sizes, kinds, strict=False)
    ]


def elements(packs, dtype):
    """All elements of a dtype in the order in which they are packed."""
    return [float(x) for pack in packs if pack.dtype == dtype for x in np.asarray(pack)]


def last_first(given, dtype):
    return [float(x) for array in reversed(given) if array.dtype == dtype for x in array.ravel()]


def assert_comes_apart(packer, given, packs):
    unpacked = packer.unpack(packs, given)
    assert len(unpacked) == len(given)
    for got, want in zip(unpacked, given, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@given(given=arrays(), num_packs=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_all_arrays_of_a_dtype_become_n_nearly_equal_vectors(given, num_packs):
    packer = ConcatAndSplitPacker(num_packs)
    packs = packer.pack(given)
    for dtype in DTYPES:
        mine = [pack for pack in packs if pack.dtype == dtype]
        size = sum(array.size for array in given if array.dtype == dtype)
        assert sum(pack.size > 0 for pack in mine) == min(num_packs, size)
        assert not mine or max(pack.size for pack in mine) - min(pack.size for pack in mine) <= 1
        assert elements(packs, dtype) == last_first(given, dtype)
    assert_comes_apart(packer, given, packs)


@pytest.mark.slow
@given(given=arrays(), max_bytes=st.integers(0, 100), max_group=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_small_arrays_that_follow_one_another_go_together(given, max_bytes, max_group):
    packer = AggregateSmallTensorPacker(max_bytes, max_group)
    packs, groups = packer.pack(given), packer.groups(given)
    assert sorted(itertools.chain(*groups)) == list(range(len(given)))
    assert len(packs) == len(groups)
    for dtype in DTYPES:
        assert elements(packs, dtype) == last_first(given, dtype)
        mine = [group for group in groups if given[group[0]].dtype == dtype]
        small = [all(given[i].nbytes <= max_bytes for i in group) for group in mine]
        for group, is_small in zip(mine, small, strict=True):
            assert len(group) <= (max_group if is_small else 1)
        for (one, both), other in zip(zip(mine, itertools.pairwise(small), strict=False), mine[1:], strict=False):
            assert not all(both) or len(one) == max_group, (one, other)  # as few groups as can be
    assert_comes_apart(packer, given, packs)


def test_a_vector_of_one_array_is_that_array():
    (alone,) = AggregateSmallTensorPacker(0, 1).pack([np.ones((2, 3), np.float32)])
    assert alone.shape == (6,)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: ConcatAndSplitPacker(0),
            "`ConcatAndSplitPacker` needs an integer of at least 1 as `num_packs`; got 0.",
        ),
        (lambda: ConcatAndSplitPacker(True), "at least 1 as `num_packs`; got True."),
        (lambda: AggregateSmallTensorPacker(-1), "needs an integer of at least 0 as `max_bytes`; got -1."),
        (lambda: AggregateSmallTensorPacker(8, 0), "needs an integer of at least 1 as `max_group`; got 0."),
        (lambda: AggregateSmallTensorPacker(8, 1.0), "needs an integer of at least 1 as `max_group`; got 1.0."),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
