"""The models of `gpu.py`, each written once: an `Estimator` and a loop by hand train the same mathematics.

A network is a function `(get, x, training) -> (logits, moved)`: `get(name, shape, ...)` gives a variable, and `moved`
are the new values of those that are not trained. Variables, optimizers and losses are float32; with the dtype bfloat16
a network casts variables where it uses them, and computes in bfloat16 but for its norms and the loss.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from turns import run_by_hand

import estimator as est


class Model(NamedTuple):
    """A model with its input.

    Attributes:
      network: as above.
      optimizer: an optax transformation.
      batches: some, of numpy arrays `(x, labels)`.
      loop: how many steps an expert would put into one program by hand.
    """

    network: Callable[..., Any]
    optimizer: optax.GradientTransformation
    batches: list[tuple[np.ndarray, np.ndarray]]
    loop: int = 1


def mlp(dtype, widths, batch_size):
    def network(get, x, training):
        del training
        x = x.astype(dtype)
        for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False)):
            x = jax.nn.relu(x) if i else x
            x = x @ get(f"w{i}", (a, b), deviation=a**-0.5).astype(dtype) + get(f"b{i}", (b,)).astype(dtype)
        return x, {}

    return Model(network, optax.adam(1e-3), examples((batch_size, widths[0]), batch_size, widths[-1]), loop=20)


def resnet(dtype, stages, width, size, batch_size, classes):
    """Bottleneck blocks with batch normalization; ResNet-50 has the stages (3, 4, 6, 3) and the width 64."""

    def network(get, x, training):
        moved = {}

        def conv(x, name, kernel, filters, stride=1):
            shape = (kernel, kernel, x.shape[-1], filters)
            w = get(f"{name}/kernel", shape, deviation=(2 / (kernel * kernel * x.shape[-1])) ** 0.5).astype(dtype)
            return jax.lax.conv_general_dilated(
                x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        def norm(x, name):
            shape, wide = x.shape[-1:], x.astype(jnp.float32)
            gamma, beta = get(f"{name}/gamma", shape, mean=1.0), get(f"{name}/beta", shape)
            mean = get(f"{name}/moving_mean", shape, trainable=False)
            variance = get(f"{name}/moving_variance", shape, mean=1.0, trainable=False)
            if training:
                now = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
                moved[f"{name}/moving_mean"] = 0.9 * mean + 0.1 * now[0]
                moved[f"{name}/moving_variance"] = 0.9 * variance + 0.1 * now[1]
                mean, variance = now
            return ((wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * gamma) + beta).astype(dtype)

        def block(x, name, filters, stride):
            y = jax.nn.relu(norm(conv(x, f"{name}/a", 1, filters), f"{name}/a"))
            y = jax.nn.relu(norm(conv(y, f"{name}/b", 3, filters, stride), f"{name}/b"))
            y = norm(conv(y, f"{name}/c", 1, 4 * filters), f"{name}/c")
            if x.shape != y.shape:
                x = norm(conv(x, f"{name}/short", 1, 4 * filters, stride), f"{name}/short")
            return jax.nn.relu(x + y)

        x = jax.nn.relu(norm(conv(x.astype(dtype), "first", 7, width, 2), "first"))
        x = jax.lax.reduce_window(x, np.asarray(-np.inf, x.dtype), jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for i, blocks in enumerate(stages):
            for j in range(blocks):
                x = block(x, f"stage{i}/block{j}", width * 2**i, 2 if i and not j else 1)
        x = x.mean((1, 2))
        w = get("dense/kernel", (x.shape[-1], classes), deviation=0.01).astype(dtype)
        return x @ w + get("dense/bias", (classes,)).astype(dtype), moved

    shape = batch_size, size, size, 3
    return Model(network, optax.sgd(0.01, momentum=0.9), examples(shape, batch_size, classes))


def transformer(dtype, layers, width, heads, length, batch_size, words):
    """A decoder that predicts the next word; GPT-2's smallest has 12 layers of 768 with 12 heads."""

    def network(get, x, training):
        del training

        def norm(x, name):
            wide = x.astype(jnp.float32)
            wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
            return (wide * get(f"{name}/scale", (width,), mean=1.0) + get(f"{name}/bias", (width,))).astype(dtype)

        def dense(x, name, units):
            w = get(f"{name}/kernel", (x.shape[-1], units), deviation=0.02).astype(dtype)
            return x @ w + get(f"{name}/bias", (units,)).astype(dtype)

        def attention(x, name):
            q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in jnp.split(dense(x, f"{name}/qkv", 3 * width), 3, -1))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * (width // heads) ** -0.5
            scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
            y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(dtype), v)
            return dense(y.reshape(x.shape), f"{name}/out", width)

        table = get("words", (words, width), deviation=0.02).astype(dtype)
        x = table[x] + get("positions", (length, width), deviation=0.01).astype(dtype)
        for i in range(layers):
            x = x + attention(norm(x, f"layer{i}/norm1"), f"layer{i}/attention")
            y = jax.nn.gelu(dense(norm(x, f"layer{i}/norm2"), f"layer{i}/up", 4 * width))
            x = x + dense(y, f"layer{i}/down", width)
        return norm(x, "norm") @ table.T, {}

    random = np.random.default_rng(1)
    texts = [random.integers(0, words, (batch_size, length + 1)).astype(np.int32) for _ in range(4)]
    return Model(network, optax.adam(1e-4), [(text[:, :-1].copy(), text[:, 1:].copy()) for text in texts])


