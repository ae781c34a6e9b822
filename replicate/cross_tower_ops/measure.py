"""Times every algorithm on the devices of this machine: the table that `choose_the_best` looks in.

    python -m replicate.cross_tower_ops.measure --out FILE [--cpu-devices 8]
    python -m replicate.cross_tower_ops.measure --out FILE --confirm FILE

The first makes a table, the second repeats it and keeps of each ratio the larger one, so that only what was faster in
both runs counts as faster. `choose_the_best(table=FILE)` reads it.

What is timed is one compiled program with a loop in it: each turn sums what the one before left and multiplies it by a
half, as an optimizer would go over it. A call makes as many turns as 100 MB of all towers together allow, from 3 to
200, so that the cost of the call from Python is shared by them. All that is compared at one point is called in turn,
for some rounds; a ratio is of the shortest times, since other load of the machine only adds to them. What comes close
to `psum` is timed again with it, for three times the rounds.
"""

from __future__ import annotations

import argparse
import collections
import os
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicate.cross_tower_ops import AllReduce, CrossTowerOps
from replicate.cross_tower_ops._algorithms import ALGORITHMS
from replicate.cross_tower_ops._measurements import ARRAYS, Row, read_table, write_table
from replicate.towers._map import TOWER_AXIS, tower_map

BYTES = (*(digits * 10**exponent for exponent in range(1, 7) for digits in (10, 32)), 10**8)
TOWERS = (2, 4, 8)
ROUNDS = 7

Name = TypeVar("Name", bound=Hashable)


def make_run(ops: CrossTowerOps, arrays: Sequence[jax.Array], devices: Sequence[jax.Device]) -> Callable[[int], float]:
    """A function of a number of turns, which sums the arrays over towers so often; returns the seconds of a turn.

    Args:
      ops: takes the sum.
      arrays: vectors, of which each tower has a part; see `zeros`.
      devices: of the towers.
    """

    def tower(shared: Any, mine: Any) -> tuple[None, Any]:
        turns, factor = shared

        def turn(_: Any, vectors: Sequence[jax.Array]) -> list[jax.Array]:
            # XLA does not know the factor, and so cannot leave out a turn.
            return [total * factor for total in ops.sum_in_towers(vectors)]

        # The loop is in the program, since a call from Python takes longer than many of these sums.
        return None, jax.lax.fori_loop(0, turns, turn, [vector.ravel() for vector in mine])

    @jax.jit
    def program(shared: Any, vectors: Sequence[jax.Array]) -> Any:
        return tower_map(tower, devices)(shared, vectors)

    def run(turns: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program((jnp.int32(turns), jnp.float32(0.5)), arrays))
        return (time.perf_counter() - start) / turns

    return run


