"""What train promises: how many steps, when it saves, several steps in one program."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import Linear, X, Y, endless, make, refuse, saved_steps, step_of, times, values
from testing.model_fns import minimizing, zeros

import estimator as est
from estimator.loop._programs import Programs

# Training: how many steps.


@pytest.mark.covers("1.3 steps", "2 who increments global_step", "13 14 the user increments global_step")
def test_steps_are_counted_from_where_the_last_call_ended_and_max_steps_from_zero(tmp_path):
    estimator = make(tmp_path)
    assert estimator.train(endless, steps=3) is estimator
    assert step_of(estimator) == 3
    assert step_of(estimator.train(endless, steps=4)) == 7
    assert step_of(estimator.train(endless, max_steps=9)) == 9


def test_training_is_skipped_when_max_steps_is_reached(tmp_path, messages):
    make(tmp_path).train(endless, steps=5)
    for max_steps in (5, 4):
        make(tmp_path, model_fn=lambda features, labels, mode: refuse()).train(refuse, max_steps=max_steps)
    assert messages().count("Skipping training since max_steps has already saved.") == 2


def test_training_equals_the_loop_written_by_hand(tmp_path):
    estimator = make(tmp_path).train(endless, steps=5)
    optimizer = optax.sgd(0.01, momentum=0.5)
    w = jnp.zeros((2, 1))
    slots = optimizer.init(w)
    for _ in range(5):
        gradient = jax.grad(lambda w: jnp.mean((X @ w - Y) ** 2))(w)
        updates, slots = optimizer.update(gradient, slots, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(estimator.get_variable_value("w"), w, rtol=1e-5)


def test_no_more_batches_are_taken_than_steps(tmp_path):
    taken = []

    def input_fn():
        for i in itertools.count():
            taken.append(i)
            yield X, Y

    for steps_per_loop in (1, 4):
        taken.clear()
        make(tmp_path / str(steps_per_loop), steps_per_loop=steps_per_loop).train(input_fn, steps=6)
        assert len(taken) == 6


@pytest.mark.covers("1.3 input ends early")
def test_empty_input_warns_and_makes_no_step(tmp_path, messages):
    estimator = make(tmp_path)
    assert estimator.train(lambda: [], steps=2) is estimator
    assert saved_steps(estimator) in ([], [0])
    assert any(
        "made no steps. Perhaps input is empty or misspecified. An iterator that is" in each for each in messages()
    )


@pytest.mark.covers("1.3 errors", "1.4 steps")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 1, "max_steps": 2}, "Can not provide both steps and max_steps; got steps=1 and max_steps=2"),
        ({"steps": 0}, "Must specify steps > 0, given: 0"),
        ({"steps": 1e3}, r"`Estimator\.train` needs an int as steps; got 1000.0 of type float\."),
        ({"max_steps": "3"}, r"`Estimator\.train` needs an int as max_steps; got '3' of type str\."),
        ({"max_steps": 0}, "Must specify max_steps > 0, given: 0"),
    ],
)
def test_bad_numbers_of_steps_are_errors(tmp_path, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(tmp_path).train(refuse, **given)


def test_saving_by_seconds(tmp_path):
    estimator = est.Estimator(Linear(), tmp_path, est.RunConfig(save_checkpoints_secs=1e-6, keep_checkpoint_max=None))
    assert saved_steps(estimator.train(endless, steps=3)) == [0, 1, 2, 3]


@pytest.mark.quick
@pytest.mark.covers("1.3 never")
def test_without_checkpoints_nothing_is_written_and_steps_do_not_accumulate(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=None)
    estimator.train(endless, steps=5).train(endless, steps=5)
    assert saved_steps(estimator) == []
    assert estimator.latest_checkpoint() is None
    assert estimator.evaluate(times(1))["global_step"] == 0
    earlier = make(tmp_path).train(endless, steps=5).evaluate(times(1))
    estimator = make(tmp_path, save_checkpoints_steps=None).train(endless, steps=3)
    assert saved_steps(estimator) == [0, 5]
    assert estimator.evaluate(times(1)) == earlier


# Training: several steps in one program.


@pytest.mark.slow
@pytest.mark.covers("12 TPUEstimator: steps per program")
def test_steps_per_loop_changes_nothing_but_speed(tmp_path, messages, caplog):
    smaller = (X[:2], Y[:2])

    def run(k):
        caplog.clear()
        config = {"save_checkpoints_steps": 7, "log_step_count_steps": 4, "keep_checkpoint_max": None}
        estimator = make(tmp_path / str(k), steps_per_loop=k, **config)
        estimator.train(lambda: [(X + i, Y) for i in range(16)] + [smaller])
        estimator.train(lambda: [(X + i, Y) for i in range(9)], steps=8)
        logged = [int(m[1]) for text in messages() if (m := re.search(r"step = (\d+)", text))]
        return estimator, saved_steps(estimator), logged

    trained = {k: run(k) for k in (1, 3, 50, "auto")}
    one = values(trained[1][0])
    for steps_per_loop, (estimator, saved, logged) in trained.items():
        assert saved == [0, 7, 14, 17, 24, 25], steps_per_loop
        assert logged == [1, 4, 8, 12, 16, 18, 21, 25], steps_per_loop
        for name, value in values(estimator).items():
            np.testing.assert_allclose(value, one[name], rtol=2e-5, atol=1e-7)


@pytest.mark.quick
@pytest.mark.covers("1.3 log lines: model_fn is called")
@pytest.mark.parametrize("steps_per_loop", [1, "auto"])
def test_something_is_logged_before_compiling_and_after_the_first_step(
    tmp_path, messages, compilations, steps_per_loop
):
    class Notes(est.Hook):
        def after_run(self, context, values):
            losses.append(values.loss)

    def model_fn(features, labels, mode):
        assert any(text.startswith(f"Calling model_fn in mode '{mode.name.lower()}'") for text in messages())
        return Linear()(features, labels, mode)

    losses: list[float] = []
    estimator = make(tmp_path, model_fn, steps_per_loop=steps_per_loop)
    line = "Calling model_fn in mode 'train' and compiling it; the first batch takes longer."

    def input_fn():
        assert line not in messages() and not compilations
        return endless()

    estimator.train(input_fn, hooks=[Notes()], steps=3)
    estimator.train(endless, hooks=[Notes()], steps=2)
    assert messages().count(line) == 1
    assert [text for text in messages() if text.startswith("loss = ")] == [
        f"loss = {losses[0]:.6g}, step = 1",
        f"loss = {losses[3]:.6g}, step = 4",
    ]
    for verb in (estimator.evaluate, lambda fn: list(estimator.predict(fn))):
        verb(times(1))
        verb(times(1))
    modes = [text.split("'")[1] for text in messages() if text.startswith("Calling model_fn")]
    assert modes == ["train", "eval", "predict"]


def test_steps_per_loop_stacks_trees_without_labels(tmp_path):
    model_fn = minimizing(lambda x, y: jnp.mean((zeros("w") - x["a"]["b"]) ** 2), optax.sgd(0.5))
    estimator = make(tmp_path, model_fn, steps_per_loop=3)
    estimator.train(lambda: [{"a": {"b": np.full(2, i, np.float32)}} for i in range(7)])
    assert estimator.get_variable_value("w") == 6
    estimator.train(lambda: ({"a": {"b": jnp.full(2, i, jnp.float32)}} for i in range(3)))
    assert estimator.get_variable_value("w") == 2


def test_a_loop_longer_than_the_log_interval_is_one_program_and_logs_all_steps_due(tmp_path, messages, monkeypatch):
    started = []
    runs = Programs.runs
    monkeypatch.setattr(Programs, "runs", lambda *args: started.extend(made := runs(*args)) or made)
    estimator = make(tmp_path, steps_per_loop=150, log_step_count_steps=100)
    estimator.train(endless, steps=900)
    logged = [int(m[1]) for text in messages() if (m := re.search(r"step = (\d+)", text))]
    assert logged == [1, *range(100, 901, 100)]
    assert started[0].steps == 1 and max(run.steps for run in started) > 100


def test_a_final_loss_that_has_diverged_is_named(tmp_path, messages):
    for rate, is_named in ((0.01, False), (5.0, True)):
        linear = Linear(lambda rate=rate: optax.sgd(rate))
        make(tmp_path / str(rate), linear).train(endless, steps=12)
        assert any("training has diverged. Lower the learning rate" in each for each in messages()) == is_named
