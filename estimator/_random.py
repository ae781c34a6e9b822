"""Random keys and the step counter of a run."""

import jax

from estimator._frame import current_frame
from estimator._variables import name_hash


def make_rng(name: str | None = None) -> jax.Array:
    """A fresh PRNG key: another one at each call, step and tower, the same in every run with the same seed.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     noise = jax.random.normal(est.make_rng("noise"), features.shape)
    ...     return est.EstimatorSpec(mode, predictions=features + noise)
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.ones(3), mode="infer")
    >>> first, again = (model.predict_step(state, jnp.ones(3)).predictions for _ in range(2))
    >>> bool((first == again).all())
    True

    Args:
      name: keys of one name depend on the number of calls with that name alone, so that a call added elsewhere in
        the model_fn does not change them.
    """
    frame = current_frame("est.make_rng")
    label = "" if name is None else name
    frame.rng_calls[label] += 1
    return jax.random.fold_in(jax.random.fold_in(frame.key, name_hash(label)), frame.rng_calls[label])


def global_step() -> jax.Array:
    """The number of training steps finished before this run: an int32 scalar. A step advances it by one."""
    return current_frame("est.global_step").global_step
