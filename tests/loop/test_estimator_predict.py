"""What predict promises: laziness, rows and batches, keys, interleaving."""

import threading

import numpy as np
import pytest
from testing.estimators import X, endless, make, times
from testing.model_fns import predicting

import estimator as est


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    """Trained for a step."""
    return make(tmp_path_factory.mktemp("trained")).train(endless, steps=1)


@pytest.mark.covers("1.5 laziness")
def test_predict_is_lazy_but_checks_its_arguments_at_once(estimator):
    calls = []

    def input_fn():
        for i in range(3):
            calls.append(i)
            yield X

    predictions = estimator.predict(input_fn)
    assert calls == []
    next(predictions)
    assert calls in ([0], [0, 1], [0, 1, 2])  # a thread reads ahead
    assert len(list(predictions)) == 11
    with pytest.raises(TypeError, match="`input_fn` must be callable"):
        estimator.predict(X)
    with pytest.raises(ValueError, match="predict_keys must name at least one"):
        estimator.predict(input_fn, predict_keys=[])


@pytest.mark.covers("1.5 single examples")
def test_predict_gives_single_examples_or_batches(estimator):
    rows = list(estimator.predict(lambda: [X, X[:1]]))
    batches = list(estimator.predict(lambda: [X, X[:1]], yield_single_examples=False))
    assert [set(row) for row in rows] == [{"y", "x"}] * 5
    assert [batch["x"].shape for batch in batches] == [(4, 2), (1, 2)]
    np.testing.assert_array_equal([row["x"] for row in rows], np.concatenate([X, X[:1]]))
    np.testing.assert_array_equal([row["y"] for row in rows], np.concatenate([batch["y"] for batch in batches]))
    assert isinstance(rows[0]["x"], np.ndarray)
    assert isinstance(batches[0]["x"], np.ndarray)


def test_predictions_may_be_any_tree(tmp_path):
    model_fn = predicting(lambda x: (x, {"a": [x * 2]}))
    estimator = make(tmp_path, model_fn)
    rows = list(estimator.predict(lambda: np.arange(2.0, dtype=np.float32)))
    assert rows == [(0, {"a": [0]}), (1, {"a": [2]})]
    with pytest.raises(ValueError, match="predict_keys argument is not valid in case of non-dict"):
        next(estimator.predict(lambda: X, predict_keys="a"))


@pytest.mark.covers("1.5 predict_keys", "13 16 silent acceptances")
def test_predict_keys(estimator):
    for keys in ("y", ["y"], ("y",)):
        assert set(next(estimator.predict(lambda: X, keys))) == {"y"}
    assert set(next(estimator.predict(lambda: X, ["x", "y"]))) == {"x", "y"}
    with pytest.raises(ValueError, match=r"predict_keys names \['z'\], but .* \['x', 'y'\]"):
        next(estimator.predict(lambda: X, ["y", "z"]))


@pytest.mark.covers("1.5 single examples")
def test_predictions_of_different_length_are_an_error_row_by_row(tmp_path):
    model_fn = predicting(lambda x: {"a": x, "b": x[:1]})
    estimator = make(tmp_path, model_fn)
    with pytest.raises(ValueError, match=r"Batch length .* same.*\['a'\]: \(4,\), \['b'\]: \(1,\)"):
        next(estimator.predict(lambda: X))
    (batch,) = estimator.predict(lambda: X, yield_single_examples=False)
    assert (len(batch["a"]), len(batch["b"])) == (4, 1)


@pytest.mark.covers("1.1 labels rule", "1.5 input")
def test_predict_leaves_labels_out(tmp_path):
    seen = []

    def model_fn(features, labels, mode):
        seen.append(labels)
        return est.EstimatorSpec(mode, predictions=features)

    assert len(list(make(tmp_path, model_fn).predict(times(2)))) == 8
    assert set(map(type, seen)) == {type(None)}


def test_predicting_no_batch_yields_nothing(estimator):
    assert list(estimator.predict(lambda: [])) == []


@pytest.mark.covers("1.5 interleaving")
def test_predictions_may_be_interleaved(estimator):
    alone = [row["y"] for row in estimator.predict(lambda: [X, X + 1])]
    pairs = zip(estimator.predict(lambda: [X, X + 1]), estimator.predict(lambda: [X, X + 1]), strict=True)
    assert [(a["y"], b["y"]) for a, b in pairs] == [(y, y) for y in alone]


def test_a_prediction_begun_before_training_ends_with_the_old_variables(tmp_path):
    estimator = make(tmp_path).train(endless, steps=1)
    w = estimator.get_variable_value("w")
    predictions = estimator.predict(lambda: [X, X + 1], yield_single_examples=False)
    first = next(predictions)
    estimator.train(endless, steps=3).evaluate(times(1))
    np.testing.assert_allclose(first["y"], (X @ w)[:, 0], rtol=1e-6)
    np.testing.assert_allclose(next(predictions)["y"], ((X + 1) @ w)[:, 0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["generator", "arrays"])
def test_a_prediction_is_given_out_before_an_input_that_waits_for_it_has_another_batch(estimator, kind):
    """An input may make a batch of the answers to the ones before."""
    answered = threading.Semaphore(0)

    def generate():
        for i in range(4):
            yield X[i : i + 1]
            assert answered.acquire(timeout=30)

    inputs = {"generator": generate, "arrays": est.inputs.numpy_input_fn(X, None, 1, shuffle=False)}
    rows = []
    for row in estimator.predict(inputs[kind]):
        rows.append(row["x"])
        answered.release()
    np.testing.assert_array_equal(rows, X)
