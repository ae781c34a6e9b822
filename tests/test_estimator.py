"""What the verbs share: state between calls, input_fn, model_dir, config, variables by name."""

import copy
import dataclasses
import inspect
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.estimators import Linear, X, Y, endless, make, saved_steps, step_of, times
from testing.model_fns import minimizing

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.storage import _files

# What stays alive between calls.


def count_restores(monkeypatch):
    restored = []
    restore = Checkpoint.restore

    def counted(checkpoint, *args, **kwargs):
        restored.append(os.path.basename(checkpoint.path))
        return restore(checkpoint, *args, **kwargs)

    monkeypatch.setattr(Checkpoint, "restore", counted)
    return restored


@pytest.mark.covers("1.4 cost", "13 1 rebuilt and reloaded at every call")
def test_ten_evaluations_trace_once_compile_once_and_read_once(tmp_path, monkeypatch, caplog):
    make(tmp_path).train(endless, steps=2)
    restored = count_restores(monkeypatch)
    model_fn = Linear()
    estimator = make(tmp_path, model_fn)
    first = estimator.evaluate(times(40))
    traces = len(model_fn.modes)
    assert traces == 2  # an abstract one for the structure, and the step of all programs
    with jax.log_compiles():
        for _ in range(9):
            assert estimator.evaluate(times(40)) == first
    assert len(model_fn.modes) == traces
    assert restored == ["ckpt-2"]
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_training_again_reads_nothing_and_an_older_checkpoint_compiles_nothing_again(tmp_path, monkeypatch, caplog):
    restored = count_restores(monkeypatch)
    model_fn = Linear()
    estimator = make(tmp_path, model_fn, save_checkpoints_steps=2).train(endless, steps=2)
    assert len(model_fn.modes) == 2  # as in evaluation
    estimator.evaluate(times(1))
    traces = len(model_fn.modes)
    with jax.log_compiles():
        estimator.train(endless, steps=2).train(endless, max_steps=6)
        assert restored == []
        estimator.evaluate(times(1), checkpoint_path=str(tmp_path / "ckpt-2"))
        estimator.train(endless, steps=1)
        estimator.evaluate(times(1))
    assert len(model_fn.modes) == traces
    assert not [r for r in caplog.records if re.search(r"Compiling (jit\()?(one|several|step)", r.getMessage())]


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_the_verbs_may_come_in_any_order_and_training_after_an_evaluation_from_disk_has_the_slots(tmp_path):
    estimator = make(tmp_path)
    initial = list(estimator.predict(lambda: X))
    assert [row["y"] for row in initial] == [0, 0, 0, 0]
    first = estimator.evaluate(times(1))
    assert first["global_step"] == 0
    estimator.train(endless, steps=2)
    second = estimator.evaluate(times(1))
    assert second["global_step"] == 2
    assert second["loss"] < first["loss"]
    estimator = make(tmp_path)
    assert estimator.evaluate(times(1)) == second
    estimator.train(endless, steps=2)
    y = np.array([row["y"] for row in estimator.predict(lambda: X)])
    np.testing.assert_allclose(y, (X @ estimator.get_variable_value("w"))[:, 0], rtol=1e-6)
    make(tmp_path / "straight").train(endless, steps=4)
    straight = make(tmp_path / "straight").get_variable_value("w")
    np.testing.assert_array_equal(estimator.get_variable_value("w"), straight)


@pytest.mark.slow
def test_the_newer_checkpoint_of_another_estimator_is_noticed(tmp_path):
    mine, other = make(tmp_path), make(tmp_path)
    mine.train(endless, steps=2)
    assert mine.evaluate(times(1))["global_step"] == 2
    other.train(endless, steps=3)
    results = mine.evaluate(times(1))
    assert results["global_step"] == 5
    assert results == other.evaluate(times(1))
    mine.train(endless, steps=1)
    assert step_of(mine) == 6
    assert [row["y"] for row in mine.predict(lambda: X)] == [row["y"] for row in other.predict(lambda: X)]


