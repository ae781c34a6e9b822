"""`benchmarks/scale.py`, in small: cases have rows with figures that can be. `variable` and `batches` are left out.

They run the same code as `variables`, with arrays of other shapes: their losses are traced alone.
"""

import pathlib
import re
import runpy
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "scale.py"
RUN = ["variables", "table", "processes"]


@pytest.fixture
def scale(monkeypatch):
    """The names in the script."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def test_every_case_has_a_quick_size_and_a_loss_of_it(scale):
    assert set(RUN) < set(scale["CASES"])
    for case, (_, (quarter, whole), quick, _) in scale["CASES"].items():
        assert 0 < quick <= quarter < whole
        work = scale["work_of"](case, quick)
        variables = jax.eval_shape(work.initial)
        assert {name: each.shape for name, each in variables.items()} == work.shapes
        if case == "table":
            variables = jax.eval_shape(lambda table, ids: table[ids], variables["table"], work.batch[0])
        assert jax.eval_shape(work.loss, variables, *work.batch).shape == ()


@pytest.mark.slow
def test_every_case_of_scale_has_a_row_and_a_long_run_its_looks():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--only", *RUN, "long"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("case ")]
    assert [re.match(r"case (\w+),", row)[1] for row in rows] == RUN
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


def test_a_long_run_that_takes_more_and_more_is_an_error(scale):
    check_flat = scale["check_flat"]
    rows = [{"memory, MB": 300.0 + i, "threads": 20.0 + i % 2, "open files": 9.0} for i in range(6)]
    check_flat(rows)
    for name, value in (("memory, MB", 310.0), ("threads", 22.0), ("open files", 10.0)):
        with pytest.raises(SystemExit, match=f"In a long run, {name} grow from [0-9.]+ to {value}:"):
            check_flat([*rows, rows[-1] | {name: value}])
