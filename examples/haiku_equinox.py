"""Trains a Haiku model or an Equinox model, on two towers.

    pip install dm-haiku equinox
    python examples/haiku_equinox.py                      # Haiku
    python examples/haiku_equinox.py --package=equinox
    python examples/haiku_equinox.py --towers=4           # four CPU devices

Both need only `est.get_variable`, which makes the model one variable: the result of Haiku's `init`, or the arrays of an
Equinox model. The images are the same as in digits.py.
"""

import logging

import equinox as eqx
import haiku as hk
import jax
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_enum("package", "haiku", ["haiku", "equinox"], "What the model is written with.")
flags.DEFINE_integer("towers", 2, "How many CPU devices to use; GPUs are all used.", lower_bound=1)
flags.DEFINE_integer("steps", 600, "How many steps to train.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Images per step, split among the towers.", lower_bound=1)
flags.DEFINE_float("learning_rate", 3e-3, "The learning rate of Adam.")
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")
flags.DEFINE_integer("seed", 0, "Of the initial values, the dropout and the order of the images.")

NUM_TEST = 500


@hk.transform
def haiku_net(x, train):
    return hk.nets.MLP([128, 10])(x, dropout_rate=0.3 if train else None, rng=hk.next_rng_key() if train else None)


def haiku_logits(x, train):
    weights = est.get_variable("net", lambda key: haiku_net.init(key, x, False))
    return haiku_net.apply(weights, est.make_rng("dropout"), x, train)


def equinox_net(key):
    one, two = jax.random.split(key)
    hidden, output = eqx.nn.Linear(64, 128, key=one), eqx.nn.Linear(128, 10, key=two)
    return eqx.nn.Sequential([hidden, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.3), output])


def equinox_logits(x, train):
    weights = est.get_variable("net", lambda key: eqx.filter(equinox_net(key), eqx.is_array))
    net = eqx.combine(weights, eqx.filter(equinox_net(jax.random.key(0)), eqx.is_array, inverse=True))
    net = eqx.nn.inference_mode(net, not train)
    return jax.vmap(lambda row, key: net(row, key=key))(x, jax.random.split(est.make_rng("dropout"), len(x)))


def model_fn(features, labels, mode, params):
    logits = params["logits"](features["pixels"], train=mode == est.ModeKeys.TRAIN)
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
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
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
        params={
            "logits": {"haiku": haiku_logits, "equinox": equinox_logits}[FLAGS.package],
            "learning_rate": FLAGS.learning_rate,
        },
    )
    classifier.train(train_input_fn, steps=FLAGS.steps)
    result = classifier.evaluate(test_input_fn)

    print(f"\n{FLAGS.package}, after {result['global_step']} steps on {towers}:", end=" ")
    print(f"test accuracy {result['accuracy']:.2%}, test loss {result['loss']:.4f}")


if __name__ == "__main__":
    app.run(main)
