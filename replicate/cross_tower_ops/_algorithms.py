"""Algorithms that sum a vector over towers, one function each.

Each takes a vector of any length, and groups of towers of one size that cover all towers. All towers of a group get the
sum over it with the same bits, since an element is added up in one place and sent to the others. It is added up in its
own dtype, so that narrow floats round at every step.

What an algorithm costs among n towers and for b bytes: how many messages a tower waits for, one after another, and the
bytes that the busiest tower sends.

    psum                         whatever XLA makes of it
    ring                         2 (n - 1) messages, 2 b (n - 1) / n bytes
    recursive_halving_doubling   2 log2(n) messages, 2 b (n - 1) / n bytes; if n is not a power of two, for the largest
                                 one below, and 2 messages and b bytes more
    tree                         2 log2(n) messages, b log2(n) bytes
    reduce_scatter_gather        XLA's reduce-scatter and all-gather
    hierarchical                 those within small groups, and XLA's all-reduce of a piece across them
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from replicate.towers._collectives import (
    place_in_group,
    tower_gather,
    tower_permute,
    tower_psum,
    tower_scatter_sum,
    towers_of_processes,
)
from replicate.towers._map import num_towers

Groups = list[list[int]]
Algorithm = Callable[[jax.Array, Groups], jax.Array]


def psum(x: jax.Array, groups: Groups) -> jax.Array:
    """XLA's own all-reduce."""
    return tower_psum(x, groups)


def ring(x: jax.Array, groups: Groups) -> jax.Array:
    """Each tower receives from the one before it only: pieces go round to be added up, and again as sums."""
    size = len(groups[0])
    # 2 (n - 1) messages of an n-th of the vector each: no algorithm sends less, but each message waits for the one
    # before it.
    pieces, place = _pad(x, size).reshape(size, -1), place_in_group(groups)
    onwards = [(tower, group[(i + 1) % size]) for group in groups for i, tower in enumerate(group)]

    def piece(number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(pieces, number % size, keepdims=False)

    total = piece(place)
    for step in range(1, size):
        total = tower_permute(total, onwards) + piece(place - step)
    for step in range(size):  # the first sum is of the piece that this tower will be sent last
        pieces = jax.lax.dynamic_update_index_in_dim(pieces, total, (place + 1 - step) % size, 0)
        if step < size - 1:
            total = tower_permute(total, onwards)
    return pieces.ravel()[: x.size]


def recursive_halving_doubling(x: jax.Array, groups: Groups) -> jax.Array:
    """Pairs of towers halve between them what they add up, until each has a piece, and put it together again.

    Where the number of towers is not a power of two, the towers beyond the largest one send their vectors to others
    first and get the sum afterwards.
    """
    size = len(groups[0])
    core = 1 << (size.bit_length() - 1)
    extra = [(group[i], group[i - core]) for group in groups for i in range(core, size)]
    place, distances = place_in_group(groups), [core >> level for level in range(1, core.bit_length())]
    mine = _pad(x, core)
    if extra:
        mine = mine + tower_permute(mine, extra)
    for distance in distances:
        upper = place & distance != 0
        low, high = mine.reshape(2, -1)
        sent = tower_permute(jnp.where(upper, low, high), _partners(groups, core, distance))
        mine = jnp.where(upper, high, low) + sent
    for distance in reversed(distances):
        upper = place & distance != 0
        other = tower_permute(mine, _partners(groups, core, distance))
        mine = jnp.where(upper, jnp.concatenate([other, mine]), jnp.concatenate([mine, other]))
    if extra:
        mine = jnp.where(place < core, mine, tower_permute(mine, [(helper, tower) for tower, helper in extra]))
    return mine[: x.size]


def tree(x: jax.Array, groups: Groups) -> jax.Array:
    """Pairs are added up, then pairs of pairs, up to the first tower of the group; the sum goes back the same way."""
    size, place = len(groups[0]), place_in_group(groups)
    distances = [1 << level for level in range((size - 1).bit_length())]
    pairs = {
        distance: [(group[i + distance], group[i]) for group in groups for i in range(0, size - distance, 2 * distance)]
        for distance in distances
    }
    for distance in distances:
        x = x + tower_permute(x, pairs[distance])  # zeros, where nothing comes
    for distance in reversed(distances):
        back = tower_permute(x, [(to, sender) for sender, to in pairs[distance]])
        x = jnp.where(place % (2 * distance) == distance, back, x)
    return x


def reduce_scatter_gather(x: jax.Array, groups: Groups) -> jax.Array:
    """Each tower gets the sum of its piece, then all towers get all pieces."""
    return hierarchical(x, groups, group_size=len(groups[0]))


def hierarchical(x: jax.Array, groups: Groups, group_size: int | None = None) -> jax.Array:
    """A reduce-scatter within small groups, an all-reduce of the pieces across them, an all-gather within them.

    Args:
      x: a vector.
      groups: of towers; each is cut into small ones.
      group_size: of the small ones. By default the towers of a process; with one process the largest divisor up to the
        square root of the towers; for a prime number of towers all of them.
    """
    towers = len(groups[0])
    size = group_size or _small_group_size(towers)
    if towers % size:
        raise ValueError(
            f"`hierarchical` got group_size={size}, which does not divide {towers} towers. Choose a divisor of "
            f"{towers}, or leave it out."
        )
    small = [group[begin : begin + size] for group in groups for begin in range(0, towers, size)]
    across = [group[place::size] for group in groups for place in range(size)]
    piece = tower_psum(tower_scatter_sum(_pad(x, size), small), across)
    return tower_gather(piece, small)[: x.size]


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.__name__: algorithm
    for algorithm in (psum, ring, recursive_halving_doubling, tree, hierarchical, reduce_scatter_gather)
}


