"""What export promises: the folder computes what `predict` does, for any batch size, without model code."""

import errno
import json
import os
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from testing.exports import readme_code, run_readme
from testing.model_fns import predicting, regressing
from testing.towers import assert_close, cpus

import estimator as est
from replicate import TOWER_AXIS, TowerOptimizer, VariableDistribution, replicate_model_fn

RNG = np.random.default_rng(0)
ANY = {"x": np.ones((2, 3), np.float32)}


def batch(rows):
    return {"x": RNG.normal(size=(rows, 3)).astype(np.float32)}


def model_fn(features, labels, mode):
    """Has a bfloat16 variable, one that is a tree, and an output of each kind."""
    w = est.get_variable("w", (3, 4), jnp.bfloat16)
    net = est.get_variable("net", lambda key: {"v": jax.random.normal(key, (4, 2)), "b": jnp.ones(2)})
    logits = (features["x"].astype(jnp.bfloat16) @ w).astype(jnp.float32) @ net["v"] + net["b"]
    if mode == est.ModeKeys.PREDICT:
        outputs = {
            "serving_default": est.export.PredictOutput({"logits": logits, "nested": {"class": logits.argmax(-1)}}),
            "scores/named": est.export.ClassificationOutput(jax.nn.softmax(logits), ["cat", "dog"]),
            "classes": est.export.ClassificationOutput(classes=logits.argmax(-1)),
            "value": est.export.RegressionOutput(logits[:, 0]),
        }
        return est.EstimatorSpec(mode, predictions={"logits": logits, "hot": logits > 0}, export_outputs=outputs)
    loss = jnp.mean((logits[:, 0] - labels) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))


def trained_at(model_dir, model_fn, features=ANY):
    estimator = est.Estimator(model_fn, str(model_dir), est.RunConfig(save_checkpoints_steps=1))
    return estimator.train(lambda: [(features, np.ones(2, np.float32))] * 2)


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    return trained_at(tmp_path_factory.mktemp("model"), model_fn)


@pytest.fixture(scope="module")
def small(estimator):
    """What is exported in no time."""
    return est.Estimator(predicting(lambda features: features["x"]), estimator.model_dir)


@pytest.fixture(scope="module")
def exported(estimator, tmp_path_factory):
    return estimator.export_model(tmp_path_factory.mktemp("exported"), ANY)


@pytest.fixture(scope="module")
def model(exported):
    return est.load_exported(exported)


def predicted(estimator, features):
    (predictions,) = estimator.predict(lambda: features, yield_single_examples=False)
    return predictions


def assert_exports_what_it_predicts(estimator, base, sizes=(7,)):
    path = estimator.export_model(base, ANY)
    loaded = est.load_exported(path)
    for features in map(batch, sizes):
        want = predicted(estimator, features)
        got = loaded(features)
        assert all(isinstance(value, np.ndarray) for value in got.values())
        assert_close({name: got[name] for name in want}, want)
    return path


def program_of(path, signature="serving_default"):
    with open(os.path.join(path, f"{signature}.jaxexport"), "rb") as file:
        return export.deserialize(bytearray(file.read()))


def plain_predictions(model_fn):
    """The model with its predictions as the only outputs."""

    def predicting(features, labels, mode):
        spec = model_fn(features, labels, mode)
        return est.EstimatorSpec(mode, predictions=spec.predictions) if mode == est.ModeKeys.PREDICT else spec

    return predicting


@pytest.mark.slow
@pytest.mark.covers("9 build_raw_serving_input_receiver_fn")
def test_batches_of_any_size_give_what_predict_gives(estimator, tmp_path):
    plain = est.Estimator(plain_predictions(model_fn), estimator.model_dir)
    assert_exports_what_it_predicts(plain, tmp_path, sizes=(1, 7))


