"""Programs that are the same are compiled once; others never stand in for each other."""

import dataclasses
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import estimator as est
from estimator.runtime import _shared_programs
from estimator.runtime._program import Program
from estimator.steps._init_programs import split_init

X = np.ones((4, 2), np.float32)
Y = np.ones((4, 1), np.float32)


def linear_model_fn(features, labels, mode, params):
    w = est.get_variable("w", (2, 1), initializer=jax.nn.initializers.zeros)
    predictions = features @ w * params.get("scale", 1.0)
    if labels is None:
        return est.EstimatorSpec(mode, predictions=predictions)
    loss = est.losses.mean_squared_error(labels, predictions)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=params.get("rate", 0.1))
    train_op = est.Optimizer(optimizer).minimize(loss)
    return est.EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)


def run_all(model_dir, params, model_fn=linear_model_fn, hooks=()):
    estimator = est.Estimator(model_fn, str(model_dir), params=params)
    estimator.train(lambda: [(X, Y)] * 5, hooks=hooks)
    loss = estimator.evaluate(lambda: [(X, Y)])["loss"]
    return loss, next(iter(estimator.predict(lambda: [X]))).item(), estimator


def run_by_hand(rate, scale=1.0):
    w = np.zeros((2, 1))
    for _ in range(5):
        w = w - rate * 2 * scale * X.T @ (X @ w * scale - Y) / 4
    return np.mean((X @ w * scale - Y) ** 2), (X @ w * scale)[0, 0]


@pytest.mark.quick
@pytest.mark.parametrize("by_hook", [False, True])
def test_estimators_of_one_model_fn_compile_once_whatever_their_learning_rates(tmp_path, compilations, by_hook):
    counts = []
    for i, rate in enumerate((0.05, 0.2)):
        hooks = [est.SetLearningRateHook({"optimizer": rate})] if by_hook else []
        loss, prediction, _ = run_all(tmp_path / str(i), {} if by_hook else {"rate": rate}, hooks=hooks)
        np.testing.assert_allclose((loss, prediction), run_by_hand(rate), rtol=1e-5, atol=1e-8)
        counts.append(len(compilations))
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_another_number_in_the_model_compiles_again_and_is_used(tmp_path, compilations):
    for scale in (1.0, 2.0):
        before = len(compilations)
        loss, prediction, _ = run_all(tmp_path / str(scale), {"scale": scale})
        np.testing.assert_allclose((loss, prediction), run_by_hand(0.1, scale), rtol=1e-5)
        assert len(compilations) > before


def test_a_closure_that_changed_is_seen(tmp_path, compilations):
    table = np.ones(2, np.float32)

    def model_fn(features, labels, mode, params):
        return linear_model_fn(features * table, labels, mode, params)

    first = run_all(tmp_path / "first", {}, model_fn)[0]
    table = np.full(2, 3.0, np.float32)
    second = run_all(tmp_path / "second", {}, model_fn)[0]
    assert first == pytest.approx(run_by_hand(0.1)[0], rel=1e-5) and second != pytest.approx(first)


@pytest.mark.slow
def test_dropped_estimators_leave_no_memory(tmp_path, compilations):
    live, alive = [], []
    while gc.collect():  # arrays of earlier tests, which need more than one
        pass
    for i in range(2):
        _, _, estimator = run_all(tmp_path / str(i), {"rate": 0.1 * (i + 1) / 4})
        alive.append(weakref.ref(estimator))
        del estimator
        gc.collect()
        live.append((len(jax.live_arrays()), len(_shared_programs._newest)))
    assert [ref() for ref in alive] == [None] * 2
    assert live[0] == live[1]


def test_programs_that_are_the_same_are_compiled_once(compilations):
    args = jnp.ones(3), jnp.ones(3)
    before = len(compilations)
    for _ in range(2):
        assert Program(lambda x, y: x * 2 + y)(*args).tolist() == [3.0] * 3
    assert len(compilations) == before + 1


def test_which_argument_is_used_is_part_of_what_is_the_same():
    args = jnp.float32(1), jnp.float32(2)
    assert [float(Program(run)(*args)) for run in (lambda x, y: 2 * x, lambda x, y: 2 * y)] == [2.0, 4.0]


def test_arguments_that_are_not_used_may_have_any_shape():
    x = jnp.float32(1)
    for other in (jnp.ones(2), jnp.ones((3, 3)), jnp.ones(2)):
        assert float(Program(lambda x, y: 2 * x)(x, other)) == 2.0


def test_the_structure_of_the_result_is_part_of_what_is_the_same():
    def keyed(name):
        return Program(lambda x: {name: 2 * x})(jnp.float32(1))

    assert keyed("a") == {"a": 2.0} and keyed("b") == {"b": 2.0}


@pytest.mark.parametrize("size", [3, 2**19])
def test_constants_are_part_of_what_is_the_same(size):
    def add(value):
        constant = jnp.full(size, value)
        return float(Program(lambda x: x + constant)(jnp.float32(1))[0])

    assert (add(1.0), add(2.0)) == (2.0, 3.0)


def test_programs_with_large_constants_are_not_kept(compilations):
    constant = jnp.ones(2**19)
    Program(lambda x: x + constant)(jnp.float32(1))
    assert not _shared_programs._newest


