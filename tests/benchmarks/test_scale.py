"""`benchmarks/scale.py`, in small: every case has a row with figures that can be."""

import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "scale.py"


@pytest.mark.slow
def test_every_case_of_scale_has_a_row_and_a_long_run_its_looks():
    done = subprocess.run([sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("case ")]
    assert [re.match(r"case (\w+),", row)[1] for row in rows] == [
        *("variables", "variable", "table", "batches", "processes")
    ]
    for row in rows:  # no bounds on times: what else the machine does would decide
        for name in (
            "by hand, ms",
            "Estimator, ms",
            "memory by hand, MB",
            "memory, MB",
            "start by hand, s",
            "start, s",
        ):
            assert float(re.search(rf", {name} ([\d,.]+)(, |$)", row)[1].replace(",", "")) > 0
    looks = re.findall(r"^steps ([\d,]+), .*, memory, MB .*, threads .*, open files ", done.stdout, re.M)
    assert [int(steps.replace(",", "")) for steps in looks] == [*range(200, 2001, 200)]


def test_a_long_run_that_takes_more_and_more_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    check_flat = runpy.run_path(str(SCRIPT))["check_flat"]
    rows = [{"memory, MB": 300.0 + i, "threads": 20.0 + i % 2, "open files": 9.0} for i in range(6)]
    check_flat(rows)
    for name, value in (("memory, MB", 310.0), ("threads", 22.0), ("open files", 10.0)):
        with pytest.raises(SystemExit, match=f"In a long run, {name} grow from [0-9.]+ to {value}:"):
            check_flat([*rows, rows[-1] | {name: value}])
