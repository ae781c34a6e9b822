"""The pages of the tutorial, how-to pages and one on the frame print what they say; the errors they name are there."""

import ast
import functools
import importlib.util
import pathlib
import re

import pytest
from testing.website import pages
from testing.website.scripts import run_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(DOCS).as_posix() for folder in ("tutorial", "how_to") for path in DOCS.glob(f"{folder}/*.md")
) + ["explanation/frame.md"]

NEEDED = {  # by page, libraries that the extra `test` leaves out
    "how_to/data_loaders.md": ("datasets", "tensorflow", "torch", "torchdata"),
    "how_to/sweep.md": ("optuna",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_what_it_says(name):
    missing = [library for library in NEEDED.get(name, ()) if not importlib.util.find_spec(library)]
    if missing:
        pytest.skip(f"without {missing}")
    expected = [output for _, output in pages.blocks(DOCS / name)]
    printed = pages.run(DOCS / name, functools.partial(run_script, MPLBACKEND="Agg"))
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


def literals(path):
    """The strings in a source file, with "..." for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[-+.\d]*[a-z]", "...", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_every_message_that_troubleshooting_quotes_is_one_of_the_library():
    sources = [path for package in ("estimator", "replicate") for path in (ROOT / package).rglob("*.py")]
    known = "\n".join(text for path in sources for text in literals(path))
    quoted = re.findall(
        r"^```text\n(.*?)\n```$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert len(quoted) > 10
    assert not [message for message in quoted if message not in known]
