"""The common part of all classes that sum over towers."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from estimator import IndexedSlices
from estimator.replication import Program
from estimator.typing import Gradients, Tree
from replicate.cross_tower_ops._per_tower import Mirrored, PerTower, as_per_tower, destination_devices, has_slices
from replicate.towers._collectives import cross_tower_concatenate, is_slices
from replicate.towers._map import TOWER_AXIS, num_towers, tower_map

Devices = tuple[jax.Device, ...]


class ReduceOp(enum.StrEnum):
    """The reductions that make one value of several towers' values.

    Attributes:
      SUM: their sum.
      MEAN: their sum divided by the number of towers, of all processes.
    """

    SUM = "sum"
    MEAN = "mean"


class CrossTowerOps(abc.ABC):
    """A way of summing over towers, for `replicate_model_fn(..., cross_tower_ops=...)` and for values outside.

    A subclass says how by `sum_in_towers`. Outside of programs, `reduce` and `batch_reduce` run it in one of their
    own, which is compiled once for values of the same shapes and kept with the object: make one and use it again.

    Attributes:
      takes_slices: whether row-sparse values are gathered, or refused.
      exact: what sums all but gradients in a training step: these ops, or the same without compression.
    """

    takes_slices = True

    @functools.cached_property
    def exact(self) -> CrossTowerOps:
        return self

    @abc.abstractmethod
    def sum_in_towers(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The sum over towers of each array, the same in all of them; to be called inside the towers.

        Args:
          values: in the order in which they are used; any shapes and dtypes, the same in all towers.
        """

    def sum_step(self, gradients: list[Gradients], others: Tree) -> tuple[list[Gradients], Tree]:
        """The sums over towers of a step; of a sparse gradient, the slices of all towers, which stand for it.

        Args:
          gradients: by variable, of each update.
          others: what else is summed, exactly.

        Raises:
          ValueError: a gradient is sparse, which these ops do not take.
        """
        if num_towers() == 1:
            return gradients, others
        for name, gradient in (item for own in gradients for item in own.items()):
            if is_slices(gradient) and not self.takes_slices:
                raise ValueError(
                    f"`{type(self).__name__}` cannot sum the gradient of the variable {name!r}, an `est.IndexedSlices` "
                    "as `est.embedding_lookup` makes them. Use other `cross_tower_ops`, such as `AllReduce()`."
                )
        in_order = [list(own.values()) for own in gradients]  # which jax would sort by name
        leaves, structure = jax.tree.flatten((in_order, others), is_leaf=is_slices)
        count = 0 if self.exact is self else len(jax.tree.leaves(in_order, is_leaf=is_slices))
        # Gradients by the chosen algorithm, which may compress them; losses, metrics and marks always exactly.
        for ops, positions in ((self, range(count)), (self.exact, range(count, len(leaves)))):
            dense = [i for i in positions if not is_slices(leaves[i])]
            sums = ops.sum_in_towers([leaves[i] for i in dense]) if dense else []
            for i, total in zip(dense, sums, strict=True):
                is_bool = jnp.result_type(leaves[i]) == jnp.bool_  # the sum of which is an integer
                leaves[i] = total.astype(jnp.bool_) if is_bool else total
        leaves = [cross_tower_concatenate(leaf) if is_slices(leaf) else leaf for leaf in leaves]
        in_order, others = jax.tree.unflatten(structure, leaves)
        return [dict(zip(own, mine, strict=True)) for own, mine in zip(gradients, in_order, strict=True)], others

    def reduce(
        self, reduce_op: ReduceOp | str, value: PerTower | jax.Array | IndexedSlices, destinations: Any = None
    ) -> Mirrored:
        """One value of all towers, copied to the destinations.

        >>> from replicate import cross_tower_ops
        >>> x = cross_tower_ops.PerTower({"/cpu:0": jnp.ones(2), "/cpu:1": jnp.full(2, 5.0)})
        >>> total = cross_tower_ops.ReductionToOneDevice().reduce("sum", x, destinations=x)
        >>> print(total, total.value)
        Mirrored({cpu:0: float32[2], cpu:1: float32[2]}) [6. 6.]

        Args:
          reduce_op: `ReduceOp.SUM`, or `MEAN`, which divides by the number of towers.
          value: a `PerTower` of numbers. A row-sparse one is gathered: the result has the rows of all towers, one
            tower after the other, and MEAN divides their values. A `Mirrored` is what every tower has: its SUM is it
            times the towers. An array on a device counts as the value of a single tower, as in TensorFlow's original.
          destinations: a device, the name of one, a list of them, or a `PerTower`, whose devices are meant. The
            copies that are there already are not moved. None, as in TensorFlow's original: the devices of the value.

        Returns:
          The value on each destination, in their order.

        Raises:
          TypeError: the value is on no device, or holds integers to be averaged, or no numbers; or the destinations
            are of another type. (The original gave the mean of integers another dtype.)
          ValueError: an unknown `reduce_op`; no destinations, one twice, an unknown one, or another process's; the
            value is on devices of several kinds; or row-sparse where these ops take none, or over several processes.
        """
        return self._reduce("reduce", reduce_op, [(value, destinations)])[0]

    def batch_reduce(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Mirrored]:
        """Many values, each copied to its own destinations; those on the same devices are reduced by one program.

        Args:
          reduce_op: as in `reduce`, for all of them.
          value_destination_pairs: a list of tuples `(value, destinations)`, each as `reduce` takes them, in the order
            in which the values are used.

        Returns:
          A `Mirrored` for each pair, in their order.

        Raises:
          TypeError: this is not a list of pairs; or as in `reduce`.
          ValueError: as in `reduce`.
        """
        pairs = value_destination_pairs
        if not isinstance(pairs, list | tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError(f"`batch_reduce` takes a list of tuples (value, destinations); got {pairs!r}.")
        return self._reduce("batch_reduce", reduce_op, pairs)

    def broadcast(self, value: Any, destinations: Any) -> Mirrored:
        """One value copied to the destinations.

        Args:
          value: an array, of jax or numpy, a number, `est.IndexedSlices`, or a `Mirrored`.
          destinations: as in `reduce`. A copy that is there already is not moved.

        Raises:
          TypeError: the value is none of these; or as in `reduce`, of the destinations.
          ValueError: the value is on several devices and not a `Mirrored`; or as in `reduce`, of the destinations.
        """
        devices = destination_devices("broadcast", destinations)
        if isinstance(value, PerTower) and not isinstance(value, Mirrored):
            raise TypeError(
                f"`broadcast` got {value!r}, whose arrays may differ. Reduce it, or choose one by `get(device)`."
            )
        if isinstance(value, np.ndarray | np.generic | int | float | complex):
            value = PerTower({devices[0]: value})
        return copy_to([as_per_tower("broadcast", value)], [devices])[0]

    def _reduce(self, caller: str, reduce_op: Any, pairs: Sequence[tuple[Any, Any]]) -> list[Mirrored]:
        if reduce_op not in list(ReduceOp):
            raise ValueError(f"`{caller}` got reduce_op={reduce_op!r}; it is ReduceOp.SUM or ReduceOp.MEAN.")
        values = [as_per_tower(caller, value) for value, _ in pairs]
        destinations = [
            value.devices if where is None else destination_devices(caller, where)
            for value, (_, where) in zip(values, pairs, strict=True)
        ]
        for value in values:
            self._check(caller, reduce_op, value)
        reduced: list[Any] = [None] * len(pairs)
        for kind, reduce_all in ((True, self._reduce_slices), (False, self._reduce_arrays)):
            # Slices are gathered and arrays are summed; the results keep the order of the values.
            mine = [i for i, value in enumerate(values) if has_slices(value) == kind]
            results = reduce_all(ReduceOp(reduce_op), [values[i] for i in mine], [destinations[i] for i in mine])
            for i, result in zip(mine, results, strict=True):
                reduced[i] = result
        return copy_to(reduced, destinations)

    def _check(self, caller: str, reduce_op: Any, value: PerTower) -> None:
        dtype = jax.tree.leaves(value)[0].dtype
        if not jnp.issubdtype(dtype, jnp.number):
            raise TypeError(f"`{caller}` takes numbers; got {value!r}.")
        if reduce_op == ReduceOp.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"`{caller}` cannot average integers; got {value!r}. Use ReduceOp.SUM, or convert them to floats."
            )
        if has_slices(value) and not self.takes_slices:
            raise ValueError(
                f"`{type(self).__name__}.{caller}` takes no row-sparse values; got {value!r}. Make them dense "
                "by `to_dense()`, or use other ops, such as `ReductionToOneDevice`."
            )
        if has_slices(value) and value.towers != value.devices:
            raise ValueError(
                f"`{caller}` gathers row-sparse values within one process only; got {value!r} of {len(value.towers)} "
                "towers. Make them dense by `to_dense()`."
            )

    def _reduce_arrays(self, op: ReduceOp, values: list[PerTower], destinations: list[Devices]) -> list[PerTower]:
        """The values reduced, each on one or several of its devices."""
        groups: dict[Devices, list[int]] = {}
        for i, value in enumerate(values):
            # Values on the same towers share a program, which packs small ones together.
            groups.setdefault(value.towers, []).append(i)
        reduced: list[Any] = [None] * len(values)
        for towers, mine in groups.items():
            totals = _program(self, op, towers)(_stack([values[i] for i in mine]))
            for i, total in zip(mine, totals, strict=True):
                arrays = {shard.device: shard.data for shard in total.addressable_shards}
                reduced[i] = Mirrored.tree_unflatten((tuple(arrays), towers), list(arrays.values()))
        return reduced

    def _reduce_slices(self, op: ReduceOp, values: list[PerTower], destinations: list[Devices]) -> list[PerTower]:
        return combine(_concatenate_slices, op, values, self._homes(destinations))

    def _homes(self, destinations: list[Devices]) -> list[jax.Device]:
        """The device on which each value is reduced, if it is reduced on one: its first destination."""
        return [devices[0] for devices in destinations]