_TENSORFLOWS = {
    "nccl": '"psum"',
    "hierarchical_copy": '"hierarchical"',
    "xring": '"ring"',
    "rechd": '"recursive_halving_doubling"',
    "shuffle": '"reduce_scatter_gather"',
    "pscpu": "`ReductionToOneDevice()`",
    "psgpu": "`ReductionToOneDevice()`",
}
"""What stands for TensorFlow's algorithms."""


def check_algorithm(caller: str, name: str) -> str:
    """The name, "a" or "a/b", if there are such algorithms; else raises a ValueError that names `caller`."""
    parts = name.split("/") if isinstance(name, str) else []
    if not 1 <= len(parts) <= 2 or not all(part in ALGORITHMS for part in parts):
        hints = [f"TensorFlow's {part!r} is {_TENSORFLOWS[part]} here. " for part in parts if part in _TENSORFLOWS]
        raise ValueError(
            f"`{caller}` has no algorithm {name!r}. {''.join(dict.fromkeys(hints))}Choose one of "
            f'{", ".join(ALGORITHMS)}; or two as "a/b", for `a` among the towers of each process and `b` across the '
            "processes."
        )
    return name


def all_reduce(x: jax.Array, name: str) -> jax.Array:
    """The sum of a vector over all towers.

    Args:
      x: of any length and dtype.
      name: of an algorithm; "a/b" is `a` among the towers of each process, then `b` across the processes.
    """
    if x.size == 0:
        return x
    within, _, across = name.partition("/")
    if not across:
        return ALGORITHMS[within](x, [list(range(num_towers()))])
    processes = towers_of_processes()
    peers = [list(towers) for towers in zip(*processes, strict=True)]
    # First within each process, whose towers have faster links; then each tower with its peers in other processes.
    return ALGORITHMS[across](ALGORITHMS[within](x, processes), peers)


def _pad(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, (0, -x.size % multiple))


def _partners(groups: Groups, core: int, distance: int) -> list[tuple[int, int]]:
    return [(group[i], group[i ^ distance]) for group in groups for i in range(core)]


def _small_group_size(towers: int) -> int:
    processes = towers_of_processes()
    if len(processes) > 1 and towers == num_towers():
        return len(processes[0])
    # Near the square root of the number, so that both rounds have about the same number of towers.
    divisor = max(size for size in range(1, math.isqrt(towers) + 1) if towers % size == 0)
    return divisor if divisor > 1 else towers
