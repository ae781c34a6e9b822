"""Versions: those that were tested are the same everywhere, and the project's own stands in one place."""

import pathlib
import re
import tomllib

import estimator as est

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
TESTED = re.compile(r"Tested with Python 3\.(\d+) and jax ([\d.]+) to Python 3\.(\d+) and jax ([\d.]+)\.")


def test_the_readme_and_pyproject_say_the_same():
    [said] = TESTED.findall(PYPROJECT)
    assert TESTED.findall((ROOT / "README.md").read_text()) == [said]
    oldest, oldest_jax, newest, _ = said
    assert PROJECT["requires-python"] == f">=3.{oldest}" and f"jax>={oldest_jax}" in PROJECT["dependencies"]
    between = range(int(oldest), int(newest) + 1)
    classified = [each for each in PROJECT["classifiers"] if each.startswith("Programming Language :: Python :: 3.")]
    assert classified == [f"Programming Language :: Python :: 3.{minor}" for minor in between]


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    assert re.search(rf"^## {re.escape(est.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert not re.search("^version:", (ROOT / "CITATION.cff").read_text(), re.M)