def test_each_program_makes_its_own_callbacks():
    seen = []

    def noting(name):
        return Program(lambda x: jax.pure_callback(lambda x: seen.append(name) or x, x, x))(jnp.float32(1))

    jax.block_until_ready([noting("a"), noting("b")])
    assert seen == ["a", "b"]


@pytest.mark.parametrize("committed", [True, False])
def test_the_devices_are_part_of_what_is_the_same(committed):
    def run(devices):
        mesh = Mesh(np.array(devices), ("d",))
        mapped = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
        x = np.arange(4.0)
        sharding = NamedSharding(mesh, PartitionSpec("d"))
        return Program(mapped)(jax.device_put(x, sharding) if committed else x)

    devices = jax.devices()
    first, second = run(devices[:2]), run(devices[2:4])
    assert first.devices() == set(devices[:2]) and second.devices() == set(devices[2:4])


def test_the_default_device_is_part_of_what_is_the_same():
    found = []
    for device in jax.devices()[:2]:
        with jax.default_device(device):
            found.append(Program(lambda x: x * 2)(np.float32(1)).devices())
    assert found == [{device} for device in jax.devices()[:2]]


def test_settings_are_part_of_what_is_the_same():
    program = Program(lambda x: x * np.float64(2))
    x = np.ones(2)
    with jax.enable_x64(True):
        assert program(x).dtype == np.float64
    assert program(x).dtype == np.float32
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        Program(lambda x: jnp.log(-x))(jnp.ones(2))


def test_donated_memory_is_part_of_what_is_the_same():
    x = jnp.ones(3)
    Program(lambda x: x * 2)(x)
    Program(lambda x: x * 2, donate=True)(x)
    assert x.is_deleted()


def test_other_shapes_and_places_are_compiled_for_themselves(compilations):
    program = Program(lambda x: x * 2)
    near, far = jnp.ones(2), jax.device_put(jnp.ones(2), jax.devices()[1])
    for _ in range(2):
        for x in (near, jnp.ones(3), far, np.ones((2, 2), np.float32)):
            assert program(x).shape == x.shape
    assert program(far).devices() == {jax.devices()[1]}


def test_an_error_of_the_function_is_raised_for_other_shapes():
    program = Program(lambda x, y: x @ y)
    program(jnp.ones((2, 2)), jnp.ones((2, 2)))
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as error:
        program(jnp.ones((2, 2)), jnp.ones((3, 2)))
    assert error.value.__context__ is None


def test_a_deleted_argument_is_an_error():
    program = Program(lambda x: x * 2, donate=True)
    x = jnp.ones(3)
    program(x)
    with pytest.raises((RuntimeError, ValueError), match="has been deleted"):
        program(x)


def test_a_program_within_a_program_is_a_part_of_it():
    inner = Program(lambda x: x * 2)
    assert float(jax.jit(lambda x: inner(x) + 1)(1.0)) == 3.0
    assert float(inner(jnp.float32(1))) == 2.0
    assert float(jax.grad(inner)(1.0)) == 2.0


def test_static_fields_without_a_hash_are_compiled_for_themselves():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Named:
        x: jax.Array
        names: list[str] = dataclasses.field(metadata={"static": True})

    def named(name):
        return Program(lambda x: Named(x, [name]))(jnp.float32(1)).names

    assert named("a") == ["a"] and named("b") == ["b"]


def test_numbers_that_are_only_handed_out_are_not_part_of_the_program(compilations):
    def make(rate):
        program = Program(
            lambda x: {"rate": jnp.asarray(rate, jnp.float32), "weak": rate, "x": 2 * x}, split=split_init
        )
        return program(np.ones(3, np.float32))

    before = len(compilations)
    made = [make(rate) for rate in (0.1, 0.2)]
    assert len(compilations) == before + 1
    assert [float(each["rate"]) for each in made] == [np.float32(0.1), np.float32(0.2)]
    assert [(each["rate"].weak_type, each["weak"].weak_type) for each in made] == [(False, True)] * 2


@pytest.mark.slow
def test_only_the_newest_programs_are_kept(compilations):
    for i in range(_shared_programs._MOST_PROGRAMS + 3):
        Program(lambda x, i=i: x + i)(np.float32(1))
    assert len(_shared_programs._newest) == _shared_programs._MOST_PROGRAMS


def test_threads_share_what_is_compiled(compilations):
    Program(lambda x: x * 5)(jnp.ones(3))
    before, results = len(compilations), []
    threads = [threading.Thread(target=lambda: results.append(Program(lambda x: x * 5)(jnp.ones(3)))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == before and np.array(results).tolist() == [[5.0] * 3] * 2


@pytest.mark.parametrize("initializer", ["normal", "uniform", "truncated_normal", "glorot_uniform", "orthogonal"])
@pytest.mark.usefixtures("users_compiler")
def test_a_program_that_runs_once_is_compiled_quickly_to_the_same_numbers(initializer):
    make = getattr(jax.nn.initializers, initializer)
    initialize = make(1.0) if initializer in ("normal", "uniform", "truncated_normal") else make()

    def draw(key):
        return initialize(key, (64, 48), jnp.float32)

    key, program = jax.random.key(0), Program(draw, once=True)
    np.testing.assert_array_equal(program(key), jax.jit(draw)(key))
    # As a part of another program it has no options, which jax would refuse.
    np.testing.assert_array_equal(jax.jit(lambda key: program(key))(key), jax.jit(draw)(key))
