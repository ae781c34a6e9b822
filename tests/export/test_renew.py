"""`python -m estimator.renew`: an exported model with new programs, and the same numbers."""

import json
import os
import re

import jax
import numpy as np
import optax
import pytest

import estimator as est
from estimator import renew
from estimator.checkpoint._export_folder import ExportFolder
from estimator.export._arguments import describe_features, read_features

X = {"x": [np.arange(6, dtype=np.float32).reshape(2, 3), (np.arange(2, dtype=np.int8), None)]}


def model_fn(features, labels, mode, params):
    """Has a moving average, in whose place a variable is exported, a bfloat16 variable, and random numbers."""
    x, (scale, _) = features["x"]
    w = est.get_variable("w", (3, params.get("units", 2)))
    bias = est.get_variable("bias", (), "bfloat16", jax.nn.initializers.ones)
    unused = est.get_variable("unused", (5,))
    y = (x @ w + bias.astype("float32")) * scale.astype("float32")[:, None] + jax.random.uniform(est.make_rng())
    est.record("first", y[:, 0])
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"y": y, "unused": y[:, 0] * unused.sum()})
    loss = est.losses.mean_squared_error(labels, y[:, 0])
    train_op = est.group(est.Optimizer(optax.sgd(0.1)).minimize(loss), est.ExponentialMovingAverage(0.5).apply())
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


@pytest.fixture(autouse=True)
def platforms():
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    model = est.Estimator(model_fn, tmp_path_factory.mktemp("model"), params={})
    return model.train(lambda: [(X, np.ones(2, np.float32))] * 3)


def make_unreadable(path):
    """Makes of the programs what this jax cannot read, as of another one."""
    for name in os.listdir(path):
        if name.endswith(".jaxexport"):
            with open(os.path.join(path, name), "wb") as file:
                file.write(b"of another jax")
    ExportFolder(path).seal()


def read(path, name):
    with open(os.path.join(path, name)) as file:
        return file.read()


@pytest.mark.quick
@pytest.mark.parametrize("options", [{}, {"batch_size": 2, "platforms": ["cpu"], "outputs": ["first"]}], ids=str)
def test_a_renewed_export_computes_the_same_without_the_checkpoint(estimator, tmp_path, options, capsys):
    (tmp_path / "words.txt").write_text("cat")
    path = estimator.export_model(tmp_path / "e", X, assets_extra={"a/words.txt": tmp_path / "words.txt"}, **options)
    before = est.load_exported(path)
    want = before(X)
    make_unreadable(path)
    renew.main([str(tmp_path / "e"), "--model_fn", "test_renew:model_fn", "--params", "{}"])
    new = capsys.readouterr().out.strip()
    assert os.path.dirname(new) == str(tmp_path / "e") and new > path
    after = est.load_exported(new)
    for name, value in after(X).items():  # the key is in the weights, so random numbers are the same
        np.testing.assert_array_equal(value, want[name])
    assert after.metadata == before.metadata and after.metadata["global_step"] == 3
    assert read(new, "assets.extra/a/words.txt") == "cat" and read(new, "README.md") == read(path, "README.md")


def test_other_weights_than_those_of_the_model_fn_are_named_in_one_error(estimator, tmp_path):
    def other_fn(features, labels, mode):
        est.get_variable("v", ())
        y = features["x"][0] @ est.get_variable("w", (3, 4))
        return est.EstimatorSpec(mode, predictions=y)

    path = estimator.export_model(tmp_path, X, platforms="cpu")
    message = (
        f"The weights of the exported model at {path} do not fit the model_fn; missing: ['variables/v'], "
        "unexpected: ['variables/bias', 'variables/unused'], mismatched: ['variables/w, float32[3, 2] there, "
        "float32[3, 4] in the model']. Give the model_fn and the params that were exported."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        renew.renew_export(path, other_fn)
    assert os.listdir(tmp_path) == [os.path.basename(path)]


def test_an_export_without_its_arguments_is_refused(estimator, tmp_path):
    path = estimator.export_model(tmp_path, X, platforms="cpu")

    def change(value):
        metadata = json.loads(read(path, "metadata.json"))
        metadata["arguments"] = value
        with open(os.path.join(path, "metadata.json"), "w") as file:
            json.dump(metadata, file)
        ExportFolder(path).seal()

    change(None)
    with pytest.raises(ValueError, match="does not have the arguments of its export in metadata.json. Export it from"):
        renew.renew_export(path, model_fn)
    for value in ({}, {"features": {"array": ["float32", -1]}, "batch_size": None, "outputs": None}):
        change(value)
        with pytest.raises(ValueError, match=r"is damaged: the arguments of its export are not what was written \("):
            renew.renew_export(path, model_fn)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model_fn", "test_renew"], "write package.module:function; got 'test_renew'"),
        (["--model_fn", "test_renew:X"], "the module test_renew has no function 'X'"),
        (["--model_fn", "test_renew:model_fn", "--params", "[1]"], r"write a dict in JSON; got '\[1\]'"),
    ],
)
def test_arguments_are_checked(tmp_path, arguments, message, capsys):
    with pytest.raises(SystemExit):
        renew.main([str(tmp_path), *arguments])
    assert re.search(message, capsys.readouterr().err)


def test_the_containers_of_features_are_kept():
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), {"array": [X, (np.ones(3),), ()]})
    read_back = read_features(json.loads(json.dumps(describe_features(structs))))
    assert read_back == structs and jax.tree.structure(read_back) == jax.tree.structure(structs)
