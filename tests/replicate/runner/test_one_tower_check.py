"""Warnings where towers compute other numbers than one: `replicate_model_fn(check=True)`, and means of one number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import cpus, started

import estimator as est
from replicate import BlockSync, TowerOptimizer, replicate_model_fn

BATCH = {"l": np.arange(8, dtype=np.float32), "w": np.array([1, 0, 1, 1, 1, 1, 1, 0], np.float32)}


def by_hand(losses, w):
    return (losses * w).sum() / w.sum()


def right(losses, w):
    return est.losses.compute_weighted_loss(losses, w, est.Reduction.MEAN)


def replicated(mean, **options):
    def model_fn(features, mode):
        losses = features["l"] * est.get_variable("v", (), initializer=jax.nn.initializers.ones)
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, losses)
        loss = mean(losses, features["w"])
        metrics = {"right": est.metrics.mean(losses, features["w"])}
        return est.EstimatorSpec(mode, losses, loss, TowerOptimizer(optax.sgd(0.0)).minimize(loss), metrics)

    return replicate_model_fn(model_fn, devices=cpus(4), **options)


def warnings(messages):
    return [message for message in messages() if "in several towers" in message]


def run(model_fn):
    model, state = started(model_fn, BATCH)
    for _ in range(2):
        state, _ = model.train_step(state, BATCH)
        model.eval_step(state, BATCH)
        model.train_loop(state, [BATCH, BATCH])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"block_sync": BlockSync(2)}, {"variable_distribution": "shared_round_robin"}])
def test_a_mean_by_hand_is_one_warning_in_each_mode(options, messages):
    run(replicated(by_hand, check=True, **options))
    in_train, in_eval = warnings(messages)
    assert in_train.startswith(
        "In mode 'train' the first batch gives other numbers in several towers than in one: the loss: 3.25 in several "
        "towers, 3.3333"
    )
    assert in_eval.startswith("In mode 'eval'")
    assert "write `est.losses.compute_weighted_loss(l, w, est.Reduction.MEAN)`" in in_train
    assert "metric" not in in_train.partition("Usual causes")[0]  # the one of the same values is right


@pytest.mark.slow
def test_an_estimator_warns_too(messages, tmp_path):
    estimator = est.Estimator(replicated(by_hand, check=True), tmp_path)
    estimator.train(lambda: [BATCH] * 3)
    assert len(warnings(messages)) == 1
    estimator.evaluate(lambda: [BATCH] * 2)
    assert len(warnings(messages)) == 2


def test_a_metric_by_hand_and_moments_of_a_tower_alone_are_named(messages):
    def model_fn(features, mode):
        normalized = est.layers.batch_normalization(features["l"][:, None], training=True)[:, 0]
        metrics = {"mine": est.metrics.mean(by_hand(features["l"], features["w"]) * jnp.ones_like(features["l"]))}
        loss = right(features["l"], features["w"])
        return est.EstimatorSpec(mode, {"normalized": normalized}, loss, est.group(), metrics)

    model = est.transform(replicate_model_fn(model_fn, devices=cpus(4), check=True))
    model.eval_step(model.init(jax.random.key(0), BATCH), BATCH)
    (line,) = warnings(messages)
    named = line.partition("Usual causes")[0]
    assert "the metric 'mine': 3.25 in several towers, 3.3333" in named and "the loss" not in named
    assert "the prediction 'normalized': " in named and "8 of 8 differ" in named


def test_a_mean_that_is_right_is_no_warning(messages):
    run(replicated(right, check=True))
    assert not warnings(messages)


def test_the_check_is_made_once_and_only_where_it_is_asked_for(messages, compilations):
    run(replicated(by_hand))
    assert not warnings(messages)
    model, state = started(replicated(by_hand, check=True), BATCH)
    model.train_step(state, BATCH)
    after = len(compilations)
    model.train_step(state, BATCH)
    assert len(compilations) == after and len(warnings(messages)) == 1


def test_a_mean_of_one_number_in_towers_is_one_line_in_the_log(monkeypatch):
    lines = []
    monkeypatch.setattr("absl.logging.log_first_n", lambda level, message, n, *args: lines.append((message, n)))

    def model_fn(features, mode):
        metrics = {"rows": est.metrics.mean(features), "weighted": est.metrics.mean(features.sum(), weights=2.0)}
        metrics["towers"] = est.metrics.mean(features.mean())
        return est.EstimatorSpec(mode, features, features.mean(), est.group(), metrics)

    x = jnp.arange(4.0)
    for towers, count in ((1, 0), (2, 1)):
        model = est.transform(replicate_model_fn(model_fn, devices=cpus(towers)))
        model.eval_step(model.init(jax.random.key(0), x, mode="eval"), x)
        assert len(lines) == count
    message, times = lines[0]
    assert times == 1 and "`est.metrics.mean(losses, weights=weights)`" in message