def zeros(sizes: Sequence[int], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Vectors of float32 zeros for `make_run`; the sizes are those in each tower."""
    by_tower = NamedSharding(Mesh(np.array(devices), (TOWER_AXIS,)), PartitionSpec(TOWER_AXIS))
    return [jnp.zeros(size * len(devices), jnp.float32, device=by_tower) for size in sizes]


def seconds(
    runs: Mapping[Name, Callable[[int], float]], total_bytes: int, rounds: int = ROUNDS
) -> dict[Name, list[float]]:
    """The seconds of a turn of each run, in each round.

    Args:
      runs: of `make_run`; they alternate, in an order that turns from round to round.
      total_bytes: that they sum, of all towers together.
      rounds: their number, besides a first one that compiles.
    """
    turns = min(max(3, 10**8 // total_bytes), 200)
    for run in runs.values():
        # Compiles it.
        run(1)
    times: dict[Name, list[float]] = {name: [] for name in runs}
    order = collections.deque(runs)
    for _ in range(rounds):
        for name in order:
            times[name].append(runs[name](turns))
        # Each is first in turn, so that a slow period of the machine affects all of them.
        order.rotate(1)
    return times


def ratios(times: Mapping[Name, Sequence[float]], base: Name) -> dict[Name, float]:
    """The shortest time of each, divided by `base`'s."""
    # The shortest times, since disturbances only make a measurement longer.
    return {name: round(min(of_name) / min(times[base]), 3) for name, of_name in times.items()}


def measure(size: int, devices: Sequence[jax.Device], rounds: int = ROUNDS) -> Row:
    """The row of a table.

    Args:
      size: the bytes that each tower has to be summed.
      devices: of the towers.
      rounds: their number.
    """
    total_bytes = size * len(devices)
    vector = zeros([max(1, size // 4)], devices)
    runs = {name: make_run(AllReduce(name), vector, devices) for name in ALGORITHMS}
    times = seconds(runs, total_bytes, rounds)
    relative = ratios(times, "psum")
    # Those near the best are timed for longer, since noise could decide between them.
    close = {name: runs[name] for name, ratio in relative.items() if ratio < 1.2}
    if len(close) > 1:
        times = seconds(close, total_bytes, 3 * rounds)
        relative |= ratios(times, "psum")
    row = Row(
        kind=devices[0].device_kind,
        towers=len(devices),
        bytes=size,
        psum_us=round(min(times["psum"]) * 1e6, 1),
        ratios=relative,
        alone=1.0,
    )
    several = zeros([max(1, size // 4 // ARRAYS)] * ARRAYS, devices)
    packings = {"packed": AllReduce(row.best), "alone": AllReduce(num_packs=0)}
    packed = {name: make_run(ops, several, devices) for name, ops in packings.items()}
    return row._replace(alone=ratios(seconds(packed, total_bytes, 2 * rounds), "packed")["alone"])


def confirm(row: Row, earlier: Sequence[Row]) -> Row:
    """The row with the larger ratios and the shorter time of both runs, where the earlier one has the same point."""
    for other in earlier:
        if (other.kind, other.towers, other.bytes) == (row.kind, row.towers, row.bytes):
            # The larger ratio: an algorithm must be faster than `psum` in both runs to be chosen.
            larger = {name: max(value, other.ratios.get(name, 0.0)) for name, value in row.ratios.items()}
            psum_us = min(row.psum_us, other.psum_us)
            row = row._replace(psum_us=psum_us, ratios=larger, alone=max(row.alone, other.alone))
    return row


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="measure"
    )
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--confirm", help="a table of an earlier run, of which the larger ratios are kept")
    parser.add_argument("--bytes", type=int, nargs="+", default=list(BYTES), help="of a tower (default: 100 to 1e8)")
    parser.add_argument("--towers", type=int, nargs="+", help="(default: 2, 4 and 8, as far as there are devices)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--cpu-devices", type=int, help="the number of CPU devices, by jax_num_cpu_devices")
    options = parser.parse_args(args)
    if options.cpu_devices:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    devices = jax.local_devices()
    counts = options.towers or [count for count in TOWERS if count <= len(devices)]
    if not counts or not 2 <= min(counts) <= max(counts) <= len(devices):
        parser.error(
            f"needs 2 towers or more, and a device for each; got --towers {options.towers} and {len(devices)} devices. "
            "On a machine without others take some of the CPU by --cpu-devices 8."
        )
    where = f"{len(devices)} devices on {os.cpu_count()} {platform.machine()} cores, jax {jax.__version__}"
    earlier, rows = read_table(options.confirm) if options.confirm else [], []
    for count in counts:
        for size in options.bytes:
            row = confirm(measure(size, devices[:count], options.rounds), earlier)
            rows.append(row)
            write_table(options.out, rows, where)  # at once: a run takes minutes
            others = ", ".join(f"{name} {value:.2f}" for name, value in row.ratios.items() if name != "psum")
            print(
                f"{row.kind}, {count} towers, {size:,} bytes: psum {row.psum_us:.0f} us; {others}; "
                f"{ARRAYS} arrays alone {row.alone:.2f}; best {row.best}",
                flush=True,
            )


if __name__ == "__main__":
    main()
