"""The programs of a first State: one, and a program for each kind of initial values that are drawn alike.

XLA takes 0.1 s for each random array of a program, with the key of it, and more the more there are (100 take 7 s, 300
take 35); a program of one takes 0.25 s, and serves all arrays of one kind.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from estimator.runtime._program import Program
from estimator.variables._initial_value import DRAW

_FEWEST_ALIKE = 3  # for a program of their own


def split_init(traced: jax.stages.Traced) -> Callable[..., Any] | None:
    """The programs of what was traced as one, `(key, ...) -> State`; None if one is as good.

    Numbers among the results are arguments of the one, so that others give the same program: such as the learning rate
    in a new State (0.33 s of CPU for an Estimator of a sweep, not 0.37).
    """
    from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun  # imports Pallas

    numbers: dict[int, Any] = {}
    for i, x in enumerate(traced.jaxpr.jaxpr.outvars):
        kind: Any = x.aval
        if isinstance(x, Literal) and jnp.issubdtype(kind.dtype, jnp.floating):
            # A number of Python is of a weak type.
            numbers[i] = float(x.val) if kind.weak_type else np.asarray(x.val, kind.dtype)
    places = range(len(traced.jaxpr.jaxpr.outvars))
    needed, _ = dce_jaxpr(traced.jaxpr.jaxpr, [i not in numbers for i in places], instantiate=True)
    draws = _draws(needed)
    if not numbers and not draws:
        return None
    results = dict(zip([i for i in places if i not in numbers], needed.outvars, strict=True))
    # A second result that is the same array, as a slot can be, is a copy: each may be given away.
    first = {var: i for i, var in reversed(results.items()) if not isinstance(var, Literal) and var in draws}
    made = {i: var for var, i in first.items()}
    rest = needed.replace(
        invars=[*needed.invars, *draws],
        outvars=[var for i, var in results.items() if i not in made],
        eqns=[equation for equation in needed.eqns if not any(var in draws for var in equation.outvars)],
        debug_info=needed.debug_info.with_unknown_names(),
    )
    rest, used = dce_jaxpr(rest, [True] * len(rest.outvars))
    run, structure = jaxpr_as_fun(ClosedJaxpr(rest, traced.jaxpr.consts)), traced.out_tree

    def together(arrays: list[Any], numbers: dict[int, Any]) -> dict[int, Any]:
        computed = iter(run(*arrays))
        return {i: numbers[i] if i in numbers else next(computed) for i in places if i not in made}

    shared = Program(together, once=True)

    def call(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        drawn = {var: draw(leaves) for var, draw in draws.items()}
        given = [leaf for leaf, is_used in zip([*leaves, *drawn.values()], used, strict=True) if is_used]
        results = shared(given, numbers) | {i: drawn[var] for i, var in made.items()}
        return jax.tree.unflatten(structure, [results[i] for i in places])

    return call


def _draws(jaxpr: Any) -> dict[Any, Callable[[list[Any]], Any]]:
    """By its variable of the jaxpr, what draws each array of which there are several alike, given all arguments."""
    from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

    alike = defaultdict(list)
    for equation in jaxpr.eqns:
        # Of the key and the number of a variable (`variables/_initial_value.py`).
        if equation.params.get("name") == DRAW and [isinstance(x, Literal) for x in equation.invars] == [False, True]:
            key, number = equation.invars
            kind = equation.params["jaxpr"].jaxpr
            if key in jaxpr.invars and _is_its_text(kind):
                alike[key, str(kind)].append((equation.outvars[0], kind, number.val))
    draws: dict[Any, Callable[[list[Any]], Any]] = {}
    for (key, _), equations in alike.items():
        if len(equations) < _FEWEST_ALIKE:
            continue
        program, place = Program(jaxpr_as_fun(ClosedJaxpr(equations[0][1], [])), once=True), jaxpr.invars.index(key)
        for var, _, number in equations:
            draws[var] = functools.partial(_draw, program, place, number)
    return draws


def _draw(program: Program, place: int, number: Any, leaves: list[Any]) -> Any:
    return program(leaves[place], number)[0]


def _is_its_text(jaxpr: Any) -> bool:
    """Returns whether nothing of a jaxpr is missing in its text, as constant arrays and functions of Python are."""
    from jax.extend.core import jaxprs_in_params

    return not jaxpr.constvars and all(
        "callback" not in equation.primitive.name
        and not any(np.ndim(getattr(x, "val", 0)) for x in equation.invars)
        and all(map(_is_its_text, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )
