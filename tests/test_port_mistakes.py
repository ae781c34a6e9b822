"""Lines of a TensorFlow model_fn that work as they stand, and mistakes of a port whose errors say what to write."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import cpus

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.array([0, 1, 0, 1, 0, 1, 1, 0], np.float32)[:, None]
WEIGHTS = np.array([1, 0, 2, 1, 3, 1, 0, 1], np.float32)[:, None]
P = np.array([0.1, 0.9, 0.6, 0.4, 0.2, 0.8, 0.7, 0.3], np.float32)[:, None]


def stepped(body, mode="train", towers=1, accumulate_steps=1):
    """The state and the spec after a step on P of a model with one variable, and what `body` returns in its spec."""

    def model_fn(features, labels, mode):
        loss = jnp.mean((est.get_variable("w", (1,)) * features["p"] - labels) ** 2)
        train_op = TowerOptimizer(optax.sgd(1.0), accumulate_steps=accumulate_steps).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, **{"train_op": train_op, **body(features, labels, loss)})

    model = est.transform(replicate_model_fn(model_fn, devices=cpus(towers)))
    batch = {"p": P, "weights": WEIGHTS}, Y
    state = model.init(jax.random.key(0), *batch)
    return model.train_step(state, *batch) if mode == "train" else (state, model.eval_step(state, *batch))


CALLS = [
    lambda o, loss: o.minimize(loss, None),
    lambda o, loss: o.minimize(loss, est.global_step()),
    lambda o, loss: o.minimize(loss=loss, global_step=est.global_step()),
    lambda o, loss: o.minimize(loss, est.global_step(), ["w"]),
    lambda o, loss: o.minimize(loss, est.global_step(), var_list=["w"]),
    lambda o, loss: o.minimize(loss, None, est.trainable_variables()),
    lambda o, loss: o.minimize(loss=loss, var_list=["w"], global_step=est.global_step()),
    lambda o, loss: o.minimize(loss, ["w"], est.global_step()),  # not in TensorFlow
    lambda o, loss: o.minimize(loss, ["w"], global_step=est.global_step()),
    lambda o, loss: o.apply_gradients(o.compute_gradients(loss), est.global_step()),
    lambda o, loss: o.apply_gradients(o.compute_gradients(loss), global_step=None),
]


@pytest.mark.slow
def test_a_global_step_given_to_an_optimizer_changes_nothing():
    """All calls in one step, each of an optimizer with its share of the rate."""

    def after(calls):
        def body(features, labels, loss):
            optimizers = [TowerOptimizer(optax.sgd(1 / len(calls))) for _ in calls]
            return {"train_op": est.group(*(call(each, loss) for call, each in zip(calls, optimizers, strict=True)))}

        state, _ = stepped(body, towers=2)
        return state.variables["w"].item(), state.global_step.item()

    want, _ = after([lambda o, loss: o.minimize(loss)])
    assert after(CALLS) == (pytest.approx(want, rel=1e-5), 1)


def ported_metrics(features, labels):
    """What a model_fn makes of its metrics: `eval_metric_ops`, and values to show."""
    p, weights = features["p"], features["weights"]
    classes = jnp.round(p)
    accuracy = est.metrics.accuracy(labels, classes, weights, name="accuracy_op")
    value, update = est.metrics.auc(labels, p, weights)
    precision, recall = est.metrics.precision(labels, classes), est.metrics.recall(labels, classes)
    f1 = 2 * precision[1] * recall[1] / (precision[1] + recall[1])
    metrics = {"accuracy": accuracy, "auc": (value, update), "precision": (precision[0], precision[-1])}
    return metrics, {"accuracy": accuracy[1], "auc": update, "f1": f1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "towers", "accumulate_steps"),
    [("train", 4, 1), ("train", 2, 2), ("eval", 4, 1)],
)
def test_the_parts_of_metrics_in_towers_equal_one_big_batch(mode, towers, accumulate_steps):
    def body(features, labels, loss):
        metrics, values = ported_metrics(features, labels)
        for name in ("accuracy", "auc"):
            est.summary.scalar(name, values[name])
            est.record(f"recorded_{name}", values[name])
        return {"eval_metric_ops": metrics}

    _, spec = stepped(body, mode, towers, accumulate_steps)
    whole, values = ported_metrics({"p": jnp.asarray(P), "weights": WEIGHTS}, Y)
    assert 0 < values["f1"] < 1 and values["accuracy"] != jnp.mean(jnp.round(P) == Y)
    for name, metric in spec.eval_metric_ops.items():
        assert isinstance(metric, est.metrics.Metric)
        np.testing.assert_allclose(metric.result(), whole[name][1], rtol=1e-6)
    for name in ("accuracy", "auc"):  # of all rows, not the mean of the towers' values
        for reported in (name, f"recorded_{name}"):
            np.testing.assert_allclose(spec.reported[reported].value, values[name], rtol=1e-6)


def test_the_batch_s_value_of_a_metric_is_shown_in_training_and_evaluation_gives_the_metric_of_all_batches(tmp_path):
    def model_fn(features, labels, mode):
        est.get_variable("w", ())
        accuracy = est.metrics.accuracy(labels, jnp.round(features))
        est.summary.scalar("train_accuracy", accuracy[1])
        fields = {"train_op": est.group(), "eval_metric_ops": {"accuracy": tuple(accuracy)}}
        return est.EstimatorSpec(mode, loss=jnp.mean(features), scaffold=None, **fields)

    batches = [(P[:5], Y[:5]), (P[5:], Y[5:])]
    config = est.RunConfig(save_summary_steps=1, save_checkpoints_steps=2)
    estimator = est.Estimator(model_fn, tmp_path, config).train(lambda: batches)
    shown = [row["train_accuracy"] for row in est.read_history(tmp_path) if "train_accuracy" in row]
    np.testing.assert_allclose(shown, [np.mean(np.round(p) == y) for p, y in batches])
    np.testing.assert_allclose(estimator.evaluate(lambda: batches)["accuracy"], np.mean(np.round(P) == Y))


def test_the_value_of_a_metric_may_be_read_in_a_function_that_jax_traces_apart():
    def body(features, labels, loss):
        metric = est.metrics.mean(features["p"])
        inner = jax.jit(lambda: metric[1])()
        est.record("twice", inner + metric[1])
        return {"eval_metric_ops": {"mean": (metric[0], metric[1])}}

    _, spec = stepped(body)
    np.testing.assert_allclose(spec.reported["twice"].value, 2 * P.mean(), rtol=1e-6)
    np.testing.assert_allclose(spec.eval_metric_ops["mean"].result(), P.mean(), rtol=1e-6)


def test_every_metric_and_loss_takes_the_name_of_an_op():
    for name in set(est.metrics.__all__) - {"Metric"}:
        assert inspect.signature(getattr(est.metrics, name)).parameters["name"].default is None
    losses = [getattr(est.losses, name) for name in est.losses.__all__]
    losses = [loss for loss in losses if inspect.isfunction(loss) and "weights" in inspect.signature(loss).parameters]
    assert len(losses) == 9
    for loss in losses:
        assert {"name", "scope"} <= inspect.signature(loss).parameters.keys()
    assert est.losses.mean_squared_error(Y, P, scope="mse", name="mse") == est.losses.mean_squared_error(Y, P)


def test_names_of_values_are_made_unique_as_in_tensorflow():
    def body(features, labels, loss):
        est.record("accuracy", loss)
        est.summary.scalar("accuracy", 2 * loss)
        est.summary.scalar("accuracy", 3 * loss)
        est.summary.scalar("loss", loss)
        for _ in range(2):
            with est.variable_scope("discriminator", reuse=est.AUTO_REUSE):
                est.summary.scalar("mean", loss)
        return {}

    _, spec = stepped(body, towers=2)
    names = ["accuracy", "accuracy_1", "accuracy_2", "discriminator/mean", "discriminator_1/mean", "loss_1"]
    assert sorted(spec.reported) == names
    values = [spec.reported[name].value / spec.loss for name in names]
    np.testing.assert_allclose(values, [1, 2, 3, 1, 1, 1], rtol=1e-6)


PAIR = "A pair (value, update) has to be the parts of one metric"


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda y, p: jnp.mean(p), "Use a function of `est.metrics`, for example `est.metrics.mean(value)`"),
        (lambda y, p: (jnp.mean(p), est.group()), PAIR),
        (lambda y, p: (est.metrics.mean(p)[0], est.metrics.mean(y)[1]), PAIR),
        (lambda y, p: (2 * est.metrics.mean(p)[0], est.metrics.mean(p)[1]), PAIR),
    ],
)
def test_a_metric_that_est_metrics_has_not_made_is_an_error(metric, message):
    with pytest.raises(TypeError, match=rf"eval_metric_ops\['m'\] must be a metric, .*{re.escape(message)}"):
        stepped(lambda x, y, loss: {"eval_metric_ops": {"m": metric(y, x["p"])}})


def test_a_metric_instead_of_its_value_is_an_error():
    with pytest.raises(TypeError, match=r"needs a number .*The value of a metric in this batch is `metric\[1\]`"):
        stepped(lambda x, y, loss: est.summary.scalar("m", est.metrics.mean(x["p"])))


def linear_model_fn(features, labels, mode):
    predictions = features["x"] @ est.get_variable("w", (3, 1))
    loss = est.losses.mean_squared_error(labels, predictions)
    est.record("error", loss)
    train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
    return est.EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)


def train(batches, hooks=(), towers=None):
    model_fn = replicate_model_fn(linear_model_fn, devices=cpus(towers)) if towers else linear_model_fn
    est.Estimator(model_fn, config=est.RunConfig(save_checkpoints_steps=None)).train(lambda: batches, hooks=list(hooks))


GOOD = ({"x": X}, Y)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("towers", "batches", "error", "message"),
    [
        (2, (GOOD, GOOD), TypeError, "a tuple that input_fn returns is one batch, .* For several batches return a lis"),
        (None, (GOOD, GOOD, GOOD), ValueError, "several batches into a list; got a tuple of len 3"),
        (2, [{"x": X}, {"x": X}], ValueError, r"labels are None, since .* Let it give tuples \(features, labels\)"),
        (None, [{"x": X}, {"x": X}], ValueError, r"labels are None, since .* Let it give tuples \(features, labels\)"),
    ],
)
def test_wrong_inputs_are_errors(towers, batches, error, message):
    with pytest.raises(error, match=message):
        train(batches, towers=towers)


@pytest.mark.parametrize("towers", [None, 2])
def test_labels_that_are_used_in_prediction_are_an_error(towers):
    model_fn = replicate_model_fn(linear_model_fn, devices=cpus(towers)) if towers else linear_model_fn
    with pytest.raises(ValueError, match="Return `EstimatorSpec\\(mode, predictions=...\\)` before they") as caught:
        list(est.Estimator(model_fn).predict(lambda: [{"x": X}]))
    assert len([note for note in caught.value.__notes__ if "PREDICT" in note]) == 1


def test_other_errors_of_a_model_fn_stay_as_they_are():
    with pytest.raises(KeyError) as caught:
        train([({"y": X}, Y)])
    assert not any("labels" in note for note in getattr(caught.value, "__notes__", ()))


class Requests(est.Hook):
    def __init__(self, names):
        self.names = names

    def before_run(self, context):
        return self.names


class Calls(est.Hook):
    def __init__(self, function):
        self.function = function

    def after_run(self, context, values):
        self.function(context)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (Requests("loss:0"), ValueError, r"'loss:0', but .* Write 'loss': names have no output's number here\."),
        (Requests({"e": "error:0"}), ValueError, r"Write 'error': names have"),
        (Requests(["loss", "global_step"]), ValueError, "A hook reads it as `context.global_step`; for one like"),
        (Requests("global_step:0"), ValueError, r"write `est.record\('global_step', est.global_step\(\)\)`"),
        (Requests("w:0"), ValueError, r"Write `est.record\('w', value\)` .*in `context.state.variables`"),
        (est.LoggingTensorHook(["global_step"], 1), ValueError, r"write `est.record\('global_step', est.global_ste"),
        (Calls(lambda context: est.global_step()), RuntimeError, r"In a hook read `context\.global_step`\.$"),
        (Calls(lambda context: est.read_variable("w")), RuntimeError, r"In a hook read `context\.state\.variables`\.$"),
        (Calls(lambda context: context.session), AttributeError, "no attribute 'session'; here it is `context.state`"),
    ],
)
def test_hooks_that_read_as_in_tensorflow_are_errors(hook, error, message):
    with pytest.raises(error, match=message):
        train([GOOD, GOOD], [hook])


def test_a_seed_given_to_make_rng_is_an_error():
    with pytest.raises(TypeError, match=r"`est.make_rng` takes a name, .*; got 3\. The seed is `est.RunConfig\(seed="):
        stepped(lambda x, y, loss: est.make_rng(3))


def test_an_initializer_that_needs_a_shape_is_an_error_that_says_so():
    with pytest.raises(TypeError, match=r"Without a shape, `est.get_variable\('v'\)` calls `initializer\(key\)`"):
        stepped(lambda x, y, loss: est.get_variable("v", initializer=jax.nn.initializers.ones))
