"""Reads handwritten digits in two processes that train one model, and in one process: the result is the same.

    python examples/two_processes.py                             # two processes of two CPU devices, then one of four
    python examples/two_processes.py --processes=4 --devices=1
    srun python examples/two_processes.py --train --model_dir=/shared/digits    # on a cluster, just the training

Each process calls `initialize_distributed`, and its input_fn yields its part of every batch. Everything else is the
same as in one process: `replicate_model_fn` uses the devices of all. The images come with scikit-learn.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile

import jax
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import estimator as est
from replicate import TowerOptimizer, initialize_distributed, replicate_model_fn

FLAGS = flags.FLAGS
flags.DEFINE_integer("processes", 2, "How many processes to start.", lower_bound=1)
flags.DEFINE_integer("devices", 2, "How many CPU devices each of them has; GPUs are all used.", lower_bound=1)
flags.DEFINE_integer("steps", 200, "How many steps to train.", lower_bound=1)
flags.DEFINE_integer("batch_size", 96, "Images per step, split among all devices of all processes.", lower_bound=1)
flags.DEFINE_string("model_dir", None, "Where the checkpoints go, for all processes; by default a temporary place.")
flags.DEFINE_bool("train", False, "Be one of the processes: train, evaluate, predict, and nothing else.")

NUM_TEST = 500


def dense(name, x, units):
    with est.variable_scope(name):
        kernel = est.get_variable("kernel", (x.shape[-1], units))
        bias = est.get_variable("bias", (units,), initializer=jax.nn.initializers.zeros)
    return x @ kernel + bias


def model_fn(features, labels, mode):
    logits = dense("logits", jax.nn.relu(dense("hidden", features["pixels"], 128)), 10)
    digit = logits.argmax(-1)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(
            mode, predictions={"id": features["id"], "probability": jax.nn.softmax(logits).max(-1)}
        )
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {"accuracy": est.metrics.accuracy(labels, digit)}
    train_op = TowerOptimizer(optax.adam(3e-3)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def input_fn_of(order):
    """An input_fn of the images in this order; each process reads only its part of every batch."""

    def input_fn():
        images, labels = load_digits(return_X_y=True)
        context = est.input_context()
        size = context.per_process_batch_size(FLAGS.batch_size)
        for start in range(context.index * size, len(order), FLAGS.batch_size):
            rows = order[start : start + size]
            yield {"pixels": np.float32(images[rows] / 16), "id": np.int32(rows)}, np.int32(labels[rows])

    return input_fn


def train():
    """Runs in each process; on a cluster too, where SLURM, MPI, Kubernetes or TF_CONFIG define its number."""
    jax.config.update("jax_num_cpu_devices", FLAGS.devices)
    initialize_distributed(timeout_secs=60)
    random = np.random.default_rng(1)
    test, images = np.split(random.permutation(1797), [NUM_TEST])
    config = est.RunConfig(FLAGS.model_dir, seed=0, log_step_count_steps=50)
    classifier = est.Estimator(replicate_model_fn(model_fn), config=config)
    classifier.train(input_fn_of(random.choice(images, FLAGS.steps * FLAGS.batch_size)))
    metrics = classifier.evaluate(input_fn_of(test))
    predictions = list(classifier.predict(input_fn_of(test)))
    mine = {name: np.stack([prediction[name] for prediction in predictions]) for name in predictions[0]}
    np.savez(os.path.join(classifier.model_dir, f"process{jax.process_index()}"), **mine, **metrics)


def run(model_dir, processes, devices):
    """Trains in N processes; returns the variables, and the results of each process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cluster = {"worker": [f"127.0.0.1:{listener.getsockname()[1]}"] * processes}  # only the first address is used
    command = [sys.executable, __file__, "--train", f"--model_dir={model_dir}", f"--devices={devices}"]
    command += [f"--steps={FLAGS.steps}", f"--batch_size={FLAGS.batch_size}"]
    started = []
    for index in range(processes):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        started.append(subprocess.Popen(command, env=os.environ | {"TF_CONFIG": json.dumps(task)}))
    codes = [process.wait() for process in started]  # when one fails, the others end too
    if any(codes):
        sys.exit(f"The processes ended with the exit codes {codes}. See the messages above.")
    trained = est.Estimator(model_fn, model_dir)
    results = [dict(np.load(os.path.join(model_dir, f"process{index}.npz"))) for index in range(processes)]
    return {name: trained.get_variable_value(name) for name in trained.get_variable_names()}, results


def by_image(results):
    """The probabilities that the processes predicted, in the order of the images."""
    order = np.argsort(np.concatenate([each["id"] for each in results]))
    return np.concatenate([each["probability"] for each in results])[order]


def main(argv):
    del argv
    logging.getLogger("jax").setLevel(logging.WARNING)  # it logs the backends that are missing
    if FLAGS.train:
        return train()
    base = FLAGS.model_dir or tempfile.mkdtemp()
    many, results = run(os.path.join(base, "many"), FLAGS.processes, FLAGS.devices)
    one, [alone] = run(os.path.join(base, "one"), 1, FLAGS.processes * FLAGS.devices)

    print(f"\nAfter {FLAGS.steps} steps of {FLAGS.batch_size} images:\n")
    for index, each in enumerate(results):
        name = f"{FLAGS.processes} x {FLAGS.devices} devices, process {index}"
        print(f"{name:24} test accuracy {each['accuracy']:.2%}, test loss {each['loss']:.6f},", end=" ")
        print(f"predicted {len(each['id'])} of {NUM_TEST}")
    name = f"1 x {FLAGS.processes * FLAGS.devices} devices"
    print(f"{name:24} test accuracy {alone['accuracy']:.2%}, test loss {alone['loss']:.6f}\n")
    differences = {
        "the losses": max(abs(each["loss"] - alone["loss"]) for each in results),
        "the predictions": np.abs(by_image(results) - by_image([alone])).max(),
        **{name: np.abs(many[name] - one[name]).max() for name in one if not name.startswith("optimizer/")},
    }
    for name, difference in differences.items():
        print(f"{name:24} differ by at most {difference:.1e}")
    if max(differences.values()) > 1e-4:
        sys.exit("That is more than the rounding of float32.")
    print("\nThat is the rounding of float32.")


if __name__ == "__main__":
    app.run(main)
