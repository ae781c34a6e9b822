"""What train, evaluate and predict promise, through the public API."""

import copy
import itertools
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import estimator as est
from estimator import _checkpoint

X = np.arange(8, dtype=np.float32).reshape(4, 2)
Y = X.sum(axis=1, keepdims=True)


class Linear:
    """y = x w; remembers the modes it was traced in."""

    def __init__(self, optimizer=lambda: optax.sgd(0.01, momentum=0.5)):
        self.modes = []
        self.optimizer = optimizer

    def __call__(self, features, labels, mode):
        self.modes.append(str(mode))
        w = est.get_variable("w", (2, 1), initializer=jax.nn.initializers.zeros)
        y = features @ w
        predictions = {"y": y[:, 0], "x": features}
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=predictions)
        loss = est.losses.mean_squared_error(labels, y)
        return est.EstimatorSpec(
            mode,
            predictions=predictions,
            loss=loss,
            train_op=est.Optimizer(self.optimizer).minimize(loss),
            eval_metric_ops={"label": est.metrics.mean(labels)},
        )


def endless():
    return itertools.repeat((X, Y))


def times(n, batch=(X, Y)):
    return lambda: [batch] * n


def make(model_dir, model_fn=None, params=None, **config):
    config = est.RunConfig(**({"save_checkpoints_steps": 1000} | config))
    return est.Estimator(model_fn or Linear(), model_dir, config, params)


def saved_steps(estimator):
    names = os.listdir(estimator.model_dir) if os.path.isdir(estimator.model_dir) else []
    return sorted(int(m[1]) for m in map(re.compile(r"ckpt-(\d+)").fullmatch, names) if m)


def step_of(estimator):
    return int(estimator.get_variable_value("global_step"))


def refuse(*args, **kwargs):
    raise AssertionError("must not be called")


@pytest.fixture
def messages(caplog):
    caplog.set_level("INFO", logger="absl")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "absl"]


# Training: how many steps.


def test_steps_are_counted_from_where_the_last_call_ended(tmp_path):
    estimator = make(tmp_path)
    assert estimator.train(endless, steps=3) is estimator
    assert step_of(estimator) == 3
    assert step_of(estimator.train(endless, steps=4)) == 7


def test_max_steps_is_absolute(tmp_path):
    estimator = make(tmp_path).train(endless, max_steps=3)
    assert step_of(estimator) == 3
    assert step_of(estimator.train(endless, max_steps=5)) == 5


def test_training_is_skipped_when_max_steps_is_reached(tmp_path, messages):
    make(tmp_path).train(endless, steps=5)
    for max_steps in (5, 4):
        make(tmp_path, model_fn=lambda features, labels, mode: refuse()).train(refuse, max_steps=max_steps)
    assert messages().count("Skipping training since max_steps has already saved.") == 2


def test_a_second_estimator_goes_on_with_variables_and_slots(tmp_path):
    make(tmp_path / "once").train(endless, steps=6)
    make(tmp_path / "twice").train(endless, steps=2)
    make(tmp_path / "twice").train(endless, steps=4)
    once, twice = make(tmp_path / "once"), make(tmp_path / "twice")
    names = once.get_variable_names()
    assert names == twice.get_variable_names()
    for name in names:
        np.testing.assert_array_equal(once.get_variable_value(name), twice.get_variable_value(name), err_msg=name)


