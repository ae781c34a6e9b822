"""The pages of the tutorial, how-to pages and one on the frame print what they say; the errors they name are there."""

import ast
import functools
import importlib.util
import inspect
import pathlib
import re

import pytest
from testing.website import pages
from testing.website.scripts import run_script

import estimator as est

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(DOCS).as_posix() for folder in ("tutorial", "how_to") for path in DOCS.glob(f"{folder}/*.md")
) + ["explanation/frame.md"]

RUN_ELSEWHERE = ["how_to/engines.md"]  # by test_engines_page.py
NEEDED = {  # by page, libraries that the extra `test-all` leaves out
    "how_to/data_loaders.md": ("datasets", "tensorflow", "torch", "torchdata"),
    "how_to/other_weights.md": ("safetensors",),
    "how_to/sweep.md": ("optuna",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAGES if name not in RUN_ELSEWHERE])
def test_a_page_prints_what_it_says(name):
    missing = [library for library in NEEDED.get(name, ()) if not importlib.util.find_spec(library)]
    if missing:
        pytest.skip(f"without {missing}")
    expected = [output for _, output in pages.blocks(DOCS / name)]
    printed = pages.run(DOCS / name, functools.partial(run_script, MPLBACKEND="Agg"))
    differing = [pages.differences(a, b, 0.1) for a, b in zip(expected, printed, strict=True) if a is not None]
    assert not any(differing), "\n".join(line for lines in differing for line in lines)


def test_every_block_of_python_is_one_that_is_run():
    for name in PAGES:
        text = (DOCS / name).read_text(encoding="utf-8")
        assert text.count("```python\n") == len(pages.blocks(DOCS / name)) > 0, name
        for code, _ in pages.blocks(DOCS / name):
            ast.parse(code)


def test_a_prompt_ends_a_function_at_a_blank_line_and_raises_errors():
    scope = {}
    pages.type_in("def f():\n    return 1\n\nx = f()\n", "block.py", scope)
    assert scope["x"] == 1
    with pytest.raises(SyntaxError, match="unexpected indent"):
        pages.type_in("def f():\n    y = 1\n\n    return y\n", "block.py", scope)
    with pytest.raises(ZeroDivisionError):
        pages.type_in("1 / 0\n", "block.py", scope)


def test_what_a_page_says_may_differ_in_times_and_in_last_digits_alone():
    said = "loss = 0.350658, step = 100 (2656 steps/sec, 8.5e+04 examples/sec, 3% waiting for input)\n"
    assert not pages.differences(said, "loss = 0.35, step = 100\n", 0.1)
    assert pages.differences(said, "loss = 0.55, step = 100 (2656 steps/sec)\n", 0.1)
    assert pages.differences(said, "loss = 0.350658, step = 200\n", 0.1)
    assert not pages.differences("loss = 9.5, step = 1\n", "loss = 9.5, step = 1\n" + said, 0.1)
    assert pages.differences("loss = 9.5, step = 1\n", "loss = 9.5, step = 1\nloss = 0.350658, step = 100\n", 0.1)


def test_the_skeleton_of_a_hook_has_its_methods_with_their_arguments():
    skeleton = pages.blocks(DOCS / "how_to" / "custom_hook.md")[-1][0]
    scope = {"est": est}
    exec(skeleton, scope)
    own, base = (
        {name: inspect.signature(f) for name, f in inspect.getmembers(each, inspect.isfunction) if name[0] != "_"}
        for each in (scope["Skeleton"], est.Hook)
    )
    assert {name: list(signature.parameters) for name, signature in own.items()} == {
        name: list(signature.parameters) for name, signature in base.items()
    }


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
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^```text\n(.*?)\n```$", page, re.M | re.S)
    assert len(quoted) > 10
    assert not [message for message in quoted if message not in known]
