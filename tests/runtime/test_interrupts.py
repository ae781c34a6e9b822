"""Ctrl-C ends a run even if its KeyboardInterrupt was dropped, and changes nothing for those who handle SIGINT."""

import signal

import pytest
from testing.estimators import make, step_of, times

import estimator as est


@pytest.fixture(autouse=True)
def default_handler():
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, old)


class Dropped(est.Hook):
    """A Ctrl-C after step 3 whose exception ends nothing, as if it came in a callback of the garbage collector."""

    def after_run(self, context, values):
        if context.step == 3:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_a_dropped_ctrl_c_ends_the_run(tmp_path, verb):
    steps = []

    class Last(est.Hook):
        def after_run(self, context, values):
            steps.append(context.step)

    estimator = make(tmp_path).train(times(1), max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        getattr(estimator, verb)(times(20), hooks=[Dropped(), Last()])
    assert steps[-1] == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_a_handler_of_the_user_stays_and_decides(tmp_path):
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))

    class Raises(est.Hook):
        def after_run(self, context, values):
            signal.raise_signal(signal.SIGINT)

    assert step_of(make(tmp_path).train(times(4), hooks=[Raises()])) == 4
    assert len(calls) == 4
