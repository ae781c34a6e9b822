"""Where the input resumes when a training run does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import estimators
from testing.estimators import make, step_of
from testing.hooks import Noted
from testing.signals import wait_until

import estimator as est

pytestmark = pytest.mark.covers("13 2 input position is never saved")

N = 12
Numbers = functools.partial(estimators.Numbers, N)


def model_fn(features, mode):
    """Counts in "seen" how often it has seen each batch."""
    w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    est.get_variable("seen", (N,), jnp.int32, jax.nn.initializers.zeros, trainable=False)
    est.assign_add("seen", jax.nn.one_hot(features[0], N, dtype=jnp.int32))
    return est.EstimatorSpec(mode, loss=w, train_op=est.Optimizer(optax.sgd(0.0)).minimize(w))


def generator(stop=N):
    return (np.full(1, n, np.int32) for n in range(stop))


def new(model_dir, **config):
    """An Estimator as another process would make it."""
    return make(model_dir, model_fn, **config)


def seen(estimator):
    return estimator.get_variable_value("seen").tolist()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "how", "goes_on", "steps_per_loop"),
    [
        (Numbers, "position", True, 3),
        (Numbers, "count", True, 1),
        (Numbers, None, False, 1),
        (generator, "position", False, 1),
        (generator, "count", True, 3),
    ],
)
def test_the_input_resumes_as_the_config_says(tmp_path, source, how, goes_on, steps_per_loop):
    for last in (4, 7, 9):  # three processes
        estimator = new(tmp_path, resume_input=how, steps_per_loop=steps_per_loop)
        estimator.train(source, max_steps=last)
    expected = [1] * 9 + [0] * 3 if goes_on else [3, 3, 2, 1] + [0] * 8
    assert seen(estimator) == expected


@pytest.mark.quick
@pytest.mark.parametrize("how", ["position", "count"])
def test_the_position_counts_the_batches_trained_on_not_the_ones_read_ahead(tmp_path, how):
    source = Numbers()
    new(tmp_path, resume_input=how, steps_per_loop=2).train(lambda: source, max_steps=4, hooks=[Noted("", [])])
    again = Numbers()
    new(tmp_path, resume_input=how).train(lambda: again)
    assert source.read == 4  # no more than the steps to make
    assert again.set == [4] and again.read == N - 4  # it is not skipped, though it could be


def at(step, does):
    """A hook that does something after a step, of which the input's thread does not know."""
    return Noted("", [], after_run=lambda context, values: context.global_step == step and does(context))


def test_what_was_read_ahead_is_read_again(tmp_path):
    source = Numbers()

    def end_behind_the_source(context):
        wait_until(lambda: source.read > 5)
        context.request_stop()

    new(tmp_path).train(lambda: source, hooks=[at(5, end_behind_the_source)])
    assert seen(new(tmp_path)) == [1] * 5 + [0] * 7
    assert seen(new(tmp_path).train(Numbers)) == [1] * N


@pytest.mark.slow
def test_after_the_end_of_the_input_it_begins_again(tmp_path):
    assert seen(new(tmp_path).train(Numbers)) == [1] * N
    assert seen(new(tmp_path).train(Numbers, steps=2)) == [2, 2] + [1] * 10
    assert seen(new(tmp_path).train(Numbers)) == [2] * N


