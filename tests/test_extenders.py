"""add_metrics and forward_features: a new Estimator of the same model, with more to say."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse
from testing.estimators import make, times
from testing.towers import assert_close, predict, replicate

import estimator as est
from estimator.export import PredictOutput, RegressionOutput
from replicate import TowerOptimizer

pytestmark = pytest.mark.covers("11 add_metrics")

ROWS = 7
FEATURES = {
    "x": np.arange(ROWS, dtype=np.float32),
    "id": np.arange(ROWS, dtype=np.int32)[::-1].copy(),
    "deep": [np.ones((ROWS, 2), np.float32)],
}
LABELS = FEATURES["x"] ** 2


def model_fn(features, labels, mode, params):
    w = est.get_variable("w", (), initializer=jax.nn.initializers.constant(3.0))
    predictions = {"y": w * features["x"] * params.get("factor", 1.0)}
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions)
    loss = est.losses.mean_squared_error(labels, predictions["y"])
    train_op = TowerOptimizer(optax.sgd(0.01)).minimize(loss)
    return est.EstimatorSpec(mode, predictions, loss, train_op, {"label": est.metrics.mean(labels)})


def metric_fn(labels, predictions):
    return {"error": est.metrics.mean_absolute_error(labels, predictions["y"])}


ERROR = np.abs(LABELS - 3 * FEATURES["x"]).mean()
INPUT = times(1, (FEATURES, LABELS))


def raises(kind, message):
    return pytest.raises(kind, match=re.escape(message))


# add_metrics.


def test_new_metrics_join_the_metrics_of_the_model_fn(tmp_path):
    before = make(tmp_path, model_fn)
    results = before.evaluate(INPUT)
    assert est.add_metrics(before, metric_fn).evaluate(INPUT) == results | {"error": pytest.approx(ERROR)}
    assert before.evaluate(INPUT) == results


def test_a_new_metric_takes_the_place_of_one_of_the_same_name(tmp_path):
    estimator = est.add_metrics(make(tmp_path, model_fn), metric_fn)
    estimator = est.add_metrics(estimator, lambda features: {"error": est.metrics.mean(features["x"])})
    results = estimator.evaluate(INPUT)
    assert results["error"] == 3.0
    assert set(results) == {"error", "label", "loss", "global_step"}


def test_metric_fn_gets_what_it_names(tmp_path):
    seen = {}

    def keep(**given):
        seen.update(given)
        return {}

    class Metrics:
        def of_features(self, features, *, offset=1.0):
            return {"shifted": est.metrics.mean(features["x"] + offset)}

    before = make(tmp_path, model_fn)
    est.add_metrics(before, keep).evaluate(INPUT)
    assert seen["config"] == before.config
    assert set(seen["features"]) == set(FEATURES) and set(seen["predictions"]) == {"y"}
    assert seen["labels"].shape == (ROWS,)
    assert est.add_metrics(before, Metrics().of_features).evaluate(INPUT)["shifted"] == 4.0
    bound = functools.partial(Metrics().of_features, offset=2.0)
    assert est.add_metrics(before, bound).evaluate(INPUT)["shifted"] == 5.0


def test_what_add_metrics_does_not_take(tmp_path):
    before = make(tmp_path, model_fn)
    with raises(ValueError, "metric_fn (<lambda>) has following not expected args: ['mode', 'logits']. It may have"):
        est.add_metrics(before, lambda labels, mode, logits: {})
    with raises(TypeError, "`add_metrics` needs a function as metric_fn; got 3."):
        est.add_metrics(before, 3)
    with raises(TypeError, "`add_metrics` needs an `est.Estimator`; got <function model_fn"):
        est.add_metrics(model_fn, metric_fn)
    with raises(TypeError, "metric_fn (<lambda>) must return a dict of metrics by name; got None."):
        est.add_metrics(before, lambda: None).evaluate(INPUT)
    with raises(TypeError, "eval_metric_ops['y'] must be a metric"):
        est.add_metrics(before, lambda predictions: predictions).evaluate(INPUT)
    with raises(ValueError, 'Metric with name "loss" is not allowed'):
        est.add_metrics(before, lambda labels: {"loss": est.metrics.mean(labels)}).evaluate(INPUT)


def extended(estimator):
    return est.forward_features(est.add_metrics(estimator, metric_fn), "id")


@pytest.mark.covers("13 17 add_metrics loses params; replicate_model_fn's limits")
def test_the_new_estimator_is_the_same_model_elsewhere_described(tmp_path):
    """model_dir, params and config are shared, training resumes, and predictions are what they were."""
    before = make(tmp_path, model_fn, {"factor": 2.0}, seed=5)
    after = extended(before)
    assert (after.model_dir, after.config, after.params) == (before.model_dir, before.config, before.params)
    given = []

    def input_fn(params):
        given.append(params)
        return INPUT()

    before.train(INPUT)
    assert after.evaluate(input_fn)["global_step"] == 1
    after.train(INPUT)
    assert given == [{"factor": 2.0}]
    assert before.evaluate(INPUT)["global_step"] == 2
    rows = zip(before.predict(INPUT), after.predict(INPUT), strict=True)
    assert all(one["y"] == other["y"] and set(other) == {"y", "id"} for one, other in rows)


def test_training_and_evaluation_are_not_changed_by_forwarding(tmp_path):
    before = make(tmp_path, model_fn)
    model = est.transform(est.forward_features(before).model_fn, {}, before.config)
    state = model.init(jax.random.key(0), FEATURES, LABELS)
    for spec in (model.train_step(state, FEATURES, LABELS)[1], model.eval_step(state, FEATURES, LABELS)):
        assert set(spec.predictions) == {"y"}


def test_a_model_fn_that_takes_no_labels_still_says_so(tmp_path):
    def unlabelled(features, mode):
        return est.EstimatorSpec(mode, features, jnp.mean(features["x"]))

    estimator = est.add_metrics(make(tmp_path, unlabelled), lambda features: {})
    with raises(ValueError, "model_fn (unlabelled) does not take labels, but input_fn returns labels."):
        estimator.evaluate(INPUT)


# forward_features.


@pytest.mark.quick
@pytest.mark.parametrize("keys", [None, "id", ["id", "deep"], ()])
def test_predictions_hold_the_features(tmp_path, keys):
    estimator = est.forward_features(make(tmp_path, model_fn), keys)
    (got,) = estimator.predict(INPUT, yield_single_examples=False)
    names = list(FEATURES) if keys is None else [keys] if isinstance(keys, str) else keys
    assert_close(got, {"y": 3 * FEATURES["x"]} | {name: FEATURES[name] for name in names})
    if "id" in names:
        assert [row["id"] for row in estimator.predict(INPUT, "id")] == FEATURES["id"].tolist()


def test_the_default_signature_holds_the_features(tmp_path):
    def exporting(features, mode):
        y = {"y": 2 * features["x"]}
        exports = {"serving_default": PredictOutput(y), "predict": PredictOutput(y), "other": PredictOutput(y)}
        return est.EstimatorSpec(mode, y, export_outputs=exports | {"regress": RegressionOutput(y["y"])})

    exports = predict(est.forward_features(make(tmp_path, exporting), "id").model_fn, FEATURES).export_outputs
    for name in ("serving_default", "predict"):
        assert_close(exports[name].outputs, {"y": 2 * FEATURES["x"], "id": FEATURES["id"]})
    assert set(exports["other"].outputs) == {"y"}
    assert isinstance(exports["regress"], RegressionOutput)


def test_a_default_signature_of_another_kind_stays_as_it_is(tmp_path):
    def regressing(features, mode):
        y = {"y": 2 * features["x"]}
        return est.EstimatorSpec(mode, y, export_outputs={"regress": RegressionOutput(y["y"])})

    spec = predict(est.forward_features(make(tmp_path, regressing), "id").model_fn, FEATURES)
    assert set(spec.predictions) == {"y", "id"}
    assert isinstance(spec.export_outputs["serving_default"], RegressionOutput)


def test_what_forward_features_does_not_take(tmp_path):
    before = make(tmp_path, model_fn)
    for keys in (3, ["id", 3], {"id"}):
        with raises(TypeError, f"keys of `forward_features` must be a string or a list of strings; got {keys!r}."):
            est.forward_features(before, keys)
    with raises(TypeError, "`forward_features` needs an `est.Estimator`; got None."):
        est.forward_features(None)


def predict_with(tmp_path, keys, features=FEATURES, predictions=None, exports=None):
    def returning(features, mode):
        y = {"y": jnp.ones(ROWS)} if predictions is None else predictions
        return est.EstimatorSpec(mode, y, export_outputs=exports)

    return next(est.forward_features(make(tmp_path, returning), keys).predict(lambda: [features]))


@pytest.mark.slow
def test_features_that_cannot_be_forwarded(tmp_path):
    with raises(ValueError, "should exist in features: ['ID'] not in ['deep', 'id', 'x']."):
        predict_with(tmp_path, ["id", "ID"])
    with raises(ValueError, "`forward_features` needs features that are a dict, to know them by their keys; got"):
        predict_with(tmp_path, None, FEATURES["x"])
    with raises(ValueError, "Predictions should be a dict to be able to forward features; got"):
        predict_with(tmp_path, "id", predictions=jnp.ones(ROWS))
    with raises(ValueError, "Cannot forward features ['id'], since predictions has them already. Choose other"):
        predict_with(tmp_path, ["id", "x"], predictions={"id": jnp.ones(ROWS)})
    with raises(ValueError, "['id'], since export_outputs['serving_default'] has them already."):
        predict_with(tmp_path, "id", exports={"serving_default": PredictOutput({"id": jnp.ones(ROWS)})})
    ids = sparse.BCOO.fromdense(np.ones((ROWS, 1), np.float32), n_batch=1)
    with raises(ValueError, "`forward_features` cannot forward the feature 'sparse', which is sparse. Leave it out"):
        predict_with(tmp_path, None, FEATURES | {"sparse": {"deep": ids}})


# With towers.


def around(tmp_path):
    return extended(make(tmp_path, replicate(model_fn, 4)))


def within(tmp_path):
    return make(tmp_path, replicate(extended(make(tmp_path, model_fn)).model_fn, 4))


def between(tmp_path):
    inner = est.add_metrics(make(tmp_path, model_fn), metric_fn).model_fn
    return est.forward_features(make(tmp_path, replicate(inner, 4)), "id")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the extended Estimator says without towers."""
    estimator = extended(make(tmp_path_factory.mktemp("alone"), model_fn))
    return estimator.evaluate(INPUT), list(estimator.predict(INPUT))


