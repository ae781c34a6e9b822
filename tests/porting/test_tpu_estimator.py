"""Lines of a program for TPUEstimator: its specs work, its other arguments are errors that say what to write."""

import argparse
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.towers import replicate, started

import estimator as est
from estimator.porting import _tensorflow_names
from replicate import TowerOptimizer

X = np.arange(14, dtype=np.float32).reshape(7, 2)
Y = np.array([0, 1, 1, 0, 1, 0, 1])


def model_fn(features, labels, mode, params):
    logits = features @ est.get_variable("w", (2, 2))
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)

    def metric_fn(labels, logits):
        assert mode == est.ModeKeys.EVAL
        return {"accuracy": est.metrics.accuracy(labels, logits.argmax(-1)), "mean": est.metrics.mean(logits)}

    tensors = {"labels": labels, "logits": logits} if params["by_name"] else [labels, logits]
    train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
    given = {"eval_metrics": (metric_fn, tensors)}
    if not params["tpu"]:
        given = {"eval_metric_ops": metric_fn(labels, logits) if mode == est.ModeKeys.EVAL else None}
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, **given)


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "by_name"), [(0, False), (2, True)])
def test_the_metrics_of_eval_metrics_are_those_of_all_rows(towers, by_name):
    def results(towers, **params):
        model, state = started(replicate(model_fn, towers), X[:6], Y[:6], params=params)
        model.train_step(state, X[:6], Y[:6])
        metrics = model.eval_step(state, X, Y).eval_metric_ops
        return {name: float(metric.result()) for name, metric in metrics.items()}

    expected = results(0, tpu=False, by_name=by_name)
    assert results(towers, tpu=True, by_name=by_name) == pytest.approx(expected, rel=1e-6)


def test_a_spec_with_eval_metrics_is_replaced_as_others_are():
    spec = est.EstimatorSpec("eval", loss=jnp.float32(1), eval_metrics=(lambda x: {"a": est.metrics.mean(x)}, [X]))
    assert list(spec._replace(loss=jnp.float32(2)).eval_metric_ops) == ["a"]


ONE = jnp.float32(1)
REFUSED = {
    TypeError: [
        (lambda: est.EstimatorSpec("eval", loss=ONE, host_call=1),
         "EstimatorSpec has no `host_call`, .*TPUEstimatorSp"),
        (lambda: est.EstimatorSpec("eval", loss=ONE, eval_metrics=len),
         r"be a pair \(metric_fn, tensors\), given: <bu"),
        (lambda: est.EstimatorSpec("eval", loss=ONE, eval_metrics=(len, X)), "must be a dict or a list, given"),
        (lambda: est.Estimator(model_fn, use_tpu=False), "Estimator has no `use_tpu`, as TensorFlow's TPUEstimator"),
        (lambda: est.Estimator(model_fn, train_batch_size=8), "has: input_fn makes the batches: .*; got 8"),
        (lambda: est.RunConfig(tpu_config=3), "RunConfig has no `tpu_config`, .* write `steps_per_loop`"),
    ],
    ValueError: [
        (lambda: est.EstimatorSpec("eval", loss=ONE, eval_metric_ops={"a": 1}, eval_metrics=(len, [X])),
         "takes `eval_metric_ops` or `eval_metrics`, given both")
    ],
}  # fmt: skip


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_other_arguments_of_tpu_estimator_are_errors_that_say_what_to_write(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_every_argument_of_tpu_estimator_is_refused():
    for kind, arguments in _tensorflow_names.TPU_ARGUMENTS.items():
        for name, hint in arguments.items():
            with pytest.raises(TypeError, match=re.escape(hint)):
                getattr(est, kind)(est.ModeKeys.EVAL, **{name: 1})


class Own(est.Estimator):
    def __init__(self, use_tpu):
        super().__init__(model_fn, params={"use_tpu": use_tpu})


def test_a_class_of_ones_own_may_have_these_arguments():
    assert Own(use_tpu=True).params == {"use_tpu": True}


def generator(params):
    yield X[: params["batch_size"]], Y


def of_a_namespace(params):
    return argparse.Namespace(**params).batch_size


@pytest.mark.parametrize("input_fn", [lambda params: params["batch_size"], generator, of_a_namespace, lambda: (X, Y)])
def test_a_missing_batch_size_is_explained(tmp_path, input_fn):
    def model_fn(features, labels, mode, params):
        return est.EstimatorSpec(mode, loss=jnp.float32(params["batch_size"]), train_op=est.group())

    with pytest.raises((KeyError, AttributeError), match="batch_size") as caught:
        est.Estimator(model_fn, tmp_path, params={"a": 1}).train(input_fn, steps=1)
    assert "TPUEstimator's `batch_size` is not added" in "\n".join(caught.value.__notes__)


def test_a_key_that_an_input_fn_misses_is_explained_by_those_that_there_are(tmp_path):
    with pytest.raises(KeyError, match="rows") as caught:
        est.Estimator(model_fn, tmp_path, params={"a": 1}).train(lambda params: params["rows"], steps=1)
    assert caught.value.__notes__ == ["The keys are ['a'] in params."]
