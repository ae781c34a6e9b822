"""Weighted columns, shared embeddings and vocabularies in files, with the numbers of TensorFlow's own tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.columns import read
from testing.towers import replicate

import estimator as est
from replicate import TowerOptimizer

fc = est.feature_column
IDENTITY = fc.categorical_column_with_identity
COMBINERS = ("sum", "mean", "sqrtn")
IDS = np.array([[0, -1, -1], [2, 1, -1], [1, 2, 2], [-1, -1, -1]])
WEIGHTS = np.array([[0.5, 7, 7], [1.0, 0.1, 7], [2.0, -1.0, 0.0], [7, 7, 7]], np.float32)
TABLE = np.array([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]], np.float32)
WEIGHTED = fc.weighted_categorical_column(IDENTITY("ids", 3), "values")
FEATURES = {"ids": IDS, "values": WEIGHTS}


def combined(ids, weights, combiner, table=TABLE):
    """As TensorFlow's feature columns do: but for sums, classes without a positive weight are left out."""
    result = []
    for row, own in zip(ids, weights, strict=True):
        kept = [(table[i], w) for i, w in zip(row, own, strict=True) if i >= 0 and (w > 0 or combiner == "sum")]
        total = sum((w * vector for vector, w in kept), np.zeros(table.shape[1]))
        power = {"sum": 0, "mean": 1, "sqrtn": 2}[combiner]
        scale = sum(w**power for _, w in kept) ** (0.5 if combiner == "sqrtn" else 1) if kept and power else 1
        result.append(total / scale)
    return np.array(result)


# Weighted columns.


