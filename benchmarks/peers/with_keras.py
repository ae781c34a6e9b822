"""Keras 3 on JAX: `model.fit`, with its progress bar.

python benchmarks/peers/with_keras.py mlp [--steps-per-execution 20]
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import common  # noqa: E402
import jax  # noqa: E402
import keras  # noqa: E402
from keras import layers, ops  # noqa: E402


class Positions(layers.Layer):
    def build(self, shape):
        self.embedding = self.add_weight(shape=shape[1:], name="embedding")

    def call(self, x):
        return x + self.embedding


def mlp():
    return keras.Sequential([keras.Input((32,)), layers.Dense(64, "relu", name="hidden"), layers.Dense(1, name="out")])


def cnn():
    model = keras.Sequential([keras.Input((28, 28, 1))])
    for name, filters in (("conv0", 16), ("conv1", 32)):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu", name=name))
        model.add(layers.MaxPooling2D(2))
    model.add(layers.Flatten())
    model.add(layers.Dense(10, name="out"))
    return model


def gelu(x):
    return keras.activations.gelu(x, approximate=True)


def transformer():
    def norm(name, x):
        return layers.LayerNormalization(epsilon=common.NORM_EPSILON, name=name)(x)

    tokens = keras.Input((common.LENGTH,), dtype="int32")
    x = layers.Embedding(common.VOCABULARY, common.WIDTH, name="tokens")(tokens)
    x = Positions(name="positions")(x)
    for i in range(common.BLOCKS):
        qkv = layers.Dense(3 * common.WIDTH, name=f"qkv{i}")(norm(f"before{i}", x))
        heads = (-1, common.LENGTH, common.HEADS, common.WIDTH // common.HEADS)
        q, k, v = (ops.reshape(each, heads) for each in ops.split(qkv, 3, axis=-1))
        mixed = ops.dot_product_attention(q, k, v, is_causal=True)
        x += layers.Dense(common.WIDTH, name=f"mix{i}")(ops.reshape(mixed, (-1, common.LENGTH, common.WIDTH)))
        up = layers.Dense(4 * common.WIDTH, gelu, name=f"up{i}")(norm(f"between{i}", x))
        x += layers.Dense(common.WIDTH, name=f"down{i}")(up)
    return keras.Model(tokens, layers.Dense(common.VOCABULARY, name="out")(norm("last", x)))


class Clock(keras.callbacks.Callback):
    async_safe = True  # or `fit` would wait for every step, as it does not without callbacks

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def on_train_batch_end(self, batch, logs=None):  # called with floats: the step is done
        self.watch.done(batch + 1)


def train(work, watch, steps_per_execution):
    model = {"mlp": mlp, "cnn": cnn, "transformer": transformer}[work.model]()
    values = {}
    for name, value in work.initial().items():
        values.setdefault(name.split("/")[0], []).append(value)
    for name, of_layer in values.items():
        model.get_layer(name).set_weights(of_layer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if work.model != "mlp" else "mse"
    adam = keras.optimizers.Adam(common.LEARNING_RATE, epsilon=common.ADAM_EPSILON)
    model.compile(adam, loss, steps_per_execution=steps_per_execution)
    model.fit(work.x, work.y, work.batch_size, shuffle=False, callbacks=[Clock(watch)])
    first = work.x[: work.batch_size], work.y[: work.batch_size]
    return float(model.evaluate(*first, batch_size=work.batch_size, verbose=0))


if __name__ == "__main__":
    common.main(train, {"Keras": keras.__version__, "jax": jax.__version__}, steps_per_execution=1)
