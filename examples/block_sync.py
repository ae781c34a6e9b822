"""Reads handwritten digits with towers that synchronize every 16 steps, as well as with towers that do in each step.

    python examples/block_sync.py               # four towers: four CPU devices, or all GPUs
    python examples/block_sync.py --towers=2 --block_steps=64

Within a block each tower trains on its own rows, on its own copy of the variables, without communication. At its end
the copies are averaged, and an outer optimizer updates the variables that all towers continue with. It takes one
argument of `replicate_model_fn`; the model_fn is the same as for synchronous training. The images come with
scikit-learn.
"""

import logging
import os
import tempfile

import jax
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import estimator as est
from replicate import BlockSync, TowerOptimizer, bmuf, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_integer("towers", 4, "How many CPU devices to use; GPUs are all used.", lower_bound=1)
flags.DEFINE_integer("block_steps", 16, "Steps between synchronisations.", lower_bound=1)
flags.DEFINE_integer("steps", 640, "How many steps to train, a multiple of the block.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")

NUM_TEST = 500


def dense(name, x, units):
    with est.variable_scope(name):
        kernel = est.get_variable("kernel", (x.shape[-1], units))
        bias = est.get_variable("bias", (units,), initializer=jax.nn.initializers.zeros)
    return x @ kernel + bias


def model_fn(features, labels, mode):
    logits = dense("logits", jax.nn.relu(dense("hidden", features["pixels"], 128)), 10)
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {"accuracy": est.metrics.accuracy(labels, logits.argmax(-1))}
    train_op = TowerOptimizer(optax.adam(3e-3)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def input_fns():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    pixels, labels = np.float32(images[order] / 16), np.int32(labels[order])
    return (
        est.inputs.numpy_input_fn({"pixels": pixels[NUM_TEST:]}, labels[NUM_TEST:], 64, None, shuffle=True, seed=0),
        est.inputs.numpy_input_fn({"pixels": pixels[:NUM_TEST]}, labels[:NUM_TEST], shuffle=False),
    )


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    train_input_fn, test_input_fn = input_fns()
    base = FLAGS.model_dir or tempfile.mkdtemp()
    outer_optimizers = {
        "block momentum (bmuf)": bmuf(block_momentum=0.5),
        "DiLoCo": optax.sgd(0.7, momentum=0.9, nesterov=True),
        "local steps, averaged": optax.sgd(1.0),
    }
    ways = {"synchronous": None}
    ways |= {name: BlockSync(FLAGS.block_steps, outer) for name, outer in outer_optimizers.items()}
    print(f"\n{FLAGS.steps} steps on {jax.device_count()} x {jax.default_backend()}:\n")
    print(f"{'':24}{'synchronisations':>18}{'test loss':>12}{'test accuracy':>16}")
    for i, (name, block_sync) in enumerate(ways.items()):
        classifier = est.Estimator(
            replicate_model_fn(model_fn, block_sync=block_sync),
            os.path.join(base, str(i)),
            est.RunConfig(seed=0, steps_per_loop=FLAGS.block_steps),
        )
        classifier.train(train_input_fn, steps=FLAGS.steps)
        metrics = classifier.evaluate(test_input_fn)
        met = FLAGS.steps // (block_sync.block_steps if block_sync else 1)
        print(f"{name:24}{met:18}{metrics['loss']:12.4f}{metrics['accuracy']:16.2%}")


if __name__ == "__main__":
    app.run(main)
