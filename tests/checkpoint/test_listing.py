"""What `est.checkpoints` lists."""

import os
import shutil
import time

import pytest
from testing.estimators import make, times

import estimator as est
from estimator import inspect
from estimator.checkpoint import _model_dir
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
    assert infos[-1]._fields == ("path", "step", "time", "bytes", "pinned", "damage")


def test_a_directory_without_checkpoints_has_none(tmp_path):
    assert est.checkpoints(tmp_path) == []


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no directory '.*/missing'. Give the `model_dir` of an Esti"):
        est.checkpoints(tmp_path / "missing")


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(tmp_path, monkeypatch):
    make(tmp_path, save_checkpoints_steps=2).train(times(3))
    list_written = _model_dir.list_written

    def removed_meanwhile(directory):
        listed = list_written(directory)
        shutil.rmtree(listed[0].path)
        return listed

    monkeypatch.setattr(_model_dir, "list_written", removed_meanwhile)
    assert [each.step for each in est.checkpoints(tmp_path)] == [2, 3]


def test_where_training_has_removed_all_that_was_listed_its_newer_ones_are(tmp_path, monkeypatch):
    estimator = make(tmp_path, keep_checkpoint_max=1).train(times(2))
    list_written, lists = _model_dir.list_written, []

    def trained_meanwhile(directory):
        lists.append(list_written(directory))
        if len(lists) == 1:
            estimator.train(times(1))
        return lists[-1]

    monkeypatch.setattr(_model_dir, "list_written", trained_meanwhile)
    assert [each.step for each in est.checkpoints(tmp_path)] == [3]


def test_the_command_verifies_what_is_still_there(tmp_path, monkeypatch, capsys):
    make(tmp_path).train(times(2))
    has_manifest = inspect.has_manifest

    def removed_meanwhile(path):
        if path.endswith("ckpt-0"):
            shutil.rmtree(path)
        return has_manifest(path)

    monkeypatch.setattr(inspect, "has_manifest", removed_meanwhile)
    inspect.main([str(tmp_path), "--verify"])
    assert capsys.readouterr().out == f"{tmp_path}/ckpt-2: sound\n"