@pytest.mark.quick
@pytest.mark.covers("9 replicated and wrapped model_fns")
def test_a_replicated_model_fn_is_exported_for_one_device(estimator, tmp_path):
    sharded = VariableDistribution.SHARDED
    replicated = replicate_model_fn(plain_predictions(model_fn), devices=cpus(4), variable_distribution=sharded)
    path = assert_exports_what_it_predicts(est.Estimator(replicated, estimator.model_dir), tmp_path)
    assert program_of(path).nr_devices == 1
    want = predicted(estimator, features := batch(7))
    assert_close(est.load_exported(path)(features), want)


@pytest.mark.quick
@pytest.mark.covers("9 replicated and wrapped model_fns")
def test_wrapped_estimators_are_exported_too(estimator, tmp_path):
    def metric_fn(predictions):
        return {"mean": est.metrics.mean(predictions["logits"])}

    replicated = est.Estimator(replicate_model_fn(plain_predictions(model_fn), devices=cpus(2)), estimator.model_dir)
    wrapped = est.forward_features(est.add_metrics(replicated, metric_fn), "x")
    path = assert_exports_what_it_predicts(wrapped, tmp_path)
    assert sorted(est.load_exported(path)(ANY)) == ["hot", "logits", "x"]


@pytest.mark.slow
def test_a_model_in_segments_is_exported_for_any_number_of_rows(tmp_path):
    def predict(features):
        w = est.get_variable("w", (3, 4))
        return jnp.tanh(jnp.tanh(features["x"] @ w) @ w.T)[:, 0]

    segments = replicate_model_fn(regressing(predict), devices=cpus(2), tower_transform=est.checkpoint_segments)
    estimator = trained_at(tmp_path / "model", segments)
    exported = est.load_exported(estimator.export_model(tmp_path / "exported", ANY))
    for features in map(batch, (1, 5)):
        np.testing.assert_allclose(exported(features)["output"], predicted(estimator, features), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.covers("9 replicated and wrapped model_fns")
def test_a_model_that_names_the_tower_axis_is_exported(tmp_path):
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train, axis_name=TOWER_AXIS)(nn.Dense(4)(x))
            return nn.Dense(1)(x)[:, 0]

    def model_fn(features, labels, mode):
        net, x, train = Network(), features["x"], mode == est.ModeKeys.TRAIN
        variables = {
            name: est.get_variable(name, lambda key, n=name: net.init(key, x, False)[n], trainable=name == "params")
            for name in ("params", "batch_stats")
        }
        y, updates = net.apply(variables, x, train, mutable=["batch_stats"])
        if mode == est.ModeKeys.PREDICT:
            y = y + jax.lax.pmean(variables["batch_stats"]["BatchNorm_0"]["mean"], TOWER_AXIS).sum()
            return est.EstimatorSpec(mode, predictions={"y": y})
        est.assign("batch_stats", updates["batch_stats"])
        loss = est.losses.mean_squared_error(labels, y)
        return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.1)).minimize(loss))

    towers = trained_at(tmp_path / "model", replicate_model_fn(model_fn, devices=cpus(2)))
    assert_exports_what_it_predicts(towers, tmp_path / "exported")


@pytest.mark.slow
def test_random_keys_match_predict(tmp_path):
    def predict(features):
        chance = est.get_variable("key", lambda key: key, trainable=False)
        noise = jax.random.normal(est.make_rng(), (3,)) + jax.random.normal(chance, (3,))
        return (features["x"] + noise + est.get_variable("w", (3,)))[:, 0]

    trained = trained_at(tmp_path / "model", regressing(predict))
    loaded, features = est.load_exported(trained.export_model(tmp_path / "exported", ANY)), batch(7)
    assert_close(loaded(features)["output"], predicted(trained, features))


