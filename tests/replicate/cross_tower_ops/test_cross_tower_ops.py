"""Values outside of programs, reduced over towers and copied to devices."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.refused import raises

import estimator as est
from replicate import cross_tower_sum
from replicate.cross_tower_ops import (
    AllReduce,
    CollectiveAllReduce,
    CrossTowerOps,
    Mirrored,
    MultiWorkerAllReduce,
    PerTower,
    ReduceOp,
    ReductionToOneDevice,
    _base,
)
from replicate.towers._map import tower_map

CPUS = jax.devices("cpu")
KINDS = [
    *itertools.product([np.float32], [(), (257,), (0,), (2, 3)]),
    *itertools.product([jnp.bfloat16], [(7,), (), (0, 3)]),
    *itertools.product([np.int32], [(1,), (3, 0, 2), (5,), ()]),
]


class Sum(CrossTowerOps):
    """Notes what it is given at each trace."""

    def __init__(self):
        self.traced = []

    def sum_in_towers(self, values):
        self.traced.append([x.shape for x in values])
        return cross_tower_sum(list(values))


SUM, ONE_DEVICE = Sum(), ReductionToOneDevice()
OPS = {  # and the number of towers; sums by every algorithm are tested in test_cross_tower_algorithms.py
    "sum": (SUM, 3),
    "lone": (SUM, 1),
    "one_device": (ONE_DEVICE, 8),
    "ring": (AllReduce("ring"), 8),
    "small_arrays": (AllReduce(num_packs=0, agg_small_grads_max_bytes=16, agg_small_grads_max_group=2), 8),
    "by_size": (MultiWorkerAllReduce([("psum", 1, 16), ("ring/tree", 2, -1)]), 8),
    "chunks": (CollectiveAllReduce(2), 8),
}


def numbers(rng, shape, dtype, towers):
    """Of which sums have no rounding, bfloat16 or not."""
    return [rng.integers(-16, 17, shape).astype(dtype) for _ in range(towers)]


def per_tower(parts, first=0):
    return PerTower({CPUS[first + i]: part for i, part in enumerate(parts)})


def vector(towers, dtype=np.float32):
    """3 rows of each tower's number."""
    return per_tower([np.full(3, i, dtype) for i in range(towers)])


def slices(rows, indices):
    return est.IndexedSlices(np.array(rows, np.float32), np.array(indices, np.int32), (5, 2))


def assert_mirrored(got, devices, want, dtype):
    """The same float64 numbers on all of the devices."""
    assert type(got) is Mirrored
    assert got.devices == tuple(devices)
    for device, x in zip(devices, got, strict=True):
        assert x.devices() == {device} and x.dtype == dtype and x.shape == want.shape
        np.testing.assert_array_equal(np.asarray(x, np.float64), want)


@pytest.mark.quick
@pytest.mark.parametrize(("ops", "towers"), OPS.values(), ids=OPS)
def test_sums_equal_sums_in_float64(ops, towers):
    rng = np.random.default_rng(towers)
    parts = [numbers(rng, shape, dtype, towers) for dtype, shape in KINDS]
    values = [per_tower(part) for part in parts]
    got = ops.batch_reduce(ReduceOp.SUM, [(value, value) for value in values])
    for one, part, (dtype, _) in zip(got, parts, KINDS, strict=True):
        assert_mirrored(one, CPUS[:towers], np.sum(np.array(part, np.float64), 0), dtype)


@pytest.mark.quick
@pytest.mark.parametrize(
    "ops, op, want", [(SUM, "mean", 1.5), (ONE_DEVICE, "sum", 6.0), (ReductionToOneDevice("/cpu:7"), "mean", 1.5)]
)
def test_every_way_to_name_destinations(ops, op, want):
    """As TensorFlow's test of all its ops has it."""
    value = vector(4)
    elsewhere = Mirrored({"/cpu:7": 1.0, "/cpu:2": 1.0})
    cases = {
        "/cpu:0": [0],
        "/device:CPU:6": [6],
        CPUS[3]: [3],
        ("/cpu:5", CPUS[1]): [5, 1],
        value: [0, 1, 2, 3],
        elsewhere: [7, 2],
    }
    for destinations, numbers in cases.items():
        given = list(destinations) if isinstance(destinations, tuple) else destinations
        devices = [CPUS[i] for i in numbers]
        assert_mirrored(ops.reduce(op, value, given), devices, np.full(3, want), np.float32)
        both = ops.batch_reduce(op, [(elsewhere, "/cpu:4"), (value, given)])  # of other devices each
        assert_mirrored(both[0], [CPUS[4]], np.float64(2 if op == "sum" else 1), np.float32)
        assert_mirrored(both[1], devices, np.full(3, want), np.float32)
        assert_mirrored(ops.broadcast(np.float32(1), given), devices, np.float64(1), np.float32)


