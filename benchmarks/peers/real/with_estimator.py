"""The models of real shapes with this project's Estimator and its defaults, on one tower or several.

python benchmarks/peers/real/with_estimator.py resnet --data FOLDER [--towers 4]
"""

import data
import jax
import jax.numpy as jnp
import jax_models
import numpy as np
import optax

import estimator as est
from replicate import MirroredStrategy

import common  # isort: skip

fc = est.feature_column
CATEGORIES = [fc.categorical_column_with_hash_bucket(f"c{i:02}", data.BUCKETS, np.int64) for i in range(data.COLUMNS)]


def model_fn_of(work):
    network = {"resnet": resnet, "bert": bert, "wide_deep": wide_deep, "tagger": tagger}[work.model]
    described = work.described()

    def value(name):
        """An initializer that gives what all sides begin with."""
        _, mean, deviation = described[name]
        return lambda key, shape, dtype: data.draw(jnp, name, shape, mean, deviation).astype(dtype)

    def model_fn(features, labels, mode):
        outputs = network(value, features)
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=predictions_of(work.model, outputs))
        loss = loss_of(work.model, outputs, labels)
        train_op = est.Optimizer(jax_models.optimizer_of(work.model, work.steps)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def loss_of(model, outputs, labels):
    if model == "tagger":
        scores, transitions, lengths = outputs
        return -est.nn.crf_log_likelihood(scores, labels, lengths, transitions)[0].mean()
    if model == "wide_deep":
        return est.losses.sigmoid_cross_entropy(labels[:, None], outputs)
    return est.losses.sparse_softmax_cross_entropy(labels, outputs)


def predictions_of(model, outputs):
    if model == "tagger":
        scores, transitions, lengths = outputs
        return est.nn.crf_decode(scores, transitions, lengths)[0]
    return jax.nn.sigmoid(outputs) if model == "wide_deep" else outputs.argmax(-1)


def dense(value, x, name, units, activation=None):
    return est.layers.dense(x, units, activation, kernel_initializer=value(f"{name}/kernel"), name=name)


def resnet(value, x):
    def conv(x, name, filters, size=3, strides=1):
        kernel = value(f"{name}/kernel")
        x = est.layers.conv2d(x, filters, size, strides, "same", use_bias=False, kernel_initializer=kernel, name=name)
        options = {"momentum": data.MOMENTUM, "epsilon": data.EPSILON, "fused": False, "synchronized": True}
        return est.layers.batch_normalization(x, name=f"{name}_norm", **options)

    x = est.layers.max_pooling2d(jax.nn.relu(conv(x, "stem", data.FILTERS[0], 7, 2)), 3, 2, "same")
    for name, _, filters, strides in data.blocks():
        y = conv(jax.nn.relu(conv(x, f"{name}_a", filters, strides=strides)), f"{name}_b", filters)
        x = jax.nn.relu(y + (conv(x, f"{name}_short", filters, 1, strides) if strides > 1 else x))
    return dense(value, x.mean((1, 2)), "out", data.CLASSES)


def bert(value, features):
    words, lengths = features
    embed = est.layers.embed(words, data.WORDS, data.WIDTH, value("words/embedding"), scope="words")
    positions = est.get_variable("positions", (data.LENGTH, data.WIDTH), initializer=value("positions/embedding"))
    x = est.layers.layer_norm(embed + positions, begin_norm_axis=-1)
    for i in range(data.BLOCKS):
        qkv = dense(value, x, f"qkv{i}", 3 * data.WIDTH).reshape(*words.shape, 3, data.HEADS, -1)
        mixed = jax_models.attend(*jnp.moveaxis(qkv, 2, 0), lengths).reshape(x.shape)
        x = est.layers.layer_norm(x + dense(value, mixed, f"mix{i}", data.WIDTH), begin_norm_axis=-1)
        up = dense(value, x, f"up{i}", 4 * data.WIDTH, jax.nn.gelu)
        x = est.layers.layer_norm(x + dense(value, up, f"down{i}", data.WIDTH), begin_norm_axis=-1)
    return dense(value, dense(value, x[:, 0], "pool", data.WIDTH, "tanh"), "out", 2)


def wide_deep(value, features):
    columns = [
        fc.embedding_column(column, data.ROW, initializer=value(f"{column.key}/embedding")) for column in CATEGORIES
    ]
    x = fc.input_layer(features, [*columns, fc.numeric_column("numbers", (data.NUMBERS,))])
    for i, units in enumerate(data.HIDDEN):
        x = dense(value, x, f"deep{i}", units, "relu")
    return dense(value, x, f"deep{len(data.HIDDEN)}", 1) + fc.linear_model(features, CATEGORIES)


def tagger(value, features):
    words, lengths = features
    x = est.layers.embed(words, data.TAGGER_WORDS, data.TAGGER_WIDTH, value("words/embedding"))
    outputs, _ = est.layers.bidirectional_lstm(x, data.UNITS, lengths, kernel_initializer=value("forwards/kernel"))
    shape = (data.TAGS, data.TAGS)
    transitions = est.get_variable("transitions", shape, initializer=value("crf/transitions"))
    return dense(value, jnp.concatenate(outputs, -1), "out", data.TAGS), transitions, lengths


class Clock(est.Hook):
    before_run_may_be_early = True

    def __init__(self, work, watch):
        self.marks, self.watch = work.marks, watch

    def next_step(self, step):
        return next((mark for mark in self.marks if mark > step), None)

    def after_run(self, context, values):
        float(values.loss)  # waits for the step
        self.watch.done(context.global_step)


def input_fn_of(work, part):
    if work.model != "wide_deep":
        return lambda: work.batches(part)
    features = {f"c{i:02}": est.io.FixedLenFeature([1], np.int64) for i in range(data.COLUMNS)}
    features |= {
        "numbers": est.io.FixedLenFeature([data.NUMBERS], np.float32),
        "label": est.io.FixedLenFeature([], np.float32),
    }
    return est.inputs.tfrecord_input_fn(work.records(part), features, work.batch_size, "label", shuffle=False)


def train(work, watch, towers):
    jax.config.update("jax_num_cpu_devices", towers)
    strategy = MirroredStrategy(num_gpus=towers) if towers > 1 else None
    config = est.RunConfig(common.temporary(), train_distribute=strategy)
    estimator = est.Estimator(model_fn_of(work), config=config)
    estimator.train(input_fn_of(work, "train"), hooks=[Clock(work, watch)], max_steps=work.steps)
    count = work.rows // work.batch_size

    def predictions(batches):
        rows = estimator.predict(input_fn_of(work, "test"), yield_single_examples=False)
        return [np.asarray(each) for each, _ in zip(rows, range(batches), strict=False)]

    def evaluate(batches):
        return float(estimator.evaluate(input_fn_of(work, "test"), steps=batches)["loss"])

    predictions(1), evaluate(1)  # compile
    watch.rate("prediction", work.rows, lambda: predictions(count))
    return watch.rate("evaluation", work.rows, lambda: evaluate(count))


if __name__ == "__main__":
    common.main(train, {"jax": jax.__version__, "optax": optax.__version__}, data.work_of, towers=1)
