"""Makes the release, and tries it: builds sdist and wheel, and installs the wheel where nothing else is.

    python tests/release/install.py          # a minute or two, most of it pip's
    python tests/release/install.py dist     # keeps the two files in this folder

The wheel is built from the sdist, as pip would. In the new environment `examples/digits.py` runs, and the doctests of
three names, from a folder that has no copy of this repository.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRY = """
import doctest, importlib.metadata, pathlib
import estimator as est, replicate

folders = [pathlib.Path(each.__file__).parent for each in (est, replicate)]
assert all("site-packages" in folder.parts for folder in folders), folders
assert all((folder / "py.typed").exists() for folder in folders), folders
assert importlib.metadata.version("replicate-model-fn") == est.__version__
runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
for name, each in {"Estimator": est.Estimator, "get_variable": est.get_variable, "transform": est.transform}.items():
    [test] = [test for test in doctest.DocTestFinder(recurse=False).find(each, name, globs={}) if test.examples]
    runner.run(test)
result = runner.summarize()
assert not result.failed and result.attempted > 10, result
print(f"version {est.__version__}: {result.attempted} lines of doctests run")
"""


def run(*command: object, folder: pathlib.Path | str) -> str:
    """The output of a command that ends well; without the checkout on its path."""
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def environment() -> dict[str, str]:
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"JAX_PLATFORMS": "cpu"}


def build(python: pathlib.Path, folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The sdist, and the wheel that is built from it."""
    run(python, "-m", "pip", "install", "-q", "build", folder=folder)
    run(python, "-m", "build", "-q", "--outdir", folder / "dist", ROOT, folder=folder)
    [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def check_files(sdist: pathlib.Path, wheel: pathlib.Path) -> None:
    """The wheel has the two packages alone; the sdist has what it takes to build and test it."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"estimator", "replicate"} < tops and len(tops) == 3, tops  # and the metadata
    own = {path.relative_to(ROOT).as_posix() for top in ("estimator", "replicate") for path in source_files(ROOT / top)}
    assert own <= set(names), sorted(own - set(names))
    packed = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert own | {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "tests/conftest.py"} <= packed


def source_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def main(keep: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for each in ("tools", "user"):
            run(sys.executable, "-m", "venv", each, folder=folder)
        sdist, wheel = build(folder / "tools/bin/python", folder)
        check_files(sdist, wheel)
        python = folder / "user/bin/python"
        run(python, "-m", "pip", "install", "-q", wheel, "scikit-learn", folder=folder)
        print(run(python, "-c", TRY, folder=folder).strip())
        shutil.copy(ROOT / "examples/digits.py", folder)
        printed = run(python, "digits.py", "--towers=4", "--steps=200", folder=folder)
        [accuracy] = re.findall(r"After 200 steps on 4 x cpu: test accuracy ([\d.]+)%", printed)
        assert float(accuracy) > 90, printed
        print(f"digits.py, from {wheel.name}: {accuracy} %")
        if keep:
            for each in (sdist, wheel):
                shutil.copy(each, pathlib.Path(keep).absolute())


if __name__ == "__main__":
    main(*sys.argv[1:])
