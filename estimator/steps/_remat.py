"""Gradient checkpointing of any function: it is cut into parts whose inside is computed again when it is needed."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from estimator.core._typing import PyTree
from estimator.steps._derivative import watch

if TYPE_CHECKING:  # importing it imports Pallas
    from jax.extend.core import Jaxpr, JaxprEqn, Var

_MOST_SEGMENTS = 64


def checkpoint_segments(fn: Callable[..., PyTree], segments: int | None = None) -> Callable[..., PyTree]:
    """`fn`, cut into consecutive parts; only their inputs are kept for the backward pass.

    Values inside a part are computed again when the backward pass comes to it, so that memory is needed only for the
    activations of one part and for the inputs of all: with n equal layers, for about 2 sqrt(n) layers instead of n, at
    the cost of one more forward pass. Caffe2 had `optimize_gradient_memory`. Pass it as
    `replicate_model_fn(..., tower_transform=est.checkpoint_segments)`, or wrap a network in it within a model_fn.
    `est.memory_report` shows what it saves.

    `jax.checkpoint` around a whole forward pass saves nothing: all of it is computed again at once, and kept again.
    Around each layer it does on accelerators what this function does; on CPU devices XLA removes its second
    computation, but not this one's.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def net(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> weights, x = [jnp.eye(16)] * 16, jnp.ones((512, 16))
    >>> @jax.jit
    ... def whole(weights, x):
    ...     return jax.grad(net)(weights, x)
    >>> @jax.jit
    ... def in_segments(weights, x):
    ...     return jax.grad(est.checkpoint_segments(net))(weights, x)
    >>> def bytes_of(program):
    ...     return program.lower(weights, x).compile().memory_analysis().temp_size_in_bytes
    >>> bytes_of(in_segments) < bytes_of(whole) / 2
    True

    Where to cut is chosen by the number of bytes that go from part to part. A function under one `jax.jit`, a
    `jax.lax.scan` or another loop stays in one piece: in a scan over layers, wrap its body in `jax.checkpoint`.

    Args:
      fn: a function of pytrees of arrays that returns one.
      segments: how many parts, at most; if None, as many as seem to need the least memory.

    Raises:
      TypeError: `fn` is not a function.
      ValueError: `segments` is not an integer of at least 1.
    """
    if not callable(fn):
        raise TypeError(f"`est.checkpoint_segments` takes a function of pytrees of arrays; got {fn!r}.")
    if segments is not None and (not isinstance(segments, int) or isinstance(segments, bool) or segments < 1):
        raise ValueError(
            f"`est.checkpoint_segments` needs segments, an integer of at least 1, or None; got {segments!r}."
        )

    def run_segments(*args: PyTree) -> PyTree:
        from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr = closed.jaxpr
        # Constants are values like others: each part takes the ones it needs as inputs, and has none of its own.
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values |= zip(jaxpr.invars, jax.tree.leaves(args), strict=True)
        for start, stop in itertools.pairwise(_cuts(jaxpr, segments)):
            part = _part(jaxpr, start, stop)
            outputs = _recompute(jaxpr_as_fun(ClosedJaxpr(part, [])))([values[v] for v in part.invars])
            values |= zip(part.outvars, outputs, strict=True)
        leaves = [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return run_segments


def _part(jaxpr: Jaxpr, start: int, stop: int) -> Jaxpr:
    """Some equations as a function of what they need of others, that returns what others need of them."""
    equations = jaxpr.eqns[start:stop]
    made = {v: None for e in equations for v in e.outvars}
    needed = {v: None for e in equations for v in _variables(e.invars) if v not in made}
    later = {v for e in jaxpr.eqns[stop:] for v in _variables(e.invars)} | set(_variables(jaxpr.outvars))
    return jaxpr.replace(constvars=[], invars=list(needed), outvars=[v for v in made if v in later], eqns=equations)


def _variables(atoms: Sequence[Any]) -> list[Var]:
    from jax.extend.core import Literal

    return [v for v in atoms if not isinstance(v, Literal)]


def _recompute(part: Callable[..., list[Any]]) -> Callable[[Sequence[Any]], list[Any]]:
    """`part`, of which the backward pass has only the inputs.

    Only inputs that are differentiated, and results of which a gradient comes, are gone through backwards, as without
    it: a zero times an infinite derivative would be NaN.
    """

    @jax.custom_vjp
    def call(inputs: list[Any]) -> list[Any]:
        return part(*inputs)

    def forward(inputs: list[Any]) -> tuple[list[Any], Any]:
        moving = {i: x.value for i, x in enumerate(inputs) if x.perturbed}
        fixed = {i: x.value for i, x in enumerate(inputs) if not x.perturbed}
        return part(*[x.value for x in inputs]), (moving, fixed)

    def backward(kept: Any, cotangents: list[Any]) -> tuple[list[Any]]:
        wanted = {i: ct for i, ct in enumerate(cotangents) if not isinstance(ct, SymbolicZero) and ct.size}
        moving, fixed = _once_more(kept, wanted) if wanted else kept

        came_to: set[int] = set()

        def again(moving: dict[int, Any]) -> dict[int, Any]:
            inputs = watch(moving, came_to) | fixed
            results = part(*[inputs[i] for i in range(len(inputs))])
            return {i: results[i] for i in wanted}

        (gradients,) = jax.vjp(again, moving)[1](wanted)
        return ([gradients[i] if i in came_to else None for i in range(len(moving) + len(fixed))],)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _once_more(kept: PyTree, cotangents: PyTree) -> PyTree:
    """An identity that XLA cannot see through: otherwise it would reuse the values of the forward pass.

    Nor can they be used before the cotangents are there. On CPU devices XLA drops barriers early; there they are
    chosen by a condition that holds for all cotangents.
    """

    def barrier(kept: PyTree, cotangents: PyTree) -> PyTree:
        return jax.lax.optimization_barrier((kept, cotangents))[0]

    def choice(kept: PyTree, cotangents: PyTree) -> PyTree:
        first = jax.tree.leaves(cotangents)[0].ravel()[0].real.astype(jnp.float32)
        holds = (jax.lax.bitcast_convert_type(first, jnp.int32) | 1) != 0
        return jax.tree.map(lambda x: jnp.where(holds, x, jnp.zeros_like(x)), kept)

    return jax.lax.platform_dependent(kept, cotangents, cpu=choice, default=barrier)


def _cuts(jaxpr: Jaxpr, segments: int | None) -> list[int]:
    """Between which equations to cut, from 0 to their number."""
    made = [sum(_bytes(v) for v in _made_within(e)) for e in jaxpr.eqns]
    live = _live_bytes(jaxpr)

    def memory(cuts: list[int]) -> int:
        inside = max((sum(made[start:stop]) for start, stop in itertools.pairwise(cuts)), default=0)
        return sum(live[i] for i in cuts[1:-1]) + inside

    most = max(1, min(segments or _MOST_SEGMENTS, len(made)))
    choices = [_even_cuts(made, live, n) for n in range(1, most + 1)]
    return min(choices, key=memory) if segments is None else choices[-1]


def _even_cuts(made: list[int], live: list[int], segments: int) -> list[int]:
    """Cuts near those that would make all parts make equally many bytes, where the least go through."""
    # Parts of equal bytes need the least memory; a cut may move by a third of a part, to where fewer bytes go through.
    until = [0, *itertools.accumulate(made)]
    reach = until[-1] / segments / 3
    cuts = {0, len(made)}
    for n in range(1, segments):
        wanted = until[-1] * n / segments
        first, last = bisect.bisect_left(until, wanted - reach), bisect.bisect_right(until, wanted + reach)
        near = range(max(first, 1), min(last, len(made)))
        if near:
            cuts.add(min(near, key=lambda i: (live[i], abs(until[i] - wanted))))
    return sorted(cuts)


def _live_bytes(jaxpr: Jaxpr) -> list[int]:
    """Before each equation, and after the last one: the bytes that earlier ones made and later ones need."""
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in _variables(e.invars)}
    changes = [0] * (len(jaxpr.eqns) + 1)
    for i, equation in enumerate(jaxpr.eqns):
        for v in equation.outvars:
            if v in last:
                changes[i + 1] += _bytes(v)
                changes[last[v] + 1] -= _bytes(v)
    return list(itertools.accumulate(changes))


def _made_within(equation: JaxprEqn) -> list[Var]:
    """The values that an equation makes, and those made inside of it, such as within a `jax.jit`."""
    from jax.extend.core import jaxprs_in_params

    inner = [v for jaxpr in jaxprs_in_params(equation.params) for e in jaxpr.eqns for v in _made_within(e)]
    return inner or list(equation.outvars)


def _bytes(variable: Var) -> int:
    """The size of a value. The number of rows counts as 1 where it is any number, in an export."""
    aval = variable.aval
    return math.prod(n for n in getattr(aval, "shape", ()) if isinstance(n, int)) * getattr(
        getattr(aval, "dtype", None), "itemsize", 0
    )
