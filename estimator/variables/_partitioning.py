"""Variables and activations sharded over the devices of a tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from estimator.core._frame import Frame, current_frame
from estimator.core._typing import PyTree

_PART = "part"  # stands for all devices of a tower

Partition = Sequence[str | None] | Callable[[jax.Array], Sequence[str | None] | None] | None


def spread(x: jax.typing.ArrayLike, axis: int) -> jax.Array:
    """The same array, cut along a dimension over the devices of the tower.

    For activations of a model that does not fit on one device: `replicate_model_fn(..., devices_per_tower=k)` makes
    towers of k devices. What is computed from a spread array is spread as far as the compiler sees; it moves pieces
    between the devices of a tower where needed. Values and gradients stay what they are, and if towers have one device,
    or there are none, so does the array. An array whose dimension does not divide by k stays whole. Caffe2 moved
    activations from device to device for this (`ShiftActivationDevices`).

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> from replicate import replicate_model_fn
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (2, 8), initializer=jax.nn.initializers.ones, partition=(None, "part"))
    ...     hidden = est.spread(features @ w, axis=1)
    ...     return est.EstimatorSpec(mode, predictions=hidden.sum(1))
    >>> model = est.transform(replicate_model_fn(model_fn, devices_per_tower=4))  # of 8 devices
    >>> state = model.init(jax.random.key(0), jnp.ones((2, 2)), mode="infer")
    >>> print(model.predict_step(state, jnp.ones((2, 2))).predictions, state.variables["w"].addressable_data(0).shape)
    [16. 16.] (2, 2)

    Args:
      x: an array of at least one dimension.
      axis: which of its dimensions; a negative one counts from the last.

    Raises:
      TypeError: the axis is not an integer.
      ValueError: the array has no such dimension.
    """
    frame = current_frame("est.spread")
    x = jnp.asarray(x)
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(f"`est.spread` needs an integer as `axis`; got {axis!r}.")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"`est.spread` got axis={axis} for an array of shape {x.shape}, which has the dimensions 0 to {x.ndim - 1}."
            if x.ndim
            else f"`est.spread` got a scalar, which has no dimension to cut; axis={axis}."
        )
    return frame.replica.shard(x, axis % x.ndim)


def apply_partition(call: str, frame: Frame, full: str, partition: Partition) -> None:
    """Cuts a variable of the frame as `partition` says, and notes it; where a tower is one device it only checks it.

    Raises:
      TypeError, ValueError: the partition does not suit the variable, or its dimension does not divide.
    """

    def cut_leaf(path: Any, leaf: jax.Array) -> jax.Array:
        # Also checked if a tower is one device, to find mistakes before a run on a large machine.
        axis = _axis(call, partition(leaf) if callable(partition) else partition, leaf)
        parts = frame.replica.parts
        if axis is None or parts == 1:
            return leaf
        if leaf.shape[axis] % parts:
            raise ValueError(
                f"{call} cuts dimension {axis} of an array of shape {leaf.shape} over the {parts} devices of a "
                f"tower, by which {leaf.shape[axis]} does not divide. Make it a multiple of {parts}, cut another "
                "dimension, or choose another `devices_per_tower`."
            )
        frame.declared.partitions[full, *path] = axis
        return frame.replica.shard(leaf, axis)

    value: PyTree = frame.variables[full]
    if partition is not None and not callable(partition) and not isinstance(value, jax.Array):
        raise ValueError(
            f"{call} got partition={partition!r} for a pytree of arrays. Give a function of an array, which returns "
            f'its partition or None, as in `lambda x: (None, "{_PART}") if x.ndim == 2 else None`.'
        )
    frame.variables[full] = jax.tree_util.tree_map_with_path(cut_leaf, value)


def _axis(call: str, partition: Any, leaf: jax.Array) -> int | None:
    """The dimension that a partition cuts."""
    if partition is None:
        return None
    if not isinstance(partition, tuple | list):
        raise TypeError(
            f"{call} needs a partition with None or {_PART!r} for each dimension, such as "
            f'(None, "{_PART}"); got {partition!r}.'
        )
    unknown = [entry for entry in partition if entry not in (None, _PART)]
    if unknown or list(partition).count(_PART) > 1:
        raise ValueError(
            f"{call} got partition={tuple(partition)!r}. Each entry is None or {_PART!r}, and only one dimension "
            f"can be {_PART!r}, which stands for all devices of a tower."
        )
    # Fewer entries are allowed, as in `jax.sharding.PartitionSpec`.
    if len(partition) > leaf.ndim:
        raise ValueError(
            f"{call} got partition={tuple(partition)!r}, of {len(partition)} dimensions, for an array of shape "
            f"{leaf.shape}. Give one entry for each dimension; None at the end may be left out."
        )
    return list(partition).index(_PART) if _PART in partition else None
