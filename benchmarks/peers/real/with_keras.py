"""The models of real shapes in Keras 3 on JAX: `model.fit`, with its progress bar.

python benchmarks/peers/real/with_keras.py resnet --data FOLDER
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import itertools  # noqa: E402

import data  # noqa: E402
import jax  # noqa: E402
import jax_models  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers, ops  # noqa: E402

import common  # isort: skip # noqa: E402


def resnet():
    def conv(x, name, filters, size=3, strides=1):
        x = layers.Conv2D(filters, size, strides, "same", use_bias=False, name=name)(x)
        return layers.BatchNormalization(momentum=data.MOMENTUM, epsilon=data.EPSILON, name=f"{name}_norm")(x)

    images = keras.Input((32, 32, 3))
    x = layers.MaxPooling2D(3, 2, "same")(layers.ReLU()(conv(images, "stem", data.FILTERS[0], 7, 2)))
    for name, _, filters, strides in data.blocks():
        y = layers.ReLU()(conv(x, f"{name}_a", filters, strides=strides))
        y = conv(y, f"{name}_b", filters)
        x = layers.ReLU()(y + (conv(x, f"{name}_short", filters, 1, strides) if strides > 1 else x))
    return keras.Model(images, layers.Dense(data.CLASSES, name="out")(layers.GlobalAveragePooling2D()(x)))


class Positions(layers.Layer):
    def build(self, shape):
        self.embedding = self.add_weight(shape=shape[1:], name="embedding")

    def call(self, x):
        return x + self.embedding


class Attention(layers.Layer):
    def call(self, qkv, lengths):
        q, k, v = ops.unstack(ops.reshape(qkv, (-1, data.LENGTH, 3, data.HEADS, data.WIDTH // data.HEADS)), axis=2)
        mask = (ops.arange(data.LENGTH) < lengths[:, None])[:, None, None]
        mixed = ops.dot_product_attention(q, k, v, mask=mask)
        return ops.reshape(mixed, (-1, data.LENGTH, data.WIDTH))


def gelu(x):
    return keras.activations.gelu(x, approximate=True)


def bert():
    def norm(name, x):
        return layers.LayerNormalization(epsilon=data.TINY, name=name)(x)

    words, lengths = keras.Input((data.LENGTH,), dtype="int32"), keras.Input((), dtype="int32")
    x = norm("norm", Positions(name="positions")(layers.Embedding(data.WORDS, data.WIDTH, name="words")(words)))
    for i in range(data.BLOCKS):
        mixed = Attention()(layers.Dense(3 * data.WIDTH, name=f"qkv{i}")(x), lengths)
        x = norm(f"norma{i}", x + layers.Dense(data.WIDTH, name=f"mix{i}")(mixed))
        up = layers.Dense(4 * data.WIDTH, gelu, name=f"up{i}")(x)
        x = norm(f"normb{i}", x + layers.Dense(data.WIDTH, name=f"down{i}")(up))
    pooled = layers.Dense(data.WIDTH, "tanh", name="pool")(x[:, 0])
    return keras.Model((words, lengths), layers.Dense(2, name="out")(pooled))


def wide_deep():
    ids, numbers = keras.Input((data.COLUMNS,), dtype="int32"), keras.Input((data.NUMBERS,))

    def rows(kind, width):
        columns = range(data.COLUMNS)
        return [layers.Embedding(data.BUCKETS, width, name=f"{kind}{i:02}")(ids[:, i]) for i in columns]

    x = layers.Concatenate()([*rows("c", data.ROW), numbers])
    for i, units in enumerate(data.HIDDEN):
        x = layers.Dense(units, "relu", name=f"deep{i}")(x)
    deep = layers.Dense(1, name=f"deep{len(data.HIDDEN)}")(x)
    return keras.Model((ids, numbers), layers.Add()([deep, *rows("w", 1)]))


class Mask(layers.Layer):
    def call(self, lengths):
        return ops.arange(data.STEPS) < lengths[:, None]


class Transitions(layers.Layer):
    def build(self, shape):
        self.transitions = self.add_weight(shape=(data.TAGS, data.TAGS), name="transitions")

    def call(self, scores):
        return scores + 0 * self.transitions[0]


class Decode(layers.Layer):
    def __init__(self, crf):
        super().__init__()
        self.crf = crf

    def call(self, scores, lengths):
        return jax_models.crf_decode(scores, self.crf.transitions.value, lengths)

    def compute_output_spec(self, scores, lengths):
        return keras.KerasTensor(scores.shape[:2], "int32")


class Tagger(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return jax_models.loss_of("tagger", (y_pred, self.get_layer("crf").transitions.value, x[1]), y)


def tagger():
    words, lengths = keras.Input((data.STEPS,), dtype="int32"), keras.Input((), dtype="int32")
    mask = Mask()(lengths)
    x = layers.Embedding(data.TAGGER_WORDS, data.TAGGER_WIDTH, name="words")(words)
    x = layers.Bidirectional(layers.LSTM(data.UNITS, return_sequences=True), name="lstm")(x, mask=mask)
    return Tagger((words, lengths), Transitions(name="crf")(layers.Dense(data.TAGS, name="out")(x)))


def weights_of(work):
    """Lists of values by the names of layers; the gates of a Keras LSTM are i, f, g, o."""
    values = {}
    for name, value in work.initial().items():
        layer, kind = name.split("/")
        if layer in ("forwards", "backwards"):
            i, g, f, o = np.split(value, 4, -1)
            value = np.concatenate([i, f, g, o], -1)
            parts = np.split(value, [data.TAGGER_WIDTH]) if kind == "kernel" else [value]
            values.setdefault("lstm", []).extend(parts)
        else:
            values.setdefault(layer, []).append(value)
    return values


class Warming(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return data.PEAK * ops.minimum(1.0, (ops.cast(step, "float32") + 1) / data.WARM_UP)


def optimizer_of(model):
    return {
        "resnet": lambda: keras.optimizers.SGD(data.RATES[model], momentum=0.9),
        "bert": lambda: keras.optimizers.AdamW(Warming(), weight_decay=data.DECAY, epsilon=common.ADAM_EPSILON),
        "wide_deep": lambda: keras.optimizers.Adagrad(data.RATES[model], 0.1),
        "tagger": lambda: keras.optimizers.Adam(data.RATES[model], epsilon=common.ADAM_EPSILON),
    }[model]()


class Clock(keras.callbacks.Callback):
    async_safe = True  # or `fit` would wait for every step, as it does not without callbacks

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def on_train_batch_end(self, batch, logs=None):
        if self.watch.waiting and batch + 1 >= self.watch.waiting[0]:
            float(logs["loss"])
        self.watch.done(batch + 1)


def train(work, watch):
    model = {"resnet": resnet, "bert": bert, "wide_deep": wide_deep, "tagger": tagger}[work.model]()
    for name, values in weights_of(work).items():
        model.get_layer(name).set_weights(values)
    losses = {"wide_deep": keras.losses.BinaryCrossentropy(from_logits=True), "tagger": None}
    loss = losses.get(work.model, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(optimizer_of(work.model), loss)
    model.fit(data.batches(work, "train"), callbacks=[Clock(watch)])
    predictor = model
    if work.model == "tagger":
        predictor = keras.Model(model.inputs, Decode(model.get_layer("crf"))(model.outputs[0], model.inputs[1]))

    def batches(count):
        return (batch for batch in itertools.islice(data.batches(work, "test"), count))  # a generator, as `fit` wants

    def evaluate(count=None):
        return float(model.evaluate(batches(count), verbose=0))

    def predictions(count=None):
        return predictor.predict(((x,) for x, _ in batches(count)), verbose=0)

    evaluate(1), predictions(1)  # compile
    watch.rate("prediction", work.rows, predictions)
    return watch.rate("evaluation", work.rows, evaluate)


if __name__ == "__main__":
    common.main(train, {"Keras": keras.__version__, "jax": jax.__version__}, data.work_of)
