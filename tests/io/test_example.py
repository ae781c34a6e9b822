"""`tf.Example`s are parsed as TensorFlow 1.12 parses them: its values, shapes, dtypes and errors (tests/golden)."""

import base64
import functools
import json
import pathlib
import re

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

import estimator as est
from estimator.io import FixedLenFeature, FixedLenSequenceFeature, VarLenFeature
from estimator.io._find_features import _find_at_once
from estimator.io._flat import Pieces, read_flat
from estimator.io._messages import UnreadExample

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "tfrecord"
VALUES = json.loads((GOLDEN / "values.json").read_text())
FEATURES = {
    "id": FixedLenFeature([], np.int64),
    "price": FixedLenFeature([], np.float32, -1.5),
    "square": FixedLenFeature([2, 2], np.float32),
    "word": FixedLenFeature([], str),
    "tags": VarLenFeature(str),
    "clicks": VarLenFeature(np.int64),
    "track": FixedLenSequenceFeature([], np.float32, True, 9.0),
    "pairs": FixedLenSequenceFeature([2], np.int64, True),
}


@functools.cache
def records(*names):
    return [record for name in names for record in est.io.tf_record_iterator(GOLDEN / f"{name}.tfrecord")]


EXAMPLES = records("part-0", "part-1", "part-2")


def array(saved):
    if "bytes" not in saved:
        return np.array(saved["values"], saved["dtype"]).reshape(saved["shape"])
    return np.array([*map(base64.b64decode, saved["bytes"]), None], object)[:-1].reshape(saved["shape"])


def assert_equal(got, saved):
    if "indices" in saved:
        np.testing.assert_array_equal(got.indices, np.reshape(saved["indices"], got.indices.shape))
        np.testing.assert_array_equal(got.dense_shape, saved["dense_shape"])
        got, saved = got.values, saved["values"]
    want = array(saved)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("key", FEATURES)
def test_a_batch_is_parsed_as_tensorflow_parses_it(key):
    assert_equal(est.io.parse_example(EXAMPLES, {key: FEATURES[key]})[key], VALUES["parsed"][key])


@pytest.mark.parametrize("key", FEATURES)
def test_single_examples_are_the_rows_of_a_batch(key):
    batch = est.io.parse_example(EXAMPLES, {key: FEATURES[key]})[key]
    for i, example in enumerate(EXAMPLES):
        one = est.io.parse_single_example(example, {key: FEATURES[key]})[key]
        if isinstance(batch, np.ndarray):
            np.testing.assert_array_equal(one, batch[i][: len(one)] if one.ndim else batch[i])
        else:
            np.testing.assert_array_equal(one.to_dense(), batch.to_dense()[i][: len(one.values)])
            assert one.indices.shape == (len(one.values), 1)


def test_sequences_are_parsed_as_tensorflow_parses_them():
    context = {"label": FixedLenFeature([], np.int64), "who": FixedLenFeature([], str)}
    sequences = {
        "frames": FixedLenSequenceFeature([3], np.float32),
        "tokens": FixedLenSequenceFeature([], np.int64),
        "ragged": VarLenFeature(np.int64),
    }
    for record, wanted in zip(records("sequences"), VALUES["sequences"], strict=True):
        parsed = est.io.parse_single_sequence_example(record, context, sequences)
        for got, want in zip(parsed, wanted, strict=True):
            assert got.keys() == want.keys()
            for key in got:
                assert_equal(got[key], want[key])


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("no such feature", {"absent": FixedLenFeature([], np.int64)}),
        ("wrong dtype", {"id": FixedLenFeature([], np.float32)}),
        ("wrong length", {"square": FixedLenFeature([3], np.float32)}),
    ],
)
def test_errors_are_tensorflows(name, features):
    with pytest.raises(ValueError, match=f"^{re.escape(VALUES['errors'][name])}$"):
        est.io.parse_example(EXAMPLES, features)