def test_a_newer_checkpoint_written_during_training_is_not_taken_for_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "fcntl", None)  # nothing keeps a second training out
    # Where nothing keeps them apart, two runs may also write the checkpoint of the same step at the same time.
    mine, other = (make(tmp_path, save_checkpoints_async=False) for _ in range(2))

    def input_fn():
        yield X, Y
        yield X, Y
        other.train(endless, steps=5)

    mine.train(input_fn)
    assert saved_steps(mine) == [0, 2, 5]
    assert mine.evaluate(times(1)) == other.evaluate(times(1))


# input_fn.


@pytest.mark.covers("1.6 args injected")
def test_input_fn_gets_what_it_names(tmp_path):
    seen = []

    def input_fn(params, mode, config):
        seen.append((mode, params, config))
        return [(X, Y)] * params["n"]

    def model_fn(features, labels, mode, params, config):
        assert params == {"n": 2}
        assert config.seed == 5
        return Linear()(features, labels, mode)

    estimator = make(tmp_path, model_fn, params={"n": 2}, seed=5)
    assert step_of(estimator.train(input_fn)) == 2
    estimator.evaluate(input_fn)
    list(estimator.predict(input_fn))
    assert [mode for mode, _, _ in seen] == ["train", "eval", "infer"]
    assert all(params == {"n": 2} and config is estimator.config for _, params, config in seen)


# The rest of the surface.


@pytest.mark.covers("1.2 get_variable_names", "1.2 get_variable_value", "1.2 latest_checkpoint")
def test_variables_can_be_read_by_name(tmp_path):
    estimator = make(tmp_path)
    for read in (estimator.get_variable_names, lambda: estimator.get_variable_value("w")):
        with pytest.raises(ValueError, match="Could not find trained model in model_dir"):
            read()
    assert estimator.latest_checkpoint() is None
    estimator.train(endless, steps=2)
    names = estimator.get_variable_names()
    assert {"global_step", "w"} <= set(names)
    assert any(name.startswith("optimizer/") and name.endswith("/w") for name in names)
    assert estimator.get_variable_value("w").shape == (2, 1)
    assert isinstance(estimator.get_variable_value("w"), np.ndarray)
    with pytest.raises(ValueError, match=r"has no variable 'v'\. Did you mean one of"):
        estimator.get_variable_value("v")


@pytest.mark.covers("1.2 get_variable_value", "13 20 numpy_input_fn")
def test_several_variables_can_be_read_at_once(tmp_path):
    def loss_of(features, labels):
        with est.variable_scope("dense"):
            kernel, bias = est.get_variable("kernel", (2, 1)), est.get_variable("bias", (1,))
        net = est.get_variable("net", lambda key: {"a": {"b": jnp.ones(2)}})
        return jnp.mean((features * net["a"]["b"] @ kernel + bias - labels) ** 2)

    estimator = make(tmp_path, minimizing(loss_of)).train(endless, steps=1)
    names = ["dense/bias", "dense/kernel", "global_step", "net/a/b"]
    assert estimator.get_variable_names() == names
    one_by_one = {name: estimator.get_variable_value(name) for name in names}
    assert all(isinstance(value, np.ndarray) for value in one_by_one.values())
    for given, expected in [
        ("dense/*", names[:2]),
        ("*", names),
        ("net/*", names[3:]),  # "*" stands for "/" too
        ("dense/[kq]ernel", names[1:2]),
        (["net/a/b", "global_step"], ["net/a/b", "global_step"]),
        (("dense/*", "dense/bias"), names[:2]),
        ([], []),
    ]:
        values = estimator.get_variable_value(given)
        assert list(values) == expected
        for name in expected:
            np.testing.assert_array_equal(values[name], one_by_one[name])
    for given, unknown in [("dense/q*", "dense/q*"), (["global_step", "dense/bais"], "dense/bais"), ("bias", "bias")]:
        with pytest.raises(ValueError, match=rf"has no variable '{re.escape(unknown)}'\. Did you mean one of \['"):
            estimator.get_variable_value(given)


