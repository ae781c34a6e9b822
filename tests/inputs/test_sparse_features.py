"""BCOO leaves in a batch: the same numbers as dense ones, on any number of towers, in few programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import sparse
from jax.experimental.sparse import BCOO, BCSR
from testing.columns import to_sparse
from testing.model_fns import minimizing, ones, predicting
from testing.towers import assert_close, replicate

import estimator as est
from estimator.core._bcoo import pad_sparse
from replicate import TowerOptimizer, replicate_model_fn
from replicate.towers._split_batch import split_rows, take_rows

COLUMNS = 5
KEY = jax.random.key(0)


class Linear:
    """Words through a table, next to dense features; counts its traces."""

    def __init__(self):
        self.traces = 0

    def __call__(self, features, labels, mode):
        self.traces += 1
        table = est.get_variable("table", (COLUMNS, 2))
        dense = est.get_variable("dense", (3, 2))
        output = jnp.tanh(features["words"] @ table) + features["dense"] @ dense
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"output": output})
        loss = est.losses.mean_squared_error(labels, output)
        return est.EstimatorSpec(
            mode,
            predictions={"output": output},
            loss=loss,
            train_op=TowerOptimizer(optax.adam(0.1)).minimize(loss),
            eval_metric_ops={"error": est.metrics.mean_squared_error(labels, output)},
        )


def words(rows, entries, seed=0):
    """A matrix with N values that are not 0, all in the first half of the rows."""
    random = np.random.default_rng(seed)
    matrix = np.zeros((rows, COLUMNS), np.float32)
    where = random.permutation((rows + 1) // 2 * COLUMNS)[:entries]
    matrix.flat[where] = random.normal(size=entries)
    return matrix


def by_rows(matrix):
    """With the rows as a batch dimension."""
    every = np.broadcast_to(np.arange(COLUMNS, dtype=np.int32)[:, None], (*matrix.shape, 1))
    return BCOO((matrix, every), shape=matrix.shape, indices_sorted=True, unique_indices=True)


def to_dense(x):
    """As `x.todense()`, in numpy and for rows that are not a batch dimension."""
    dense = np.zeros(x.shape, np.float32)
    for index, value in zip(np.asarray(x.indices), np.asarray(x.data), strict=True):
        if all(i < size for i, size in zip(index, x.shape, strict=False)):
            dense[tuple(index)] += value
    return dense


def batch(rows, entries, seed=0, convert=to_sparse):
    random = np.random.default_rng(seed)
    dense = random.normal(size=(rows, 3)).astype(np.float32)
    labels = random.normal(size=(rows, 2)).astype(np.float32)
    return {"words": convert(words(rows, entries, seed)), "dense": dense}, labels


def on_numpy(tree):
    return jax.tree.map(np.asarray, tree)


SIZES = [(8, 9), (8, 14), (8, 0)]  # rows and entries


@functools.cache
def dense_run():
    """The state before and after training on the same batches, dense, and the specs of the steps."""
    batches = [batch(*size, convert=np.asarray) for size in SIZES]
    model = est.transform(Linear())
    state = model.init(KEY, *batches[0])
    return state, *model.train_loop(state, batches)


@functools.cache
def plain_model():
    return est.transform(Linear())


def assert_trained_as_dense(got_state, got):
    _, want_state, want = dense_run()
    assert_close((got_state.variables, got_state.slots), (want_state.variables, want_state.slots))
    assert_close((got.loss, got.predictions), (want.loss, want.predictions))


@pytest.mark.quick
@pytest.mark.parametrize("towers", [4, 1])
def test_sparse_training_equals_the_dense_run(towers):
    model = est.transform(replicate(Linear(), towers))
    assert_trained_as_dense(*model.train_loop(dense_run()[0], [batch(*size) for size in SIZES]))


@pytest.mark.quick
@pytest.mark.parametrize(("towers", "convert"), [(4, to_sparse), (2, by_rows)])
def test_sparse_evaluation_and_prediction_equal_the_dense_run(towers, convert):
    features, labels = batch(7, 6, convert=convert)
    model = est.transform(replicate(Linear(), towers))
    dense = batch(7, 6, convert=np.asarray)
    state = dense_run()[0]
    want, got = plain_model().eval_step(state, *dense), model.eval_step(state, features, labels)
    assert_close((got.loss, got.predictions), (want.loss, want.predictions))
    assert_close(got.eval_metric_ops["error"].result(), want.eval_metric_ops["error"].result())
    assert_close(model.predict_step(state, features).predictions, want.predictions)


def test_rows_as_a_batch_dimension_train_as_the_dense_run_in_a_list_and_in_one_array_of_all_steps():
    features, labels = jax.tree.map(lambda *x: np.stack(x), *(batch(*size, convert=np.asarray) for size in SIZES))
    features["words"] = by_rows(features["words"])
    model = est.transform(replicate(Linear(), 2))
    for batches in ([batch(*size, convert=by_rows) for size in SIZES], (features, labels)):
        assert_trained_as_dense(*model.train_loop(dense_run()[0], batches))


@pytest.mark.slow
def test_labels_may_be_sparse_and_integers():
    def loss_of(features, labels):
        w = est.get_variable("w", (COLUMNS, COLUMNS))
        sums = sparse.bcoo_dot_general(features, w, dimension_numbers=(((1,), (0,)), ((), ())))
        return est.losses.mean_squared_error(labels.todense().astype(jnp.float32), sums)

    model_fn = minimizing(loss_of)
    x, y = to_sparse(words(4, 7)), to_sparse((2 * words(4, 9, seed=1)).astype(np.int32))
    model, towers = est.transform(model_fn), est.transform(replicate(model_fn, 2))
    state = model.init(KEY, x, y)

    def mean_loss(w):
        return jnp.mean((to_dense(x) @ w - to_dense(y)) ** 2)

    w = state.variables["w"]
    want = w - 0.1 * jax.grad(mean_loss)(w)
    for one in (model, towers):
        after, spec = one.train_step(state, x, y)
        assert_close((after.variables["w"], spec.loss), (want, mean_loss(w)))


@st.composite
def sparse_arrays(draw):
    """Entries may repeat, count from the end, and be padding already; there may be none."""
    shape = (8, 3, 2)
    n_sparse, dtype = draw(st.sampled_from([(1, "i4"), (2, "i1"), (3, "i4")]))
    places = st.tuples(*(st.integers(-size, size) for size in shape[:n_sparse]))
    indices = np.array(draw(st.lists(places, max_size=8)), dtype).reshape(-1, n_sparse)
    data = np.random.default_rng(0).normal(size=(8, *shape[n_sparse:])).astype(np.float32)[: len(indices)]
    more = 8 - len(indices)  # so that few programs are compiled
    data = np.concatenate([data, np.zeros((more, *data.shape[1:]), np.float32)])
    indices = np.concatenate([indices, np.full((more, n_sparse), 8, indices.dtype)])
    return BCOO((data, indices), shape=shape)


@jax.jit
def some_rows(x):
    return split_rows(x, 4), take_rows(x, 3, 5)


@pytest.mark.quick
@settings(max_examples=20, deadline=None)
@given(sparse_arrays())
def test_rows_of_a_sparse_array_match_the_dense_one(x):
    dense = to_dense(x)
    split, taken = some_rows(x)
    for i in range(4):
        part = jax.tree.map(lambda array, i=i: array[i], on_numpy(split))
        assert part.shape == (2, 3, 2)
        np.testing.assert_allclose(to_dense(part), dense[2 * i : 2 * i + 2], rtol=1e-6)
    np.testing.assert_allclose(to_dense(taken), dense[3:], rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(("n_batch", "n_dense"), [(1, 1), (2, 0)])
def test_rows_that_are_a_batch_dimension_are_cut_like_dense_ones(n_batch, n_dense):
    @jax.jit
    def rows(dense):
        x = pad_sparse(BCOO.fromdense(dense, n_batch=n_batch, n_dense=n_dense, nse=3))
        split = split_rows(x, 2)
        assert x.nse == 4
        assert split.data.shape[:2] == (2, 2)
        parts = [jax.tree.map(lambda array, i=i: array[i], split).todense() for i in range(2)]
        return parts, take_rows(x, 1, 3).todense()

    dense = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    parts, taken = rows(dense)
    np.testing.assert_array_equal(np.concatenate(parts), dense)
    np.testing.assert_array_equal(taken, dense[1:])


@pytest.mark.quick
def test_one_set_of_indices_may_serve_all_rows():
    x = BCOO((np.ones((4, 1), np.float32), np.array([[[1]]])), shape=(4, 3))
    assert split_rows(x, 2).indices.shape == (2, 2, 1, 1)
    np.testing.assert_array_equal(take_rows(x, 1, 2).todense(), x.todense()[1:3])


@pytest.mark.quick
@pytest.mark.parametrize(("entries", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16)])
def test_entries_are_padded_to_a_power_of_two(entries, bucket):
    x = to_sparse(words(8, entries))
    (got,) = pad_sparse((x,))
    assert got.nse == bucket
    assert (got.shape, got.dtype, got.indices.dtype) == (x.shape, x.dtype, x.indices.dtype)
    assert (got.indices_sorted, got.unique_indices) == (True, True)
    np.testing.assert_array_equal(got.data, [*x.data, *[0] * (bucket - entries)])
    np.testing.assert_array_equal(got.indices, [*x.indices, *[x.shape] * (bucket - entries)])
    if entries == bucket:
        assert got.data is x.data


@pytest.mark.slow
def test_one_program_serves_all_counts_of_a_bucket(compilations):
    counts, more = [9, 13, 16], [10, 16, 12]  # all between 9 and 16
    few, many, others = ([batch(8, n) for n in some] for some in (counts, more, [3, 20]))
    many = on_numpy(many)
    model_fn = Linear()
    model = est.transform(replicate(model_fn, 2))
    state = model.init(KEY, *few[0])

    def all_steps(batches):
        for features, labels in batches:
            model.train_step(state, features, labels)
            model.eval_step(state, features, labels)
            model.predict_step(state, features)
        model.train_loop(state, batches)

    all_steps(few[:1] * 3)
    before = model_fn.traces, len(compilations)
    all_steps(few)
    all_steps(many)
    assert (model_fn.traces, len(compilations)) == before
    model.train_loop(state, [many[0], *others])  # of three buckets
    traces = model_fn.traces
    assert traces > before[0]
    model.train_loop(state, [*others, few[0]])
    assert model_fn.traces == traces


@pytest.mark.quick
def test_a_model_that_began_with_dense_batches_pads_the_sparse_ones():
    model_fn = Linear()
    model = est.transform(model_fn)
    state = model.init(KEY, *batch(8, 9, convert=np.asarray))
    model.train_step(state, *batch(8, 9, convert=np.asarray))
    model.train_step(state, *batch(8, 9))  # tells it
    model.train_step(state, *batch(8, 10))
    traces = model_fn.traces
    for entries in (11, 13, 16):
        model.train_step(state, *batch(8, entries))
    assert model_fn.traces == traces


@pytest.mark.slow
def test_an_estimator_is_the_same_with_sparse_batches(tmp_path):
    sizes = [(8, 9, 0), (8, 3, 1), (8, 20, 2), (8, 9, 3), (8, 1, 4)]
    results = []
    for convert, towers in ((np.asarray, 0), (to_sparse, 2)):
        config = est.RunConfig(steps_per_loop=2)  # twice, and then a single step
        estimator = est.Estimator(replicate(Linear(), towers), tmp_path / str(towers), config)
        estimator.train(lambda convert=convert: (batch(*size, convert=convert) for size in sizes))
        rest = [batch(rows, 3, convert=convert) for rows in (8, 7, 2)]
        variables = [estimator.get_variable_value(name) for name in ("table", "dense")]
        evaluation = jax.tree.map(np.float64, estimator.evaluate(lambda rest=rest: rest))
        results.append((variables, evaluation, list(estimator.predict(lambda rest=rest: rest))))
    assert_close(results[1], results[0])


@pytest.mark.slow
def test_programs_of_several_steps_serve_batches_of_unlike_buckets(tmp_path, compilations):
    model_fn = Linear()
    config = est.RunConfig(steps_per_loop=2)
    estimator = est.Estimator(model_fn, tmp_path, config)

    def run(batches):
        estimator.train(lambda: batches)
        estimator.evaluate(lambda: batches)
        list(estimator.predict(lambda: batches))
        return model_fn.traces, len(compilations)

    batches = [batch(8, n) for n in (9, 3, 10, 4, 16, 13)]
    unsorted = BCOO((jnp.ones(1), jnp.zeros((1, 2), jnp.int32)), shape=(8, COLUMNS))
    by_hand = [batch(8, 5), (batch(8, 9)[0] | {"words": unsorted}, batch(8, 9)[1])]
    assert run(batches) == run(batches[::-1])
    estimator.train(lambda: by_hand)  # of another bucket, and the second is not known to be sorted
    assert estimator.get_variable_value("global_step") == 14


def test_a_sparse_array_alone_is_one_batch(tmp_path):
    model_fn = predicting(lambda x: x @ est.get_variable("w", (COLUMNS, 1)))
    estimator = est.Estimator(model_fn, tmp_path)
    x = to_sparse(words(6, 4))
    predictions = np.stack(list(estimator.predict(lambda: x)))
    assert predictions.shape == (6, 1)
    np.testing.assert_allclose(np.stack(list(estimator.predict(lambda: [x, x]))), np.tile(predictions, (2, 1)))


SPARSE = to_sparse(words(8, 9))
BY_ROW = BCSR((np.ones(8), np.zeros(8, np.int32), np.arange(9, dtype=np.int32)), shape=(8, COLUMNS))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (BY_ROW, TypeError, r"BCOO; got features\['words'\] = BCSR.* of type BCSR. Convert it"),
        (to_sparse(words(8, 9) > 0), TypeError, r"integers or floats; got features\['words'\] of dtype bool. Convert"),
        (to_sparse(words(8, 9).astype(np.complex64)), TypeError, r"features\['words'\] of dtype complex64"),
        (jax.tree.map(np.float32, SPARSE), TypeError, r"must be integers; features\['words'\] has float32"),
        (BCOO((words(8, 9)[None], np.zeros((1, 0), np.int32)), shape=(8, COLUMNS)), ValueError,
         r"all dimensions of features\['words'\] = BCOO.* are dense"),
        (to_sparse(words(6, 9)), ValueError, r"same batch size .*features\['words'\]: 6"),
        (to_sparse(np.zeros((0, 5))), ValueError, r"must have the same batch size .*features\['words'\]: 0"),
        (BCOO((np.ones(1), np.zeros((1, 2), np.int8)), shape=(8, 128)), ValueError,
         r"indices of features\['words'\] = .* are int8, which cannot hold 128.*Convert them to int32"),
    ],
    ids=["bcsr", "bool", "complex", "float", "dense", "rows", "empty", "int8"],
)  # fmt: skip
def test_what_cannot_be_a_batch_is_refused(x, error, message):
    features, labels = batch(8, 9)
    model = est.transform(Linear())
    with pytest.raises(error, match=message):
        model.init(KEY, {**features, "words": x}, labels)
    with pytest.raises(error, match=message):
        model.train_step(None, {**features, "words": x}, labels)


@pytest.mark.slow
def test_stacked_batches_need_their_steps_as_a_batch_dimension():
    features, labels = jax.tree.map(lambda x: jnp.stack([x, x]), batch(8, 9, convert=np.asarray))
    features["words"] = to_sparse(features["words"])
    advice = r"`train_loop` got BCOO.*Write `bcoo.update_layout\(n_batch=1, on_inefficient=None\)`, or give a"
    model = est.transform(Linear())
    with pytest.raises(ValueError, match=advice):
        model.train_loop(None, (features, labels))
    state = model.init(KEY, *batch(8, 9, convert=np.asarray))
    features["words"] = features["words"].update_layout(n_batch=1, on_inefficient=None)
    after, _ = model.train_loop(state, (features, labels))
    assert after.global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rows", "columns", "entries"),
    [(["cpu:0"] * 2, 4, 3, 1), (None, 2, 2, 0), (["cpu:0", "cpu:1"], 2, 1, 1), (["cpu:0", "cpu:1"], 6, 1, 5)],
)
def test_the_smallest_batches_have_the_layouts_that_the_docs_name(rows, columns, entries, devices):
    dense = np.zeros((rows, columns), np.float32)
    dense.flat[:entries] = 1 + np.arange(entries)

    model_fn = minimizing(lambda x, y: est.losses.mean_squared_error(y, x @ ones("w", (columns, 1))))
    labels = np.ones((rows, 1), np.float32)
    state = est.transform(model_fn).init(KEY, dense, labels)
    by_rows = BCOO.fromdense(dense).update_layout(n_batch=1, on_inefficient=None)
    for x in (BCOO.fromdense(dense), BCOO.fromdense(dense, n_batch=1), by_rows):
        model = est.transform(model_fn if devices is None else replicate_model_fn(model_fn, devices=devices))
        loss = float(model.train_step(state, x, labels)[1].loss)
        assert loss == pytest.approx(np.mean((dense.sum(1) - 1) ** 2), rel=1e-5)


def test_sparse_predictions_are_refused():
    model_fn = predicting(lambda x: {"words": x})
    with pytest.raises(TypeError, match=r"predictions\['words'\] must be an array, given: .*BCOO"):
        est.transform(replicate(model_fn, 2)).init(KEY, SPARSE, mode="infer")


def test_training_still_needs_rows_that_divide_by_the_towers():
    features, labels = batch(7, 9)
    with pytest.raises(ValueError, match="Batch size 7 needs to be divisible by the number of towers, which is 4"):
        est.transform(replicate(Linear(), 4)).init(KEY, features, labels)
