"""Where variables live changes nothing but where they live."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import minimizing, ones
from testing.towers import OPTIMIZERS, assert_close, cpus, mlp_model_fn, regression, uniform

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._checkpoints import Checkpoints
from replicate import TowerOptimizer, VariableDistribution, cross_tower_mean, replicate_model_fn

pytestmark = pytest.mark.covers("12 variables")

MIRRORED = VariableDistribution.MIRRORED
SHARDED = VariableDistribution.SHARDED
SERVER = VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER
ROUND_ROBIN = VariableDistribution.SHARED_ROUND_ROBIN
KEY = jax.random.key(0)


def replicated(model_fn, towers, distribution, **options):
    return replicate_model_fn(model_fn, devices=cpus(towers), variable_distribution=distribution, **options)


def trained(model_fn, batches, steps=None):
    model = est.transform(model_fn, donate=True)
    xs, ys = batches
    state = model.init(KEY, xs[0], ys[0])
    for x, y in list(zip(xs, ys, strict=True))[:steps]:
        state, spec = model.train_step(state, x, y)
    return state, spec


def devices_of(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): sorted(device.id for device in leaf.devices())
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def wide_model_fn(optimizer, width=16):
    """Its variables divide by 2, 4 and 8 towers, but for one."""

    def model_fn(features, labels, mode):
        w = est.get_variable("w", initializer=uniform(3, width))
        v = est.get_variable("v", initializer=uniform(width, 8))
        output = (jnp.tanh((features * ones("scale", (3,))) @ w) @ v).sum(-1)
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"output": output})
        loss = jnp.mean((output - labels) ** 2)
        train_op = TowerOptimizer(optimizer, name="opt").minimize(loss)
        return est.EstimatorSpec(mode, {"output": output}, loss, train_op)

    return model_fn


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, towers, width",
    [("momentum", 2, 16), ("sgd", 8, 32), ("adam", 8, 32)],  # the wide ones' pieces have other instructions
)
@pytest.mark.usefixtures("users_compiler")
def test_cut_variables_are_bit_equal_to_mirrored_ones(optimizer, towers, width):
    """But for roots with jax 0.12 on CPUs (docs/explanation/placements.md)."""
    model_fn, batches, steps = wide_model_fn(OPTIMIZERS[optimizer](), width), regression(8), 1 if width == 32 else None
    want, _ = trained(replicated(model_fn, towers, MIRRORED), batches, steps)
    got, _ = trained(replicated(model_fn, towers, SHARDED), batches, steps)
    roots = optimizer not in ("sgd", "momentum") and jax.__version_info__ >= (0, 11)
    for one, other in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        if roots:
            assert_close(one, other, rtol=1e-4, atol=1e-7)
        else:
            np.testing.assert_array_equal(one, other)


def test_cut_variables_take_a_share_of_the_bytes_and_no_slots_are_gathered():
    towers = 4
    model = est.transform(replicated(wide_model_fn(optax.adam(0.1)), towers, SHARDED))
    xs, ys = regression(8)
    state = model.init(KEY, xs[0], ys[0])
    state, _ = model.train_step(state, xs[0], ys[0])
    arrays = jax.tree.leaves(state[:2])
    whole = sum(x.nbytes for x in arrays if not any(n % towers == 0 for n in x.shape))
    per_device = {device: 0 for device in jax.devices()[:towers]}
    for x in arrays:
        for shard in x.addressable_shards:
            per_device[shard.device] += shard.data.nbytes
    cut = sum(x.nbytes for x in arrays) - whole
    assert set(per_device.values()) == {cut // towers + whole}

    compiled = jax.jit(model.train_step).lower(state, xs[0], ys[0]).compile()
    gathers = re.findall(r"all-gather(?:-start)?\(", compiled.as_text())
    assert len(gathers) <= 2  # the variables w and v; adam has four more slots of their shapes


@pytest.mark.quick
def test_all_is_on_the_variable_device():
    model_fn, batches = mlp_model_fn(optax.adam(0.1)), regression(6)
    state, _ = trained(replicated(model_fn, 3, SERVER, variable_device="/cpu:5"), batches)
    assert set(map(tuple, devices_of(state).values())) == {(5,)}
    state, _ = trained(replicated(model_fn, 3, SERVER), batches, steps=1)
    assert set(map(tuple, devices_of(state).values())) == {(0,)}


def test_one_tower_may_have_its_variables_elsewhere():
    model_fn, batches = mlp_model_fn(optax.adam(0.1)), regression(6)
    want, _ = trained(model_fn, batches)
    got, _ = trained(replicated(model_fn, 1, SERVER, variable_device=jax.devices()[2]), batches)
    assert set(map(tuple, devices_of(got).values())) == {(2,)}
    assert_close(jax.device_get(got[:2]), jax.device_get(want[:2]))
    for distribution in VariableDistribution:
        model = est.transform(replicated(model_fn, 1, distribution))
        assert model.info(*jax.tree.map(lambda x: x[0], batches)).is_one_program


def test_variables_go_round_the_devices_in_the_order_they_are_created():
    def loss_of(features, labels):
        total = sum(ones(name, (2,)).sum() for name in "dcab")
        est.assign_add("counter", jnp.ones_like(est.get_variable("counter", (), jnp.int32, trainable=False)))
        return jnp.mean((total * features - labels) ** 2)

    model_fn = minimizing(loss_of, optax.adam(0.1), name="opt")
    x = np.ones((2, 6), np.float32)
    state, _ = trained(replicated(model_fn, 3, ROUND_ROBIN), (x, x))
    where = {"d": [0], "c": [1], "a": [2], "b": [0]}
    assert devices_of(state.variables) == where | {"counter": [1]}
    assert devices_of(state.slots["opt"][0].mu) == devices_of(state.slots["opt"][0].nu) == where
    assert devices_of(state.slots["opt"][0].count) == {"": [0]}
    assert state.variables["counter"] == 6


def test_a_variable_that_is_a_tree_stays_together():
    def loss_of(features, labels):
        other = ones("w")
        net = est.get_variable("net", lambda key: {"w": jnp.ones(2), "layer": {"b": jnp.zeros(2)}})
        return jnp.mean((other * (features[:, None] * net["w"] + net["layer"]["b"]).sum(-1) - labels) ** 2)

    model_fn = minimizing(loss_of, optax.adam(0.1), name="opt")
    x = np.ones((2, 4), np.float32)
    want, _ = trained(model_fn, (x, x))
    got, _ = trained(replicated(model_fn, 2, ROUND_ROBIN), (x, x))
    assert devices_of(got.variables) == {"w": [0], "net/w": [1], "net/layer/b": [1]}
    assert devices_of(got.slots["opt"][0].mu) == devices_of(got.variables)
    assert_close(jax.device_get(got.variables), jax.device_get(want.variables))


def writing_model_fn(features, labels, mode):
    w = est.get_variable("w", (3,))
    est.assign("mean", 0.5 * est.get_variable("mean", (3,), trainable=False) + 0.5 * features.mean(0))
    noise = jax.random.normal(est.make_rng(), (3,)) * 0.1
    optimizer = TowerOptimizer(optax.sgd(0.1, momentum=0.9))
    loss = jnp.mean(((features + noise) @ w - labels) ** 2)
    shift = cross_tower_mean(features.mean())
    grads = [(g + shift, name) for g, name in optimizer.compute_gradients(loss)]
    return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(grads))


@pytest.mark.slow
def test_written_variables_own_gradients_and_random_numbers_are_the_same():
    batches = regression(12)
    want, want_spec = trained(replicated(writing_model_fn, 3, MIRRORED), batches)
    for distribution in (SERVER, ROUND_ROBIN, SHARDED):
        got, spec = trained(replicated(writing_model_fn, 3, distribution), batches)
        assert_close(jax.device_get(got[:2]), jax.device_get(want[:2]))
        assert_close(spec.loss, want_spec.loss)


@pytest.mark.slow
def test_a_step_of_several_programs_is_traced_once_and_loops():
    traces = []

    def model_fn(features, labels, mode):
        traces.append(mode)
        return mlp_model_fn(optax.adam(0.1))(features, labels, mode)

    model = est.transform(replicated(model_fn, 2, ROUND_ROBIN))
    xs, ys = regression(4)
    state = model.init(KEY, xs[0], ys[0])
    want, seen = state, []
    for x, y in zip(xs, ys, strict=True):
        want, _ = model.train_step(want, x, y)
        seen.append(len(traces))
    assert seen[0] == seen[-1]
    got, specs = model.train_loop(state, (xs, ys))
    assert specs.loss.shape == (3,)
    assert_close(got.variables, want.variables)

    assert not model.info(xs[0], ys[0]).is_one_program
    with pytest.raises(ValueError, match="Call it outside, or use VariableDistribution.MIRRORED or SHARDED"):
        jax.jit(model.train_step)(state, xs[0], ys[0])


def estimator(folder, model_fn):
    """Whose first training runs a loop, the others single steps."""
    return est.Estimator(model_fn, str(folder), est.RunConfig(steps_per_loop=2))


X, Y = (batch[0] for batch in regression(8))


def odd():
    return [(X, Y), (X[:3], Y[:3])]


@pytest.fixture(scope="module")
def of_four_steps(tmp_path_factory):
    plain = estimator(tmp_path_factory.mktemp("plain"), wide_model_fn(optax.adam(0.1)))
    return plain.train(lambda: [(X, Y)] * 4).evaluate(odd)


@pytest.mark.quick
@pytest.mark.parametrize("distribution", [MIRRORED, SHARDED, ROUND_ROBIN])
def test_an_estimator_trains_evaluates_and_resumes(tmp_path, distribution, of_four_steps):
    towers = replicated(wide_model_fn(optax.adam(0.1)), 4, distribution)
    first = estimator(tmp_path, towers).train(lambda: [(X, Y)] * 2)
    assert first.evaluate(lambda: (X, Y))["global_step"] == 2
    first.train(lambda: [(X, Y)])
    second = estimator(tmp_path, towers).train(lambda: [(X, Y)])
    got = second.evaluate(odd)
    assert got == pytest.approx(of_four_steps, rel=1e-4)
    outputs = [row["output"] for row in second.predict(lambda: X)]
    assert len(outputs) == 8
    assert first.evaluate(odd) == got  # what the second one saved


PLACES = [(1, MIRRORED), *((3, distribution) for distribution in VariableDistribution)]


@pytest.mark.slow
@pytest.mark.parametrize(("written", "goes_on_as"), [(SHARDED, ROUND_ROBIN), (ROUND_ROBIN, SHARDED)])
def test_a_checkpoint_knows_nothing_of_the_distribution(tmp_path, written, goes_on_as):
    model_fn, (xs, ys) = wide_model_fn(optax.adam(0.1)), regression(24)
    state, _ = trained(replicated(model_fn, 8, written), (xs, ys), steps=1)
    path = Checkpoints(tmp_path).save(state)
    want = jax.tree.leaves(jax.device_get(state[:3]))
    goes_on, _ = est.transform(replicated(model_fn, 8, written)).train_step(state, xs[1], ys[1])
    for towers, distribution in PLACES:
        model = est.transform(replicated(model_fn, towers, distribution))
        like = model.abstract_init(xs[0], ys[0])
        read = Checkpoint(path).restore(like)
        for one, other, placed in zip(jax.tree.leaves(read[:3]), want, jax.tree.leaves(like[:3]), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.sharding.is_equivalent_to(placed.sharding, one.ndim)
        if (towers, distribution) == (3, goes_on_as):
            after, _ = model.train_step(read, xs[1], ys[1])
            assert_close(jax.device_get(after[:3]), jax.device_get(goes_on[:3]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_state_may_come_as_numpy_arrays():
    model = est.transform(replicated(wide_model_fn(optax.adam(0.1)), 2, ROUND_ROBIN))
    x, y = (batch[0] for batch in regression(4))
    state = model.init(KEY, x, y)
    host = state._replace(variables=jax.device_get(state.variables), slots=jax.device_get(state.slots))
    want, got = model.train_step(state, x, y)[0], model.train_step(host, x, y)[0]
    assert_close(got.variables, want.variables)
    assert devices_of(got[:2]) == devices_of(state[:2])


def test_a_variable_device_is_for_one_distribution_only():
    for distribution in (MIRRORED, SHARDED, ROUND_ROBIN):
        with pytest.raises(ValueError, match=r"variable_device='/cpu:1' was given with variable_dist"):
            replicated(writing_model_fn, 2, distribution, variable_device="/cpu:1")
    with pytest.raises(ValueError, match="There is no device '/cpu:99'"):
        replicated(writing_model_fn, 2, SERVER, variable_device="/cpu:99")
