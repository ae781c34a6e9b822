"""The summaries of runs that fail, are killed, or resume: each step once, and nothing lost."""

import math
import os
import sys

import numpy as np
import pytest
from testing.estimators import X, Y, endless, make
from testing.summaries import Fails, changing, read, scalars, steps_of

import estimator as est


@pytest.mark.covers("4 SummarySaverHook")
def test_a_resumed_run_shows_each_step_once(tmp_path):
    config = {"save_summary_steps": 10, "save_checkpoints_steps": 100}
    with pytest.raises(RuntimeError, match="it fails here"):
        make(tmp_path, **config).train(changing, hooks=[Fails(150)])
    assert list(read(tmp_path)) == list(range(1, 150, 10))  # what was known when it failed, too
    make(tmp_path, **config | {"save_summary_steps": 40}).train(changing, steps=30)
    want = [*range(1, 100, 10), 121]
    assert list(read(tmp_path)) == want == steps_of(scalars(tmp_path)["loss"])


def test_a_loss_that_is_nan_is_in_the_history(tmp_path):
    def input_fn():
        return [(X * (np.nan if i == 21 else 1), Y) for i in range(1, 40)]

    with pytest.raises(est.NanLossDuringTrainingError, match="at step 21"):
        make(tmp_path, save_summary_steps=5).train(input_fn)
    losses = read(tmp_path)
    assert [step for step, loss in losses.items() if not math.isnan(loss)] == [1, 6, 11, 16]
    assert math.isnan(losses[21])


def open_files():
    descriptors = os.listdir("/dev/fd")
    return [os.readlink(f"/dev/fd/{fd}") for fd in descriptors if os.path.exists(f"/dev/fd/{fd}")]


@pytest.mark.skipif(sys.platform != "linux", reason="lists the open files as Linux does")
def test_files_are_closed_whatever_happened(tmp_path):
    class Writers(est.Hook):
        def after_create_state(self, context):
            self.of_run = [context.events(), context.events(str(tmp_path / "another"))]
            assert context.events(f"{context.model_dir}/.") is self.of_run[0]
            self.of_run[1].write(0, 0.0, {"loss": 1.0})

    for name, others in (("good", []), ("bad", [Fails(2)])):
        hook = Writers()
        try:
            make(tmp_path / name).train(endless, steps=3, hooks=[hook, *others])
        except RuntimeError:
            assert others
        assert not [path for path in open_files() if path.startswith(str(tmp_path))]
    assert list(read(tmp_path / "bad")) == [1]
