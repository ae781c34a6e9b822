"""Starts a model from another one's variables: a reader of the digits 5 to 9 from one of the digits 0 to 4.

    python examples/warm_start.py                # two towers
    python examples/warm_start.py --towers=4

The new model has the hidden layers of the old one, under other names, and a new output layer. With few images, it is
trained once from random values and once from the old layers.
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
from replicate import TowerOptimizer, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_integer("towers", 2, "How many CPU devices to use; GPUs are all used.", lower_bound=1)
flags.DEFINE_integer("steps", 400, "How many steps to train the first model.", lower_bound=1)
flags.DEFINE_integer("few", 40, "How many images the new model learns from.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")


def dense(name, x, units):
    with est.variable_scope(name):
        kernel = est.get_variable("kernel", (x.shape[-1], units), initializer=jax.nn.initializers.he_normal())
        return x @ kernel + est.get_variable("bias", (units,), initializer=jax.nn.initializers.zeros)


def model_fn(features, labels, mode, params):
    x = features["pixels"]
    for i, width in enumerate((96, 64)):
        x = jax.nn.relu(dense(f"{params['layers']}{i}", x, width))
    logits = dense("logits", x, 5)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"digit": logits.argmax(-1)})
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {"accuracy": est.metrics.accuracy(labels, logits.argmax(-1))}
    train_op = TowerOptimizer(optax.adam(params["learning_rate"])).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def load(first, count):
    """Images and labels of five digits: `count` for training, the others for testing."""
    images, labels = load_digits(return_X_y=True)
    mine = np.random.default_rng(1).permutation(np.flatnonzero((labels >= first) & (labels < first + 5)))
    features, labels = {"pixels": np.float32(images[mine] / 16)}, np.int32(labels[mine] - first)
    count = count or len(mine) - 300

    def input_fn(rows, **options):
        return est.inputs.numpy_input_fn({"pixels": features["pixels"][rows]}, labels[rows], 40, **options)

    train = input_fn(slice(0, count), num_epochs=None, shuffle=True, seed=0)
    return train, input_fn(slice(count, None), shuffle=False)


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    base = FLAGS.model_dir or tempfile.mkdtemp()
    replicated = replicate_model_fn(model_fn)

    train, test = load(0, None)
    params = {"layers": "old_layer", "learning_rate": 1e-3}
    old = est.Estimator(replicated, os.path.join(base, "old"), params=params).train(train, steps=FLAGS.steps)
    print(f"\nOn {jax.device_count()} x {jax.default_backend()}: the digits 0 to 4 are read with", end=" ")
    print(f"test accuracy {old.evaluate(test)['accuracy']:.2%}\n")

    def old_name(name):
        return name.replace("new_layer", "old_layer")

    warm = est.WarmStartSettings(old.model_dir, vars_to_warm_start="new_layer.*", var_name_to_prev_var_name=old_name)
    train, test = load(5, FLAGS.few)
    params = {"layers": "new_layer", "learning_rate": 3e-3}
    models = {
        name: est.Estimator(replicated, os.path.join(base, name), params=params, warm_start_from=settings)
        for name, settings in {"cold": None, "warm": warm}.items()
    }
    print(f"The digits 5 to 9, from {FLAGS.few} images:\n")
    results = []
    for model in models.values():
        evaluator = est.InMemoryEvaluatorHook(model, test, every_n_iter=10)
        model.train(train, hooks=[evaluator], steps=60)
        results.append(evaluator.results)
    print("  steps   from random values   from the old layers")
    for cold, warmed in zip(*results, strict=True):
        print(f"{cold['global_step']:7}{cold['accuracy']:21.2%}{warmed['accuracy']:22.2%}")
    print(f"\n{models['warm'].warm_start_report}")


if __name__ == "__main__":
    app.run(main)
