"""The notebooks of examples/notebooks/ run from their first to their last cell, and print what they contain."""

import pathlib

import pytest
from testing.website import notebooks, pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_contains(path):
    nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel, of the extra test, are not installed")
    pytest.importorskip("nbclient", reason="nbclient and ipykernel, of the extra test, are not installed")
    pytest.importorskip("ipykernel", reason="nbclient and ipykernel, of the extra test, are not installed")
    expected = notebooks.printed(nbformat.read(path, as_version=4))
    printed = notebooks.printed(notebooks.run(path))
    assert any(expected)
    differing = [pages.differences(a, b, 0.1) for a, b in zip(expected, printed, strict=True)]
    assert not any(differing), "\n".join(line for lines in differing for line in lines)