@pytest.mark.quick
@pytest.mark.parametrize("compose", [around, within, between])
def test_extending_goes_together_with_towers_in_any_order(tmp_path, alone, compose):
    estimator, (metrics, rows) = compose(tmp_path), alone
    got = estimator.evaluate(INPUT)
    assert got == {name: pytest.approx(value, rel=1e-5) for name, value in metrics.items()}
    assert got["error"] == pytest.approx(ERROR)
    for one, other in zip(estimator.predict(INPUT), rows, strict=True):
        assert_close(one, other)


@pytest.mark.covers("12 EVAL predictions")
def test_metric_fn_sees_the_predictions_of_all_towers_at_once(tmp_path):
    """In TensorFlow it saw the first tower alone."""
    shapes = []

    def seeing(labels, predictions):
        shapes.append((labels.shape, predictions["y"].shape))
        return {"last": est.metrics.mean(predictions["y"][-1:])}

    estimator = est.add_metrics(make(tmp_path, replicate(model_fn, 4)), seeing)
    assert estimator.evaluate(INPUT)["last"] == 3.0 * FEATURES["x"][-1]
    assert set(shapes) == {((ROWS,), (ROWS,))}


# Params.


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: replicate(f, 2)], ids=["plain", "replicated"])
def test_a_model_fn_may_change_its_params_for_itself_alone(tmp_path, wrap):
    """It runs once in init, again in each mode, for each shape, and after `compute_gradients`."""

    def changing(features, labels, mode, params):
        factor = params.pop("factor")
        params["deep"].append(factor)
        assert params["deep"] == [0.0, factor]
        w = est.get_variable("w", ())
        predictions = {"factor": features["x"] * 0 + factor}
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions)
        loss = jnp.mean((w * features["x"] - labels) ** 2)
        optimizer = TowerOptimizer(optax.sgd(factor))
        train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss))
        return est.EstimatorSpec(mode, predictions, loss, train_op)

    params = {"factor": 0.5, "deep": [0.0]}
    estimator = make(tmp_path, wrap(changing), params)
    even = {name: x[:6] for name, x in FEATURES.items() if name == "x"}
    estimator.train(lambda: [(even, LABELS[:6]), ({"x": even["x"][:4]}, LABELS[:4])])
    estimator.evaluate(INPUT)
    assert [row["factor"] for row in estimator.predict(INPUT)] == [0.5] * ROWS
    assert estimator.params == params == {"factor": 0.5, "deep": [0.0]}


def test_arrays_among_params_are_not_copied(tmp_path):
    table = jnp.ones(3)
    seen = []

    def looking(features, mode, params):
        seen.append(params["table"])
        return est.EstimatorSpec(mode, predictions=features)

    model = est.transform(looking, {"table": table})
    x = np.ones(2, np.float32)
    model.predict_step(model.init(jax.random.key(0), x, mode="infer"), x)
    assert seen and all(x is table for x in seen)


def test_a_wrapper_may_give_a_replicated_model_fn_other_params(tmp_path):
    inner = replicate(model_fn, 4)

    def wrapped(features, labels, mode, params, config):
        return inner(features, labels, mode, params | {"factor": 10.0 * params["factor"]}, config)

    estimator = make(tmp_path, wrapped, {"factor": 2.0})
    np.testing.assert_allclose([row["y"] for row in estimator.predict(INPUT)], 60 * FEATURES["x"])
