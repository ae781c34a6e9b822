"""Estimates the FLOPs of a compiled step, to choose how many steps make one program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.interpreters.partial_eval import dce_jaxpr

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

# A program takes the host some 50 us to start. That should be little beside what the devices do in it: a CPU core makes
# some 1e11 operations per second, an accelerator a hundred times as many.
_FLOPS_PER_PROGRAM = {"cpu": 1e8}
_FLOPS_ON_ACCELERATORS = 1e10


def steps_that_fit(step: Any, platform: str, *args: Any) -> int:
    """The number of steps that go into one program, by their FLOPs on one device. At least one; only one
    where a loop within the step hides how many operations it has.

    Args:
      step: a function from `jax.jit`.
      platform: the kind of device that it runs on.
      *args: of the step; `jax.ShapeDtypeStruct`s will do.
    """
    traced = step.trace(*args)
    jaxpr, _ = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars))
    if _has_loop(jaxpr):  # what the model_fn shows is not computed here, and may have a loop of its own
        return 1
    cost = traced.lower().cost_analysis() or {}  # kinds with a count of 0 are left out
    flops = max(1.0, float(cost.get("flops", 0.0)))
    return max(1, int(_FLOPS_PER_PROGRAM.get(platform, _FLOPS_ON_ACCELERATORS) / flops))


def debugging() -> bool:
    """Says whether jax is to run operation by operation, or to find the one that makes a NaN: not within a loop."""
    return any(getattr(jax.config, name) for name in ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs"))


def _has_loop(jaxpr: Jaxpr) -> bool:
    from jax.extend.core import jaxprs_in_params  # imports Pallas

    return any(
        equation.primitive.name in ("scan", "while") or any(map(_has_loop, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )
