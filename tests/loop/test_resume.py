"""A run that is killed, repeated, or gone wrong: what is on disk, and how it resumes."""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from testing import estimators
from testing.estimators import same_bits, saved_steps
from testing.model_fns import minimizing, ones, zeros

import estimator as est
from estimator.loop._saver import _names_with_nan
from estimator.storage._sealed_folder import SealedFolder
from replicate import replicate_model_fn

ONES = np.ones((4, 1), np.float32)
make = functools.partial(estimators.make, save_checkpoints_steps=2, keep_checkpoint_max=None)


def counter(features, mode):
    w = est.get_variable("w", (3,), initializer=jax.nn.initializers.zeros)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=features + w[0])
    loss = -jnp.sum(w) + 0.0 * jnp.sum(features)
    return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(1.0)).minimize(loss))


@pytest.mark.slow
@pytest.mark.covers("1.2 latest_checkpoint")
@pytest.mark.parametrize("name", ["ckpt-9", "ckpt-9.unfinished"])
def test_what_a_killed_save_left_is_never_loaded(tmp_path, name):
    make(tmp_path, counter).train(lambda: [ONES] * 4)
    half = tmp_path / name
    SealedFolder(half).make()
    (half / "manifest.ocdbt").write_bytes(b"half")
    estimator = make(tmp_path, counter)
    assert estimator.latest_checkpoint() == str(tmp_path / "ckpt-4")
    assert list(estimator.predict(lambda: ONES[:1, 0])) == [5]
    estimator.train(lambda: [ONES] * 5)
    assert estimator.latest_checkpoint() == str(tmp_path / "ckpt-9")
    np.testing.assert_array_equal(estimator.get_variable_value("w"), 9)


def noisy(features, labels):
    w = est.get_variable("w", (4, 3))
    noise = jax.random.normal(est.make_rng(), (4, 3))
    return jnp.mean((features @ noise.T @ w) ** 2) + jnp.mean((w - noise) ** 2)


@pytest.mark.slow
@pytest.mark.covers("1.1 statelessness", "1.3 auto-resume", "1.3 seed")
@pytest.mark.usefixtures("users_compiler")
def test_the_bits_depend_on_the_seed_and_not_on_where_a_run_stopped(tmp_path):
    batches = list(np.random.default_rng(0).normal(size=(12, 5, 3)).astype(np.float32))
    straight, again, other = (
        make(tmp_path / name, minimizing(noisy, optax.adam(0.1)), seed=seed).train(lambda: batches)
        for name, seed in (("straight", 0), ("again", 0), ("other", 1))
    )
    for part in (batches[:5], batches[5:6], batches[6:]):
        stopped = make(tmp_path / "stopped", minimizing(noisy, optax.adam(0.1))).train(lambda part=part: part)
    assert same_bits(straight, again) and same_bits(straight, stopped)
    assert not same_bits(straight, other)


linear = minimizing(lambda x, y: jnp.mean(x @ ones("w", (1, 1))))
# Where features are 0, the loss is 0 and its gradient is NaN.
root = minimizing(lambda x, y: jnp.mean(jnp.sqrt(x @ ones("w", (1, 1)))), optax.sgd(0.01))


def nan_at(step, number=20):
    return lambda: [ONES * (np.nan if i == step else 1) for i in range(1, number + 1)]


def assert_last_is_whole(estimator, step):
    assert saved_steps(estimator)[-1] == step
    for path in saved_steps(estimator):
        results = estimator.evaluate(lambda: [ONES], checkpoint_path=os.path.join(estimator.model_dir, f"ckpt-{path}"))
        assert np.isfinite(results["loss"]) and results["global_step"] == path
    assert int(estimator.train(lambda: [ONES]).get_variable_value("global_step")) == step + 1


