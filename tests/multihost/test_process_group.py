"""A single process is a group of one."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import estimator as est
from estimator.core._placement import Placement
from estimator.multihost import _key_value_group
from estimator.multihost._collective_call import collective_call, run_on_chief
from estimator.multihost._key_value_group import KeyValueGroup, from_json, to_json
from estimator.multihost._process_group import ProcessGroup, SingleProcess
from estimator.multihost._supervisor import SUPERVISOR
from estimator.runtime._uninterrupted import Work


def test_a_single_process_exchanges_with_itself():
    with collective_call("train()") as group:
        assert isinstance(group, SingleProcess)
        assert (group.index, group.count, group.towers, group.waits_for) == (0, 1, 1, None)
        assert group.all_gather((1, "a")) == [(1, "a")]
        first, second = group.start_gather("a"), group.start_gather("b")
        assert group.finish_gather(second) == ["b"] and group.finish_gather(first) == ["a"]
        value = object()
        assert group.broadcast_from_chief(lambda: value) is value
        group.set_placement(Placement())  # need not span processes


def test_flags_of_channels_are_their_own():
    group = SingleProcess()
    channel = group.channel("input")
    assert channel.read_flag() is None
    channel.flag("SIGINT")
    assert (channel.read_flag(), group.read_flag()) == ("SIGINT", None)


def test_what_process_0_does_alone_may_call_the_estimator_where_it_is_the_only_one(tmp_path):
    def model_fn(features, mode):
        return est.EstimatorSpec(mode, predictions=features, loss=features.mean())

    estimator = est.Estimator(model_fn, tmp_path)
    results = run_on_chief("export", lambda: estimator.evaluate(lambda: np.ones((2, 1), np.float32)))
    assert results["loss"] == 1


def test_both_kinds_of_groups_have_the_same_methods():
    names = [name for name, _ in inspect.getmembers(ProcessGroup, inspect.isfunction) if not name.startswith("_")]
    assert len(names) > 8
    for kind in (SingleProcess, KeyValueGroup):
        assert not inspect.isabstract(kind)
        assert all(callable(getattr(kind, name)) for name in names)


class Client:
    """A key-value store whose other process sets a key, then ends, while the first look at it times out."""

    def __init__(self, publishes):
        self.publishes, self.looks = publishes, 0

    def blocking_key_value_get(self, key, timeout_ms):
        self.looks += 1
        if self.looks > 1 and self.publishes:
            return to_json("the value")
        SUPERVISOR.last_ended = "process 0 (host a, pid 4711)"
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nothing yet")

    def key_value_dir_get(self, key):
        return []


@pytest.mark.parametrize("publishes", [True, False])
def test_a_process_that_has_ended_in_order_is_missed_only_where_it_has_published_nothing(monkeypatch, publishes):
    client, now = Client(publishes), itertools.count(step=10.0)
    monkeypatch.setattr(SUPERVISOR, "last_ended", None)
    monkeypatch.setattr(SUPERVISOR, "loss", None)
    monkeypatch.setattr(_key_value_group, "connected_client", lambda: client)
    monkeypatch.setattr(SUPERVISOR, "ask", Work)  # which does not start
    monkeypatch.setattr(_key_value_group.time, "monotonic", lambda: next(now))
    group = KeyValueGroup("train()", SingleProcess())
    group.index, group.count = 1, 2
    if publishes:
        assert group.broadcast_from_chief(dict) == "the value"
        return
    with pytest.raises(est.ProcessLostError, match="process 0 .* has ended before this one"):
        group.broadcast_from_chief(dict)
    assert client.looks == 2


def trees(leaves):
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@pytest.mark.slow
@given(trees(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()))
def test_what_processes_send_arrives_as_it_is(value):
    assert from_json(to_json(value)) == value


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", ">i4", "complex64", "float16"])
def test_arrays_arrive_to_the_bit(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    copy = from_json(to_json({"x": array}))["x"]
    assert (copy.dtype, copy.shape, copy.tobytes()) == (array.dtype, array.shape, array.tobytes())
    copy[0, 0] = 1  # it can be written


def test_scalars_become_numbers():
    assert from_json(to_json([np.float32(0.1), jnp.int32(3), np.array(True)])) == [float(np.float32(0.1)), 3, True]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()])])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match=r"Processes send each other what JSON knows, bytes and arrays; got .* of type"):
        to_json(value)
