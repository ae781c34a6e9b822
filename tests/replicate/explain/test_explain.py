"""The explanation of a training step says what the compiled program has and where the state lives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from testing.model_fns import minimizing, zeros
from testing.towers import cpus, mlp_model_fn, regression

import estimator as est
from estimator.core._frame import current_frame
from replicate import BlockSync, VariableDistribution, cross_tower_mean, explain, replicate_model_fn
from replicate.cross_tower_ops import AllReduce
from replicate.explain import collectives

X, Y = jax.ShapeDtypeStruct((8, 3), np.float32), jax.ShapeDtypeStruct((8,), np.float32)
VARIABLES = 4 * (3 * 4 + 4 + 4)  # bytes of those below
SCALAR = 4
LOSSES = 2 * SCALAR  # of the step, and of its optimizer


def model_fn(features, labels, mode):
    """As `mlp_model_fn`, without metrics; counts the rows."""
    est.get_variable("rows", initializer=np.int32(0), trainable=False)
    est.assign_add("rows", features.shape[0])
    return mlp_model_fn(optax.adam(0.1))(features, labels, mode)._replace(eval_metric_ops=None)


def linear(**options):
    return minimizing(lambda x, y: jnp.mean((x @ zeros("w", (3,)) - y) ** 2), **options)


def kinds(report):
    return [(each.kind, each.dtype, each.bytes, each.participants) for each in report.collectives]


def assert_placed(report, sentence):
    assert report.placement.startswith(sentence) and f"\n{report.placement}\n" in str(report)


@pytest.mark.quick
def test_mirrored_variables_have_one_all_reduce_per_dtype():
    report = explain(model_fn, X, Y, devices=cpus(4))
    assert_placed(report, "All towers have the variables and slots")
    floats, ints = sorted(kinds(report))
    assert floats == ("all-reduce", "float32", VARIABLES + LOSSES, 4)
    assert ints == ("all-reduce", "int32", SCALAR, 4)
    assert {(each.times, each.within) for each in report.collectives} == {(1, "")}
    assert report.steps_per_program == 100
    assert report.towers == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    shapes = [(each.name, each.shape, each.tower_shape) for each in report.batch]
    assert shapes == [("features", (8, 3), (2, 3)), ("labels", (8,), (2,))]
    assert {home.where for home in report.variables} == {"whole on each of 4 devices"}


@pytest.mark.parametrize("towers", [1, 4])
def test_towers_on_one_device_need_no_communication(towers):
    report = explain(model_fn, X, Y, devices=["cpu:0"] * towers)
    assert_placed(report, "Variables and slots are on one device, and the optimizers run there")
    assert report.towers == ("cpu:0",) * towers and report.batch[0].tower_shape == (8 // towers, 3)
    assert report.collectives == () and report.communication_seconds == 0
    assert "The compiled program needs no communication." in str(report)


def test_cut_variables_are_gathered():
    report = explain(model_fn, X, Y, devices=cpus(4), variable_distribution="sharded")
    assert_placed(report, "Variables and slots are cut over the towers")
    gathered = [each for each in report.collectives if each.kind == "all-gather"]
    assert sum(each.bytes for each in gathered) == VARIABLES
    assert len(gathered) == 1
    homes = {home.name: (home.cut_axis, home.bytes_by_device["cpu:3"]) for home in report.variables}
    assert homes == {"rows": (None, 4), "hidden/w": (1, 12), "hidden/b": (0, 4), "v": (0, 4)}
    assert re.search(r"collective  all-gather +float32\[4,5\] +80 B  4 devices, 1 x, 30 us\n", str(report))


@pytest.mark.slow
@pytest.mark.parametrize("distribution", [VariableDistribution.SHARDED, VariableDistribution.SHARED_ROUND_ROBIN])
def test_variables_and_slots_are_said_to_be_where_they_are(distribution):
    replicated = replicate_model_fn(model_fn, devices=cpus(3), variable_distribution=distribution)
    batch = jnp.zeros((9, 3)), jnp.zeros(9)
    report = explain(replicated, *batch)
    state = est.transform(replicated).init(jax.random.key(0), *batch)
    there = {}
    for x in jax.tree.leaves((state.variables, state.slots)):
        for shard in x.addressable_shards:
            there[str(shard.device)] = there.get(str(shard.device), 0) + shard.data.nbytes
    assert report.bytes_by_device == there
    assert sum(home.bytes for home in report.variables) == VARIABLES + SCALAR
    assert sum(home.bytes for home in report.slots) == 2 * VARIABLES + SCALAR
    assert [home.name for home in report.variables] == ["rows", "hidden/w", "hidden/b", "v"]


@pytest.mark.parametrize("home, others", [("/cpu:0", 3), ("/cpu:5", 4)])
def test_variables_on_their_own_device_are_copied_to_the_towers_and_gradients_back(home, others):
    where = {"variable_distribution": "shared_local_parameter_server", "variable_device": home}
    report = explain(model_fn, X, Y, devices=cpus(4), bandwidth=1e6, latency=0.0, **where)
    assert_placed(report, "Each variable and its slots are on a device of their own")
    names = {f"{prefix}{name}" for name in ("hidden/w", "hidden/b", "v") for prefix in ("", "gradient of ")}
    weights = [each for each in report.transfers if each.name in names]
    assert sum(each.bytes for each in weights if each.to_towers) == others * VARIABLES
    assert sum(each.bytes for each in weights if not each.to_towers) == others * VARIABLES
    assert {each.device for each in report.transfers} == {home[1:]}
    assert not any("gradient" in each.name for each in report.transfers if each.to_towers)
    inside = sum(each.seconds(1e6, 0.0) for each in report.collectives)
    moved = sum(each.bytes for each in report.transfers)
    assert report.communication_seconds == pytest.approx(inside + moved / 1e6)
    assert report.steps_per_program == 1


def test_a_ring_of_permutes_takes_as_long_as_an_all_reduce():
    whole = explain(linear(), X, Y, devices=cpus(4), latency=1e-3)
    ring = explain(linear(), X, Y, devices=cpus(4), latency=1e-3, cross_tower_ops=AllReduce("ring"))
    assert [each.kind for each in whole.collectives] == ["all-reduce"]
    assert {each.kind for each in ring.collectives} == {"collective-permute"}
    assert ring.communication_seconds == pytest.approx(whole.communication_seconds)


def test_collectives_in_loops_and_branches_are_read():
    def tower(x):
        x = jax.lax.fori_loop(0, 5, lambda i, x: jax.lax.ppermute(x, "t", [(0, 1), (1, 2), (2, 3), (3, 0)]) + i, x)
        x = jax.lax.cond(x[0] > 0, lambda x: jax.lax.psum(x, "t", axis_index_groups=[[0, 1], [2, 3]]), jnp.negative, x)
        x = jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jax.lax.all_gather(x, "t").sum(0), x)
        return x + jax.lax.psum_scatter(jnp.tile(x, 4), "t", tiled=True) + jax.lax.all_to_all(x, "t", 0, 0)

    mesh = jax.make_mesh((4,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("t")
    program = jax.jit(jax.shard_map(tower, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    collected = collectives(program.lower(jnp.zeros(16, jnp.int32)).compile().as_text())
    assert {(each.kind, each.bytes, each.participants, each.times, each.within) for each in collected} == {
        ("collective-permute", 16, 4, 5, "loop"),
        ("all-reduce", 16, 2, 1, "branch"),
        ("all-gather", 64, 4, None, "loop"),
        ("reduce-scatter", 64, 4, 1, ""),
        ("all-to-all", 16, 4, 1, ""),
    }
    assert len(collected) == 5


ASYNCHRONOUS = """HloModule m, is_scheduled=true, num_partitions=8

