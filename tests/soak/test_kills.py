"""A few cases of the soak of trainings that are ended by signals; `python tests/soak/kills.py` makes more."""

import signal

import pytest
from soak import kills


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_training_ended_by_each_signal_ends_like_one_that_was_not(tmp_path):
    soak = kills.Soak(tmp_path, seed=1)
    soak.run(4)
    assert soak.differ == []
    assert soak.codes.pop("SIGTERM") == {75: 1}
    assert soak.codes.pop("Ctrl-C") == {-signal.SIGINT: 1}
    assert list(soak.codes.values()) == [{-signal.SIGKILL: 1}] * 2
