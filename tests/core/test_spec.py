"""The rules of EstimatorSpec and ModeKeys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import estimator as est
from estimator import export

ONE = jnp.float32(1)
TRAIN, EVAL, PREDICT = est.ModeKeys.TRAIN, est.ModeKeys.EVAL, est.ModeKeys.PREDICT


def make(mode, **fields):
    """A valid spec with some fields changed."""
    valid = {"predictions": jnp.ones(2), "loss": ONE, "train_op": est.TrainOp()}
    return est.EstimatorSpec(mode, **(valid | fields))


def test_modes_equal_the_strings_of_tensorflow():
    assert [str(mode) for mode in est.ModeKeys] == ["train", "eval", "infer"]
    assert PREDICT == "infer"
    assert est.EstimatorSpec("infer", predictions=ONE).mode is PREDICT


@pytest.mark.covers("2 unknown mode", "13 16 silent acceptances")
@pytest.mark.parametrize("mode", ["bogus", "predict", "TRAIN", None, 3])
def test_an_unknown_mode_is_an_error(mode):
    with pytest.raises(ValueError, match=rf"mode must be one of 'train', .*; got {mode!r}\."):
        make(mode)


@pytest.mark.covers("2 loss")
def test_what_each_mode_requires():
    assert est.EstimatorSpec(TRAIN, loss=ONE, train_op=est.TrainOp()).predictions == {}
    assert est.EstimatorSpec(EVAL, loss=ONE).eval_metric_ops == {}
    assert est.EstimatorSpec(PREDICT, predictions=ONE).loss is None
    with pytest.raises(ValueError, match=r"Missing train_op.*, or `est\.group\(\)`"):
        est.EstimatorSpec(TRAIN)
    with pytest.raises(ValueError, match="Missing loss: .* in mode 'train'"):
        est.EstimatorSpec(TRAIN, train_op=est.TrainOp())
    with pytest.raises(ValueError, match="Missing loss: .* in mode 'eval'"):
        est.EstimatorSpec(EVAL)
    with pytest.raises(ValueError, match="Missing predictions"):
        est.EstimatorSpec(PREDICT)


@pytest.mark.covers("2 loss type")
@pytest.mark.parametrize("loss", [1.5, np.float32(1.5), np.array([1.5]), jnp.full((1, 1), 1.5)])
@pytest.mark.parametrize("mode", list(est.ModeKeys))
def test_a_loss_of_one_element_becomes_a_scalar(mode, loss):
    spec = make(mode, loss=loss)
    assert isinstance(spec.loss, jax.Array)
    assert spec.loss.shape == () and spec.loss == 1.5


@pytest.mark.covers("2 loss type")
@pytest.mark.parametrize("mode", list(est.ModeKeys))
def test_other_losses_are_errors(mode):
    for size in (2, 0):
        with pytest.raises(ValueError, match=rf"Loss must be scalar, given: an array of shape \({size},\)"):
            make(mode, loss=jnp.ones(size))
    for loss, given in (("low", "'low' of type str"), ([ONE], r"\[.*of type list")):
        with pytest.raises(TypeError, match=f"loss must be a scalar array, given: {given}"):
            make(mode, loss=loss)


@pytest.mark.covers("2 train_op type")
@pytest.mark.parametrize("train_op", [optax.sgd(0.1), ONE, lambda: None, "adam"])
def test_a_train_op_that_is_none_is_an_error_with_the_line_to_write(train_op):
    line = r"Write `train_op=est\.Optimizer\(optimizer\)\.minimize\(loss\)`"
    with pytest.raises(TypeError, match=rf"train_op must be what `minimize`.*{line}.*`train_op=est\.group\(\)` to"):
        make(TRAIN, train_op=train_op)


@pytest.mark.covers("2 predictions type")
@pytest.mark.parametrize("mode", list(est.ModeKeys))
def test_predictions_are_trees_of_arrays(mode):
    tree = {"a": (jnp.ones(2), [np.ones(2)])}
    assert make(mode, predictions=tree).predictions == tree
    with pytest.raises(TypeError, match=r"predictions\['a'\] must be an array, given: 1\.0 of type"):
        make(mode, predictions={"a": 1.0})
    with pytest.raises(TypeError, match="predictions must be an array, given: 'cat' of type str"):
        make(mode, predictions="cat")


@pytest.mark.covers("2 eval_metric_ops")
@pytest.mark.parametrize("mode", list(est.ModeKeys))
def test_metrics_are_a_dict_of_objects_that_merge(mode):
    metric = est.metrics.mean(jnp.ones(2))
    assert set(make(mode, eval_metric_ops={"mean": metric}).eval_metric_ops) == {"mean"}
    with pytest.raises(TypeError, match="eval_metric_ops must be a dict of metrics by name"):
        make(mode, eval_metric_ops=[metric])
    with pytest.raises(TypeError, match=r"eval_metric_ops\['a'\] must be a metric, given: \("):
        make(mode, eval_metric_ops={"a": (ONE, ONE)})


@pytest.mark.covers("1.4 reserved names", "2 eval_metric_ops")
@pytest.mark.parametrize("name", ["loss", "global_step"])
def test_reserved_names_of_metrics(name):
    with pytest.raises(ValueError, match=f'Metric with name "{name}" is not allowed'):
        make(EVAL, eval_metric_ops={name: est.metrics.mean(jnp.ones(2))})


@pytest.mark.covers("2 export_outputs")
def test_predictions_are_the_default_export():
    predictions = {"y": jnp.ones(2)}
    spec = make(PREDICT, predictions=predictions)
    assert set(spec.export_outputs) == {"serving_default"}
    assert spec.export_outputs["serving_default"].outputs == predictions
    assert set(make(PREDICT).export_outputs["serving_default"].outputs) == {"output"}
    assert make(TRAIN).export_outputs is None


@pytest.mark.covers("2 export_outputs")
def test_a_single_export_is_the_default_too():
    only = export.PredictOutput(ONE)
    spec = make(PREDICT, export_outputs={"mine": only})
    assert spec.export_outputs == {"mine": only, "serving_default": only}
    both = {"a": only, "serving_default": export.RegressionOutput(ONE)}
    assert make(PREDICT, export_outputs=both).export_outputs == both


@pytest.mark.covers("2 export_outputs")
def test_bad_exports_are_errors():
    output = export.PredictOutput(ONE)
    with pytest.raises(TypeError, match="`export_outputs` must be dict, given: "):
        make(PREDICT, export_outputs=[output])
    with pytest.raises(TypeError, match=r"export_outputs\['a'\] must be one of `est.export`'s"):
        make(PREDICT, export_outputs={"a": ONE})
    with pytest.raises(
        ValueError, match="Multiple `export_outputs` were provided, but none of them are specified as the default"
    ):
        make(PREDICT, export_outputs={"a": output, "b": output})


@pytest.mark.covers("2 hooks fields")
@pytest.mark.parametrize("field", ["training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks"])
@pytest.mark.parametrize("mode", list(est.ModeKeys))
def test_hooks_are_iterables_of_hooks(mode, field):
    hook = est.Hook()
    assert getattr(make(mode), field) == ()
    assert getattr(make(mode, **{field: iter([hook])}), field) == (hook,)
    with pytest.raises(TypeError, match=f"All hooks must be hook instances, but {field} holds 3"):
        make(mode, **{field: [3]})
    for bad in (hook, "hook"):
        with pytest.raises(TypeError, match=f"{field} must be an iterable of hooks, given: "):
            make(mode, **{field: bad})


@pytest.mark.covers("2 scaffold", "13 18 saving_listeners")
def test_there_is_no_scaffold_but_none():
    assert make(TRAIN, scaffold=None).scaffold is None
    fields = [field.name for field in dataclasses.fields(est.EstimatorSpec)]
    assert fields[fields.index("training_hooks") + 1] == "scaffold"  # as in TensorFlow, for those who go by position
    with pytest.raises(
        TypeError, match="scaffold of EstimatorSpec must be None, given: 3 of type int. .*est.init_from.*RunConfig"
    ):
        make(TRAIN, scaffold=3)


def test_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make(TRAIN).loss = ONE


@pytest.mark.covers("2 _replace")
def test_replace_checks_again_and_keeps_the_mode():
    spec = make(TRAIN)
    assert spec._replace(loss=jnp.float32(3)).loss == 3
    assert spec.loss == 1
    assert spec._replace(mode="train").mode is TRAIN
    with pytest.raises(ValueError, match="Loss must be scalar"):
        spec._replace(loss=jnp.ones(2))
    with pytest.raises(ValueError, match="Missing train_op"):
        spec._replace(train_op=None)
    with pytest.raises(ValueError, match="mode of EstimatorSpec cannot be changed: it is 'train'"):
        spec._replace(mode=EVAL)


def test_is_a_pytree():
    spec = make(EVAL, eval_metric_ops={"mean": est.metrics.mean(jnp.ones(2))})
    doubled = jax.jit(lambda spec: jax.tree.map(lambda x: x * 2, spec))(spec)
    assert isinstance(doubled, est.EstimatorSpec) and doubled.mode is EVAL
    assert doubled.loss == 2
    np.testing.assert_array_equal(doubled.predictions, [2, 2])
    assert doubled.eval_metric_ops["mean"].result() == 1