@pytest.mark.quick
@pytest.mark.covers("13 9 NaN in checkpoints")
@pytest.mark.parametrize(("steps_per_loop", "step", "saved"), [(1, 5, 4), (2, 6, 4), (3, 5, 4), (8, 1, 0)])
def test_a_nan_loss_ends_training_and_is_not_saved(tmp_path, steps_per_loop, step, saved):
    estimator = make(tmp_path, linear, steps_per_loop=steps_per_loop)
    with pytest.raises(est.NanLossDuringTrainingError, match=rf"\bat step {step}\b.*step {saved}\b"):
        estimator.train(nan_at(step))
    assert_last_is_whole(estimator, saved)


def test_a_nan_loss_between_checkpoints_names_its_own_step(tmp_path):
    estimator = make(tmp_path, linear, save_checkpoints_steps=100, steps_per_loop=10, log_step_count_steps=None)
    estimator.train(lambda: [ONES] * 3)
    with pytest.raises(est.NanLossDuringTrainingError, match=r"at step 17\. .* from step 3;"):
        estimator.train(nan_at(14, 40))
    assert_last_is_whole(estimator, 3)


def test_a_nan_loss_at_a_log_line_is_noticed_without_checkpoints_and_none_is_named(tmp_path):
    estimator = make(tmp_path, linear, save_checkpoints_steps=None, log_step_count_steps=5)
    taken = []

    def input_fn():
        for i in itertools.count(1):
            taken.append(i)
            yield ONES * (np.nan if i == 7 else 1)

    with pytest.raises(est.NanLossDuringTrainingError, match="at step 7") as raised:
        estimator.train(input_fn)
    assert "-1" not in str(raised.value)
    assert 10 <= len(taken) <= 25  # the thread reads ahead
    assert saved_steps(estimator) == []


@pytest.mark.quick
@pytest.mark.covers("13 9 NaN in checkpoints")
@pytest.mark.parametrize(("steps_per_loop", "number"), [(1, 4), (2, 3)])
def test_a_variable_that_turned_nan_is_not_saved_though_the_loss_is_finite(tmp_path, steps_per_loop, number):
    estimator = make(tmp_path, root, steps_per_loop=steps_per_loop)
    batches = [ONES] * (number - 1) + [ONES * 0]
    with pytest.raises(est.NanLossDuringTrainingError, match=rf"NaN in the variables \['w'\] after step {number}"):
        estimator.train(lambda: batches)
    assert_last_is_whole(estimator, 2)


def test_a_nan_is_seen_wherever_an_array_lives():
    cut, whole = (
        NamedSharding(Mesh(np.array(jax.devices("cpu")[:4]), ("x",)), PartitionSpec(*axes)) for axes in (("x",), ())
    )
    good, bad = np.arange(4, dtype=np.float32), np.float32([0, 1, 2, np.nan])
    pairs = itertools.product({"cut": cut, "whole": whole}.items(), (good, bad))
    placed = {f"{name} {x[3]}": jax.device_put(x, sharding) for (name, sharding), x in pairs}
    half = {"half": jnp.full(3, np.nan, jnp.bfloat16), "ints": jnp.arange(3), "tree": {"w": jnp.ones(2)}}
    assert sorted(_names_with_nan(placed | half)) == ["cut nan", "half", "whole nan"]


def test_initial_values_that_are_nan_are_not_saved(tmp_path):
    model_fn = minimizing(lambda x, y: jnp.mean(est.get_variable("scope/w", initializer=np.float32(np.nan)) * x))
    estimator = make(tmp_path, model_fn)
    with pytest.raises(est.NanLossDuringTrainingError, match=r"\['scope/w'\] after step 0"):
        estimator.train(lambda: [ONES])
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_thousands_of_steps_on_eight_towers_do_not_stall(tmp_path):
    model_fn = minimizing(lambda x, y: est.losses.mean_squared_error(y, x @ zeros("w", (2, 1))))
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    y = x @ np.array([[1.0], [2.0]], np.float32)

    assert len(jax.local_devices()) == 8
    estimator = est.Estimator(replicate_model_fn(model_fn), tmp_path, est.RunConfig(steps_per_loop=1))
    estimator.train(lambda: itertools.repeat((x, y)), max_steps=2000)
    assert estimator.get_variable_value("global_step") == 2000
    np.testing.assert_allclose(estimator.get_variable_value("w"), [[1], [2]], atol=1e-4)