fc = est.feature_column
WORD = fc.categorical_column_with_vocabulary_list("word", ["red", "green"])
NUMBERS = [fc.numeric_column("price", default_value=0.5), fc.numeric_column("square", shape=(4,))]
COLUMNS = [
    *NUMBERS,
    fc.bucketized_column(fc.numeric_column("age"), [20, 40]),
    fc.indicator_column(WORD),
    fc.embedding_column(fc.categorical_column_with_identity("clicks", 10), 2),
    fc.indicator_column(fc.categorical_column_with_hash_bucket("tags", 10)),
    fc.indicator_column(fc.crossed_column(["word", "tags"], 10)),
    fc.embedding_column(
        fc.weighted_categorical_column(fc.categorical_column_with_hash_bucket("terms", 10), "weights"), 2
    ),
]
SPECS = {
    "make_parse_example_spec": lambda: fc.make_parse_example_spec(COLUMNS),
    "classifier_parse_example_spec": lambda: fc.classifier_parse_example_spec(NUMBERS, "label", weight_column="w"),
    "regressor_parse_example_spec": lambda: fc.regressor_parse_example_spec(NUMBERS, "label", label_dimension=2),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_features_that_columns_read_are_tensorflows(name):
    kinds = {"bytes_list": "string", "int64_list": "int64", "float_list": "float32"}
    shown = {
        key: {
            "kind": type(config).__name__,
            "dtype": kinds[config.kind],
            "shape": list(config.shape) if isinstance(config, FixedLenFeature) else None,
            "default": None
            if getattr(config, "default_value", None) is None
            else np.broadcast_to(config.default_value, config.shape).tolist(),
        }
        for key, config in SPECS[name]().items()
    }
    assert shown == VALUES[name]


def example(**features):
    """A serialized example, of numpy's values."""
    made = est.io.Example()
    for key, value in features.items():
        field = {"i": "int64_list", "f": "float_list", "O": "bytes_list"}[value.dtype.kind]
        getattr(made.features.feature[key], field).value.extend(value.tolist())
    return made.SerializeToString()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.floats(width=32, allow_nan=False))),
        max_size=5,
    )
)
def test_what_was_written_is_parsed(rows):
    data = [example(a=np.array(a, np.int64), b=np.array(b, np.float32)) for a, b in rows]
    parsed = est.io.parse_example(data, {"a": VarLenFeature(np.int64), "b": VarLenFeature(np.float32)})
    for i, row in enumerate(rows):
        for key, want in zip("ab", row, strict=True):
            there = parsed[key].indices[:, 0] == i
            assert parsed[key].values[there].tolist() == want
            assert parsed[key].indices[there, 1].tolist() == list(range(len(want)))
    for key, position in (("a", 0), ("b", 1)):
        assert parsed[key].dense_shape.tolist() == [len(rows), max([len(row[position]) for row in rows], default=0)]


NUMBER = {"int64_list": st.integers(-(2**63), 2**63 - 1), "float_list": st.floats(width=32)}
# Ways to write a `Feature`, of its bytes: by any writer, and allowed, or damaged.
WAYS = {
    "as writers do": lambda written, i: written,
    "another field": lambda written, i: written + b"\x20\x01",
    "two lists": lambda written, i: written * 2,
    "as another kind": lambda written, i: bytes([written[0] ^ 8]) + written[1:] if written else b"",
    "not packed": lambda written, i: b"\x12\x05\x0d\x00\x00\x80\x3f",
    "a longer length": lambda written, i: b"\x1a\x83\x00\x0a\x01" + bytes([i % 128]),
    "damaged": lambda written, i: (
        written[: i % (len(written) + 1)] + bytes([i % 256]) + written[i % (len(written) + 1) + 1 :]
    ),
    "cut": lambda written, i: written[: i % (len(written) + 1)],
}


@st.composite
def written_features(draw):
    """A kind, and `Feature`s in bytes, each with whether it is what writers make of few numbers, or of one string."""
    kind = draw(st.sampled_from(["int64_list", "float_list", "bytes_list"]))
    value = NUMBER[kind] if kind in NUMBER else st.binary(max_size=draw(st.sampled_from([3, 300])))
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        values = draw(st.lists(value, max_size=draw(st.sampled_from([1, 3, 40]))))
        way = draw(st.sampled_from([*["as writers do"] * 30, *WAYS]))
        feature = est.io.Feature()
        if values or draw(st.booleans()):
            getattr(feature, kind).SetInParent()
            getattr(feature, kind).value.extend(values)
        is_plain = way == "as writers do" and (kind != "bytes_list" or len(values) < 2)
        rows.append((WAYS[way](feature.SerializeToString(), draw(st.integers(0, 2**16))), is_plain))
    return kind, rows