def test_checkpoints_older_than_n_hours_are_kept_and_one_more_after_a_clock_is_set_back(tmp_path, monkeypatch):
    hours = [100, 101, 103, 2, 3, 5, 6]  # by step; one is kept after two hours
    monkeypatch.setattr(Checkpoint, "written_ns", property(lambda self: hours[self.step] * 3.6e12))
    config = {"save_checkpoints_steps": 1, "keep_checkpoint_max": 1, "keep_checkpoint_every_n_hours": 2}
    assert saved_steps(make(tmp_path, **config).train(endless, steps=6)) == [0, 2, 3, 5, 6]


def test_pinning_the_checkpoint_in_use_reads_nothing_again(tmp_path, monkeypatch):
    estimator = make(tmp_path).train(endless, steps=2)
    restored = count_restores(monkeypatch)
    before = estimator.evaluate(times(1))
    Checkpoint(estimator.latest_checkpoint()).pin()
    assert estimator.evaluate(times(1)) == before
    assert restored == []


@pytest.mark.covers("1.1 model_dir")
def test_model_dir_rules(tmp_path, messages):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert est.Estimator(Linear(), a).model_dir == a
    assert est.Estimator(Linear(), pathlib.Path(a)).model_dir == a
    assert est.Estimator(Linear(), config=est.RunConfig(model_dir=b)).model_dir == b
    both = est.Estimator(Linear(), a, est.RunConfig(model_dir=a))
    assert (both.model_dir, both.config.model_dir) == (a, a)
    with pytest.raises(ValueError, match="`model_dir` are set both in constructor and `RunConfig`"):
        est.Estimator(Linear(), a, est.RunConfig(model_dir=b))
    with pytest.raises(ValueError, match="`model_dir` should be a non-empty path, or None .*; got 3"):
        est.Estimator(Linear(), 3)
    assert est.Estimator(Linear(), f"file://{a}").model_dir == a
    for nothing in (None, ""):
        made = est.Estimator(Linear(), nothing).model_dir
        assert os.path.isdir(made)
        assert any(f"Using temporary folder as model directory: {made}" in m for m in messages())


@pytest.mark.covers("1.1 statelessness")
def test_a_moved_model_dir_is_the_same_model(tmp_path):
    before = make(tmp_path / "a").train(endless, steps=2).evaluate(times(1))
    (tmp_path / "a").rename(tmp_path / "b")
    assert make(tmp_path / "b").evaluate(times(1)) == before


@pytest.mark.covers("1.1 params", "1.2 model_dir")
def test_params_are_copied(tmp_path):
    def model_fn(features, mode, params):
        return est.EstimatorSpec(mode, predictions=features * params["by"]["factor"])

    params = {"by": {"factor": 2.0}}
    estimator = make(tmp_path, model_fn, copy.copy(params))
    params["by"]["factor"] = 3.0
    estimator.params["by"]["factor"] = 4.0
    assert estimator.params == {"by": {"factor": 2.0}}
    assert list(estimator.predict(lambda: np.ones(1, np.float32))) == [2]
    assert make(tmp_path).params == {}


@pytest.mark.covers("1.1 model_fn required", "1.2 model_dir", "1.2 eval_dir")
def test_properties(tmp_path):
    model_fn = Linear()
    estimator = make(tmp_path, model_fn, seed=3)
    assert (estimator.eval_dir(), estimator.eval_dir("test")) == (f"{tmp_path}/eval", f"{tmp_path}/eval_test")
    assert estimator.config == est.RunConfig(model_dir=str(tmp_path), seed=3, save_checkpoints_steps=1000)
    assert est.Estimator(model_fn, tmp_path).config == est.RunConfig(model_dir=str(tmp_path))
    assert model_fn.modes == []


