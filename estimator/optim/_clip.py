"""Gradients clipped by their global norm, which the step reports."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from estimator.core._argument_checks import widen
from estimator.core._typing import Slots
from estimator.optim._learning_rate import rate_names, spell_key


class ClipState(NamedTuple):
    """The optax state of `clip_by_global_norm`.

    Attributes:
      gradient_norm: the norm of the last gradients, before they were clipped; a scalar.
    """

    gradient_norm: jax.Array


def clip_by_global_norm(max_norm: float | None, *tensorflows: object) -> optax.GradientTransformation:
    """Scales all gradients of a step by one factor where their norm is larger than `max_norm`, and reports the norm.

    It goes before the optimizer in an `optax.chain`. The norm is of the gradients that the optimizer is given: of the
    whole batch, whatever the number of towers and micro-batches, and without a loss scale. It is in the log and in
    summaries beside the loss, as "gradient_norm" (of several optimizers "gradient_norm/<name>"), and in
    `spec.train_op.gradient_norms`. `optax.clip_by_global_norm` clips alike, and reports nothing.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (2,), initializer=jax.nn.initializers.zeros)
    ...     loss = jnp.mean(features @ w)
    ...     optimizer = optax.chain(est.clip_by_global_norm(1.0), optax.sgd(1.0))
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optimizer).minimize(loss))
    >>> model, x = est.transform(model_fn), jnp.array([[3.0, 4.0]])
    >>> state, spec = model.train_step(model.init(jax.random.key(0), x), x)
    >>> print(state.variables["w"], spec.train_op.gradient_norms["optimizer"])
    [-0.6 -0.8] 5.0

    Args:
      max_norm: a number larger than 0; if None, gradients stay as they are, and only the norm is reported.
      *tensorflows: none; TensorFlow's function of this name takes a list of gradients before the norm, and the error
        says what to write.

    Returns:
      A transformation. A norm that is inf or NaN makes all gradients NaN, as in `tf.clip_by_global_norm`.

    Raises:
      TypeError: it was called as TensorFlow's.
      ValueError: `max_norm` is not a number larger than 0.
    """
    if tensorflows:
        raise TypeError(
            "`est.clip_by_global_norm` takes the norm alone, and makes a transformation that clips: write "
            "`est.Optimizer(optax.chain(est.clip_by_global_norm(5.0), optax.adam(1e-3)))`, and leave out the list of "
            f"gradients, as TensorFlow's function takes it; got {1 + len(tensorflows)} arguments."
        )
    if max_norm is not None and (isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not max_norm > 0):
        raise ValueError(f"`est.clip_by_global_norm` needs a number larger than 0, or None; got {max_norm!r}.")

    def init(params: optax.Params) -> ClipState:
        return ClipState(jnp.zeros((), jnp.result_type(float)))

    def update(
        gradients: optax.Updates, state: ClipState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ClipState]:
        # Squares of 16-bit floats overflow where the gradients do not.
        norm = jnp.asarray(optax.tree.norm(jax.tree.map(widen, gradients)), state.gradient_norm.dtype)
        if max_norm is None:
            return gradients, ClipState(norm)
        # Otherwise an infinite norm would make zeros of the finite gradients, and hide that one is not.
        factor = jnp.where(jnp.isfinite(norm), max_norm / jnp.maximum(norm, max_norm), jnp.nan)
        clipped = jax.tree.map(lambda g: (widen(g) * factor.astype(_real_dtype(g))).astype(g.dtype), gradients)
        return clipped, ClipState(norm)

    return optax.GradientTransformation(init, update)


def read_norms(slots: Slots) -> dict[str, Any]:
    """The norms in slots, which may be traced, by the name of the optimizer: scalars, or `[towers]` where each tower
    has its own. Several in one optimizer are named by their paths, as learning rates are."""
    leaves = jax.tree_util.tree_leaves_with_path(slots, is_leaf=lambda node: isinstance(node, ClipState))
    states = [(list(map(spell_key, path)), state) for path, state in leaves if isinstance(state, ClipState)]
    names = rate_names((optimizer, rest) for (optimizer, *rest), _ in states)
    return {name: state.gradient_norm for name, (_, state) in zip(names, states, strict=True)}


def _real_dtype(x: jax.Array) -> Any:
    """The dtype of the parts of a number, in float32 or wider."""
    return jnp.promote_types(jnp.finfo(x.dtype).dtype, jnp.float32)
