"""A checkpoint is the one of the step at which it was written, whatever its folder is called now."""

import pytest
from testing.estimators import endless, make, same_bits

import estimator as est


@pytest.mark.slow
def test_a_renamed_checkpoint_hides_no_later_save(tmp_path, caplog):
    make(tmp_path / "run", save_checkpoints_steps=2).train(endless, max_steps=4)
    (tmp_path / "run" / "ckpt-2").rename(tmp_path / "run" / "ckpt-99")
    resumed = make(tmp_path / "run", save_checkpoints_steps=2)
    assert resumed.latest_checkpoint().endswith("ckpt-4")
    resumed.train(endless, max_steps=8)
    assert resumed.latest_checkpoint().endswith("ckpt-8")
    assert [each.step for each in est.checkpoints(tmp_path / "run")] == [0, 2, 4, 6, 8]
    assert same_bits(resumed, make(tmp_path / "undisturbed").train(endless, max_steps=8))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_newest_checkpoint_resumes_at_its_own_step_under_another_name(tmp_path, caplog):
    make(tmp_path).train(endless, max_steps=4)
    (tmp_path / "ckpt-4").rename(tmp_path / "ckpt-6")
    resumed = make(tmp_path).train(endless, max_steps=6)
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert line == f"{tmp_path / 'ckpt-6'} was written at step 4, and is used as the checkpoint of that step."
    assert any("written at step 4, is replaced" in record.getMessage() for record in caplog.records)
    assert resumed.get_variable_value("global_step") == 6
    assert [each.step for each in est.checkpoints(tmp_path)] == [0, 6]
