"""The built site, for all tests of a run."""

import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory):
    """The folder of the site. It takes a minute to build, so the first process of pytest-xdist does it for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", f"{folder}.unfinished"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
            assert done.returncode == 0, done.stderr
            os.rename(f"{folder}.unfinished", folder)
    return folder
