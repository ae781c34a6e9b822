"""Hooks that are mocks, hooks whose methods cannot be called, and idioms of TensorFlow that would never be called."""

from unittest import mock

import pytest
from testing.estimators import endless, make, refuse, saved_steps, times
from testing.hooks import WithHooks

import estimator as est

MOMENTS = ["begin", "after_create_state", "before_run", "after_run", "end"]


def moments(mocked):
    return [name for name, _, _ in mocked.method_calls]


@pytest.mark.quick
@pytest.mark.parametrize(
    "make_mock",
    [
        lambda: mock.Mock(spec=est.Hook),
        lambda: mock.MagicMock(wraps=est.Hook(), spec=est.Hook),
        lambda: mock.create_autospec(est.Hook, instance=True),
    ],
)
def test_a_mock_of_a_hook_is_called_around_every_step(tmp_path, make_mock):
    estimator, hook = make(tmp_path), make_mock()
    estimator.train(times(2), hooks=[hook])
    assert moments(hook) == [*MOMENTS[:2], *MOMENTS[2:4] * 2, "end"]
    for call in (
        lambda hook: estimator.evaluate(times(1), hooks=[hook]),
        lambda hook: list(estimator.predict(times(1), hooks=[hook])),
    ):
        call(hook := make_mock())
        assert moments(hook) == MOMENTS


def test_a_mock_may_request_values_and_be_a_hook_of_the_model_fn(tmp_path):
    hook = mock.Mock(spec=est.Hook, **{"before_run.return_value": {"loss": "loss"}})
    make(tmp_path / "own").train(times(1), hooks=[hook])
    ((_, values), _) = hook.after_run.call_args
    assert values.results["loss"] == values.loss
    of_spec = mock.Mock(spec=est.Hook)

    def model_fn(features, labels, mode):
        return WithHooks([])(features, labels, mode)._replace(training_hooks=[of_spec])

    make(tmp_path / "spec", model_fn).train(times(1))
    assert moments(of_spec) == MOMENTS


def test_a_mock_of_a_listener_hears_of_checkpoints(tmp_path):
    listener = mock.Mock(spec=est.CheckpointSaverListener)
    estimator = make(tmp_path)
    estimator.train(times(2), saving_listeners=[listener])
    assert moments(listener) == ["begin", *["before_save", "after_save"] * 2, "end"]
    assert saved_steps(estimator) == [0, 2]


WRONG = {  # by method: one that no run can call, its arguments, and the right ones
    "begin": (lambda self, context: None, "context", "self"),
    "after_run": (lambda self, context: None, "context", "self, context, values"),
    "end": (lambda self, context, session: None, "context, session", "self, context"),
}


@pytest.mark.parametrize("method", WRONG)
@pytest.mark.parametrize("verb", ["train", "evaluate", "predict"])
def test_a_method_that_no_run_can_call_is_an_error_before_the_input_is_read(tmp_path, method, verb):
    function, wrong, right = WRONG[method]
    hook = type("Mine", (est.Hook,), {method: function})()
    message = f"Mine.{method}({wrong}) of a hook cannot be called .* Write `def {method}({right}):`."
    with pytest.raises(TypeError, match=message.replace("(", r"\(").replace(")", r"\)")):
        list(getattr(make(tmp_path), verb)(refuse, hooks=[hook]))


class SavesLess(est.CheckpointSaverListener):
    def after_save(self, context): ...


def test_a_listener_that_no_run_can_call_is_an_error_before_the_input_is_read(tmp_path):
    message = r"SavesLess.after_save\(context\) of a listener .* Write `def after_save\(self, context, step\):`."
    for call in (
        lambda: make(tmp_path).train(refuse, saving_listeners=[SavesLess()]),
        lambda: est.TrainSpec(refuse, saving_listeners=[SavesLess()]),
        lambda: est.CheckpointSaverHook(save_steps=1, listeners=[SavesLess()]),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_methods_may_take_what_they_get_in_their_own_way(tmp_path):
    class Mine(est.Hook):
        def after_run(self, *args):
            self.args = args

        def end(self, context, why="the end"):
            self.why = why

        after_create_state = staticmethod(print)

    hook = Mine()
    make(tmp_path).train(endless, steps=1, hooks=[hook])
    assert len(hook.args) == 2 and hook.why == "the end"


def test_what_tensorflows_step_counter_calls_cannot_be_overridden():
    message = r"Mine._log_and_record would never be called: .* Pass `summary_writer=`, .* `after_run\(self, context, "
    with pytest.raises(TypeError, match=message + r"values\)`."):

        class Mine(est.StepCounterHook):
            def _log_and_record(self, elapsed_steps, elapsed_time, global_step): ...