@pytest.mark.parametrize("ops", [SUM, ONE_DEVICE])
def test_a_mirrored_value_is_what_every_tower_has(ops):
    value = ops.broadcast(np.full(3, 2.0, np.float32), CPUS[:4])
    assert_mirrored(ops.reduce("sum", value, "/cpu:0"), CPUS[:1], np.full(3, 8.0), np.float32)
    assert_mirrored(ops.reduce("mean", value, value), CPUS[:4], np.full(3, 2.0), np.float32)


@pytest.mark.parametrize("ops", [SUM, ONE_DEVICE])
def test_without_destinations_a_result_is_where_the_values_are(ops):
    """As in TensorFlow's original, whose `broadcast` needs them too."""
    value, sparse = vector(3), per_tower([slices([[1, 2]], [1]), slices([[3, 4]], [3])])
    want = np.sum([np.asarray(x) for x in value], 0)
    assert_mirrored(ops.reduce("sum", value), CPUS[:3], want, np.float32)
    total, rows = ops.batch_reduce("sum", [(value, None), (sparse, None)])
    assert_mirrored(total, CPUS[:3], want, np.float32)
    assert rows.devices == tuple(CPUS[:2])


@pytest.mark.parametrize(("ops", "op"), [(SUM, ReduceOp.MEAN), (ONE_DEVICE, ReduceOp.SUM)])
def test_an_array_is_the_value_of_one_tower(ops, op):
    got = ops.reduce(op, jax.device_put(jnp.arange(3), CPUS[2]).astype(jnp.float32), ["/cpu:2", "/cpu:5"])
    assert_mirrored(got, [CPUS[2], CPUS[5]], np.arange(3.0), np.float32)


@pytest.mark.parametrize(
    ("ops", "destinations"),
    [(SUM, ["/cpu:0", "/cpu:1"]), (ONE_DEVICE, "/cpu:4"), (ReductionToOneDevice("/cpu:6"), ["/cpu:0", "/cpu:1"])],
)
def test_row_sparse_values_are_gathered_in_tower_order(ops, destinations):
    """The numbers of TensorFlow's test."""
    value = per_tower([slices([[1, 2]], [1]), slices([[3, 4], [5, 6]], [1, 3])])
    total = ops.reduce("sum", value, destinations)
    mean, dense = ops.batch_reduce("mean", [(value, destinations), (vector(2), "/cpu:0")])
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    for got, want in ((total, rows), (mean, rows / 2)):
        assert type(got) is Mirrored and len(got) == len(np.atleast_1d(destinations))
        for device, x in zip(got.devices, got, strict=True):
            assert x.values.devices() == x.indices.devices() == {device}
            np.testing.assert_array_equal(x.values, want)
            np.testing.assert_array_equal(x.indices, [1, 1, 3])
            assert x.dense_shape == (5, 2)
    np.testing.assert_array_equal(total.value.to_dense(), [[0, 0], [4, 6], [0, 0], [5, 6], [0, 0]])
    np.testing.assert_array_equal(dense, np.full(3, 0.5))


def test_row_sparse_values_are_broadcast():
    value = per_tower([slices([[1, 2]], [4])]).get("/cpu:0")
    got = SUM.broadcast(value, ["/cpu:3", "/cpu:0"])
    assert got.get("/cpu:0").values.unsafe_buffer_pointer() == value.values.unsafe_buffer_pointer()
    np.testing.assert_array_equal(got.value.to_dense(), value.to_dense())
    assert got.value.values.devices() == {CPUS[3]}


def test_values_on_the_same_devices_are_one_program():
    ops = Sum()
    value, scalar = vector(3), per_tower([np.int32(i) for i in range(3)])
    other = per_tower([np.ones(2, np.float32)] * 2, first=2)
    pairs = [(value, value), (other, "/cpu:0"), (scalar, "/cpu:7"), (other, other)]
    ops.batch_reduce("sum", pairs)
    assert ops.traced == [[(3,), ()], [(2,), (2,)]]


def test_the_same_shapes_compile_once(compilations):
    ops = Sum()
    for seed in range(3):
        parts = numbers(np.random.default_rng(seed), (2, 5), np.float32, 3)
        scalars = numbers(np.random.default_rng(seed), (), np.float32, 3)
        pairs = [(per_tower(parts), "/cpu:1"), (per_tower(scalars), "/cpu:4"), (per_tower(parts), CPUS[:3])]
        before = len(compilations)
        got = ops.batch_reduce("mean", pairs)
        np.testing.assert_allclose(got[0], np.mean(parts, 0), rtol=1e-6, atol=1e-6)
        assert (len(compilations) > before) == (seed == 0)
    assert ops.traced == [[(2, 5), (), (2, 5)]]


