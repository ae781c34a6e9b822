"""This project's Estimator with its defaults: log lines, summaries, checkpoints, NaN checks.

python benchmarks/peers/with_estimator.py mlp
"""

import common
import jax
import jax.numpy as jnp
import optax

import estimator as est


def model_fn_of(work):
    predict = {"mlp": mlp, "cnn": cnn, "transformer": transformer}[work.model]

    def model_fn(features, labels, mode):
        predictions = predict(features, work.initial())
        if work.model == "mlp":
            loss = est.losses.mean_squared_error(labels, predictions)
        else:
            loss = est.losses.sparse_softmax_cross_entropy(labels, predictions)
        train_op = est.Optimizer(optax.adam(common.LEARNING_RATE)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


# The models with `est.layers`, from the initial values of all sides.


def mlp(x, initial):
    return dense(dense(x, "hidden", initial, jax.nn.relu), "out", initial)


def cnn(x, initial):
    for name in ("conv0", "conv1"):
        kernel = initial[f"{name}/kernel"]
        x = est.layers.conv2d(
            x, kernel.shape[-1], 3, padding="same", activation="relu", kernel_initializer=constant(kernel), name=name
        )
        x = est.layers.max_pooling2d(x, 2, 2)
    return dense(est.layers.flatten(x), "out", initial)


def transformer(tokens, initial):
    x = est.get_variable("tokens/embedding", initializer=initial["tokens/embedding"])[tokens]
    x = x + est.get_variable("positions/embedding", initializer=initial["positions/embedding"])
    for i in range(common.BLOCKS):
        qkv = dense(norm(x, f"before{i}"), f"qkv{i}", initial).reshape(*x.shape[:2], 3, common.HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + dense(mixed.reshape(x.shape), f"mix{i}", initial)
        x = x + dense(dense(norm(x, f"between{i}"), f"up{i}", initial, jax.nn.gelu), f"down{i}", initial)
    return dense(norm(x, "last"), "out", initial)


def dense(x, name, initial, activation=None):
    kernel = initial[f"{name}/kernel"]
    return est.layers.dense(x, kernel.shape[-1], activation, kernel_initializer=constant(kernel), name=name)


def norm(x, name):
    return est.layers.layer_norm(x, begin_norm_axis=-1, scope=name)


def constant(value):
    return lambda key, shape, dtype: jnp.asarray(value, dtype)


class Clock(est.Hook):
    before_run_may_be_early = True

    def __init__(self, work, watch):
        self.marks, self.watch = work.marks, watch

    def next_step(self, step):
        return next((mark for mark in self.marks if mark > step), None)

    def after_run(self, context, values):
        float(values.loss)  # waits for the step
        self.watch.done(context.global_step)


def train(work, watch):
    estimator = est.Estimator(model_fn_of(work), common.temporary())
    input_fn = est.inputs.numpy_input_fn(work.x, work.y, work.batch_size, shuffle=False)
    estimator.train(input_fn, hooks=[Clock(work, watch)])
    first = work.x[: work.batch_size], work.y[: work.batch_size]
    return float(estimator.evaluate(lambda: [first])["loss"])


if __name__ == "__main__":
    common.main(train, {"jax": jax.__version__, "optax": optax.__version__})
