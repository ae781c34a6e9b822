"""Sums over towers: every algorithm takes the same ones, in as many collectives as it says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.cross_tower import DTYPES, assert_sums, collectives, in_towers, random_arrays

from replicate.cross_tower_ops import AllReduce, CollectiveAllReduce, MultiWorkerAllReduce
from replicate.cross_tower_ops._algorithms import ALGORITHMS, hierarchical
from replicate.towers._map import num_towers

SHAPES = [(), (0,), (1,), (3,), (7, 5), (64,), (2, 0, 3), (101,)]


@pytest.mark.slow
@pytest.mark.parametrize("towers, on_one_device", [(5, False), (8, False), (6, True)])
def test_every_algorithm_takes_the_sum_and_all_towers_have_the_same_bits(towers, on_one_device):
    rng = np.random.default_rng(towers)
    arrays = [array for dtype in DTYPES for array in random_arrays(rng, towers, SHAPES, dtype)]
    ops = {name: AllReduce(name) for name in (*ALGORITHMS, "ring/tree")}
    program = in_towers(lambda x: {name: op.sum_in_towers(x) for name, op in ops.items()}, towers, on_one_device)
    by_name = program(arrays)
    for sums in by_name.values():
        assert_sums(sums, arrays)


@st.composite
def sums(draw):
    """An op, the number of towers, and arrays."""
    algorithm = draw(st.sampled_from([*ALGORITHMS, "tree/psum"]))
    packs, shards = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    max_bytes = 0 if packs else draw(st.integers(0, 40))
    packing = {"num_packs": packs, "agg_small_grads_max_bytes": max_bytes, "agg_small_grads_max_group": 3}
    spec = [("psum", 1, 16), (algorithm, shards, None)]
    op = draw(st.sampled_from([AllReduce(algorithm, **packing), MultiWorkerAllReduce(spec, **packing)]))
    shape = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    kinds = draw(st.lists(st.tuples(shape, st.sampled_from(DTYPES)), max_size=6))
    return op, draw(st.sampled_from([1, 2, 3, 4, 5, 8])), kinds


@pytest.mark.slow
@given(case=sums(), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_any_arrays_in_any_packs_are_summed(case, seed):
    op, towers, kinds = case
    rng = np.random.default_rng(seed)
    arrays = [random_arrays(rng, towers, [shape], dtype)[0] for shape, dtype in kinds]
    if arrays:
        assert_sums(in_towers(op.sum_in_towers, towers)(arrays), arrays)
    else:
        assert op.sum_in_towers([]) == []


def test_what_is_not_finite_stays_so():
    towers = 3
    values = np.ones((towers, 6), np.float32)
    values[0, 0], values[1, 1], values[:2, 2], values[-1, 5] = np.nan, np.inf, (np.inf, -np.inf), -np.inf
    ops = {name: AllReduce(name) for name in ALGORITHMS}
    totals = in_towers(lambda value: {name: op.sum_in_towers([value])[0] for name, op in ops.items()}, towers)(values)
    for total in totals.values():
        np.testing.assert_array_equal(total, [[np.nan, np.inf, np.nan, towers, towers, -np.inf]] * towers)


def test_booleans_are_counted():
    values = np.array([[True, False, True], [True, False, False], [True, False, True]])
    for algorithm in ("psum", "ring"):
        (total,) = in_towers(AllReduce(algorithm).sum_in_towers, 3)([values])
        assert total.dtype == jnp.int32
        np.testing.assert_array_equal(total, [[3, 0, 2]] * 3)


def test_one_tower_gets_its_values_back():
    values = [jnp.ones(3), np.int32(2)]
    for op in (AllReduce("ring", compress_dtype=jnp.bfloat16), MultiWorkerAllReduce(), CollectiveAllReduce()):
        assert all(got is value for got, value in zip(op.sum_in_towers(values), values, strict=True))
        text = in_towers(op.sum_in_towers, 1).lower([np.ones((1, 3), np.float32)]).as_text()
        assert collectives(text) == {}


# The number of collectives.

PER_VECTOR = {  # by algorithm: for 4, 5 and 8 towers
    "psum": [{"all_reduce": 1}] * 3,
    "ring": [{"collective_permute": count} for count in (6, 8, 14)],
    "recursive_halving_doubling": [{"collective_permute": count} for count in (4, 6, 6)],
    "tree": [{"collective_permute": count} for count in (4, 6, 6)],
    "hierarchical": [
        {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1},
        {"reduce_scatter": 1, "all_gather": 1},
        {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1},
    ],
    "reduce_scatter_gather": [{"reduce_scatter": 1, "all_gather": 1}] * 3,
}
FLOATS, INTS = [(4,), (30,), (0,), (2,), (2,)], [(3,), (2, 2)]
PACKS = {  # how many vectors these arrays become
    "one of each dtype": ({}, 2),
    "three of each dtype": ({"num_packs": 3}, 6),
    "fewer than requested": ({"num_packs": 1000}, 38 + 7),
    "each array by itself": ({"num_packs": 0}, 6),
    "up to two of up to 16 bytes": (
        {"num_packs": 0, "agg_small_grads_max_bytes": 16, "agg_small_grads_max_group": 2},
        4,  # (2,) and (2,); (0,) needs none; (30,); (4,); the integers
    ),
}


def lowered(op, towers, floats=FLOATS, ints=INTS):
    kinds = [(shape, jnp.float32) for shape in floats] + [(shape, jnp.int32) for shape in ints]
    like = [jax.ShapeDtypeStruct((towers, *shape), dtype) for shape, dtype in kinds]
    return in_towers(op.sum_in_towers, towers).lower(like)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_vector_takes_the_collectives_of_its_algorithm(algorithm):
    for towers, expected in zip((4, 5, 8), PER_VECTOR[algorithm], strict=True):
        assert collectives(lowered(AllReduce(algorithm), towers, ints=()).as_text()) == expected
    twice = {name: 2 * count for name, count in expected.items()}
    assert collectives(lowered(AllReduce(algorithm, num_packs=2), 8, ints=()).as_text()) == twice


@pytest.mark.quick
@pytest.mark.parametrize("packing", PACKS)
def test_there_are_as_many_collectives_as_packs(packing):
    arguments, packs = PACKS[packing]
    program = lowered(AllReduce(**arguments), 2)
    assert collectives(program.as_text()) == {"all_reduce": packs}
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", program.compile().as_text())
    assert sum(result.count("[") for result in results) == packs  # some of which XLA may sum in one all-reduce


def test_xla_keeps_the_collectives_that_are_not_its_own_all_reduce():
    text = lowered(AllReduce("ring", num_packs=2), 4).compile().as_text()
    assert len(re.findall(r" collective-permute(?:-start)?\(", text)) == 2 * 2 * 6
    text = lowered(AllReduce("reduce_scatter_gather", num_packs=2), 4).compile().as_text()
    assert len(re.findall(r" reduce-scatter\(", text)) == len(re.findall(r" all-gather(?:-start)?\(", text)) == 4


def test_chunks_of_n_arrays_share_an_all_reduce():
    shapes = [(i % 5 + 1,) for i in range(70)]
    for scope, count in ((32, 3), (1, 70), (70, 1), (1000, 1)):
        text = lowered(CollectiveAllReduce(scope), 2, shapes, ()).as_text()
        assert collectives(text) == {"all_reduce": count}
    assert collectives(lowered(CollectiveAllReduce(), 2, shapes, [(2,)]).as_text()) == {"all_reduce": 4}


def test_arrays_take_the_algorithm_for_their_size_in_shards():
    spec = [("tree", 1, 8), ("psum", 2, 16), ("reduce_scatter_gather", 3, -1)]
    text = lowered(MultiWorkerAllReduce(spec), 4).as_text()
    # Up to 8 bytes (2,) and (2,); up to 16 (4,), (3,) and (2, 2); then (30,).
    assert collectives(text) == {"collective_permute": 2 * 4, "all_reduce": 3 * 2, "reduce_scatter": 3, "all_gather": 3}
    text = lowered(MultiWorkerAllReduce(spec, num_packs=1), 4).as_text()
    assert collectives(text) == {"collective_permute": 4, "all_reduce": 2 * 2, "reduce_scatter": 3, "all_gather": 3}


# Groups of towers.


def replica_groups(text, name):
    return re.findall(rf'"stablehlo\.{name}".*?replica_groups = dense<(.*?)>', text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm, towers, processes",
    [("psum/psum", 6, 3), ("ring/tree", 8, 2), ("recursive_halving_doubling/ring", 6, 2), ("hierarchical", 8, 2)],
)
def test_several_processes_take_the_same_sums(monkeypatch, algorithm, towers, processes):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    arrays = random_arrays(np.random.default_rng(0), towers, [(13,), ()], jnp.float32)
    assert_sums(in_towers(AllReduce(algorithm).sum_in_towers, towers)(arrays), arrays)


def test_sums_within_each_process_come_before_those_across(monkeypatch):
    within, across = "[[0, 1, 2], [3, 4, 5]]", "[[0, 3], [1, 4], [2, 5]]"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    text = lowered(AllReduce("psum/psum"), 6, ints=()).as_text()
    assert replica_groups(text, "all_reduce") == [within, across]
    text = lowered(AllReduce("hierarchical"), 6, ints=()).as_text()
    assert replica_groups(text, "reduce_scatter") == replica_groups(text, "all_gather") == [within]
    assert replica_groups(text, "all_reduce") == [across]


def test_one_process_has_nothing_to_sum_across():
    text = lowered(AllReduce("psum/ring"), 4, ints=()).as_text()
    assert collectives(text) == {"all_reduce": 1}


@pytest.mark.parametrize("size", [1, 3])
def test_small_groups_may_have_any_size_that_divides_the_towers(size):
    def fn(vector):
        return hierarchical(vector, [list(range(num_towers()))], size)

    arrays = random_arrays(np.random.default_rng(0), 6, [(13,)], jnp.float32)
    assert_sums([in_towers(fn, 6)(arrays[0])], arrays)


def test_small_groups_of_other_sizes_are_refused():
    message = "`hierarchical` got group_size=4, which does not divide 6 towers. Choose a divisor of 6, or leave it out."
    with pytest.raises(ValueError, match=re.escape(message)):
        in_towers(lambda vector: hierarchical(vector, [list(range(6))], 4), 6)(np.ones((6, 3), np.float32))


# Narrower floats on the way.


def test_only_wider_floats_are_compressed():
    rng = np.random.default_rng(0)
    kinds = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32]
    arrays = [random_arrays(rng, 4, [(50,)], dtype)[0] for dtype in kinds]
    op = AllReduce("ring", compress_dtype=jnp.bfloat16)
    sums = in_towers(op.sum_in_towers, 4)(arrays)
    assert_sums(sums[:1], arrays[:1], jnp.bfloat16)
    assert_sums(sums[1:], arrays[1:])
    exact = in_towers(op.exact.sum_in_towers, 4)(arrays)
    assert (np.asarray(exact[0]) != np.asarray(sums[0])).any()
    assert_sums(exact, arrays)
    text = in_towers(op.sum_in_towers, 4).lower(arrays).as_text()
    sent = re.findall(r"stablehlo\.collective_permute.*?-> tensor<\d+x(\w+)>", text)
    assert sorted(set(sent)) == ["bf16", "f16", "i32"]


# What is refused.

ALGORITHM = (
    "has no algorithm {}. Choose one of psum, ring, recursive_halving_doubling, tree, hierarchical, "
    'reduce_scatter_gather; or two as "a/b", for `a` among the towers of each process and `b` across the processes.'
)
LIMITS = (
    "The limits in the all_reduce_spec of `MultiWorkerAllReduce` must rise, and the last entry must have none (None or "
    "-1), so that there is an algorithm for every size; got "
)
TUPLES = "`MultiWorkerAllReduce` takes tuples (algorithm, shards, limit in bytes) as all_reduce_spec, such as "


@pytest.mark.parametrize("name", ["star", "", "ring/", "ring/psum/tree", "/ring", 3, None])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=re.escape("`AllReduce` " + ALGORITHM.format(repr(name)))):
        AllReduce(name)
    with pytest.raises(ValueError, match=re.escape("`MultiWorkerAllReduce` " + ALGORITHM.format(repr(name)))):
        MultiWorkerAllReduce([("psum", 1, 4), (name, 1, None)])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nccl", "TensorFlow's 'nccl' is \"psum\" here."),
        ("hierarchical_copy", "TensorFlow's 'hierarchical_copy' is \"hierarchical\" here."),
        ("nccl/xring", "TensorFlow's 'nccl' is \"psum\" here. TensorFlow's 'xring' is \"ring\" here."),
        ("nccl/rechd", "TensorFlow's 'rechd' is \"recursive_halving_doubling\" here."),
        (
            "pscpu/pscpu",
            "has no algorithm 'pscpu/pscpu'. TensorFlow's 'pscpu' is `ReductionToOneDevice()` here. Choose",
        ),
    ],
)
def test_names_of_tensorflow_are_refused_with_the_name_here(name, hint):
    for op in (AllReduce, MultiWorkerAllReduce):
        with pytest.raises(ValueError, match=re.escape(hint)):
            op(name)


@pytest.mark.parametrize("op", [AllReduce, MultiWorkerAllReduce])
def test_only_one_way_of_packing_may_be_requested(op):
    message = (
        f"`{op.__name__}` packs by num_packs or by agg_small_grads_max_bytes; got num_packs=2 and "
        "agg_small_grads_max_bytes=1024. Set one of them to 0."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        op(num_packs=2, agg_small_grads_max_bytes=1024)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: AllReduce(num_packs=-1), "`AllReduce` needs an integer of at least 0 as `num_packs`; got -1."),
        (lambda: AllReduce(num_packs=1.5), "`AllReduce` needs an integer of at least 0 as `num_packs`; got 1.5."),
        (lambda: AllReduce(num_packs=0, agg_small_grads_max_bytes=-1), "at least 0 as `agg_small_grads_max_bytes`;"),
        (lambda: AllReduce(num_packs=0, agg_small_grads_max_group=0), "at least 1 as `agg_small_grads_max_group`;"),
        (lambda: CollectiveAllReduce(0), "`CollectiveAllReduce` needs an integer of at least 1 as `all_reduce_merge"),
        (lambda: MultiWorkerAllReduce([("psum", 0, None)]), "needs an integer of at least 1 as `shards`; got 0."),
        (lambda: MultiWorkerAllReduce([("psum", 1, "8"), ("psum", 1, -1)]), "at least 1 as `limit`; got '8'."),
        (lambda: MultiWorkerAllReduce([("psum", 1, 8)]), LIMITS + "[('psum', 1, 8)]."),
        (lambda: MultiWorkerAllReduce([("psum", 1, 8), ("ring", 1, 8), ("psum", 1, -1)]), LIMITS),
        (lambda: MultiWorkerAllReduce([("psum", 1, 8), ("ring", 1, 4), ("psum", 1, -1)]), LIMITS),
        (lambda: MultiWorkerAllReduce([("psum", 1, None), ("ring", 1, None)]), LIMITS),
    ],
)
def test_values_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("spec", [[], (), ["psum"], [()], [("psum", 1, 2, 3)], None])
def test_a_spec_is_made_of_tuples(spec):
    message = TUPLES + f'[("tree", 1, 4096), ("ring", 2, None)]; got {spec!r}.'
    with pytest.raises(TypeError, match=re.escape(message)):
        MultiWorkerAllReduce(spec)


@pytest.mark.parametrize(
    ("spec", "shards"), [(("ring", 2, -1), 2), (("ring", 2), 2), (("ring",), 1), ("ring", 1), ([("ring",)], 1)]
)
def test_a_tuple_or_a_name_is_a_spec(spec, shards):
    text = lowered(MultiWorkerAllReduce(spec, num_packs=1), 4, ints=()).as_text()
    assert collectives(text) == {"collective_permute": shards * 6}


@pytest.mark.parametrize("dtype", [jnp.int8, "words", 3])
def test_values_are_compressed_to_floats_only(dtype):
    message = f"`AllReduce` needs a floating dtype such as jnp.bfloat16 as compress_dtype; got {dtype!r}."
    with pytest.raises(TypeError, match=re.escape(message)):
        AllReduce(compress_dtype=dtype)
