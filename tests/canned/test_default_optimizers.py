"""The default optimizers of linear models and of wide & deep, against TensorFlow's formulas in numpy, on census rows.

The formulas themselves are held against TensorFlow's numbers by `tests/train/test_golden_optimizers.py`.
"""

import math

import numpy as np
import pytest
from testing.towers import cpus

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

fc = est.feature_column
ROWS, STEPS, HIDDEN, JOBS = 24, 6, 5, 7


def census():
    """A small file as the one of the wide & deep tutorial, by formulas: age, hours, occupation, and income over 50K."""
    n = np.arange(ROWS)
    age = ((n * 7) % 13 / 13).astype(np.float32)
    hours = ((n * 5) % 11 / 11).astype(np.float32)
    job = (n * 3 % JOBS).astype(np.int32)
    return {"age": age, "hours": hours, "job": job}, (age + hours + job % 3 / 3 > 1.2).astype(np.int32)


FEATURES, LABELS = census()
NUMBERS = [fc.numeric_column("age"), fc.numeric_column("hours")]
JOB = fc.categorical_column_with_identity("job", JOBS)
DENSE = np.stack([FEATURES["age"], FEATURES["hours"]], 1).astype(np.float64)


class Ftrl:
    """TensorFlow's ApplyFtrl, with `learning_rate_power=-0.5`."""

    def __init__(self, rate, l1=0.0):
        self.rate, self.l1, self.accum, self.linear = rate, l1, 0.1, 0.0

    def __call__(self, value, gradient):
        more = self.accum + gradient**2
        self.linear = self.linear + gradient - (np.sqrt(more) - np.sqrt(self.accum)) / self.rate * value
        self.accum = more
        shrunk = np.sign(self.linear) * self.l1 - self.linear
        return np.where(np.abs(self.linear) > self.l1, shrunk / (np.sqrt(more) / self.rate), 0.0)


class Adagrad:
    """TensorFlow's ApplyAdagrad."""

    def __init__(self, rate):
        self.rate, self.accum = rate, 0.1

    def __call__(self, value, gradient):
        self.accum = self.accum + gradient**2
        return value - self.rate * gradient / np.sqrt(self.accum)


LINEAR = {"linear/linear_model/job/weights": np.eye(JOBS)[FEATURES["job"]], "linear/linear_model/bias_weights": 1.0}
LINEAR |= {f"linear/linear_model/{name}/weights": FEATURES[name][:, None] for name in ("age", "hours")}
DNN = ("dnn/hiddenlayer_0/kernel", "dnn/hiddenlayer_0/bias", "dnn/logits/kernel", "dnn/logits/bias")


def steps_by_hand(start, optimizers):
    """The variables after all steps of the logistic regression, of those that `start` has."""
    v = {name: np.asarray(value, np.float64) for name, value in start.items()}
    own = {name: optimizers[name.split("/")[0]]() for name in v}
    inputs = {name: np.broadcast_to(x, (ROWS, len(v[name]))) for name, x in LINEAR.items() if name in v}
    for _ in range(STEPS):
        logits = sum((x @ v[name].reshape(-1, 1) for name, x in inputs.items()), np.zeros((ROWS, 1)))
        if DNN[0] in v:
            before = DENSE @ v[DNN[0]] + v[DNN[1]]
            hidden = np.maximum(before, 0)
            logits = logits + hidden @ v[DNN[2]] + v[DNN[3]]
        delta = (1 / (1 + np.exp(-logits)) - LABELS[:, None]) / ROWS
        gradients = {name: (x.T @ delta).reshape(v[name].shape) for name, x in inputs.items()}
        if DNN[0] in v:
            inner = delta @ v[DNN[2]].T * (before > 0)
            gradients |= dict(zip(DNN, (DENSE.T @ inner, inner.sum(0), hidden.T @ delta, delta.sum(0)), strict=True))
        v = {name: own[name](value, gradients[name]) for name, value in v.items()}
    return v


class Start(est.Hook):
    """Remembers the variables at the beginning."""

    def after_create_state(self, context):
        self.variables = {name: np.array(value) for name, value in context.state.variables.items()}


def trained(canned, towers=0):
    estimator, start = canned, Start()
    if towers:
        estimator = est.Estimator(replicate_model_fn(canned.model_fn, devices=cpus(towers)), canned.model_dir)
    estimator.train(lambda: [(FEATURES, LABELS)] * STEPS, [start])
    return estimator, start.variables


def matches(estimator, start, optimizers):
    for name, value in steps_by_hand(start, optimizers).items():
        np.testing.assert_allclose(estimator.get_variable_value(name), value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.quick
def test_a_linear_classifier_has_ftrl(tmp_path):
    estimator, start = trained(est.LinearClassifier([*NUMBERS, JOB], tmp_path))
    matches(estimator, start, {"linear": lambda: Ftrl(0.2)})
    assert estimator.get_learning_rates() == {"Ftrl": pytest.approx(0.2)}


@pytest.mark.slow
def test_ftrl_from_other_values_than_zeros_with_l1(tmp_path):
    """Where Ftrl is not Adagrad: L1 makes weights exactly zero."""
    first, _ = trained(est.LinearClassifier([*NUMBERS, JOB], tmp_path / "first"))
    optimizer = est.train.FtrlOptimizer(0.3, l1_regularization_strength=0.15)
    linear = est.LinearClassifier(
        [*NUMBERS, JOB], tmp_path / "second", optimizer=optimizer, warm_start_from=first.model_dir
    )
    estimator, start = trained(linear)
    matches(estimator, start, {"linear": lambda: Ftrl(0.3, 0.15)})
    weights = estimator.get_variable_value("linear/linear_model/job/weights")
    assert 0 < (weights == 0).sum() < JOBS and start["linear/linear_model/job/weights"].all()


@pytest.mark.slow
def test_wide_and_deep_has_ftrl_and_adagrad(tmp_path):
    both = est.DNNLinearCombinedClassifier(
        tmp_path, linear_feature_columns=[*NUMBERS, JOB], dnn_feature_columns=NUMBERS, dnn_hidden_units=[HIDDEN]
    )
    estimator, start = trained(both)
    matches(estimator, start, {"linear": lambda: Ftrl(min(0.005, 1 / math.sqrt(3))), "dnn": lambda: Adagrad(0.001)})
    assert estimator.get_learning_rates() == pytest.approx({"Adagrad": 0.001, "Ftrl": 0.005})


@pytest.mark.slow
def test_wide_and_deep_on_towers(tmp_path):
    both = est.DNNLinearCombinedClassifier(
        tmp_path,
        linear_feature_columns=[*NUMBERS, JOB],
        dnn_feature_columns=NUMBERS,
        dnn_hidden_units=[HIDDEN],
        linear_optimizer=TowerOptimizer(est.train.FtrlOptimizer(0.2)),
        dnn_optimizer=TowerOptimizer(est.train.AdagradOptimizer(0.05)),
    )
    estimator, start = trained(both, towers=4)
    matches(estimator, start, {"linear": lambda: Ftrl(0.2), "dnn": lambda: Adagrad(0.05)})


@pytest.mark.slow
def test_a_network_may_be_trained_by_ftrl(tmp_path):
    estimator, start = trained(est.DNNClassifier([HIDDEN], NUMBERS, tmp_path, optimizer="Ftrl"))
    matches(estimator, start, {"dnn": lambda: Ftrl(0.05)})
