"""Damages files of small runs at random, and looks for values that nobody has written."""

import collections
import contextlib
import pathlib
import random
import shutil
import time
from signal import SIGKILL, SIGTERM

import pytest
from soak.kills import ANYWHERE, Soak
from testing.scenarios import object_store as scenario

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.storage._sealed_folder import MARK

BEFORE, NEWEST, LAST = 10, 20, 30  # the steps of checkpoints


class Count(est.Hook):
    """A hook with a state: the steps it has seen."""

    steps = 0

    def after_run(self, context, values):
        self.steps += 1

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]


def flip(contents, rng):
    at = rng.randrange(len(contents))
    return contents[:at] + bytes([contents[at] ^ 1 << rng.randrange(8)]) + contents[at + 1 :]


def zero(contents, rng):
    at, size = rng.randrange(len(contents)), rng.choice([16, 512, 4096])
    return contents[:at] + bytes(len(contents[at : at + size])) + contents[at + size :]


DAMAGES = {
    "flip": flip,
    "zero": zero,
    "cut": lambda contents, rng: contents[: rng.randrange(len(contents))],
    "empty": lambda contents, rng: b"",
    "remove": None,
    "unreadable": None,
}


def train(model_dir, steps):
    hook = Count()
    estimator = scenario.make(str(model_dir)).train(scenario.input_fn, hooks=[hook], max_steps=steps)
    values = {name: value.tobytes() for name, value in estimator.get_variable_value("*").items()}
    return values, hook.steps


def evaluate(model_dir, **checkpoint):
    return scenario.make(str(model_dir)).evaluate(scenario.eval_input_fn, **checkpoint)["loss"]


def damage(folder, kind, rng, but=()):
    """Damages a file in a folder, except in one of `but`; returns False where that leaves it as it was."""
    files = sorted(each for each in folder.rglob("*") if each.is_file() and each.stat().st_size)
    file = rng.choice([each for each in files if not any(each.is_relative_to(path) for path in but)])
    before = file.read_bytes()
    if DAMAGES[kind] is None:
        file.unlink()
        if kind == "unreadable":
            file.symlink_to("/proc/self/mem")  # reading it is an error of input and output
        return True
    file.write_bytes(DAMAGES[kind](before, rng))
    return file.read_bytes() != before


def assert_sound(run, expected, path):
    """It gives values that were written, or an error that names the damaged checkpoint."""
    try:
        assert run() in expected, f"values of a damaged {path}"
    except ValueError as error:
        assert f"{path} is damaged: " in str(error)


@pytest.mark.slow
def test_no_damage_of_a_checkpoint_gives_other_values(tmp_path, count=4, seed=1):
    """With more of `count`, a soak."""
    rng = random.Random(seed)
    whole, base, copy = (pathlib.Path(tmp_path, name) for name in ("whole", "base", "copy"))
    train(base, NEWEST)
    shutil.copytree(base, whole)
    losses, last = (
        [evaluate(base, checkpoint_path=f"{base}/ckpt-{step}") for step in (BEFORE, NEWEST)],
        train(whole, LAST),
    )
    while count:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base, copy)
        step = rng.choice([BEFORE, NEWEST, NEWEST, NEWEST])
        if step == NEWEST and rng.random() < 0.25:  # alone
            for other in (0, BEFORE):
                shutil.rmtree(copy / f"ckpt-{other}")
        path = copy / f"ckpt-{step}"
        if damage(path, rng.choice(list(DAMAGES)), rng):
            count -= 1
            assert_sound(lambda: evaluate(copy), losses, path)
            assert_sound(lambda: train(copy, LAST), [last], path)


def is_sound(path):
    with contextlib.suppress(ValueError):
        return bool(Checkpoint(path).verify())
    return False


@pytest.mark.slow
def test_a_training_that_is_killed_and_damaged_again_and_again_ends_as_one_that_was_not(tmp_path, secs=5, seed=1):
    """With more of `secs`, a soak; prints the numbers of kills and damages."""
    rng, soak, end, count = random.Random(seed), Soak(tmp_path, seed), time.monotonic() + secs, 0

    def harm(model_dir):
        nonlocal count
        # One sound checkpoint is left, and the marks of what is to be removed.
        sound = [path for path in model_dir.glob("ckpt-*") if path.name[5:].isdecimal() and is_sound(path)]
        if sound:
            spared = [rng.choice(sound), *model_dir.glob(f"ckpt-*.*/{MARK}")]
            count += damage(model_dir, rng.choice(list(DAMAGES)), rng, but=spared)

    while time.monotonic() < end:
        soak.run("numpy_input_fn", [rng.choice([SIGKILL, SIGTERM, ANYWHERE]) for _ in range(4)], harm=harm)
        assert soak.differ == []
    print(dict(collections.Counter(way for way, _ in soak.codes)), "damages:", count)
