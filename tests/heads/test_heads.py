"""Heads: losses, metrics and predictions, against numpy and scikit-learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from testing.towers import assert_close, cpus, started

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

ROWS = 48
RNG = np.random.default_rng(0)
# Probabilities that no two thresholds of `est.metrics.auc` tell apart, so that its curve is the exact one.
P = ((RNG.permutation(ROWS) % 16 + 1) / 17).astype(np.float32)[:, None]
LOGIT = np.log(P / (1 - P))
LABEL = (RNG.random(ROWS) < 0.3 + 0.4 * P[:, 0]).astype(np.int32)
W = np.concatenate([np.zeros(3), RNG.random(13), np.full(16, 9.0), np.ones(16)]).astype(np.float32)
LOGITS = RNG.normal(size=(ROWS, 3)).astype(np.float32)
CLASS = RNG.integers(0, 3, ROWS).astype(np.int32)
MULTI = (RNG.random((ROWS, 3)) < 0.4).astype(np.int32)
FEATURES = {"w": W}
CROSS_ENTROPY = -np.log(np.where(LABEL == 1, P[:, 0], 1 - P[:, 0]))
REDUCED = {
    est.Reduction.SUM: lambda losses, w: (losses * w).sum(),
    est.Reduction.MEAN: lambda losses, w: (losses * w).sum() / w.sum(),
    est.Reduction.SUM_OVER_BATCH_SIZE: lambda losses, w: (losses * w).mean(),
    est.Reduction.SUM_BY_NONZERO_WEIGHTS: lambda losses, w: (losses * w).sum() / (w != 0).sum(),
}


def close(value):
    return pytest.approx(value, rel=2e-5, abs=1e-6)


def results(metrics):
    return {name: metric.result().item() for name, metric in jax.device_get(metrics).items()}


def precision_recall_area(labels, p, w):
    return est.metrics.auc(labels, p, w, curve="PR", summation_method="careful_interpolation").result().item()


@pytest.mark.covers("11 BinaryClassHead")
@pytest.mark.parametrize("reduction", REDUCED)
def test_the_loss_is_the_weighted_cross_entropy_as_the_reduction_says(reduction):
    head = est.BinaryClassHead("w", loss_reduction=reduction)
    assert float(head.loss(LABEL, LOGIT, FEATURES)) == close(REDUCED[reduction](CROSS_ENTROPY, W))


@pytest.fixture
def sk():
    return pytest.importorskip("sklearn.metrics")


@pytest.mark.covers("11 BinaryClassHead")
@pytest.mark.parametrize("w", [W, np.ones(ROWS, np.float32)], ids=["weights", "no weights"])
def test_binary_metrics_match_scikit_learn(w, sk):
    head = est.BinaryClassHead("w" if w is W else None, thresholds=np.array([0.25, 0.5]))
    result = results(head.metrics(LABEL, LOGIT, {"w": w} if w is W else None))
    p, mean = P[:, 0], np.average(LABEL, weights=w)
    expected = {
        "average_loss": sk.log_loss(LABEL, p, sample_weight=w),
        "prediction/mean": np.average(p, weights=w),
        "label/mean": mean,
        "accuracy_baseline": max(mean, 1 - mean),
        "auc": sk.roc_auc_score(LABEL, p, sample_weight=w),
        "auc_precision_recall": precision_recall_area(LABEL, p, w),
    }
    for suffix, cut in [("", 0.5), ("/positive_threshold_0.25", 0.25), ("/positive_threshold_0.5", 0.5)]:
        scores = [("accuracy", sk.accuracy_score), ("precision", sk.precision_score), ("recall", sk.recall_score)]
        expected |= {name + suffix: score(LABEL, p > cut, sample_weight=w) for name, score in scores}
    assert result.keys() == expected.keys()
    assert result == {name: close(value) for name, value in expected.items()}


@pytest.mark.slow
@pytest.mark.covers("11 BinaryClassHead")
def test_the_baseline_takes_the_more_frequent_class_of_all_batches():
    head = est.BinaryClassHead()
    logits = np.zeros((4, 1), np.float32)
    first = head.metrics(np.array([1, 1, 1, 0]), logits)["accuracy_baseline"]
    second = head.metrics(np.array([0, 0, 0, 0]), logits)["accuracy_baseline"]
    assert first.merge(second).result().item() == 5 / 8  # not (3/4 + 1) / 2


def assert_predicts(got, probabilities, logits):
    np.testing.assert_allclose(got["probabilities"], probabilities, rtol=1e-5)
    np.testing.assert_array_equal(got["class_ids"], probabilities.argmax(1)[:, None])
    np.testing.assert_array_equal(got["all_class_ids"], [range(probabilities.shape[1])] * ROWS)
    np.testing.assert_array_equal(got["classes"], probabilities.argmax(1)[:, None].astype(str))
    np.testing.assert_array_equal(got["logits"], logits)


@pytest.mark.covers("11 BinaryClassHead")
def test_binary_predictions():
    result = est.BinaryClassHead().predictions(LOGIT)
    np.testing.assert_allclose(result["logistic"], P, rtol=1e-5)
    assert_predicts(result, np.concatenate([1 - P, P], axis=1), LOGIT)
    assert list(est.BinaryClassHead().predictions(LOGIT, ["logits"])) == ["logits"]


def test_what_is_on_a_threshold_is_below_it():
    head = est.BinaryClassHead(thresholds=[0.5])
    assert head.predictions(jnp.zeros((1, 1)))["class_ids"].item() == 0  # the first of two that are alike
    metrics = head.metrics(jnp.ones(1), jnp.zeros((1, 1)))
    names = "accuracy", "accuracy/positive_threshold_0.5", "recall"
    assert [metrics[name].result().item() for name in names] == [0, 0, 0]


def test_losses_of_half_precision_are_in_float32():
    head, logits = est.BinaryClassHead(), LOGIT.astype(jnp.bfloat16)
    loss = head.loss(LABEL, logits)
    assert loss.dtype == jnp.float32 and loss == head.loss(LABEL, logits.astype(np.float32))


@pytest.mark.covers("11 MultiClassHead")
@pytest.mark.parametrize("of_kind", [int, np.int64, jnp.int32, np.asarray])
def test_sizes_may_be_numpys_integers(of_kind):
    heads = [est.MultiClassHead(of_kind(3)), est.MultiLabelHead(of_kind(3)), est.RegressionHead(of_kind(3))]
    assert [(type(head.logits_dimension), head.logits_dimension) for head in heads] == [(int, 3)] * 3


@pytest.mark.slow
@pytest.mark.covers("11 MultiClassHead")
def test_sparse_classes_are_made_dense():
    head = est.MultiClassHead(3)
    assert head.loss(BCOO.fromdense(jnp.asarray(CLASS)[:, None]), LOGITS) == head.loss(CLASS, LOGITS)


@pytest.mark.covers("11 MultiClassHead")
def test_a_head_of_several_classes(sk):
    head = est.MultiClassHead(3, "w", loss_reduction=est.Reduction.MEAN)
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    loss = sk.log_loss(CLASS, p, sample_weight=W, labels=[0, 1, 2])
    assert float(head.loss(CLASS[:, None], LOGITS, FEATURES)) == close(loss)
    accuracy = sk.accuracy_score(CLASS, p.argmax(1), sample_weight=W)
    assert results(head.metrics(CLASS, LOGITS, FEATURES)) == {"average_loss": close(loss), "accuracy": close(accuracy)}
    assert_predicts(head.predictions(LOGITS), p, LOGITS)


@pytest.mark.quick
@pytest.mark.covers("11 MultiLabelHead")
@pytest.mark.parametrize("sparse", [False, True])
def test_a_head_of_several_labels(sparse, sk):
    options = {"loss_reduction": "weighted_mean", "classes_for_class_based_metrics": [0, "c"]}
    head = est.MultiLabelHead(3, "w", thresholds=[0.4], label_vocabulary=["a", "b", "c"], **options)
    p = np.tile(P, 3) ** np.array([1, 2, 3], np.float32)
    labels = BCOO.fromdense(MULTI) if sparse else MULTI
    losses = -np.log(np.where(MULTI == 1, p, 1 - p)).mean(1)
    logits = np.log(p / (1 - p))
    assert float(head.loss(labels, logits, FEATURES)) == close(np.average(losses, weights=W))
    flat = {"y_true": MULTI.ravel(), "sample_weight": np.repeat(W, 3)}
    expected = {
        "average_loss": np.average(losses, weights=W),
        "accuracy/positive_threshold_0.4": sk.accuracy_score(y_pred=p.ravel() > 0.4, **flat),
        "precision/positive_threshold_0.4": sk.precision_score(y_pred=p.ravel() > 0.4, **flat),
        "recall/positive_threshold_0.4": sk.recall_score(y_pred=p.ravel() > 0.4, **flat),
        "probability_mean/a": np.average(p[:, 0], weights=W),
        "probability_mean/c": np.average(p[:, 2], weights=W),
        "auc/a": sk.roc_auc_score(MULTI[:, 0], p[:, 0], sample_weight=W),
        "auc_precision_recall/a": precision_recall_area(MULTI[:, 0], p[:, 0], W),
    }
    result = results(head.metrics(labels, logits, FEATURES))
    assert {name: result[name] for name in expected} == {name: close(value) for name, value in expected.items()}
    assert result.keys() - expected.keys() == {"auc", "auc_precision_recall", "auc/c", "auc_precision_recall/c"}
    assert result["auc"] == pytest.approx(sk.roc_auc_score(y_score=p.ravel(), **flat), abs=5e-3)
    np.testing.assert_allclose(head.predictions(logits)["probabilities"], p, rtol=1e-5)


@pytest.mark.covers("11 RegressionHead")
@pytest.mark.parametrize("w", [W, np.stack([W, W[::-1], W * W], 1)], ids=["by example", "by number"])
def test_a_head_of_several_numbers(w):
    head = est.RegressionHead(3, "w", loss_reduction="weighted_sum_by_nonzero_weights")
    labels, all_w = np.float32(MULTI), np.broadcast_to(w.reshape(ROWS, -1), (ROWS, 3))
    losses = (LOGITS - labels) ** 2
    assert float(head.loss(labels, LOGITS, {"w": w})) == close((losses * all_w).sum() / (all_w != 0).sum())
    assert results(head.metrics(labels, LOGITS, {"w": w})) == {
        "average_loss": close(np.average(losses, weights=all_w)),
        "prediction/mean": close(np.average(LOGITS, weights=all_w)),
        "label/mean": close(np.average(labels, weights=all_w)),
    }
    assert list(head.predictions(LOGITS)) == ["predictions"]


@pytest.mark.covers("11 PoissonRegressionHead")
def test_a_poisson_head_has_the_negative_log_likelihood():
    from scipy.stats import poisson

    labels = np.array([50, 80, 100])
    logits = np.log(np.array([[55.0], [80.0], [90.0]], np.float32))
    head = est.PoissonRegressionHead()
    likelihood = poisson.logpmf(labels, np.exp(logits[:, 0])).mean()
    assert float(head.loss(labels, logits)) == pytest.approx(-likelihood, abs=2e-3)  # Stirling
    assert float(head.loss(np.zeros(3), logits)) == close(np.exp(logits).mean())
    np.testing.assert_allclose(head.predictions(logits)["predictions"], np.exp(logits), rtol=1e-6)
    np.testing.assert_array_equal(head.predictions(logits)["logits"], logits)


@pytest.mark.covers("11 PoissonRegressionHead")
def test_a_logistic_head_takes_shares():
    share = P[::-1, 0]
    head = est.LogisticRegressionHead()
    expected = -(share * np.log(P[:, 0]) + (1 - share) * np.log(1 - P[:, 0])).mean()
    assert float(head.loss(share, LOGIT)) == close(expected)
    assert results(head.metrics(share, LOGIT))["prediction/mean"] == close(P.mean())


@pytest.mark.quick
@pytest.mark.parametrize(
    "head, labels",
    [
        (est.BinaryClassHead(), [2, 1]),
        (est.BinaryClassHead(), [-1, 1]),
        (est.MultiClassHead(3), [3, 1]),
        (est.MultiClassHead(3), [-1, 1]),
        (est.MultiLabelHead(3), [[2, 1, 0], [0, 0, 1]]),
        (est.PoissonRegressionHead(), [-1, 1]),
        (est.LogisticRegressionHead(), [1.5, 1.0]),
    ],
)
def test_a_label_that_there_cannot_be_makes_the_loss_nan(head, labels):
    assert np.isnan(head.loss(np.array(labels), {1: LOGIT, 3: LOGITS}[head.logits_dimension][:2]))


ABSENT = [
    (est.BinaryClassHead("w", thresholds=[0.3]), LOGIT[:3], [0, -1, 1]),
    (est.MultiClassHead(3, "w"), LOGITS[:3], [0, -1, 1]),
    (est.MultiLabelHead(3, "w", thresholds=[0.3]), LOGITS[:3], [[0, 1, 0], [-1, np.nan, 7], [1, 0, 0]]),
    (est.RegressionHead(weight_column="w"), LOGIT[:3], [0.5, np.nan, 1]),
    (est.RegressionHead(3, "w", loss_fn=lambda labels, logits: (labels - logits) ** 4), LOGITS[:3], np.eye(3)),
    (est.PoissonRegressionHead(weight_column="w"), LOGIT[:3], [3, -1, 1]),
    (est.LogisticRegressionHead("w"), LOGIT[:3], [0.5, np.inf, 1]),
]


@pytest.mark.slow
@pytest.mark.parametrize("head, logits, labels", ABSENT, ids=lambda x: type(x).__name__)
def test_a_row_of_weight_zero_is_absent(head, logits, labels):
    @jax.jit
    def derive(labels, logits):
        features = {"w": np.float32([2, 0, 1])}
        loss = jax.value_and_grad(lambda x: head.loss(labels, x, features))(logits)
        return loss, {name: metric.result() for name, metric in head.metrics(labels, logits, features).items()}

    valid = np.array(labels)
    valid[1] = 0
    (loss, gradient), metrics = derive(valid, logits)
    assert not gradient[1].any()
    for wrong in (np.nan, -np.inf, 1e3):  # of which a Poisson head makes infinity
        got = derive(np.asarray(labels), np.where(np.array([[0], [1], [0]]), np.float32(wrong), logits))
        jax.tree.map(np.testing.assert_array_equal, got, ((loss, gradient), metrics))


def test_regularization_is_added_and_reported():
    head = est.RegressionHead(name="h")
    terms = [jnp.float32(0.25), jnp.float32(0.5)]
    plain = head.loss(LABEL, LOGIT)
    assert float(head.loss(LABEL, LOGIT, regularization_losses=terms) - plain) == close(0.75)
    assert results(head.metrics(LABEL, LOGIT, regularization_losses=terms))["regularization_loss/h"] == 0.75
    assert "regularization_loss/h" not in head.metrics(LABEL, LOGIT)


@pytest.mark.covers("11 loss_fn contract")
def test_a_loss_fn_takes_the_place_of_the_loss():
    seen = {}

    def loss_fn(labels, logits, features, loss_reduction, scale=2.0):
        seen.update(features=features, reduction=loss_reduction)
        return scale * jnp.abs(labels - logits)

    head = est.RegressionHead(weight_column="w", loss_fn=loss_fn, loss_reduction=est.Reduction.SUM)
    loss = 2 * np.abs(LABEL - LOGIT[:, 0])
    assert float(head.loss(LABEL, LOGIT, FEATURES)) == close((loss * W).sum())
    assert seen == {"features": FEATURES, "reduction": est.Reduction.SUM}
    average = results(head.metrics(LABEL, LOGIT, FEATURES))["average_loss"]
    assert average == close(np.average(loss, weights=W))


def run(head, mode, logits=LOGIT, labels=LABEL, optimizer=None, **kwargs):
    """The spec of one run with variables `a` and `b`, both 0 at first, and the variables after it."""

    def model_fn(features, labels, mode):
        a, b = (est.get_variable(name, (), initializer=jax.nn.initializers.zeros) for name in "ab")
        return head.create_estimator_spec(features, mode, logits + a + b, labels, optimizer, **kwargs)

    model, state = started(model_fn, FEATURES, labels, mode=mode)
    if mode == "train":
        state, spec = model.train_step(state, FEATURES, labels)
    else:
        spec = model.predict_step(state, FEATURES) if mode == "infer" else model.eval_step(state, FEATURES, labels)
    return spec, state.variables


@pytest.mark.covers("11 Head")
def test_the_spec_of_each_mode():
    head = est.BinaryClassHead("w")
    (predict, _), (evaluated, _) = run(head, "infer"), run(head, "eval")
    trained, after = run(head, "train", optimizer=est.Optimizer(optax.sgd(1.0)), trainable_variables=["b"])
    assert predict.loss is None and predict.eval_metric_ops == {}
    assert float(evaluated.loss) == close(float(head.loss(LABEL, LOGIT, FEATURES)))
    assert float(trained.loss) == close(float(evaluated.loss))
    assert evaluated.eval_metric_ops.keys() == head.metrics(LABEL, LOGIT, FEATURES).keys()
    assert predict.predictions.keys() == evaluated.predictions.keys() == trained.predictions.keys()
    assert after == {"a": 0, "b": close(-np.mean(W * (P[:, 0] - LABEL)))}


@pytest.mark.covers("11 Head")
def test_a_train_op_fn_gets_the_loss():
    optimizer = est.Optimizer(optax.sgd(1.0))
    _, after = run(est.BinaryClassHead(), "train", train_op_fn=lambda loss: optimizer.minimize(2 * loss))
    assert float(after["a"]) == close(-2 * np.mean(P[:, 0] - LABEL))


EXPORTS = [
    (est.BinaryClassHead(label_vocabulary=["no", "yes"]), LOGIT, {"classification", "regression", "predict"}),
    (est.MultiClassHead(3, label_vocabulary=["a", "b", "c"]), LOGITS, {"classification", "predict"}),
    (est.MultiLabelHead(3), LOGITS, {"classification", "predict"}),
    (est.RegressionHead(), LOGIT, {"regression", "predict"}),
]


@pytest.mark.covers("11 BinaryClassHead")
@pytest.mark.parametrize("head, logits, signatures", EXPORTS, ids=lambda x: type(x).__name__)
def test_export_outputs_are_named_as_in_tensorflow(head, logits, signatures):
    spec, _ = run(head, "infer", logits)
    outputs = spec.export_outputs
    assert outputs.keys() == signatures | {"serving_default"}
    if "classification" in signatures:
        vocabulary = {1: ["no", "yes"], 3: ["a", "b", "c"]}[logits.shape[1]]
        names = ["0", "1", "2"] if isinstance(head, est.MultiLabelHead) else vocabulary
        assert outputs["serving_default"].classes.tolist() == names
        np.testing.assert_array_equal(outputs["classification"].scores, spec.predictions["probabilities"])
    else:
        np.testing.assert_array_equal(outputs["serving_default"].value, spec.predictions["predictions"])
    strings = {"all_classes"} if "classes" in spec.predictions else set()
    assert outputs["predict"].outputs.keys() == spec.predictions.keys() | strings


LABELS = {"two": LABEL, "three": CLASS, "many": MULTI, "number": LABEL.astype(np.float32)}


def several(reduction=est.Reduction.SUM_OVER_BATCH_SIZE, head_weights=(1.0, 0.5, 2.0, 0.25)):
    heads = [
        est.BinaryClassHead("w", thresholds=[0.3], loss_reduction=reduction, name="two"),
        est.MultiClassHead(3, "w", loss_reduction=reduction, name="three"),
        est.MultiLabelHead(3, "w", [0.3], None, reduction, None, [1], "many"),
        est.RegressionHead(1, "w", loss_reduction=reduction, name="number"),
    ]
    return est.MultiHead(heads, head_weights), heads


ALL_LOGITS = np.concatenate([LOGIT, LOGITS, LOGITS[:, ::-1], LOGIT / 3], axis=1)
CUT = {"two": LOGIT, "three": LOGITS, "many": LOGITS[:, ::-1], "number": LOGIT / 3}


@pytest.mark.covers("11 MultiHead")
@pytest.mark.parametrize("logits", [ALL_LOGITS, CUT], ids=["one array", "a dict"])
def test_several_heads_are_a_weighted_sum_side_by_side(logits):
    head, heads = several()
    assert head.logits_dimension == 8 and head.name == "two_three_many_number"
    losses = {h.name: float(h.loss(LABELS[h.name], CUT[h.name], FEATURES)) for h in heads}
    total = losses["two"] + 0.5 * losses["three"] + 2 * losses["many"] + 0.25 * losses["number"]
    terms = [jnp.float32(0.125)]
    assert float(head.loss(LABELS, logits, FEATURES)) == close(total)
    assert float(head.loss(LABELS, logits, FEATURES, regularization_losses=terms)) == close(total + 0.125)

    metrics = results(head.metrics(LABELS, logits, FEATURES, terms))
    expected = {f"loss/{name}": loss for name, loss in losses.items()}
    expected |= {"regularization_loss/two_three_many_number": 0.125}
    for h in heads:
        expected |= results(h.metrics(LABELS[h.name], CUT[h.name], FEATURES))
    assert metrics == {name: close(value) for name, value in expected.items()}
    assert {"accuracy/three", "auc/class1/many", "accuracy/positive_threshold_0.3/two"} <= metrics.keys()

    predictions = head.predictions(logits)
    for h in heads:
        for key, value in h.predictions(CUT[h.name]).items():
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), predictions[h.name, key], value)
    assert list(head.predictions(logits, [("number", "predictions")])) == [("number", "predictions")]


@pytest.mark.slow
@pytest.mark.covers("11 MultiHead")
@pytest.mark.parametrize("reduction", [est.Reduction.SUM, est.Reduction.SUM_OVER_BATCH_SIZE])
def test_the_losses_of_two_batches_are_that_of_all_their_rows(reduction):
    head, _ = several(reduction)
    batch = LABELS, ALL_LOGITS, FEATURES
    whole = head.metrics(*batch)
    one, other = (head.metrics(*jax.tree.map(lambda x, i=i: x[i], batch)) for i in (slice(12), slice(12, None)))
    for name in ("loss/two", "loss/three", "loss/many", "loss/number"):
        assert one[name].merge(other[name]).result().item() == close(whole[name].result().item())


@pytest.mark.slow
@pytest.mark.covers("11 MultiHead")
def test_several_heads_in_an_estimator(tmp_path):
    head, _ = several()

    def model_fn(features, labels, mode):
        b = est.get_variable("b", (8,), initializer=jax.nn.initializers.zeros)
        return head.create_estimator_spec(features, mode, features["x"] + b, labels, est.Optimizer(optax.sgd(0.1)))

    batch = {"x": ALL_LOGITS, "w": W}
    estimator = est.Estimator(model_fn, tmp_path).train(lambda: [(batch, LABELS)] * 5)
    assert estimator.evaluate(lambda: (batch, LABELS))["loss"] < head.loss(LABELS, ALL_LOGITS, batch)
    rows = list(estimator.predict(lambda: batch, [("three", "class_ids"), ("two", "logistic")]))
    assert len(rows) == ROWS and rows[0]["three", "class_ids"].shape == (1,)

    model = est.transform(model_fn)
    outputs = model.predict_step(model.init(jax.random.key(0), batch, mode="infer"), batch).export_outputs
    assert outputs["serving_default"].classes.tolist() == ["0", "1"]
    assert {"two", "three", "number", "number/regression", "many/predict", "predict"} <= outputs.keys()
    np.testing.assert_array_equal(outputs["predict"].outputs["number/predictions"], outputs["number"].value)


OPTIMIZER = TowerOptimizer(optax.sgd(0.05))
ROWS_OF = {"x": np.concatenate([LOGITS, LOGIT], axis=1), "w": W}


@functools.cache
def one_tower(reduction):
    head, _ = several(reduction)

    def model_fn(features, labels, mode):
        kernel = est.get_variable("kernel", (4, 8))
        penalty = None if reduction == "weighted_sum" else [jnp.sum(jnp.square(kernel))]  # else added by each tower
        logits, options = features["x"] @ kernel, {"regularization_losses": penalty}
        return head.create_estimator_spec(features, mode, logits, labels, OPTIMIZER, **options)

    model = est.transform(model_fn)
    return model_fn, model, model.init(jax.random.key(1), ROWS_OF, LABELS)


def in_towers(reduction, towers):
    return est.transform(replicate_model_fn(one_tower(reduction)[0], reduction, cpus(towers)))


@functools.cache
def trained(reduction, towers=0):
    """The state after one step, and its spec."""
    _, plain, state = one_tower(reduction)
    return (in_towers(reduction, towers) if towers else plain).train_step(state, ROWS_OF, LABELS)


@pytest.mark.slow
@pytest.mark.covers("11 weights")
@pytest.mark.parametrize(
    "towers, reduction",
    [(2, "weighted_sum_over_batch_size"), (3, "weighted_sum_by_nonzero_weights"), (2, "weighted_mean")],
)
def test_towers_train_as_one_whatever_the_weights(towers, reduction):
    (got, spec), (want, want_spec) = trained(reduction, towers), trained(reduction)
    assert_close(spec.loss, want_spec.loss)
    assert_close(got.variables, want.variables)


@pytest.mark.slow
@pytest.mark.covers("11 weights")
@pytest.mark.parametrize(
    "towers, reduction, rows",
    [(2, "weighted_sum_over_batch_size", ROWS), (3, "weighted_sum_by_nonzero_weights", 43)],  # 43 does not divide by 3
)
def test_towers_have_the_losses_and_metrics_of_one_whatever_the_weights(towers, reduction, rows):
    _, plain, state = one_tower(reduction)
    batch = jax.tree.map(lambda x: x[:rows], (ROWS_OF, LABELS))
    got, want = in_towers(reduction, towers).eval_step(state, *batch), plain.eval_step(state, *batch)
    assert_close(got.loss, want.loss)
    assert_close(got.predictions, want.predictions)
    assert results(got.eval_metric_ops) == {n: close(v) for n, v in results(want.eval_metric_ops).items()}


def shown(spec):
    return {name: report.as_value() for name, report in jax.device_get(spec.reported).items()}


@pytest.mark.slow
@pytest.mark.covers("11 heads' summaries in TRAIN: loss/<head>")
@pytest.mark.parametrize("reduction", ["weighted_sum_over_batch_size", "weighted_sum"])
def test_training_shows_the_loss_of_each_head_and_of_regularization(reduction):
    _, heads = several(reduction)
    kernel = one_tower(reduction)[2].variables["kernel"]
    logits = jnp.split(ROWS_OF["x"] @ kernel, [1, 4, 7], axis=1)
    want = {f"loss/{h.name}": h.loss(LABELS[h.name], x, ROWS_OF) for h, x in zip(heads, logits, strict=True)}
    if reduction != "weighted_sum":
        want["regularization_loss"] = jnp.sum(jnp.square(kernel))
    for towers in (0, 2):
        _, spec = trained(reduction, towers)
        assert shown(spec) == {name: close(float(value)) for name, value in want.items()}


@pytest.mark.quick
@pytest.mark.covers("11 heads' summaries in TRAIN: loss/<head>")
@pytest.mark.parametrize(
    ("name", "tags"), [(None, {"regularization_loss"}), ("two", {"loss/two", "regularization_loss/two"})]
)
def test_a_head_shows_what_no_one_else_does(name, tags):
    """The loss of a head without a name is the model's, which `train` shows; and a name may be taken."""
    head = est.BinaryClassHead(name=name)

    def model_fn(features, labels, mode):
        logits = features + est.get_variable("b", ())
        est.summary.scalar("regularization_loss", 7.0)
        options = {"regularization_losses": [logits.sum()]}
        spec = head.create_estimator_spec(features, mode, logits, labels, OPTIMIZER, **options)
        assert mode == "train" or head.create_estimator_spec(features, mode, logits, labels).train_op is None
        return spec

    model, state = started(model_fn, LOGIT, LABEL)
    got = shown(model.train_step(state, LOGIT, LABEL)[1])
    assert got.keys() == {"regularization_loss"} | tags
    assert got["regularization_loss"] == 7.0
    assert model.eval_step(state, LOGIT, LABEL).reported.keys() == {"regularization_loss"}
