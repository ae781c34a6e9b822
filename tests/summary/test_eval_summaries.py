"""What evaluate writes into the eval_dir, and the bars of train, evaluate and predict."""

import dataclasses
import io
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing.estimators import Linear, X, Y, endless, make, times
from testing.hooks import When
from testing.summaries import read, scalars, showing, shown

import estimator as est


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """A metric with a tuple as its result."""

    total: jax.Array
    rows: jax.Array

    @classmethod
    def of(cls, features):
        return cls(features.sum(), jnp.int32(len(features)))

    def merge(self, other):
        return type(self)(self.total + other.total, self.rows + other.rows)

    def compute(self):
        return self.total, self.rows


@pytest.mark.covers("1.4 side effects")
def test_the_metrics_of_each_evaluation_are_written_at_its_step_once(tmp_path):
    estimator = make(tmp_path).train(endless, steps=3)
    first = estimator.evaluate(times(2))
    assert estimator.eval_dir() == str(tmp_path / "eval")
    named = estimator.evaluate(times(1, (2 * X, Y)), name="twice")
    assert estimator.eval_dir("twice") == str(tmp_path / "eval_twice")
    second = estimator.train(endless, steps=2).evaluate(times(2))
    expected = {step: {k: results[k] for k in ("label", "loss")} for step, results in ((3, first), (5, second))}
    assert est.read_eval_metrics(estimator.eval_dir()) == expected
    assert est.read_eval_metrics(estimator.eval_dir("twice")) == {3: {"label": named["label"], "loss": named["loss"]}}
    assert scalars(estimator.eval_dir()) == {
        tag: [(step, np.float32(values[tag])) for step, values in expected.items()] for tag in ("label", "loss")
    }
    texts = shown(estimator.eval_dir())["checkpoint_path/text_summary"]
    assert [list(value.tensor.string_val) for _, value in texts] == [
        [os.fsencode(tmp_path / f"ckpt-{step}")] for step in (3, 5)
    ]
    assert list(read(tmp_path)) == [1]  # the history of the training is its own
    again = estimator.evaluate(times(1, (X, 2 * Y)), checkpoint_path=str(tmp_path / "ckpt-3"))
    losses = {3: again["loss"], 5: second["loss"]}
    assert losses == read(estimator.eval_dir()) and again["loss"] != first["loss"]
    assert scalars(estimator.eval_dir())["loss"] == [(step, np.float32(loss)) for step, loss in losses.items()]
    assert len([name for name in os.listdir(estimator.eval_dir()) if "tfevents" in name]) == 1


@jax.tree_util.register_dataclass
class Parts(Pair):
    """A metric with a dict as its result, in which one value is no number."""

    def compute(self):
        return {"total": self.total, "of": {"rows": self.rows}, "pair": (self.total, self.rows)}


@pytest.mark.covers("1.4 side effects")
def test_arrays_are_histograms_dicts_are_their_values_and_what_is_no_number_is_skipped_with_a_warning(
    tmp_path, messages
):
    def model_fn(features, labels, mode):
        metrics = {
            "recall": est.metrics.recall_at_thresholds(labels > 3, labels / 16, [0.2, 0.4, 0.6]),
            "pair": Pair.of(features),
            "parts": Parts.of(features),
        }
        return Linear()(features, labels, mode)._replace(eval_metric_ops=metrics)

    estimator = make(tmp_path, model_fn)
    results = estimator.evaluate(times(1))
    assert results["recall"].shape == (3,) and results["pair"] == (28.0, 4)
    assert results["parts"] == {"total": 28.0, "of": {"rows": 4}, "pair": (28.0, 4)}
    histogram = shown(estimator.eval_dir())["recall"][0][1].histo
    assert histogram.num == 3 and histogram.sum == pytest.approx(results["recall"].sum())
    written = est.read_eval_metrics(estimator.eval_dir())[0]
    assert written == {"loss": results["loss"], "parts/total": 28, "parts/of/rows": 4}
    for name in ("pair", "parts/pair"):
        text = f"Skipping summary for {name}, must be a number or an array of numbers; got (28.0, 4)."
        assert text in messages()


def test_a_hook_shows_the_last_batch_that_it_asked_for(tmp_path):
    estimator = make(tmp_path, showing).train(endless, steps=3)
    batches = [(X * i, Y) for i in range(1, 6)]
    estimator.evaluate(lambda: batches, hooks=[est.SummarySaverHook(save_steps=2)])
    (point,) = scalars(estimator.eval_dir())["brightness"]
    assert point == (3, X.mean() * 5)
    tags = {"loss", "label", "brightness", "input/values", "input/rows/image/0", "input/rows/image/1"}
    assert set(shown(estimator.eval_dir())) == tags | {"checkpoint_path/text_summary"}
    (row,) = est.read_history(estimator.eval_dir())
    assert set(row) == {"step", "time", "loss", "label", "brightness"}
    estimator.evaluate(lambda: batches)
    assert "brightness" not in shown(estimator.eval_dir())


def test_a_state_in_memory_is_evaluated_into_the_eval_dir(tmp_path):
    def evaluate(context):
        results.append(estimator.evaluate_state(context.state, times(1), name="live"))

    estimator, results = make(tmp_path), []
    estimator.train(endless, steps=4, hooks=[When(2, 4, after_run=evaluate)])
    metrics = est.read_eval_metrics(estimator.eval_dir("live"))
    assert list(metrics) == [2, 4] and metrics[4]["loss"] == results[1]["loss"]
    assert "checkpoint_path/text_summary" not in shown(estimator.eval_dir("live"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def use(tmp_path, **config):
    estimator = make(tmp_path, log_step_count_steps=2, **config)
    estimator.train(endless, steps=6).evaluate(times(3), steps=3)
    return list(estimator.predict(times(2)))


@pytest.mark.covers("1.4 logs")
def test_bars_on_a_terminal(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    use(tmp_path)
    text = terminal.getvalue()
    # The number done, the time taken and left, the rate, and in train the loss.
    assert re.search(r"100%.* 6/6 \[\d\d:\d\d<\d\d:\d\d, .*(step/s|s/step), loss=[\d.e+-]+\]", text)
    assert re.search(r"Evaluation: 100%.* 3/3 \[\d\d:\d\d<\d\d:\d\d, .*(batch/s|s/batch)\]", text)
    assert re.search(r"Prediction: 2batch \[\d\d:\d\d, .*(batch/s|s/batch)\]", text)


@pytest.mark.covers("1.4 logs")
@pytest.mark.parametrize(("file", "config"), [(Terminal(), {"verbose": False}), (io.StringIO(), {})])
def test_no_bars_elsewhere_nor_for_who_wants_none(tmp_path, monkeypatch, file, config):
    monkeypatch.setattr("sys.stderr", file)
    use(tmp_path, **config)
    assert "batch" not in file.getvalue() and "%|" not in file.getvalue()


def test_an_evaluation_within_a_training_leaves_no_bar_behind(tmp_path, monkeypatch):
    terminal, estimator = Terminal(), make(tmp_path)
    monkeypatch.setattr("sys.stderr", terminal)
    evaluates = When(2, after_run=lambda context: estimator.evaluate_state(context.state, times(3)))
    estimator.train(endless, steps=3, hooks=[evaluates])
    text = terminal.getvalue()
    assert "Evaluation:" in text and "Evaluation:" not in text[text.rindex("\r") :]
