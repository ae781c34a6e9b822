"""What towers return becomes what one would have returned: any tree, any metric; strings stay on the host."""

import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.metrics import all_of
from testing.towers import assert_close, replicate, started

import estimator as est
from estimator.export import ClassificationOutput, PredictOutput, RegressionOutput
from estimator.replication import PerPart
from replicate import TowerOptimizer, tower_index

NAMES = ["cat", "dog", "owl"]


def values(rows):
    return np.random.default_rng(rows).normal(size=rows).astype(np.float32)


def run(model_fn, mode, x):
    """The spec of one step in a mode, from initial values."""
    model, state = started(model_fn, x, mode=mode)
    if mode == est.ModeKeys.TRAIN:
        return model.train_step(state, x)[1]
    return (model.eval_step if mode == est.ModeKeys.EVAL else model.predict_step)(state, x)


def returning(make):
    """A model_fn whose spec has the fields that `make(features)` gives."""

    def model_fn(features, mode):
        loss = jnp.mean((est.get_variable("w", ()) - features) ** 2)
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op, **{"predictions": features} | make(features))

    return model_fn


def exporting(features):
    scores = features[:, None] * jnp.arange(1.0, 4.0)
    exports = {
        "serving_default": PredictOutput({"scores": scores, "nested": [features > 0, (scores[:, :0],)]}),
        "classify": ClassificationOutput(scores, scores.argmax(-1)),
        "named": ClassificationOutput(scores, NAMES),
        "regress": RegressionOutput(features),
    }
    return {"predictions": (features, {"scores": scores}), "export_outputs": exports}


@functools.cache
def plain(mode, rows):
    return run(returning(exporting), mode, values(rows))


@pytest.mark.slow
@pytest.mark.covers("12 predict", "12 EVAL predictions", "13 17 add_metrics loses params; replicate_model_fn's limits")
@pytest.mark.parametrize("towers, mode, rows", [(8, "train", 24), (3, "eval", 13), (3, "infer", 13), (4, "infer", 2)])
def test_predictions_and_exports_match_one_tower_in_every_mode(towers, mode, rows):
    got, want = run(replicate(returning(exporting), towers), mode, values(rows)), plain(mode, rows)
    assert_close(got.predictions, want.predictions)
    assert_close(got.export_outputs, want.export_outputs)
    assert got.export_outputs["classify"].classes.shape == (rows,)
    assert got.export_outputs["named"].classes.tolist() == NAMES


class Pair(NamedTuple):
    first: object
    second: object


def trees(leaves):
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=6,
    )


@hypothesis.given(st.sampled_from([1, 3, 8]), st.integers(1, 3), trees(st.lists(st.integers(0, 3), max_size=2)))
@hypothesis.settings(deadline=None, max_examples=50)
def test_cutting_any_tree_into_towers_and_concatenating_is_the_tree(towers, rows, shapes):
    count = iter(range(100))

    def array(shape):
        shape = (towers * rows, *shape)
        return next(count) + np.arange(np.prod(shape)).reshape(shape)

    is_shape = lambda x: isinstance(x, list) and all(isinstance(n, int) for n in x)  # noqa: E731
    tree = jax.tree.map(array, shapes, is_leaf=is_shape)
    cut = jax.tree.map(lambda x: x.reshape(towers, rows, *x.shape[1:]), tree)
    merged = PerPart(predictions=cut).merge(towers).predictions
    assert jax.tree.structure(merged) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, merged, tree)


@pytest.mark.quick
@pytest.mark.parametrize(
    "mode, towers, shape, shown",
    [
        ("train", 2, (), r"shape \(\) in a tower of 4"),
        ("eval", 2, (8,), r"shape \(8,\) in a tower of 4"),
        ("infer", 8, (4,), r"shape \(4,\) in a tower of 1"),
    ],
    ids=["scalar", "vector", "one row per tower"],
)
def test_what_is_no_batch_is_named_with_its_shape(mode, towers, shape, shown):
    def fixed(features):
        return {"predictions": {"x": features, "deep": [features, jnp.ones(shape)]}}

    with pytest.raises(ValueError, match=rf"predictions\['deep'\]\[1\] must have the batch .* it has {shown}"):
        run(replicate(returning(fixed), towers), mode, values(8))


