"""Sums over towers by one algorithm, in packs or array by array."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicate.cross_tower_ops._algorithms import all_reduce, check_algorithm
from replicate.cross_tower_ops._base import CrossTowerOps
from replicate.towers._collectives import cross_tower_sum
from replicate.towers._map import num_towers
from replicate.towers._packing import AggregateSmallTensorPacker, ConcatAndSplitPacker, Packer, at_least


class AllReduce(CrossTowerOps):
    """Sums arrays in packs, all by one algorithm; TensorFlow's `AllReduceCrossTowerOps`.

    The arrays are packed by `ConcatAndSplitPacker`, or by `AggregateSmallTensorPacker` where `num_packs` is 0. They are
    summed in their own dtype; which of the towers' values are added first depends on the algorithm. XLA may join the
    all-reduces of "psum" into one, however many packs there are.

    >>> import estimator as est, jax, jax.numpy as jnp, optax, replicate
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss = jnp.mean((w * features - labels) ** 2)
    ...     train_op = replicate.TowerOptimizer(optax.sgd(0.5)).minimize(loss)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> ops = AllReduce("ring", num_packs=2)
    >>> towers = replicate.replicate_model_fn(model_fn, devices=["cpu:0", "cpu:1"], cross_tower_ops=ops)
    >>> model = est.transform(towers)
    >>> x, y = jnp.array([1.0, 3.0]), jnp.array([0.0, 0.0])
    >>> state, spec = model.train_step(model.init(jax.random.key(0), x, y), x, y)
    >>> print(spec.loss, state.variables["w"])
    5.0 -4.0

    Args:
      algorithm: "psum", which is XLA's own, "ring", "recursive_halving_doubling", "tree", "hierarchical" or
        "reduce_scatter_gather"; or "a/b": `a` among the towers of each process, then `b` across the processes.
      num_packs: the number of vectors that the arrays of a dtype are put in.
      agg_small_grads_max_bytes: with `num_packs=0`, the size up to which arrays that follow one another share a vector.
      agg_small_grads_max_group: how many of them at most.
      compress_dtype: a floating dtype, such as `jnp.bfloat16`, that wider floats are cast to before they are sent, and
        back from after they are summed. In a training step this applies to gradients only.

    Attributes:
      compress_dtype: as given.
      exact: the same without it.

    Raises:
      ValueError: there is no such algorithm, a number is too small, or both ways of packing are requested.
      TypeError: `compress_dtype` is not a floating dtype.
    """

    def __init__(
        self,
        algorithm: str = "psum",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        compress_dtype: Any = None,
    ) -> None:
        caller = type(self).__name__
        self._algorithm = check_algorithm(caller, algorithm)
        self._packer = packer_for(caller, num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)
        self.compress_dtype = None if compress_dtype is None else _check_floating(caller, compress_dtype)
        if self.compress_dtype is not None:
            # For losses, metrics and counts, which must not be rounded; gradients may.
            self.exact = AllReduce(algorithm, num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)

    def sum_in_towers(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        if num_towers() == 1:
            return list(values)
        # A sum of booleans is an integer.
        arrays = [jnp.asarray(v, jnp.int32 if jnp.result_type(v) == jnp.bool_ else None) for v in values]
        sums = self._sum([self._compress(array) for array in arrays])
        return [total.astype(array.dtype) for total, array in zip(sums, arrays, strict=True)]

    def _sum(self, arrays: list[jax.Array]) -> list[jax.Array]:
        return self._packer.unpack([all_reduce(pack, self._algorithm) for pack in self._packer.pack(arrays)], arrays)

    def _compress(self, array: jax.Array) -> jax.Array:
        dtype = self.compress_dtype
        # Only wider floats are cast: integers, such as counts, must be exact, and narrower floats would not get
        # smaller.
        wider = dtype is not None and jnp.issubdtype(array.dtype, jnp.floating) and array.itemsize > dtype.itemsize
        return array.astype(dtype) if wider else array


class CollectiveAllReduce(AllReduce):
    """Sums arrays by XLA's own all-reduce, one for each N arrays of a dtype; TensorFlow's class of this name.

    As there, row-sparse gradients are refused.

    >>> ops = CollectiveAllReduce(all_reduce_merge_scope=8)

    Args:
      all_reduce_merge_scope: N, the number of arrays in an all-reduce.

    Raises:
      ValueError: `all_reduce_merge_scope` is not an integer of at least 1.
    """

    takes_slices = False

    def __init__(self, all_reduce_merge_scope: int = 32) -> None:
        at_least(1, "CollectiveAllReduce", "all_reduce_merge_scope", all_reduce_merge_scope)
        super().__init__(
            num_packs=0, agg_small_grads_max_bytes=sys.maxsize, agg_small_grads_max_group=all_reduce_merge_scope
        )


class OneByOne(CrossTowerOps):
    """Sums each array by itself, in its own shape.

    For towers of several devices: an array that is cut over the devices of a tower would have to be put together to
    be packed with others. XLA joins the all-reduces.
    """

    def sum_in_towers(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        return [cross_tower_sum(value) for value in values]


def packer_for(caller: str, num_packs: int, max_bytes: int, max_group: int) -> Packer:
    """The packer for the arguments of a `CrossTowerOps`, whose name is `caller`."""
    at_least(0, caller, "num_packs", num_packs)
    at_least(0, caller, "agg_small_grads_max_bytes", max_bytes)
    at_least(1, caller, "agg_small_grads_max_group", max_group)
    if num_packs == 0:
        return AggregateSmallTensorPacker(max_bytes, max_group)
    if max_bytes:
        raise ValueError(
            f"`{caller}` packs by num_packs or by agg_small_grads_max_bytes; got num_packs={num_packs} and "
            f"agg_small_grads_max_bytes={max_bytes}. Set one of them to 0."
        )
    return ConcatAndSplitPacker(num_packs)


def _check_floating(caller: str, dtype: Any) -> Any:
    try:
        checked = jnp.dtype(dtype)
    except TypeError:
        checked = None
    if checked is None or not jnp.issubdtype(checked, jnp.floating):
        raise TypeError(f"`{caller}` needs a floating dtype such as jnp.bfloat16 as compress_dtype; got {dtype!r}.")
    return checked
