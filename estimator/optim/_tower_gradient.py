"""Gradients that a model_fn takes by itself."""

from __future__ import annotations

from estimator.core._frame import current_frame
from estimator.core._typing import PyTree
from estimator.optim._gradient_calls import GradientCalls
from estimator.sparse._indexed_slices import map_gradient


def tower_gradient(gradient: PyTree) -> PyTree:
    """A gradient that the model_fn took by itself, scaled as its loss is, for `apply_gradients`.

    Towers add up their gradients. So that the sum is the gradient of the whole batch, `minimize` and
    `compute_gradients` differentiate the loss divided by the number of towers (times `accumulate_steps`), unless the
    reduction is SUM. This divides by the same number what `jax.grad` returned, or an estimate of any other kind. In
    one tower, and without towers, it returns the gradient itself.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> from replicate import TowerOptimizer, replicate_model_fn
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((w * features) ** 2))(w)
    ...     pairs = [(est.tower_gradient(gradient), "w")]
    ...     train_op = TowerOptimizer(optax.sgd(0.1)).apply_gradients(pairs)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> model = est.transform(replicate_model_fn(model_fn, devices=["cpu:0", "cpu:1"]))
    >>> x = jnp.array([1.0, 2.0])
    >>> print(model.train_step(model.init(jax.random.key(0), x), x)[0].variables["w"])
    0.5

    Args:
      gradient: of the loss of the rows that the model_fn was given; a pytree of arrays, sparse ones among them.
    """
    frame = current_frame("est.tower_gradient")
    frame.notes.get(GradientCalls).says_scaled = True
    scale = frame.replica.loss_scale
    if scale == 1:
        return gradient
    return map_gradient(lambda x: x * scale, gradient)
