"""The benchmark beside other libraries: they train the same models to the same losses."""

import pathlib
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_peers_that_are_installed_end_with_the_loss_of_the_loop_by_hand():
    line = [sys.executable, str(ROOT / "benchmarks" / "peers"), "--quick", "--models", "mlp", "transformer"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for peer in ("Estimator", "by hand", "Flax"):
        assert f"mlp          {peer} " in done.stdout and f"transformer  {peer} " in done.stdout
    assert "All end with the same losses" in done.stdout


def test_a_peer_with_another_loss_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    check = runpy.run_path(str(ROOT / "benchmarks" / "peers" / "__main__.py"))["check"]
    check({"by hand": 1.0, "Flax": 1.01}, "mlp")
    for loss in (1.03, float("nan")):
        with pytest.raises(SystemExit, match="Flax ends the mlp with a loss of .*, and by hand it is 1.0"):
            check({"by hand": 1.0, "Flax": loss}, "mlp")
