"""Feature columns: what they make of a dict of features, against numpy."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from testing import refused
from testing.columns import read
from testing.model_fns import variables_of

import estimator as est

fc = est.feature_column


def mixed(x):
    """The finalizer of MurmurHash3, as it is published."""
    x = np.array(x, np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


# Numbers.


def test_numbers_are_taken_as_they_are():
    column = fc.numeric_column("x")
    for given in (np.array([1, 2]), np.array([[1.0], [2.0]]), np.array([1, 2], np.float16)):
        np.testing.assert_array_equal(column.values({"x": given}), [[1], [2]])
    matrix = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    np.testing.assert_array_equal(fc.numeric_column("x", (3, 2)).values({"x": matrix}), matrix.reshape(2, 6))
    assert column.values({"x": np.array([1, 2])}).dtype == jnp.float32


def test_a_missing_number_has_the_default_before_it_is_normalized():
    column = fc.numeric_column("x", 2, default_value=3.0, normalizer_fn=lambda x: x * 10)
    x = np.array([[1.0, np.nan], [np.nan, 2.0]])
    np.testing.assert_array_equal(column.values({"x": x}), [[10, 30], [30, 20]])
    assert np.isnan(fc.numeric_column("x", 2).values({"x": x})).sum() == 2


def test_numbers_are_cut_at_the_boundaries():
    column = fc.bucketized_column(fc.numeric_column("x", 2), [0, 10, 20])
    x = np.array([[-5.0, 20.0], [0.0, np.nan], [19.9, 9.0]])
    ids = np.where(np.isnan(x), -1, np.digitize(x, [0, 10, 20]) + [0, 4])
    np.testing.assert_array_equal(column.ids({"x": x}), ids)
    np.testing.assert_array_equal(column.values({"x": x}), [(row[:, None] == np.arange(8)).sum(0) for row in ids])


# Classes.


def test_ids_are_taken_as_they_are():
    plain = fc.categorical_column_with_identity("x", 3)
    default = fc.categorical_column_with_identity("x", 3, default_value=1)
    x = np.array([[0, 2], [-1, 3], [-7, 2**31 - 1]])
    np.testing.assert_array_equal(plain.ids({"x": x}), [[0, 2], [-1, 3], [3, 3]])
    np.testing.assert_array_equal(default.ids({"x": x}), [[0, 2], [-1, 1], [1, 1]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_integers_are_hashed_by_murmur(dtype):
    x = np.arange(200).astype(dtype)
    ids = np.asarray(fc.categorical_column_with_hash_bucket("x", 7).ids({"x": x}))[:, 0]
    np.testing.assert_array_equal(ids, mixed(x) % 7)
    assert np.bincount(ids, minlength=7).min() > 15


def test_a_hashed_integer_may_be_negative_but_not_minus_one():
    ids = fc.categorical_column_with_hash_bucket("x", 1000).ids({"x": np.array([-1, -2])}).ravel()
    assert ids.tolist() == [-1, mixed(np.uint32(2**32 - 2)) % 1000]


@pytest.mark.quick
@pytest.mark.parametrize("outside, code", [({}, -1), ({"default_value": 1}, 1), ({"num_oov_buckets": 5}, None)])
def test_a_vocabulary_of_integers_is_looked_up_in_the_program(outside, code):
    column = fc.categorical_column_with_vocabulary_list("x", [30, 10, 20], **outside)
    assert column.num_buckets == (8 if "num_oov_buckets" in outside else 3)
    ids, _ = read(lambda features: column.ids(features), {"x": np.array([[10, 30], [-1, 20], [99, 5]])})
    other = [3 + mixed(99) % 5, 3 + mixed(5) % 5] if code is None else [code, code]
    np.testing.assert_array_equal(ids, [[1, 0], [-1, 2], other])


def test_crossed_classes_are_the_hash_of_both():
    ages = fc.bucketized_column(fc.numeric_column("age"), [30])
    column = fc.crossed_column([ages, "city"], 100)
    features = {"age": np.array([20.0, 40.0, 40.0]), "city": np.array([[3, 4], [4, -1], [5, 4]])}

    def bucket(age, city):
        return mixed(mixed(np.uint32(0x9E3779B9) ^ np.uint32(age)) ^ np.uint32(city)) % 100

    expected = [[bucket(0, 3), bucket(0, 4)], [bucket(1, 4), -1], [bucket(1, 5), bucket(1, 4)]]
    np.testing.assert_array_equal(column.ids(features), expected)
    assert column.name == "age_bucketized_X_city"
    other = fc.crossed_column([ages, "city"], 100, hash_key=1).ids(features)
    assert (np.asarray(other) != expected).sum() >= 4


# Strings.


def test_a_column_that_is_crossed_by_name_has_the_ids_of_a_vocabulary():
    words = fc.categorical_column_with_vocabulary_list("x", ["a", "b"])
    columns = [fc.crossed_column(["x", "y"], 100), words, fc.indicator_column(words)]
    encoded = fc.encode({"x": np.array(["b", "c"]), "y": np.array(["p", "p"])}, columns)
    assert encoded["x"].astype(np.int32).tolist() == [1, -1]
    for some in (columns, columns[::-1]):
        again = fc.encode({"x": np.array(["b", "c"]), "y": np.array(["p", "p"])}, some)
        np.testing.assert_array_equal(columns[0].ids(again), columns[0].ids(encoded))
    by_column = fc.crossed_column([words, "y"], 100).ids(encoded)
    np.testing.assert_array_equal(columns[0].ids(encoded), by_column)
    assert by_column[1, 0] == -1 < by_column[0, 0]


def test_strings_become_ids_or_codes():
    columns = [
        fc.embedding_column(fc.categorical_column_with_vocabulary_list("pet", ["cat", "dog"]), 2),
        fc.indicator_column(fc.categorical_column_with_hash_bucket("city", 9)),
        fc.crossed_column(["city", "street"], 9),
        fc.numeric_column("age"),
    ]
    features = {
        "pet": np.array(["dog", "emu", "", "cat"]),
        "city": np.array([["Köln", None], ["Rom", ""], [b"Rom", float("nan")], ["Bonn", "Köln"]], object),
        "street": np.array([b"a", b"b", b"a", b""]),
        "age": np.arange(4),
    }
    result = fc.encode(features, columns)
    crc = lambda text: zlib.crc32(text.encode()) % 2**31  # noqa: E731
    assert result["pet"].astype(np.int32).tolist() == [1, -1, -1, 0]
    assert result["city"].tolist() == [
        [crc("Köln"), -1],
        [crc("Rom"), -1],
        [crc("Rom"), -1],
        [crc("Bonn"), crc("Köln")],
    ]
    assert result["street"].tolist() == [crc("a"), crc("b"), crc("a"), -1]
    assert result["age"] is features["age"] and features["pet"][0] == "dog"
    assert [result[key].dtype for key in ("pet", "city", "street")] == [np.uint32, np.int32, np.int32]
    again = fc.encode(result, columns)
    assert all(again[key] is result[key] for key in result)


def test_strings_out_of_the_vocabulary_have_the_default_or_a_bucket_of_their_own():
    words, x = ["a", "b"], {"x": np.array(["b", "z", "y"])}
    default = fc.categorical_column_with_vocabulary_list("x", words, default_value=0)
    buckets = fc.categorical_column_with_vocabulary_list("x", words, num_oov_buckets=3)
    assert fc.encode(x, [default])["x"].tolist() == [1, 0, 0]
    expected = [1, *(2 + zlib.crc32(text) % 2**31 % 3 for text in (b"z", b"y"))]
    assert fc.encode(x, [buckets])["x"].tolist() == expected
    assert buckets.ids(fc.encode(x, [buckets])).ravel().tolist() == expected


def test_columns_of_pandas_are_encoded():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"s": ["a", None, "b"], "c": pd.Categorical(["b", None, "b"]), "n": [1, 2, 3]})
    # As `convert_dtypes` makes them; the last one lacks no value.
    frame["i"], frame["t"] = pd.array([1, None, 3], dtype="Int64"), pd.array([True, None, False], dtype="boolean")
    frame["f"], frame["whole"] = pd.array([1.5, None, 2], dtype="Float32"), pd.array([1, 2, 3], dtype="Int32")
    columns = [fc.categorical_column_with_vocabulary_list(key, ["a", "b"]) for key in "sc"]
    for features in (frame, dict(frame[["s", "c", "n"]])):
        result = fc.encode(features, columns)
        assert result["s"].astype(np.int32).tolist() == [0, -1, 1]
        assert result["c"].astype(np.int32).tolist() == [1, -1, 1]
        assert result["n"].tolist() == [1, 2, 3]
    result = fc.encode(frame, columns)
    assert all(type(array) is np.ndarray for array in result.values())
    np.testing.assert_array_equal(result["i"], [1, np.nan, 3])
    np.testing.assert_array_equal(result["t"], [1, np.nan, 0])
    np.testing.assert_array_equal(result["f"], [1.5, np.nan, 2])
    assert result["whole"].dtype == np.int32


def test_dtypes_of_a_frame_do_not_depend_on_what_is_missing():
    pd = pytest.importorskip("pandas")
    keys = ("age", "year", "class", "id", "both", "part", "free")
    whole = pd.DataFrame({key: [1, 2] for key in keys})
    classes = fc.categorical_column_with_identity
    columns = [
        fc.numeric_column("age"),
        fc.bucketized_column(fc.numeric_column("year"), [2]),
        fc.indicator_column(classes("class", 3)),
        fc.crossed_column([classes("id", 3), fc.bucketized_column(fc.numeric_column("part"), [2])], 9),
        *(fc.numeric_column("both"), classes("both", 3)),
    ]
    result = fc.encode(whole, columns)
    assert {key: array.dtype.kind for key, array in result.items()} == dict(zip(keys, "ffiiifi", strict=True))
    gaps = whole.assign(age=[1, None], year=[None, 2], part=[None, None], **{"class": [None, 2], "id": [None, None]})
    missing = fc.encode(gaps, columns)
    assert {key: array.dtype for key, array in missing.items()} == {key: array.dtype for key, array in result.items()}
    assert np.isnan(missing["part"]).all() and np.isnan(missing["age"]).tolist() == [False, True]
    assert missing["class"].tolist() == [-1, 2] and missing["id"].tolist() == [-1, -1]
    assert fc.encode({"age": whole["age"].to_numpy()}, columns)["age"].dtype.kind == "i"
    # Without a string pandas does not know either that a column is one of strings.
    assert fc.encode(pd.DataFrame({"x": [np.nan]}), [NUMERALS])["x"].astype(np.int32) == -1
    message = "needs integers; feature 'class' is float32. .* `est.feature_column.bucketized"
    with pytest.raises(TypeError, match=message):
        columns[2].values(fc.encode(whole.assign(**{"class": [1.5, None]}), columns))


NUMERALS = fc.categorical_column_with_vocabulary_list("x", ["1", "2", "3"])
OF_STRINGS = {
    "list": NUMERALS,
    "indicator": fc.indicator_column(NUMERALS),
    "embedding": fc.embedding_column(NUMERALS, 2),
    "weighted": fc.weighted_categorical_column(NUMERALS, "w"),
    "crossed": fc.crossed_column([NUMERALS, "y"], 9),
    "sequence": fc.sequence_categorical_column_with_vocabulary_list("x", ["1", "2", "3"]),
}


@pytest.mark.parametrize("column", OF_STRINGS.values(), ids=OF_STRINGS)
def test_integers_are_refused_where_classes_are_strings(column):
    integers = {"x": np.array([[1, 2], [3, 9]]), "y": np.zeros(2, int)}
    with pytest.raises(TypeError, match=r"Feature 'x' is of dtype int64, .* Write `.astype\(str\)` .*np.uint32"):
        fc.encode(integers, [column])
    reader = column if hasattr(column, "ids") else column.categorical_column
    with pytest.raises(TypeError, match=r"classes of feature 'x' are strings, such as '1'; got int32. .*`.astype\(str"):
        reader.ids(integers)


# Dense columns of classes.


IDS = np.array([[0, 2, -1], [1, 1, 1], [-1, -1, -1], [2, 0, 1]])
TABLE = np.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], np.float32)
PETS = fc.categorical_column_with_identity("pet", 3)


def test_an_indicator_counts():
    column = fc.indicator_column(PETS)
    np.testing.assert_array_equal(column.values({"pet": IDS}), [[1, 0, 1], [0, 3, 0], [0, 0, 0], [1, 1, 1]])
    assert np.isnan(column.values({"pet": np.array([0, 3])})).all(axis=1).tolist() == [False, True]


@pytest.mark.quick
@pytest.mark.parametrize("combiner, power", [("mean", 1.0), ("sqrtn", 0.5)])
def test_embeddings_are_combined(combiner, power):
    column = fc.embedding_column(PETS, 2, combiner)
    name = "input_layer/pet_embedding/embedding_weights"
    result, variables = read(lambda f: fc.input_layer(f, [column]), {"pet": IDS}, {name: TABLE})
    assert list(variables) == [name]
    sums = [sum((TABLE[i] for i in row if i >= 0), np.zeros(2)) / max(1, (row >= 0).sum()) ** power for row in IDS]
    np.testing.assert_allclose(result, sums, rtol=1e-6)


def test_embeddings_begin_as_tensorflow_has_them():
    column = fc.embedding_column(fc.categorical_column_with_identity("x", 5000), 16)
    _, variables = read(lambda f: fc.input_layer(f, [column]), {"x": np.array([0])})
    [table] = variables.values()
    assert abs(table).max() <= 2 / 4 and float(table.std()) == pytest.approx(0.88 / 4, abs=0.01)  # truncated at 2
    ones = fc.embedding_column(PETS, 2, initializer=jax.nn.initializers.ones)
    result, _ = read(lambda f: fc.input_layer(f, [ones]), {"pet": IDS})
    np.testing.assert_array_equal(result, [[1, 1], [1, 1], [0, 0], [1, 1]])


@pytest.mark.quick
@pytest.mark.parametrize("buckets, kind", [(1024, jax.Array), (1025, est.IndexedSlices)])
def test_large_tables_have_sparse_gradients(buckets, kind):
    pets = fc.categorical_column_with_identity("pet", buckets)
    seen = {}

    def model_fn(features, labels, mode):
        rows = fc.input_layer(features, [fc.embedding_column(pets, 2)])
        loss = jnp.sum(rows) + jnp.sum(fc.linear_model(features, [pets]))
        optimizer = est.Optimizer(optax.sgd(0.1))
        pairs = optimizer.compute_gradients(loss)
        seen.update({name: gradient for gradient, name in pairs})
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))

    model = est.transform(model_fn)
    state, _ = model.train_step(model.init(jax.random.key(0), {"pet": IDS}), {"pet": IDS})
    for name in ("input_layer/pet_embedding/embedding_weights", "linear_model/pet/weights"):
        assert isinstance(seen[name], kind)
    counts = [(IDS == i).sum() for i in range(buckets)]
    np.testing.assert_allclose(state.variables["linear_model/pet/weights"][:, 0], np.multiply(counts, -0.1), rtol=1e-6)


def test_a_second_call_in_a_scope_has_variables_of_its_own_as_in_tensorflow():
    embedded = fc.embedding_column(fc.categorical_column_with_identity("i", 3), 2)
    sequence = fc.embedding_column(fc.sequence_categorical_column_with_identity("s", 3), 2)

    def body(features):
        for reuse in (None, True):
            with est.variable_scope("a", reuse=reuse):
                for _ in range(2):
                    fc.input_layer(features, [embedded])
                    fc.linear_model(features, [fc.numeric_column("x")])
                    fc.sequence_input_layer(features, [sequence])

    names = variables_of(body, {"x": jnp.ones(2), "i": jnp.array([0, 1]), "s": jnp.zeros((2, 3), int)})
    assert sorted(names) == sorted(
        f"a/{layer}{number}/{rest}"
        for number in ("", "_1")
        for layer, rest in [
            ("input_layer", "i_embedding/embedding_weights"),
            ("linear_model", "bias_weights"),
            ("linear_model", "x/weights"),
            ("sequence_input_layer", "s_embedding/embedding_weights"),
        ]
    )


def test_columns_stand_side_by_side_in_the_order_of_their_names():
    columns = [fc.numeric_column("z"), fc.indicator_column(PETS), fc.numeric_column("a", 2)]
    features = {"z": np.array([7.0]), "pet": np.array([1]), "a": np.array([[8.0, 9.0]])}
    np.testing.assert_array_equal(fc.input_layer(features, columns), [[8, 9, 0, 1, 0, 7]])


@pytest.mark.quick
@pytest.mark.parametrize("combiner, power", [("sum", 0.0), ("mean", 1.0)])
def test_a_linear_model_is_a_weighted_sum(combiner, power):
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    weights = {
        "linear_model/pet/weights": TABLE,
        "linear_model/x/weights": np.array([[1.0, -1.0], [0.5, 0.25]], np.float32),
        "linear_model/bias_weights": np.array([3.0, 4.0], np.float32),
    }
    columns = [fc.numeric_column("x", 2), PETS]
    result, variables = read(
        lambda f: fc.linear_model(f, columns, units=2, sparse_combiner=combiner), {"x": x, "pet": IDS}, weights
    )
    assert variables.keys() == weights.keys()
    pets = [sum((TABLE[i] for i in row if i >= 0), np.zeros(2)) / max(1, (row >= 0).sum()) ** power for row in IDS]
    expected = pets + x @ weights["linear_model/x/weights"] + weights["linear_model/bias_weights"]
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_a_linear_model_begins_with_zeros():
    result, _ = read(lambda f: fc.linear_model(f, [PETS]), {"pet": IDS})
    np.testing.assert_array_equal(result, np.zeros((4, 1)))


# Errors.


HASHED = fc.categorical_column_with_hash_bucket("x", 9)
WORDS = fc.categorical_column_with_vocabulary_list
IDENTITY = fc.categorical_column_with_identity
NUMBER = fc.numeric_column("x")
REFUSED = {
    ValueError: [
        (lambda: fc.numeric_column(3), "`numeric_column` needs the name of a feature, .* got 3"),
        (lambda: fc.numeric_column("x", (2, 0)), "shape must be an int of at least 1; got 0"),
        (lambda: fc.numeric_column("x", dtype=str), "dtype must be convertible to float; got"),
        (lambda: IDENTITY("x", 0), "num_buckets must be an int of at least 1; got 0"),
        (lambda: IDENTITY("x", 3, 3),
         r"default_value must be in \[0, num_buckets\); got 3 with num_buckets=3 for key 'x'"),
        (lambda: fc.categorical_column_with_hash_bucket("x", 2.5),
         "hash_bucket_size must be an int of at least 1; got 2.5"),
        (lambda: WORDS("x", []), r"vocabulary_list must be non-empty; got \[\] for key 'x'"),
        (lambda: WORDS("x", ["a", 1]), "must hold strings alone, or integers of 32 bits; got"),
        (lambda: WORDS("x", [2**31]), "integers of 32 bits; got"),
        (lambda: WORDS("x", ["a", "a"]), r"Duplicate keys in vocabulary_list: \['a'\]"),
        (lambda: WORDS("x", ["a", ""]), "holds '' or -1, which stand for no class"),
        (lambda: WORDS("x", ["a"], num_oov_buckets=-1), "Invalid num_oov_buckets -1"),
        (lambda: WORDS("x", ["a"], None, 0, 2), "Can't specify both num_oov_buckets and default_value; got 2 and 0"),
        (lambda: WORDS("x", ["a"], None, 1), "default_value must be -1 or an id, below 1; got 1"),
        (lambda: fc.bucketized_column(HASHED, [1]),
         r"source_column must be a column generated with numeric_column\(\)"),
        (lambda: fc.bucketized_column(NUMBER, [2, 1]), r"boundaries must be a sorted list of numbers; got \[2, 1\]"),
        (lambda: fc.crossed_column(["x"], 9), r"keys must be a list with length > 1; got \['x'\]"),
        (lambda: fc.crossed_column([HASHED, "y"], 9),
         "categorical_column_with_hash_bucket is not supported for crossing. .* use the feature name 'x'"),
        (lambda: fc.crossed_column([NUMBER, "y"], 9), "each of keys must be a feature's name or a"),
        (lambda: fc.embedding_column(PETS, 0), "dimension must be an int of at least 1; got 0"),
        (lambda: fc.embedding_column(PETS, 2, "max"), r"combiner must be one of \('mean', 'sqrtn', 'sum'\); got 'max'"),
        (lambda: fc.input_layer({}, []), r"feature_columns must not be empty; got \[\]"),
        (lambda: fc.input_layer({}, ["x"]), "Items of feature_columns must be columns such as .* Given: 'x'"),
        (lambda: fc.input_layer({}, [PETS]),
         "must be dense columns. Given: .* Wrap a categorical column with `embedding_column` or `indicator_column`"),
        (lambda: fc.input_layer({}, [NUMBER, fc.numeric_column("x", 2)]),
         "Duplicate feature column name found for columns"),
        (lambda: fc.input_layer(np.ones(3), [NUMBER]),
         r"features should be a dictionary of arrays .* Given type: ndarray.*DataFrame, .*encode\(frame, columns\)"),
        (lambda: fc.input_layer({"y": np.ones(3)}, [NUMBER]),
         r"Feature 'x' is not in features dictionary, which has \['y'\]"),
        (lambda: NUMBER.values({"x": np.float32(1)}), "Feature 'x' is a scalar"),
        (lambda: NUMBER.values({"x": np.ones((2, 3))}),
         r"has shape \(1,\), so its feature needs shape \(2, 1\); it has \(2, 3\). Write .*shape=\(3,\)"),
        (lambda: fc.numeric_column("x", normalizer_fn=jnp.sum).values({"x": np.ones(2)}),
         r"normalizer_fn of the numeric column 'x' must keep the shape, \(2, 1\); it returned \(\)"),
        (lambda: HASHED.ids({"x": np.ones((2, 2, 2), int)}),
         r"takes shape \(batch,\) or \(batch, k\); feature 'x' has \(2, 2, 2\)"),
        (lambda: fc.linear_model({"pet": IDS}, [PETS], sparse_combiner="max"),
         "`linear_model`: sparse_combiner must be one of"),
        (lambda: fc.encode({"y": np.array(["a"])}, [HASHED, NUMBER]),
         r"features \['y'\] hold strings or objects, but none .* are of \['x'\]. .*_with_hash_bucket\('y', 1000\)"),
        (lambda: fc.encode({"y": np.array(["a"]), "z": np.array([None])}, HASHED),
         r"features \['y', 'z'\] hold .* `frame.drop\(columns=\['y', 'z'\]\)`"),
        (lambda: fc.encode({"x": np.array(["a"])}, ["x"]), "Items of feature_columns must be columns .* Given: 'x'"),
        (lambda: fc.encode({"x": np.array(["a"])}, [fc.crossed_column([WORDS("x", ["a"]), "y"], 9), HASHED]),
         "turn the strings of feature 'x' into integers in different ways"),
        (lambda: fc.encode({"x": np.array(["a"])}, [HASHED, WORDS("x", ["a"])]),
         "turn the strings of feature 'x' into integers in different ways"),
    ],
    TypeError: [
        (lambda: fc.numeric_column("x", default_value="1"), "default_value must be a number .* '1'"),
        (lambda: fc.numeric_column("x", normalizer_fn=1), "normalizer_fn must be a callable; got 1"),
        (lambda: fc.indicator_column(NUMBER), "`indicator_column` takes a categorical column"),
        (lambda: fc.embedding_column(NUMBER, 2), "`embedding_column` takes a categorical column"),
        (lambda: fc.embedding_column(PETS, 2, initializer=1.0), "initializer must be a function such as .* got 1.0"),
        (lambda: HASHED.ids({"x": np.ones(2)}), "A categorical column needs integers; feature 'x' is float32"),
        (lambda: NUMBER.values({"x": BCOO.fromdense(jnp.eye(2))}),
         "Feature columns take dense arrays; feature 'x' is BCOO"),
        (lambda: HASHED.ids({"x": np.array(["a"])}),
         r"Feature 'x' holds strings, .* `features = est.feature_column.encode\(features, columns\)`"),
        (lambda: fc.encode({"x": np.array(["a", 3], object)}, [HASHED]),
         "Feature 'x' must hold numbers or strings alone; got 3 of type int. .* `.astype\\(np.int32\\)` for"),
        (lambda: PETS.ids({"pet": np.array([1, 2], object)}),
         r"Feature 'pet' holds strings, or objects, .* `.astype\(np.int32\)` for integers in an array of objects"),
    ],
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.covers("11 feature columns")
@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_columns_say_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_columns_of_one_code_may_share_a_feature():
    columns = [HASHED, fc.categorical_column_with_hash_bucket("x", 5), fc.crossed_column(["x", "y"], 9)]
    assert fc.encode({"x": np.array(["a"])}, columns)["x"].tolist() == [zlib.crc32(b"a") % 2**31]


def test_an_estimator_given_strings_says_who_turns_them_into_integers(tmp_path):
    classifier = est.LinearClassifier([HASHED], tmp_path)
    with pytest.raises(TypeError, match=r"got features\['x'\] of dtype <U1. .*`est.feature_column.encode"):
        classifier.train(lambda: ({"x": np.array(["a"])}, np.array([1])), steps=1)
