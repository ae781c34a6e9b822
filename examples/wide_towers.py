"""Reads handwritten digits with towers of several devices, over which a wide layer is sharded.

    python examples/wide_towers.py                          # two towers of four CPU devices
    python examples/wide_towers.py --towers=1 --devices_per_tower=8

For models that do not fit on one device: `devices_per_tower` makes towers of several devices, and `partition` is the
dimension along which a variable is sharded over them. The bytes on each device decrease; accuracy and losses stay the
same. The images come with scikit-learn.
"""

import logging

import jax
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_integer("towers", 2, "How many towers; each has a part of every batch.", lower_bound=1)
flags.DEFINE_integer("devices_per_tower", 4, "How many CPU devices each of them has.", lower_bound=1)
flags.DEFINE_integer("steps", 400, "How many steps to train.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")

NUM_TEST, WIDTH = 500, 2048


def model_fn(features, labels, mode):
    with est.variable_scope("hidden"):
        w = est.get_variable("kernel", (64, WIDTH), partition=(None, "part"))  # some of the columns on each device
        b = est.get_variable("bias", (WIDTH,), initializer=jax.nn.initializers.zeros, partition=("part",))
        hidden = est.spread(jax.nn.relu(features["pixels"] @ w + b), axis=1)
    with est.variable_scope("logits"):
        w = est.get_variable("kernel", (WIDTH, 10), partition=("part", None))  # and as many of the rows
        logits = hidden @ w + est.get_variable("bias", (10,), initializer=jax.nn.initializers.zeros)
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {"accuracy": est.metrics.accuracy(labels, logits.argmax(-1))}
    train_op = TowerOptimizer(optax.adam(1e-3)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def main(argv):
    del argv
    towers, size = FLAGS.towers, FLAGS.devices_per_tower
    jax.config.update("jax_num_cpu_devices", towers * size)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    pixels, labels = np.float32(images[order] / 16), np.int32(labels[order])
    train_input_fn = est.inputs.numpy_input_fn(
        {"pixels": pixels[NUM_TEST:]}, labels[NUM_TEST:], 64, num_epochs=None, shuffle=True, seed=0
    )
    test_input_fn = est.inputs.numpy_input_fn({"pixels": pixels[:NUM_TEST]}, labels[:NUM_TEST], shuffle=False)

    cpus = jax.devices("cpu")
    wide = replicate_model_fn(model_fn, devices=cpus, devices_per_tower=size)
    narrow = replicate_model_fn(model_fn, devices=cpus[:towers])
    classifier = est.Estimator(wide, FLAGS.model_dir, est.RunConfig(seed=0))
    classifier.train(train_input_fn, steps=FLAGS.steps)
    metrics = classifier.evaluate(test_input_fn)
    print(f"\nAfter {FLAGS.steps} steps on {towers} x {size} devices:", end=" ")
    print(f"test accuracy {metrics['accuracy']:.2%}, test loss {metrics['loss']:.4f}\n")
    compared = {f"{towers} x 1": narrow, f"{towers} x {size}": wide}
    print(est.memory_report(compared, {"pixels": pixels[:64]}, labels[:64]))


if __name__ == "__main__":
    app.run(main)
