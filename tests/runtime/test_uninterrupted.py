"""Work that signals do not cut in two, and what Ctrl-C ends how soon."""

import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from testing.estimators import make, times
from testing.hooks import When
from testing.signals import interrupt

from estimator.runtime import _uninterrupted
from estimator.runtime._uninterrupted import compile_first, shield

pytestmark = [pytest.mark.covers("1.3 preemption"), pytest.mark.usefixtures("default_handler")]


def test_results_and_errors_match_the_function_under_the_settings_of_the_caller():
    @shield
    def double(x):
        return x + jnp.zeros(()), threading.current_thread() is threading.main_thread()

    with jax.enable_x64(True):
        value, in_main = double(2.0)
    assert value.dtype == jnp.float64 and not in_main
    with pytest.raises(ZeroDivisionError):
        shield(lambda: 1 / 0)()


def test_an_interrupt_comes_when_the_work_is_done():
    done = []

    @shield
    def work():
        interrupt()
        time.sleep(0.3)
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done and not _uninterrupted._unfinished


@pytest.mark.parametrize("second", [False, True], ids=["in time", "at the second"])
def test_an_interrupt_comes_before_the_end_of_long_work(monkeypatch, second):
    monkeypatch.setattr(_uninterrupted, "_SECONDS_TO_FINISH", 60 if second else 0.2)
    end = threading.Event()

    @shield
    def work():
        interrupt()
        if second:
            time.sleep(0.2)
            interrupt()
        end.wait(60)

    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - since < 10
    ((left),) = _uninterrupted._unfinished
    end.set()
    left.thread.join()
    _uninterrupted._unfinished.clear()


def test_to_compile_first_compiles_nothing_twice(compilations):
    program = jax.jit(lambda tree, x: ({"w": tree["w"] + x}, x), donate_argnums=0)
    args = {"w": jnp.ones((3, 3))}, jnp.ones(3)
    before = len(compilations)
    compile_first(program, *args)
    assert len(compilations) == before + 1
    program(*args)
    assert len(compilations) == before + 1


# A Ctrl-C that was dropped.


def drop_ctrl_c(context):
    """Its exception ends nothing, as if it came in a callback of the garbage collector."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_dropped_ctrl_c_ends_the_run(tmp_path, verb):
    steps = []
    hooks = [When(3, after_run=drop_ctrl_c), When(after_run=lambda context: steps.append(context.step))]
    estimator = make(tmp_path).train(times(1), max_steps=1)
    with pytest.raises(KeyboardInterrupt):
        list(getattr(estimator, verb)(times(20), hooks=hooks))
    assert steps[-1] == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