%wrapped (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %all-to-all.1 = f32[4]{0} all-to-all(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

ENTRY %main (a: bf16[4,2], b: f32[8], c: pred[3]) -> f32[8] {
  %s1 = (bf16[4,2]{1,0:T(8,128)}, bf16[32,2]{1,0}) all-gather-start(bf16[4,2]{1,0} %a), replica_groups={}
  %d1 = bf16[32,2]{1,0} all-gather-done(%s1)
  %s2 = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%b), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %d2 = f32[2]{0} reduce-scatter-done(%s2)
  %s3 = (f32[8]{0}, /*index=1*/pred[3]{0}) all-reduce-start(%b, %c), replica_groups={{0,1,2},{3,4,5}}, to_apply=%add
  %s4 = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%b), source_target_pairs={{0,1},{1,0}}
  %s5 = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%b), calls=%wrapped, metadata={op_name="calls=%wrapped"}
  ROOT %r = f32[8]{0} all-reduce(%b), replica_groups=mesh['x'=4,'y'=2] {'y','x':(2)2}, to_apply=%add
}
"""


def test_asynchronous_collectives_come_once_with_what_they_leave():
    assert [(each.kind, each.dtype, each.bytes, each.participants) for each in collectives(ASYNCHRONOUS)] == [
        ("all-gather", "bfloat16", 128, 8),
        ("reduce-scatter", "float32", 32, 4),
        ("all-reduce", "float32, bool", 35, 3),
        ("collective-permute", "float32", 32, 2),
        ("all-to-all", "float32", 16, 2),
        ("all-reduce", "float32", 32, 4),
    ]


def test_a_text_that_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="This text has no ENTRY computation, so it is not an HLO program"):
        collectives("module @jit_f {}")
    with pytest.raises(ValueError, match="Which devices work together in this all-to-all cannot be read from"):
        collectives(ASYNCHRONOUS.replace("[4,2]<=", "#4,2<="))


@pytest.mark.slow
def test_micro_batches_are_counted_and_summed_once():
    report = explain(linear(accumulate_steps=2), X, Y, devices=cpus(2))
    assert report.micro_batches == 2
    assert kinds(report) == [("all-reduce", "float32", 3 * 4 + LOSSES, 2)]
    assert "A tower gets 4 of the batch's 8 rows, in 2 micro-batches one after another." in str(report)


def test_a_replicated_model_fn_is_taken_as_it_is():
    def normalized(features, labels, mode):  # works in towers only
        return model_fn(features - cross_tower_mean(features.mean(0)), labels, mode)

    replicated = replicate_model_fn(normalized, devices=cpus(2))
    assert kinds(explain(replicated, X, Y)) == kinds(explain(normalized, X, Y, devices=cpus(2)))
    with pytest.raises(ValueError, match="`explain` got devices for a model_fn that is replicated already"):
        explain(replicated, X, Y, devices=cpus(4))


@pytest.mark.slow
def test_sparse_features_are_split_by_rows_too():
    def sparse(features, labels, mode):
        return model_fn(features.todense(), labels, mode)

    x = BCOO.fromdense(np.eye(8, 3, dtype=np.float32))  # three entries, padded to four
    report = explain(sparse, x, Y, devices=cpus(2))
    batch = [(each.shape, each.tower_shape, each.sparse) for each in report.batch]
    assert batch == [((8, 3), (4, 3), True), ((8,), (4,), False)]
    assert re.search(r"features +sparse float32\[8,3\] +float32\[4,3\]", str(report))


def test_towers_of_several_processes_are_refused():
    replicated = replicate_model_fn(model_fn, devices=cpus(2))

    def spread(features, labels, mode):
        spec = replicated(features, labels, mode)
        current_frame("here").placement.spans_processes = True
        return spec

    with pytest.raises(ValueError, match="`explain` reads the program of one process, and these towers are on several"):
        explain(spread, X, Y)


def test_auto_steps_are_many_small_ones_few_large_ones_and_end_where_the_run_looks():
    config = est.RunConfig(log_step_count_steps=10)
    assert explain(model_fn, X, Y, devices=cpus(1), config=config).steps_per_program == 10
    rows = 2**18
    batch = jax.ShapeDtypeStruct((rows, 3), np.float32), jax.ShapeDtypeStruct((rows,), np.float32)
    assert 1 <= explain(model_fn, *batch, devices=cpus(1)).steps_per_program < 10


def test_a_model_that_fits_no_memory_is_explained():
    large = minimizing(lambda x, y: jnp.mean(x @ zeros("w", (2**20, 2**16))[:3, 0] - y))
    report = explain(large, X, Y, devices=cpus(8), variable_distribution="sharded")
    assert report.bytes_by_device["cpu:7"] == 4 * 2**36 // 8
    assert report.memory.arguments > 4 * 2**36 // 8


def test_a_batch_of_doubles_is_what_jax_makes_of_it():
    x, y = regression(8, steps=1)
    report = explain(model_fn, x[0].astype(np.float64), y[0], devices=cpus(2))
    assert [each.dtype for each in report.batch] == ["float32", "float32"]
    assert report.flops > 0 and report.memory.peak >= report.memory.arguments > 80


@pytest.mark.parametrize("given", [{"bandwidth": 0.0}, {"latency": -1.0}, {"bandwidth": float("nan")}])
def test_a_wrong_bandwidth_is_an_error(given):
    with pytest.raises(ValueError, match="`explain` needs a positive bandwidth, in bytes per second, and a latency"):
        explain(model_fn, X, Y, **given)


def test_the_usual_errors_come_through():
    with pytest.raises(ValueError, match="Batch size 8 needs to be divisible by the number of towers, which is 3"):
        explain(model_fn, X, Y, devices=cpus(3))

    plain = minimizing(lambda x, y: jnp.mean(est.get_variable("w", ()) * y), est.Optimizer(optax.sgd(0.1)))
    with pytest.raises(ValueError, match="Please wrap optimizers with TowerOptimizer"):
        explain(plain, X, Y, devices=cpus(2))


def test_towers_that_are_averaged_once_per_block_sum_in_a_branch():
    report = explain(model_fn, X, Y, devices=cpus(4), block_sync=BlockSync(16))
    assert_placed(report, "Each tower's optimizers run on its own gradients")
    assert " a step in which every branch is taken, at 10 GB/s" in str(report)
    sums = [each for each in report.collectives if each.kind == "all-reduce"]
    assert [(each.within, each.times) for each in sums] == [("branch", 1)] * len(sums)
    assert sorted((each.dtype, each.bytes) for each in sums) == [("float32", VARIABLES), ("int32", SCALAR)]
    [(kind, size)] = [(each.kind, each.bytes) for each in report.collectives if each.within != "branch"]
    assert (kind, size) == ("all-gather", 4 * SCALAR)  # the towers' losses
    copies = [home for home in report.slots if home.name.startswith("block_sync/copies")]
    assert {home.where for home in copies} == {"cut along dimension 0 over 4 devices"}
