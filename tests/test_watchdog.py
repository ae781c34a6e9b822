"""The watchdog: what it says of a run that hangs, and what it does not."""

import threading
import time

import jax
import numpy as np
import optax
import pytest
from helpers_estimator import X, Y, endless, make, times
from helpers_hooks import Noted

import estimator as est
from estimator import _checkpoint

TIMEOUT = 0.3


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stalls"


def hang(path, phase):
    """Comes back when the watchdog has seen it, or after long."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if path.exists() and f"it is in phase {phase!r}" in path.read_text():
            return
        time.sleep(0.01)


def slow_model_fn(hangs):
    def model_fn(features, labels, mode):
        if hangs.pop("compile", False):
            hangs["now"]("compile")
        w = est.get_variable("w", (2, 1), initializer=jax.nn.initializers.zeros)
        loss = est.losses.mean_squared_error(labels, features @ w)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.01)).minimize(loss))

    return model_fn
