"""Columns of sequences, with the numbers of TensorFlow's own tests, and what a recurrent network makes of them."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.columns import read
from testing.model_fns import minimizing
from testing.towers import assert_close, replicate, started

import estimator as est

fc = est.feature_column
AAA, BBB = (fc.sequence_categorical_column_with_identity(key, 3) for key in ("aaa", "bbb"))
FEATURES = {"aaa": np.array([[2, -1], [0, 1]]), "bbb": np.array([[1, -1], [2, 0]])}
A = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
B = np.array([[11.0, 12, 13], [14, 15, 16], [17, 18, 19]], np.float32)


def layer(columns):
    return lambda features: fc.sequence_input_layer(features, columns)


def test_each_step_has_its_vectors():
    columns = [fc.embedding_column(BBB, 3), fc.embedding_column(AAA, 2)]
    name = "sequence_input_layer/{}_embedding/embedding_weights".format
    (values, lengths), variables = read(layer(columns), FEATURES, {name("aaa"): A, name("bbb"): B})
    assert variables.keys() == {name("aaa"), name("bbb")}
    assert lengths.tolist() == [1, 2] and lengths.dtype == np.int32
    want = [[[5, 6, 14, 15, 16], [0] * 5], [[1, 2, 17, 18, 19], [3, 4, 11, 12, 13]]]
    np.testing.assert_array_equal(values, want)


def test_columns_share_their_vectors():
    columns = fc.shared_embedding_columns([BBB, AAA], 2)
    name = "sequence_input_layer/aaa_bbb_shared_embedding/embedding_weights"
    (values, lengths), variables = read(layer(columns), FEATURES, {name: A})
    assert variables.keys() == {name} and lengths.tolist() == [1, 2]
    np.testing.assert_array_equal(values, [[[5, 6, 3, 4], [0] * 4], [[1, 2, 5, 6], [3, 4, 1, 2]]])


def test_indicators_are_one_hot_in_each_step():
    (values, _), _ = read(layer([fc.indicator_column(AAA)]), FEATURES)
    np.testing.assert_array_equal(values, [[[0, 0, 1], [0, 0, 0]], [[1, 0, 0], [0, 1, 0]]])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numbers_end_where_nan_begins(dtype):
    x = np.array([[0, 1], [10, np.nan]], dtype)
    values, lengths = fc.sequence_input_layer({"x": x}, [fc.sequence_numeric_column("x")])
    np.testing.assert_array_equal(values, [[[0], [1]], [[10], [0]]])
    assert lengths.tolist() == [2, 1] and values.dtype == np.float32


def test_numbers_of_a_step_may_have_any_shape():
    x = np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2)
    x[1, 1] = np.nan
    values, lengths = fc.sequence_input_layer({"x": x}, [fc.sequence_numeric_column("x", (2, 2), default_value=-1)])
    np.testing.assert_array_equal(values, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [-1, -1, -1, -1]]])
    assert lengths.tolist() == [2, 1]


def test_padding_is_not_normalized():
    column = fc.sequence_numeric_column("x", normalizer_fn=jnp.log, default_value=0.0)
    values, lengths = fc.sequence_input_layer({"x": np.array([[1, np.nan, np.e, np.nan]], np.float32)}, [column])
    np.testing.assert_allclose(values[0, :, 0], [0, 0, 1, 0], atol=1e-6)
    assert lengths.tolist() == [3]


def test_all_steps_of_integers_count():
    column = fc.sequence_numeric_column("x", dtype=np.int32)
    values, lengths = fc.sequence_input_layer({"x": np.array([[1, 0], [2, 3]])}, [column])
    assert values.tolist() == [[[1], [0]], [[2], [3]]] and lengths.tolist() == [2, 2]


def test_strings_out_of_the_vocabulary_are_steps(tmp_path):
    (tmp_path / "words").write_text("a\nb\n")
    x = {"x": np.array([["b", "z", ""], ["", "a", "z"], ["", "", ""]])}
    for column in (
        fc.sequence_categorical_column_with_vocabulary_list("x", ["a", "b"]),
        fc.sequence_categorical_column_with_vocabulary_file("x", tmp_path / "words"),
    ):
        dense = fc.indicator_column(column)
        values, lengths = fc.sequence_input_layer(fc.encode(x, [dense]), [dense])
        assert lengths.tolist() == [2, 3, 0]
        np.testing.assert_array_equal(values[1], [[0, 0], [1, 0], [0, 0]])
    buckets = fc.sequence_categorical_column_with_vocabulary_list("x", ["a", "b"], num_oov_buckets=1)
    assert buckets.ids(fc.encode(x, [buckets])).tolist() == [[1, 2, -1], [-1, 0, 2], [-1, -1, -1]]
    default = fc.sequence_categorical_column_with_vocabulary_list("x", ["a", "b"], default_value=0)
    assert default.ids(fc.encode(x, [default])).tolist() == [[1, 0, -1], [-1, 0, 0], [-1, -1, -1]]


def test_integers_out_of_the_vocabulary_and_hashes_are_steps():
    x = {"x": np.array([[7, 9, -1], [-2, -1, -1]])}
    listed = fc.sequence_categorical_column_with_vocabulary_list("x", [7, 8])
    assert listed.ids(x).tolist() == [[0, -1, -1], [-1, -1, -1]] and listed.lengths(x).tolist() == [2, 1]
    hashed = fc.sequence_categorical_column_with_hash_bucket("x", 5)
    np.testing.assert_array_equal(hashed.ids(x), fc.categorical_column_with_hash_bucket("x", 5).ids(x))
    assert hashed.lengths(x).tolist() == [2, 1]
    assert hashed.lengths(fc.encode({"x": np.array([["a", ""]])}, [hashed])).tolist() == [1]


def test_features_of_other_lengths_make_an_example_nan():
    columns = [fc.indicator_column(AAA), fc.sequence_numeric_column("x")]
    features = {"aaa": FEATURES["aaa"], "x": np.array([[1, 2], [3, 4]], np.float32)}
    values, _ = fc.sequence_input_layer(features, columns)
    assert np.isnan(values).all(axis=(1, 2)).tolist() == [True, False] and not np.isnan(values[1]).any()


def test_pad_batches_fills_sequences_up():
    columns = [fc.indicator_column(AAA), fc.sequence_numeric_column("x")]
    batch = {"aaa": [[2], [0, 1, 1]], "x": [[1.5], [1.0, 2.0, 0.0]]}
    [(features, _)] = list(
        est.inputs.pad_batches([(batch, np.zeros(2))], multiple_of=4, values={"aaa": -1, "x": np.nan})
    )
    values, lengths = fc.sequence_input_layer(features, columns)
    assert values.shape == (2, 4, 4) and lengths.tolist() == [1, 3] and not np.isnan(values).any()


@pytest.mark.slow
def test_an_lstm_over_sequences_trains_alike_on_towers():
    columns = [fc.embedding_column(AAA, 2), fc.sequence_numeric_column("x")]
    random = np.random.default_rng(0)
    ids = random.integers(0, 3, (8, 5))
    padding = np.arange(5) >= random.integers(0, 6, 8)[:, None]
    features = {"aaa": np.where(padding, -1, ids), "x": np.where(padding, np.nan, ids + 0.5).astype(np.float32)}
    labels = random.normal(size=(8, 4)).astype(np.float32)

    def loss_of(features, labels):
        inputs, lengths = fc.sequence_input_layer(features, columns)
        outputs, state = est.layers.lstm(inputs, 4, sequence_length=lengths)
        return est.losses.mean_squared_error(labels, outputs.sum(1))

    def trained(towers):
        model, state = started(replicate(minimizing(loss_of, optax.sgd(0.5)), towers), features, labels)
        for _ in range(3):
            state, spec = model.train_step(state, features, labels)
        return state.variables, spec.loss

    assert_close(trained(2), trained(0))


# Errors.

LISTS = fc.sequence_categorical_column_with_vocabulary_list, fc.categorical_column_with_vocabulary_list
REFUSED = [
    (lambda: fc.input_layer(FEATURES, [fc.embedding_column(AAA, 2)]),
     "A column of sequences cannot be used in `input_layer` or `linear_model`. .* `sequence_input_layer` with"),
    (lambda: fc.input_layer(FEATURES, fc.sequence_numeric_column("x")),
     "A column of sequences cannot be used in `input_layer` or `linear_model`"),
    (lambda: fc.linear_model(FEATURES, [AAA]),
     "A column of sequences cannot be used in `input_layer` or `linear_model`"),
    (lambda: est.DNNClassifier([2], [fc.indicator_column(AAA)]),
     "A column of sequences cannot be used in `input_layer`"),
    (lambda: fc.indicator_column(AAA).values(FEATURES), "A column of sequences cannot be used in `input_layer`"),
    (lambda: fc.crossed_column([AAA, "x"], 3), "A column of sequences cannot be used in `crossed_column`"),
    (lambda: fc.sequence_input_layer(FEATURES, [fc.indicator_column(fc.categorical_column_with_identity("aaa", 3))]),
     "takes columns of sequences. Wrap a `sequence_categorical_column_with_*"),
    (lambda: fc.sequence_input_layer(FEATURES, [fc.numeric_column("x")]),
     "takes columns of sequences; wrap a `sequence_categorical_column_with_"),
    (lambda: fc.sequence_input_layer(FEATURES, [AAA]),
     "takes columns of sequences; .* with `embedding_column` or `indicator_column`"),
    (lambda: AAA.ids({"aaa": np.array([1, 2])}),
     r"takes shape \(batch, steps\); feature 'aaa' has \(2,\). .*pad_batches"),
    (lambda: fc.sequence_input_layer(
         {**FEATURES, "x": np.ones((2, 3))}, [fc.indicator_column(AAA), fc.sequence_numeric_column("x")]
     ), r"same number of steps; .* \{'aaa_indicator': 2, 'x': 3\}"),
    (lambda: fc.sequence_input_layer({"x": np.ones((2, 3))}, [fc.sequence_numeric_column("x", 2)]),
     r"has shape \(2,\), so its feature needs shape \(batch, steps, 2\); it has \(2, 3\)"),
    (lambda: fc.sequence_input_layer(
         {"x": np.ones((2, 3))}, [fc.sequence_numeric_column("x", normalizer_fn=jnp.sum)]
     ), r"must keep the shape, \(2, 3, 1\); it returned \(\)"),
    (lambda: fc.encode({"x": np.array([["a"]])}, [make("x", ["a"]) for make in LISTS]),
     "turn the strings of feature 'x' into integers in different ways"),
]  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED)
def test_columns_of_sequences_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_need_a_default():
    with pytest.raises(TypeError, match="`sequence_numeric_column`: default_value must be a number; got None"):
        fc.sequence_numeric_column("x", default_value=None)
