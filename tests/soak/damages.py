"""Damages checkpoints of a small run at random, and looks for values that nobody has written.

python tests/soak/damages.py --count 100 --seed 0
"""

import argparse
import collections
import pathlib
import random
import shutil
import sys
import tempfile

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[index]) for index in (1, 2)]

from testing.scenarios import object_store as scenario  # noqa: E402

import estimator as est  # noqa: E402

BEFORE, NEWEST, LAST = 10, 20, 30  # the steps of checkpoints


class Count(est.Hook):
    """A hook with a state: the steps it has seen."""

    def __init__(self):
        self.steps = 0

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
}


def train(model_dir, steps):
    hook = Count()
    estimator = scenario.make(model_dir).train(scenario.input_fn, hooks=[hook], max_steps=steps)
    values = {name: value.tobytes() for name, value in estimator.get_variable_value("*").items()}
    return values, hook.steps


def damage(checkpoint, kind, rng):
    """Damages a file of a checkpoint; returns its name, or None where that leaves it as it was."""
    file = rng.choice(sorted(each for each in checkpoint.rglob("*") if each.is_file() and each.stat().st_size))
    before = file.read_bytes()
    if DAMAGES[kind] is None:
        file.unlink()
    else:
        after = DAMAGES[kind](before, rng)
        if after == before:
            return None
        file.write_bytes(after)
    return str(file.relative_to(checkpoint))


def outcome_of(run, expected, path, name):
    """The outcome in words; it begins with "BAD" where the run did what it must not."""
    try:
        got = run()
    except ValueError as error:
        return "an error that names the file" if f"{path} is damaged: " in str(error) else f"BAD error: {error}"
    except Exception as error:
        return f"BAD error: {error!r}"
    return "the values that were written" if got in expected else f"BAD values, of a damaged {name}"


def main(arguments=None):
    """Makes the damages, and returns how often each outcome was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rng, outcomes = random.Random(args.seed), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        whole, base, copy = (pathlib.Path(folder, name) for name in ("whole", "base", "copy"))
        train(str(base), NEWEST)
        shutil.copytree(base, whole)
        losses = [
            scenario.make(str(base)).evaluate(scenario.eval_input_fn, checkpoint_path=f"{base}/ckpt-{step}")["loss"]
            for step in (BEFORE, NEWEST)
        ]
        last = train(str(whole), LAST)
        made = 0
        while made < args.count:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(base, copy)
            step = rng.choice([BEFORE, NEWEST, NEWEST, NEWEST])
            if step == NEWEST and rng.random() < 0.25:  # alone
                for other in (0, BEFORE):
                    shutil.rmtree(copy / f"ckpt-{other}")
            path, kind = copy / f"ckpt-{step}", rng.choice(list(DAMAGES))
            name = damage(path, kind, rng)
            if name is None:
                continue
            made += 1
            evaluate = lambda: scenario.make(str(copy)).evaluate(scenario.eval_input_fn)["loss"]  # noqa: E731
            for what, outcome in (
                ("evaluate", outcome_of(evaluate, losses, path, name)),
                ("train", outcome_of(lambda: train(str(copy), LAST), [last], path, name)),
            ):
                outcomes[what, kind, outcome] += 1
    for (what, kind, outcome), count in sorted(outcomes.items()):
        print(f"{count:4}  {what:8}  {kind:6}  {outcome}")
    return outcomes


if __name__ == "__main__":
    sys.exit(any(outcome.startswith("BAD") for _, _, outcome in main()))
