"""A small model, its input, and short ways to make and look into an Estimator."""

import contextlib
import itertools
import os
import re

import jax
import numpy as np
import optax

import estimator as est

X = np.arange(8, dtype=np.float32).reshape(4, 2)
Y = X.sum(axis=1, keepdims=True)


class Linear:
    """y = x w; remembers the modes it was traced in."""

    def __init__(self, optimizer=lambda: optax.sgd(0.01, momentum=0.5)):
        self.modes = []
        self.optimizer = optimizer

    def __call__(self, features, labels, mode):
        self.modes.append(str(mode))
        w = est.get_variable("w", (2, 1), initializer=jax.nn.initializers.zeros)
        y = features @ w
        predictions = {"y": y[:, 0], "x": features}
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=predictions)
        loss = est.losses.mean_squared_error(labels, y)
        return est.EstimatorSpec(
            mode,
            predictions=predictions,
            loss=loss,
            train_op=est.Optimizer(self.optimizer).minimize(loss),
            eval_metric_ops={"label": est.metrics.mean(labels)},
        )


def endless():
    return itertools.repeat((X, Y))


class Numbers:
    """Batches 0, 1 ... with a position, as grain's iterators have one: a dict that it keeps changing."""

    def __init__(self, stop=10):
        self.stop, self.state, self.read, self.set = stop, {"next": 0}, 0, []

    def __iter__(self):
        return self

    def __next__(self):
        n = self.state["next"]
        if n == self.stop:
            raise StopIteration
        self.state["next"] += 1
        self.read += 1
        return np.full(1, n, np.int32)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = dict(state)
        self.set.append(state["next"])


def times(n, batch=(X, Y)):
    return lambda: [batch] * n


def make(model_dir, model_fn=None, params=None, **config):
    config = est.RunConfig(**({"save_checkpoints_steps": 1000} | config))
    return est.Estimator(model_fn or Linear(), model_dir, config, params)


def saved_steps(estimator):
    return saved_at(estimator.model_dir)


def saved_at(model_dir):
    names = os.listdir(model_dir) if os.path.isdir(model_dir) else []
    return sorted(int(m[1]) for m in map(re.compile(r"ckpt-(\d+)").fullmatch, names) if m)


def unfinished(model_dir):
    """The directories of checkpoints that are being written, or were when a process was killed."""
    directories = set()
    for each in os.scandir(model_dir) if os.path.isdir(model_dir) else ():
        if re.fullmatch(r"ckpt-\d+\.unfinished", each.name):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(each.path)
                directories.add((each.name, status.st_ino, status.st_ctime_ns))
    return directories


def step_of(estimator):
    return int(estimator.get_variable_value("global_step"))


def values(estimator):
    """All that the newest checkpoint holds, by name."""
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def same_bits(estimator, other):
    one, two = values(estimator), values(other)
    return one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)


def refuse(*args, **kwargs):
    raise AssertionError("must not be called")
