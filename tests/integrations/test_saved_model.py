"""A SavedModel computes what the exported model beside it does, in TensorFlow."""

import json
import keyword
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import estimator as est
from estimator.renew import renew_export
from replicate import TowerOptimizer

tf = pytest.importorskip("tensorflow")

RNG = np.random.default_rng(0)
NAMES = ["cat", "dog"]


def batch(rows):
    ids = RNG.integers(0, 5, size=(rows,)).astype(np.int32)
    return {"x": RNG.normal(size=(rows, 3)).astype(np.float32), "more": [ids, {"a b/c": np.ones((rows, 2), np.int8)}]}


def model_fn(features, labels, mode):
    """Has a bfloat16 variable, one that is a tree, a random key, and an output of each kind."""
    w = est.get_variable("w", (3, 4), jnp.bfloat16)
    net = est.get_variable("net", lambda key: {"v": jax.random.normal(key, (4, 2)), "b": jnp.ones(2)})
    ids, rest = features["more"]
    table = est.get_variable("table", (5, 2))
    logits = (features["x"].astype(jnp.bfloat16) @ w).astype(jnp.float32) @ net["v"] + net["b"] + table[ids]
    logits = logits + rest["a b/c"].astype(jnp.float32)
    if mode == est.ModeKeys.PREDICT:
        outputs = {
            "serving_default": est.export.PredictOutput({"logits": logits, "nested": {"class": logits.argmax(-1)}}),
            "scores/named": est.export.ClassificationOutput(jax.nn.softmax(logits), NAMES),
            "classes": est.export.ClassificationOutput(classes=logits.argmax(-1)),
            "value": est.export.RegressionOutput(logits[:, 0] + jax.random.uniform(est.make_rng(), (2,))[0]),
        }
        return est.EstimatorSpec(mode, predictions={"logits": logits}, export_outputs=outputs)
    est.record("largest", logits.max(-1))
    loss = jnp.mean((logits[:, 0] - labels) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("model")
    return est.Estimator(model_fn, model_dir).train(lambda: [(batch(2), np.ones(2, np.float32))])


def call(loaded, signature, features):
    """What a signature of a SavedModel returns for a batch, by numpy."""
    names = ["features"] if hasattr(features, "shape") else ["more_0", "more_1_a_b_c", "x"]
    inputs = {name: tf.constant(x) for name, x in zip(names, jax.tree.leaves(features), strict=True)}
    return {name: value.numpy() for name, value in loaded.signatures[signature](**inputs).items()}


def check_same(path, features, signatures=("serving_default",)):
    """Compares signatures in TensorFlow with those of `est.load_exported`."""
    model, loaded = est.load_exported(path), tf.saved_model.load(path)
    assert set(loaded.signatures) == set(model.signatures)
    for signature in signatures:
        got, want = call(loaded, signature, features), model(features, signature)
        assert got.keys() == want.keys()
        for name, value in got.items():
            if value.dtype == object:
                assert value.shape == got["scores"].shape
                assert value.astype(str).tolist() == np.broadcast_to(want[name], value.shape).tolist()
            else:
                assert value.dtype == want[name].dtype
                np.testing.assert_allclose(value, want[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_all_signatures_compute_in_tensorflow_what_they_do_in_jax_for_any_batch_size(estimator, tmp_path):
    (tmp_path / "words.txt").write_text("cat\ndog\n")
    assets = {"vocabulary/words.txt": tmp_path / "words.txt"}
    path = estimator.export_model(tmp_path / "exports", batch(2), format="saved_model", assets_extra=assets)
    check_same(path, batch(7), ["serving_default", "scores/named", "classes", "value"])
    check_same(path, batch(1))
    with open(os.path.join(path, "assets.extra", "vocabulary", "words.txt")) as file:
        assert file.read() == "cat\ndog\n"
    check_same(renew_export(path, model_fn), batch(1))  # a SavedModel again


@pytest.mark.slow
def test_one_batch_size_a_single_array_and_a_part_of_the_model(tmp_path):
    def small_fn(features, labels, mode):
        y = est.layers.dense(features, 2)
        est.record("first", est.layers.dense(features, 3, name="unused_else")[:, 0])
        loss = None if mode == est.ModeKeys.PREDICT else jnp.mean(y)
        train_op = loss is not None and est.Optimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, predictions=y, loss=loss, train_op=train_op or None)

    x = np.ones((4, 3), np.float32)
    small = est.Estimator(small_fn, tmp_path / "model").train(lambda: [(x, None)])
    path = small.export_model(tmp_path / "one", x, format="saved_model", batch_size=4, platforms="cpu")
    check_same(path, x)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"f32\[4,3\], argument shape: f32\[2,3\]"):
        call(tf.saved_model.load(path), "serving_default", x[:2])
    part = small.export_model(tmp_path / "part", x, format="saved_model", outputs=["first"])
    check_same(part, x[:3])
    assert len(tf.saved_model.load(part).weights) == 2


@pytest.mark.slow
def test_an_exporter_writes_saved_models_and_keeps_the_newest(estimator, tmp_path):
    exporter = est.LatestExporter("latest", batch(2), exports_to_keep=1, format="saved_model")
    paths = [exporter.export(estimator, str(tmp_path / "e"), None, {"loss": loss}, False) for loss in (1.0, 2.0)]
    assert [os.path.exists(os.path.join(path, "saved_model.pb")) for path in paths] == [False, True]
    with open(os.path.join(paths[1], "checksums.json")) as file:
        assert {"saved_model.pb", "variables/variables.index", "weights.npz"} <= json.load(file)["crc32c"].keys()


def export_named(tmp_path, names):
    """An export of a model of features with these names, and an example of them."""

    def named_fn(features, labels, mode):
        y = sum((i + 1) * features[name] for i, name in enumerate(names)) * est.get_variable("w", ())
        return est.EstimatorSpec(mode, predictions={"y": y, "class": y}, loss=jnp.mean(y), train_op=est.group())

    x = {name: np.full(2, i, np.float32) for i, name in enumerate(names)}
    estimator = est.Estimator(named_fn, tmp_path / "model").train(lambda: [(x, None)])
    return estimator.export_model(tmp_path / "exports", x, format="saved_model"), x


@pytest.mark.slow
def test_features_may_have_names_that_are_words_of_python(tmp_path):
    reserved = [*keyword.kwlist, "self"]
    path, x = export_named(tmp_path, [*reserved, "type", "args", "Age"])
    served = tf.saved_model.load(path).signatures["serving_default"]
    inputs = {f"features_{name}" if name in reserved else name: tf.constant(value) for name, value in x.items()}
    assert served.structured_input_signature[1].keys() == inputs.keys()
    want = est.load_exported(path)(x)
    for name, value in served(**inputs).items():
        np.testing.assert_allclose(value, want[name], rtol=1e-6)


@pytest.mark.parametrize(
    "names, one", [(("a b", "a/b"), "a_b"), (("B", "b"), "b"), (("class", "features_class"), "features_class")]
)
def test_features_whose_names_become_one_are_refused(tmp_path, names, one):
    with pytest.raises(ValueError, match=f"features have the name '{one}' in a SavedModel, .*: '{names[1]}' is the"):
        export_named(tmp_path, names)
    assert not (tmp_path / "exports").exists()


def test_an_unknown_format_is_refused(estimator, tmp_path):
    with pytest.raises(ValueError, match='format of `export_model` must be "jax" or "saved_model"; got \'onnx\'.'):
        estimator.export_model(tmp_path / "exports", batch(2), format="onnx")
    assert not (tmp_path / "exports").exists()


def test_without_tensorflow_the_error_says_what_to_install(estimator, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[saved_model\]'") as info:
        estimator.export_model(tmp_path / "exports", batch(2), format="saved_model")
    assert isinstance(info.value.__cause__, ModuleNotFoundError)
    assert not (tmp_path / "exports").exists()
