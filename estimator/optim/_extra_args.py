"""The extra arguments of some optax updates: the loss, and the loss at other values of the variables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from estimator.optim._absent import is_masked, put_back

Probe = Callable[[optax.Params], tuple[jax.Array, optax.Updates]]


def extra_args(loss: jax.Array | None, params: optax.Params, probe: Probe | None) -> dict[str, Any]:
    """The arguments by optax's names; the ones about the loss only where there is one.

    Args:
      loss: scalar; None after `apply_gradients`, which does not know it.
      params: the values of the variables, in a dict by name.
      probe: the loss and the gradients at other values, in the same step; run only where an update calls it. None
        where the update is a program apart from the one that computes them.
    """
    probe = _no_probe if probe is None else probe

    # Its derivative is the probe's gradient: jax must not differentiate again what is differentiated already.
    @jax.custom_jvp
    def value_at(params: optax.Params) -> jax.Array:
        return probe(params)[0]

    @value_at.defjvp
    def value_and_tangent(primals: tuple[optax.Params], tangents: tuple[optax.Params]) -> tuple[jax.Array, jax.Array]:
        # The real part: for a complex variable, the change of a real loss is the real part of the product.
        value, gradients = probe(*primals)
        products = jax.tree.map(lambda g, t: jnp.sum(g.conj() * t).real.astype(value.dtype), gradients, *tangents)
        return value, sum(jax.tree.leaves(products), jnp.zeros_like(value))

    # Without the variables that `optax.masked` left out, or that have no gradient.
    def value_fn(given: optax.Params, grad_fn: object = None, obj_fn: object = None) -> jax.Array:
        del grad_fn, obj_fn  # line searches refuse an argument that their value_fn does not name
        return value_at(put_back(given, params))

    def grad_fn(given: optax.Params, *_: object) -> optax.Updates:
        gradients = probe(put_back(given, params))[1]
        return jax.tree.map(lambda x, g: x if is_masked(x) else g, given, gradients, is_leaf=is_masked)

    of_loss = {} if loss is None else {"value": loss, "value_fn": value_fn, "obj_fn": value_fn}
    return {"grad_fn": grad_fn, **of_loss}


def call_update(
    transformation: optax.GradientTransformation,
    gradients: optax.Updates,
    slots: optax.OptState,
    params: optax.Params,
    extra: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """Calls the `update` of an optax transformation with the extra arguments that it takes; `grad` is one."""
    keywords = {"grad": gradients, **extra}
    signature = inspect.signature(transformation.update).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in signature):
        keywords = {p.name: keywords[p.name] for p in signature if p.name in keywords}
    while True:
        try:
            return transformation.update(gradients, slots, params, **keywords)
        except TypeError as error:
            if "missing" in str(error) and "'value'" in str(error) and "value" not in extra:
                raise TypeError(
                    "The optimizer asks for the loss, which `apply_gradients` does not know: its update needs the "
                    "argument 'value'. Use `minimize(loss)`."
                ) from error
            # `optax.chain` takes any argument, and hands all to each part. One that a part refuses, as
            # `optax.contrib.sam` does, no part gets.
            refused = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if refused is None or keywords.pop(refused[1], None) is None:
                raise
        except (ValueError, jax.errors.UnexpectedTracerError) as error:
            # To jax a value of the towers is one of a trace that has ended, or of another mesh.
            if isinstance(error, ValueError) and "another mesh" not in str(error):
                raise
            raise ValueError(
                "The optimizer holds a value that the model_fn computed, such as a learning rate made from "
                "`est.global_step()`. Towers compute, but the update is done once, after them. Give it apart from the "
                "transformation, `TowerOptimizer(optax.sgd, learning_rate=rate)`, or give a function that computes it "
                "all, `TowerOptimizer(lambda: optax.sgd(rate(est.global_step())))`, or an optax schedule."
            ) from error


def _no_probe(params: optax.Params) -> tuple[jax.Array, optax.Updates]:
    raise ValueError(
        "The optimizer asks for the loss or its gradient at other values of the variables (`value_fn` or `grad_fn`, "
        "as line searches and `optax.contrib.sam` do), but with this variable_distribution the variables are updated "
        "apart from the towers. Use VariableDistribution.MIRRORED or VariableDistribution.SHARDED."
    )
