"""est.plot_history: a picture of the curves."""

import os
import sys

import pytest
from testing.estimators import endless, make, times
from testing.summaries import showing, write

import estimator as est

figure = pytest.importorskip("matplotlib.figure")

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    saved, save = [], figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: (saved.append(self), save(self, path)))
    return saved


def curves(panel):
    return {line.get_label(): [tuple(map(float, point)) for point in line.get_xydata()] for line in panel.lines}


def test_a_run_and_its_evaluations_become_a_png_which_a_notebook_shows(tmp_path):
    estimator = make(tmp_path, showing, save_summary_steps=2).train(endless, steps=6)
    estimator.evaluate(times(1))
    estimator.evaluate(times(1), name="more")
    sys.modules.pop("matplotlib.pyplot", None)
    assert est.plot_history(tmp_path) == str(tmp_path / "history.png")
    assert "matplotlib.pyplot" not in sys.modules
    assert est.plot_history(estimator.model_dir, tmp_path / "other.png") == str(tmp_path / "other.png")
    for name in ("history.png", "other.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
        assert os.path.getsize(tmp_path / name) > 1000
    picture, drawing = est.plot_history(tmp_path), est.plot_history(tmp_path, tmp_path / "drawing.svg")
    assert picture._repr_png_() == (tmp_path / "history.png").read_bytes() and picture._repr_svg_() is None
    assert drawing._repr_svg_().startswith("<?xml") and drawing._repr_png_() is None


def test_there_is_a_panel_for_each_tag_with_the_curves_that_have_it(tmp_path, figures):
    write(tmp_path, {1: {"loss": 3.0, "rate": 7.0}, 101: {"loss": 2.0}})
    write(tmp_path / "eval", {101: {"accuracy": 0.5, "loss": 2.5}})
    write(tmp_path / "eval_more", {101: {"accuracy": 0.75}})
    write(tmp_path / "evaluations", {5: {"unknown": 1.0}})
    est.plot_history(tmp_path)
    (figure,) = figures
    panels = {panel.get_title(): curves(panel) for panel in figure.axes}
    assert list(panels) == ["loss", "accuracy", "rate"]
    assert panels["loss"] == {"train": [(1, 3), (101, 2)], "eval": [(101, 2.5)]}
    assert panels["accuracy"] == {"eval": [(101, 0.5)], "eval_more": [(101, 0.75)]}
    assert panels["rate"] == {"train": [(1, 7)]}
    colors = {line.get_label(): line.get_color() for panel in figure.axes for line in panel.lines}
    assert len(set(colors.values())) == 3


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    values = [1.0, float("nan"), float("inf"), 2.0]
    write(tmp_path, {step: {"loss": value, "b": 1.0, "c": 2.0, "d": 3.0} for step, value in enumerate(values, start=1)})
    assert os.path.getsize(est.plot_history(tmp_path)) > 1000


def test_an_evaluation_alone_is_enough(tmp_path, figures):
    write(tmp_path / "eval", {5: {"loss": 1.0}})
    est.plot_history(tmp_path)
    assert curves(figures[0].axes[0]) == {"eval": [(5, 1)]}


def test_without_a_history_it_says_what_writes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no history.jsonl in .*, nor in a directory of evaluations"):
        est.plot_history(tmp_path)


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"package matplotlib. Install it in your clone: pip install -e '\.\[plot\]'"):
        est.plot_history(tmp_path)
