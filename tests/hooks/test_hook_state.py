"""What hooks remember from one process to the next."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.estimators import endless, make, refuse, saved_steps, times
from testing.hooks import Noted, NotedListener

import estimator as est
from estimator.storage._json import decode, encode


class Remembering(est.Hook):
    """Remembers the steps at which it was called, and notes what happens to it."""

    def __init__(self, every=1):
        self.every, self.steps, self.calls = every, [], []

    def begin(self):
        self.steps = []
        self.calls.append("begin")

    def set_state(self, state):
        self.steps = state["steps"]
        self.calls.append("set_state")

    def get_state(self):
        return {"steps": list(self.steps)}

    def after_create_state(self, context):
        self.calls.append("after_create_state")

    def next_step(self, step):
        return step + self.every - step % self.every

    def after_run(self, context, values):
        self.steps.append(context.global_step)


def test_a_hook_gets_its_state_back_after_it_has_begun(tmp_path):
    first, second = Remembering(), Remembering()
    make(tmp_path).train(times(3), hooks=[first])
    make(tmp_path).train(times(2), hooks=[second])
    assert first.calls == ["begin", "after_create_state"]
    assert second.calls == ["begin", "set_state", "after_create_state"]
    assert second.steps == [1, 2, 3, 4, 5]


def test_the_state_of_each_checkpoint_has_its_own_step_in_it(tmp_path):
    """Whatever was saved last, a run that resumes from there remembers all steps, each once."""
    config = {"save_checkpoints_steps": 4, "keep_checkpoint_max": None}

    failing = Noted("", [], after_run=lambda context, values: context.global_step == 11 and refuse())
    hooks = [failing, Remembering(2), Remembering(3)]
    with pytest.raises(AssertionError, match="must not be called"):
        make(tmp_path, **config).train(endless, hooks=hooks, max_steps=14)
    assert saved_steps(make(tmp_path)) == [0, 4, 8]
    two, three = Remembering(2), Remembering(3)
    make(tmp_path, **config).train(endless, hooks=[two, three], max_steps=14)
    assert two.steps == [2, 4, 6, 8, 10, 12, 14]
    assert three.steps == [3, 6, 9, 12]


def test_hooks_with_a_state_are_called_before_the_others(tmp_path):
    class Remembers(Noted):
        def get_state(self):
            return 1

    calls = []
    hooks = [Noted("a", calls), Remembers("b", calls), Noted("c", calls), Remembers("d", calls)]
    make(tmp_path).train(times(1), hooks=hooks, saving_listeners=[NotedListener(calls)])
    moments = [f"{name}.after_create_state" for name in "bdac"]
    assert [call for call in calls if call in (*moments, "listener.before_save 0")] == [
        *moments[:2],
        "listener.before_save 0",
        *moments[2:],
    ]


def test_states_go_to_the_hooks_of_the_same_class_by_their_order_and_to_none_that_has_no_state(tmp_path):
    class Other(Remembering):
        pass

    class Silent(Remembering):
        def get_state(self):
            return None

    hooks = [Remembering(1), Other(2), Remembering(3), Silent()]
    make(tmp_path).train(times(6), hooks=hooks)
    again = [Other(2), Remembering(1), Remembering(3), Remembering(4), Silent()]
    make(tmp_path).train(times(1), hooks=again)
    assert [hook.steps for hook in again] == [[2, 4, 6], [1, 2, 3, 4, 5, 6, 7], [3, 6], [], [7]]
    assert ["set_state" in hook.calls for hook in again] == [True] * 3 + [False] * 2


def test_an_error_in_set_state_ends_the_hooks(tmp_path):
    class Fails(Remembering):
        def set_state(self, state):
            raise ValueError("not mine")

        def end(self, context):
            self.context = context

    make(tmp_path).train(times(1), hooks=[Fails()])
    hook = Fails()
    with pytest.raises(ValueError, match="not mine"):
        make(tmp_path).train(times(1), hooks=[hook])
    assert str(hook.context.error) == "not mine"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (np.zeros(2), r"got array\(\[0., 0.\]\) of type ndarray in \['hooks'\]\['Bad/1'\]\["),
        ({1, 2}, r"got \{1, 2\} of type set in \['hooks'\]\['Bad/1'\]\['of'\]\[0\]"),
        ({1: "one"}, r"got \{1: 'one'\} of type dict in"),
        ({"__bytes__": "of the file format"}, "of type dict in"),
        (1j, "got 1j of type complex in"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, state, message):
    class Bad(est.Hook):
        def get_state(self):
            return {"of": [state]}

    message = (
        "A checkpoint holds positions and states of hooks as dicts with strings as keys, lists, numbers, strings, "
        f"bytes and None; {'.*' if 'got' not in message else ''}{message}.*Let `get_state` return these"
    )
    taken = []

    def input_fn():
        taken.append(1)
        yield from times(3)()

    with pytest.raises(TypeError, match=message):
        make(tmp_path, save_summary_steps=None).train(input_fn, hooks=[Bad()])
    assert os.listdir(tmp_path) == []


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(values)
def test_what_is_saved_comes_back(value):
    assert decode(json.dumps(encode(value))) == value


def test_numpy_numbers_and_tuples_come_back_as_python_values():
    state = decode(json.dumps(encode({"a": np.float32(0.5), "b": (np.int64(3), np.array(True)), "nan": float("nan")})))
    assert json.dumps(state) == '{"a": 0.5, "b": [3, true], "nan": NaN}'
