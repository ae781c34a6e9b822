"""`python -m estimator.inspect`: what it prints of checkpoints."""

import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import estimator as est
from estimator import inspect
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints


@pytest.fixture(autouse=True)
def platforms():
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)


def state(step, variables):
    variables = {name: jnp.asarray(value) for name, value in variables.items()}
    floats = {name: x for name, x in variables.items() if x.dtype == jnp.float32}
    return est.State(variables, {"adam": optax.adam(0.1).init(floats)}, jnp.int32(step), jax.random.key(0))


@pytest.fixture
def model_dir(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = {"net/w": np.float32([[3, 4]]), "half": jnp.array([1, 2, 2], jnp.bfloat16), "ids": np.int32([2])}
    checkpoints.save(state(10, first))
    checkpoints.save(state(20, first | {"net/w": np.float32([[3, 5]]), "ids": np.int32([2, 3]), "z": np.float32(1)}))
    Checkpoint(str(tmp_path / "ckpt-10")).pin()
    return str(tmp_path)


def printed(capsys, *arguments):
    inspect.main(arguments)
    return capsys.readouterr().out.splitlines()


def test_the_checkpoints_are_listed(model_dir, capsys):
    title, *rows = printed(capsys, model_dir)
    assert title.split() == ["step", "time", "size"]
    assert re.fullmatch(r"  10  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  +[\d.]+ kB  pinned", rows[0])
    assert re.fullmatch(r"  20  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  +[\d.]+ kB", rows[1]) and len(rows) == 2


def test_names_shapes_dtypes_and_norms_match_the_newest_checkpoint(model_dir, capsys):
    lines = printed(capsys, model_dir, "--variables")
    assert lines[0] == os.path.join(model_dir, "ckpt-20")
    assert [line.split() for line in lines[2:9]] == [
        ["variable", "shape", "dtype", "norm"],
        ["global_step", "[]", "int32", "20"],
        ["half", "[3]", "bfloat16", "3"],
        ["ids", "[2]", "int32", f"{math.sqrt(13):.6g}"],
        ["net/w", "[1,", "2]", "float32", f"{math.sqrt(34):.6g}"],
        ["z", "[]", "float32", "1"],
        ["9", "numbers,", "30", "bytes"],
    ]
    assert lines[10].split() == ["optimizer", "slot", "shape", "dtype", "norm"]
    assert lines[11].split() == ["adam/0/count", "[]", "int32", "0"]
    assert lines[-1] == "7 numbers, 28 bytes"


def test_a_checkpoint_may_be_given_itself(model_dir, capsys):
    for path in (os.path.join(model_dir, "ckpt-10"), os.path.join(model_dir, "ckpt-10/")):
        lines = printed(capsys, path)
        assert lines[0] == os.path.join(model_dir, "ckpt-10") and "ids          [1]     int32        2" in lines


def test_the_difference_of_two_steps_is_what_was_changed_added_and_removed(model_dir, capsys):
    lines = printed(capsys, model_dir, "--diff", "10", "20")
    assert lines == [
        f"{model_dir}/ckpt-10 and {model_dir}/ckpt-20",
        "",
        "changed      shape   dtype    norm at 10  norm at 20  of change",
        "global_step  []      int32            10          20         10",
        "net/w        [1, 2]  float32           5     5.83095          1",
        "other shape or dtype: ids, int32[1], then int32[2]",
        "only at step 20: adam/0/mu/z, float32[]",
        "only at step 20: adam/0/nu/z, float32[]",
        "only at step 20: z, float32[]",
        "unchanged: adam/0/count, adam/0/mu/net/w, adam/0/nu/net/w, half",
    ]


def test_arrays_are_read_some_at_a_time(model_dir, capsys, monkeypatch):
    whole = printed(capsys, model_dir, "--variables"), printed(capsys, model_dir, "--diff", "20", "10")
    monkeypatch.setattr(inspect, "_BYTES_AT_A_TIME", 8)
    assert whole == (printed(capsys, model_dir, "--variables"), printed(capsys, model_dir, "--diff", "20", "10"))


def test_numbers_that_are_not_finite_are_shown(tmp_path, capsys):
    Checkpoints(tmp_path).save(state(1, {"bad": np.float32([1, np.nan])}))
    assert "bad          [2]    float32   nan" in printed(capsys, str(tmp_path), "--variables")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}", "--diff", "10", "7"], "There is no checkpoint of step 7; there are checkpoints of steps 10, 20."),
        (["{}/none"], "There is no directory '{}/none'. Give the `model_dir` of an Estimator."),
        (["{}/ckpt-10/arrays"], "There is no checkpoint in '{}/ckpt-10/arrays'."),
    ],
)
def test_what_is_not_there_is_one_line(model_dir, arguments, message):
    with pytest.raises(SystemExit) as error:
        inspect.main([each.format(model_dir) for each in arguments])
    assert str(error.value) == message.format(model_dir)


def test_the_command_prints_it_and_nothing_else(model_dir):
    command = [sys.executable, "-m", "estimator.inspect", model_dir, "--variables"]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    assert output.stderr == "" and "net/w" in output.stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as cut:
        cut.stdout.close()  # as `| head` does
        assert cut.stderr.read() == b"" and cut.wait() == 0
    assert (
        Checkpoint(f"{model_dir}/ckpt-20").read("z") == 1
        and len(Checkpoint(f"{model_dir}/ckpt-10").read_all(["*"])) == 7
    )