@given(written_features())
def test_what_is_read_at_once_is_what_protobuf_reads(written):
    kind, rows = written
    features = [feature for feature, _ in rows]
    try:
        flat = read_flat(kind, Pieces.of(features))
    except DecodeError:
        with pytest.raises(DecodeError):
            [*map(est.io.Feature.FromString, features)]
        return
    if flat is None:
        assert not any(features) or not all(is_plain for _, is_plain in rows)
        return
    messages = [*map(est.io.Feature.FromString, features)]
    assert {message.WhichOneof("kind") for message in messages} <= {kind, None}
    lists = [getattr(message, kind).value for message in messages]
    values, counts = flat
    want = np.array([value for each in lists for value in each], values.dtype)
    assert counts.tolist() == [*map(len, lists)] and len(values) == len(want)
    if kind == "float_list":
        np.testing.assert_array_equal(values, want)
    else:
        assert values.tolist() == want.tolist()


KEYS = ["a", "b", "a\0", "ü", "a key of more than eight bytes", "a key of more than eight bytez", "k" * 200]


def field(tag, contents):
    size, length = len(contents), b""
    while size >= 128:
        size, length = size >> 7, length + bytes([size & 127 | 128])
    return bytes([tag]) + length + bytes([size]) + contents


# Ways to write an entry of a map, and an example of its map's bytes: by any writer, and allowed, or damaged.
ENTRIES = {
    "as writers do": lambda key, value: field(0x0A, field(0x0A, key) + field(0x12, value)),
    "value first": lambda key, value: field(0x0A, field(0x12, value) + field(0x0A, key)),
    "without a value": lambda key, value: field(0x0A, field(0x0A, key)),
    "without a key": lambda key, value: field(0x0A, field(0x12, value)),
    "another field": lambda key, value: field(0x0A, field(0x0A, key) + field(0x12, value) + b"\x18\x01"),
    "two values": lambda key, value: field(0x0A, field(0x0A, key) + field(0x12, b"x") + field(0x12, value)),
    "too long": lambda key, value: b"\x0a\x85\x80\x80\x80\x80\x00" + field(0x0A, b"a") + field(0x12, b""),
}
EXAMPLE_WAYS = {
    "as writers do": lambda entries, i: field(0x0A, entries),
    "two maps": lambda entries, i: field(0x0A, entries) * 2,
    "another field": lambda entries, i: field(0x0A, entries) + b"\x18\x01",
    "nothing": lambda entries, i: b"",
    "damaged": lambda entries, i: entries[: i % (len(entries) + 1)] + bytes([i % 128]) + entries[i % 128 :],
    "cut": lambda entries, i: field(0x0A, entries)[: i % (len(entries) + 3)],
}


@st.composite
def written_examples(draw):
    """Serialized examples, and whether all of them are what writers make."""
    ways, examples, is_plain = draw(st.booleans()), [], True
    for _ in range(draw(st.integers(1, 6))):
        entries = b""
        keys = draw(st.lists(st.sampled_from(KEYS), max_size=6, unique=True))
        is_plain &= bool(keys)
        for key in keys + keys[:1] * (ways and draw(st.integers(0, 9)) == 0):
            value = draw(st.binary(max_size=9)) * draw(st.sampled_from([1, 1, 40, 2000, 300_000]))
            way = draw(st.sampled_from([*["as writers do"] * 30, *ENTRIES])) if ways else "as writers do"
            entries += ENTRIES[way](key.encode(), value)
        way = draw(st.sampled_from([*["as writers do"] * 10, *EXAMPLE_WAYS])) if ways else "as writers do"
        examples.append(EXAMPLE_WAYS[way](entries, draw(st.integers(0, 2**16))))
    return examples, is_plain and not ways


@given(written_examples(), st.lists(st.sampled_from([*KEYS, "missing"]), min_size=1, unique=True))
def test_features_that_are_found_at_once_are_those_that_protobuf_finds(written, keys):
    examples, is_plain = written
    found = _find_at_once(examples, [key.encode() for key in keys], 1)
    assert found is not None or not is_plain or {"a", "a\0"} <= {*keys}  # which have one code
    try:
        maps = [UnreadExample.FromString(each).features.feature for each in examples]
    except DecodeError:
        assert found is None
        return
    if found is not None:
        assert [[*pieces] for pieces in found.split(len(keys))] == [[each[key] for each in maps] for key in keys]


