"""Stops training by SIGTERM, as on a preempted machine, and resumes it in another process.

    python examples/resume.py --towers=2

It trains on handwritten digits twice: once without a stop; and once in a process that gets SIGTERM in the middle, and
then in a second process. Every step has the same images, and every variable and slot has the same bits: a checkpoint
has everything that the next step depends on, including the position in the shuffled input and the state of hooks.
"""

import logging
import os
import signal
import subprocess
import sys
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
flags.DEFINE_string("model_dir", None, "Where the checkpoints go; by default a temporary place.")
flags.DEFINE_integer("stop_at", None, "At which step the process is sent SIGTERM.")
flags.DEFINE_bool("train", False, "Train, and nothing else.")

STEPS, STOP_AT = 300, 130


def model_fn(features, labels, mode):
    x = features["pixels"]
    hidden = jax.nn.relu(x @ est.get_variable("hidden/kernel", (64, 64)) + est.get_variable("hidden/bias", (64,)))
    keep = jax.random.bernoulli(est.make_rng(), 0.8, hidden.shape)  # dropout: the PRNG keys resume as well
    logits = jax.numpy.where(keep, hidden / 0.8, 0) @ est.get_variable("logits/kernel", (64, 10))
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    est.record("id", features["id"])
    train_op = TowerOptimizer(optax.adam(2e-3)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


class WriteIds(est.Hook):
    """Writes the images of each step into a file, and counts them."""

    def __init__(self, path):
        self.path, self.images = path, 0

    def get_state(self):
        return {"images": self.images}

    def set_state(self, state):
        self.images = state["images"]

    def before_run(self, context):
        return "id"

    def after_run(self, context, values):
        ids = values.results
        self.images += len(ids)
        with open(self.path, "a") as file:
            print(context.global_step, self.images, *ids, file=file)


class Terminate(est.Hook):
    """Sends the signal that a cluster sends before it takes its machine back."""

    def next_step(self, step):
        return FLAGS.stop_at if FLAGS.stop_at and step < FLAGS.stop_at else None

    def after_run(self, context, values):
        os.kill(os.getpid(), signal.SIGTERM)

    def end(self, context):
        print(f"  ended at step {context.global_step}, because of {context.stop_reason}", flush=True)


def train():
    jax.config.update("jax_num_cpu_devices", FLAGS.towers)
    images, labels = load_digits(return_X_y=True)
    features = {"pixels": (images / 16).astype(np.float32), "id": np.arange(len(images))}
    input_fn = est.inputs.numpy_input_fn(features, labels.astype(np.int32), 64, None, shuffle=True, seed=0)
    classifier = est.Estimator(replicate_model_fn(model_fn), FLAGS.model_dir)
    hooks = [WriteIds(os.path.join(FLAGS.model_dir, "ids.txt")), Terminate()]
    classifier.train(input_fn, hooks=hooks, max_steps=STEPS)


def start(model_dir, *args):
    """Trains in another process; returns its exit code."""
    command = [sys.executable, __file__, "--train", f"--model_dir={model_dir}", f"--towers={FLAGS.towers}", *args]
    code = subprocess.run(command).returncode
    print(f"  exit code {code}", flush=True)
    return code


def values(model_dir):
    """All variables, slots and the step of the newest checkpoint."""
    trained = est.Estimator(model_fn, model_dir)
    return {name: trained.get_variable_value(name) for name in trained.get_variable_names()}


def ids(model_dir):
    with open(os.path.join(model_dir, "ids.txt")) as file:
        return file.readlines()


def main(argv):
    del argv
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    if FLAGS.train:
        train()
        return
    base = FLAGS.model_dir or tempfile.mkdtemp()
    full, stopped = os.path.join(base, "full"), os.path.join(base, "stopped")
    print(f"Training {STEPS} steps:", flush=True)
    start(full)
    print(f"The same, with SIGTERM at step {STOP_AT}:", flush=True)
    if start(stopped, f"--stop_at={STOP_AT}") == est.Preempted().code:
        print("Which says: start it again.", flush=True)
        start(stopped)
    expected, resumed = values(full), values(stopped)
    equal = [name for name in expected if expected[name].tobytes() == resumed[name].tobytes()]
    same = [a == b for a, b in zip(ids(full), ids(stopped), strict=True)]
    print(f"\n{sum(same)} of {len(same)} steps had the same {ids(full)[-1].split()[1]} images in the same order;")
    print(f"{len(equal)} of {len(expected)} variables and slots have the same bits.")


if __name__ == "__main__":
    app.run(main)
