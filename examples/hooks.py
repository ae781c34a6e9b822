"""Observes training: summaries, hooks of the library and your own, the history, and a plot of it.

    python examples/hooks.py                # two towers
    python examples/hooks.py --towers=4

Values that the model_fn reports by `est.summary.*` go into event files for TensorBoard and into `history.jsonl`; values
of `est.record` are for hooks only. Hooks cost nothing between the steps at which they are due.
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
flags.DEFINE_integer("steps", 600, "How many steps to train.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where checkpoints and event files go; by default a temporary place.")

NUM_TEST = 500


def model_fn(features, labels, mode):
    x = features["pixels"]
    with est.variable_scope("hidden"):
        w = est.get_variable("kernel", (64, 128), initializer=jax.nn.initializers.he_normal())
        hidden = jax.nn.relu(x @ w + est.get_variable("bias", (128,), initializer=jax.nn.initializers.zeros))
        est.summary.histogram("activations", hidden)  # its tag is hidden/activations
        est.summary.scalar("active", (hidden > 0).mean())
    with est.variable_scope("logits"):
        w = est.get_variable("kernel", (128, 10))
        logits = hidden @ w + est.get_variable("bias", (10,), initializer=jax.nn.initializers.zeros)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    est.summary.image("digits", x.reshape(-1, 8, 8, 1))
    est.record("id", features["id"])
    est.record("hardness", losses)  # a value for each example
    metrics = {"accuracy": est.metrics.accuracy(labels, logits.argmax(-1))}
    train_op = TowerOptimizer(optax.adam(1e-3)).minimize(losses.mean())
    return est.EstimatorSpec(mode, loss=losses.mean(), train_op=train_op, eval_metric_ops=metrics)


class HardestExamples(est.Hook):
    """Collects the examples of the highest loss, from one batch every N steps."""

    def __init__(self, every, keep=5):
        self.every = every
        self.keep = keep
        self.hardest = {}

    def next_step(self, step):
        return step - step % self.every + self.every

    def before_run(self, context):
        return {"ids": "id", "losses": "hardness"}

    def after_run(self, context, values):
        losses = dict(zip(values.results["ids"].tolist(), values.results["losses"].tolist(), strict=True))
        ranked = sorted((self.hardest | losses).items(), key=lambda pair: -pair[1])
        self.hardest = dict(ranked[: self.keep])


def input_fns():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    features = {"pixels": np.float32(images[order] / 16), "id": np.int32(order)}
    labels = labels[order].astype(np.int32)
    train = {name: column[NUM_TEST:] for name, column in features.items()}
    test = {name: column[:NUM_TEST] for name, column in features.items()}
    return (
        est.inputs.numpy_input_fn(train, labels[NUM_TEST:], 64, num_epochs=None, shuffle=True, seed=0),
        est.inputs.numpy_input_fn(test, labels[:NUM_TEST], shuffle=False),
        labels[np.argsort(order)],
    )


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    train_input_fn, test_input_fn, label_of = input_fns()
    model_dir = FLAGS.model_dir or tempfile.mkdtemp()
    config = est.RunConfig(save_summary_steps=20)
    classifier = est.Estimator(replicate_model_fn(model_fn), model_dir, config)
    hardest = HardestExamples(every=25)
    evaluator = est.InMemoryEvaluatorHook(classifier, test_input_fn, name="test", every_n_iter=FLAGS.steps // 5)
    watchdog = est.WatchdogHook(timeout_secs=120)  # reports the phase of a run that hangs
    classifier.train(train_input_fn, hooks=[hardest, evaluator, watchdog], steps=FLAGS.steps)

    print(f"\nOn {jax.device_count()} x {jax.default_backend()}:\n")
    print("  step   train loss   active units   test loss   test accuracy")
    history = {row["step"]: row for row in est.read_history(model_dir)}
    for step, metrics in est.read_eval_metrics(classifier.eval_dir("test")).items():
        row = history.get(step + 1) or history.get(step - 19, {})  # written at the steps 1, 21, 41 ...
        print(
            f"{step:6}{row.get('loss', float('nan')):13.4f}{row.get('hidden/active', float('nan')):15.1%}"
            f"{metrics['loss']:12.4f}{metrics['accuracy']:16.2%}"
        )
    print("\nThe hardest digits seen, of those looked at:")
    for example, loss in hardest.hardest.items():
        print(f"  image {example}, a {label_of[example]}: loss {loss:.2f}")
    picture = est.plot_history(model_dir)
    print(f"\nCurves of all this: {picture} ({os.path.getsize(picture):,} bytes); or: tensorboard --logdir {model_dir}")


if __name__ == "__main__":
    app.run(main)