def test_a_large_batch_is_parsed_as_its_examples_are():
    random = np.random.default_rng(0)
    data, features = [], {"a": FixedLenFeature([], np.int64, -1), "b": FixedLenFeature([2], np.float32)}
    features |= {"c": VarLenFeature(np.int64), "d": FixedLenSequenceFeature([], str, True), "e": VarLenFeature(str)}
    for i in range(100):
        values = {"b": random.random(2, np.float32)} | ({"a": random.integers(-(2**63), 2**63 - 1, 1)} if i % 7 else {})
        values |= {"c": random.integers(-1, 300, i % 5), "d": np.array([b"x" * i * 3] * (i % 9 > 0), object)}
        if i % 50 != 1:  # all of "e" are strings one by one, but for two
            values["e"] = np.array([b"a", b"b"][: 1 + (i % 50 == 2)], object)
        data.append(example(**values))
    whole = est.io.parse_example(data, features)
    ones = [est.io.parse_single_example(each, features) for each in data]
    for key in ("a", "b"):
        assert whole[key].tobytes() == np.stack([one[key] for one in ones]).tobytes()
    assert [row[row != b""].tolist() for row in whole["d"]] == [one["d"][one["d"] != b""].tolist() for one in ones]
    for key in ("c", "e"):
        assert whole[key].values.tolist() == [value for one in ones for value in one[key].values]
        assert whole[key].indices[:, 0].tolist() == [i for i, one in enumerate(ones) for _ in one[key].values]


def test_a_feature_that_is_damaged_names_its_example():
    sound = example(a=np.array([1]))
    damaged = sound[:-1] + b"\xff"  # the integer does not end
    with pytest.raises(ValueError, match=re.escape(f"Could not parse example input, value: {damaged!r}")):
        est.io.parse_example([sound, damaged], {"a": VarLenFeature(np.int64)})
    # The context of a sequence is written as the features of an example are.
    with pytest.raises(ValueError, match=re.escape(f"value: {damaged!r}. `parse_single_sequence_example` takes")):
        est.io.parse_single_sequence_example(damaged, {"a": VarLenFeature(np.int64)})


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (TypeError, lambda: FixedLenFeature([], np.int32),
         "FixedLenFeature has a dtype of np.int64, np.float32 or str"),
        (TypeError, lambda: VarLenFeature(None), "VarLenFeature has a dtype of np.int64, np.float32 or str"),
        (ValueError, lambda: FixedLenFeature([None], str), "shape of FixedLenFeature must be a list of sizes"),
        (ValueError, lambda: FixedLenFeature([2], np.int64, [1, 2, 3]), "must be one value, or have the shape [2]"),
        (ValueError, lambda: FixedLenSequenceFeature([], np.int64, True, [1, 2]), "must be one value; got [1, 2]"),
        (TypeError, lambda: est.io.parse_example(b"", {}), "takes a list of serialized examples"),
        (TypeError, lambda: est.io.parse_example(["text"], {}), "A serialized example is `bytes`; got 'text'"),
        (TypeError, lambda: est.io.parse_example([], {"x": np.int64}), "needs a FixedLenFeature or VarLenFeature or"),
        (ValueError, lambda: est.io.parse_example([b"\xff"], {}), "Could not parse example input, value: b'\\xff'"),
        (ValueError, lambda: est.io.parse_example([], {"x": FixedLenSequenceFeature([], str)}),
         "The FixedLenSequenceFeature 'x' needs allow_missing=True"),
        (ValueError, lambda: est.io.parse_example(EXAMPLES, {"id": FixedLenSequenceFeature([2], np.int64, True)}),
         "Key: id, Index: 0.  Number of int64 values is not a multiple of the size of an element."),
        (ValueError, lambda: est.io.parse_single_sequence_example(b"", None, {"x": FixedLenSequenceFeature([], str)}),
         "Feature list 'x' is required but could not be found."),
        (ValueError, lambda: fc.regressor_parse_example_spec(NUMBERS, "price"), "label should not be used as feature"),
        (ValueError, lambda: fc.make_parse_example_spec([NUMBERS[0], fc.numeric_column("price", shape=2)]),
         "feature_columns contain different parse_spec for key price"),
    ],
)  # fmt: skip
def test_mistakes_say_what_to_do(error, call, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_defaults_fill_what_is_missing():
    data = [example(), example(x=np.array([1.0, 2.0], np.float32), s=np.array([b"a"], object))]
    features = {
        "x": FixedLenFeature([2], np.float32, [5, 6]),
        "s": FixedLenFeature([], str, "none"),
        "t": FixedLenSequenceFeature([], str, True),
    }
    assert est.io.parse_example(data, {}) == est.io.parse_example(data * 100, {}) == {}
    parsed = est.io.parse_example(data, features)
    assert parsed["x"].tolist() == [[5, 6], [1, 2]] and parsed["s"].tolist() == [b"none", b"a"]
    assert parsed["t"].shape == (2, 0)
