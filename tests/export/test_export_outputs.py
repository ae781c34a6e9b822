"""A part of a model is exported with the operations, weights and features that it needs, and no more."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from testing.estimators import X
from testing.exports import readme_code
from testing.model_fns import predicting
from testing.towers import assert_close, cpus

import estimator as est
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn

RNG = np.random.default_rng(0)


def batch(rows):
    return {
        "side": [RNG.normal(size=(rows, 2)).astype(np.float32), RNG.normal(size=(rows,)).astype(np.float32)],
        "unused": np.ones((rows, 1), np.int32),
        "x": RNG.normal(size=(rows, 3)).astype(np.float32),
    }


def model_fn(features, labels, mode):
    """x and side[1] -> hidden -> embedding -> logits, and a scan over side[0]: a product each, six variables."""
    hidden = jnp.tanh(features["x"] @ est.get_variable("first", (3, 5)) + features["side"][1][:, None])
    with est.variable_scope("net"):
        embedding = jax.nn.relu(hidden @ est.get_variable("second", (5, 4)))
        est.record("embedding", embedding)
    logits = embedding @ est.get_variable("third", (4, 2))
    steps = est.get_variable("steps", (3, 2, 2))
    walked, _ = jax.lax.scan(lambda x, w: (x @ w, None), features["side"][0], steps)
    est.record("mean", walked.mean())
    scale = est.get_variable("scale", (2, 2), jnp.bfloat16).astype(jnp.float32)
    est.record("noise", features["x"][:, :2] + jax.random.normal(est.make_rng(), (2,)) * scale[0])
    est.record("prior", jnp.broadcast_to(est.get_variable("prior", (2, 2))[0], logits.shape))
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"logits": logits, "walk": {"end": walked}})
    loss = jnp.mean((logits[:, 0] - labels) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    estimator = est.Estimator(model_fn, str(tmp_path_factory.mktemp("model")))
    return estimator.train(lambda: [(batch(2), np.ones(2, np.float32))])


class Recorded(est.Hook):
    """Keeps what was recorded."""

    def before_run(self, context):
        return ["net/embedding", "mean", "noise", "prior"]

    def after_run(self, context, values):
        self.values = dict(zip(self.before_run(context), values.results, strict=True))


def wanted(estimator, features):
    """What `predict` computes, by the names of outputs."""
    hook = Recorded()
    (prediction,) = estimator.predict(lambda: features, hooks=[hook], yield_single_examples=False)
    return {"logits": prediction["logits"], "walk/end": prediction["walk"]["end"], **hook.values}


def products(path):
    with open(os.path.join(path, "serving_default.jaxexport"), "rb") as file:
        return export.deserialize(bytearray(file.read())).mlir_module().count("stablehlo.dot_general")


def weights_of(path):
    with np.load(os.path.join(path, "weights.npz")) as weights:
        return sorted(weights)


def assert_outputs_are(path, want, features, rtol=2e-5):
    got = est.load_exported(path)(features)
    for name, value in got.items():
        assert np.shape(value) == np.shape(want[name])
        np.testing.assert_allclose(value, want[name], rtol=rtol, atol=1e-6)
    return sorted(got)


def for_embedding(features):
    return {"x": features["x"], "side": [None, features["side"][1]]}


def for_walk(features):
    return {"side": [features["side"][0], None]}


@pytest.mark.slow
def test_all_outputs_need_all(estimator, tmp_path):
    path = estimator.export_model(tmp_path, batch(2), platforms="cpu")
    assert products(path) == 4
    assert len(weights_of(path)) == 6 + 2  # the global step and the key


@pytest.mark.slow
@pytest.mark.parametrize(
    "outputs, count, variables, part",
    [
        ("net/embedding", 2, ["first", "net/second"], for_embedding),
        (["logits"], 3, ["first", "net/second", "third"], for_embedding),
        (("walk/end", "mean"), 1, ["steps"], for_walk),
        (["noise"], 0, ["scale"], lambda features: {"x": features["x"]}),
        (["prior"], 0, ["prior"], for_walk),  # only for its batch size
    ],
    ids=["embedding", "logits", "walk", "noise", "prior"],
)
def test_outputs_have_the_operations_weights_and_features_they_need(
    estimator, tmp_path, outputs, count, variables, part
):
    path = estimator.export_model(tmp_path, batch(2), platforms="cpu", outputs=outputs)
    model = est.load_exported(path)
    assert products(path) == count
    weights = [f"variables/{name}" for name in variables] + ["global_step", "key"] * ("noise" in outputs)
    assert weights_of(path) == sorted(model.metadata["weights"]) == sorted(weights)
    features = batch(7)
    mine = part(features)
    assert jax.tree.structure(model.features) == jax.tree.structure(mine)
    got = assert_outputs_are(path, wanted(estimator, features), mine)
    assert got == sorted([outputs] if isinstance(outputs, str) else outputs)
    with pytest.raises(ValueError, match=r"The exported model takes the features .*; missing: \[\], extra: .*'unused'"):
        model(features)
    described = model.metadata["signatures"]["serving_default"]["outputs"]
    assert described.get("mean", {"shape": []})["shape"] == []
    assert all(x["shape"][0] == "b" for name, x in described.items() if name != "mean")


@pytest.mark.slow
def test_a_part_of_a_replicated_model_fn_is_exported_for_one_device(estimator, tmp_path):
    placed = VariableDistribution.SHARED_ROUND_ROBIN
    replicated = replicate_model_fn(model_fn, devices=cpus(4), variable_distribution=placed)
    towers = est.Estimator(replicated, estimator.model_dir)
    path = towers.export_model(tmp_path, batch(4), platforms="cpu", outputs=["net/embedding", "mean"])
    assert (products(path), weights_of(path)) == (3, [f"variables/{n}" for n in ("first", "net/second", "steps")])
    features = batch(7)
    used = {"side": features["side"], "x": features["x"]}
    assert assert_outputs_are(path, wanted(estimator, features), used) == ["mean", "net/embedding"]


def test_one_batch_size_is_enough(estimator, tmp_path):
    path = estimator.export_model(tmp_path, batch(2), batch_size=3, outputs=["net/embedding"])
    features = batch(3)
    assert_outputs_are(path, wanted(estimator, features), for_embedding(features))
    with pytest.raises(ValueError, match=r"'side/1' must be float32\[3\]; got float32\[2\]"):
        est.load_exported(path)(for_embedding(batch(2)))


def test_the_readme_loads_a_part(estimator, tmp_path, monkeypatch):
    path = estimator.export_model(tmp_path, batch(2), outputs=["net/embedding"])
    code = readme_code(path)
    assert "unused" not in code and '[None, np.zeros((1,), "float32")]' in code
    monkeypatch.chdir(path)
    exec(code, names := {})
    assert names["outputs"]["net/embedding"].shape == (1, 4) and len(names["weights"]) == 2


def exported(estimator, base, predict, **options):
    """Exports what `predict(features)` returns, with the variables of the Estimator."""
    return est.Estimator(predicting(predict), estimator.model_dir).export_model(base, X, **options)


def test_features_and_predictions_may_be_single_arrays_and_no_weights_be_needed(estimator, tmp_path):
    def predict(features):
        est.record("first", features @ est.get_variable("third", (4, 2))[:2])
        return features * 2

    path = exported(estimator, tmp_path, predict, outputs="output")
    assert weights_of(path) == []
    assert_close(est.load_exported(path)(X), {"output": X * 2})


@pytest.mark.parametrize("outputs", [[], 3, ["a", 1], {"a": 1}], ids=str)
def test_outputs_must_be_names(estimator, tmp_path, outputs):
    message = "outputs of `export_model` must name at least one recorded value or prediction, .*; got "
    with pytest.raises(ValueError, match=message + re.escape(repr(outputs))):
        estimator.export_model(tmp_path / "base", batch(2), outputs=outputs)
    assert not (tmp_path / "base").exists()


def record_some(features):
    est.record("rows", features)
    est.record("weights", jnp.ones((4, 2)))
    est.summary.histogram("histogram", features)
    est.summary.image("image", jnp.zeros((len(X), 2, 2, 1)))
    return {"rows": features, "other": features, "table": {"a": jnp.ones((3, 2))}}


@pytest.mark.parametrize(
    "outputs, match",
    [
        (
            ["other", "embeding", "histogram", "image"],
            r"`export_model` got outputs=.*, but there is no \['embeding', 'histogram', 'image'\]\. "
            r"Recorded are \['rows', 'weights'\], the predictions are \['other', 'rows', 'table/a'\]\.",
        ),
        ("rows", r"\['rows'\] is the name of a recorded value and of a prediction\. Rename one of them\. Recorded are"),
        ("weights", r"got 'weights' in outputs, which has the shape \(4, 2\) for a batch of b examples\. Values recor"),
        (["table/a"], r"got 'table/a' in outputs, which has the shape \(3, 2\) for a batch of b examples"),
    ],
    ids=["unknown", "both", "recorded", "predicted"],
)
def test_outputs_that_there_are_not_are_refused(estimator, tmp_path, outputs, match):
    with pytest.raises(ValueError, match=match):
        exported(estimator, tmp_path / "base", record_some, outputs=outputs)
    assert not (tmp_path / "base").exists()
