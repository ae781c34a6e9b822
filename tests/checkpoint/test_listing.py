"""What `est.checkpoints` lists."""

import os
import shutil
import time

import pytest
from testing.estimators import endless, make, same_bits, times

import estimator as est
from estimator import inspect
from estimator.checkpoint import _model_dir
from estimator.checkpoint._checkpoint import Checkpoint


def test_each_checkpoint_is_listed_with_step_time_bytes_and_pin(tmp_path):
    before = time.time()
    estimator = make(tmp_path, save_checkpoints_steps=2).train(times(3))
    Checkpoint(str(tmp_path / "ckpt-2")).pin()
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


def test_a_directory_without_checkpoints_has_none_and_one_that_is_not_there_is_an_error(tmp_path):
    assert est.checkpoints(tmp_path) == []
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
    is_sealed = Checkpoint.is_sealed

    def removed_meanwhile(self):
        if self.path.endswith("ckpt-0"):
            shutil.rmtree(self.path)
        return is_sealed(self)

    monkeypatch.setattr(Checkpoint, "is_sealed", removed_meanwhile)
    inspect.main([str(tmp_path), "--verify"])
    assert capsys.readouterr().out == f"{tmp_path}/ckpt-2: sound\n"


# A checkpoint is the one of the step at which it was written, whatever its folder is called now.


@pytest.mark.slow
def test_a_renamed_checkpoint_hides_no_later_save(tmp_path, errors):
    make(tmp_path / "run", save_checkpoints_steps=2).train(endless, max_steps=4)
    (tmp_path / "run" / "ckpt-2").rename(tmp_path / "run" / "ckpt-99")
    resumed = make(tmp_path / "run", save_checkpoints_steps=2)
    assert resumed.latest_checkpoint().endswith("ckpt-4")
    resumed.train(endless, max_steps=8)
    assert resumed.latest_checkpoint().endswith("ckpt-8")
    assert [each.step for each in est.checkpoints(tmp_path / "run")] == [0, 2, 4, 6, 8]
    assert same_bits(resumed, make(tmp_path / "undisturbed").train(endless, max_steps=8))
    assert not errors()


def test_the_newest_checkpoint_resumes_at_its_own_step_under_another_name(tmp_path, caplog, errors):
    make(tmp_path).train(endless, max_steps=4)
    (tmp_path / "ckpt-4").rename(tmp_path / "ckpt-6")
    resumed = make(tmp_path).train(endless, max_steps=6)
    (line,) = errors()
    assert line == f"{tmp_path / 'ckpt-6'} was written at step 4, and is used as the checkpoint of that step."
    assert any("written at step 4, is replaced" in record.getMessage() for record in caplog.records)
    assert resumed.get_variable_value("global_step") == 6
    assert [each.step for each in est.checkpoints(tmp_path)] == [0, 6]


def test_folders_that_were_swapped_are_read_at_their_own_steps_with_a_line(tmp_path, errors):
    make(tmp_path, save_checkpoints_steps=2).train(endless, max_steps=4)
    for old, new in (("ckpt-2", "aside"), ("ckpt-4", "ckpt-2"), ("aside", "ckpt-4")):
        (tmp_path / old).rename(tmp_path / new)
    assert make(tmp_path).evaluate(times(1))["global_step"] == 4
    assert make(tmp_path).evaluate(times(1), checkpoint_path=str(tmp_path / "ckpt-4"))["global_step"] == 2
    assert est.load_variable(tmp_path / "ckpt-4", "global_step") == 2
    lines = errors()
    assert lines == [
        f"{tmp_path / name} was written at step {step}, and is used as the checkpoint of that step."
        for name, step in (("ckpt-2", 4), ("ckpt-4", 2))
    ]