def test_training_equals_the_loop_written_by_hand(tmp_path):
    estimator = make(tmp_path).train(endless, steps=5)
    optimizer = optax.sgd(0.01, momentum=0.5)
    w = jnp.zeros((2, 1))
    slots = optimizer.init(w)
    for _ in range(5):
        gradient = jax.grad(lambda w: jnp.mean((X @ w - Y) ** 2))(w)
        updates, slots = optimizer.update(gradient, slots, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(estimator.get_variable_value("w"), w, rtol=1e-5)


def test_input_that_ends_ends_training_with_a_checkpoint(tmp_path):
    estimator = make(tmp_path).train(times(3), steps=10)
    assert saved_steps(estimator) == [0, 3]


def test_no_more_batches_are_taken_than_steps(tmp_path):
    taken = []

    def input_fn():
        for i in itertools.count():
            taken.append(i)
            yield X, Y

    for steps_per_loop in (1, 4):
        taken.clear()
        make(tmp_path / str(steps_per_loop), steps_per_loop=steps_per_loop).train(input_fn, steps=6)
        assert len(taken) == 6


def test_empty_input_warns_and_makes_no_step(tmp_path, messages):
    estimator = make(tmp_path)
    assert estimator.train(lambda: [], steps=2) is estimator
    assert saved_steps(estimator) in ([], [0])
    assert "Training with estimator made no steps. Perhaps input is empty or misspecified." in messages()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"steps": 1, "max_steps": 2},
            "Can not provide both steps and max_steps; got steps=1 and max_steps=2",
        ),
        ({"steps": 0}, "Must specify steps > 0, given: 0"),
        ({"steps": -3}, "Must specify steps > 0, given: -3"),
        ({"max_steps": 0}, "Must specify max_steps > 0, given: 0"),
    ],
)
def test_bad_numbers_of_steps_are_errors(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path).train(refuse, **given)


@pytest.mark.parametrize("steps_per_loop", [1, 4])
def test_an_error_of_the_input_propagates_and_nothing_is_saved_after_it(tmp_path, steps_per_loop):
    def input_fn():
        yield from [(X, Y)] * 5
        raise KeyError("from the input")

    estimator = make(tmp_path, save_checkpoints_steps=2, steps_per_loop=steps_per_loop)
    with pytest.raises(KeyError, match="from the input"):
        estimator.train(input_fn)
    assert saved_steps(estimator) == [0, 2, 4]
    assert step_of(estimator.train(endless, steps=1)) == 5


# Training: when it saves.


def test_checkpoints_are_saved_at_the_start_every_n_steps_and_at_the_end(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=10, keep_checkpoint_max=None)
    estimator.train(endless, steps=13)
    assert saved_steps(estimator) == [0, 10, 13]
    estimator.train(endless, steps=25)
    assert saved_steps(estimator) == [0, 10, 13, 23, 33, 38]
    assert estimator.latest_checkpoint() == str(tmp_path / "ckpt-38")


def test_keep_checkpoint_max_leaves_the_newest(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=2)
    estimator.train(endless, steps=7)
    assert saved_steps(estimator) == [6, 7]


def test_saving_by_seconds(tmp_path):
    estimator = est.Estimator(Linear(), tmp_path, est.RunConfig(save_checkpoints_secs=1e-6, keep_checkpoint_max=None))
    assert saved_steps(estimator.train(endless, steps=3)) == [0, 1, 2, 3]


def test_without_checkpoints_nothing_is_written_and_steps_do_not_accumulate(tmp_path, messages):
    estimator = make(tmp_path, save_checkpoints_steps=None)
    estimator.train(endless, steps=5).train(endless, steps=5)
    assert saved_steps(estimator) == []
    assert estimator.latest_checkpoint() is None
    assert estimator.evaluate(times(1))["global_step"] == 0


def test_without_checkpoints_an_earlier_one_stays_what_it_was(tmp_path):
    make(tmp_path).train(endless, steps=5)
    before = make(tmp_path).evaluate(times(1))
    estimator = make(tmp_path, save_checkpoints_steps=None).train(endless, steps=3)
    assert saved_steps(estimator) == [0, 5]
    assert estimator.evaluate(times(1)) == before


# Training: several steps in one program.


