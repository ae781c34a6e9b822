"""`replicate.ray`, on clusters of Ray with two CPUs that the tests start: two in all, since each start is slow."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import replicate.ray
from replicate.ray import PreemptionHook, ReportHook

ROOT = pathlib.Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "testing" / "scenarios" / "ray_driver.py"
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("ray.train", reason="needs the extra `ray`")
    return tmp_path_factory.mktemp("ray")


def drive(folder, *names):
    driver = subprocess.run(
        [sys.executable, DRIVER, folder, *names], capture_output=True, text=True, env=ENVIRONMENT, timeout=560
    )
    assert driver.returncode == 0, driver.stdout[-5000:] + driver.stderr[-5000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.fixture(scope="module")
def trained(folder):
    return drive(folder, "killed", "elastic")


@pytest.fixture(scope="module")
def others(folder):
    return drive(folder, "relative", "preempted")


@pytest.fixture(scope="module")
def whole(folder):
    """Fingerprints, by step, of a training in one process of two devices."""
    script = (
        "import jax, sys; jax.config.update('jax_num_cpu_devices', 2)\n"
        "from testing.scenarios.ray_driver import fingerprint, input_fn, make\n"
        "for last in (50, 60, 70):\n"
        "    print(last, fingerprint(make(sys.argv[1]).train(input_fn, max_steps=last)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, folder / "whole"], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert process.returncode == 0, process.stderr
    return {int(step): sha for step, sha in map(str.split, process.stdout.splitlines())}


@pytest.mark.slow
def test_workers_that_are_killed_or_asked_to_stop_end_with_the_bits_of_one_process(trained, whole):
    # Both ranks are killed, one after the other, and one is asked to stop: three failures, and four attempts.
    result = trained["killed"]
    assert (result["sha"], result["processes"], result["attempts"]) == (whole[50], 2, 4)
    assert re.fullmatch(r"ckpt-4[5-9]", result["from"])  # saved where it was asked to stop, at step 45


@pytest.mark.slow
def test_another_number_of_workers_continues_with_the_bits_of_one_process(trained, whole):
    one, two = trained["elastic"]
    assert (one["processes"], one["from"], one["sha"]) == (1, "ckpt-50", whole[60])
    assert (two["processes"], two["from"], two["sha"]) == (2, "ckpt-60", whole[70])


@pytest.mark.slow
def test_workers_whose_node_is_taken_away_resume_from_where_the_notice_came(others, whole):
    result = others["preempted"]
    # The config saves at the beginning and the end alone.
    assert re.fullmatch(r"ckpt-\d*[05]", result["from"]) and result["from"] not in ("ckpt-0", "ckpt-50")
    assert (result["sha"], result["attempts"]) == (whole[50], 2)


@pytest.mark.slow
def test_a_relative_model_dir_is_refused_in_a_worker(others):
    assert re.fullmatch(
        r"`model_dir` must be an absolute path, or a URL, in a worker of Ray; got 'runs/digits'\. Each worker has a "
        r"working directory of its own, here '/.*', so that a relative path is not where the driver, or the next "
        r"worker, looks for it\. Make it absolute in the driver, by `os\.path\.abspath`, on storage that all nodes "
        r"share\.",
        others["relative"],
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
