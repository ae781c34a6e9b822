"""Feature columns read in a model_fn."""

import jax
import jax.numpy as jnp

import estimator as est


def read(fn, features, variables=()):
    """`fn(features)` in a model_fn, and its variables, of which those in `variables` have these values."""

    def model_fn(features, mode):
        return est.EstimatorSpec(mode, predictions=fn(features))

    model = est.transform(model_fn)
    state = model.init(jax.random.key(0), features, mode="infer")
    given = {name: jnp.asarray(value) for name, value in dict(variables).items()}
    assert given.keys() <= state.variables.keys(), list(state.variables)
    state = state._replace(variables={**state.variables, **given})
    return jax.device_get(model.predict_step(state, features).predictions), state.variables