@pytest.mark.parametrize("steps_per_loop", [2, 3, 5, 50])
def test_steps_per_loop_changes_nothing_but_speed(tmp_path, messages, caplog, steps_per_loop):
    smaller = (X[:2], Y[:2])

    def run(k):
        caplog.clear()
        estimator = make(
            tmp_path / str(k),
            save_checkpoints_steps=7,
            log_step_count_steps=4,
            keep_checkpoint_max=None,
            steps_per_loop=k,
        )
        estimator.train(lambda: [(X + i, Y) for i in range(16)] + [smaller])
        estimator.train(lambda: [(X + i, Y) for i in range(9)], steps=8)
        logged = [int(m[1]) for text in messages() if (m := re.search(r"step = (\d+)", text))]
        return estimator, saved_steps(estimator), logged

    one, one_saved, one_logged = run(1)
    several, several_saved, several_logged = run(steps_per_loop)
    assert one_saved == several_saved == [0, 7, 14, 17, 24, 25]
    assert one_logged == several_logged == [4, 8, 12, 16, 21, 25]
    for name in one.get_variable_names():
        np.testing.assert_allclose(one.get_variable_value(name), several.get_variable_value(name), rtol=2e-5, atol=1e-7)


def test_steps_per_loop_stacks_trees_without_labels(tmp_path):
    def model_fn(features, mode):
        w = est.get_variable("w", (), initializer=jax.nn.initializers.zeros)
        loss = jnp.mean((w - features["a"]["b"]) ** 2)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.5)).minimize(loss))

    estimator = make(tmp_path, model_fn, steps_per_loop=3)
    estimator.train(lambda: [{"a": {"b": np.full(2, i, np.float32)}} for i in range(7)])
    assert estimator.get_variable_value("w") == 6
    estimator.train(lambda: ({"a": {"b": jnp.full(2, i, jnp.float32)}} for i in range(3)))
    assert estimator.get_variable_value("w") == 2


# Evaluation.


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


def test_evaluate_takes_at_most_so_many_batches(tmp_path):
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


def test_loss_is_the_mean_of_batch_losses_and_metrics_count_examples(tmp_path):
    def model_fn(features, mode):
        est.get_variable("w", ())
        mean = {"mean": est.metrics.mean(features)}
        return est.EstimatorSpec(mode, loss=jnp.mean(features), train_op=est.TrainOp(), eval_metric_ops=mean)

    uneven = lambda: [np.array([0.0, 1.0], np.float32), np.array([2.0], np.float32)]  # noqa: E731
    results = make(tmp_path, model_fn).evaluate(uneven)
    assert (results["loss"], results["mean"]) == (1.25, 1.0)


def test_without_checkpoint_initial_values_are_evaluated_with_a_warning(tmp_path, messages):
    results = make(tmp_path).evaluate(times(1))
    assert results["global_step"] == 0
    assert results["loss"] == pytest.approx(float(np.mean(Y**2)))
    assert any(
        re.match(r"Could not find trained model in model_dir: .*, running initialization", text) for text in messages()
    )


def test_an_older_checkpoint_can_be_evaluated_and_predicted_with(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=2).train(endless, steps=4)
    newest = estimator.evaluate(times(1))
    older = estimator.evaluate(times(1), checkpoint_path=str(tmp_path / "ckpt-2"))
    assert (older["global_step"], newest["global_step"]) == (2, 4)
    assert older["loss"] > newest["loss"]
    assert estimator.evaluate(times(1)) == newest
    initial = estimator.predict(lambda: X, "y", checkpoint_path=str(tmp_path / "ckpt-0"))
    assert [row["y"] for row in initial] == [0, 0, 0, 0]


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_path_that_is_no_checkpoint_is_an_error_at_once(tmp_path, verb):
    estimator = make(tmp_path).train(endless, steps=1)
    (tmp_path / "ckpt-9").mkdir()
    for path in ("nowhere", str(tmp_path), str(tmp_path / "ckpt-9")):
        with pytest.raises(ValueError, match=f"{path} is not a checkpoint"):
            getattr(estimator, verb)(refuse, checkpoint_path=path)
    assert estimator.latest_checkpoint() == str(tmp_path / "ckpt-1")


def test_evaluating_no_batch_is_an_error(tmp_path):
    for estimator in (make(tmp_path), make(tmp_path).train(endless, steps=1)):
        with pytest.raises(ValueError, match="`evaluate` got no batch from input_fn"):
            estimator.evaluate(lambda: [])


