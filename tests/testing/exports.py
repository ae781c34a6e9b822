"""The README of an export, run without this library."""

import os
import re
import subprocess
import sys


def readme_code(path):
    """The Python lines of the README in an exported folder."""
    with open(os.path.join(path, "README.md"), encoding="utf-8") as file:
        (code,) = re.findall(r"```python\n(.*?)```", file.read(), re.S)
    return code


def run_readme(path, then):
    """What a process prints that runs the README in its folder, and the lines `then`; it cannot import this library."""
    before = "import sys\nsys.modules['estimator'] = sys.modules['replicate'] = None\n"
    process = subprocess.run(
        [sys.executable, "-I", "-c", before + readme_code(path) + then],
        cwd=path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
