"""`replicate.ray`, on a cluster of Ray with two CPUs that the tests start: one in all, since each start is slow."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from testing.signals import wait_until

import replicate.ray
from replicate.ray import PreemptionHook, ReportHook

ROOT = pathlib.Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "testing" / "scenarios" / "ray_driver.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
# How often Ray looks whether its workers live, and whether a node will be taken away: else each 2 s, and each 5 s.
ENVIRONMENT |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("ray.train", reason="needs the extra `ray`")
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def drive(folder):
    """Lets the driver do work that has a name; returns what came of it."""
    path = folder / "log"
    with open(path, "w") as log:
        streams = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
        driver = subprocess.Popen([sys.executable, DRIVER, folder], text=True, env=ENVIRONMENT, **streams)

    def work(name):
        driver.stdin.write(f"{name}\n")
        driver.stdin.flush()
        result = folder / f"{name}.json"
        wait_until(lambda: result.exists() or driver.poll() is not None, lambda: path.read_text()[-10_000:], 290)
        assert result.exists(), path.read_text()[-10_000:]
        return json.loads(result.read_text())

    yield work
    try:
        driver.communicate(timeout=60)
    finally:
        driver.kill()


# One training, in parts: what worker 0 says of each.


@pytest.fixture(scope="module")
def killed(drive):
    return drive("killed")


@pytest.fixture(scope="module")
def alone(drive, killed):
    return drive("alone")


@pytest.fixture(scope="module")
def preempted(drive, alone):
    return drive("preempted")


@pytest.fixture(scope="module")
def whole(folder):
    """Fingerprints, by step, of a training in one process of two devices."""
    script = (
        "import jax, sys; jax.config.update('jax_num_cpu_devices', 2)\n"
        "from testing import compiled; compiled.use_folder()\n"
        "from testing.scenarios.ray_driver import fingerprint, input_fn, make\n"
        "for last in (50, 60, 110):\n"
        "    print(last, fingerprint(make(sys.argv[1]).train(input_fn, max_steps=last)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, folder / "whole"], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert process.returncode == 0, process.stderr
    return {int(step): sha for step, sha in map(str.split, process.stdout.splitlines())}


@pytest.mark.slow
def test_workers_that_are_killed_or_asked_to_stop_end_with_the_bits_of_one_process(killed, whole):
    # Both ranks are killed, one after the other, and one is asked to stop: three failures, and four attempts.
    assert (killed["sha"], killed["processes"], len(killed["from"])) == (whole[50], 2, 4)
    assert re.fullmatch(r"ckpt-4[5-9]", killed["from"][-1])  # saved where it was asked to stop, at step 45


@pytest.mark.slow
def test_another_number_of_workers_continues_with_the_bits_of_one_process(alone, preempted, whole):
    assert (alone["processes"], alone["from"], alone["sha"]) == (1, ["ckpt-50"], whole[60])
    assert (preempted["processes"], preempted["from"][0], preempted["sha"]) == (2, "ckpt-60", whole[110])


@pytest.mark.slow
def test_workers_whose_node_is_taken_away_resume_from_where_the_notice_came(preempted, whole):
    _, resumed = preempted["from"]  # two attempts
    # The config saves at the end alone.
    assert re.fullmatch(r"ckpt-\d*[05]", resumed) and 60 < int(resumed.removeprefix("ckpt-")) < 110
    assert preempted["sha"] == whole[110]


@pytest.mark.slow
def test_a_relative_model_dir_is_refused_in_a_worker(alone):
    assert re.fullmatch(
        r"`model_dir` must be an absolute path, or a URL, in a worker of Ray; got 'runs/digits'\. Each worker has a "
        r"working directory of its own, here '/.*', so that a relative path is not where the driver, or the next "
        r"worker, looks for it\. Make it absolute in the driver, by `os\.path\.abspath`, on storage that all nodes "
        r"share\.",
        alone["relative"],
    )


@pytest.mark.parametrize("hook", [ReportHook, PreemptionHook])
@pytest.mark.parametrize("every_steps", [0, -1, 2.5, None])
def test_hooks_refuse_steps_that_are_none(hook, every_steps):
    message = f"{hook.__name__}: every_steps must be a positive int; got {every_steps!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        hook(every_steps)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    for name in ("ray", "ray.train", "ray.tune"):
        monkeypatch.setitem(sys.modules, name, None)
    message = "replicate.ray needs Ray. Install it in your clone: pip install -e '.[ray]'."
    for use in (replicate.ray.initialize, ReportHook(1).begin, PreemptionHook(1).begin):
        with pytest.raises(ImportError, match=re.escape(message)):
            use()
    assert not jax.distributed.is_initialized()