def combine(
    fn: Callable[[list[Any]], Any], op: ReduceOp, values: list[PerTower], devices: list[jax.Device]
) -> list[PerTower]:
    """Each value gathered on one device, where `fn` makes one of the parts, in tower order."""
    # All parts of all values are moved at once, in order.
    gathered = iter(_move([(part, device) for value, device in zip(values, devices, strict=True) for part in value]))
    totals = [_combine(fn, op, [next(gathered) for _ in value]) for value in values]
    return [
        Mirrored.tree_unflatten(((device,), (device,)), [total]) for device, total in zip(devices, totals, strict=True)
    ]


def copy_to(values: Sequence[PerTower], destinations: Sequence[Devices]) -> list[Mirrored]:
    """Each value, of equal arrays, on all of its destinations: the array that is there, or a copy of the first."""
    moves = []
    for value, devices in zip(values, destinations, strict=True):
        present = dict(zip(value.devices, value, strict=True))
        moves += [(present.get(device, next(iter(value))), device) for device in devices]
    moved = iter(_move(moves))
    return [Mirrored.tree_unflatten((devices, devices), [next(moved) for _ in devices]) for devices in destinations]


def _move(moves: list[tuple[Any, jax.Device]]) -> list[Any]:
    """Arrays, or IndexedSlices, each on its device; what is there already shares its memory.

    Each is a transfer of its own. Packing small ones would take a third of the time, but seconds to compile.
    """
    # One call for all of them, so that jax starts the copies together.
    return jax.device_put([tree for tree, _ in moves], [device for _, device in moves])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _combine(fn: Callable[[list[Any]], Any], op: ReduceOp, parts: list[Any]) -> Any:
    total = fn(parts)
    if isinstance(total, IndexedSlices):
        return dataclasses.replace(total, values=_divide(op, total.values, len(parts)))
    return _divide(op, total, len(parts))


