"""The lines at the start of a run: where it runs, what it trains, and on how many towers it was before."""

import jax
import numpy as np
import optax
import pytest
from testing.estimators import X, Y, endless, make
from testing.towers import cpus

import estimator as est
from estimator.loop._start_lines import StartLines
from replicate import BlockSync, TowerOptimizer, VariableDistribution, replicate_model_fn

NUMBERS = "10 trained numbers in 2 variables, 1 not trained"


def model_fn(features, labels, mode):
    w = est.get_variable("w", (2, 4), partition=(None, "part"))
    b = est.get_variable("b", (2, 1))
    seen = est.get_variable("seen", (3,), trainable=False)
    predictions = features @ (w.sum(1, keepdims=True) + b + seen.sum())
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=predictions)
    loss = est.losses.mean_squared_error(labels, predictions)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.01)).minimize(loss))


def towers(devices=4, **options):
    return replicate_model_fn(model_fn, devices=cpus(devices) if isinstance(devices, int) else devices, **options)


@pytest.mark.parametrize(
    ("run", "rows", "line"),
    [
        (model_fn, 8, "1 device: cpu:0, 8 rows"),
        (towers(1), 1, "1 device: cpu:0, 1 row"),
        (
            towers(
                ["cpu:1"],
                variable_distribution=VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER,
                variable_device="cpu:0",
            ),
            1_000,
            "1 device: cpu:1, 1,000 rows; variables on cpu:0",
        ),
        (towers(), 8, "4 towers on cpu:0-3, 8 rows = 4 x 2; variables mirrored"),
        (towers(["cpu:0", "cpu:2", "cpu:3"]), 6, "3 towers on cpu:0,2-3, 6 rows = 3 x 2; variables mirrored"),
        (towers(["cpu:1"] * 2), 8, "2 towers on cpu:1, 8 rows = 2 x 4"),
        (
            towers(devices_per_tower=2),
            8,
            "2 towers of 2 devices on cpu:0-3, 8 rows = 2 x 4; variables mirrored, 1 of them cut over the devices of a "
            "tower",
        ),
        (
            towers(block_sync=BlockSync(block_steps=16)),
            8,
            "4 towers on cpu:0-3, 8 rows = 4 x 2; variables averaged after blocks of 16 steps",
        ),
        *(
            (towers(variable_distribution=each), 8, f"4 towers on cpu:0-3, 8 rows = 4 x 2; variables {homes}")
            for each, homes in [
                (VariableDistribution.SHARDED, "sharded"),
                (VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER, "on cpu:0"),
                (VariableDistribution.SHARED_ROUND_ROBIN, "in turn on cpu:0-3"),
            ]
        ),
    ],
)
def test_a_training_says_where_it_runs(run, rows, line, messages):
    info = est.transform(run).info(np.ones((rows, 2), np.float32), np.ones((rows, 1), np.float32))
    StartLines().say_where(est.ModeKeys.TRAIN, info, rows)
    assert messages()[-1] == f"{line}; {NUMBERS}"


def test_frozen_variables_and_arrays_of_a_pytree_are_counted(messages):
    def frozen(features, labels, mode):
        net = est.get_variable("net", lambda key: {"a": jax.random.normal(key, (2, 1)), "b": np.zeros((30, 40))})
        loss = est.losses.mean_squared_error(labels, features @ (net["a"] + est.get_variable("w", (2, 1))))
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.01)).minimize(loss, ["net"]))

    StartLines().say_where(est.ModeKeys.TRAIN, est.transform(frozen).info(X, Y), len(X))
    assert messages()[-1].endswith("; 1,202 trained numbers in 2 variables, 1 not trained")


@pytest.mark.quick
def test_what_is_new_is_said_once(tmp_path, messages):
    estimator = make(str(tmp_path), towers(2))
    for _ in range(2):
        estimator.train(endless, steps=1)
        estimator.evaluate(lambda: [(X, Y)] * 2)
        list(estimator.predict(lambda: X[:3]))
    estimator.evaluate(lambda: (X[:1], Y[:1]))
    on, every = "2 towers on cpu:0-1", "13 numbers in 3 variables"
    assert [line for line in messages() if "2 towers on cpu:" in line] == [
        f"{on}, 4 rows = 2 x 2; variables mirrored; {NUMBERS}",
        f"{on}, 4 rows = 2 x 2; variables mirrored; {every}",
        f"{on}, 3 rows = 2 x 1 + 1; variables mirrored; {every}",
    ]


@pytest.mark.slow
def test_a_run_that_resumes_on_another_number_of_towers_says_so(tmp_path, messages):
    for run in (towers(2), towers(2), model_fn, towers(["cpu:0"] * 4)):
        make(str(tmp_path), run).train(endless, steps=1)
    assert [line for line in messages() if line.startswith("It resumes")] == [
        "It resumes at step 2 of a run on 2 towers, now on 1.",
        "It resumes at step 3 of a run on 1 tower, now on 4.",
    ]


@pytest.mark.parametrize("chosen", [None, "jax_platforms", "CUDA_VISIBLE_DEVICES"])
def test_accelerators_that_jax_does_not_find_are_a_warning(chosen, messages, monkeypatch):
    monkeypatch.setattr("glob.glob", lambda pattern: [pattern.replace("[0-9]*", "0")] * ("nvidia" in pattern))
    monkeypatch.setattr("absl.logging.log_first_n", lambda level, text, n, *args: est_log(text % args))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines = []
    est_log = lines.append
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "cpu" if chosen == "jax_platforms" else None)
    if chosen == "CUDA_VISIBLE_DEVICES":
        monkeypatch.setenv(chosen, "")
    try:
        StartLines().say_where(est.ModeKeys.TRAIN, est.transform(model_fn).info(X, Y), len(X))
    finally:
        jax.config.update("jax_platforms", before)
    begin = "This host has accelerators (/dev/nvidia0), but jax finds none, and runs on the CPU. Install the jax for"
    assert [line.startswith(begin) and "how_to/install.md" in line for line in lines] == [True] * (chosen is None)
