"""Errors of exporting, loading and calling an exported model."""

import json
import os
import pathlib
import re
import shutil
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from testing.columns import to_sparse
from testing.estimators import X, endless, make, refuse
from testing.model_fns import predicting

import estimator as est
from estimator.checkpoint._export_folder import ExportFolder

Point = namedtuple("Point", "x y")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make(str(tmp_path_factory.mktemp("model"))).train(endless, steps=1).model_dir


@pytest.fixture(scope="module")
def model(model_dir, tmp_path_factory):
    """Of features {"x": [batch, 2], "n": int32[batch]}."""

    def predict(features):
        return (features["x"] @ est.get_variable("w", (2, 1)))[:, 0] + features["n"].astype(jnp.float32)

    return est.load_exported(exported(predict, model_dir, tmp_path_factory.mktemp("base"), features()))


def exported(predict, model_dir, base, example, **options):
    """The path of an exported model that predicts `predict(features)`."""
    return est.Estimator(predicting(predict), model_dir).export_model(base, example, **options)


def features(**changes):
    return {"x": np.ones((3, 2), np.float32), "n": np.arange(3, dtype=np.int32)} | changes


@pytest.mark.covers("9 receiver fn", "9 assets_extra")
@pytest.mark.parametrize(
    "example, options, error, match",
    [
        (None, {}, TypeError, r"`export_model` needs example_features: arrays, or `jax.ShapeDtypeStruct`s.*; got None"),
        (lambda: X, {}, TypeError, r"needs a serving_input_receiver_fn that .*; got <function.* give `export_model`"),
        (Point(X, X), {}, TypeError, r"features in dicts, lists and tuples, .*; got example_features of type Point"),
        ({"a": {1: X}}, {}, TypeError, r"strings as keys of features; example_features\['a'\] has the key 1\."),
        ([to_sparse(X)], {}, TypeError, r"cannot export for sparse features; got example_features\[0\] = BCOO"),
        (np.array(["a"]), {}, TypeError, "features and labels must be arrays of numbers; got features of dtype <U1"),
        ({"a": X, "b": X[:1]}, {}, ValueError, r"same batch size \(first dimension\); got features\['a'\]: 4"),
        (X, {"batch_size": 0}, ValueError, "batch_size of `export_model` must be a positive int, or None .*; got 0"),
        (X, {"batch_size": "b"}, ValueError, "batch_size of `export_model` must be a positive int.*; got 'b'"),
        (X, {"platforms": "gpu"}, ValueError, r"platforms .* some of \['cpu', 'cuda', 'rocm', 'tpu'\]; got 'gpu'"),
        (X, {"platforms": ()}, ValueError, r"platforms of `export_model` must be some of .*; got \(\)"),
        (X, {"assets_extra": ["a"]}, TypeError, r"assets_extra must be a dict of source files by their destination"),
        (X, {"assets_extra": {"a": "/no"}}, ValueError, "assets_extra: there is no file '/no' to copy to 'a'"),
        (X, {"assets_extra": {"../a": __file__}}, ValueError, r"assets_extra: '../a' must be a path within `assets"),
        (X, {"assets_extra": {"/a": __file__}}, ValueError, r"assets_extra: '/a' must be a path within `assets"),
        (X, {"checkpoint_path": "/no"}, ValueError, "/no is not a checkpoint"),
    ],
)
def test_arguments_are_checked_before_anything_is_done(model_dir, tmp_path, example, options, error, match):
    with pytest.raises(error, match=match):
        exported(refuse, model_dir, tmp_path / "base", example, **options)
    assert not (tmp_path / "base").exists()


@pytest.mark.covers("9 checkpoint")
def test_a_model_that_was_not_trained_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match=f"Couldn't find trained model at {re.escape(str(tmp_path))}. Call `train`"):
        make(tmp_path).export_model(tmp_path / "base", X)


@pytest.mark.covers("9 variables not in checkpoint")
def test_a_variable_that_the_checkpoint_lacks_is_an_error(model_dir, tmp_path):
    with pytest.raises(ValueError, match=r"are not those of the model:\n  missing: v, float32\[2, 1\] in the model"):
        exported(lambda x: x @ est.get_variable("v", (2, 1)), model_dir, tmp_path / "base", X)
    assert not (tmp_path / "base").exists()


@pytest.mark.covers("9 build_raw_serving_input_receiver_fn")
def test_a_model_that_needs_the_number_of_examples_is_exported_for_one(model_dir, tmp_path):
    def predict(features):
        return sum(features[i] for i in range(len(features))) + features

    message = (
        r"could not export the signature 'serving_default' for batches of any size on \('cpu', 'cuda'\): TypeError: "
        r".*write `x.shape\[0\]` for `len\(x\)`.*`export_model\(..., batch_size=...\)`"
    )
    with pytest.raises(ValueError, match=message) as caught:
        exported(predict, model_dir, tmp_path / "base", X)
    assert isinstance(caught.value.__cause__, TypeError)
    assert not (tmp_path / "base").exists()

    model = est.load_exported(exported(predict, model_dir, tmp_path, X, batch_size=3))
    x = X[:3]
    np.testing.assert_array_equal(model(x)["output"], x.sum(0) + x)
    with pytest.raises(ValueError, match=r"'features' must be float32\[3, 2\]; got float32\[4, 2\]"):
        model(X)


