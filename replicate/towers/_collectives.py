"""Sums, means and copies over towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from estimator import IndexedSlices
from estimator.typing import Tree
from replicate.towers._map import TOWER_AXIS, are_on_one_device, map_pieces, num_towers, one_sum, tower_index
from replicate.towers._packing import by_dtype, pack, unpack


def cross_tower_sum(x: Tree) -> Tree:
    """The sum over towers of every array in a pytree, the same in all of them; `x` itself outside of towers.

    One collective per dtype, however many arrays there are: on CPU devices a collective costs more than the copy
    into one vector (a third of the step time with 4 towers, a quarter within a scan).

    >>> print(cross_tower_sum(jnp.ones(2)))
    [1. 1.]
    """
    if num_towers() == 1:
        return x
    leaves, structure = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    for mine in by_dtype(leaves, range(len(leaves))):
        if len(mine) == 1:  # in its own shape: it may be cut over the devices of a tower
            leaves[mine[0]] = one_sum(leaves[mine[0]])
            continue
        sums = one_sum(pack([leaves[i] for i in mine]))
        for i, total in zip(mine, unpack(sums, [leaves[i].shape for i in mine]), strict=True):
            leaves[i] = total
    return jax.tree.unflatten(structure, leaves)


def cross_tower_mean(x: Tree) -> Tree:
    """The mean over towers of every array in a pytree; `x` itself outside of towers.

    >>> print(cross_tower_mean(jnp.ones(2)))
    [1. 1.]

    Raises:
      TypeError: an array holds integers, which cannot be averaged.
    """
    for leaf in jax.tree.leaves(x):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"`cross_tower_mean` cannot average integers; got {jnp.result_type(leaf)}. "
                "Use `cross_tower_sum`, or convert them to floats."
            )
    towers = num_towers()
    return x if towers == 1 else jax.tree.map(lambda total: total / towers, cross_tower_sum(x))


def cross_tower_concatenate(x: Tree) -> Tree:
    """Every array in a pytree, of all towers one after the other, the same in all of them; `x` outside of towers.

    >>> print(cross_tower_concatenate(jnp.arange(2)))
    [0 1]
    """
    if num_towers() == 1:
        return x
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, TOWER_AXIS, tiled=True), x)


def is_slices(x: object) -> TypeGuard[IndexedSlices]:
    """Returns whether a node of a pytree is a sparse gradient; a sum of them has the slices of all, in order."""
    return isinstance(x, IndexedSlices)


def join_slices(stacked: IndexedSlices) -> IndexedSlices:
    """Joins the slices of several parts of a batch, arrays of shape `[parts, n, ...]`: that is their sum."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked)


def gather_cut(arrays: Sequence[jax.Array], axes: Sequence[int], mesh: Mesh) -> list[jax.Array]:
    """Arrays that are cut over the towers of a mesh, whole on each device: one collective per dtype.

    Args:
      axes: the dimension along which each array is cut.
    """
    return map_pieces(lambda pieces: _gather_pieces(pieces, axes), axes, mesh)(arrays)


def _gather_pieces(pieces: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
    whole = list(pieces)
    for mine in by_dtype(pieces, range(len(pieces))):
        packed = jax.lax.all_gather(pack([pieces[i] for i in mine]), TOWER_AXIS)
        for i, parts in zip(mine, unpack(packed, [pieces[i].shape for i in mine]), strict=True):
            shape = list(pieces[i].shape)
            shape[axes[i]] *= len(parts)
            whole[i] = jnp.moveaxis(parts, 0, axes[i]).reshape(shape)
    return whole


def towers_of_processes() -> list[list[int]]:
    """The towers of each process, which follow one another; all in one list if they do not divide by the processes."""
    towers, processes = num_towers(), jax.process_count()
    size = towers if towers % processes else towers // processes
    return [list(range(begin, begin + size)) for begin in range(0, towers, size)]


# What algorithms are made of. `groups` are lists of towers, of one size and every tower in one of them; a tower works
# with the towers of its group.


def place_in_group(groups: list[list[int]]) -> jax.Array:
    """The number of this tower in its group."""
    places = {tower: place for group in groups for place, tower in enumerate(group)}
    # Looked up in a constant: all towers run the same program, in which only their index differs.
    return jnp.array([places[tower] for tower in range(len(places))])[tower_index()]


def tower_psum(x: jax.Array, groups: list[list[int]]) -> jax.Array:
    """The sum over the group by XLA's own algorithm."""
    if are_on_one_device():
        return _take_group(x, groups).sum(0, dtype=x.dtype)
    return x if len(groups[0]) == 1 else jax.lax.psum(x, TOWER_AXIS, axis_index_groups=_or_none(groups))


def tower_gather(x: jax.Array, groups: list[list[int]]) -> jax.Array:
    """The vectors of the group, one after the other."""
    if len(groups[0]) == 1:
        return x
    if are_on_one_device():
        return _take_group(x, groups).reshape(-1)
    return jax.lax.all_gather(x, TOWER_AXIS, axis_index_groups=_or_none(groups), tiled=True)


def tower_scatter_sum(x: jax.Array, groups: list[list[int]]) -> jax.Array:
    """A piece of the sum over the group: the n-th tower has the n-th of equal pieces."""
    if len(groups[0]) == 1:
        return x
    if are_on_one_device():
        return tower_psum(x, groups).reshape(len(groups[0]), -1)[place_in_group(groups)]
    return jax.lax.psum_scatter(x, TOWER_AXIS, axis_index_groups=_or_none(groups), tiled=True)


def tower_permute(x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """Sends `x` from the first tower of each pair to the second; returns what comes here, zeros where nothing does."""
    if are_on_one_device():  # where each tower would have to send
        senders = {to: sender for sender, to in pairs}
        here = jnp.array([tower in senders for tower in range(num_towers())])[tower_index()]
        sent = _take_towers(x, [[senders.get(tower, tower)] for tower in range(num_towers())])[0]
        return jnp.where(here, sent, jnp.zeros_like(sent))
    return jax.lax.ppermute(x, TOWER_AXIS, pairs)


def _take_group(x: jax.Array, groups: list[list[int]]) -> jax.Array:
    of_tower = {tower: group for group in groups for tower in group}
    return _take_towers(x, [of_tower[tower] for tower in range(num_towers())])


def _take_towers(x: jax.Array, towers: list[list[int]]) -> jax.Array:
    """The values of the towers that are listed for this one, in a new first dimension."""
    return jax.lax.all_gather(x, TOWER_AXIS)[jnp.array(towers)[tower_index()]]


def _or_none(groups: list[list[int]]) -> list[list[int]] | None:
    return None if len(groups) == 1 else groups
