"""Milliseconds of each layer, forward and backward on a CPU: `est.layers`, the same by hand in jax, and PyTorch.

    python benchmarks/layers.py [--rounds 7] [--only max_pooling conv2d] [--save]

Each side gives the gradients of all inputs and variables, of one output gradient. Those of jax are compared, and then
alternate in one process; figures are medians over rounds, ratios the medians of the rounds' ratios. PyTorch is measured
after them where it is installed, in a process of its own: beside the threads of XLA it takes up to ten times longer.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import results
from layer_cases import cases
from turns import in_turns

import estimator as est

SECONDS = 0.1  # that a side runs for in a round


def gradients(function, variables, inputs):
    """A function that makes the gradients of the variables and of all inputs."""
    output = function(variables, inputs)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=output.shape), output.dtype)
    program = jax.jit(lambda variables, inputs, cotangent: jax.vjp(function, variables, inputs)[1](cotangent))
    return lambda: jax.block_until_ready(program(variables, inputs, cotangent))


def sides_of(case):
    """The sides in jax by name, whose gradients are equal."""

    def model_fn(features, labels, mode):
        return est.EstimatorSpec(mode, predictions=case.layers(*features))

    model = est.transform(model_fn)
    state = jax.block_until_ready(model.init(jax.random.key(0), case.inputs, mode="infer"))

    def by_layers(variables, inputs):
        return model.predict_step(state._replace(variables=variables), inputs).predictions

    functions = {"est.layers": by_layers, "by hand": lambda variables, inputs: case.by_hand(variables, *inputs)}
    inputs = jax.tree.map(jnp.asarray, case.inputs)
    sides = {name: gradients(function, state.variables, inputs) for name, function in functions.items()}
    for a, b in zip(*(jax.tree.leaves(side()) for side in sides.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(b).max(initial=1))
    return sides


def in_torch(case):
    import torch

    function, leaves = case.torch(torch)
    for each in leaves:
        each.requires_grad_(True)
    cotangent = torch.randn(function().shape)
    return lambda: torch.autograd.grad(function(), leaves, cotangent)


def milliseconds(side):
    side()
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + SECONDS:
        side()
        count += 1
    return (time.perf_counter() - start) / count * 1e3


def row_of(case, rounds):
    sides = sides_of(case)
    rows = in_turns(list(sides.values()), milliseconds, rounds)
    columns = zip(sides, zip(*rows, strict=True), strict=True)
    row = {"layer": case.name, "inputs": case.shapes} | {f"{name}, ms": statistics.median(x) for name, x in columns}
    return row | {"of by hand": statistics.median(ours / by_hand for ours, by_hand in rows)}


def all_in_torch(rounds, only):
    """Milliseconds of PyTorch by layer and inputs, measured in another process; none where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return {}
    command = [sys.executable, __file__, "--torch", "--rounds", str(rounds), "--only", *only]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the names of layers")
    parser.add_argument("--torch", action="store_true", help="measure PyTorch alone, and print JSON")
    results.add_option(parser)
    arguments = parser.parse_args()
    chosen = [case for case in cases() if case.name.startswith(tuple(arguments.only or [""]))]
    if arguments.torch:
        sides = {f"{case.name} {case.shapes}": in_torch(case) for case in chosen}
        measured = {name: [milliseconds(side) for _ in range(arguments.rounds + 1)] for name, side in sides.items()}
        print(json.dumps({name: statistics.median(times[1:]) for name, times in measured.items()}))
        return
    rows = [row_of(case, arguments.rounds) for case in chosen]
    in_pytorch = all_in_torch(arguments.rounds, arguments.only)
    for row in rows:
        name = f"{row['layer']} {row['inputs']}"
        if name in in_pytorch:
            row |= {"PyTorch, ms": in_pytorch[name], "of PyTorch": row["est.layers, ms"] / in_pytorch[name]}
        print("  ".join(results.shown(x) for x in row.values()), flush=True)
    if arguments.save:
        values = {f"{row['layer']} {row['inputs']}": row["of by hand"] for row in rows}
        plot = results.ratios("time of est.layers, of the time of the same by hand in jax", values)
        results.save("Layers on a CPU, forward and backward", {"": rows}, plot)


if __name__ == "__main__":
    main()