def examples(shape, batch_size, classes):
    random = np.random.default_rng(1)
    return [
        (random.normal(size=shape).astype(np.float32), random.integers(0, classes, batch_size).astype(np.int32))
        for _ in range(4)
    ]


def initial(name, shape, mean, deviation):
    """The initial value of a variable, which follows from its name on both sides, by operations that compile fast."""
    if not deviation:
        return jnp.full(shape, mean, jnp.float32)  # of a weak type, the first step would be another program
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)) * np.uint32(2654435761) + np.uint32(zlib.crc32(name.encode()))
    bits = (bits ^ (bits >> 15)) * np.uint32(2246822519)
    uniform = (bits ^ (bits >> 13)).astype(jnp.float32) * 2.0**-32
    return (mean + deviation * 12**0.5 * (uniform - 0.5)).reshape(shape)


def loss_of(logits, labels):
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def model_fn_of(model):
    def get(name, shape, mean=0.0, deviation=0.0, trainable=True):
        def initializer(key, shape, dtype):
            del key, dtype
            return initial(name, shape, mean, deviation)

        return est.get_variable(name, shape, initializer=initializer, trainable=trainable)

    def model_fn(features, labels, mode):
        logits, moved = model.network(get, features, mode == est.ModeKeys.TRAIN)
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=logits)
        for name, value in moved.items():
            est.assign(name, value)
        loss = loss_of(logits, labels)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(model.optimizer).minimize(loss))

    return model_fn


class ByHand:
    """The same model, trained and used without the library."""

    def __init__(self, model, steps_per_program=1):
        self.model, self.steps_per_program = model, steps_per_program
        step = self._one_step

        def scan(state, batches):
            return jax.lax.scan(step, state, batches)

        self.program = jax.jit(step if steps_per_program == 1 else scan, donate_argnums=0)
        self.forward = jax.jit(lambda variables, x: model.network(given(variables), x, False)[0])
        self.state = jax.jit(functools.partial(self._state, declared(model)))

    def _state(self, variables):
        """What is trained, what is not, and the slots of the optimizer."""
        values = {
            trainable: {name: initial(name, *how) for name, (*how, each) in variables.items() if each is trainable}
            for trainable in (True, False)
        }
        return values[True], values[False], self.model.optimizer.init(values[True])

    def _one_step(self, state, batch):
        trained, others, slots = state
        x, labels = batch

        def loss_fn(trained):
            logits, moved = self.model.network(given(trained | others), x, True)
            return loss_of(logits, labels), moved

        (loss, moved), gradients = jax.value_and_grad(loss_fn, has_aux=True)(trained)
        updates, slots = self.model.optimizer.update(gradients, slots, trained)
        return (optax.apply_updates(trained, updates), others | moved, slots), loss

    def train(self, batches):
        """The last loss."""
        return run_by_hand(self.program, self.state(), batches, self.steps_per_program)

    def predict(self, batches):
        """Yields the predictions of each batch; the device computes one batch ahead."""
        trained, others, _ = self.state()
        started = None
        for x, _ in batches:
            before, started = started, self.forward(trained | others, x)
            if before is not None:
                yield np.asarray(before)
        yield np.asarray(started)


def given(variables):
    return lambda name, *_, **__: variables[name]


def declared(model):
    """Shape, mean and deviation of each variable by name, and whether it is trained."""
    variables = {}

    def get(name, shape, mean=0.0, deviation=0.0, trainable=True):
        variables[name] = shape, mean, deviation, trainable
        return jnp.zeros(shape)

    jax.eval_shape(lambda x: model.network(get, x, True), model.batches[0][0])
    return variables
