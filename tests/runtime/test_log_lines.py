"""What a plain script shows of the log, and a program that has configured logging."""

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np, optax
import estimator as est
{after}

def model_fn(features, labels, mode):
    w = est.get_variable("w", (2, 1))
    loss = est.losses.mean_squared_error(labels, features @ w)
    return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))

estimator = est.Estimator(model_fn, config=est.RunConfig(log_step_count_steps=100, {fields}), model_dir={folder!r})
"""
RUNS = """
x = np.ones((8, 2), np.float32)
estimator.train(lambda: [(x, x[:, :1])] * 3)
estimator.evaluate(lambda: [(x, x[:, :1])])
"""
LINES = [
    r"Using config: RunConfig\(.*\)",
    r"Calling model_fn in mode 'train' and compiling it; the first batch takes longer\.",
    r"1 device: cpu:0, 8 rows; 2 trained numbers in 1 variable",
    r"loss = [\d.e-]+, step = 1",
    r"Loss for final step: [\d.e-]+\.",
    r"Calling model_fn in mode 'eval' and compiling it; the first batch takes longer\.",
    r"1 device: cpu:0, 8 rows; 2 numbers in 1 variable",
    r"Evaluation: global_step = 3, loss = [\d.e-]+",
]


def said(folder, before, fields="", after="", runs=""):
    """The lines on stderr; stdout stays the script's own."""
    program = before + SCRIPT.format(fields=fields, after=after, folder=str(folder)) + runs
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert not done.stdout
    return done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "begin"),
    [
        ("", "INFO:absl:"),
        ("import orbax.checkpoint", "INFO:absl:"),  # which logs when it is imported
        ("import logging; logging.basicConfig(level=logging.INFO, format='mine: %(message)s')", "mine: "),
        ("from absl import logging; logging.use_absl_handler(); logging.set_verbosity(logging.INFO)", r"I\d{4} .*\] "),
    ],
)
def test_a_plain_script_shows_its_progress(tmp_path, before, begin):
    lines, ours = (said(tmp_path, before), LINES[:1]) if before else (said(tmp_path, before, runs=RUNS), LINES)
    if begin != "INFO:absl:":  # then jax and others say what they do, too
        lines = [line for line in lines if re.fullmatch(begin + ours[0], line)]
    for line, shown in zip(ours, lines, strict=True):
        assert re.fullmatch(begin + line, shown)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "fields", "after", "runs"),  # before and after the import
    [
        ("", "verbose=False", "", RUNS),
        ("import logging; logging.basicConfig(filename='/dev/stderr')", "", "", ""),  # a file that the test can read
        ("import logging; logging.basicConfig(level=logging.WARNING); import orbax.checkpoint", "", "", ""),
        ("import logging; logging.getLogger().setLevel(logging.ERROR)", "", "", ""),
        ("", "", "import logging; logging.basicConfig(level=logging.WARNING)", ""),
        ("", "", "from absl import logging; logging.set_verbosity(logging.WARNING)", ""),
    ],
)
def test_a_program_that_wants_none_shows_none(tmp_path, before, fields, after, runs):
    assert said(tmp_path, before, fields, after, runs) == []


@pytest.mark.slow
def test_a_level_of_the_root_logger_is_obeyed_at_any_time(tmp_path):
    set_level = "import logging; logging.getLogger().setLevel(logging.WARNING)\n"
    (config,) = said(tmp_path, before="", runs=f"{set_level}est.Estimator(model_fn, {str(tmp_path)!r})")
    assert re.fullmatch("INFO:absl:" + LINES[0], config)
