"""Runs the Python blocks of a page in docs/, in order and in one process, as a reader would.

    python tests/testing/website/pages.py docs/tutorial/ten_minutes.md     # writes what the blocks print into the page

Those of the tutorial are typed in, line by line, at Python's own prompt. A block of text that directly follows a block
of Python is what that prints, log lines included. The lines of the log that repeat the settings are left out.
"""

import code
import contextlib
import difflib
import io
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[-+]?\d+)?|(?<![\w.])-?\d+e[-+]?\d+(?![\w.])")
TIMED = re.compile(r" \([\d.e+]+ (?:steps/)?sec(?:, [^)\n]*)?\)|(?<=/)\d{10}$", re.MULTILINE)  # and names of exports
RATES = re.compile(r"^.*loss = .*, step = .* \([\d.e+]+ steps/sec.*\n", re.MULTILINE)
LEFT_OUT = re.compile(r"^(?:Using config|Values of \d+ towers).*\n", re.MULTILINE)  # the settings, in long lines


def blocks(path: pathlib.Path) -> list[tuple[str, str | None]]:
    return [(each["code"], each["output"]) for each in BLOCK.finditer(path.read_text(encoding="utf-8"))]


def environment() -> dict[str, str]:
    """For a process of a reader: CPU devices, and this repository."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return env | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "MPLBACKEND": "Agg"}


def run_fresh(*command: str, folder: str | pathlib.Path = ROOT, **variables: str) -> tuple[str, str]:
    """As `testing.scripts.run_script`, which is quicker, and for tests alone."""
    options = {"cwd": folder, "env": environment() | variables, "capture_output": True, "encoding": "utf-8"}
    done = subprocess.run([sys.executable, *command], **options, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, done.stderr


def run(path: pathlib.Path, run_script: Callable = run_fresh) -> list[str]:
    """What each block of a page prints, run in a process of its own and an empty directory."""
    with tempfile.TemporaryDirectory() as folder:
        run_script(__file__, "--run", str(path), f"{folder}/printed.json", folder=folder)
        return json.loads(pathlib.Path(folder, "printed.json").read_text(encoding="utf-8"))


def run_here(path: str, result: str) -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(message)s"))
    import absl.logging

    absl.logging.use_absl_handler()
    logger = logging.getLogger("absl")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    printed, scope = [], {"__name__": "__main__"}
    run_block = type_in if pathlib.Path(path).parent.name == "tutorial" else run_file
    for i, (block, _) in enumerate(blocks(pathlib.Path(path))):
        text.seek(0)
        text.truncate()
        with contextlib.redirect_stdout(text):
            run_block(block, f"block_{i}.py", scope)
        printed.append(LEFT_OUT.sub("", text.getvalue()))
    pathlib.Path(result).write_text(json.dumps(printed), encoding="utf-8")


def run_file(block: str, name: str, scope: dict[str, object]) -> None:
    pathlib.Path(name).write_text(block, encoding="utf-8")  # so that inspect finds the source
    exec(compile(block, name, "exec"), scope)


class Prompt(code.InteractiveConsole):
    """Python's own `>>>`, where a blank line ends a function. The first error is raised; values are not shown."""

    def showtraceback(self) -> None:
        raise

    def showsyntaxerror(self, *args: object, **options: object) -> None:
        raise


def type_in(block: str, name: str, scope: dict[str, object]) -> None:
    prompt = Prompt(scope, name)
    with mock.patch("sys.displayhook", lambda value: None):
        waits = [prompt.push(line) for line in [*block.splitlines(), ""]]
    assert not waits[-1], f"The prompt waits for the end of a statement:\n{block}"


def differences(expected: str, printed: str, tolerance: float) -> list[str]:
    """Lines that differ in more than times, and in more than `tolerance` in numbers with a point.

    Where a page shows no lines with rates, those that a slow machine prints by time are left out.
    """
    if not RATES.search(expected):
        printed = RATES.sub("", printed)
    sides = [TIMED.sub("", side).splitlines() for side in (expected, printed)]
    bare = [[NUMBER.sub("NUMBER", line).split() for line in side] for side in sides]
    numbers = [[float(each) for line in side for each in NUMBER.findall(line)] for side in sides]
    near = len(numbers[0]) == len(numbers[1]) and all(
        abs(a - b) <= tolerance * max(1, abs(a)) for a, b in zip(*numbers, strict=True)
    )
    return [] if bare[0] == bare[1] and near else list(difflib.unified_diff(*sides, "page", "printed", lineterm=""))


def write(path: pathlib.Path) -> None:
    printed = iter(run(path))

    def filled(match: re.Match[str]) -> str:
        output = next(printed)
        return match[0] if match["output"] is None else f"```python\n{match['code']}```\n\n```text\n{output}```\n"

    path.write_text(BLOCK.sub(filled, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run_here(*sys.argv[2:])
    else:
        for each in sys.argv[1:]:
            write(pathlib.Path(each).resolve())
