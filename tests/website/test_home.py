"""The home page and the README begin with one program, which prints what the page says."""

import pathlib
import re

import pytest
from testing.website import pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = ROOT / "docs" / "index.md"


def first_block(path, language="python", start=""):
    return re.search(rf"```{language}\n({start}.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)[1]


@pytest.mark.quick
def test_the_program_of_the_home_page_trains_on_four_towers_as_it_stands(tmp_path):
    (tmp_path / "four_towers.py").write_text(first_block(HOME), encoding="utf-8")
    variable, python, *arguments = first_block(HOME, "bash", "JAX_").split()
    assert python == ".venv/bin/python"
    output, log = pages.run_fresh(*arguments, folder=tmp_path, **dict([variable.split("=")]))
    settings, _, printed = (log + output).partition("\n")
    assert settings.startswith("INFO:absl:Using config")
    assert not (differing := pages.differences(first_block(HOME, "text"), printed, 0.1)), "\n".join(differing)


@pytest.mark.quick
def test_the_program_is_short_and_the_readme_has_the_same():
    lines = first_block(HOME).splitlines()
    assert len([line for line in lines if line]) <= 20 and max(map(len, lines)) <= 90
    for language in ("python", "text"):
        assert first_block(ROOT / "README.md", language) == first_block(HOME, language)