def test_counts_stay_exact_beyond_what_float32_can_count(tmp_path):
    def model_fn(features, mode):
        est.get_variable("w", ())
        weights = jnp.array([10_000_001.0])
        metrics = {
            "count": est.metrics.true_positives(jnp.array([True]), jnp.array([True]), weights),
            "mean": est.metrics.mean(features, jnp.array([1e7])),
        }
        loss = jnp.float32(0)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.TrainOp(), eval_metric_ops=metrics)

    batches = [np.array([i % 2], np.float32) for i in range(20)]
    results = make(tmp_path, model_fn).evaluate(lambda: batches)
    assert results["count"] == 200_000_020
    assert results["mean"] == 0.5


@jax.tree_util.register_pytree_node_class
class Largest:
    """A metric of clu's kind: `merge` and `compute`."""

    def __init__(self, value):
        self.value = value

    def merge(self, other):
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, values):
        return cls(*values)


def test_any_object_with_merge_and_compute_is_a_metric(tmp_path):
    def model_fn(features, mode):
        largest = {"largest": Largest(features.max())}
        return est.EstimatorSpec(mode, loss=features.mean(), eval_metric_ops=largest)

    batches = [np.array([1, 5], np.float32), np.array([4, 2], np.float32)]
    results = make(tmp_path, model_fn).evaluate(lambda: batches)
    assert results["largest"] == 5.0 and type(results["largest"]) is float


# What stays alive between calls.


def count_restores(monkeypatch):
    restored = []
    restore = _checkpoint.restore

    def counted(path, *args, **kwargs):
        restored.append(os.path.basename(path))
        return restore(path, *args, **kwargs)

    monkeypatch.setattr(_checkpoint, "restore", counted)
    return restored


def test_ten_evaluations_trace_once_compile_once_and_read_once(tmp_path, monkeypatch, caplog):
    make(tmp_path).train(endless, steps=2)
    restored = count_restores(monkeypatch)
    model_fn = Linear()
    estimator = make(tmp_path, model_fn)
    first = estimator.evaluate(times(2))
    traces = len(model_fn.modes)
    assert traces <= 2  # an abstract one for the structure, and the program
    with jax.log_compiles():
        for _ in range(9):
            assert estimator.evaluate(times(2)) == first
    assert len(model_fn.modes) == traces
    assert restored == ["ckpt-2"]
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_training_again_traces_and_reads_nothing(tmp_path, monkeypatch, caplog):
    restored = count_restores(monkeypatch)
    model_fn = Linear()
    estimator = make(tmp_path, model_fn).train(endless, steps=2)
    traces = len(model_fn.modes)
    with jax.log_compiles():
        estimator.train(endless, steps=2).train(endless, max_steps=6)
    assert len(model_fn.modes) == traces
    assert restored == []
    assert not [r for r in caplog.records if re.search(r"Compiling (jit\()?(one|several)", r.getMessage())]


def test_an_older_checkpoint_and_going_on_from_disk_compile_nothing_anew(tmp_path, caplog):
    model_fn = Linear()
    estimator = make(tmp_path, model_fn, save_checkpoints_steps=2).train(endless, steps=4)
    estimator.evaluate(times(1))
    traces = len(model_fn.modes)
    with jax.log_compiles():
        estimator.evaluate(times(1), checkpoint_path=str(tmp_path / "ckpt-2"))
        estimator.train(endless, steps=1)
        estimator.evaluate(times(1))
    assert len(model_fn.modes) == traces
    assert not [r for r in caplog.records if re.search(r"Compiling (jit\()?(one|step)\b", r.getMessage())]


def test_training_after_evaluating_from_disk_has_the_slots(tmp_path):
    make(tmp_path / "a").train(endless, steps=2)
    estimator = make(tmp_path / "a")
    estimator.evaluate(times(1))
    list(estimator.predict(lambda: X))
    estimator.train(endless, steps=2)
    straight = make(tmp_path / "b").train(endless, steps=4)
    np.testing.assert_array_equal(estimator.get_variable_value("w"), straight.get_variable_value("w"))


