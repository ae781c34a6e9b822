"""A train_op from a loss, with noise, clipping and summaries of gradients, as in `tf.contrib.layers`."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from estimator.core._rng import make_rng
from estimator.core._train_op import TrainOp
from estimator.core._typing import PyTree
from estimator.optim._optimizer import Optimizer
from estimator.sparse._indexed_slices import map_gradient
from estimator.summary._ops import histogram, scalar
from estimator.train._adam import AdamOptimizer
from estimator.train._adaptive import AdagradOptimizer, RMSPropOptimizer
from estimator.train._descent import GradientDescentOptimizer, MomentumOptimizer
from estimator.train._proximal import FtrlOptimizer
from estimator.variables._variable_scope import variable_scope

Gradients = list[tuple[PyTree, str]]

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adagrad": AdagradOptimizer,
    "Adam": AdamOptimizer,
    "Ftrl": FtrlOptimizer,
    "Momentum": lambda learning_rate: MomentumOptimizer(learning_rate, momentum=0.9),  # as in TensorFlow
    "RMSProp": RMSPropOptimizer,
    "SGD": GradientDescentOptimizer,
}
SUMMARIES = ("learning_rate", "loss", "gradients", "gradient_norm", "global_gradient_norm")


def optimize_loss(
    loss: jax.Array,
    global_step: jax.Array | None,
    learning_rate: ArrayLike | None,
    optimizer: str | Callable[..., Any] | Optimizer,
    gradient_noise_scale: float | None = None,
    gradient_multipliers: Mapping[str, float] | None = None,
    clip_gradients: float | Callable[[Gradients], Gradients] | None = None,
    learning_rate_decay_fn: Callable[[Any, jax.Array], jax.Array] | None = None,
    update_ops: None = None,
    variables: Sequence[str] | None = None,
    name: str | None = None,
    summaries: Sequence[str] | None = None,
    colocate_gradients_with_ops: bool = False,
    increment_global_step: bool = True,
) -> TrainOp:
    """The train_op that minimizes a loss, as `tf.contrib.layers.optimize_loss`.

    Gradients get noise, then are multiplied, then clipped. In towers all of this is done to each tower's gradients
    before they are summed, as in TensorFlow's towers, and their norms are averaged in summaries; a chain of optax in
    the optimizer clips the sum. In towers an optimizer by its name counts as wrapped; else give a function
    of the learning rate, such as `lambda rate: TowerOptimizer(est.train.LazyAdamOptimizer(rate))`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     loss = jnp.mean(features * est.get_variable("w", (), initializer=jax.nn.initializers.ones))
    ...     train_op = est.train.optimize_loss(loss, est.global_step(), 0.1, "SGD", clip_gradients=2.0)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> model, x = est.transform(model_fn), jnp.full(2, 4.0)
    >>> state, _ = model.train_step(model.init(jax.random.key(0), x), x)
    >>> print(state.variables["w"])
    0.8

    Args:
      loss: a scalar.
      global_step: `est.global_step()`, which `learning_rate_decay_fn` gets.
      learning_rate: a number, or a scalar of the model; if None, the optimizer has its own.
      optimizer: "Adagrad", "Adam", "Ftrl", "Momentum" (0.9), "RMSProp" or "SGD"; a class of `est.train` or another
        function of the learning rate that returns an optimizer; or an optimizer.
      gradient_noise_scale: the factor of noise that is added, normal and cut at 2.
      gradient_multipliers: by the name of a variable, the factor of its gradient.
      clip_gradients: the largest global norm; or a function of a list of (gradient, name) that returns one.
      learning_rate_decay_fn: `fn(learning_rate, global_step)`, such as a schedule of `est.train` with its other
        arguments bound.
      update_ops: must be None, since updates of a model_fn are part of each training step.
      variables: names of those to train; default: all trainable ones.
      name: the names of summaries begin with it; if None, "OptimizeLoss".
      summaries: of "loss", "learning_rate" (where it decays), "gradients", "gradient_norm" and "global_gradient_norm";
        default: "loss", "learning_rate" and "global_gradient_norm".
      colocate_gradients_with_ops, increment_global_step: without effect: XLA places what it compiles, and a training
        step increments the step once.

    Raises:
      ValueError: the learning rate, the name of the optimizer, a summary or a variable is not known.
      TypeError: the optimizer is of another kind.
    """
    summaries = ("loss", "learning_rate", "global_gradient_norm") if summaries is None else summaries
    unknown = [each for each in summaries if each not in SUMMARIES]
    if unknown:
        raise ValueError(f"`est.train.optimize_loss` needs summaries out of {SUMMARIES}; got {unknown}.")
    if update_ops is not None:
        raise ValueError(
            "`est.train.optimize_loss` needs no `update_ops`: what `est.assign` does is part of each training step. "
            f"Leave it out; got {update_ops!r}."
        )
    if isinstance(learning_rate, numbers.Real) and learning_rate < 0:
        raise ValueError(f"`est.train.optimize_loss` needs a learning rate of at least 0; got {learning_rate!r}.")
    with variable_scope(name, "OptimizeLoss"):
        rate: Any = learning_rate
        if rate is not None and learning_rate_decay_fn is not None:
            if global_step is None:
                raise ValueError("`est.train.optimize_loss` needs a global_step for learning_rate_decay_fn; got None.")
            rate = learning_rate_decay_fn(rate, global_step)
            if "learning_rate" in summaries:
                scalar("learning_rate", rate)
        chosen = _optimizer(optimizer, rate)
        gradients: Gradients = chosen.compute_gradients(loss, variables)
        # As in TensorFlow, clipping comes last, after noise and multipliers.
        if gradient_noise_scale is not None:
            gradients = [(_add_noise(gradient, gradient_noise_scale), name) for gradient, name in gradients]
        if gradient_multipliers is not None:
            gradients = _multiply_gradients(gradients, gradient_multipliers)
        # Before clipping: afterwards the norm would only show whether the bound was reached.
        if "global_gradient_norm" in summaries:
            scalar("global_norm/gradient_norm", _norm(gradients))
        if callable(clip_gradients):
            gradients = list(clip_gradients(gradients))
        elif clip_gradients is not None:
            # One factor for all gradients, which keeps their direction.
            factor = clip_gradients / jnp.maximum(_norm(gradients), clip_gradients)
            gradients = [(_scale(gradient, factor), name) for gradient, name in gradients]
        if "loss" in summaries:
            scalar("loss", loss)
        for gradient, variable in gradients:
            if gradient is None:
                continue
            if "gradients" in summaries:
                histogram(f"gradients/{variable}", jnp.concatenate([x.ravel() for x in _values(gradient)]))
            if "gradient_norm" in summaries:
                scalar(f"gradient_norm/{variable}", _norm([(gradient, variable)]))
        if clip_gradients is not None and {"global_gradient_norm", "gradient_norm"} & {*summaries}:
            scalar("global_norm/clipped_gradient_norm", _norm(gradients))
        train_op: TrainOp = chosen.apply_gradients(gradients)
    return train_op


def _optimizer(optimizer: Any, rate: Any) -> Any:
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS or rate is None:
            raise ValueError(
                f"`est.train.optimize_loss` needs a learning rate, and an optimizer out of {list(OPTIMIZERS)}, for an "
                f"optimizer by name; got {optimizer!r} and the learning rate {rate!r}."
            )
        named = OPTIMIZERS[optimizer](rate)
        named.sums_over_towers = True  # there is no object that could be wrapped in a `TowerOptimizer`
        return named
    # A class has `apply_gradients`, too, and must still be called.
    made = optimizer
    if callable(optimizer) and not hasattr(optimizer, "apply_gradients") or isinstance(optimizer, type):
        made = optimizer() if rate is None else optimizer(rate)
    if not hasattr(made, "apply_gradients"):
        raise TypeError(
            "`est.train.optimize_loss` needs an optimizer of `est.train`, its name, or a function of the learning rate "
            f"that returns one; got {optimizer!r}. For optax write `lambda rate: est.Optimizer(optax.sgd(rate))`."
        )
    return made


def _add_noise(gradient: PyTree, scale: float) -> PyTree:
    def add_noise(x: jax.Array) -> jax.Array:
        return x + scale * jax.random.truncated_normal(make_rng("gradient_noise"), -2, 2, x.shape, x.dtype)

    # As in TensorFlow, every row gets noise, so that the gradient is dense.
    return map_gradient(add_noise, gradient, of_sparse=lambda x: add_noise(x.to_dense()))


def _multiply_gradients(gradients: Gradients, multipliers: Mapping[str, float]) -> Gradients:
    unknown = multipliers.keys() - {name for _, name in gradients}
    if unknown:
        raise ValueError(
            f"`est.train.optimize_loss` got gradient_multipliers for {sorted(unknown)}; the variables are "
            f"{[name for _, name in gradients]}."
        )
    return [(_scale(gradient, multipliers.get(name, 1)), name) for gradient, name in gradients]


def _scale(gradient: PyTree, factor: Any) -> PyTree:
    def scale(x: jax.Array) -> jax.Array:
        # In the gradient's dtype: a float32 factor would make a bfloat16 gradient, and its all-reduce, float32.
        return x * jnp.asarray(factor, x.dtype)

    return map_gradient(scale, gradient)


def _values(gradient: PyTree) -> list[jax.Array]:
    """The arrays of a gradient, in which each row that was looked up is there once."""
    return jax.tree.leaves(map_gradient(lambda x: x, gradient, of_sparse=lambda x: x.deduplicate().values))


def _norm(gradients: Gradients) -> jax.Array:
    return optax.tree.norm([_values(gradient) for gradient, _ in gradients])
