"""What evaluate promises: numbers, metrics, checkpoints, empty input."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.estimators import Linear, X, Y, endless, make, refuse, times
from testing.metrics import Largest

import estimator as est


@pytest.mark.covers("1.4 returned dict")
def test_evaluate_returns_plain_numbers(tmp_path):
    def model_fn(features, labels, mode):
        spec = Linear()(features, labels, mode)
        metrics = {
            "accuracy": est.metrics.accuracy(labels, labels),
            "vector": est.metrics.precision_at_thresholds(labels[:, 0] > 0, labels[:, 0] / 20, [0.1, 0.5]),
        }
        return spec._replace(eval_metric_ops=metrics)

    results = make(tmp_path, model_fn).train(endless, steps=2).evaluate(times(2))
    assert set(results) == {"accuracy", "vector", "loss", "global_step"}
    assert results["accuracy"] == 1.0 and type(results["accuracy"]) is float
    assert type(results["loss"]) is float
    assert results["global_step"] == 2 and type(results["global_step"]) is int
    assert isinstance(results["vector"], np.ndarray) and results["vector"].shape == (2,)


def test_a_step_without_arithmetic_is_evaluated(tmp_path):
    def model_fn(features, labels, mode):
        return est.EstimatorSpec(mode, loss=jnp.zeros(()), eval_metric_ops={})

    assert make(tmp_path, model_fn).evaluate(times(3)) == {"loss": 0.0, "global_step": 0}


@pytest.mark.covers("1.4 steps")
def test_evaluate_takes_at_most_steps_batches(tmp_path):
    estimator = make(tmp_path).train(endless, steps=1)
    taken = []

    def input_fn():
        for i in range(4):
            taken.append(i)
            yield X, np.full_like(Y, i)

    assert estimator.evaluate(input_fn, steps=2)["label"] == 0.5
    assert taken == [0, 1]
    assert estimator.evaluate(input_fn, steps=9)["label"] == 1.5
    assert estimator.evaluate(input_fn)["label"] == 1.5
    with pytest.raises(ValueError, match="Must specify steps > 0, given: 0"):
        estimator.evaluate(input_fn, steps=0)


@pytest.mark.covers("1.4 checkpoint")
def test_without_checkpoint_initial_values_are_evaluated_with_a_warning(tmp_path, messages):
    results = make(tmp_path).evaluate(times(1))
    assert results["global_step"] == 0
    assert results["loss"] == pytest.approx(float(np.mean(Y**2)))
    assert any(
        re.match(r"Could not find trained model in model_dir: .*, running initialization", text) for text in messages()
    )


@pytest.mark.quick
@pytest.mark.covers("1.4 checkpoint")
def test_an_older_checkpoint_can_be_evaluated_and_predicted_with(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=2).train(endless, steps=4)
    newest = estimator.evaluate(times(1))
    older = estimator.evaluate(times(1), checkpoint_path=str(tmp_path / "ckpt-2"))
    assert (older["global_step"], newest["global_step"]) == (2, 4)
    assert older["loss"] > newest["loss"]
    assert estimator.evaluate(times(1)) == newest
    initial = estimator.predict(lambda: X, "y", checkpoint_path=str(tmp_path / "ckpt-0"))
    assert [row["y"] for row in initial] == [0, 0, 0, 0]


@pytest.mark.quick
@pytest.mark.covers("1.4 checkpoint")
@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_path_that_is_no_checkpoint_is_an_error_at_once(tmp_path, verb):
    estimator = make(tmp_path).train(endless, steps=1)
    (tmp_path / "ckpt-9").mkdir()
    for path in ("nowhere", str(tmp_path), str(tmp_path / "ckpt-9")):
        with pytest.raises(ValueError, match=f"{path} is not a checkpoint"):
            getattr(estimator, verb)(refuse, checkpoint_path=path)
    assert estimator.latest_checkpoint() == str(tmp_path / "ckpt-1")


@pytest.mark.covers("1.4 loss", "13 12 mean of batch means")
def test_evaluating_no_batch_is_an_error(tmp_path):
    for estimator in (make(tmp_path), make(tmp_path).train(endless, steps=1)):
        with pytest.raises(ValueError, match="`evaluate` got no batch from input_fn"):
            estimator.evaluate(lambda: [])


@pytest.mark.covers("1.4 metrics")
def test_counts_stay_exact_beyond_what_float32_can_count(tmp_path):
    def model_fn(features, mode):
        est.get_variable("w", ())
        weights = jnp.array([10_000_001.0])
        metrics = {
            "count": est.metrics.true_positives(jnp.array([True]), jnp.array([True]), weights),
            "mean": est.metrics.mean(features, jnp.array([1e7])),
        }
        return est.EstimatorSpec(mode, loss=jnp.float32(0), train_op=est.TrainOp(), eval_metric_ops=metrics)

    batches = [np.array([i % 2], np.float32) for i in range(20)]
    results = make(tmp_path, model_fn).evaluate(lambda: batches)
    assert results["count"] == 200_000_020
    assert results["mean"] == 0.5


@pytest.mark.covers("1.4 metrics")
def test_any_object_with_merge_and_compute_is_a_metric(tmp_path):
    def model_fn(features, mode):
        largest = {"largest": Largest(features.max())}
        return est.EstimatorSpec(mode, loss=features.mean(), eval_metric_ops=largest)

    batches = [np.array([1, 5], np.float32), np.array([4, 2], np.float32)]
    results = make(tmp_path, model_fn).evaluate(lambda: batches)
    assert results["largest"] == 5.0 and type(results["largest"]) is float


@pytest.mark.covers("1.4 loss", "13 12 mean of batch means")
def test_loss_is_the_mean_of_batch_losses_or_over_examples_which_metrics_count(tmp_path):
    batches = lambda: [(X, Y), (X[:1], Y[:1] + 9)]  # noqa: E731
    by_batches = make(tmp_path).train(times(1), steps=1).evaluate(batches)
    by_examples = make(tmp_path, eval_loss_over="examples").evaluate(batches)
    first, second = (make(tmp_path).evaluate(lambda pair=pair: pair)["loss"] for pair in batches())
    assert by_batches["loss"] == pytest.approx((first + second) / 2)
    assert by_examples["loss"] == pytest.approx((4 * first + second) / 5)
    assert by_batches["label"] == by_examples["label"] == np.mean([*Y, Y[0] + 9])


@pytest.mark.covers("1.4 checkpoint")
@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_no_checkpoint_may_be_an_error(tmp_path, verb):
    with pytest.raises(ValueError, match="Could not find trained model in model_dir"):
        getattr(make(tmp_path), verb)(times(1), checkpoint_path="latest")
    assert getattr(make(tmp_path).train(times(1), steps=1), verb)(times(1), checkpoint_path="latest")


@pytest.mark.quick
def test_many_small_batches_give_what_they_give_one_by_one(tmp_path, monkeypatch):
    def model_fn(features, labels, mode):
        y = features @ est.get_variable("w", (2, 1))
        metrics = {
            "accuracy": est.metrics.accuracy(labels > 1, y > 1),
            "auc": est.metrics.auc(labels > 5, jax.nn.sigmoid(y)),
            "largest": Largest(y.max()),
        }
        return est.EstimatorSpec(mode, loss=jnp.mean((y - labels) ** 2), eval_metric_ops=metrics)

    random = np.random.default_rng(0)
    batches = [
        (random.normal(size=(4, 2)).astype(np.float32), random.normal(3, 3, (4, 1)).astype(np.float32))
        for _ in range(35)
    ]
    sizes = []
    several = make(tmp_path, model_fn)
    program = several._runs.eval_steps.loop
    noted = lambda *args, rows: sizes.append(len(args[-1])) or program(*args, rows=rows)  # noqa: E731
    monkeypatch.setattr(several._runs.eval_steps, "loop", noted)
    results = several.evaluate(lambda: batches)
    assert sizes == [16, 16]  # the others one by one
    one_by_one = make(tmp_path, model_fn)
    monkeypatch.setattr(one_by_one._runs.eval_steps, "at_once", lambda *args: 1)
    assert results == {name: pytest.approx(value) for name, value in one_by_one.evaluate(lambda: batches).items()}
