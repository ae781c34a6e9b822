"""Exported models whose metadata or checksums are not what `export_model` wrote, though they agree with each other."""

import hashlib
import json
import re
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import refused
from testing.estimators import X, endless, make
from testing.model_fns import predicting
from testing.refused import changed

import estimator as est
from estimator.checkpoint._export_folder import ExportFolder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trained = make(str(tmp_path_factory.mktemp("model"))).train(endless, steps=1)
    model_fn = predicting(lambda x: x @ est.get_variable("w", (2, 1)))
    return est.Estimator(model_fn, trained.model_dir).export_model(tmp_path_factory.mktemp("base"), X)


@pytest.fixture(scope="module")
def want(whole):
    return est.load_exported(whole)(X)["output"]


def copy_with(whole, tmp_path, change):
    """A copy whose metadata are what `change` makes of them, with the checksums of that."""
    folder = shutil.copytree(whole, tmp_path / "copy", dirs_exist_ok=True)
    metadata = json.loads((folder / "metadata.json").read_text())
    text = change(metadata)
    (folder / "metadata.json").write_text(text if isinstance(text, str) else json.dumps(metadata))
    ExportFolder(folder).seal()
    return folder


def put(*path):
    """A change that puts a value at a path into the metadata."""
    return lambda metadata: refused.put(metadata, path[:-1], path[-1])


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
    folder = copy_with(whole, tmp_path, change)
    with pytest.raises(ValueError, match=rf"The exported model at {re.escape(str(folder))} is damaged: .*{message}"):
        est.load_exported(folder)


@pytest.mark.slow
def test_weights_that_the_metadata_do_not_need_are_not_unpacked(whole, tmp_path):
    folder = copy_with(whole, tmp_path, lambda metadata: None)
    np.savez_compressed(folder / "weights.npz", **{**np.load(folder / "weights.npz"), "variables/w": np.zeros(10**7)})
    ExportFolder(folder).seal()
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"weights.npz is not what .*'variables/w' is float64\[10000000\] inst"):
        est.load_exported(folder)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def as_of_version_0_1(folder):
    """Gives an export the checksums that version 0.1.0 wrote."""
    names = [path for path in folder.iterdir() if path.name not in ("README.md", "checksums.json")]
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in names}
    (folder / "checksums.json").write_text(json.dumps({"sha256": sums}, indent=1))
    return folder


def test_an_export_of_an_earlier_version_loads_and_its_damage_is_named(whole, want, tmp_path):
    folder = as_of_version_0_1(shutil.copytree(whole, tmp_path / "copy"))
    np.testing.assert_array_equal(est.load_exported(folder)(X)["output"], want)
    assert est.load_variable(folder, "w").shape == (2, 1)
    (folder / "weights.npz").write_bytes((folder / "weights.npz").read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="is damaged: weights.npz does not have the checksum that"):
        est.load_exported(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"sha256": []}', '{"sha256": {}}', '{"sha256": {"a\\u0000b": 3}}', "\xff"]
)
def test_checksums_that_do_not_fit_are_an_error_too(whole, tmp_path, text):
    folder = shutil.copytree(whole, tmp_path / "copy")
    (folder / "checksums.json").write_text(text, "latin-1")
    with pytest.raises(ValueError, match=r"is damaged: checksums.json (is not what was written|does not name metad)"):
        est.load_exported(folder)


@pytest.mark.parametrize("name", ["a\0b", "a" * 300, "", "no/such", "../a", "/etc/hostname"])
def test_a_file_that_cannot_be_is_damage(whole, tmp_path, name):
    folder = as_of_version_0_1(shutil.copytree(whole, tmp_path / "copy"))
    sums = json.loads((folder / "checksums.json").read_text())
    sums["sha256"][name] = "0" * 64
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(ValueError, match=r"is damaged: (checksums.json is not what was|a+ cannot be|no/such is miss)"):
        est.load_exported(folder)


@pytest.mark.quick
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_any_metadata_are_an_error_that_names_the_folder_or_give_the_same_predictions(
    whole, want, tmp_path_factory, data
):
    folder = shutil.copytree(whole, tmp_path_factory.mktemp("hostile") / "copy")
    metadata = folder / "metadata.json"
    metadata.write_bytes(data.draw(changed(metadata.read_bytes())))
    ExportFolder(folder).seal(without=["README.md"])
    try:
        model = est.load_exported(folder)
    except ValueError as error:
        assert str(folder) in str(error)
    else:
        np.testing.assert_array_equal(model(X)["output"], want)
