"""What `est.checkpoints` lists."""

import os
import shutil
import time

import pytest
from testing.estimators import make, times

import estimator as est
from estimator.checkpoint._checkpoints import Checkpoints


def test_each_checkpoint_is_listed_with_step_time_bytes_and_pin(tmp_path):
    before = time.time()
    estimator = make(tmp_path, save_checkpoints_steps=2).train(times(3))
    Checkpoints(tmp_path).pin(str(tmp_path / "ckpt-2"))
    (tmp_path / "ckpt-9").mkdir()
    infos = est.checkpoints(tmp_path)
    assert [(each.path, each.step, each.pinned) for each in infos] == [
        (str(tmp_path / "ckpt-0"), 0, False),
        (str(tmp_path / "ckpt-2"), 2, True),
        (str(tmp_path / "ckpt-3"), 3, False),
    ]
    assert before - 1 < infos[0].time < infos[1].time < infos[2].time < time.time() + 1
    for each in infos:
        files = [os.path.join(folder, name) for folder, _, names in os.walk(each.path) for name in names]
        assert each.bytes == sum(map(os.path.getsize, files)) > 100
    path, step, *_ = infos[-1]
    assert path == estimator.latest_checkpoint() and estimator.evaluate(times(1), checkpoint_path=path)
    assert infos[-1]._fields == ("path", "step", "time", "bytes", "pinned")


def test_a_directory_without_checkpoints_has_none(tmp_path):
    assert est.checkpoints(tmp_path) == []


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no directory '.*/missing'. Give the `model_dir` of an Esti"):
        est.checkpoints(tmp_path / "missing")


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(tmp_path, monkeypatch):
    make(tmp_path, save_checkpoints_steps=2).train(times(3))
    paths = Checkpoints.paths

    def removed_meanwhile(self):
        listed = paths(self)
        shutil.rmtree(listed[0])
        return listed

    monkeypatch.setattr(Checkpoints, "paths", removed_meanwhile)
    assert [each.step for each in est.checkpoints(tmp_path)] == [2, 3]
