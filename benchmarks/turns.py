"""How benchmarks measure two or more sides in one process: in turns, and without the one-time costs of a run."""

import collections
import itertools
import statistics
import time

import jax
import numpy as np


def per_step(run, steps, clock=time.perf_counter):
    """What one step takes of a clock, without the start and the end of a run: `2 n` steps less `n`.

    `run(n)` makes n steps and returns when the device has made them.
    """
    taken = []
    for n in (steps, 2 * steps):
        start = clock()
        run(n)
        taken.append(clock() - start)
    return (taken[1] - taken[0]) / steps


def in_turns(sides, measure, rounds):
    """The measures of all sides, for each round but the first, which compiles. The order of the sides changes.

    Args:
      sides: functions.
      measure: gives the measure of one of them.
      rounds: how many count; or an iterable of the numbers of rounds from 0.
    """
    rows = []
    for i in range(rounds + 1) if isinstance(rounds, int) else rounds:
        measured = {side: measure(side) for side in (sides if i % 2 else sides[::-1])}
        rows.append([measured[side] for side in sides])
    return rows[1:]


def rounds_within(seconds, least, most):
    """The numbers of rounds from 0, of which `least` to `most` count, as many as end in time."""
    end, longest = time.monotonic() + seconds, 0.0
    for i in range(most + 1):
        start = time.monotonic()
        if i > least and start + longest > end:
            return
        yield i
        if i:
            longest = max(longest, time.monotonic() - start)


def medians(rows):
    """The median of each side, and the median of the rounds' ratios of the last side to the first."""
    return *map(statistics.median, zip(*rows, strict=True)), statistics.median(row[-1] / row[0] for row in rows)


def run_by_hand(program, state, batches, steps_per_program=1):
    """The loop of an expert: numpy batches go to a compiled program, and at most two programs are in flight.

    Args:
      program: `(state, batch) -> (state, loss)`; of several steps, with stacked batches.
      state: where to begin; donated.
      batches: the input.
      steps_per_program: how many batches to stack.

    Returns:
      The last loss, or losses, once the device has finished.
    """
    in_flight = collections.deque()
    batches = iter(batches)
    while chunk := list(itertools.islice(batches, steps_per_program)):
        batch = chunk[0] if steps_per_program == 1 else jax.tree.map(lambda *x: np.stack(x), *chunk)
        state, loss = program(state, batch)
        in_flight.append(loss)
        if len(in_flight) > 2:
            in_flight.popleft().block_until_ready()
    return jax.block_until_ready((state, loss))[1]
