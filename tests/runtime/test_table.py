"""What is printed as a table is one in a notebook, too."""

import re
import xml.etree.ElementTree

import pytest
from testing.estimators import make, times

import estimator as est
from estimator.checkpoint._model_dir import CheckpointInfo, CheckpointList
from estimator.loop._memory_report import MemoryReport, MemoryUse

USE = MemoryUse(1, 20_000, 3, 4, 5, 6)
ROWS = (est.VariableSummary("net/w<0>", (2, 3), "float32", 24, True), est.VariableSummary("z", (), "int32", 4, False))
SHOWN = {
    "summary": est.ModelSummary(est.ModeKeys.TRAIN, ROWS, 48, 1e6, USE),
    "several programs": est.ModelSummary(est.ModeKeys.TRAIN, ROWS, 48, None, None),
    "memory": MemoryReport({"a & b": USE, "c": USE}),
    "goodput": est.Goodput(7, 0.0, 10.0, ({"input": 1.0, "host": 4.0, "device": 5.0},)),
    "checkpoints": CheckpointList(
        [CheckpointInfo("ckpt-1", 1, 0.0, 10, True), CheckpointInfo("x", 2, 1.0, 9, 0, "<torn>")]
    ),
    "no checkpoints": CheckpointList(),
}


def check(shown):
    page, text = xml.etree.ElementTree.fromstring(shown._repr_html_()), str(shown)
    words = " ".join(page.itertext()).split()
    assert words == re.sub("^-+$", "", text, flags=re.MULTILINE).split()
    rows = page.findall(".//tr")
    assert len({len(row) for row in rows}) == 1 and 1 <= len(rows) <= len(text.splitlines())


@pytest.mark.parametrize("shown", SHOWN.values(), ids=SHOWN)
def test_a_notebook_shows_the_table_that_is_printed(shown):
    check(shown)


def test_an_estimator_is_a_table_of_what_is_set(tmp_path):
    estimator = est.Estimator(lambda features, params: None, tmp_path, est.RunConfig(seed=3), {"rate": 0.1})
    check(estimator)
    cells = [line.split("  ", 1) for line in str(estimator).splitlines()]
    assert {name: value.strip() for name, value in cells[1:]} == {
        "model_fn": "<lambda>",
        "model_dir": str(tmp_path),
        "newest checkpoint": "none yet",
        "params": "{'rate': 0.1}",
        "config.seed": "3",
    }
    assert cells[0] == ["Estimator"]
    assert "step 2" in str(make(tmp_path / "trained").train(times(2)))
