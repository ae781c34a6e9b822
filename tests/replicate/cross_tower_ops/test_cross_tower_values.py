"""Values with one array per tower, outside of programs."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.refused import raises

import estimator as est
from replicate.cross_tower_ops import Mirrored, PerTower

CPUS = jax.devices("cpu")


def elsewhere(index=1):
    """A device of another process."""
    device = mock.Mock(spec=jax.Device, platform="cpu", process_index=index)
    device.__str__ = lambda _: f"cpu:{2048 * index}"
    return device


def slices(indices, dtype=np.float32, rows=4):
    return est.IndexedSlices(np.ones((len(indices), 2), dtype), np.array(indices, np.int32), (rows, 2))


@pytest.mark.parametrize("kind", [PerTower, Mirrored])
def test_arrays_come_in_the_order_of_the_devices_given(kind):
    value = kind({"/cpu:3": np.float32(3), CPUS[1]: jnp.float32(1), "CPU:2": jnp.float32(2)})
    assert value.devices == value.towers == (CPUS[3], CPUS[1], CPUS[2])
    assert [float(x) for x in value] == [3, 1, 2]
    assert len(value) == 3
    for device, x in zip(value.devices, value, strict=True):
        assert x.devices() == {device} and x.committed
        assert value.get(device) is x
    assert float(value.get("/device:CPU:1")) == 1


def test_a_list_of_arrays_is_taken_by_where_they_are():
    arrays = [jax.device_put(jnp.arange(2) + i, CPUS[i]) for i in (4, 0, 2)]
    value = PerTower(arrays)
    assert value.devices == (CPUS[4], CPUS[0], CPUS[2])
    assert all(x is y for x, y in zip(value, arrays, strict=True))


def test_an_array_that_is_elsewhere_is_put_on_its_device():
    x = jnp.arange(3)
    value = PerTower({"/cpu:5": x, "/cpu:0": x, "/cpu:1": 0 * np.asarray(x)})
    assert [a.devices() for a in value] == [{CPUS[5]}, {CPUS[0]}, {CPUS[1]}]
    np.testing.assert_array_equal(value.get("/cpu:5"), x)


def test_values_cannot_be_changed():
    value = PerTower({"/cpu:0": np.ones(2)})
    for name in ("devices", "_arrays", "new"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
    with pytest.raises(TypeError):
        value[CPUS[0]] = jnp.ones(2)


@pytest.mark.parametrize("kind", [PerTower, Mirrored])
def test_a_function_is_mapped_over_the_arrays_where_they_are(kind):
    value = kind({"/cpu:1": np.arange(2), "/cpu:6": np.arange(2)})
    doubled = jax.tree.map(lambda x: 2 * x, jax.block_until_ready(value))
    assert type(doubled) is kind and doubled.devices == doubled.towers == value.devices
    assert [x.devices() for x in doubled] == [{CPUS[1]}, {CPUS[6]}]
    np.testing.assert_array_equal(doubled.get("cpu:6"), [0, 2])
    assert jax.tree.structure(value) == jax.tree.structure(doubled)
    assert jax.tree.structure(value) != jax.tree.structure(kind({"/cpu:1": 0, "/cpu:2": 0}))


def test_rows_of_sparse_values_may_be_many_or_few():
    value = PerTower({"/cpu:0": slices([1]), "/cpu:1": slices([0, 3, 3]), "/cpu:2": slices([])})
    assert [len(x.indices) for x in value] == [1, 3, 0]
    assert all(leaf.devices() == {CPUS[1]} for leaf in jax.tree.leaves(value.get("/cpu:1")))
    assert repr(PerTower([value.get("/cpu:2")])) == (
        "PerTower({cpu:2: IndexedSlices of float32[4, 2] with int32 indices})"
    )


def test_a_mirrored_value_is_its_first_copy():
    value = Mirrored({"/cpu:2": np.arange(3), "/cpu:1": np.arange(3)})
    assert value.value is value.get("/cpu:2")
    np.testing.assert_array_equal(value, [0, 1, 2])
    assert np.asarray(value, np.float64).dtype == np.float64
    assert repr(value) == "Mirrored({cpu:2: int32[3], cpu:1: int32[3]})"


def test_a_value_may_be_a_part_of_one_that_spans_processes():
    other = elsewhere()
    x = {CPUS[1]: np.float32(1), CPUS[0]: np.float32(0)}
    value = PerTower(x, towers=[other, CPUS[0], CPUS[1]])
    assert value.towers == (other, CPUS[0], CPUS[1])
    assert value.devices == (CPUS[0], CPUS[1])
    assert [float(a) for a in value] == [0, 1]
    for towers in ([other, CPUS[0]], [other, CPUS[0], CPUS[1], CPUS[2]], [CPUS[0], CPUS[1], other, other]):
        names = ", ".join(map(str, towers))
        with raises(ValueError, f"`PerTower` got arrays on cpu:1, cpu:0, yet as towers {names}, of which "):
            PerTower(x, towers=towers)


def test_devices_of_another_process():
    message = ", a device of process 1; this is process 0. Each process gives its own devices only."
    with raises(ValueError, message):
        PerTower({elsewhere(): np.ones(2)})
    with raises(ValueError, message):
        PerTower({"/cpu:0": np.ones(2)}).get(elsewhere())


def test_a_device_that_has_no_array():
    with raises(ValueError, "`get`: there is no array on '/cpu:2', only on cpu:0, cpu:1."):
        PerTower({"/cpu:0": 1.0, "/cpu:1": 2.0}).get("/cpu:2")


TWICE = "`PerTower` takes one array per device; got several on one of "
ALIKE = "`PerTower` takes arrays of one shape and dtype; got "
IN_A_LIST = " in a list, which is on no device. Give a dict, `PerTower({device: array})`."


@pytest.mark.parametrize(
    "values, kind, message",
    [
        (np.ones(2), TypeError, "`PerTower` takes a dict of devices to arrays, or a list of arrays on different"),
        ({}, ValueError, "`PerTower` needs at least one array; got none."),
        ([], ValueError, "`PerTower` needs at least one array; got none."),
        ([np.float32(1)], TypeError, "`PerTower` got np.float32(1.0)" + IN_A_LIST),
        ([None], TypeError, "`PerTower` got None" + IN_A_LIST),
        ([slices([0])], TypeError, IN_A_LIST),
        ({"/cpu:0": {"w": np.ones(2)}}, TypeError, "For a tree of arrays, make one PerTower of each leaf, and use"),
        ({"/cpu:0": "1"}, TypeError, "`PerTower` takes one array for each tower; got '1'."),
        ({"/cpu:9": np.ones(2)}, ValueError, "There is no device '/cpu:9'. The devices of this process are "),
        ({0: np.ones(2)}, ValueError, "There is no device 0. The devices of this process are "),
        ({"/cpu:0": 1.0, "cpu:0": 1.0}, ValueError, TWICE + "cpu:0, cpu:0."),
        ({"/cpu:0": np.ones(2), "/cpu:1": np.ones(3)}, ValueError, ALIKE + "float32[2] on cpu:0, float32[3] on cpu:1."),
        ({"/cpu:0": np.int32(2), "/cpu:1": np.float32(3)}, ValueError, ALIKE + "int32[] on cpu:0, float32[] on cpu:1."),
        ({"/cpu:0": slices([1]), "/cpu:1": np.ones((4, 2))}, ValueError, ALIKE + "IndexedSlices of float32[4, 2] with"),
        ({"/cpu:0": slices([1]), "/cpu:1": slices([1], rows=5)}, ValueError, ALIKE),
        ({"/cpu:0": slices([1]), "/cpu:1": slices([1], np.float16)}, ValueError, ALIKE),
        ({"/cpu:0": slices([[1]])}, ValueError, "`PerTower` got IndexedSlices with values of shape (1, 2)"),
    ],
)
def test_values_that_are_none(values, kind, message):
    with raises(kind, message):
        PerTower(values)


def test_arrays_on_the_same_device():
    with raises(ValueError, TWICE + "cpu:0, cpu:0."):
        PerTower([jnp.ones(2), jnp.ones(2)])


def test_an_array_on_several_devices():
    everywhere = jax.sharding.NamedSharding(jax.make_mesh((4,), ("x",)), jax.sharding.PartitionSpec())
    with raises(ValueError, "`PerTower` got an array that is on 4 devices. Give one for each device, such as `[shard"):
        PerTower([jax.device_put(jnp.ones(2), everywhere)])


def test_arrays_within_a_program_are_on_no_device():
    message = "`PerTower` is for values outside of programs; within one, arrays are on no device yet."
    for make in (lambda x: PerTower([x]), lambda x: PerTower({CPUS[0]: x, "/cpu:1": np.ones(2)})):
        with raises(TypeError, message):
            jax.jit(make)(jnp.ones(2))
