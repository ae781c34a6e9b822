"""`est.embedding_lookup_sparse` against numpy: TensorFlow's example, random ragged ids, gradients, towers, errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.sparse import BCOO
from testing import refused
from testing.columns import to_sparse
from testing.model_fns import ones, predicting
from testing.towers import assert_close, predict, replicate

import estimator as est
from replicate import TowerOptimizer

ROWS, WIDTH, BATCH, K = 6, 2, 4, 3
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
COMBINERS = ("sum", "mean", "sqrtn")
LAYOUTS = ("padded", "bcoo", "bcoo of rows")


def ragged(rows):
    """Ids and weights of examples as dense arrays, filled up by -1 and 9."""
    ids, weights = np.full((len(rows), K), -1, np.int32), np.full((len(rows), K), 9, np.float32)
    for i, row in enumerate(rows):
        for j, (one, weight) in enumerate(row):
            ids[i, j], weights[i, j] = one, weight
    return ids, weights


def given_as(layout, ids, weights=None):
    """The features: arrays, or BCOOs with room for all entries."""
    if layout != "padded":
        at = np.argwhere(ids >= 0)
        at = np.concatenate([at, np.broadcast_to(ids.shape, (ids.size - len(at), 2))]).astype(np.int32)
        inside = at[:, 0] < len(ids)
        sparse = lambda x: BCOO(  # noqa: E731
            (np.where(inside, x[tuple(np.minimum(at, np.array(ids.shape) - 1).T)], 0).astype(x.dtype), at),
            shape=ids.shape,
        )
        if layout == "bcoo of rows":
            columns = np.where(ids >= 0, np.arange(K), K).astype(np.int32)[..., None]
            sparse = lambda x: BCOO((x, columns), shape=ids.shape)  # noqa: E731
        ids, weights = sparse(ids), None if weights is None else sparse(weights)
    return {"ids": ids} if weights is None else {"ids": ids, "weights": weights}


def expected(table, ids, weights, combiner, max_norm=None, xp=np):
    """A loop over the examples."""
    weights = xp.ones(ids.shape, np.float32) if weights is None else weights
    result = []
    for row, own in zip(ids, weights, strict=True):
        total, scale, any_id = xp.zeros(table.shape[1:], np.float32), 0.0, False
        for i, weight in zip(row, own, strict=True):
            if i < 0:
                continue
            vector = table[i]
            if max_norm is not None:
                vector = vector * (max_norm / xp.maximum(max_norm, xp.sqrt((vector * vector).sum())))
            any_id = True
            total = total + weight * vector
            scale = scale + (weight if combiner == "mean" else weight * weight)
        if any_id and combiner != "sum":
            total = total / (scale if combiner == "mean" else xp.sqrt(scale))
        result.append(total)
    return xp.stack(result)


@functools.cache
def model_of(combiner, max_norm=None):
    def model_fn(features, labels, mode):
        rows = est.embedding_lookup_sparse(
            "words", features["ids"], features.get("weights"), TABLE.shape, combiner=combiner, max_norm=max_norm
        )
        return est.EstimatorSpec(mode, predictions=rows)

    return est.transform(model_fn)


def state_of(table=TABLE):
    """Made without an init, which takes time to compile."""
    return est.State({"words": table}, {}, np.int32(0), jax.random.key(0))


def looked_up(features, combiner, max_norm=None):
    return np.asarray(model_of(combiner, max_norm).predict_step(state_of(), features).predictions)


# Values.


@pytest.mark.quick
@pytest.mark.parametrize("layout", ["padded", "bcoo"])
def test_tensorflow_documents_this_example(layout):
    table = np.arange(200, dtype=np.float32).reshape(10, 20)
    ids = np.array([[1, 3, -1, -1], [0, -1, -1, -1], [-1, -1, -1, 1]], np.int32)
    weights = np.array([[2.0, 0.5, 0, 0], [1, 0, 0, 0], [0, 0, 0, 3]], np.float32)
    if layout == "bcoo":
        at = np.array([[0, 0], [0, 1], [1, 0], [2, 3]])
        ids, weights = (BCOO((x[tuple(at.T)], at), shape=x.shape) for x in (ids, weights))
    model_fn = predicting(lambda x: est.embedding_lookup_sparse("t", x["ids"], x["weights"], initializer=table))
    result = predict(model_fn, {"ids": ids, "weights": weights}).predictions
    want = [(table[1] * 2.0 + table[3] * 0.5) / (2.0 + 0.5), table[0] * 1.0 / 1.0, table[1] * 3.0 / 3.0]
    np.testing.assert_allclose(result, want, rtol=1e-6)


entries = st.tuples(st.integers(0, ROWS - 1), st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.lists(entries, max_size=K), min_size=BATCH, max_size=BATCH),
    options=st.sampled_from([("mean", None, True), ("sqrtn", 0.5, False), ("sum", None, False)]),
)
def test_ragged_ids_give_what_a_loop_gives_in_all_layouts(rows, options):
    combiner, max_norm, weighted = options
    ids, weights = ragged(rows)
    weights = weights if weighted else None
    want = expected(TABLE, ids, weights, combiner, max_norm)
    for layout in LAYOUTS:
        got = looked_up(given_as(layout, ids, weights), combiner, max_norm)
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6, err_msg=layout)


def test_negative_weights_count_and_weights_that_sum_to_zero_divide_by_it():
    ids, weights = ragged([[(1, -1.0), (2, 3.0)], [(1, 1.0), (2, -1.0)], [], [(3, 0.0)]])
    for combiner in COMBINERS:
        got = looked_up(given_as("padded", ids, weights), combiner)
        infinite = {"sum": [], "mean": [1, 3], "sqrtn": [3]}[combiner]
        assert np.flatnonzero(~np.isfinite(got).all(1)).tolist() == infinite
        rest = [i for i in range(BATCH) if i not in infinite]
        with np.errstate(invalid="ignore", divide="ignore"):
            np.testing.assert_allclose(got[rest], expected(TABLE, ids, weights, combiner)[rest], rtol=1e-6)


def test_ids_of_more_dimensions_are_combined_over_the_last():
    ids = np.array([[[0, 1, -1], [2, 2, 2]], [[-1, -1, -1], [5, 0, -1]]], np.int32)
    got = looked_up({"ids": ids}, "mean")
    np.testing.assert_allclose(got, [expected(TABLE, each, None, "mean") for each in ids], rtol=1e-6)


def test_unknown_ids_are_nan_and_integer_weights_are_converted():
    got = looked_up({"ids": np.array([[0, ROWS], [1, 2]]), "weights": np.array([[1, 1], [1, 3]])}, "sum")
    assert np.isnan(got[0]).all()
    np.testing.assert_allclose(got[1], TABLE[1] + 3 * TABLE[2], rtol=1e-6)


def test_weights_at_other_indices_are_nan():
    at = np.array([[0, 0], [1, 0]], np.int32)
    ids = BCOO((np.array([1, 2]), at), shape=(2, 2))
    weights = BCOO((np.ones(2, np.float32), np.array([[0, 0], [1, 1]], np.int32)), shape=(2, 2))
    assert np.isnan(looked_up({"ids": ids, "weights": weights}, "sum")).all(axis=1).tolist() == [False, True]


# Gradients.

IDS, WEIGHTS = ragged([[(1, 2.0), (3, 0.5)], [], [(0, 1.0)], [(1, 3.0), (1, 0.25), (5, 1.5)]])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "combiner"), [*zip(LAYOUTS, COMBINERS, strict=True)])
def test_weights_and_table_have_the_gradients_of_the_dense_computation(layout, combiner):
    model = model_of(combiner, 0.7)
    features = given_as(layout, IDS, WEIGHTS)

    def loss(table, weights):
        given = features["weights"]
        given = weights if layout == "padded" else BCOO((weights, given.indices), shape=given.shape)
        spec = model.predict_step(state_of(table), {**features, "weights": given})
        return jnp.sum(jnp.sin(spec.predictions * jnp.arange(1.0, 3.0)))

    def dense_loss(table, weights):
        return jnp.sum(jnp.sin(expected(table, IDS, weights, combiner, 0.7, jnp) * jnp.arange(1.0, 3.0)))

    weights = features["weights"] if layout == "padded" else features["weights"].data
    rows, own = jax.grad(loss, (0, 1))(jnp.asarray(TABLE), jnp.asarray(weights))
    want_rows, want = jax.jit(jax.grad(dense_loss, (0, 1)))(TABLE, WEIGHTS)
    np.testing.assert_allclose(rows, want_rows, rtol=1e-5, atol=1e-6)
    want = want if layout == "bcoo of rows" or layout == "padded" else jnp.pad(want[IDS >= 0], (0, np.sum(IDS < 0)))
    np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-6)


def training_model_fn(lookup, seen=None):
    def model_fn(features, labels, mode):
        scale = ones("scale")
        rows = lookup(features, lambda x: x * scale)
        loss = jnp.mean((rows.sum(axis=1) - labels) ** 2)
        optimizer = TowerOptimizer(optax.adagrad(0.5))
        pairs = optimizer.compute_gradients(loss)
        if seen is not None:
            seen.update({name: gradient for gradient, name in pairs})
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))

    return model_fn


def sparse_lookup(features, scaled):
    weights = features["weights"]
    if isinstance(weights, BCOO):
        weights = BCOO((scaled(weights.data), weights.indices), shape=weights.shape)
    else:
        weights = scaled(weights)
    return est.embedding_lookup_sparse("words", features["ids"], weights, TABLE.shape, combiner="sum", max_norm=0.8)


def dense_lookup(features, scaled):
    table = est.get_variable("words", TABLE.shape)
    return expected(table, IDS, scaled(features["weights"]), "sum", 0.8, jnp)


@functools.cache
def trained(lookup, layout, towers):
    seen = {}
    model = est.transform(replicate(training_model_fn(lookup, seen), towers))
    features, labels = given_as(layout, IDS, WEIGHTS), np.array([1.0, 2.0, 0.5, -1.0], np.float32)
    state = model.init(jax.random.key(0), features, labels)
    state = state._replace(variables={**state.variables, "words": jnp.asarray(TABLE)})
    losses = []
    for _ in range(3):
        state, spec = model.train_step(state, features, labels)
        losses.append(spec.loss)
    return seen, (state.variables, losses)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_sparse_gradients_equals_the_dense_one_on_towers(layout):
    _, want = trained(dense_lookup, "padded", 1)
    seen, got = trained(sparse_lookup, layout, 4)
    assert_close(got, want, rtol=1e-5)
    assert isinstance(seen["words"], est.IndexedSlices) and seen["words"].dense_shape == TABLE.shape
    # Each tower has room for all entries of a BCOO, and their number is rounded up to a power of two.
    slots = {"padded": K, "bcoo": 16, "bcoo of rows": 4}[layout]
    assert seen["words"].values.shape == (slots, WIDTH)


# Errors.

AT = np.array([[0, 0], [1, 0]])
ENTRIES = BCOO((np.array([1, 2]), AT), shape=(2, 2))
OTHERS = BCOO((np.ones(1, np.float32), AT[:1]), shape=(2, 2))
DENSE = BCOO((np.ones((2, 2), int), AT[:, :1]), shape=(2, 2))
FOUR, SAME = np.ones((2, 2), int), "BCOO((weights, ids.indices), shape=ids.shape)"
REFUSED = {  # ids, and weights or other arguments
    TypeError: [
        (np.ones((2, 2), np.float32), {}, r"'w'\)` needs integer ids; got float32\[2, 2\]"),
        (to_sparse(np.float32(np.eye(2))), {}, r"needs integer ids; got float32\[2, 2\]"),
        (FOUR, {"weights": ENTRIES}, "as weights of an array of ids. Give `weights.todense"),
        (ENTRIES, {"weights": np.ones((2, 2))}, "got ids in a BCOO and weights in .* Give a BCOO of both"),
    ],
    ValueError: [
        (np.ones(2, int), {}, r"shape \(batch, k\); got \(2,\). For one id per example"),
        (FOUR, {"weights": np.ones(2)}, r"needs a weight for each id; got weights of shape \(2,\) for \(2, 2\)"),
        (ENTRIES, {"weights": OTHERS}, r"in a BCOO with the same indices; .* Write `" + re.escape(SAME) + "`"),
        (DENSE, {}, "at most one batch dimension and no dense one; got .*BCOO"),
        (FOUR, {"combiner": "max"}, r"combiner must be one of \('mean', 'sqrtn', 'sum'\); got 'max'"),
        (FOUR, {"max_norm": 0}, "max_norm must be a number above 0"),
    ],
}


@pytest.mark.parametrize("table, given", [(jnp.ones((5, 2)), r"an array of shape \(5, 2\)"), (None, "None")])
@pytest.mark.parametrize("name", ["embedding_lookup", "embedding_lookup_sparse"])
def test_the_value_of_a_table_instead_of_its_name_is_an_error(name, table, given):
    model_fn = predicting(lambda x: getattr(est, name)(table, x))
    message = (
        rf"`est.{name}` takes the name of a table, .* and not its value; got {given}\. Write "
        rf"`est.{name}\('name', ids, shape=\(rows, width\)\)`, which creates the table"
    )
    with pytest.raises(TypeError, match=message):
        est.transform(model_fn).init(jax.random.key(0), np.ones((2, 2), int), mode="infer")


def test_an_unknown_table_is_an_error_of_the_function_called():
    model_fn = predicting(lambda x: est.embedding_lookup_sparse("words", x))
    with pytest.raises(ValueError, match=r"`est.embedding_lookup_sparse\('words'\)` names no variable of this run"):
        est.transform(model_fn).init(jax.random.key(0), np.ones((2, 2), int), mode="infer")


@pytest.mark.parametrize("error, ids, arguments, message", refused.rows(REFUSED))
def test_an_error_says_what_is_wrong(ids, arguments, error, message):
    arguments = dict(arguments)
    features = {"ids": ids} | ({"weights": arguments.pop("weights")} if "weights" in arguments else {})
    model_fn = predicting(lambda x: est.embedding_lookup_sparse("w", x["ids"], x.get("weights"), (4, 2), **arguments))
    with pytest.raises(error, match=message):
        est.transform(model_fn).init(jax.random.key(0), features, mode="infer")