def test_copies_that_are_there_are_not_moved():
    value, one = vector(3), jax.device_put(jnp.ones(2), CPUS[1])
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        SUM.reduce("sum", value, ["/cpu:2", "/cpu:0"])
        total = SUM.reduce("sum", value, value)
        for given, there in ((total, total.get("/cpu:1")), (one, one)):
            got = SUM.broadcast(given, ["/cpu:1"]).value
            assert got.unsafe_buffer_pointer() == there.unsafe_buffer_pointer()
        with raises(Exception, "Disallowed device-to-device transfer"):
            SUM.reduce("sum", value, "/cpu:3")


@pytest.mark.parametrize("given, want", [(None, [3, 1]), ("/cpu:6", [6, 6])])
def test_one_device_is_the_first_destination_or_the_one_given(given, want, monkeypatch):
    reduced = []

    def copy_to(values, destinations):
        reduced.extend(values)
        return original(values, destinations)

    original = _base.copy_to
    monkeypatch.setattr(_base, "copy_to", copy_to)
    pairs = [(vector(3), ["/cpu:3", "/cpu:0"]), (vector(3), "/cpu:1")]
    ReductionToOneDevice(given).batch_reduce("sum", pairs)
    assert [value.devices for value in reduced] == [(CPUS[i],) for i in want]


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "dtype"), [(3, jnp.bfloat16), (8, np.float32)])
def test_one_device_sums_in_tower_order_inside_of_towers_and_outside(towers, dtype):
    parts = np.random.default_rng(towers).normal(size=(towers, 64)).astype(dtype)
    value = per_tower(list(parts))
    outside = ONE_DEVICE.reduce("sum", value, value).value
    if dtype == np.float32:
        np.testing.assert_array_equal(outside, functools.reduce(np.add, parts))
    inside = tower_map(lambda _, x: (ONE_DEVICE.sum_in_towers([x, x > 0]), None), CPUS[:towers])
    (total, positive), _ = jax.jit(inside)(None, parts.ravel())
    np.testing.assert_array_equal(total, outside)
    np.testing.assert_array_equal(positive, (parts > 0).sum(0))
    assert total.dtype == dtype and positive.dtype == np.int32


def test_another_accumulation():
    ops = ReductionToOneDevice(accumulation_fn=lambda arrays: jnp.stack(arrays).max(0))
    value = vector(4)
    assert_mirrored(ops.reduce("sum", value, "/cpu:0"), CPUS[:1], np.full(3, 3.0), np.float32)
    assert_mirrored(ops.reduce("mean", value, "/cpu:0"), CPUS[:1], np.full(3, 0.75), np.float32)
    inside = tower_map(lambda _, x: (ops.sum_in_towers([x]), None), CPUS[:4])
    np.testing.assert_array_equal(jax.jit(inside)(None, jnp.arange(8))[0][0], [6, 7])
    message = "must return an array like each that it gets, float32[3]; got float32[4, 3]."
    with raises(ValueError, message):
        ReductionToOneDevice(accumulation_fn=jnp.stack).reduce("sum", value, "/cpu:0")


def test_devices_of_several_kinds_are_for_one_device_only():
    gpu = mock.Mock(spec=jax.Device, platform="gpu", process_index=1)
    value = PerTower({"/cpu:0": np.ones(2)}, towers=[CPUS[0], gpu])
    with raises(ValueError, "`Sum` reduces values on devices of one kind; got cpu:0, <Mock"):
        SUM.reduce("sum", value, "/cpu:0")


@pytest.mark.gpu
def test_one_device_takes_devices_of_several_kinds():
    value = PerTower({"/gpu:0": np.float32(1), "/cpu:0": np.float32(2)})
    for destinations in ("/gpu:0", "/cpu:0", ["/cpu:1", "/gpu:0"]):
        got = ReductionToOneDevice().reduce("sum", value, destinations)
        assert [float(x) for x in got] == [3.0] * len(got.devices)


