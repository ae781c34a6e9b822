"""Variables made the same on request: what towers wrote, and copies on several devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from estimator.core._frame import Frame, current_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._typing import PyTree
from estimator.runtime._program import Program
from estimator.variables._aggregation import VariableAggregation
from estimator.variables._variables import list_names, read, resolve

if TYPE_CHECKING:
    from estimator.core._hook import Context

_HOW = {"first": VariableAggregation.ONLY_FIRST_TOWER, "mean": VariableAggregation.MEAN}


def sync_variables(
    names: str | Sequence[str] | None = None, how: str = "first", *, context: Context | None = None
) -> None:
    """Makes variables the same everywhere: the values of the first tower, or device, or the mean of all.

    In a model_fn it says, for this step, how what the towers have written to non-trainable variables becomes one
    value: at the end of the step, in place of the variable's `aggregation`. Call it after what writes them; the sum
    of what was added by `est.assign_add` before is a part of what each tower has written, what is added later is
    still summed. So the statistics of a batch norm come from the first tower, or from all, variable by variable. A
    variable that was not written has one value already, as has, always, one that an optimizer trains. It acts in
    TRAIN, and in towers.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     est.get_variable("mean", (), trainable=False)
    ...     est.assign("mean", features.mean())
    ...     est.sync_variables("mean", how="first")  # of two towers: the mean of the first half of the batch
    ...     loss = w * features.mean()
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> model, x = est.transform(model_fn), jnp.array([1.0, 3.0])
    >>> state, _ = model.train_step(model.init(jax.random.key(0), x), x)
    >>> print(state.variables["mean"])
    2.0

    In a hook, with its `context`, it makes the copies that the devices have of variables (and, with no names, of
    slots) the same at once. They are, unless a fault of the hardware, or a callback to Python, made one drift: what
    `RunConfig(check_replicas_every=...)` finds, this mends. To be called in `before_run` or `after_run` of `train`, in
    all processes. Caffe2 had `_SyncAllParams`; its `FinalizeAfterCheckpoint`, which sent what was read to all
    devices, is a part of reading a checkpoint here.

    Args:
      names: of variables: in a model_fn looked up in the current scope, then as full names. If None, all non-trainable
        ones got so far in this run; in a hook, all variables and slots.
      how: "first" or "mean". With no names, integers, which have no mean, are always taken from the first.
      context: what the hook got.

    Raises:
      ValueError: `how` is something else, there is no such variable, it is trainable (in a model_fn), or it holds
        integers and is to be averaged by name.
      RuntimeError: no model_fn is running, and there is no `context` of a training run.
    """
    if how not in _HOW:
        raise ValueError(f'`est.sync_variables` needs how="first" or how="mean"; got {how!r}.')
    names = [names] if isinstance(names, str) else names
    if context is not None:
        context.change(functools.partial(_sync_carry, names=names, how=how))
        return
    frame = current_frame("est.sync_variables")
    for name in _written_by_model_fn(frame, names):
        which = how if names is not None or _has_mean(frame.variables[name]) else "first"
        _check_mean(name, frame.variables[name], which)
        if frame.mode == ModeKeys.TRAIN:
            frame.declared.aggregation[name] = _HOW[which]
            if name in frame.writes.added:
                frame.writes.assigned[name] = read(frame, name)
                del frame.writes.added[name]


def _written_by_model_fn(frame: Frame, names: Sequence[str] | None) -> list[str]:
    if names is None:
        return [name for name, trainable in frame.declared.trainable.items() if not trainable]
    resolved = [resolve("est.sync_variables", frame, name) for name in names]
    for name in resolved:
        if frame.declared.trainable[name]:
            raise ValueError(
                f"`est.sync_variables({name!r})`: the variable is trainable, so its optimizer writes it, once for all "
                "towers. To mend copies that have drifted apart, call it in a hook with `context=context`."
            )
    return resolved


def _sync_carry(carry: Any, names: Sequence[str] | None, how: str) -> Any:
    if names is None:
        variables, slots = _same_everywhere((carry.variables, carry.slots), how)
        return carry._replace(variables=variables, slots=slots)
    for name in names:
        if name not in carry.variables:
            raise ValueError(
                f"`est.sync_variables({name!r})` names no variable; there are {list_names(carry.variables)}."
            )
        _check_mean(name, carry.variables[name], how)
    mended = _same_everywhere({name: carry.variables[name] for name in names}, how)
    return carry._replace(variables={**carry.variables, **mended})


def _check_mean(name: str, value: PyTree, how: str) -> None:
    if how == "mean" and not _has_mean(value):
        raise ValueError(
            f"`est.sync_variables({name!r}, how='mean')`: the variable holds integers, which cannot be averaged. "
            'Use how="first".'
        )


def _has_mean(value: PyTree) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(value))


def _same_everywhere(tree: PyTree, how: str) -> PyTree:
    """Arrays with the same copy on all devices that have a part."""
    leaves, structure = jax.tree.flatten(tree)
    stacked = {i: copies for i, leaf in enumerate(leaves) if (copies := _copies(leaf)) is not None}
    if stacked:
        merge = _merge(how, tuple(leaves[i].sharding for i in stacked))
        for i, array in zip(stacked, merge(list(stacked.values())), strict=True):
            leaves[i] = array
    return jax.tree.unflatten(structure, leaves)


def _copies(array: jax.Array) -> jax.Array | None:
    """The copies of an array, as one that has them along a new first dimension; None if there is only one."""
    sharding = array.sharding
    # Placements without a mesh keep an array on only one device.
    if not isinstance(sharding, NamedSharding):
        return None
    cut = set(jax.tree.leaves(tuple(sharding.spec)))
    axes = tuple(name for name in sharding.mesh.axis_names if name not in cut)
    count = math.prod(sharding.mesh.shape[name] for name in axes)
    if count == 1:
        return None
    along = NamedSharding(sharding.mesh, PartitionSpec(axes, *sharding.spec))
    # Nothing moves between devices: what each one has is declared to be its part of a larger array.
    shards = [shard.data[None] for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays((count, *array.shape), along, shards)


# Cached, since each call would otherwise make another function, and compile it.
@functools.cache
def _merge(how: str, shardings: tuple[NamedSharding, ...]) -> Any:
    def merge_copies(copies: list[jax.Array]) -> list[jax.Array]:
        means = [how == "mean" and jnp.issubdtype(x.dtype, jnp.inexact) for x in copies]
        return [x.mean(0) if mean else x[0] for x, mean in zip(copies, means, strict=True)]

    return Program(merge_copies, out_shardings=list(shardings))
