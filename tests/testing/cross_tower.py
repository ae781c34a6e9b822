"""Sums over towers taken by themselves, and what they must be."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np

from replicate.towers._map import TOWER_AXIS

DTYPES = (jnp.float32, jnp.bfloat16, jnp.int32)


def in_towers(fn, towers, on_one_device=False):
    """`fn` of arrays with the towers as their first dimension, as a program."""
    if on_one_device:
        return jax.jit(jax.vmap(fn, axis_name=TOWER_AXIS))
    return jax.jit(jax.pmap(fn, axis_name=TOWER_AXIS, devices=jax.devices()[:towers]))


def random_arrays(rng, towers, shapes, dtype):
    values = [rng.normal(size=(towers, *shape)) * 100 for shape in shapes]
    return [np.asarray(value).astype(dtype) for value in values]


def assert_sums(sums, arrays, dtype=None):
    """Every tower has the float64 sum, up to the rounding of each addition; and the same bits as the first.

    Args:
      sums: arrays of shape `[towers, ...]`.
      arrays: what was summed, of the same shapes.
      dtype: in which they were added up, if not in their own.
    """
    assert len(sums) == len(arrays)
    for total, array in zip(map(np.asarray, sums), arrays, strict=True):
        assert total.dtype == array.dtype and total.shape == array.shape
        assert all(of_tower.tobytes() == total[0].tobytes() for of_tower in total)
        wide = array.astype(np.float64)
        added_in = dtype or array.dtype
        eps = 0.0 if added_in == np.int32 else float(jnp.finfo(added_in).eps)
        error = np.abs(total[0].astype(np.float64) - wide.sum(0))
        assert (error <= len(array) * eps * np.abs(wide).sum(0)).all()


def collectives(text):
    """How often each collective stands in the text of a lowered program."""
    names = re.findall(r"stablehlo\.(all_reduce|collective_permute|reduce_scatter|all_gather)\b", text)
    return dict(collections.Counter(names))