def test_a_linear_model_multiplies_by_the_weights():
    """The numbers of TensorFlow's test."""
    features = {"ids": np.array([[0, -1], [2, 1]]), "values": np.array([[0.5, 0], [1.0, 0.1]], np.float32)}
    name = "linear_model/ids_weighted_by_values/weights"
    given = {name: np.array([[1.0], [2.0], [3.0]], np.float32)}
    result, variables = read(lambda f: fc.linear_model(f, [WEIGHTED]), features, given)
    assert variables.keys() == {name, "linear_model/bias_weights"}
    np.testing.assert_allclose(result, [[0.5], [3.2]], rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("combiner", COMBINERS)
def test_linear_models_and_embeddings_combine_by_weights(combiner):
    name = "linear_model/ids_weighted_by_values/weights"
    result, _ = read(lambda f: fc.linear_model(f, [WEIGHTED], 2, combiner), FEATURES, {name: TABLE})
    np.testing.assert_allclose(result, combined(IDS, WEIGHTS, combiner), rtol=1e-6)
    column = fc.embedding_column(WEIGHTED, 2, combiner)
    name = "input_layer/ids_weighted_by_values_embedding/embedding_weights"
    result, variables = read(lambda f: fc.input_layer(f, [column]), FEATURES, {name: TABLE})
    assert variables.keys() == {name}
    np.testing.assert_allclose(result, combined(IDS, WEIGHTS, combiner), rtol=1e-6)


def test_an_indicator_has_the_weights():
    words = fc.categorical_column_with_vocabulary_list("ids", ["a", "b", "c"])
    column = fc.indicator_column(fc.weighted_categorical_column(words, "weights"))
    strings = np.array([["c", "b", "a"], ["b", "z", "b"]])
    features = fc.encode({"ids": strings, "weights": np.array([[2, 4, 6], [1, 5, 2]])}, [column])
    np.testing.assert_array_equal(fc.input_layer(features, [column]), [[6, 4, 2], [0, 3, 0]])


def test_a_cross_may_be_weighted_and_one_weight_per_example_needs_no_second_dimension():
    crossed = fc.crossed_column(["a", "b"], 5)
    column = fc.indicator_column(fc.weighted_categorical_column(crossed, "w"))
    assert column.name == "a_X_b_weighted_by_w_indicator"
    features = {"a": np.array([1, 2]), "b": np.array([3, 4]), "w": np.array([0.5, 2.0], np.float32)}
    ones = np.asarray(fc.indicator_column(crossed).values(features))
    np.testing.assert_array_equal(column.values(features), ones * [[0.5], [2.0]])


# Embeddings: norms, and vectors that stay.


def test_vectors_are_scaled_down_to_the_largest_norm():
    column = fc.embedding_column(IDENTITY("ids", 3), 2, "sum", max_norm=3.0)
    name = "input_layer/ids_embedding/embedding_weights"
    result, _ = read(lambda f: fc.input_layer(f, [column]), FEATURES, {name: TABLE})
    norms = np.linalg.norm(TABLE, axis=1, keepdims=True)
    want = combined(IDS, np.ones(IDS.shape), "sum", TABLE * np.minimum(1, 3 / norms))
    np.testing.assert_allclose(result, want, rtol=1e-6)


def test_vectors_that_are_not_trainable_stay():
    column = fc.embedding_column(IDENTITY("ids", 3), 2, trainable=False)

    def model_fn(features, labels, mode):
        assert est.trainable_variables() == {}
        rows = fc.input_layer(features, [column])
        loss = jnp.sum((rows.sum(1, keepdims=True) * est.get_variable("w", (1, 1))) ** 2)
        return est.EstimatorSpec(
            mode, predictions=rows, loss=loss, train_op=est.Optimizer(optax.sgd(0.1)).minimize(loss)
        )

    model = est.transform(model_fn)
    start = model.init(jax.random.key(0), FEATURES)
    state, spec = model.train_step(start, FEATURES)
    name = "input_layer/ids_embedding/embedding_weights"
    np.testing.assert_array_equal(state.variables[name], start.variables[name])
    want = combined(IDS, np.ones(IDS.shape), "mean", np.asarray(start.variables[name]))
    np.testing.assert_allclose(spec.predictions, want, rtol=1e-6)
    invalid = {"ids": np.array([[0, 3]]), "values": np.ones((1, 2), np.float32)}
    assert np.isnan(model.predict_step(state, invalid).predictions).all()


def test_a_linear_model_names_an_embedding_as_tensorflow_does():
    column = fc.embedding_column(IDENTITY("ids", 3), 2)
    _, variables = read(lambda f: fc.linear_model(f, [column]), FEATURES)
    assert variables.keys() == {
        "linear_model/ids_embedding/embedding_weights",
        "linear_model/ids_embedding/weights",
        "linear_model/bias_weights",
    }


# Shared embeddings.

AAA, BBB = IDENTITY("aaa", 3), IDENTITY("bbb", 3)
PAIRS = {"aaa": np.array([[2, -1], [0, 1]]), "bbb": np.array([[0, -1], [-1, -1]])}
SHARED = "input_layer/aaa_bbb_shared_embedding/embedding_weights"


def test_columns_share_their_vectors_under_tensorflows_name():
    """The numbers of TensorFlow's test."""
    b, a = fc.shared_embedding_columns([BBB, AAA], 2)
    assert (a.name, b.name) == ("aaa_shared_embedding", "bbb_shared_embedding")
    result, variables = read(lambda f: fc.input_layer(f, [b, a]), PAIRS, {SHARED: TABLE})
    assert variables.keys() == {SHARED}
    np.testing.assert_allclose(result, [[7, 11, 1, 2], [2, 3.5, 0, 0]])


def test_layers_of_one_run_share_the_vectors_where_they_were_created_first():
    steps = [fc.sequence_categorical_column_with_identity(key, 3) for key in ("aaa", "bbb")]
    first, second = fc.shared_embedding_columns(steps, 2, shared_embedding_collection_name="words")

    def both(features):
        with est.variable_scope("encoder"):
            one, _ = fc.sequence_input_layer(features, [first])
        with est.variable_scope("decoder"):
            other, _ = fc.sequence_input_layer(features, [second])
        return one, other

    name = "encoder/sequence_input_layer/words/embedding_weights"
    (one, other), variables = read(both, PAIRS, {name: TABLE})
    assert variables.keys() == {name}
    np.testing.assert_array_equal(one[1], TABLE[[0, 1]])
    np.testing.assert_array_equal(other[0], [TABLE[0], [0, 0]])


def test_a_linear_model_has_weights_for_each_column():
    columns = fc.shared_embedding_columns([AAA, fc.weighted_categorical_column(BBB, "w")], 2)
    features = {**PAIRS, "w": np.ones((2, 2), np.float32)}
    _, variables = read(lambda f: fc.linear_model(f, columns), features)
    scope = "linear_model/aaa_bbb_weighted_by_w_shared_embedding"
    assert variables.keys() == {
        f"{scope}/embedding_weights",
        f"{scope}/weights",
        f"{scope}_1/weights",
        "linear_model/bias_weights",
    }


@pytest.mark.slow
def test_large_shared_tables_have_one_sparse_gradient_on_any_number_of_towers():
    buckets = 2000
    columns = fc.shared_embedding_columns(
        [fc.weighted_categorical_column(IDENTITY("ids", buckets), "values"), IDENTITY("other", buckets)], 2, "sum"
    )
    features = {**FEATURES, "other": np.array([1, 2, 1, 0])}
    seen = {}

    def model_fn(features, labels, mode):
        loss = jnp.mean((fc.input_layer(features, columns).sum(1) - labels) ** 2)
        optimizer = TowerOptimizer(optax.sgd(0.1))
        pairs = optimizer.compute_gradients(loss)
        seen.update({name: gradient for gradient, name in pairs})
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))

    tables = []
    for towers in (0, 2):
        model = est.transform(replicate(model_fn, towers))
        labels = np.arange(4, dtype=np.float32)
        state, _ = model.train_step(model.init(jax.random.key(0), features, labels), features, labels)
        [(name, gradient)] = seen.items()
        assert isinstance(gradient, est.IndexedSlices)
        tables.append(state.variables[name])
    np.testing.assert_allclose(*tables, rtol=1e-5, atol=1e-6)


