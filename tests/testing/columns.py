"""Feature columns read in a model_fn, and sparse features that are made without a program, as tests are collected."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

import estimator as est


def read(fn, features, variables=()):
    """`fn(features)` in a model_fn, and its variables, of which those in `variables` have these values."""

    def model_fn(features, mode):
        return est.EstimatorSpec(mode, predictions=fn(features))

    model = est.transform(model_fn)
    given = {name: jnp.asarray(value) for name, value in dict(variables).items()}
    like = model.abstract_init(features, mode="infer").variables
    assert given.keys() <= like.keys(), list(like)
    # Initial values take time to compile; where all are given, there are none to be made.
    state = est.State({}, {}, np.int32(0), jax.random.key(0))
    state = model.init(state.key, features, mode="infer") if given.keys() < like.keys() else state
    state = state._replace(variables={**state.variables, **given})
    return jax.device_get(model.predict_step(state, features).predictions), state.variables


def to_sparse(matrix):
    """As `BCOO.fromdense`, which compiles a program for each number of entries."""
    where = np.nonzero(matrix)
    indices = np.stack(where, axis=-1).astype(np.int32)
    return BCOO((matrix[where], indices), shape=matrix.shape, indices_sorted=True, unique_indices=True)
