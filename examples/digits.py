"""Reads handwritten digits: a small convolutional network on any number of towers.

    python examples/digits.py               # two towers: two CPU devices, or all GPUs
    python examples/digits.py --towers=4    # four CPU devices: same batches, losses and accuracy

Two names make a model_fn for one device run on many: `TowerOptimizer`, around the optimizer, and
`replicate_model_fn`, around the model_fn. The images (1,797 of 8x8 pixels) come with scikit-learn.
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
flags.DEFINE_integer("towers", 2, "How many CPU devices to use; GPUs are all used.", lower_bound=1)
flags.DEFINE_integer("steps", 600, "How many steps to train.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Images per step, split among the towers.", lower_bound=1)
flags.DEFINE_float("learning_rate", 2e-3, "The learning rate of Adam.")
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")
flags.DEFINE_integer("steps_per_loop", 1, "Steps that make one compiled program.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Of the initial values and of the order of the images.")

NUM_TEST = 500
SHADES = " ░▒▓█"


def conv(name, x, filters):
    with est.variable_scope(name):
        kernel = est.get_variable("kernel", (3, 3, x.shape[-1], filters))
        bias = est.get_variable("bias", (filters,), initializer=jax.nn.initializers.zeros)
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + bias)


def max_pool(x):
    return jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def dense(name, x, units):
    with est.variable_scope(name):
        kernel = est.get_variable("kernel", (x.shape[-1], units))
        bias = est.get_variable("bias", (units,), initializer=jax.nn.initializers.zeros)
    return x @ kernel + bias


def model_fn(features, labels, mode, params):
    x = features["pixels"][..., None]  # [batch, 8, 8, 1]
    x = max_pool(conv("conv1", x, 16))  # [batch, 4, 4, 16]
    x = max_pool(conv("conv2", x, 64))  # [batch, 2, 2, 64]
    logits = dense("logits", x.reshape(x.shape[0], -1), 10)
    digit = logits.argmax(-1)
    if mode == est.ModeKeys.PREDICT:
        predictions = {"digit": digit, "probability": jax.nn.softmax(logits).max(-1)}
        return est.EstimatorSpec(mode, predictions=predictions)
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == est.ModeKeys.EVAL:
        metrics = {"accuracy": est.metrics.accuracy(labels, digit)}
        return est.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = TowerOptimizer(optax.adam(params["learning_rate"]))
    return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))


def load():
    """Images and labels for training and for testing, always the same."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    images = (images[order] / 16).reshape(-1, 8, 8).astype(np.float32)
    labels = labels[order].astype(np.int32)
    return (images[NUM_TEST:], labels[NUM_TEST:]), (images[:NUM_TEST], labels[:NUM_TEST])


def pictures(examples):
    """Draws each `(prediction, image, label)`, with the predicted digit below."""
    rows = [[] for _ in range(9)]
    for prediction, image, label in examples:
        for row, pixels in zip(rows, np.round(image * (len(SHADES) - 1)).astype(int), strict=False):
            row.append("".join(2 * SHADES[p] for p in pixels))
        digit, probability = prediction["digit"], prediction["probability"]
        mark = "" if digit == label else " ✗"
        rows[-1].append(f"{digit} ({probability:.0%}), is {label}{mark}".center(16))
    return "\n".join("   ".join(row).rstrip() for row in rows)


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    towers = f"{jax.device_count()} x {jax.default_backend()}"
    (images, labels), test = load()
    train_input_fn = est.inputs.numpy_input_fn(
        {"pixels": images}, labels, FLAGS.batch_size, num_epochs=None, shuffle=True, seed=FLAGS.seed
    )
    test_input_fn = est.inputs.numpy_input_fn({"pixels": test[0]}, test[1], shuffle=False)
    classifier = est.Estimator(
        replicate_model_fn(model_fn),
        model_dir=FLAGS.model_dir,
        config=est.RunConfig(seed=FLAGS.seed, steps_per_loop=FLAGS.steps_per_loop, log_step_count_steps=100),
        params={"learning_rate": FLAGS.learning_rate},
    )
    classifier.train(train_input_fn, steps=FLAGS.steps)
    result = classifier.evaluate(test_input_fn)
    print(f"\nAfter {result['global_step']} steps on {towers}:", end=" ")
    print(f"test accuracy {result['accuracy']:.2%}, test loss {result['loss']:.4f}\n")

    examples = list(zip(classifier.predict(test_input_fn), *test, strict=True))
    wrong = [example for example in examples if example[0]["digit"] != example[2]]
    print(f"The first test images, and what they were read as:\n\n{pictures(examples[:4])}\n")
    print(f"{len(wrong)} of {NUM_TEST} were misread, the first of them:\n\n{pictures(wrong[:4])}\n")


if __name__ == "__main__":
    app.run(main)