@pytest.mark.covers("9 signatures")
def test_outputs_must_have_names_of_their_own(model_dir, tmp_path):
    for outputs, match in [
        ({"a": {"b": X}, "a/b": X}, "Two arrays are called 'a/b' in what is to be exported"),
        ({"a": None}, "offers the signature 'serving_default' for export, but without any array"),
    ]:

        def model_fn(features, outputs=outputs):
            exports = {"serving_default": est.export.PredictOutput(jax.tree.map(jnp.asarray, outputs))}
            return est.EstimatorSpec("infer", predictions=features, export_outputs=exports)

        with pytest.raises(ValueError, match=match):
            est.Estimator(model_fn, model_dir).export_model(tmp_path, X)


@pytest.mark.covers("9 PredictOutput")
def test_a_tuple_as_a_key_is_joined(model_dir, tmp_path):
    path = exported(lambda x: {("head", "y"): x, ("head", "z"): {"a": x}}, model_dir, tmp_path, X)
    model = est.load_exported(path)
    assert sorted(model(X)) == ["head/y", "head/z/a"]


@pytest.mark.covers("9 PredictOutput")
def test_the_fields_of_a_named_tuple_are_names_of_outputs(model_dir, tmp_path):
    for outputs in (None, ["x", "y/a"]):
        path = exported(lambda x: Point(x, {"a": 2 * x}), model_dir, tmp_path, X, outputs=outputs)
        got = est.load_exported(path)(X)
        assert sorted(got) == ["x", "y/a"]
        np.testing.assert_array_equal(got["y/a"], 2 * got["x"])


@pytest.mark.covers("9 signatures", "13 16 silent acceptances")
def test_unknown_signatures_are_an_error(model):
    with pytest.raises(ValueError, match=r"has no signature 'predict'; it has \['serving_default'\]\."):
        model(features(), "predict")


@pytest.mark.covers("9 ServingInputReceiver", "9 features of SparseTensors")
@pytest.mark.parametrize(
    "given, match",
    [
        ({"x": X}, r"takes the features \['n', 'x'\]; missing: \['n'\], extra: \[\]\."),
        (features(y=X), r"takes the features \['n', 'x'\]; missing: \[\], extra: \['y'\]\."),
        (X, r"takes the features \['n', 'x'\]; missing: \['n', 'x'\], extra: \['features'\]\."),
        (features(n=[np.arange(3)]), r"missing: \['n'\], extra: \['n/0'\]"),
        (features(x=np.ones((3, 5), np.float32)), r"'x' must be float32\[b, 2\]; got float32\[3, 5\]\."),
        (features(x=np.ones(3, np.float32)), r"'x' must be float32\[b, 2\]; got float32\[3\]\."),
        (features(x=np.ones((0, 2), np.float32)), r"'x' must be float32\[b, 2\]; got float32\[0, 2\]\."),
        (features(x=np.ones((3, 2), np.int32)), r"'x' must be float32\[b, 2\]; got int32\[3, 2\]\."),
        (features(x=np.full((3, 2), "a")), r"'x' must be float32\[b, 2\]; got <U1\[3, 2\]\."),
        (features(n=jax.random.split(jax.random.key(0), 3)), r"'n' must be int32\[b\]; got key<fry>\[3\]\."),
        (features(n=2), r"'n' must be an array, int32\[b\]; got 2\."),
        (features(n=np.arange(2, dtype=np.int32)), r"same batch size \(first dimension\); got {'n': 2, 'x': 3}"),
    ],
)
def test_features_are_checked_at_the_door(model, given, match):
    with pytest.raises(ValueError, match=match):
        model(given)


def test_features_must_be_in_the_same_containers(model_dir, tmp_path):
    model = est.load_exported(exported(lambda features: features[0], model_dir, tmp_path, (X,)))
    with pytest.raises(ValueError, match=r"takes features in containers such as \(ShapeDtypeStruct.*; got \[array"):
        model([X])


def test_numbers_of_64_bits_are_taken_as_predict_takes_them(model):
    wide = features(x=np.ones((3, 2)), n=np.arange(3))
    np.testing.assert_array_equal(model(wide)["output"], model(features())["output"])