def test_the_verbs_may_come_in_any_order(tmp_path):
    estimator = make(tmp_path)
    initial = list(estimator.predict(lambda: X))
    assert [row["y"] for row in initial] == [0, 0, 0, 0]
    first = estimator.evaluate(times(1))
    assert first["global_step"] == 0
    estimator.train(endless, steps=2)
    second = estimator.evaluate(times(1))
    assert second["global_step"] == 2
    assert second["loss"] < first["loss"]
    estimator.train(endless, steps=2)
    y = np.array([row["y"] for row in estimator.predict(lambda: X)])
    np.testing.assert_allclose(y, (X @ estimator.get_variable_value("w"))[:, 0], rtol=1e-6)
    make(tmp_path / "straight").train(endless, steps=4)
    np.testing.assert_array_equal(
        estimator.get_variable_value("w"), make(tmp_path / "straight").get_variable_value("w")
    )


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


def test_a_newer_checkpoint_written_during_training_is_not_taken_for_ones_own(tmp_path):
    mine, other = make(tmp_path), make(tmp_path)

    def input_fn():
        yield X, Y
        yield X, Y
        other.train(endless, steps=5)

    mine.train(input_fn)
    assert saved_steps(mine) == [0, 2, 5]
    assert mine.evaluate(times(1)) == other.evaluate(times(1))


# Prediction.


def test_predict_is_lazy_but_checks_its_arguments_at_once(tmp_path):
    calls = []

    def input_fn():
        for i in range(3):
            calls.append(i)
            yield X

    estimator = make(tmp_path).train(endless, steps=1)
    predictions = estimator.predict(input_fn)
    assert calls == []
    next(predictions)
    assert calls == [0]
    assert len(list(predictions)) == 11
    with pytest.raises(TypeError, match="`input_fn` must be callable"):
        estimator.predict(X)
    with pytest.raises(ValueError, match="predict_keys must name at least one"):
        estimator.predict(input_fn, predict_keys=[])


def test_predict_gives_single_examples_or_batches(tmp_path):
    estimator = make(tmp_path).train(endless, steps=1)
    rows = list(estimator.predict(lambda: [X, X[:1]]))
    batches = list(estimator.predict(lambda: [X, X[:1]], yield_single_examples=False))
    assert [set(row) for row in rows] == [{"y", "x"}] * 5
    assert [batch["x"].shape for batch in batches] == [(4, 2), (1, 2)]
    np.testing.assert_array_equal([row["x"] for row in rows], np.concatenate([X, X[:1]]))
    np.testing.assert_array_equal([row["y"] for row in rows], np.concatenate([batch["y"] for batch in batches]))
    assert isinstance(rows[0]["x"], np.ndarray)
    assert isinstance(batches[0]["x"], np.ndarray)


def test_predictions_may_be_any_tree(tmp_path):
    def model_fn(features, mode):
        return est.EstimatorSpec(mode, predictions=(features, {"a": [features * 2]}))

    estimator = make(tmp_path, model_fn)
    rows = list(estimator.predict(lambda: np.arange(2.0, dtype=np.float32)))
    assert rows == [(0, {"a": [0]}), (1, {"a": [2]})]
    with pytest.raises(ValueError, match="predict_keys argument is not valid in case of non-dict"):
        next(estimator.predict(lambda: X, predict_keys="a"))


def test_predict_keys(tmp_path):
    estimator = make(tmp_path).train(endless, steps=1)
    for keys in ("y", ["y"], ("y",)):
        assert set(next(estimator.predict(lambda: X, keys))) == {"y"}
    assert set(next(estimator.predict(lambda: X, ["x", "y"]))) == {"x", "y"}
    with pytest.raises(ValueError, match=r"predict_keys names \['z'\], but .* \['x', 'y'\]"):
        next(estimator.predict(lambda: X, ["y", "z"]))


