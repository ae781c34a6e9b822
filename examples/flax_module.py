"""Trains a Flax module with dropout, and with batch norm over all towers' images.

    python examples/flax_module.py               # two towers: two CPU devices, or all GPUs
    python examples/flax_module.py --towers=4    # four CPU devices
    python examples/flax_module.py --nnx         # the same network in Flax's other API

`est.flax_module` makes all parameters of the module one variable, and its batch statistics another one, which is not
trained: training steps assign it, evaluation does not. It also passes PRNG keys to the module, and
`nn.BatchNorm(axis_name=TOWER_AXIS)` sees the whole batch on any number of towers. The images are the same as in
digits.py.
"""

import logging

import flax.linen as nn
import jax
import numpy as np
import optax
from absl import app, flags
from flax import nnx
from sklearn.datasets import load_digits

import estimator as est
from replicate import TOWER_AXIS, TowerOptimizer, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_integer("towers", 2, "How many CPU devices to use; GPUs are all used.", lower_bound=1)
flags.DEFINE_boolean("nnx", False, "Whether to take in an NNX model, not a Linen module.")
flags.DEFINE_integer("steps", 400, "How many steps to train.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Images per step, split among the towers.", lower_bound=1)
flags.DEFINE_float("learning_rate", 2e-3, "The learning rate of Adam.")
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")
flags.DEFINE_integer("seed", 0, "Of the initial values, the dropout and the order of the images.")

NUM_TEST = 500


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for filters in (16, 64):
            x = nn.Conv(filters, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=TOWER_AXIS)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(10)(x)


class NNXNetwork(nnx.Module):
    """`est.flax_module` calls its `train()` or `eval()`."""

    def __init__(self, rngs):
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), use_bias=False, rngs=rngs) for a, b in ((1, 16), (16, 64))])
        self.norms = nnx.List([nnx.BatchNorm(n, momentum=0.9, axis_name=TOWER_AXIS, rngs=rngs) for n in (16, 64)])
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.dense = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.max_pool(nnx.relu(norm(conv(x))), (2, 2), (2, 2))
        return self.dense(self.dropout(x.reshape(len(x), -1)))


def model_fn(features, labels, mode, params):
    if FLAGS.nnx:
        logits = est.flax_module(NNXNetwork, "net")(features["pixels"])
    else:
        logits = est.flax_module(Network(), "net")(features["pixels"], train=mode == est.ModeKeys.TRAIN)
    digit = logits.argmax(-1)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"digit": digit})
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    train_op = TowerOptimizer(optax.adam(params["learning_rate"])).minimize(loss)
    metrics = {"accuracy": est.metrics.accuracy(labels, digit)}
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def load():
    """Images and labels for training and for testing, always the same."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    images = (images[order] / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    labels = labels[order].astype(np.int32)
    return (images[NUM_TEST:], labels[NUM_TEST:]), (images[:NUM_TEST], labels[:NUM_TEST])


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    towers = f"{jax.device_count()} x {jax.default_backend()}"
    (train_x, train_y), (test_x, test_y) = load()
    train_input_fn = est.inputs.numpy_input_fn(
        {"pixels": train_x}, train_y, FLAGS.batch_size, None, shuffle=True, seed=FLAGS.seed
    )
    test_input_fn = est.inputs.numpy_input_fn({"pixels": test_x}, test_y, 128, shuffle=False)
    classifier = est.Estimator(
        replicate_model_fn(model_fn),
        model_dir=FLAGS.model_dir,
        config=est.RunConfig(seed=FLAGS.seed),
        params={"learning_rate": FLAGS.learning_rate},
    )
    classifier.train(train_input_fn, steps=FLAGS.steps)
    result = classifier.evaluate(test_input_fn)

    print(f"\nAfter {result['global_step']} steps on {towers}:", end=" ")
    print(f"test accuracy {result['accuracy']:.2%}, test loss {result['loss']:.4f}")


if __name__ == "__main__":
    app.run(main)