@pytest.mark.covers("1.2 export_savedmodel")
@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        ("estimator", "export_savedmodel",
         "no attribute 'export_savedmodel'; here it is `estimator.export_saved_model(export_d"),
        ("estimator", "experimental_export_all_saved_models", "here it is `estimator.export_model(export_dir_base"),
        ("estimator", "trian", "'Estimator' object has no attribute 'trian'"),
        ("layers", "conv3d",
         "'estimator.layers' has no attribute 'conv3d'; here it is a Flax module, or `jax.lax.conv_general"),
        ("losses", "cosine", "'estimator.losses' has no attribute 'cosine'; it has Reduction, absolute_difference,"),
        ("metrics", "f1_score", "'estimator.metrics' has no attribute 'f1_score'; it has Metric, accuracy, auc,"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there_tells_what_is(tmp_path, owner, name, message):
    owners = {"estimator": make(tmp_path), "layers": est.layers, "losses": est.losses, "metrics": est.metrics}
    with pytest.raises(AttributeError, match=re.escape(message)):
        getattr(owners[owner], name)
    assert copy.copy(owners["estimator"]).model_dir == str(tmp_path)


@pytest.mark.covers("1.2 model_dir")
def test_model_fn_has_the_params_already(tmp_path):
    def model_fn(features, mode, params, config):
        params["factor"] *= config.seed  # its own copy
        return est.EstimatorSpec(mode, predictions=features * params["factor"])

    first = make(tmp_path, model_fn, params={"factor": 2.0}, seed=3)
    assert list(inspect.signature(first.model_fn).parameters) == ["features", "labels", "mode", "config"]
    again = make(tmp_path, first.model_fn, seed=5)
    assert [list(e.predict(lambda: X[:1, 1])) for e in (first, again)] == [[6.0], [10.0]]
    assert again.params == {}
    with pytest.raises(ValueError, match="does not include params argument"):
        make(tmp_path, first.model_fn, params={"factor": 4.0})


@pytest.mark.covers("1.1 config")
def test_a_config_of_a_subclass_is_kept_and_logged(tmp_path, messages):
    @dataclasses.dataclass(frozen=True)
    class Mine(est.RunConfig):
        extra: int = 1

    estimator = est.Estimator(Linear(), tmp_path, Mine(extra=2))
    assert estimator.config == Mine(model_dir=str(tmp_path), extra=2)
    assert f"Using config: {estimator.config}" in messages()


@pytest.mark.covers("1.1 model_fn signature inspection")
def test_params_that_the_model_fn_takes_but_nobody_gives_are_a_warning(tmp_path, messages):
    def needs(features, mode, params):
        raise AssertionError

    def offers(features, mode, params=None):
        raise AssertionError

    warning = "The model_fn has a params argument, but params are not passed to Estimator."
    est.Estimator(offers, tmp_path)
    est.Estimator(needs, tmp_path, params={})
    assert warning not in messages()
    est.Estimator(needs, tmp_path)
    assert warning in messages()


@pytest.mark.covers("1.1 model_fn required", "1.1 config")
def test_bad_constructor_arguments(tmp_path):
    with pytest.raises(ValueError, match="model_fn must be provided to Estimator"):
        est.Estimator(None, tmp_path)
    with pytest.raises(ValueError, match="config must be an instance of `RunConfig`; got {}"):
        est.Estimator(Linear(), tmp_path, config={})
    with pytest.raises(ValueError, match="does not include params argument, but params"):
        est.Estimator(Linear(), tmp_path, params={"a": 1})
    with pytest.raises(TypeError, match="model_fn must be a function; got 3"):
        est.Estimator(3, tmp_path)


def test_a_checkpoint_that_does_not_fit_is_one_error_with_every_difference(tmp_path):
    def model(names, shape):
        return minimizing(lambda x, y: sum(jnp.sum(est.get_variable(name, shape)) for name in names))

    make(tmp_path, model(["a", "b", "c"], (2,))).train(endless, steps=1)
    other = make(tmp_path, model(["b", "c", "d", "e"], (3,)))
    with pytest.raises(ValueError, match="are not those of the model") as raised:
        other.train(endless, steps=1)
    text = str(raised.value)
    assert str(tmp_path / "ckpt-1") in text
    for line in (
        "unexpected: a, float32[2] in the checkpoint",
        "mismatched: b, float32[2] in the checkpoint, float32[3] in the model",
        "mismatched: c, float32[2] in the checkpoint, float32[3] in the model",
        "missing: d, float32[3] in the model",
        "missing: e, float32[3] in the model",
    ):
        assert line in text
    with pytest.raises(ValueError, match=r"mismatched: b(.|\n)*missing: d"):
        other.evaluate(times(1))
    assert saved_steps(other) == [0, 1]
