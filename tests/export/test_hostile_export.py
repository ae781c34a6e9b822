"""Exported models whose metadata or checksums are not what `export_model` wrote, though they agree with each other."""

import json
import re
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.estimators import X, endless, make

import estimator as est
from estimator.checkpoint._export_folder import write_checksums


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    def model_fn(features):
        return est.EstimatorSpec("infer", predictions=features @ est.get_variable("w", (2, 1)))

    trained = make(str(tmp_path_factory.mktemp("model"))).train(endless, steps=1)
    return est.Estimator(model_fn, trained.model_dir).export_model(tmp_path_factory.mktemp("base"), X)


def changed(whole, tmp_path, change):
    """A copy whose metadata are what `change` makes of them, with the checksums of that."""
    folder = shutil.copytree(whole, tmp_path / "copy", dirs_exist_ok=True)
    metadata = json.loads((folder / "metadata.json").read_text())
    text = change(metadata)
    (folder / "metadata.json").write_text(text if isinstance(text, str) else json.dumps(metadata))
    write_checksums(folder)
    return folder


def put(*path):
    """A change that puts a value at a path into the metadata."""
    *keys, last, value = path

    def change(metadata):
        for key in keys:
            metadata = metadata[key]
        metadata[last] = value

    return change


DEFAULT = ("signatures", "serving_default")
W = ("weights", "variables/w")
WRITTEN = r"metadata.json is not what was written \("
HOSTILE = {
    "nested": (lambda metadata: "[" * 100_000, WRITTEN + "RecursionError"),
    "a number": (lambda metadata: "3", WRITTEN + "TypeError"),
    "no weights": (lambda metadata: metadata.pop("weights") and None, WRITTEN + r"KeyError\('weights'\)"),
    "weights in a list": (put("weights", []), WRITTEN + "AttributeError"),
    "a weight without a shape": (put(*W, {"dtype": "float32"}), "the weight 'variables/w' needs a shape and a dtype"),
    "a size below zero": (put(*W, "shape", [-2, 1]), "the weight 'variables/w' needs a shape and a dtype, and has"),
    "an unknown dtype": (put(*W, "dtype", "float33"), WRITTEN + ".*float33"),
    "another dtype": (put(*W, "dtype", "int32"), "jaxexport is a program for other weights than those of metadata"),
    "another shape": (put(*W, "shape", [1, 2]), "jaxexport is a program for other weights than those of metadata"),
    "a weight too much": (put("weights", "b", {"dtype": "int8", "shape": []}), "is a program for other weights"),
    "no signatures": (put("signatures", {}), "there is no signature 'serving_default'"),
    "signatures in a list": (put("signatures", ["a"]), WRITTEN + "AttributeError"),
    "no file": (put(*DEFAULT, {}), r"the signature 'serving_default' needs a file, and has \{\}"),
    "a file elsewhere": (put(*DEFAULT, "file", "../a"), "names the file '../a', and checksums.json does not"),
    "names of classes": (put(*DEFAULT, "class_names", 3), "the signature 'serving_default' needs a file, and has"),
    "no versions": (lambda metadata: metadata.pop("versions") and None, WRITTEN + r"KeyError\('versions'\)"),
}


@pytest.mark.covers("9 a damaged export")
@pytest.mark.parametrize("change, message", HOSTILE.values(), ids=HOSTILE)
def test_metadata_that_do_not_fit_are_an_error_that_says_why(whole, tmp_path, change, message):
    folder = changed(whole, tmp_path, change)
    with pytest.raises(ValueError, match=rf"The exported model at {re.escape(str(folder))} is damaged: .*{message}"):
        est.load_exported(folder)


@pytest.mark.parametrize(
    "sums, message",
    [
        ("[" * 100_000, "checksums.json is not what was written"),
        ('{"sha256": {"a\\u0000b": "0", "metadata.json": "0", "weights.npz": "0"}}', "metadata.json is not what was"),
        ('{"sha256": 3}', "checksums.json is not what was written"),
    ],
)
def test_checksums_that_do_not_fit_are_an_error_too(whole, tmp_path, sums, message):
    folder = shutil.copytree(whole, tmp_path / "copy")
    (folder / "checksums.json").write_text(sums)
    with pytest.raises(ValueError, match=rf"is damaged: {message}"):
        est.load_exported(folder)


@pytest.mark.parametrize("name", ["a\0b", "a" * 300, "", "no/such"])
def test_a_file_that_cannot_be_is_missing(whole, tmp_path, name):
    folder = changed(whole, tmp_path, lambda metadata: None)
    sums = json.loads((folder / "checksums.json").read_text())
    sums["sha256"][name] = "0"
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(ValueError, match=f"is damaged: {name[:100]}, which checksums.json names, is missing"):
        est.load_exported(folder)


def paths(tree, path=()):
    """The paths of all values in JSON."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.sampled_from(["int32", "a", "", "\0"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(["file", "shape", "a"]), values),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_any_metadata_are_an_error_that_names_the_folder_or_give_the_same_predictions(whole, tmp_path_factory, data):
    want = est.load_exported(whole)(X)["output"]

    def change(metadata):
        *keys, last = data.draw(st.sampled_from(list(paths(metadata))))
        put(*keys, last, data.draw(JSON))(metadata)

    folder = changed(whole, tmp_path_factory.mktemp("hostile"), change)
    try:
        model = est.load_exported(folder)
    except ValueError as error:
        assert str(folder) in str(error)
    else:
        np.testing.assert_array_equal(model(X)["output"], want)
