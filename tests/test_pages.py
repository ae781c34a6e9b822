"""The pages of the tutorial and of how to do things: their code runs, and prints what they say."""

import ast
import pathlib

import pytest
from testing import pages

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(
    path.relative_to(DOCS).as_posix() for folder in ("tutorial", "how_to") for path in DOCS.glob(f"{folder}/*.md")
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_what_it_says(name):
    expected = [output for _, output in pages.blocks(DOCS / name)]
    printed = pages.run(DOCS / name)
    differing = [pages.differences(a, b, 0.1) for a, b in zip(expected, printed, strict=True) if a is not None]
    assert not any(differing), "\n".join(line for lines in differing for line in lines)


@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_python_is_one_that_is_run(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text.count("```python\n") == len(pages.blocks(DOCS / name)) > 0
    for code, _ in pages.blocks(DOCS / name):
        ast.parse(code)


def test_what_a_page_says_may_differ_in_times_and_in_last_digits_alone():
    said = "loss = 0.350658, step = 100 (2656 steps/sec)\n"
    assert not pages.differences(said, "loss = 0.35, step = 100\n", 0.1)
    assert pages.differences(said, "loss = 0.55, step = 100 (2656 steps/sec)\n", 0.1)
    assert pages.differences(said, "loss = 0.350658, step = 200\n", 0.1)
