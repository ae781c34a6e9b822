"""Model_fns around a few lines, and what a run of them leaves."""

import jax
import jax.numpy as jnp

import estimator as est

X = jnp.ones((2, 3))


def run(body, mode="train", steps=1):
    """The state after an init and `steps` steps of a model_fn that runs `body`."""
    model = est.transform(as_model_fn(body))
    state = model.init(jax.random.key(0), X, mode=mode)
    for _ in range(steps if mode == "train" else 0):
        state, _ = model.train_step(state, X)
    return state


def as_model_fn(body):
    def model_fn(features, mode):
        result = body()
        train_op = result if isinstance(result, est.TrainOp) else est.TrainOp()
        return est.EstimatorSpec(mode, predictions=features, loss=jnp.float32(0), train_op=train_op)

    return model_fn