@pytest.mark.quick
@pytest.mark.parametrize(("source", "how"), [(Numbers, "position"), (generator, "count")])
def test_killed_after_the_last_checkpoint_it_makes_no_further_steps(tmp_path, messages, source, how):
    def kill(context):
        raise KeyboardInterrupt

    config = {"resume_input": how, "save_checkpoints_steps": N // 2}
    with pytest.raises(KeyboardInterrupt):
        new(tmp_path, **config).train(source, hooks=[at(N, kill)])
    assert step_of(new(tmp_path)) == N
    assert seen(new(tmp_path, **config).train(source)) == [1] * N
    path = tmp_path / f"ckpt-{N}"
    assert (
        f"Training made no steps: {path} is of the end of the input. The next training run begins it again."
        in messages()
    )
    assert seen(new(tmp_path, **config).train(source)) == [2] * N


def test_a_second_train_of_the_same_estimator_begins_again(tmp_path):
    estimator = new(tmp_path)
    for _ in range(2):
        estimator.train(Numbers, steps=3)
    assert seen(estimator) == [2] * 3 + [0] * 9
    assert seen(new(tmp_path).train(Numbers, steps=3)) == [2] * 3 + [1] * 3 + [0] * 6


@pytest.mark.quick
@pytest.mark.parametrize("how", ["position", "count"])
def test_a_second_train_that_failed_is_resumed_if_it_has_saved(tmp_path, how):
    estimator = new(tmp_path, save_checkpoints_steps=5, resume_input=how).train(Numbers, max_steps=3)
    for step, newest in ((4, 3), (9, 8)):  # before its first save, after it

        def fail(context):
            raise RuntimeError("the machine is gone")

        with pytest.raises(RuntimeError, match="the machine is gone"):
            estimator.train(Numbers, max_steps=10, hooks=[at(step, fail)])
        assert step_of(estimator) == newest
    assert seen(estimator.train(Numbers, max_steps=10)) == [2] * 3 + [1] * 4 + [0] * 5


@pytest.mark.quick
@pytest.mark.parametrize("how", ["position", "count"])
def test_a_process_that_begins_where_another_has_made_all_steps_of_an_epoch_begins_the_next(tmp_path, how):
    for last in (N, 2 * N):
        new(tmp_path, resume_input=how).train(Numbers, max_steps=last)
    assert seen(new(tmp_path)) == [2] * N


@pytest.mark.quick
@pytest.mark.usefixtures("quick_steps")
@pytest.mark.parametrize("steps_per_loop", [1, 3])
def test_a_save_before_a_step_has_the_position_before_it(tmp_path, steps_per_loop):
    class Saves(est.Hook):
        before_run_may_be_early = steps_per_loop > 1

        def next_step(self, step):
            return step + 6 - step % 6

        def before_run(self, context):
            context.save()

        def after_run(self, context, values):
            raise RuntimeError("the machine is gone")

    config = {"steps_per_loop": steps_per_loop, "save_checkpoints_steps": 100}
    with pytest.raises(RuntimeError, match="the machine is gone"):
        new(tmp_path, **config).train(Numbers, hooks=[Saves()])
    assert step_of(new(tmp_path)) == (5 if steps_per_loop == 1 else 3)
    assert seen(new(tmp_path, **config).train(Numbers)) == [1] * N


def test_a_train_that_was_skipped_was_none(tmp_path):
    new(tmp_path).train(Numbers, max_steps=3)
    estimator = new(tmp_path)
    for last in (3, 5):
        estimator.train(Numbers, max_steps=last)
    assert seen(estimator) == [1] * 5 + [0] * 7


def test_a_run_that_saves_nothing_does_not_move_the_position(tmp_path):
    new(tmp_path).train(Numbers, max_steps=5)
    new(tmp_path, save_checkpoints_steps=None).train(Numbers)  # to its end
    assert seen(new(tmp_path).train(Numbers)) == [1] * N


def test_an_input_that_is_shorter_than_what_was_taken_is_an_error(tmp_path):
    new(tmp_path, resume_input="count").train(generator, max_steps=5)
    message = (
        r"ckpt-5 was saved after 5 batches of the input, but input_fn gave only 3\. Give the same input, or begin "
        r"again by RunConfig\(resume_input=None\)"
    )
    with pytest.raises(ValueError, match=message):
        new(tmp_path, resume_input="count").train(lambda: generator(3))
    assert seen(new(tmp_path, resume_input=None).train(lambda: generator(3))) == [2] * 3 + [1] * 2 + [0] * 7


def test_a_position_of_other_data_is_an_error_that_says_which_checkpoint(tmp_path):
    def data(n):
        return est.inputs.numpy_input_fn(np.arange(n, dtype=np.int32), None, 1, None, shuffle=False)

    new(tmp_path).train(data(5), max_steps=7)
    with pytest.raises(ValueError, match="is not one of this input") as raised:
        new(tmp_path).train(data(6), max_steps=9)
    note = f"The position is from {tmp_path}/ckpt-7. RunConfig(resume_input=None) begins the input again."
    assert raised.value.__notes__ == [note]
    assert seen(new(tmp_path).train(data(5), max_steps=11))[:5] == [3, 2, 2, 2, 2]


def test_an_input_without_position_says_that_it_begins_again(tmp_path, messages):
    new(tmp_path).train(generator, max_steps=5)
    new(tmp_path).train(generator, max_steps=6)
    assert "The input begins again: there is no position in it; see RunConfig(resume_input=...)." in messages()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "config", "lines"),
    [
        (generator, {"save_checkpoints_steps": 2}, 1),
        (generator, {"save_checkpoints_steps": 2, "resume_input": "count"}, 0),
        (generator, {"save_checkpoints_steps": 2, "resume_input": None}, 0),
        (generator, {"save_checkpoints_steps": 20}, 1),  # it saves at the end alone, but may give more batches
        (generator, {"save_checkpoints_steps": None, "save_checkpoints_secs": 600}, 0),
        (Numbers, {"save_checkpoints_steps": 2}, 0),
    ],
)
def test_a_run_says_once_that_its_input_would_begin_again(tmp_path, messages, source, config, lines):
    new(tmp_path, **config).train(source)
    (end,) = {text[text.index("after a kill") :] for text in messages() if "has no position" in text} or [""]
    assert sum("The input has no position that a checkpoint can hold" in text for text in messages()) == lines
    assert not lines or end == (
        "after a kill the next process begins it again, and ends with other values than a run that was not killed. "
        "With RunConfig(resume_input='count') it reads up to the place, and ends with the same."
    )


@pytest.mark.quick
@pytest.mark.parametrize(("max_steps", "line"), [(9, 1), (5, 0)])
def test_it_says_so_before_the_first_step_of_a_run_that_saves_before_its_last(tmp_path, messages, max_steps, line):
    said = []

    def look(context):
        said.append(sum("has no position" in text for text in messages()))

    hook = Noted("", [], after_create_state=look, before_run=look)
    new(tmp_path, save_checkpoints_steps=5).train(generator, max_steps=max_steps, hooks=[hook])
    assert said[:2] == [0, line]
