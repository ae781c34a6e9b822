"""Slices with each row once are the same array, or its mean; tables that share their ids gather these once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import assert_close, assert_same_training, cpus, one_step, replicate, started

import estimator as est
from estimator.sparse._indexed_slices import sum_by_row
from replicate import TowerOptimizer, replicate_model_fn

RNG = np.random.default_rng(0)


def slices(indices, shape=(6, 2), dtype=np.float32):
    values = RNG.integers(-9, 9, (len(indices), *shape[1:])).astype(dtype)
    return est.IndexedSlices(jnp.asarray(values), jnp.asarray(indices), shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gradient",
    [
        slices(np.array([5, 0, 5, 2, 0, 5])),
        slices(np.array([3, -1, 6, 3, -7, 2**30, 0], np.int32)),
        slices(np.array([4, 4, 1, 4], np.uint8), (6, 3, 2), jnp.bfloat16),
        slices(np.array([255, 100, 255], np.uint8), (256, 1)),
        slices(np.array([-1, 9, -1])),
        slices(np.array([], np.int32)),
        slices(np.array([0, 1]), (0, 2)),
    ],
    ids=["repeated", "padded", "bfloat16", "uint8", "all padding", "empty", "no rows"],
)
def test_each_row_comes_once_and_the_rest_is_padding(gradient):
    given, dense = jax.device_get(gradient), gradient.to_dense()
    rows = [row for row in np.unique(given.indices) if 0 <= row < given.dense_shape[0]]
    once = jax.jit(lambda gradient: [gradient.deduplicate(reduction) for reduction in ("sum", "mean")])(gradient)
    for got, reduce in zip(jax.device_get(once), (np.sum, np.mean), strict=True):
        values = [reduce(given.values[given.indices == row], axis=0) for row in rows]
        assert got.dense_shape == given.dense_shape
        assert (got.values.shape, got.values.dtype) == (given.values.shape, given.values.dtype)
        assert got.indices.shape == given.indices.shape
        np.testing.assert_array_equal(got.indices[: len(rows)], rows)
        assert (got.indices[len(rows) :] == given.dense_shape[0]).all()
        there = np.float32(got.values[: len(rows)])
        np.testing.assert_allclose(there, np.float32(values).reshape(there.shape), rtol=1e-2)
        assert not got.values[len(rows) :].any()
    np.testing.assert_array_equal(once[0].to_dense(), dense)
    values, rows = jax.jit(sum_by_row)(gradient)
    assert len(set(rows.tolist())) == len(rows)
    np.testing.assert_array_equal(est.IndexedSlices(values, rows, gradient.dense_shape).to_dense(), dense)


def test_what_is_not_finite_in_padding_stays_there():
    gradient = est.IndexedSlices(jnp.array([[1.0], [jnp.nan], [jnp.inf]]), jnp.array([0, -1, 2]), (2, 1))
    for reduction in ("sum", "mean"):
        np.testing.assert_array_equal(gradient.deduplicate(reduction).values, [[1], [0], [0]])


def test_what_cannot_be_deduplicated_is_refused():
    gradient = slices(np.array([1, 1]))
    with pytest.raises(ValueError, match=r'`IndexedSlices.deduplicate` takes "sum" or "mean"; got \'max\'\.'):
        gradient.deduplicate("max")
    with pytest.raises(
        ValueError, match=r"`IndexedSlices.deduplicate` got IndexedSlices with values of shape \(2, 3\)"
    ):
        est.IndexedSlices(jnp.ones((2, 3)), gradient.indices, (6, 2)).deduplicate()
    whole = slices(np.array([1, 1]), dtype=np.int32)
    with pytest.raises(TypeError, match=r'deduplicate\("mean"\)` cannot average int32 values\. Use "sum"'):
        whole.deduplicate("mean")
    np.testing.assert_array_equal(whole.deduplicate().to_dense(), whole.to_dense())


def changed_model_fn(reduction):
    """A table looked up by two-dimensional ids, and its gradient deduplicated."""

    def model_fn(features, labels, mode):
        rows = est.embedding_lookup("words", features, (9, 2), initializer=jax.nn.initializers.ones)
        loss = jnp.mean((rows.sum((1, 2)) - labels) ** 2)
        optimizer = TowerOptimizer(optax.sgd(0.1))
        pairs = optimizer.compute_gradients(loss)
        if reduction:
            pairs = [(gradient.deduplicate(reduction), name) for gradient, name in pairs]
        return est.EstimatorSpec(mode, predictions=rows, loss=loss, train_op=optimizer.apply_gradients(pairs))

    return model_fn


def batches(steps=2, ids=3):
    ids = RNG.integers(-2, 9, (steps, 8, ids)).astype(np.int32)
    return ids, RNG.normal(size=(steps, 8)).astype(np.float32)


@pytest.mark.slow
def test_the_sum_in_towers_trains_as_the_gradient_itself():
    assert_same_training(changed_model_fn(None), replicate(changed_model_fn("sum"), 4), batches())


def test_the_mean_is_taken_in_each_tower_and_the_means_are_summed():
    towers, lr = 2, 0.1
    (ids, *_), (labels, *_) = batches(1)
    got, _ = one_step(replicate(changed_model_fn("mean"), towers), ids, labels)
    want = np.ones((9, 2))
    for mine, y in zip(np.split(ids, towers), np.split(labels, towers), strict=True):
        errors = 2 * ((mine >= 0).sum(1) * 2 - y) / len(ids)
        for row in set(mine[mine >= 0]):
            want[row] -= lr * np.mean([e for e, words in zip(errors, mine, strict=True) for w in words if w == row])
    assert_close(np.float64(got.variables["words"]), want, rtol=1e-5)


def two_tables(lengths, *, own_ids=False, dense=False, two_losses=False, **options):
    """Two tables looked up by the same ids; or the second one by others."""

    def rows(name, ids, shape):
        if dense:
            return jnp.where(ids[..., None] >= 0, est.get_variable(name, shape)[ids], 0.0)
        return est.embedding_lookup(name, ids, shape)

    def model_fn(features, labels, mode):
        words = rows("words", features, (lengths[0], 3))
        others = rows("others", features // 2 if own_ids else features, (lengths[1], 2))
        loss = jnp.mean((words.sum((1, 2)) * others.sum((1, 2)) - labels) ** 2)
        if two_losses:
            again = jnp.mean(jnp.tanh(others).sum((1, 2)) * labels)
            losses = [(loss, ["words"]), (again, ["others"])]
            train_op = est.group(*(TowerOptimizer(optax.sgd(0.1)).minimize(*each) for each in losses))
        else:
            train_op = TowerOptimizer(optax.sgd(0.1), **options).minimize(loss)
        return est.EstimatorSpec(mode, predictions=others, loss=loss, train_op=train_op)

    return model_fn


def gathered(model_fn):
    """The dtypes of what the towers gather in the compiled training step."""
    (ids, *_), (labels, *_) = batches(1)
    model, state = started(replicate_model_fn(model_fn, devices=cpus(2)), ids, labels)
    program = jax.jit(model.train_step).lower(state, ids, labels).compile().as_text()
    return sorted(re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather(?:-start)?\(", program))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"two_losses": True}, {"accumulate_steps": 2}], ids=str)
def test_tables_that_share_their_ids_gather_them_once(options):
    assert gathered(two_tables((20, 30), **options)) == ["f32", "f32", "s32"]


def test_tables_with_ids_of_their_own_gather_both():
    assert gathered(two_tables((9, 9), own_ids=True)) == ["f32", "f32", "s32", "s32"]


@pytest.mark.slow
def test_tables_that_share_their_ids_train_as_dense_ones_do():
    assert_same_training(two_tables((9, 30), dense=True), replicate(two_tables((9, 30)), 4), batches())


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_an_id_that_does_not_fit_32_bits_is_no_row(dtype):
    far = np.array([1, 2**32 + 2 if np.dtype(dtype).itemsize == 8 else 2**32 - 1], dtype)

    def model_fn(features, labels, mode):
        rows = est.embedding_lookup("words", features, (4, 1))
        optimizer = est.Optimizer(optax.sgd(1.0))
        ((gradient, name),) = pairs = optimizer.compute_gradients(rows[0, 0])
        train_op = optimizer.apply_gradients(pairs)
        return est.EstimatorSpec(mode, predictions=(rows, gradient.indices), loss=rows[0, 0], train_op=train_op)

    with jax.enable_x64(True):
        _, spec = one_step(model_fn, far)
    rows, indices = spec.predictions
    assert np.isnan(rows).ravel().tolist() == [False, True]
    assert indices[0] == 1 and not 0 <= indices[1] < 4


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_a_sparse_gradient_by_narrow_indices_moves_each_row(dtype):
    def model_fn(features, labels, mode):
        est.get_variable("words", (300, 2), initializer=jax.nn.initializers.zeros)
        gradient = est.IndexedSlices(jnp.ones((4, 2)), features, (300, 2))
        train_op = est.Optimizer(optax.sgd(1.0)).apply_gradients([(gradient, "words")])
        return est.EstimatorSpec(mode, loss=jnp.float32(0), train_op=train_op)

    ids = np.array([44, 44, 44, 7], dtype)  # 300 is 44 in 8 bits
    state, _ = one_step(model_fn, ids)
    assert {i: x for i, x in enumerate(state.variables["words"][:, 0].tolist()) if x} == {7: -1.0, 44: -3.0}