def test_an_export_that_is_no_batch_is_named_with_its_shape():
    def fixed(features):
        return {"export_outputs": {"regress": RegressionOutput(jnp.ones(3))}}

    with pytest.raises(ValueError, match=r"export_outputs\['regress'\]\.value must have the batch .* shape \(3,\)"):
        run(replicate(returning(fixed), 2), "infer", values(8))


def test_the_rows_left_over_are_looked_at_too():
    """Eight rows of fixed size look like a batch in two towers of eight, but not in the call of the last row."""
    model = returning(lambda features: {"predictions": jnp.ones(8) * features[0]})
    with pytest.raises(ValueError, match=r"predictions must have the batch .* \(8,\) in a tower of 1 examples"):
        run(replicate(model, 2), "infer", values(17))


def test_one_device_takes_what_a_plain_run_takes():
    model_fn = returning(lambda features: {"predictions": {"total": features.sum(), "fixed": jnp.ones(3)}})
    got, want = (run(f, "infer", values(8)).predictions for f in (replicate(model_fn, 1), model_fn))
    assert_close(got, want)


# Strings.


@pytest.mark.quick
@pytest.mark.parametrize(
    ("towers", "strings"),
    [(0, np.array(["a"] * 8)), (2, np.array([b"a"] * 4)), (0, np.array(["a", None])), (2, np.str_("a"))],
)
def test_strings_among_predictions_and_exports_are_errors(strings, towers):
    message = r"must be an array of numbers, given one of dtype .*: return integer classes, and look up their names"
    predicted = returning(lambda features: {"predictions": {"x": features, "class": strings}})
    with pytest.raises(TypeError, match=r"predictions\['class'\] " + message):
        run(replicate(predicted, towers), "infer", values(8))
    exported = returning(lambda features: {"export_outputs": {"p": PredictOutput({"class": strings})}})
    with pytest.raises(TypeError, match=r"export_outputs\['p'\]\.outputs\['class'\] " + message):
        run(replicate(exported, towers), "infer", values(8))


@pytest.mark.parametrize("value", ["text", 0.5, [None, "text"]])
def test_exports_are_trees_of_arrays(value):
    message = r"export_outputs\['p'\]\.outputs\['x'\].* must be an array, given: ('text'|0.5) of type"
    with pytest.raises(TypeError, match=message):
        est.EstimatorSpec("infer", jnp.ones(2), export_outputs={"p": PredictOutput({"x": value})})


@pytest.mark.parametrize(
    "names",
    [NAMES, tuple(NAMES), np.array(NAMES), np.array(NAMES, object), [name.encode() for name in NAMES]],
    ids=["list", "tuple", "array", "objects", "bytes"],
)
def test_names_of_classes_stay_on_the_host_through_any_transformation(names):
    output = ClassificationOutput(jnp.ones((2, 3)), names)
    assert len(jax.tree.leaves(output)) == 1
    assert jax.tree.structure(output) == jax.tree.structure(ClassificationOutput(jnp.ones((2, 3)), names))
    assert jax.tree.structure(output) != jax.tree.structure(ClassificationOutput(jnp.ones((2, 3)), names[::-1]))
    for other in (jax.tree.map(lambda x: 2 * x, output), jax.eval_shape(lambda: output)):
        assert isinstance(other.classes, np.ndarray)
        assert other.classes.tolist() == list(names)


