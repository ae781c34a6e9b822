"""What a plain script shows of the log, and a program that has configured logging."""

import os
import re
import subprocess
import sys

import pytest

from estimator.runtime import _log_lines

SCRIPT = """
import numpy as np, optax
import estimator as est

def model_fn(features, labels, mode):
    w = est.get_variable("w", (2, 1))
    loss = est.losses.mean_squared_error(labels, features @ w)
    return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss))

x = np.ones((8, 2), np.float32)
estimator = est.Estimator(model_fn, config=est.RunConfig(log_step_count_steps=100, {fields}), model_dir={folder!r})
estimator.train(lambda: [(x, x[:, :1])] * 3)
estimator.evaluate(lambda: [(x, x[:, :1])])
"""
# What an import of the library and an Estimator do about lines, without what else they do, which takes seconds.
ALONE = """
import runpy
ours = runpy.run_path({path!r})
{after}
ours["show_log_lines"]()
ours["absl_logging"].info("Using config: RunConfig()")
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


def said(script):
    """The lines on stderr; stdout stays the script's own."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert not done.stdout
    return done.stderr.splitlines()


def said_alone(before="", after="", later=""):
    return said(before + ALONE.format(path=_log_lines.__file__, after=after) + later)


@pytest.mark.slow
def test_a_plain_script_shows_its_progress_unless_it_wants_none(tmp_path):
    for line, shown in zip(LINES, said(SCRIPT.format(fields="", folder=f"{tmp_path}/a")), strict=True):
        assert re.fullmatch("INFO:absl:" + line, shown)
    assert said(SCRIPT.format(fields="verbose=False", folder=f"{tmp_path}/b")) == []


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
def test_the_lines_are_shown_where_a_program_has_not_turned_them_off(before, begin):
    *others, line = said_alone(before)
    assert re.fullmatch(begin + LINES[0], line)
    assert not others or "use_absl_handler" in before  # which says where its lines go


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),  # the import
    [
        ("import logging; logging.basicConfig(filename='/dev/stderr')", ""),  # a file that the test can read
        ("import logging; logging.basicConfig(level=logging.WARNING); import orbax.checkpoint", ""),
        ("import logging; logging.getLogger().setLevel(logging.ERROR)", ""),
        ("import logging; logging.getLogger('absl').setLevel(logging.ERROR)", ""),
        ("", "import logging; logging.basicConfig(level=logging.WARNING)"),
        ("", "from absl import logging; logging.set_verbosity(logging.WARNING)"),
    ],
)
def test_a_program_that_wants_none_shows_none(before, after):
    assert said_alone(before, after) == []


@pytest.mark.slow
def test_a_level_of_the_root_logger_is_obeyed_at_any_time():
    set_level = "import logging; logging.getLogger().setLevel(logging.WARNING)\n"
    (line,) = said_alone(later=set_level + 'ours["absl_logging"].info("Not shown")')
    assert re.fullmatch("INFO:absl:" + LINES[0], line)
