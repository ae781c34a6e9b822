"""Time of a sum over towers by every algorithm and every packer, against plain `psum`.

    python benchmarks/all_reduce.py [--rounds 5] [--towers 2 4 8] [--bytes 100 1000 ...] [--trees ...] [--save]

A single vector of 10^2 to 10^8 bytes, and trees of many arrays, on 2, 4 and 8 towers (CPU devices, or GPUs where there
are enough). How it is timed: `replicate/cross_tower_ops/measure.py`. The figures are ratios to `AllReduce()`, a psum of
all arrays in one vector, of the shortest times of all rounds, printed as Markdown. The last two columns are
the ratios of `choose_the_best`: to `AllReduce()`, and to the fastest of the line except `bfloat16`, which is not exact.
The fastest of many is partly luck: if the default takes more than 1.05 of its time, only these two are timed again,
with three times the rounds.
"""

import argparse
import functools

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import results  # noqa: E402

from replicate.cross_tower_ops import AllReduce, ReductionToOneDevice, choose_the_best  # noqa: E402
from replicate.cross_tower_ops.measure import make_run, ratios, seconds, zeros  # noqa: E402

ALGORITHMS = {
    "psum": AllReduce(),
    "ring": AllReduce("ring"),
    "halving": AllReduce("recursive_halving_doubling"),
    "tree": AllReduce("tree"),
    "hierarchical": AllReduce("hierarchical"),
    "scatter, gather": AllReduce("reduce_scatter_gather"),
    "one device": ReductionToOneDevice(),
}
PACKERS = {
    "2 packs": AllReduce(num_packs=2),
    "4 packs": AllReduce(num_packs=4),
    "16 small": AllReduce(num_packs=0, agg_small_grads_max_bytes=1 << 16, agg_small_grads_max_group=16),
    "each alone": AllReduce(num_packs=0),
}
BFLOAT16 = {"bfloat16": AllReduce(compress_dtype=jnp.bfloat16)}
TREES = {  # numbers of float32 in the arrays
    "500 of 1 kB": [250] * 500,
    "200 of 4 kB": [1000] * 200,
    "20 of 100 B to 2 MB": [int(x) for x in np.random.default_rng(0).permutation(np.geomspace(25, 500_000, 20))],
    "4 of 4 MB": [10**6] * 4,
}
BASE, DEFAULT, LAST = "psum", "default", "default / fastest"
MOST_GATHERED = 2 * 10**9  # bytes that "one device" may gather on all towers together


def compared(candidates, sizes, devices, rounds):
    """The ratio of each candidate to `AllReduce()`, and of the default to the fastest."""
    arrays, total_bytes = zeros(sizes, devices), 4 * sum(sizes) * len(devices)
    timed = functools.partial(seconds, total_bytes=total_bytes)
    runs = {name: make_run(ops, arrays, devices) for name, ops in candidates.items()}
    if total_bytes * len(devices) > MOST_GATHERED:
        del runs["one device"]
    times = timed(runs, rounds=rounds)
    by_candidate = ratios(times, BASE)
    fastest = min((name for name in by_candidate if name not in BFLOAT16), key=by_candidate.__getitem__)
    to_fastest = ratios(times, fastest)[DEFAULT]
    if to_fastest > 1.05:
        times = timed({name: runs[name] for name in (DEFAULT, fastest)}, rounds=3 * rounds)
        to_fastest = ratios(times, fastest)[DEFAULT]
    return by_candidate, to_fastest


def print_line(cells):
    print(f"| {' | '.join(cells)} |", flush=True)


def print_table(name, cases, candidates, counts, rounds):
    """Returns the ratios by candidate, by number of towers and case."""
    columns = [column for column in (*candidates, DEFAULT, LAST) if column != BASE]
    print_line(["towers", name, *columns])
    print_line(["---"] * (len(columns) + 2))
    figures = {}
    for towers in counts:
        devices = jax.local_devices()[:towers]
        for case, sizes in cases.items():
            all_candidates = candidates | {DEFAULT: choose_the_best(devices)}
            by_candidate, to_fastest = compared(all_candidates, sizes, devices, rounds)
            row = figures[towers, case] = by_candidate | {LAST: to_fastest}
            print_line([str(towers), case, *(f"{row[column]:.2f}" if column in row else "" for column in columns)])
    print()
    return figures


def rows_of(name, figures):
    return [{"towers": towers, name: case} | by_candidate for (towers, case), by_candidate in figures.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--bytes", type=int, nargs="*", default=[10**exponent for exponent in range(2, 9)])
    parser.add_argument("--trees", nargs="*", choices=TREES, default=list(TREES))
    results.add_option(parser)
    arguments = parser.parse_args()
    tables = {}
    there = len(jax.local_devices())
    counts = [towers for towers in arguments.towers if towers <= there]
    print(f"{there} devices, {jax.local_devices()[0].device_kind}, jax {jax.__version__}\n")
    sizes = {f"{size:,}": size for size in arguments.bytes}
    if sizes:
        vectors = {case: [size // 4] for case, size in sizes.items()}
        packs = {name: PACKERS[name] for name in ("2 packs", "4 packs")}  # the others leave one vector as it is
        figures = print_table("bytes", vectors, ALGORITHMS | packs | BFLOAT16, counts, arguments.rounds)
        tables["Algorithms"] = rows_of("bytes", figures)
        panels = {}
        for (towers, case), by_candidate in figures.items():
            for name in (*ALGORITHMS, DEFAULT):
                if name in by_candidate and name != BASE:
                    line = panels.setdefault(f"{towers} towers", {}).setdefault(name, [])
                    line.append([sizes[case], by_candidate[name]])
        plot = results.lines("bytes", "time / time of psum", panels)
    trees = {name: TREES[name] for name in arguments.trees}
    if trees:
        few = {name: ALGORITHMS[name] for name in (BASE, "scatter, gather", "one device")}
        tables["Trees of arrays"] = rows_of(
            "arrays", print_table("arrays", trees, few | PACKERS | BFLOAT16, counts, arguments.rounds)
        )
    if arguments.save and sizes:
        note = "With more devices than cores, times of equal programs differ by up to a half. The last column of such "
        note += "a line is timed again."
        results.save("Sums over towers, as ratios to psum of one vector", tables, plot, note)


if __name__ == "__main__":
    main()
