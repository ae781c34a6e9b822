"""The check of replicas reports copies that differ, by name, device and step, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from testing.copies import CPUS, GRID, a_slot, a_variable, corrupt, everywhere, one_bit, with_copy
from testing.estimators import make, saved_steps, times
from testing.towers import mlp_model_fn, regression, replicate

import estimator as est
from estimator.hooks import _replica_check
from estimator.multihost._replica_check import check_replicas

# The check.

DTYPES = "float32 bfloat16 float16 float8_e4m3fn complex64 int32 int16 uint8 int4 bool".split()


def test_one_bit_of_one_copy_is_detected_in_every_dtype():
    values = {dtype: jax.device_put(np.ones((2, 3), jnp.dtype(dtype)), everywhere()) for dtype in DTYPES}
    check_replicas(1, variable=values)
    for dtype in DTYPES:
        changed = values | {dtype: with_copy(values[dtype], 3, one_bit())}
        with pytest.raises(est.ReplicaMismatchError, match=f"variable '{dtype}' on device cpu:3 differs .* on cpu:0"):
            check_replicas(1, variable=changed)


def test_one_bit_of_one_copy_is_detected_wherever_it_is():
    values = jax.device_put(np.random.default_rng(0).normal(size=10).astype(np.float32), everywhere(CPUS[:2]))
    for byte in range(values.nbytes):
        with pytest.raises(est.ReplicaMismatchError):
            check_replicas(1, variable=with_copy(values, 1, one_bit(byte)))


@pytest.mark.parametrize("distance", [1, 2, 256, 1024])
def test_elements_that_changed_places_are_detected(distance):
    def change(x):
        x[[0, distance]] = x[[distance, 0]]
        return x

    # Powers of two: their bits differ in a few high places only.
    values = jax.device_put(2.0 ** (np.arange(2048, dtype=np.float32) // distance % 8), everywhere(CPUS[:2]))
    with pytest.raises(est.ReplicaMismatchError):
        check_replicas(1, variable=with_copy(values, 1, change))


def test_nan_is_compared_by_its_bits():
    nan = jax.device_put(np.float32([np.nan, -0.0]), everywhere())
    check_replicas(1, variable=nan)
    for change in (one_bit(0), lambda x: np.abs(x)):  # another NaN; another zero
        with pytest.raises(est.ReplicaMismatchError):
            check_replicas(1, variable=with_copy(nan, 5, change))


def test_every_array_is_looked_at_and_the_message_says_which():
    state = jax.device_put({"a": jnp.ones(3), "b": {"c": jnp.ones(()), "d": jnp.ones(4)}}, everywhere())
    slots = {"adam": [jax.device_put(jnp.ones(2), everywhere(CPUS[:3]))]}
    check_replicas(7, variable=state, slot=slots)
    wrong = with_copy(state["b"]["c"], 2, one_bit())
    with pytest.raises(est.ReplicaMismatchError, match="^The copy of the variable 'b/c' on device cpu:2 differs.*ep 7"):
        check_replicas(7, variable=state | {"b": {"c": wrong}}, slot=slots)
    for i, which in ((0, "cpu:0 differs from that on cpu:1"), (2, "cpu:2 differs from that on cpu:0")):
        slots = {"adam": [with_copy(jax.device_put(jnp.ones(2), everywhere(CPUS[:3])), i, one_bit())]}
        with pytest.raises(est.ReplicaMismatchError, match=f"^The copy of the slot 'adam/0' on device {which}"):
            check_replicas(7, variable=state, slot=slots)
    both = {"v": wrong, "w": with_copy(with_copy(state["a"], 1, one_bit()), 4, one_bit(4))}
    with pytest.raises(est.ReplicaMismatchError, match="cpu:2 .* at step 9. 1 more array differs. Nothing is saved"):
        check_replicas(9, variable=both)
    with pytest.raises(est.ReplicaMismatchError, match="'w' on device cpu:1, cpu:4 differs from that on cpu:0"):
        check_replicas(9, variable=both | {"v": state["a"]})


def test_the_parts_of_a_sharded_array_are_no_copies():
    sharded = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(GRID, PartitionSpec(("cut", "copied"))))
    single = jax.device_put(np.ones(2, np.float32), SingleDeviceSharding(CPUS[1]))
    check_replicas(1, variable={"sharded": sharded, "single": single, "changed": with_copy(sharded, 3, one_bit())})


def test_the_copies_of_a_part_of_an_array_are_compared():
    array = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(GRID, PartitionSpec("cut")))
    check_replicas(1, variable=array)
    for i, like in ((2, 0), (6, 4)):
        with pytest.raises(est.ReplicaMismatchError, match=f"on device cpu:{i} differs from that on cpu:{like}"):
            check_replicas(1, variable=with_copy(array, i, one_bit()))


def test_prng_keys_are_compared():
    keys = jax.random.wrap_key_data(jax.device_put(np.zeros(2, np.uint32), everywhere()))
    check_replicas(1, variable=keys)
    wrong = with_copy(jax.random.key_data(keys), 1, one_bit())
    with pytest.raises(est.ReplicaMismatchError):
        check_replicas(1, variable=jax.random.wrap_key_data(wrong))


def batches(n):
    x, y = regression(8)
    return lambda: [(x[0], y[0])] * n


@pytest.mark.quick
@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "changed", "steps_per_loop"),
    [(a_variable, 7, 3), (a_slot, 8, 1)],  # a step may round the bit of a slot away
)
def test_a_copy_changed_in_training_is_detected_at_the_next_check(
    tmp_path, monkeypatch, which, changed, steps_per_loop
):
    estimator = make(
        tmp_path,
        replicate(mlp_model_fn(optax.adam(0.01)), 2),
        save_checkpoints_steps=8,  # so that a checkpoint is due when the mismatch comes up
        check_replicas_every=4,
        steps_per_loop=steps_per_loop,
    )
    corrupt(monkeypatch, changed, which)
    name = {a_variable: "variable 'v'", a_slot: "slot 'optimizer/0/mu/hidden/w'"}[which]
    message = f"copy of the {name} on device cpu:1 differs .* cpu:0, at step 8"
    with pytest.raises(est.ReplicaMismatchError, match=message):
        estimator.train(batches(20))
    assert saved_steps(estimator) == [0]


def checks(monkeypatch, estimator, *lengths):
    """The steps at which replicas are checked in training runs of these lengths."""
    seen = []
    monkeypatch.setattr(_replica_check, "check_replicas", lambda step, **trees: seen.append(step))
    for n in lengths:
        estimator.train(times(n))
    return seen


@pytest.mark.quick
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "lengths", "expected"),
    [
        ({"check_replicas_every": 4}, (3, 3, 3), [4, 8]),
        ({}, (9,), []),
        ({"check_replicas_every": 4, "save_checkpoints_steps": 3}, (9,), [4, 8]),
        ({"check_replicas_every": 4, "steps_per_loop": 3}, (13,), [4, 8, 12]),
        ({"check_replicas_every": 1, "log_step_count_steps": 2}, (3,), [1, 2, 3]),
    ],
)
def test_checks_come_every_n_steps(tmp_path, monkeypatch, config, lengths, expected):
    assert checks(monkeypatch, make(tmp_path, **config), *lengths) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_training_that_is_checked_is_the_same_training(tmp_path):
    model_fn = replicate(mlp_model_fn(optax.adam(0.01)), 2)
    plain, checked = (
        make(tmp_path / str(every), model_fn, check_replicas_every=every).train(batches(6)) for every in (None, 2)
    )
    for name in plain.get_variable_names():
        np.testing.assert_array_equal(plain.get_variable_value(name), checked.get_variable_value(name), err_msg=name)