@pytest.mark.parametrize(
    "scores, names, message",
    [
        ((2, 3), [["a", "b", "c"]] * 2, r"got strings of shape \(2, 3\) as classes, with scores of shape \(2, 3\)"),
        (
            (2, 3),
            ["a", "b"],
            r"strings of shape \(2,\) as classes, with scores of shape \(2, 3\). Strings are the names",
        ),
        (None, ["a", "b"], r"with no scores. .* Return classes that depend on the example as integers"),
    ],
)
def test_names_that_do_not_name_the_scores_are_an_error(scores, names, message):
    with pytest.raises(ValueError, match=message):
        ClassificationOutput(None if scores is None else jnp.ones(scores), np.array(names))


# Metrics that merge by a rule of their own.


def measuring(features):
    return {"eval_metric_ops": all_of(features)}


def assert_results(got, x):
    """What the metrics must be, from all rows at once in plain numpy."""
    np.testing.assert_array_equal(got["collected"], x)
    np.testing.assert_array_equal(got["sample"], x[np.argsort(-np.cos(x))[:3]])
    for name, want in {"largest": x.max(), "span": np.ptp(x), "deviation": x.std()}.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6, err_msg=name)
    assert got["seen"] == (x > 2).any() and not got["unseen"]
    assert np.asarray(got["seen"]).dtype == bool


def results(metrics):
    return {name: (m.result if hasattr(m, "result") else m.compute)() for name, m in metrics.items()}


X = np.random.default_rng(3).normal(size=16).astype(np.float32) * 2


@pytest.mark.slow
@pytest.mark.covers("12 loss")
def test_evaluate_merges_metrics_by_their_own_rule(tmp_path):
    estimator = est.Estimator(replicate(returning(measuring), 3), tmp_path)
    got = estimator.evaluate(lambda: [X[:13], X[13:]])
    assert_results(got, X)
    assert type(got["largest"]) is float and type(got["seen"]) is bool


@pytest.mark.slow
def test_the_metrics_of_a_training_step_are_merged_too():
    x = np.concatenate([X, X[:8] + 1])
    assert_results(results(run(replicate(returning(measuring), 8), "train", x).eval_metric_ops), x)


@pytest.fixture(scope="module")
def four_towers(tmp_path_factory):
    return est.Estimator(replicate(returning(measuring), 4), tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@hypothesis.given(st.lists(st.sampled_from([3, 4]), min_size=1, max_size=5))
@hypothesis.settings(deadline=None, max_examples=10)
def test_evaluate_does_not_depend_on_how_the_rows_come_in_batches(four_towers, sizes):
    x = values(sum(sizes))
    assert_results(four_towers.evaluate(lambda: np.split(x, np.cumsum(sizes)[:-1])), x)


def test_all_towers_are_one_traced_program_so_their_metrics_cannot_differ():
    calls = []

    def counted(features):
        calls.append(features)
        return measuring(features)

    for towers in (1, 8):
        run(replicate(returning(counted), towers), "eval", X)
    assert len(calls) == 4  # for each number of towers once in init, and once for all towers

    def by_tower(features):
        return {"eval_metric_ops": all_of(features) if tower_index() == 0 else {}}

    with pytest.raises(jax.errors.TracerBoolConversionError):
        run(replicate(returning(by_tower), 2), "eval", X)


def by_rows(features):
    few = {"few": est.metrics.mean(features)}
    return {"eval_metric_ops": {"mean": est.metrics.mean(features)} | (few if len(features) < 2 else {})}


def test_metrics_that_depend_on_the_number_of_rows_are_errors(tmp_path):
    message = r"returned the metrics \['mean'\] for the rows that divide by the towers, but \['few', 'mean'\] for those"
    with pytest.raises(ValueError, match=message):
        run(replicate(returning(by_rows), 4), "eval", X[:9])
    message = r"the metrics \['few', 'mean'\] for a batch, but \['mean'\] for those before"
    with pytest.raises(ValueError, match=message):
        est.Estimator(returning(by_rows), tmp_path).evaluate(lambda: [X, X[:1]])
