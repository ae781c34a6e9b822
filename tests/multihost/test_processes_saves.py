"""Several processes train while their threads write a checkpoint, all parts of it or none."""

import os
import re

import pytest
from testing.cluster import shared_cluster
from testing.estimators import saved_at
from testing.outcomes import merged, run, said_by

from estimator.storage._own_folders import is_own


def test_training_continues_while_processes_write(tmp_path):
    """Nobody sees the checkpoint before the last of them has written its part."""
    for rows in run("testing.scenarios.team_saves.train_while_it_writes", str(tmp_path)):
        assert merged(rows) == {"seen": [[0]], "at_the_end": [0, 2, 4, 5], "threads": []}


@pytest.mark.parametrize(("who", "where"), [(0, "own"), (1, "own"), (0, "for all")])
def test_a_write_that_fails_in_one_is_an_error_in_all(tmp_path, who, where):
    model_dir = tmp_path / "run"
    ended = shared_cluster().run("testing.scenarios.team_saves.fail", str(model_dir), who, where)
    assert all(any("ckpt-2 could not be written: " in line for line in each.lines) for each in ended)
    rows = [merged(rows) for rows in said_by(ended)]
    assert [each["threads"] for each in rows] == [[], []]
    assert [each["at"] for each in rows] == [4, 4]  # where it was to save again
    assert (rows[who]["error"][1], rows[who]["text"]) == ("OSError", "the disk is gone")
    assert rows[1 - who]["error"][1] == "RuntimeError"
    assert re.fullmatch(
        rf"Process {who} failed in `train\(steps=None, max_steps=8\).*`: OSError: the disk is gone",
        rows[1 - who]["text"],
    )
    assert saved_at(model_dir) == [0]
    left = [name for name in os.listdir(model_dir) if "unfinished" in name]
    assert all(is_own(str(model_dir / name)) for name in left)  # the next save removes it