SPARSE, CHUNKS = per_tower([slices([[1, 2]], [1])] * 2), CollectiveAllReduce(2)
NOWHERE = "which is on no device. Give a `PerTower({device: array, ...})`, or one jax array."
PAIRS = "`batch_reduce` takes a list of tuples (value, destinations); got "
KIND = "takes as destinations a device, the name of one, a list of them, or a PerTower whose devices are meant; got "


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda v: SUM.reduce("max", v, v), ValueError, "`reduce` got reduce_op='max'; it is ReduceOp.SUM or"),
        (lambda v: SUM.reduce(None, v, v), ValueError, "`reduce` got reduce_op=None; it is ReduceOp.SUM or"),
        (lambda v: SUM.batch_reduce("", [(v, v)]), ValueError, "`batch_reduce` got reduce_op=''; it is"),
        (lambda v: SUM.reduce("sum", np.ones(2), v), TypeError, "`reduce` got a value of type ndarray, " + NOWHERE),
        (lambda v: SUM.reduce("sum", [v], v), TypeError, "`reduce` got a value of type list, " + NOWHERE),
        (lambda v: SUM.reduce("sum", jax.tree.map(str, v), v), TypeError, "got a value of type PerTower, " + NOWHERE),
        (lambda v: SUM.reduce("sum", 0, v), TypeError, "`reduce` got a value of type int, " + NOWHERE),
        (lambda v: SUM.broadcast({"x": v}, v), TypeError, "`broadcast` got a value of type dict, " + NOWHERE),
        (lambda v: SUM.broadcast(v, v), TypeError, "`broadcast` got PerTower({cpu:0: float32[3], cpu:1: float32[3]}),"),
        (lambda v: SUM.reduce("sum", v, 3), TypeError, f"`reduce` {KIND}3."),
        (lambda v: SUM.broadcast(1.0, None), TypeError, f"`broadcast` {KIND}None."),
        (lambda v: SUM.broadcast(1.0, 3), TypeError, f"`broadcast` {KIND}3."),
        (lambda v: SUM.reduce("sum", v, []), ValueError, "`reduce` got no destinations; name at least one device."),
        (lambda v: SUM.batch_reduce("sum", [(v, ())]), ValueError, "`batch_reduce` got no destinations; name at"),
        (lambda v: SUM.broadcast(1.0, ["cpu", "cpu:0"]), ValueError, "`broadcast` takes each device once in dest"),
        (lambda v: SUM.reduce("sum", v, "/cpu:8"), ValueError, "There is no device '/cpu:8'. The devices of this"),
        (lambda v: ReductionToOneDevice("/xpu:8"), ValueError, "There is no device '/xpu:8'. The devices of this"),
        (lambda v: SUM.batch_reduce("sum", v), TypeError, PAIRS + "PerTower({cpu:0: float32[3]"),
        (lambda v: SUM.batch_reduce("sum", [v, v]), TypeError, PAIRS + "[PerTower({cpu:0: float32[3]"),
        (lambda v: SUM.batch_reduce("sum", [(v, v, v)]), TypeError, PAIRS + "[(PerTower({cpu:0: float32[3]"),
        (lambda v: SUM.batch_reduce("sum", {v: v}), TypeError, PAIRS + "{PerTower({cpu:0: float32[3]"),
        (lambda v: CHUNKS.reduce("sum", SPARSE, v), ValueError, "`CollectiveAllReduce.reduce` takes no row-spar"),
        (lambda v: CHUNKS.batch_reduce("sum", [(SPARSE, v)]), ValueError, "`CollectiveAllReduce.batch_reduce` "),
        (lambda v: SUM.reduce("mean", vector(2, np.int32), v), TypeError, "`reduce` cannot average integers; got Per"),
        (lambda v: ONE_DEVICE.reduce("sum", vector(2, bool), v), TypeError, "`reduce` takes numbers; got PerTower({"),
    ],
)
def test_errors(call, kind, message):
    with raises(kind, message):
        call(vector(2))


def test_devices_of_another_process():
    there = mock.Mock(spec=jax.Device, platform="cpu", process_index=1)
    message = ", a device of process 1; this is process 0. Each process gives its own devices only."
    for call in (SUM.reduce, ONE_DEVICE.reduce):
        with raises(ValueError, "`reduce` got <Mock") as caught:
            call("sum", vector(2), [CPUS[0], there])
        assert str(caught.value).endswith(message)
    with raises(ValueError, message):
        ReductionToOneDevice(there)
    spanning = PerTower({"/cpu:0": SPARSE.get("/cpu:0")}, towers=[CPUS[0], there])
    with raises(ValueError, "`reduce` gathers row-sparse values within one process only; got PerTower({cpu:0: Inde"):
        SUM.reduce("sum", spanning, "/cpu:0")


def test_values_within_a_program():
    for call in (lambda x: SUM.reduce("sum", x, "/cpu:0"), lambda x: SUM.broadcast(x, "/cpu:0")):
        for value in (jnp.ones(2), Mirrored({"/cpu:0": np.ones(2)})):
            with raises(TypeError, "is for values outside of programs; within one, arrays are on no device yet."):
                jax.jit(call)(value)
