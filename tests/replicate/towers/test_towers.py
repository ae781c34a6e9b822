"""What a model_fn may ask of the towers, and its random keys in them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import ones, predicting
from testing.towers import cpus, started

import estimator as est
from replicate import (
    TOWER_AXIS,
    TowerOptimizer,
    cross_tower_mean,
    cross_tower_sum,
    num_towers,
    replicate_model_fn,
    tower_index,
)

ROWS = np.arange(1, 9, dtype=np.float32)


def predict(rows_fn, towers, x=ROWS):
    """What `rows_fn(rows of the tower)` gives, once per row; `towers` None: not replicated."""

    model_fn = predicting(lambda x: jax.tree.map(lambda v: jnp.broadcast_to(v, x.shape), rows_fn(x)))
    if towers:
        model_fn = replicate_model_fn(model_fn, devices=cpus(towers))
    model, state = started(model_fn, x, mode="infer")
    return jax.tree.map(np.asarray, model.predict_step(state, x).predictions)


@pytest.mark.quick
@pytest.mark.parametrize("towers", [4, None])
def test_every_tower_knows_its_number_and_their_count_sums_and_means(towers):
    def rows_fn(x):
        total, largest, positive = cross_tower_sum([x.sum(), x.max(), (x > 0).sum(dtype=jnp.int32)])
        means = cross_tower_mean({"mean": x.mean(), "vector": x[:1]})
        known = {"index": tower_index(), "count": jnp.int32(num_towers())}
        return known | means | {"total": total, "largest": largest, "positive": positive}

    got = predict(rows_fn, towers)
    count, parts = towers or 1, ROWS.reshape(towers or 1, -1)
    want = {"count": count, "mean": 4.5, "vector": parts[:, 0].mean(), "total": 36.0, "largest": parts.max(1).sum()}
    for name, value in (want | {"positive": 8, "index": np.repeat(np.arange(count), 8 // count)}).items():
        np.testing.assert_array_equal(got[name], np.broadcast_to(value, 8), err_msg=name)
    assert got["index"].dtype == got["positive"].dtype == np.int32


def test_outside_of_a_run_there_is_one_tower():
    assert num_towers() == 1
    assert tower_index() == 0
    tree = {"a": jnp.ones(2), "b": jnp.int32(3)}
    assert cross_tower_sum(tree) is tree
    assert cross_tower_mean(tree["a"]) is tree["a"]


def test_sums_keep_shapes_and_dtypes():
    def fn(x):
        return cross_tower_sum({"half": x[0].astype(jnp.bfloat16), "ints": (x[1:3].astype(jnp.int32), x), "none": None})

    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    got = jax.pmap(fn, axis_name=TOWER_AXIS, devices=jax.devices("cpu")[:2])(x)
    assert got["half"].dtype == jnp.bfloat16 and got["half"].shape == (2,)
    assert got["ints"][0].dtype == jnp.int32 and got["ints"][0].shape == (2, 2)
    np.testing.assert_array_equal(got["ints"][1][0], x.sum(0))
    np.testing.assert_array_equal(got["ints"][1][1], x.sum(0))
    assert got["none"] is None


def test_integers_have_no_mean():
    message = "`cross_tower_mean` cannot average integers; got int32. Use `cross_tower_sum`, or convert them to floats."
    with pytest.raises(TypeError, match=re.escape(message)):
        predict(lambda x: cross_tower_mean({"n": jnp.int32(1)}), 2)


def noise_model(towers):
    def model_fn(features, labels, mode):
        w = ones("w")
        draws = {
            "first": jax.random.uniform(est.make_rng(), features.shape),
            "second": jax.random.uniform(est.make_rng(), features.shape),
            "named": jax.random.uniform(est.make_rng("named"), features.shape),
        }
        loss = jnp.mean(w * features)
        return est.EstimatorSpec(mode, draws, loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    return est.transform(replicate_model_fn(model_fn, devices=cpus(towers)) if towers else model_fn)


def draws_of(model, steps=2, seed=0):
    state = model.init(jax.random.key(seed), ROWS)
    predictions = []
    for _ in range(steps):
        state, spec = model.train_step(state, ROWS)
        predictions.append(jax.tree.map(np.asarray, spec.predictions))
    return predictions


@pytest.mark.slow
def test_draws_differ_by_call_step_and_tower():
    draws = draws_of(noise_model(4))
    values = np.concatenate([step[name] for step in draws for name in ("first", "second", "named")])
    assert len(np.unique(values)) == 2 * 3 * len(ROWS)


@pytest.mark.slow
def test_draws_are_the_same_in_every_run_with_the_same_seed():
    (first, *_), (again, *_) = (draws_of(noise_model(2)) for _ in range(2))
    (other, *_) = draws_of(noise_model(2), seed=1)
    for name, draw in first.items():
        np.testing.assert_array_equal(draw, again[name])
        assert (draw != other[name]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_one_tower_draws_as_the_plain_model_fn():
    for got, want in zip(draws_of(noise_model(1)), draws_of(noise_model(None)), strict=True):
        for name, draw in want.items():
            np.testing.assert_array_equal(got[name], draw)


@pytest.mark.slow
def test_no_two_rows_of_a_prediction_share_a_draw():
    model = noise_model(4)
    state = model.init(jax.random.key(0), ROWS)
    for rows in (7, 3):
        draws = model.predict_step(state, ROWS[:rows]).predictions
        assert len(np.unique(np.concatenate(list(draws.values())))) == 3 * rows


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_initial_values_are_the_same_for_all_numbers_of_towers():
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (3, 4))
        net = est.get_variable("net", lambda key: {"b": jax.random.normal(key, (2,))})
        est.get_variable("statistics", initializer={"mean": jnp.zeros(2), "n": np.int32(0)}, trainable=False)
        noise = est.get_variable("noise", lambda key: jax.random.normal(est.make_rng(), (2,)))
        loss = jnp.mean(features) * (w.sum() + net["b"].sum() + noise.sum())
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.adam(0.1)).minimize(loss))

    want = est.transform(model_fn).init(jax.random.key(0), ROWS)
    for towers in (1, 8):
        replicated = replicate_model_fn(model_fn, devices=cpus(towers))
        got = est.transform(replicated).init(jax.random.key(0), ROWS)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for one, other in zip(
            jax.tree.leaves((got.variables, got.slots, got.global_step)),
            jax.tree.leaves((want.variables, want.slots, want.global_step)),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


def test_the_global_step_is_the_same_in_every_tower():
    def model_fn(features, labels, mode):
        w = ones("w")
        step = jnp.broadcast_to(est.global_step(), features.shape)
        loss = jnp.mean(w * features)
        return est.EstimatorSpec(mode, step, loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    model, state = started(replicate_model_fn(model_fn, devices=cpus(4)), ROWS)
    state, first = model.train_step(state, ROWS)
    _, second = model.train_step(state, ROWS)
    np.testing.assert_array_equal(first.predictions, np.zeros(8))
    np.testing.assert_array_equal(second.predictions, np.ones(8))
