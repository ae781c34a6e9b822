"""The laws of metrics and of merging them. `tests/test_golden.py` has the numbers of TensorFlow, for all of them."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import refused
from testing.metrics import THRESHOLDS, Sample, all_metrics

import estimator as est
from estimator import metrics


@jax.jit
def metrics_of(table):
    return all_metrics(**table)


def is_metric(x):
    return isinstance(x, metrics.Metric)


def merged(many):
    return functools.reduce(lambda a, b: jax.tree.map(lambda m, n: m.merge(n), a, b, is_leaf=is_metric), many)


def results(states):
    return {name: state.result() for name, state in states.items()}


def on_host(states):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), states)


def rows(seed, num_rows):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_rows, 4)).astype(np.float32)
    return {
        "y": rng.integers(0, 4, num_rows),
        "classes": logits.argmax(-1),
        "logits": logits,
        "yb": rng.integers(0, 2, (num_rows, 1)).astype(np.float32),
        "p": rng.uniform(size=(num_rows, 1)).astype(np.float32),
        "weight": rng.integers(0, 4, num_rows).astype(np.float32),
    }


@pytest.mark.quick
@hypothesis.given(st.permutations(range(6)), st.booleans(), st.booleans())
@hypothesis.settings(deadline=None, max_examples=10)
def test_merging_any_split_of_the_rows_in_any_order_is_the_metric_of_all_rows(order, turned, host):
    table, split = rows(0, 6), [order[:2], order[2:]]  # of two sizes, for which metrics are compiled once
    split = split[::-1] if turned else split
    parts = [metrics_of({k: v[np.array(part)] for k, v in table.items()}) for part in split]
    got = results(merged([on_host(p) for p in parts] if host else parts))
    for name, want in results(metrics_of(table)).items():
        np.testing.assert_allclose(got[name], want, rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.quick
def test_a_row_of_integer_weight_counts_as_that_many_rows():
    table, times = rows(3, 6), np.array([2, 0, 1, 1, 0, 2])
    got = results(metrics_of(table | {"weight": times}))
    want = results(metrics_of({k: np.repeat(v, times, axis=0) for k, v in table.items()} | {"weight": None}))
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.quick
def test_metrics_of_no_rows_are_zero_on_host_and_device():
    states = metrics_of(rows(0, 0))
    for name, value in [*results(states).items(), *results(on_host(states)).items()]:
        np.testing.assert_array_equal(value, np.zeros_like(value), err_msg=name)


def test_states_are_float32_and_stay_float64_on_the_host():
    states = metrics_of(rows(0, 6))
    assert {leaf.dtype for leaf in jax.tree.leaves(states)} == {np.dtype(np.float32)}
    total = merged([on_host(states), on_host(states)])
    assert {np.asarray(leaf).dtype for leaf in jax.tree.leaves(total)} == {np.dtype(np.float64)}
    for name, value in results(total).items():
        assert not isinstance(value, jax.Array), name
        assert np.asarray(value).dtype == np.float64, name


@pytest.mark.slow
def test_metrics_are_the_same_as_auxiliary_of_a_gradient():
    table = rows(0, 6)
    _, aux = jax.jit(jax.grad(lambda p: (p.sum(), all_metrics(**table | {"p": p})), has_aux=True))(table["p"])
    for name, want in results(metrics_of(table)).items():
        np.testing.assert_allclose(aux[name].result(), want, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("under", [jax.jit, lambda f: jax.vmap(f, in_axes=(0, 0, 0))], ids=["jit", "vmap"])
def test_counts_at_thresholds_are_those_of_every_row_against_every_threshold(under):
    rng = np.random.default_rng(0)
    thresholds = [0.5, 0.25, 0.75, 0.5, -1.0, 2.0]
    p = np.float32([[0, -0.0, 0.25, 0.5, 0.75, 1], *rng.choice([0, 0.1, 0.25, 0.5, 0.6, 1], (3, 6))])
    labels, weights = rng.integers(0, 2, p.shape), rng.integers(0, 4, p.shape).astype(np.float32)
    recall = under(lambda y, p, w: metrics.recall_at_thresholds(y, p, thresholds, w))(labels, p, weights)
    precision = under(lambda y, p, w: metrics.precision_at_thresholds(y, p, thresholds, w))(labels, p, weights)
    axes = None if recall.total.ndim == 1 else 1
    for i, threshold in enumerate(thresholds):
        is_positive = p > threshold
        rows = [is_positive & (labels == 1), is_positive & (labels == 0), ~is_positive & (labels == 1)]
        true, false, missed = ((weights * which).sum(axes) for which in rows)
        for got, want in ((recall.total, true), (recall.count, true + missed), (precision.count, true + false)):
            np.testing.assert_array_equal(got[..., i], want)


def test_no_row_is_compared_with_every_threshold():
    jaxpr = jax.make_jaxpr(lambda y, p: jax.tree.leaves(metrics.auc(y, p)))(jnp.ones(1000), jnp.ones(1000))
    assert max(variable.aval.size for equation in jaxpr.eqns for variable in equation.outvars) < 200 * 1000


@pytest.mark.slow
def test_sums_of_a_group_keep_their_digits():
    weights = np.full(300_000, 0.1, np.float32)
    area = metrics.auc(np.ones(300_000), np.full(300_000, 0.5, np.float32), weights)
    iou = metrics.mean_iou(np.zeros(300_000, int), np.zeros(300_000, int), 2, weights)
    np.testing.assert_allclose([area.true_positives[0], iou.confusion[0, 0]], 30_000, rtol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_minoring_and_majoring_bound_the_trapezoidal_area(curve):
    rng = np.random.default_rng(1)
    labels, p = rng.integers(0, 2, 50), rng.uniform(size=50).astype(np.float32)
    low, middle, high = (
        metrics.auc(labels, p, num_thresholds=10, curve=curve, summation_method=method).result()
        for method in ("minoring", "trapezoidal", "majoring")
    )
    assert low < middle < high
    np.testing.assert_allclose(middle, (low + high) / 2, rtol=1e-5)


def test_a_threshold_counts_what_is_strictly_above_it():
    got = metrics.recall_at_thresholds(jnp.array([1, 1]), jnp.array([0.5, 0.75]), [0.5, 0.25])
    assert got.result().tolist() == [0.5, 1.0]


def test_a_class_without_rows_counts_in_mean_per_class_accuracy_but_not_in_mean_iou():
    labels = jnp.array([0, 1])
    assert metrics.mean_per_class_accuracy(labels, labels, 4).result() == 0.5
    assert metrics.mean_iou(labels, labels, 4).result() == 1.0


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32])
def test_labels_out_of_range_are_left_out_and_predictions_out_of_range_are_wrong(dtype):
    labels, predictions = np.array([0, 254, 1, 255, 2, 1], dtype), np.array([0, 1, 1, 0, 7, 255], dtype)
    iou = metrics.mean_iou(labels, predictions, 3)
    assert iou.confusion.tolist() == np.diag([1, 1, 0]).tolist() and iou.misses.tolist() == [0, 1, 1]
    assert iou.result() == (1 + 1 / 2 + 0) / 3
    assert metrics.mean_per_class_accuracy(labels, predictions, 2).result() == (1 + 1 / 2) / 2
    assert metrics.mean_iou([0, 0, 1, 1], [0, 2, 1, 2], 2).result() == 0.5
    # Among more classes than a byte can tell apart, 6 occur.
    np.testing.assert_allclose(metrics.mean_iou(labels, predictions, 1000).result(), (1 / 2 + 1 / 3) / 6, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("wrong", [np.float32(np.nan), np.float32(1e10), np.int32(256), np.int32(-256)])
def test_a_prediction_that_the_dtype_of_the_labels_cannot_hold_is_wrong(wrong):
    labels = np.uint8([0, 0, 1])
    predictions = np.array([wrong, 0, 1.75 if wrong.dtype == np.float32 else 1], wrong.dtype)
    assert metrics.accuracy(labels, predictions).total == 2
    assert metrics.mean_per_class_accuracy(labels, predictions, 2).result() == 0.75
    assert metrics.mean_iou(labels, predictions, 2).result() == 0.75


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e30])
def test_a_row_of_weight_zero_is_absent(wrong):
    table = rows(5, 6)
    table["weight"][-1] = 0
    want = results(metrics_of(table))  # as a row of weight 0 counts nowhere, if it is a valid one
    for name in table.keys() - {"weight"}:
        table[name][-1] = -1 if table[name].dtype.kind == "i" else wrong
    for name, value in results(metrics_of(table)).items():
        np.testing.assert_allclose(value, want[name], rtol=1e-6, err_msg=name)
    gradient = jax.grad(lambda p: metrics.mean_squared_error(table["yb"], p, table["weight"]).result())(table["p"])
    assert gradient[:-1].any() and not gradient[-1].any()


def test_the_second_part_of_a_metric_of_classes_is_that_of_tensorflow():
    """It is in a model_fn too, where both parts together are the metric."""
    labels, predictions = jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 1, 1])

    def model_fn(features, labels, mode):
        value, confusion = metrics.mean_iou(labels, features, 2)
        per_class = metrics.mean_per_class_accuracy(labels, features, 2)
        ops = {"iou": (value, confusion), "per_class": tuple(per_class)}
        predictions = {"confusion": confusion, "update": per_class[1]}
        return est.EstimatorSpec(mode, loss=jnp.zeros(()), predictions=predictions, eval_metric_ops=ops)

    model = est.transform(model_fn)
    spec = model.eval_step(model.init(jax.random.key(0), predictions, labels, mode="eval"), predictions, labels)
    assert spec.predictions["confusion"].tolist() == [[1, 1], [0, 2]]
    assert spec.predictions["update"].tolist() == [0.5, 1]
    assert spec.eval_metric_ops["per_class"].result() == 0.75
    np.testing.assert_allclose(spec.eval_metric_ops["iou"].result(), 7 / 12, rtol=1e-6)
    outside = metrics.mean_iou(labels, predictions, 2)
    assert outside[0] == outside.result() and outside[1] is outside.confusion


def test_recall_at_k_of_several_labels_counts_each_label_once():
    labels = jnp.array([[0, 0, 3], [1, 2, -1]])
    scores = jnp.array([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]])
    got = metrics.recall_at_k(labels, scores, 2, weights=jnp.array([1.0, 2.0]))
    assert got.total == 1 + 2 and got.count == 2 + 2 * 3


def test_of_scores_that_are_zero_whatever_their_sign_the_first_is_in_the_top_k():
    labels, scores = jnp.array([0, 1]), jnp.array([[-0.0, 0.0, -1.0], [0.0, -0.0, 1.0]])
    assert metrics.recall_at_k(labels, scores, 1).result() == 0.5
    assert metrics.recall_at_k(labels, scores, 2).result() == 0.5


def test_recall_at_k_of_one_class_counts_its_labels_alone():
    labels, scores = jnp.array([[0], [2], [2]]), jnp.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    assert [metrics.recall_at_k(labels, scores, 1, class_id).result().item() for class_id in (0, 1, 2)] == [1, 0, 0.5]


@pytest.mark.quick
@pytest.mark.parametrize("wrong", [np.nan, -0.25, 1.5])
def test_what_is_no_probability_makes_thresholds_nan_unless_its_weight_is_zero(wrong):
    labels, predictions = jnp.array([0, 1, 0, 1]), jnp.array([0.2, wrong, 0.3, 0.9])
    ignored, right = jnp.array([1.0, 0, 1, 1]), jnp.array([0.2, 0.5, 0.3, 0.9])
    for of in (
        metrics.auc,
        functools.partial(metrics.auc, curve="PR", summation_method="careful_interpolation"),
        functools.partial(metrics.auc, curve="PR", summation_method="minoring"),
        functools.partial(metrics.precision_at_thresholds, thresholds=[0.5, 0.99]),
        functools.partial(metrics.recall_at_thresholds, thresholds=[0.5, 0.99]),
    ):
        assert np.isnan(of(labels, predictions).result()).all()
        np.testing.assert_array_equal(
            of(labels, predictions, weights=ignored).result(), of(labels, right, weights=ignored).result()
        )


@pytest.mark.parametrize("weight_shape", [(3,), (3, 1)])
@pytest.mark.parametrize("shapes", [((3,), (3, 1)), ((3, 1), (3,)), ((3, 1), (3, 1))])
def test_a_last_dimension_of_one_may_be_missing(shapes, weight_shape):
    labels = np.float32([1, 0, 1]).reshape(shapes[0])
    predictions = np.float32([1, 2, 4]).reshape(shapes[1])
    got = metrics.mean_absolute_error(labels, predictions, np.float32([1, 2, 5]).reshape(weight_shape))
    np.testing.assert_allclose(got.result(), (0 + 4 + 15) / 8)


def test_weights_of_rows_are_repeated_over_columns():
    got = metrics.mean(jnp.array([[1.0, 3.0], [5.0, 7.0]]), jnp.array([1.0, 0.0]))
    assert got.result() == 2 and got.count == 2
    assert metrics.mean(jnp.array([1.0, 3.0]), 2.0).count == 4


COUNTS = [f"{which}_{kind}" for which in ("true", "false") for kind in ("positives", "negatives")]
ERRORS = ["mean_squared_error", "root_mean_squared_error", "mean_absolute_error"]
PAIRWISE = dict.fromkeys(["accuracy", *ERRORS, "precision", "recall", "auc", *COUNTS], ())
PAIRWISE |= dict.fromkeys(["precision_at_thresholds", "recall_at_thresholds"], ([0.5],))
PAIRWISE |= dict.fromkeys(["mean_iou", "mean_per_class_accuracy"], (2,))


@pytest.mark.parametrize("name", PAIRWISE)
def test_shapes_that_differ_are_an_error_and_not_broadcast(name):
    message = rf"`{name}` got labels of shape \(4, 1\) and predictions of shape \(4, 3\), which"
    with pytest.raises(ValueError, match=message):
        getattr(metrics, name)(jnp.ones((4, 1)), jnp.ones((4, 3)), *PAIRWISE[name])


ONES, SCORES = np.ones(3, np.float32), np.ones((1, 3), np.float32)
REFUSED = {
    TypeError: [
        (lambda: metrics.recall_at_k(SCORES, np.array([1]), 2),
         r"`recall_at_k` takes \(labels, predictions\), in this order; got labels of"),
        (lambda: metrics.recall_at_k(np.array([1]), SCORES, 1, jnp.ones(3)),
         r"`recall_at_k` takes one class as `class_id`; got Array\(.* `weights=`"),
        (lambda: metrics.mean(ONES).merge(metrics.true_positives(ONES, ONES)),
         r"`Mean\.merge` got a `Count`; only metrics of the same"),
    ],
    ValueError: [
        (lambda: metrics.mean(ONES, ONES[:2]),
         r"`mean` got weights of shape \(2,\) for values of shape \(3,\)\. .* reshape them"),
        (lambda: metrics.auc(ONES, ONES, curve="roc"), r"curve='roc'; the known ones are \('ROC', 'PR'\)"),
        (lambda: metrics.auc(ONES, ONES, summation_method="x"), "summation_method='x'; the known ones are .*minoring"),
        (lambda: metrics.auc(ONES, ONES, num_thresholds=1), "num_thresholds=1; it takes 2 at least"),
        (lambda: metrics.recall_at_k(np.array([1]), SCORES, 4),
         "`recall_at_k` got k=4 for predictions of 3 classes"),
        (lambda: metrics.recall_at_k(np.array([1, 2]), SCORES, 1), r"`recall_at_k` got labels of shape \(2, 1\)"),
        (lambda: metrics.auc(ONES, ONES).merge(metrics.auc(ONES, ONES, curve="PR")),
         "another `curve`: 'PR', where this one has 'ROC'"),
        (lambda: metrics.recall_at_thresholds(ONES, ONES, [0.25]).merge(
             metrics.recall_at_thresholds(ONES, ONES, [0.5])
         ), r"another `thresholds`: \(0\.5,\), .* \(0\.25,\)"),
        (lambda: metrics.mean_iou(ONES, ONES, 2).merge(metrics.mean_iou(ONES, ONES, 1)),
         r"`confusion` has shape \(1, 1\), .* \(2, 2\)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_what_does_not_fit_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_subclass_is_a_frozen_pytree_with_its_own_merge():
    one, two = (Sample(jnp.array([n]), jnp.array([n]), 1) for n in (1.0, 2.0))
    assert jax.jit(lambda a, b: a.merge(b))(one, two).result() == 2
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert jax.tree.structure(one) != jax.tree.structure(dataclasses.replace(one, size=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.values = 3


def test_equal_static_fields_compile_once():
    traces = []

    @jax.jit
    def result(metric):
        traces.append(metric)
        return metric.result()

    for _ in range(2):
        result(metrics.precision_at_thresholds(jnp.ones(3), jnp.ones(3), list(THRESHOLDS)))
    assert len(traces) == 1