def test_predictions_of_different_length_are_an_error_row_by_row(tmp_path):
    def model_fn(features, mode):
        return est.EstimatorSpec(mode, predictions={"a": features, "b": features[:1]})

    estimator = make(tmp_path, model_fn)
    with pytest.raises(ValueError, match=r"Batch length .* same.*\['a'\]: \(4,\), \['b'\]: \(1,\)"):
        next(estimator.predict(lambda: X))
    (batch,) = estimator.predict(lambda: X, yield_single_examples=False)
    assert (len(batch["a"]), len(batch["b"])) == (4, 1)


def test_predict_leaves_labels_out(tmp_path):
    seen = []

    def model_fn(features, labels, mode):
        seen.append(labels)
        return est.EstimatorSpec(mode, predictions=features)

    assert len(list(make(tmp_path, model_fn).predict(times(2)))) == 8
    assert set(map(type, seen)) == {type(None)}


def test_predicting_no_batch_yields_nothing(tmp_path):
    assert list(make(tmp_path).train(endless, steps=1).predict(lambda: [])) == []


def test_predictions_may_be_interleaved(tmp_path):
    estimator = make(tmp_path).train(endless, steps=1)
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


# input_fn.


@pytest.mark.parametrize(
    ("input_fn", "batches"),
    [
        (lambda: ((X, Y) for _ in range(3)), 3),
        (lambda: [(X, Y), [X, Y]], 2),
        (lambda: (X, Y), 1),
        (lambda: iter([(X, Y)]), 1),
        (lambda: (jnp.asarray(X), jnp.asarray(Y)), 1),
    ],
    ids=["generator", "list", "tuple", "iterator", "jax"],
)
def test_forms_of_input(tmp_path, input_fn, batches):
    assert step_of(make(tmp_path).train(input_fn)) == batches


def test_a_dict_is_one_batch(tmp_path):
    def model_fn(features, mode):
        return est.EstimatorSpec(mode, predictions=features["a"] + features["b"])

    ones = np.ones(2, np.float32)
    assert list(make(tmp_path, model_fn).predict(lambda: {"a": ones, "b": ones})) == [2, 2]


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


def test_model_dir_rules(tmp_path, messages):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert est.Estimator(Linear(), a).model_dir == a
    assert est.Estimator(Linear(), pathlib.Path(a)).model_dir == a
    assert est.Estimator(Linear(), config=est.RunConfig(model_dir=b)).model_dir == b
    both = est.Estimator(Linear(), a, est.RunConfig(model_dir=a))
    assert (both.model_dir, both.config.model_dir) == (a, a)
    with pytest.raises(ValueError, match="`model_dir` are set both in constructor and `RunConfig`"):
        est.Estimator(Linear(), a, est.RunConfig(model_dir=b))
    for nothing in (None, ""):
        made = est.Estimator(Linear(), nothing).model_dir
        assert os.path.isdir(made)
        assert any(f"Using temporary folder as model directory: {made}" in m for m in messages())


def test_a_moved_model_dir_is_the_same_model(tmp_path):
    before = make(tmp_path / "a").train(endless, steps=2).evaluate(times(1))
    (tmp_path / "a").rename(tmp_path / "b")
    assert make(tmp_path / "b").evaluate(times(1)) == before


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


def test_properties(tmp_path):
    model_fn = Linear()
    estimator = make(tmp_path, model_fn, seed=3)
    assert estimator.model_fn is model_fn
    assert estimator.config == est.RunConfig(model_dir=str(tmp_path), seed=3, save_checkpoints_steps=1000)
    assert est.Estimator(model_fn, tmp_path).config == est.RunConfig(model_dir=str(tmp_path))
    assert model_fn.modes == []


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
        def model_fn(features, labels, mode):
            loss = sum(jnp.sum(est.get_variable(name, shape)) for name in names)
            train_op = est.Optimizer(optax.sgd(0.1)).minimize(loss)
            return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

        return model_fn

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
