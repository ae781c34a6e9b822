"""TensorFlow's names of the global step."""

from __future__ import annotations

import jax

from estimator.core._rng import global_step


def get_global_step(graph: None = None) -> jax.Array:
    """`est.global_step()`, by TensorFlow's name.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features):
    ...     return est.EstimatorSpec("infer", predictions=features + est.train.get_global_step())
    >>> model, x = est.transform(model_fn), jnp.ones(2, int)
    >>> model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x).predictions.tolist()
    [1, 1]

    Args:
      graph: must be None, since there are no graphs.
    """
    return global_step()


get_or_create_global_step = get_global_step