def _divide(op: ReduceOp, total: jax.Array, towers: int) -> jax.Array:
    return total / towers if op == ReduceOp.MEAN else total


def _concatenate_slices(parts: list[IndexedSlices]) -> IndexedSlices:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


@functools.lru_cache(maxsize=256)
# Cached, since each new function is traced again.
def _program(ops: CrossTowerOps, op: ReduceOp, towers: Devices) -> Callable[[list[Any]], list[jax.Array]]:
    """The sums in towers as a program of its own: from arrays of `_stack` to copies on all towers."""
    if len({device.platform for device in towers}) > 1:
        raise ValueError(
            f"`{type(ops).__name__}` reduces values on devices of one kind; got {', '.join(map(str, towers))}. "
            "`ReductionToOneDevice` takes any."
        )

    def sums(_: Any, rows: list[Any]) -> tuple[list[jax.Array], None]:
        values = [x[0].reshape(()) if isinstance(x, tuple) else x for x in rows]
        return [_divide(op, total, len(towers)) for total in ops.sum_in_towers(values)], None

    def program(stacked: list[Any]) -> list[jax.Array]:
        # The first argument, shared by the towers, must not be empty: jax would take two rows for pmap's two arguments.
        return tower_map(sums, towers)(np.int32(0), stacked)[0]

    return Program(program, out_shardings=_sharding(towers))


def _stack(values: list[PerTower]) -> list[Any]:
    """Each value as one array of all towers' rows, without a copy; a scalar as a tuple of one row per tower."""
    towers = values[0].towers
    parts = [list(value) for value in values]
    # A scalar has no rows to stack: it becomes an array of one row; one program does this for all scalars of a tower.
    scalars = [i for i, arrays in enumerate(parts) if not arrays[0].ndim]
    for tower in range(len(parts[0]) if scalars else 0):
        for i, row in zip(scalars, _as_rows([parts[i][tower] for i in scalars]), strict=True):
            parts[i][tower] = row

    def stack(arrays: list[jax.Array]) -> jax.Array:
        rows, *rest = arrays[0].shape
        shape = (len(towers) * rows, *rest)
        return jax.make_array_from_single_device_arrays(shape, _sharding(towers, TOWER_AXIS), arrays)

    return [(stack(arrays),) if i in scalars else stack(arrays) for i, arrays in enumerate(parts)]


@jax.jit
def _as_rows(scalars: list[jax.Array]) -> list[jax.Array]:
    return [x.reshape(1) for x in scalars]


@functools.lru_cache(maxsize=256)
def _sharding(towers: Devices, *axes: str) -> NamedSharding:
    return NamedSharding(Mesh(np.array(towers), (TOWER_AXIS,)), PartitionSpec(*axes))
