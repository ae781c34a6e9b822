"""What the pages in docs/ say: their code runs, and the tests that they name are there."""

import ast
import json
import pathlib
import re
import runpy
import sys
import warnings

import jax
import numpy as np
import pytest
from testing.cluster import shared_cluster
from testing.model_fns import minimizing
from testing.website import coverage_page

import estimator as est

ROOT = pathlib.Path(__file__).resolve().parents[2]
GENERATED = {"coverage.md", "coverage_rows.md", "tensorflow_names.md"}
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED]
PAGES += [ROOT / "examples" / "README.md"]
IS_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
MAY_BE_LONG = re.compile(r" *(#|\||!\[|<|:::|>|---|\[\^?[\w-]+\]:|\?\?\?|!!!)| {4,}options:")
MARK = re.compile(r" *(?:[-*+] +|\d+\. +)?")
WORD = re.compile(r"(?:`+[^`]+`+|\[[^\]]*\]\([^)]*\)|\S)+")


def code_of(page):
    """The Python blocks of a page, as one program."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.mark.slow
def test_the_model_of_the_guide_trains_evaluates_predicts_and_is_exported(tmp_path, monkeypatch, messages):
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    images, labels = np.float32(images / 16), labels.astype(np.int32)
    four = jax.devices("cpu")[:4]
    monkeypatch.setattr(jax, "local_devices", lambda *args, **kwargs: four)  # as on a machine with four of them
    scope = {"x": images[:1400], "y": labels[:1400], "test_x": images[1400:], "test_y": labels[1400:]}
    exec(code_of("from_tf_estimator.md"), scope | (scope := {**scope, "model_dir": tmp_path / "model"}))
    metrics = est.read_eval_metrics(tmp_path / "model" / "eval")
    assert list(metrics) == [200, 400]
    assert metrics[400]["accuracy"] > 0.9
    assert any(re.match(r"norm = [\d.]+", text) for text in messages())


def test_the_hook_of_the_page_on_training_is_called_every_50_steps(tmp_path, capsys):
    scope = {"est": est}
    exec(code_of("training.md"), scope)

    def loss_of(features, labels):
        bias = est.get_variable("bias", ())
        est.record("bias", bias)
        return ((features + bias - labels) ** 2).mean()

    batch = np.zeros(4, np.float32), np.ones(4, np.float32)
    est.Estimator(minimizing(loss_of), tmp_path).train(lambda: [batch] * 120, hooks=[scope["Biases"]()])
    assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()] == [50, 100]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_script_of_the_page_on_many_hosts_runs_in_any_number_of_processes(tmp_path, processes):
    code = code_of("many_hosts.md")
    scenario = "testing.scenarios.docs.many_hosts"
    ended = shared_cluster().run(scenario, code, str(tmp_path / "model"), processes=processes)
    assert [each.code for each in ended] == [0] * processes, ended
    outputs = [json.loads(next(line for line in each.lines if line.startswith('{"process"'))) for each in ended]
    assert [each["process"] for each in outputs] == list(range(processes))
    assert all(each["metrics"] == outputs[0]["metrics"] for each in outputs)
    assert outputs[0]["metrics"]["accuracy"] > 0.8
    assert [each["ids"] for each in outputs] == [list(range(i, 1797, processes)) for i in range(processes)]
    norms = [[line for line in each.lines if re.fullmatch(r"[12]00 [\d.]+", line)] for each in ended]
    assert [len(lines) for lines in norms] == [2] + [0] * (processes - 1)
    assert list((tmp_path / "model" / "export").iterdir())


def test_the_example_of_wide_towers_prints_what_the_page_says(capsys):
    text = (ROOT / "docs" / "explanation" / "placements.md").read_text(encoding="utf-8")
    section = text.split("## Towers of several devices\n")[1].split("\n## ")[0]
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", section, re.DOTALL).groups()
    exec(code, {})
    outputs = [line.split() for line in capsys.readouterr().out.splitlines()]
    said = [line.split() for line in printed.splitlines()]
    assert [line[:6] for line in outputs] == [line[:6] for line in said]  # less what XLA needs besides


def commands():
    """The commands of Python that a page or a docstring tells to run, with the text up to the end of each."""
    sources = [path for package in ("estimator", "replicate") for path in (ROOT / package).rglob("*.py")]
    for path in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sources]:
        text = path.read_text(encoding="utf-8")
        yield from re.findall(
            r"python (-m (?:estimator|replicate)[\w.]*|(?:benchmarks|examples)/[a-z_]+\.py)(.*)", text
        )


def test_every_command_of_a_page_is_one_that_runs_and_has_the_options_that_it_is_given(monkeypatch, capsys):
    found, helps = list(commands()), {}
    assert len(found) > 20
    for what, rest in found:
        given = re.split(r"[`#]| \w+\.py\b", rest)[0]  # what stands after a script is the script's
        module = what.removeprefix("-m ")
        if module.endswith(".py"):
            text = (ROOT / module).read_text(encoding="utf-8") + (ROOT / "benchmarks/results.py").read_text("utf-8")
        elif (text := helps.get(module)) is None:
            monkeypatch.setattr(sys, "argv", [module, "--help"])
            with pytest.raises(SystemExit) as end, warnings.catch_warnings(action="ignore"):  # it was imported before
                runpy.run_module(module, run_name="__main__")
            assert end.value.code == 0
            text = helps[module] = capsys.readouterr().out
        for option in re.findall(r"--[\w-]+", given):
            assert option in text, (what, option)


def test_prose_is_wrapped_at_80_columns():
    """But for code, tables, headings and pictures, and a word that is longer."""
    lines = [(page.name, x) for page in PAGES for x in IS_CODE.sub("", page.read_text(encoding="utf-8")).splitlines()]
    prose = [(page, line) for page, line in lines if len(line) > 80 and not MAY_BE_LONG.match(line)]
    assert [each for each in prose if len(WORD.findall(MARK.sub("", each[1], count=1))) > 1] == []


def test_docstrings_come_to_their_arguments_within_40_lines():
    long = []
    for path in (path for package in ("estimator", "replicate") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                head = r"(.*?)(?:^ *(?:Args|Attributes|Returns|Raises):$|\Z)"
                text = re.match(head, ast.get_docstring(node) or "", re.M | re.S)[1]
                if len(text.strip().splitlines()) > 40:
                    long.append(f"{path.name}: {getattr(node, 'name', 'the module')}")
    assert not long


def test_the_page_of_what_is_covered_matches_the_markers():
    same = coverage_page.PAGE.read_text(encoding="utf-8") == coverage_page.page()
    assert same, "Write docs/coverage.md again: python tests/testing/website/coverage_page.py"


def test_a_row_without_a_test_or_a_reason_and_a_marker_without_a_row_are_errors(tmp_path, monkeypatch):
    rows = tmp_path / "coverage_rows.md"
    monkeypatch.setattr(coverage_page, "ROWS", rows)
    monkeypatch.setattr(coverage_page, "marked", lambda: {"1.2 a": ["`test_a.py::test_b`"]})
    head = "## 1.2 Some\n\n| row | test, or why not |\n|---|---|\n"
    rows.write_text(head + "| a, b | as a |\n| c | dropped: no |\n")
    assert coverage_page.page() == head + "| a, b | `test_a.py::test_b`; as a |\n| c | dropped: no |\n"
    rows.write_text(head + "| a | |\n| b | |\n")
    with pytest.raises(AssertionError, match="1.2 b has neither a test nor a reason"):
        coverage_page.page()
    rows.write_text(head + "| b | dropped: no |\n")
    with pytest.raises(AssertionError, match="no such rows .*'1.2 a': .*test_a.py::test_b"):
        coverage_page.page()
