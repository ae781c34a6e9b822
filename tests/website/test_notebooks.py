"""The notebooks of examples/notebooks/ run from their first to their last cell, and print what they contain."""

import pathlib

import pytest
from testing.website import notebooks, pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def import_nbformat():
    reason = "nbclient and ipykernel, of the extra test-all, are not installed"
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason=reason)
    return pytest.importorskip("nbformat", reason=reason)


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_contains(path):
    expected = notebooks.printed(import_nbformat().read(path, as_version=4))
    printed = notebooks.printed(notebooks.run(path))
    assert any(expected)
    differing = [pages.differences(a, b, 0.1) for a, b in zip(expected, printed, strict=True)]
    assert not any(differing), "\n".join(line for lines in differing for line in lines)


CELLS = """
import estimator as est
import numpy as np

def model_fn(features, labels, mode):
    loss = (est.get_variable("w", (3,)) * features).mean()
    return est.EstimatorSpec(mode, loss=loss, train_op=est.train.AdamOptimizer().minimize(loss))

x = np.ones((2, 3), np.float32)
est.Estimator(model_fn, "model", est.RunConfig(seed=3)).train(lambda: [x] * 7, steps=7)
---
est.Estimator(model_fn, "model").evaluate(lambda: [x] * 5, steps=5)
---
est.Estimator(model_fn, "silent", est.RunConfig(verbose=False)).train(lambda: [x])
---
est.summarize(model_fn, x)
---
est.goodput("model")
---
est.checkpoints("model")
---
est.plot_history("model")
"""


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_notebook_shows_bars_tables_and_pictures():
    pytest.importorskip("matplotlib")
    new = import_nbformat().v4
    notebook = new.new_notebook(cells=[new.new_code_cell(cell.strip()) for cell in CELLS.split("---")])
    notebooks.execute(notebook)
    outputs = [cell.outputs for cell in notebook.cells]
    # A widget where ipywidgets is installed, else text.
    texts = ["".join(each.get("text", "") + each.get("data", {}).get("text/plain", "") for each in o) for o in outputs]
    assert "/7 [" in texts[0] and "step/s" in texts[0] and "Loss for final step" in texts[0]
    assert "Evaluation: " in texts[1] and "batch/s" in texts[1]
    assert "step/s" not in texts[2]
    shown = [each[-1].data for each in outputs]
    for i, cell in ((0, "config.seed"), (3, "variable"), (4, "process"), (5, "step")):
        assert f">{cell}</t" in shown[i]["text/html"] and "<table>" in shown[i]["text/html"]
    assert shown[6]["image/png"].startswith("iVBOR")
