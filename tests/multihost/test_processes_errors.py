"""What several processes cannot train on is an error in all of them, and none waits for ever."""

import pytest
from testing.outcomes import run

ALIKE = "The processes gave batches that do not fit together: "
ERRORS = {
    "shapes": ("ValueError", ALIKE + "features['x'] is float32[4,3] in process 0, float32[4,6] in process 1. Each has"),
    "dtypes": ("ValueError", ALIKE + "features['x'] is float32[4,3] in process 0, int32[4,3] in process 1."),
    "names": ("ValueError", ALIKE + "features['z'] is float32[4,3] in process 0, missing in process 1."),
    "later shapes": ("ValueError", ALIKE + "features['x'] is float32[4,3] in process 0, float32[4,6] in process 1."),
    "evaluated shapes": ("ValueError", ALIKE + "features['x'] is float32[rows,3] in process 0, float32[rows,6] in"),
    "labels": ("ValueError", ALIKE + "labels is float32[4,1] in process 0, missing in process 1."),
    "rows": ("ValueError", "features['ids'] is int32[4,2] in process 0, int32[2,2] in process 1. Each has to"),
    "later rows": ("ValueError", "and as many rows (`drop_remainder=True`)."),
    "odd rows": ("ValueError", "Batch size 3 needs to be divisible by the number of towers, which is 2."),
    "later odd rows": ("ValueError", "Batch size 3 needs to be divisible by the number of towers, which is 2 in each"),
    "not replicated": ("ValueError", "jax runs on 2 processes, but the model_fn on devices of one"),
    "local": ("ValueError", "jax runs on 2 processes, but the model_fn on devices of one"),
    "local evaluation": ("ValueError", "jax runs on 2 processes, but the model_fn on devices of one"),
    "sparse": ("TypeError", "Sparse features and labels cannot be trained on by several processes."),
    "shared_round_robin": ("ValueError", "keeps variables on devices of one process, which the towers of others"),
    "shared_local_parameter_server": ("ValueError", "keeps variables on devices of one process, which the towers of"),
    "hooks": (
        "ValueError",
        "All processes need the same hooks; process 0 has ['CheckpointSaverHook'], process 1 has [",
    ),
    "verbs": ("RuntimeError", "Process 0 called `train(steps=None, max_steps=None)`, process 1 `evaluate("),
    "steps": ("RuntimeError", "Process 0 called `train(steps=2, max_steps=None)`, process 1 `train(steps=3, m"),
    "nan": ("NanLossDuringTrainingError", "NaN loss during training, at step 4. "),
    "non-finite": ("NonFiniteGradientError", "in tower 2"),
    "empty": ("ValueError", "`evaluate` got no batch from input_fn."),
}
# What goes wrong in process 1 alone, and how process 0 hears of it.
OF_ONE = {
    "input_fn": ("ZeroDivisionError", "division by zero", "failed in `train(steps=None, max_steps=None)`: Zero"),
    "input": ("OSError", "the disk is gone", "The input of process 1 failed: OSError: the disk is gone."),
    "evaluated input": ("OSError", "the disk is gone", "The input of process 1 failed: OSError: the disk is gone."),
    "hook": ("ValueError", "not today", "Process 1 failed in `train(steps=None, max_steps=None)`: ValueError: not to"),
    "model_dirs": (
        "FileNotFoundError",
        "Process 1, with model_dir='",
        "failed in `train(steps=None, max_steps=None)`: F",
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By case, of each process, the error and its text."""
    folder = str(tmp_path_factory.mktemp("fail"))
    each = [
        {row["case"]: (row["error"], row.get("text")) for row in rows}
        for rows in run("testing.scenarios.team.fail", folder)
    ]
    assert each[0].keys() == each[1].keys() == {*ERRORS, *OF_ONE, "one is empty", "it works"}
    return {case: [of_process[case] for of_process in each] for case in each[0]}


@pytest.mark.parametrize("case", ERRORS)
def test_it_is_the_same_error_in_all(case, outcomes):
    for error, text in outcomes[case]:
        assert error == ERRORS[case][0]
        assert ERRORS[case][1] in text


@pytest.mark.parametrize("case", OF_ONE)
def test_an_error_in_one_process_reaches_the_others(case, outcomes):
    error, text, heard = OF_ONE[case]
    assert outcomes[case][1][0] == error
    assert text in outcomes[case][1][1]
    assert outcomes[case][0][0] == "RuntimeError"
    assert heard in outcomes[case][0][1]


def test_after_all_that_they_are_in_step(outcomes):
    assert outcomes["it works"] == outcomes["one is empty"] == [(None, None)] * 2