@pytest.mark.covers("9 ServingInputReceiver")
def test_features_may_be_structs_in_any_nesting(estimator, tmp_path):
    def predict(features):
        (a, tree), nothing = features
        assert nothing is None
        return a + tree["b"][:, 0].astype(jnp.int32)

    nested = est.Estimator(predicting(predict), estimator.model_dir)
    structs = ([jax.ShapeDtypeStruct((2,), np.int32), {"b": jax.ShapeDtypeStruct((2, 1), jnp.bfloat16)}], None)
    loaded = est.load_exported(nested.export_model(tmp_path, structs))
    got = loaded(([np.arange(3), {"b": np.ones((3, 1), jnp.bfloat16)}], None))
    assert_close(got, {"output": np.array([1, 2, 3], np.int32)})
    assert repr(loaded.features).count("b,") == 2


@pytest.mark.slow
@pytest.mark.covers("9 signatures", "9 PredictOutput", "9 ClassificationOutput")
def test_signatures_have_the_outputs_of_their_kind(model, estimator):
    features = batch(7)
    logits = predicted(estimator, features)["logits"]
    assert sorted(model.signatures) == ["classes", "scores/named", "serving_default", "value"]
    assert_close(model(features), {"logits": logits, "nested/class": logits.argmax(-1).astype(np.int32)})
    scores = model(features, "scores/named")
    assert scores["classes"].tolist() == ["cat", "dog"]
    np.testing.assert_allclose(scores["scores"], jax.nn.softmax(logits), rtol=1e-5)
    assert_close(model(features, signature="classes"), {"classes": logits.argmax(-1).astype(np.int32)})
    assert_close(model(features, "value"), {"value": logits[:, 0]})


@pytest.mark.covers("9 ClassificationOutput")
def test_the_folder_says_what_it_holds(model, exported):
    with open(os.path.join(exported, "metadata.json"), encoding="utf-8") as file:
        metadata = json.load(file)
    assert metadata == model.metadata
    assert metadata["global_step"] == 2
    assert metadata["features"] == {"x": {"shape": ["b", 3], "dtype": "float32"}}
    assert metadata["platforms"] == ["cpu", "cuda"]
    assert metadata["versions"]["jax"] == jax.__version__
    assert metadata["weights"]["variables/w"] == {"shape": [3, 4], "dtype": "bfloat16"}
    named = metadata["signatures"]["scores/named"]
    assert named["outputs"] == {"scores": {"shape": ["b", 2], "dtype": "float32"}}
    assert (named["class_names"], named["file"]) == (["cat", "dog"], "scores%2Fnamed.jaxexport")
    assert {entry["file"] for entry in metadata["signatures"].values()} < set(os.listdir(exported))


@pytest.mark.covers("9 CPU and GPU in one file")
def test_weights_are_arguments_in_a_file_of_numpy(exported, estimator):
    with np.load(os.path.join(exported, "weights.npz"), allow_pickle=False) as weights:
        names = ["variables/w", "variables/net/v", "variables/net/b", "global_step", "key"]
        assert sorted(weights) == sorted(names)
        w = weights["variables/w"].view(jnp.bfloat16)
        np.testing.assert_array_equal(w, np.asarray(estimator.get_variable_value("w")))
        program = program_of(exported)
        (arguments, _), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
        assert {name: x.shape for name, x in arguments.items()} == {name: weights[name].shape for name in names}


@pytest.mark.covers("9 CPU and GPU in one file")
def test_one_file_is_lowered_for_cpu_and_gpu(exported, small, tmp_path):
    assert program_of(exported).platforms == ("cpu", "cuda")
    path = small.export_model(tmp_path, ANY, platforms="tpu")
    assert program_of(path).platforms == ("tpu",)
    message = r"was exported for tpu, but jax runs on cpu here\. Export it with `platforms="
    with pytest.raises(ValueError, match=message):
        est.load_exported(path)


