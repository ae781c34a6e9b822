"""A training run that is ended again and again ends like one that was not."""

import signal

import numpy as np
import pytest
from soak.kills import CTRL_C, KILL, SIGTERM, WITHIN, Soak
from testing.estimators import values
from testing.scenarios import killed_training

import estimator as est

ENDS = {  # of each training, one after the other; the first one's undisturbed run does not use the programs of others
    "grain's MapDataset": [KILL, CTRL_C, KILL, SIGTERM, KILL],
    "grain's DataLoader": [KILL] * 5,
    "numpy_input_fn": [WITHIN] * 5,
    "a generator": [KILL, SIGTERM, CTRL_C, KILL, KILL],
}
CODES = {KILL: -signal.SIGKILL, WITHIN: -signal.SIGKILL, CTRL_C: -signal.SIGINT, SIGTERM: 75}


def marked(name):
    return pytest.param(name, marks=pytest.mark.quick if name == "a generator" else ())


class Asking(est.Hook):
    """Asks for a value at some steps, each of which is then a program of its own."""

    def __init__(self, *steps):
        self.steps = steps

    def next_step(self, step):
        return next((s for s in self.steps if s > step), None)

    def before_run(self, context):
        return ["largest", "loss"]


@pytest.mark.slow
@pytest.mark.covers("1.3 auto-resume")
@pytest.mark.parametrize(("towers", "steps_per_loop", "stops"), [(1, "auto", [17, 30]), (2, "0.1s", [30])])
@pytest.mark.usefixtures("users_compiler")
def test_the_bits_do_not_depend_on_where_a_run_is_cut_nor_on_what_hooks_ask_for(
    tmp_path, towers, steps_per_loop, stops
):
    def run(steps_per_loop, stops, *names):
        for last in stops:
            estimator = killed_training.make_with(
                tmp_path / str(names), towers, "adam", steps_per_loop=steps_per_loop, save_summary_steps=None
            )
            estimator.train(killed_training.arrays, hooks=[Asking(*names)], max_steps=last)
        return values(estimator)

    whole, other = run(7, [30]), run(steps_per_loop, stops, 1, 11, 21)
    assert [key for key in whole if other[key].tobytes() != whole[key].tobytes()] == []


@pytest.mark.covers("1.3 auto-resume")
@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
@pytest.mark.parametrize("name", [*map(marked, killed_training.RUNS)])
def test_trainings_killed_at_twenty_points_are_those_that_were_not(tmp_path, name):
    assert sum(map(len, ENDS.values())) == 20 and ENDS.keys() == killed_training.RUNS.keys()
    soak = Soak(tmp_path, seed=name)
    ended = soak.run(name, ENDS[name], compiles_all=name == next(iter(ENDS)))
    assert (soak.differ, soak.codes) == ([], [(way, CODES[way]) for way in ENDS[name]])
    assert len(ended) > 5 and ended["global_step"] == killed_training.STEPS
    assert len(np.unique(ended["seen"])) == killed_training.ROWS and len(np.unique(ended["seen"], axis=0)) > 200
