"""Writes docs/coverage.md, from docs/coverage_rows.md and the tests that are marked with the rows that they show.

    python tests/testing/website/coverage_page.py

`@pytest.mark.covers("1.4 loss")` names a row by its section's number and its text, or by that up to a comma. As
`pytestmark` it is of a whole file.
"""

import ast
import collections
import pathlib
import re

TESTS = pathlib.Path(__file__).resolve().parents[2]
PAGE = TESTS.parent / "docs" / "coverage.md"
ROWS = PAGE.with_name("coverage_rows.md")


def marked() -> dict[str, list[str]]:
    """The tests that are marked, by the names that their markers give."""
    tests = collections.defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py"), key=lambda path: path.name):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                for name in names_in(*node.decorator_list):
                    tests[name].append(f"`{path.name}::{node.name}`")
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                for name in names_in(node.value):
                    tests[name].append(f"all of `{path.name}`")
    return tests


def names_in(*nodes: ast.expr) -> list[str]:
    calls = [call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call)]
    markers = [call for call in calls if ast.unparse(call.func) == "pytest.mark.covers"]
    return [ast.literal_eval(arg) for marker in markers for arg in marker.args]


def page() -> str:
    """The text of the page; an error where a row has neither a test nor a reason, or a test names no row."""
    tests = marked()
    lines, section = [], ""
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.split()[1]
        elif match := re.fullmatch(r"\| (?!row \|)(.+?) \| *(.*?) *\|", line):
            row, words = match.groups()
            named = [tests.pop(f"{section} {name}", []) for name in dict.fromkeys((row, row.partition(",")[0]))]
            cells = [", ".join(sum(named, [])), words]
            assert any(cells), f"{section} {row} has neither a test nor a reason"
            line = f"| {row} | {'; '.join(cell for cell in cells if cell)} |"
        lines.append(line)
    assert not tests, f"There are no such rows in {ROWS.name}: {dict(tests)}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
