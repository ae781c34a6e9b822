"""An error of the input reaches the caller, wherever it comes; one that lies beyond what was wanted does not."""

import itertools
import traceback

import numpy as np
import pytest
from testing.estimators import X, Y, make, saved_steps
from testing.outcomes import run

import estimator as est
from estimator.inputs._input_fn import batches
from estimator.loop._context import RunContext
from estimator.loop._plan import Bounds, Plan
from estimator.loop._read_ahead import read_ahead

ENDS = {"an error": OSError("the disk is gone"), "an exit": SystemExit(3), "the end": None}


def failing(n, error, batch=(X, Y)):
    """n batches, then an error, or None: the end."""
    yield from itertools.repeat(batch, n)
    if error is not None:
        raise error


def read(size, limit, n, error):
    """How many batches were read, why it ended, and the error."""
    context = RunContext(est.ModeKeys.TRAIN)
    plan = Plan((), 0, limit, lambda: Bounds(size))
    count = 0
    try:
        for piece, _ in read_ahead(batches(failing(n, error)), plan, context, lambda pairs, chunk: pairs):
            count += piece.size
    except BaseException as raised:
        return count, context.stop_reason, raised
    return count, context.stop_reason, None


@pytest.mark.quick
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("size", [1, 3, 20])
def test_the_input_says_how_a_run_ends_where_it_ends_before_the_limit(size, end):
    error = ENDS[end]
    for limit, n in itertools.product((1, 4, 6, 7, None), range(9)):
        enough = limit is not None and n >= limit
        reason = "steps" if enough else "input" if error is None else None
        assert read(size, limit, n, error) == (limit if enough else n, reason, None if enough else error), (limit, n)


def last_function(error):
    return traceback.extract_tb(error.__traceback__)[-1].name


@pytest.mark.slow
def test_training_raises_the_error_of_its_input(tmp_path, messages):
    wanted = 4
    for n in (0, 1, wanted - 1, wanted, wanted + 1):
        estimator = make(tmp_path / str(n), steps_per_loop=3)
        if n >= wanted:
            estimator.train(lambda n=n: failing(n, ENDS["an error"]), steps=wanted)
            assert saved_steps(estimator)[-1] == wanted
            continue
        with pytest.raises(OSError, match="the disk is gone") as raised:
            estimator.train(lambda n=n: failing(n, ENDS["an error"]), steps=wanted)
        assert raised.value is ENDS["an error"] and last_function(raised.value) == "failing"
        assert saved_steps(estimator) == [0] * (n > 0)
        said = f"Training failed after step {n}. What came after step 0 is in no checkpoint, and is lost."
        assert (said in messages()) == (n > 0)


def test_what_an_exit_of_the_input_loses_is_said(tmp_path, messages):
    with pytest.raises(SystemExit):
        make(tmp_path).train(lambda: failing(3, ENDS["an exit"]), steps=4)
    assert "Training failed after step 3. What came after step 0 is in no checkpoint, and is lost." in messages()


def test_training_ends_in_order_where_a_later_run_takes_its_steps(tmp_path, messages):
    """What was saved is kept, and a run after the error begins there."""
    estimator = make(tmp_path, steps_per_loop=3, save_checkpoints_steps=2)
    with pytest.raises(OSError, match="the disk is gone"):
        estimator.train(lambda: failing(5, ENDS["an error"]), max_steps=7)
    assert saved_steps(estimator) == [0, 2, 4]
    assert "Training failed after step 5. What came after step 4 is in no checkpoint, and is lost." in messages()
    estimator.train(lambda: failing(7, ENDS["an error"]), max_steps=7)
    assert saved_steps(estimator)[-1] == 7


def test_a_generator_that_lets_a_stop_iteration_out_is_an_error(tmp_path):
    def wrong():
        yield X, Y
        yield X, Y
        next(iter(()))

    with pytest.raises(RuntimeError, match="generator raised StopIteration") as raised:
        make(tmp_path, steps_per_loop=3).train(wrong, steps=4)
    assert last_function(raised.value.__cause__) == "wrong"


@pytest.mark.quick
@pytest.mark.parametrize("wanted", [4, None])
def test_evaluation_and_prediction_raise_the_error_of_their_input(tmp_path, wanted):
    estimator = make(tmp_path)
    estimator.train(lambda: failing(1, None))
    for n in (0, 3, 4):
        if wanted is not None and n >= wanted:
            assert estimator.evaluate(lambda n=n: failing(n, ENDS["an error"]), steps=wanted)["label"] == np.mean(Y)
            continue
        with pytest.raises(OSError, match="the disk is gone") as raised:
            estimator.evaluate(lambda n=n: failing(n, ENDS["an error"]), steps=wanted)
        assert last_function(raised.value) == "failing"
        predictions = estimator.predict(lambda n=n: failing(n, ENDS["an error"]))
        assert len(list(itertools.islice(predictions, n * len(X)))) == n * len(X)
        with pytest.raises(OSError, match="the disk is gone") as raised:
            next(predictions)
        assert last_function(raised.value) == "failing"


@pytest.mark.slow
def test_an_error_counts_in_two_processes_once_both_have_come_to_it(tmp_path):
    """Training ends with the first input that does; an evaluation reads all of both."""
    of_two = [
        {row["case"]: row for row in rows} for rows in run("testing.scenarios.team.fail_in_chunks", str(tmp_path))
    ]
    errors = ("RuntimeError", "The input of process 1 failed: OSError: the disk"), ("OSError", "the disk is gone")
    assert of_two[0].keys() == of_two[1].keys() and len(of_two[0]) == 18
    for case in of_two[0]:
        call, ends, fails = case.split()
        reached = int(fails) <= int(ends) and int(fails) < 5 if call == "train" else int(fails) < 5
        for row, (error, text) in zip((rows[case] for rows in of_two), errors, strict=True):
            assert row["error"] == (error if reached else None), case
            assert not reached or row["text"].startswith(text), case
