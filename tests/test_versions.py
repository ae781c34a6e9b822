"""What is said of the versions that were tested is the same everywhere."""

import pathlib
import re
import tomllib

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
    assert PROJECT["classifiers"] == [f"Programming Language :: Python :: 3.{minor}" for minor in between]