def test_a_path_that_is_no_export_is_refused(tmp_path, model, model_dir):
    (tmp_path / "temp-1").mkdir()
    for path in (tmp_path, tmp_path / "missing", model_dir):
        with pytest.raises(ValueError, match=f"There is no exported model at {re.escape(str(path))}: neither a metad"):
            est.load_exported(path)
    folder = shutil.copytree(model.path, tmp_path / "copy")
    (folder / "serving_default.jaxexport").write_bytes(b"nothing")
    ExportFolder(folder).seal()
    message = (
        r"jax [\d.]+ cannot read .*serving_default.jaxexport, which jax .* wrote.* once more: `python -m estimator.re"
    )
    with pytest.raises(ValueError, match=message):
        est.load_exported(folder)
    (folder / "metadata.json").write_text(json.dumps({"format": "estimator export 0"}))
    ExportFolder(folder).seal()
    with pytest.raises(ValueError, match=r"must be 'estimator export 1'; got 'estimator export 0'\. Export the m"):
        est.load_exported(os.fspath(folder))


def truncated(data, place):
    return data[: int(place * len(data))]


def with_a_bit_flipped(data, place):
    bit = int(place * 8 * len(data))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


FILES = ["metadata.json", "weights.npz", "serving_default.jaxexport", "checksums.json", "assets.extra/words.txt"]


@pytest.fixture(scope="module")
def whole(model_dir, tmp_path_factory):
    """A path that is an exported model before a test and after it."""
    base, assets = tmp_path_factory.mktemp("base"), {"words.txt": __file__}
    path = pathlib.Path(exported(lambda x: x @ est.get_variable("w", (2, 1)), model_dir, base, X, assets_extra=assets))
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert files == {*FILES, "README.md"}
    yield path
    est.load_exported(path)


@pytest.mark.quick
@pytest.mark.covers("9 a damaged export")
@pytest.mark.parametrize("file", FILES)
@settings(max_examples=15, deadline=None)
@given(st.sampled_from([truncated, with_a_bit_flipped]), st.floats(0, 1, exclude_max=True))
@example(None, 0.0)
@example(truncated, 0.0)
def test_a_damaged_file_is_named(whole, file, damage, place):
    path = whole / file
    data = path.read_bytes()
    try:
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(data, place))
        message = rf"The exported model at {re.escape(str(whole))} is damaged: .*{re.escape(file)}"
        with pytest.raises(ValueError, match=message):
            est.load_exported(whole)
    finally:
        path.write_bytes(data)


def test_the_newest_of_several_is_not_left_out_because_it_is_damaged(whole, tmp_path):
    for number in ("1", "2"):
        shutil.copytree(whole, tmp_path / number)
    (tmp_path / "2" / "metadata.json").unlink()
    with pytest.raises(ValueError, match=r"/2 is damaged: metadata.json is missing\."):
        est.load_exported(tmp_path)


def test_an_export_of_64_bits_wants_them_on(model_dir, tmp_path):
    wide = np.array([0.1])
    with jax.enable_x64(True):
        path = exported(lambda x: 2 * x, model_dir, tmp_path, wide)
        assert est.load_exported(path)(wide)["output"].tolist() == [0.2]
    with pytest.raises(ValueError, match="was exported with jax_enable_x64 and has arrays of dtype float64"):
        est.load_exported(path)


STRINGS = {"pet": est.io.VarLenFeature(str)}
PARSING = est.export.build_parsing_serving_input_receiver_fn
RAW = est.export.build_raw_serving_input_receiver_fn


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: PARSING({}), ValueError, "Missing: features was {}"),
        (lambda: PARSING(None), ValueError, "Missing: features was None"),
        (lambda: PARSING({1: STRINGS["pet"]}), ValueError, r"feature keys must be strings: 1\."),
        (lambda: PARSING({"x": np.float32}), TypeError, "needs a FixedLenFeature or VarLenFeature or .* for 'x'"),
        (lambda: PARSING(STRINGS), ValueError, "the feature 'pet' is of strings, .* Give `columns=columns`"),
        (lambda: PARSING(STRINGS, 0), ValueError, "default_batch_size must be a positive int, or None .* got 0"),
        (lambda: RAW(None), ValueError, r"features must be defined\."),
        (lambda: RAW(np.ones(3)), TypeError, "takes features in a dict by key; got ndarray"),
        (lambda: RAW({"pet": np.array(["a"])}), ValueError, "the feature 'pet' is of strings"),
    ],
)
def test_what_cannot_be_received_is_refused_when_the_function_is_built(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_a_receiver_has_the_batch_size_and_the_widths_of_requests():
    counts = est.feature_column.categorical_column_with_identity("id", 5)
    columns = [est.feature_column.weighted_categorical_column(counts, "w"), counts]
    spec = {**est.feature_column.make_parse_example_spec(columns), "more": est.io.VarLenFeature(np.float32)}
    receiver = PARSING({**spec, "x": est.io.FixedLenFeature([2], np.float32)}, 4, columns=columns)()
    shapes = {key: x.shape for key, x in receiver.features.items()}
    assert shapes == {"id": (4, 1), "w": (4, 1), "more": (4, 1), "x": (4, 2)}
    assert receiver.widths == dict.fromkeys(["id", "w", "more"], "k")  # weights need one for each id
    assert PARSING(spec, columns=[counts])().widths == {"id": "k1", "w": "k", "more": "k"}
    assert RAW({"x": np.ones((8, 3))}, 2)().features["x"].shape == (2, 3)