@pytest.mark.covers("9 loaded with jax and numpy alone")
def test_the_readme_loads_the_folder_without_this_library(exported, estimator, tmp_path):
    assert len([line for line in readme_code(exported).splitlines() if line]) <= 12
    features, result = batch(7), str(tmp_path / "result.npz")
    np.savez(tmp_path / "features.npz", **features)
    then = f"""
assert outputs["logits"].shape == (1, 2)
np.savez({result!r}, **predict(weights, dict(np.load({str(tmp_path / "features.npz")!r}))))
try:
    import estimator
except ImportError:
    print("not here")
"""
    assert run_readme(exported, then) == "not here\n"
    with np.load(result) as got:
        np.testing.assert_allclose(got["logits"], predicted(estimator, features)["logits"], rtol=2e-5)


def test_each_batch_size_is_compiled_once(model, compilations):
    model(batch(3))
    before = len(compilations)
    model(batch(3))
    assert len(compilations) == before
    model(batch(4))
    assert len(compilations) > before


@pytest.mark.covers("1.2 export_saved_model", "9 dir")
def test_an_export_is_called_by_the_time_or_the_next_free_number(small, tmp_path, monkeypatch):
    start = int(time.time())
    first = small.export_model(tmp_path, ANY)
    assert os.path.dirname(first) == str(tmp_path)
    assert start <= int(os.path.basename(first)) <= time.time()
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    monkeypatch.setattr(time, "sleep", None)
    paths = [small.export_model(tmp_path / "b", ANY) for _ in range(2)]
    assert [os.path.basename(path) for path in paths] == ["1234", "1235"]
    (tmp_path / "b" / "1236").write_text("in the way")
    assert small.export_model(str(tmp_path / "b"), ANY) == str(tmp_path / "b" / "1237")
    assert not [name for name in os.listdir(tmp_path / "b") if name.startswith("temp")]


@pytest.mark.covers("9 dir")
def test_the_newest_export_of_a_directory_is_loaded(small, tmp_path):
    older, newer = (small.export_model(tmp_path, ANY) for _ in range(2))
    (tmp_path / "temp-1").mkdir()
    (tmp_path / "99999999999").mkdir()
    assert older < newer == est.load_exported(tmp_path).path


def test_an_export_is_on_the_disk_before_it_has_its_name(small, tmp_path, monkeypatch):
    happened, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: happened.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(os, "rename", lambda old, new: happened.append("renamed") or rename(old, new))
    path = small.export_model(tmp_path, ANY)
    before = [os.path.basename(name) for name in happened[: happened.index("renamed")]]
    assert {*os.listdir(path)} <= {*before} and happened[-1] == str(tmp_path)


@pytest.mark.covers("9 dir")
def test_an_export_that_fails_leaves_nothing_behind(small, tmp_path, monkeypatch):
    word = tmp_path / "word"
    word.write_text("a")
    kept = small.export_model(tmp_path / "kept", ANY)
    for base in (tmp_path / "kept", tmp_path / "new"):
        with pytest.raises(OSError):  # after programs and weights were written
            small.export_model(base, ANY, assets_extra={"a": word, "a/b": word})
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                small.export_model(base, ANY)
        with monkeypatch.context() as patch:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            patch.setattr(np, "savez", mock.Mock(side_effect=full))
            with pytest.raises(OSError, match="cannot write the model into .*has left nothing there .*No space left"):
                small.export_model(base, ANY)
    assert os.listdir(tmp_path / "kept") == [os.path.basename(kept)]
    assert not (tmp_path / "new").exists()


@pytest.mark.covers("9 assets_extra")
def test_assets_are_copied(small, tmp_path):
    (tmp_path / "words").write_text("cat dog")
    path = small.export_model(tmp_path, ANY, assets_extra={"a/vocabulary.txt": tmp_path / "words"})
    with open(os.path.join(path, "assets.extra", "a", "vocabulary.txt"), encoding="utf-8") as file:
        assert file.read() == "cat dog"


@pytest.mark.covers("9 checkpoint")
def test_a_given_checkpoint_is_exported(small, tmp_path):
    path = small.export_model(tmp_path, ANY, checkpoint_path=os.path.join(small.model_dir, "ckpt-1"))
    assert est.load_exported(path).metadata["global_step"] == 1