# Vocabularies in files.


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes("Köln\r\nRom\nBonn".encode())
    return path


def test_the_lines_of_a_file_are_a_vocabulary(words):
    column = fc.categorical_column_with_vocabulary_file("x", words)
    assert column == fc.categorical_column_with_vocabulary_list("x", ["Köln", "Rom", "Bonn"])
    two = fc.categorical_column_with_vocabulary_file("x", str(words), 2, 4)
    assert two == fc.categorical_column_with_vocabulary_list("x", ["Köln", "Rom"], num_oov_buckets=4)
    assert two.num_buckets == 6
    default = fc.categorical_column_with_vocabulary_file("x", words, default_value=1)
    assert fc.encode({"x": np.array(["Bonn", "z", ""])}, [default])["x"].astype(np.int32).tolist() == [2, 1, -1]


def test_a_file_of_integers_is_a_vocabulary_of_integers(tmp_path):
    (tmp_path / "numbers").write_text("30\n-7\n20\n")
    column = fc.categorical_column_with_vocabulary_file("x", tmp_path / "numbers", dtype=np.int64)
    assert column.ids({"x": np.array([20, -7, 5, -1])}).ravel().tolist() == [2, 1, -1, -1]


# Errors.


def file(name, content, **arguments):
    def call(tmp_path):
        if content is not None:
            (tmp_path / name).write_text(content)
        return fc.categorical_column_with_vocabulary_file("x", tmp_path / name, **arguments)

    return call


SEQUENCE = fc.sequence_categorical_column_with_identity("x", 3)
REFUSED = {
    ValueError: [
        (file("w", None), "vocabulary_file in x does not exist; got .*w"),
        (file("w", ""), "has 0 lines; vocabulary_size is None"),
        (file("w", "a\nb\n", vocabulary_size=3), "has 2 lines; vocabulary_size is 3"),
        (file("w", "a", vocabulary_size=0), "vocabulary_size must be an int of at least 1; got 0"),
        (file("w", "a\na\n"), r"Duplicate keys in vocabulary_file: \['a'\]"),
        (file("w", "a\n\nb\n"), "vocabulary_file of key 'x' holds '' or -1"),
        (file("w", "1\nb\n", dtype=np.int32), r"must hold integers of 32 bits .* got \['b'\]"),
        (file("w", "a", dtype=np.float32), "dtype must be `str` or a dtype of integers; got"),
        (file("w", "a", num_oov_buckets=1, default_value=0),
         "Can't specify both num_oov_buckets and default_value; got 1 and 0"),
        (lambda _: fc.categorical_column_with_vocabulary_list("x", ["a"], np.int64),
         r"vocabulary_list must hold classes of dtype .*int64.*; got \('a',\)"),
        (lambda _: fc.weighted_categorical_column(SEQUENCE, "w"),
         "A column of sequences cannot be used in `weighted_categorical_column`"),
        (lambda _: fc.weighted_categorical_column(AAA, "w", str),
         "dtype must be convertible to float; got <class 'str'> for key 'w'"),
        (lambda _: WEIGHTED.weights({"ids": IDS}), "Feature 'values' is not in features"),
        (lambda _: WEIGHTED.weights({"ids": IDS, "values": WEIGHTS[:, :2]}),
         r"'values' must have a weight for each class of the column 'ids', shape \(4, 3\); it has \(4, 2\)"),
        (lambda _: fc.crossed_column([WEIGHTED, "x"], 9),
         "`crossed_column` does not support weights, .* give the cross to `weighted_categorical_column`"),
        (lambda _: fc.shared_embedding_columns([AAA, fc.categorical_column_with_hash_bucket("x", 3)], 2),
         "all categorical_columns must have the same type and the same number of buckets"),
        (lambda _: fc.shared_embedding_columns([AAA, IDENTITY("x", 4)], 2),
         "all categorical_columns must have the same type and the same number of buckets"),
        (lambda _: fc.shared_embedding_columns(AAA, 2),
         "categorical_columns must be a list of columns; got IdentityColumn"),
        (lambda _: fc.embedding_column(AAA, 2, max_norm=-1), "max_norm must be a number above 0"),
    ],
    TypeError: [
        (lambda _: fc.weighted_categorical_column(fc.numeric_column("x"), "w"),
         "`weighted_categorical_column` takes a categorical column"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_columns_say_what_is_wrong(call, error, message, tmp_path):
    with pytest.raises(error, match=message):
        call(tmp_path)
