"""Trains until the test loss stops falling, and keeps the best model: evaluations, early stopping, export.

    python examples/train_and_evaluate.py               # two towers: two CPU devices, or all GPUs
    python examples/train_and_evaluate.py --towers=4    # four CPU devices: same batches, same table

One call of `est.train_and_evaluate` evaluates the variables in memory every 25 steps; stops when the loss on test
images has not decreased for five evaluations; restores the best variables, shown in the last line; and exports each
model that is better than all before. Started again with the same --model_dir, it ends at once. The images of
handwritten digits come with scikit-learn.
"""

import glob
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
flags.DEFINE_integer("steps", 2000, "How many steps to train at most.", lower_bound=1)
flags.DEFINE_integer("eval_every_steps", 25, "Evaluate every N steps.", lower_bound=1)
flags.DEFINE_integer("patience", 5, "Stop after N evaluations without a lower loss.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where checkpoints and exports go; by default a temporary place.")

NUM_TEST = 500
BAR = 40


def dense(name, x, units):
    with est.variable_scope(name):
        kernel = est.get_variable("kernel", (x.shape[-1], units))
        bias = est.get_variable("bias", (units,), initializer=jax.nn.initializers.zeros)
    return x @ kernel + bias


def model_fn(features, labels, mode):
    x = jax.nn.relu(dense("hidden", features["pixels"], 256))
    logits = dense("logits", x, 10)
    digit = logits.argmax(-1)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"digit": digit})
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {"accuracy": est.metrics.accuracy(labels, digit)}
    train_op = TowerOptimizer(optax.adam(3e-3)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def load():
    """Features and labels for training and for testing, always the same."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    pixels, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    train, test = slice(NUM_TEST, None), slice(NUM_TEST)
    return ({"pixels": pixels[train]}, labels[train]), ({"pixels": pixels[test]}, labels[test])


def table(evaluations, exported):
    """Prints a line per evaluation: the metrics, and whether the model is among the exports."""
    worst = max(metrics["loss"] for metrics in evaluations.values())
    yield f"{'step':>6} {'accuracy':>9} {'loss':>8}"
    for step, metrics in evaluations.items():
        bar = "█" * round(BAR * metrics["loss"] / worst)
        mark = "  exported" if step in exported else ""
        yield f"{step:>6} {metrics['accuracy']:>9.2%} {metrics['loss']:>8.4f}  {bar}{mark}"


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    (features, labels), test = load()
    train_input_fn = est.inputs.numpy_input_fn(features, labels, 64, num_epochs=None, shuffle=True, seed=0)
    test_input_fn = est.inputs.numpy_input_fn(*test, batch_size=NUM_TEST, shuffle=False)

    classifier = est.Estimator(replicate_model_fn(model_fn), model_dir=FLAGS.model_dir)
    stop = est.stop_if_no_decrease_hook(
        classifier, "loss", max_evals_without_decrease=FLAGS.patience, restore_best=True
    )
    exporter = est.BestExporter("best", example_features=test[0])
    metrics, _ = est.train_and_evaluate(
        classifier,
        est.TrainSpec(train_input_fn, max_steps=FLAGS.steps, hooks=[stop]),
        est.EvalSpec(test_input_fn, steps=None, exporters=exporter),
        eval_every_steps=FLAGS.eval_every_steps,
    )

    evaluations = est.read_eval_metrics(classifier.eval_dir())
    paths = glob.glob(f"{classifier.model_dir}/export/best/*/")
    exported = {est.load_exported(path).metadata["global_step"] for path in paths}
    print(f"\nEvaluations on {jax.device_count()} x {jax.default_backend()}, and the newest exports:\n")
    print("\n".join(table(evaluations, exported)))
    print(f"\nAfter {metrics['global_step']} steps, with the variables of step {max(exported)}:", end=" ")
    print(f"test accuracy {metrics['accuracy']:.2%}, test loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    app.run(main)
