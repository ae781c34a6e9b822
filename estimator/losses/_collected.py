"""The losses collected in one run: those that were computed, and the regularizers of its variables."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._argument_checks import widen
from estimator.core._frame import Frame, check_is_known_outside, current_frame, innermost_frame, transformations_within
from estimator.variables._variables import Regularizers, read


class _Losses(list[tuple[str, jax.Array, str | None]]):
    """The losses of one run, each between the scope that it was computed in and its reduction, if it is known."""


def collect_loss(loss: jax.Array, reduction: str) -> jax.Array:
    """Adds a loss to the current run's, if the model_fn itself knows it, and returns it."""
    frame = innermost_frame()
    # In a function that jax traces by itself, such as the body of a `scan`, the loss is a tracer that must not leave
    # it.
    if frame is not None and transformations_within(frame) is None:
        frame.notes.get(_Losses).append(("/".join(frame.scope), loss, reduction))
    return loss


def reductions(frame: Frame) -> list[tuple[jax.Array, str]]:
    """The losses that `est.losses` has computed in a run, with their reductions."""
    return [(loss, reduction) for _, loss, reduction in frame.notes.get(_Losses) if reduction is not None]


def add_loss(loss: ArrayLike) -> None:
    """Adds a term to what `get_losses` and `get_total_loss` of this run return; `est.losses` does so by itself.

    Args:
      loss: a number. Over towers it is treated as the rest of the loss: a mean over the examples, or their sum.

    Raises:
      TypeError: the loss is not an array.
      ValueError: it is not a scalar, or not known outside of a function that jax traces apart.
      RuntimeError: no model_fn is running.
    """
    frame = current_frame("est.losses.add_loss")
    check_is_known_outside(
        "`est.losses.add_loss`", frame, "outside of which the loss is not known. Return it, and add it outside"
    )
    try:
        value = widen(jnp.asarray(loss))
    except (TypeError, ValueError) as error:
        raise TypeError(f"`est.losses.add_loss` needs a loss, a scalar; got {loss!r}.") from error
    if value.ndim:
        raise ValueError(
            f"`est.losses.add_loss` needs a scalar; got an array of shape {value.shape}. Reduce it, by "
            "`est.losses.compute_weighted_loss`, which adds it too."
        )
    frame.notes.get(_Losses).append(("/".join(frame.scope), value, None))


def get_losses(scope: str | None = None) -> list[jax.Array]:
    """The losses that this run has computed by `est.losses` or added by `add_loss`, in order, without regularizers.

    A loss with `Reduction.NONE`, and one that was computed in a function that jax traces apart, is not among them.

    Args:
      scope: a regular expression that the beginning of the variable scope around the loss matches. All if None.
    """
    losses = current_frame("est.losses.get_losses").notes.get(_Losses)
    return [loss for where, loss, _ in losses if _matches("get_losses", scope, where)]


def get_regularization_losses(scope: str | None = None) -> list[jax.Array]:
    """The losses of the regularizers of this run's variables, in the order in which the variables were got.

    Over towers it adds up right: with losses that are summed, rather than averaged, each tower has its share of it.

    Args:
      scope: a regular expression that the beginning of the variable's full name matches. All variables if None.
    """
    frame = current_frame("est.losses.get_regularization_losses")
    losses = []
    for name, regularizer in frame.notes.get(Regularizers).items():
        if _matches("get_regularization_losses", scope, name):
            loss: Any = regularizer(read(frame, name))
            if loss is None:  # as some of TensorFlow's return without anything to do
                continue
            if jnp.ndim(loss):
                raise ValueError(
                    f"The regularizer of {name!r} must return a scalar; got an array of shape {jnp.shape(loss)}. "
                    "Sum it up."
                )
            # Where losses are summed over towers, each tower adds its share: otherwise a regularizer would count once
            # per tower.
            loss = widen(jnp.asarray(loss))
            losses.append(loss if frame.replica.share == 1 else loss * frame.replica.share)
    return losses


def get_regularization_loss(scope: str | None = None) -> jax.Array:
    """The sum of `get_regularization_losses`, or 0."""
    return _sum(get_regularization_losses(scope))


def get_total_loss(
    add_regularization_losses: bool = True, name: str | None = None, scope: str | None = None
) -> jax.Array:
    """The sum of the losses of this run, and of its regularizers.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     ones = jax.nn.initializers.ones
    ...     y = est.layers.dense(features, 1, kernel_initializer=ones, kernel_regularizer=est.regularizers.l2(0.5))
    ...     est.losses.mean_squared_error(labels, y)
    ...     est.losses.add_loss(0.25)
    ...     loss = est.losses.get_total_loss()  # 4 + 0.25 + 0.5 * (1 + 1) / 2
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))
    >>> model, x, y = est.transform(model_fn), jnp.ones((3, 2)), jnp.zeros((3, 1))
    >>> print(model.eval_step(model.init(jax.random.key(0), x, y), x, y).loss)
    4.75

    Args:
      add_regularization_losses: whether those are a part of it.
      name: has no effect, since there is no graph to name it in.
      scope: as in `get_losses` and `get_regularization_losses`.
    """
    return _sum(get_losses(scope) + (get_regularization_losses(scope) if add_regularization_losses else []))


def _sum(losses: list[jax.Array]) -> jax.Array:
    return sum(losses[1:], losses[0]) if losses else jnp.zeros(())


def _matches(caller: str, scope: str | None, name: str) -> bool:
    if scope is not None and not isinstance(scope, str):
        raise TypeError(f"`est.losses.{caller}` needs the beginning of names, a string; got {scope!r}.")
    return scope is None or re.match(scope, name) is not None
