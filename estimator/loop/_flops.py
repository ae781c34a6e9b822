"""The FLOPs of a step: how many steps make one program, and what share of a device's peak they use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

# A program takes the host some 50 us to start. That should be little beside what the devices do in it: a CPU core makes
# some 1e11 operations per second, an accelerator a hundred times as many.
_FLOPS_PER_PROGRAM = {"cpu": 1e8}
_FLOPS_ON_ACCELERATORS = 1e10


# The peak of one device in FLOPs per second, of dense matrices in half precision, by the beginning of jax's
# `device_kind`; by NVIDIA's data sheets, without sparsity.
_PEAKS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "Tesla V100-SXM2": 125e12,
    "Tesla T4": 65e12,
}


def count_flops(traced: jax.stages.Traced) -> float:
    """The FLOPs of a program on one device, as XLA counts them before it is compiled; what is in a loop counts once."""
    cost = traced.lower().cost_analysis() or {}  # kinds with a count of 0 are left out
    return float(cost.get("flops", 0.0))


def peak_flops(device_kind: str) -> float | None:
    """The most FLOPs per second of a device; None if they are not known, as of CPUs and of a part of a GPU.

    >>> peak_flops("NVIDIA A100-SXM4-80GB"), peak_flops("cpu")
    (312000000000000.0, None)
    """
    # The longest first: "NVIDIA L4" begins "NVIDIA L40S".
    kinds = sorted(_PEAKS, key=len, reverse=True)
    return next((_PEAKS[kind] for kind in kinds if device_kind.startswith(kind) and "MIG" not in device_kind), None)


def steps_that_fit(
    traced: jax.stages.Traced, platform: str, count: Callable[[jax.stages.Traced], float] = count_flops
) -> int:
    """The number of steps that go into one program, by their FLOPs on one device. At least one; only one
    where a loop of unknown length within the step hides how many operations it has.

    Args:
      traced: the program of a step.
      platform: the kind of device that it runs on.
      count: counts its FLOPs, and what is in a loop once.
    """
    # What the model_fn shows is not computed here, and may have a loop of its own.
    jaxpr, _ = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars))
    repeats = _most_repeats(jaxpr, platform)
    if math.isinf(repeats):
        return 1
    flops = repeats * max(1.0, count(traced))  # at most
    return max(1, int(_FLOPS_PER_PROGRAM.get(platform, _FLOPS_ON_ACCELERATORS) / flops))


def _most_repeats(jaxpr: Jaxpr, platform: str) -> float:
    """The most times that an operation of a program runs, by the lengths of the loops around it; inf if not known."""
    from jax.extend.core import jaxprs_in_params  # imports Pallas

    most = 1.0
    for equation in jaxpr.eqns:
        parts = jaxprs_in_params(_params_on(platform, equation.params))
        inner = max((_most_repeats(part, platform) for part in parts), default=1.0)
        match equation.primitive.name:
            case "while":
                return math.inf
            case "scan":
                inner *= max(1, equation.params["length"])
        most = max(most, inner)
    return most


def _params_on(platform: str, params: dict[str, Any]) -> dict[str, Any]:
    """The params of an equation; of `jax.lax.platform_dependent` with only the branch of this platform."""
    if not params.get("branches_platforms"):
        return params
    names = {"cuda", "rocm"} if platform == "gpu" else {platform}
    branches = zip(params["branches"], params["branches_platforms"], strict=True)
    # The default has no platforms and is the last.
    return {"branches": tuple(branch for branch, of in branches if of is None or names & {*of})[:1]}
