"""The benchmark beside other libraries: they train the same models to the same losses; here the smallest of them."""

import json
import pathlib
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_peers_that_are_installed_end_with_the_loss_of_the_loop_by_hand():
    line = [sys.executable, str(ROOT / "benchmarks" / "peers"), "--quick", "--models", "mlp"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for peer in ("Estimator", "by hand", "Flax"):
        assert f"mlp          {peer} " in done.stdout
    assert done.stdout.count("All end with the same losses") == 1


@pytest.mark.parametrize("machine", ["here", "elsewhere"])
def test_saving_some_models_keeps_what_was_measured_of_others_on_this_machine(machine, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    peers = runpy.run_path(str(ROOT / "benchmarks" / "peers" / "__main__.py"))
    results, titles = peers["results"], peers["MODELS"]
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "refresh", lambda: None)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "peers" / "__main__.py")])
    first, second = ([{"peer": "by hand", "steps per second": rate}] for rate in (5.0, 7.0))
    peers["save"]({"resnet": first}, {}, {}, 3, 1.0)
    if machine == "elsewhere":
        monkeypatch.setattr(results, "machine", lambda: "another one")
    peers["save"]({"tagger": second}, {}, {}, 3, 1.0)
    tables = json.loads((tmp_path / "peers.json").read_text())["tables"]
    assert tables[titles["tagger"]] == second
    assert tables.get(titles["resnet"]) == (first if machine == "here" else None)


def test_a_peer_with_another_loss_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    check = runpy.run_path(str(ROOT / "benchmarks" / "peers" / "__main__.py"))["check"]
    check({"by hand": 1.0, "Flax": 1.01}, "mlp")
    for loss in (1.03, float("nan")):
        with pytest.raises(SystemExit, match="Flax ends the mlp with a loss of .*, and by hand it is 1.0"):
            check({"by hand": 1.0, "Flax": loss}, "mlp")
