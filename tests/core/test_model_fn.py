"""The contract of a model_fn: its arguments, its batch and what it returns."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import minimizing, ones, zeros
from testing.towers import replicate

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

X = np.ones((4, 2), np.float32)
Y = np.ones((4, 1), np.float32)
KEY = jax.random.key(0)


def linear(features, labels, mode):
    w = est.get_variable("w", (2, 1))
    x = features["x"] if isinstance(features, dict) else features
    predictions = x @ w
    loss = None if labels is None else est.losses.mean_squared_error(labels, predictions)
    train_op = None
    if mode == "train":
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
    return est.EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)


def predict(model_fn, features=X, params=None, config=None):
    model = est.transform(model_fn, params, config)
    return model.predict_step(model.init(KEY, features, mode="infer"), features).predictions


@pytest.mark.covers("1.1 model_fn signature inspection")
def test_arguments_go_by_name_and_are_optional():
    def plain(features):
        return est.EstimatorSpec("infer", predictions=features)

    def other_order(config, params, mode, labels, features):
        assert (config, params, labels) == ("config", {"a": 2.0}, None)
        return est.EstimatorSpec(mode, predictions=features * params["a"])

    def with_default(features, mode, factor=3.0):
        return est.EstimatorSpec(mode, predictions=features * factor)

    def everything(**kwargs):
        assert set(kwargs) == {"features", "labels", "mode", "params", "config"}
        return est.EstimatorSpec(kwargs["mode"], predictions=kwargs["features"] * 4.0)

    class Model:
        def method(self, features, mode):
            return est.EstimatorSpec(mode, predictions=features * 5.0)

        def __call__(self, features, mode):
            return est.EstimatorSpec(mode, predictions=features * 6.0)

    bound = functools.partial(lambda features, mode, by: with_default(features, mode, by), by=7.0)
    of_several_kinds = {1: 4.0, "a": [jnp.float32(2.0)]}  # keys, which do not sort, and arrays
    assert (predict(plain) == 1).all()
    assert (predict(other_order, params={"a": 2.0}, config="config") == 2).all()
    assert (predict(with_default) == 3).all()
    assert (predict(everything, params={"a": 2.0}) == 4).all()
    assert (predict(Model().method) == 5).all()
    assert (predict(Model()) == 6).all()
    assert (predict(bound) == 7).all()
    by_params = lambda features, params: with_default(features, "infer", params[1] * params["a"][0])  # noqa: E731
    assert (predict(by_params, params=of_several_kinds) == 8).all()


@pytest.mark.covers("1.1 model_fn signature inspection")
@pytest.mark.parametrize(
    ("model_fn", "params", "message"),
    [
        (lambda labels, mode: None, None, r"must include features argument; it has \['labels', 'mode'\]"),
        (lambda features, x, y: None, None, r"has following not expected args: \['x', 'y'\]"),
        (
            lambda features, mode: None,
            {"a": 1},
            r"does not include params argument, but params \(\{'a': 1\}\) is passed",
        ),
    ],
)
def test_other_arguments_are_errors_when_it_is_wrapped(model_fn, params, message):
    with pytest.raises(ValueError, match=rf"^model_fn \(<lambda>\) {message}"):
        est.transform(model_fn, params)


@pytest.mark.covers("1.1 labels rule")
def test_labels_for_a_model_fn_that_takes_none_are_an_error(tmp_path):
    def model_fn(features, mode):
        return est.EstimatorSpec(mode, loss=jnp.float32(0), train_op=est.TrainOp())

    estimator = est.Estimator(model_fn, tmp_path)
    for verb in (estimator.train, estimator.evaluate):
        with pytest.raises(ValueError, match=r"\(model_fn\) does not take labels, but input_fn returns labels"):
            verb(lambda: (X, Y))


@pytest.mark.covers("1.1 model_fn return type")
@pytest.mark.parametrize("returned", [None, {"loss": 1}, (1, 2)])
def test_anything_but_a_spec_is_an_error(returned):
    with pytest.raises(ValueError, match=rf"should return an EstimatorSpec; got {re.escape(repr(returned))}"):
        predict(lambda features, mode: returned)


@pytest.mark.covers("2 same graph")
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_value_of_another_run_is_an_error(mode):
    """TensorFlow: every tensor must be from the same graph."""
    kept = []

    def model_fn(features, labels, mode):
        spec = linear(features, labels, mode)
        kept.append(spec)
        return spec._replace(loss=kept[0].loss, predictions=kept[0].predictions)

    model = est.transform(model_fn)
    batch = (X, Y) if mode == "train" else (X,)
    state = model.init(KEY, *batch, mode=mode)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="had a side effect"):
        (model.train_step if mode == "train" else model.predict_step)(state, *batch)


def test_the_mode_of_the_spec_must_match_the_run():
    def model_fn(features, mode):
        return est.EstimatorSpec("eval", loss=jnp.float32(0))

    with pytest.raises(ValueError, match="was run in mode 'infer', but its EstimatorSpec says 'eval'"):
        predict(model_fn)


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="mode must be one of 'train', 'eval', 'infer'.*'predict'"):
        est.transform(linear).init(KEY, X, mode="predict")


def test_errors_of_the_model_fn_come_through(tmp_path):
    def model_fn(features, mode):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        est.Estimator(model_fn, tmp_path).train(lambda: X)


BAD_BATCHES = {
    TypeError: [
        (
            (np.array(["a", "b"]), Y[:2]),
            "must be arrays of numbers; got features of dtype <U1. Turn strings into integers",
        ),
        (({"x": np.array([b"a"])}, None), r"features\['x'\] of dtype \|S1"),
        ((np.array([None, {}]), None), "got features of dtype object"),
        ((np.array(["2020-01-01"], "datetime64[D]"), None), r"got features of dtype datetime64\[D\]"),
        ((X, np.array(["a"] * 4)), "got labels of dtype <U1"),
        (({"x": "cat"}, None), r"got features\['x'\] = 'cat' of type str"),
        (({"x": X, "y": object()}, None), r"features\['y'\] = <object .*type object"),
    ],
    (TypeError, ValueError): [(({"x": [1.0, 2.0]}, None), r"features\['x'\]\[0\] (= 1.0 of type float|is a scalar)")],
    ValueError: [
        ((None, None), "must hold at least one array; got features=None and"),
        (({}, None), r"must hold at least one array; got features=\{\} and"),
        (({"x": X, "y": X[:3]}, Y), r"same batch size .*features\['x'\]: 4, features\['y'\]: 3, labels: 4"),
        ((X, Y[:2]), r"same batch size .*got features: 4, labels: 2"),
        (({"x": X, "rate": np.float32(1)}, Y), r"needs a batch dimension; features\['rate'\] is a scalar.*by params"),
        (({"x": X, "rate": jnp.ones(())}, Y), r"features\['rate'\] is a scalar"),
        ((X[:0], Y[:0]), "Got an empty batch: features, labels have 0 rows"),
    ],
}


@pytest.fixture(params=refused.rows(BAD_BATCHES), ids=lambda bad: bad[2])
def bad(request):
    return request.param


@pytest.fixture(scope="module", params=[None, 2], ids=["plain", "in towers"])
def warm(request):
    """A model_fn, its transform after a step in each mode, and a state."""
    model_fn = replicate(linear, request.param)
    model = est.transform(model_fn)
    state = model.init(KEY, X, Y)
    model.train_step(state, X, Y)
    model.eval_step(state, X, Y)
    return model_fn, model, state


@pytest.mark.quick
def test_a_bad_batch_is_named_by_transform(bad, warm):
    error, batch, message = bad
    model_fn, warm_model, state = warm
    for model in (est.transform(model_fn), warm_model):
        for call in (model.train_step, model.eval_step):
            with pytest.raises(error, match=message):
                call(state, *batch)
    for call in (functools.partial(model.init, KEY), est.transform(model_fn).abstract_init):
        with pytest.raises(error, match=message):
            call(*batch)


def test_a_bad_first_batch_is_named_by_an_estimator(tmp_path, bad):
    error, batch, message = bad
    estimator = est.Estimator(linear, tmp_path)
    for verb in (estimator.train, estimator.evaluate):
        with pytest.raises(error, match=message):
            verb(lambda: [batch])
    assert estimator.latest_checkpoint() is None


@pytest.fixture(scope="module", params=[1, 2])
def unsaved(request, tmp_path_factory):
    config = est.RunConfig(save_checkpoints_steps=None, steps_per_loop=request.param)
    return est.Estimator(linear, tmp_path_factory.mktemp("unsaved"), config)


@pytest.mark.quick
def test_a_bad_later_batch_is_named_by_train(unsaved, bad):
    error, batch, message = bad
    with pytest.raises(error, match=message):
        unsaved.train(lambda: [(X, Y)] * 3 + [batch])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return est.Estimator(linear, tmp_path_factory.mktemp("trained")).train(lambda: (X, Y))


def test_a_bad_later_batch_is_named_by_evaluate_and_predict(trained, bad):
    error, batch, message = bad
    for batches in ([(X, Y), batch], [batch]):
        with pytest.raises(error, match=message):
            trained.evaluate(lambda batches=batches: batches)
    if "labels" not in message:
        with pytest.raises(error, match=message):
            list(trained.predict(lambda: [(X, None), batch]))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("as_array", "second"),
    [(np.asarray, {"b": [2.0, 2.0]}), (jnp.asarray, {"a": [2, 2]})],
    ids=["structure", "dtype"],
)
def test_batches_that_do_not_stack_are_trained_on_one_by_one(tmp_path, as_array, second):
    def loss_of(features, labels):
        (x,) = features.values()
        return jnp.mean(jnp.square(zeros("w") - x.astype(jnp.float32)))

    dtype = np.int32 if "a" in second else np.float32
    batches = [{"a": as_array(np.ones(2, np.float32))}]
    batches += [{name: as_array(np.array(value, dtype)) for name, value in second.items()}]
    estimator = est.Estimator(minimizing(loss_of, optax.sgd(0.5)), tmp_path, est.RunConfig(steps_per_loop=2))
    assert estimator.train(lambda: batches).get_variable_value("w") == 2


@pytest.mark.quick
@pytest.mark.covers("2 train_op of another graph")
@pytest.mark.parametrize(("keeps", "towers"), [("the first alone", None), ("each", 2), ("gradients", 2)])
def test_a_train_op_of_another_run_is_an_error(keeps, towers):
    kept = []

    def model_fn(features, labels, mode):
        loss, optimizer = jnp.mean(ones("w") * features), TowerOptimizer(optax.sgd(0.1))
        if keeps == "gradients":
            kept.append(optimizer.apply_gradients(optimizer.compute_gradients(loss)))
        elif keeps == "each" or not kept:
            kept.append(optimizer.minimize(loss))
        return est.EstimatorSpec(mode, loss=loss, train_op=kept[0])

    model = est.transform(replicate(model_fn, towers))
    x = np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"model_fn \(model_fn\) returned a train_op that another run of it has made"):
        model.train_step(model.init(jax.random.key(0), x), x)


@pytest.mark.covers("2 train_op type")
@pytest.mark.parametrize("towers", [None, 2])
def test_a_group_of_nothing_is_a_train_op_that_changes_nothing(towers):
    def model_fn(features, labels, mode):
        return est.EstimatorSpec(mode, loss=jnp.mean(ones("w") * features), train_op=est.group())

    model = est.transform(replicate(model_fn, towers))
    x = np.ones(4, np.float32)
    state, _ = model.train_step(model.init(jax.random.key(0), x), x)
    assert (state.variables["w"], state.global_step) == (1.0, 1)


@pytest.mark.parametrize("use", [lambda x: x[x > 0], lambda x: jnp.zeros(x.sum().astype(int))])
def test_other_needs_of_a_value_are_explained_as_well(use):
    def mine(features):
        return est.EstimatorSpec("infer", predictions=use(features))

    with pytest.raises((IndexError, TypeError)) as raised:
        next(est.Estimator(mine).predict(lambda: np.ones((8, 1), np.float32)))
    (note,) = (note for note in raised.value.__notes__ if "no values yet" in note)
    assert note.startswith("A value of Python is needed where jax only traces, in model_fn (mine): its arrays have")
    assert "`jnp.where` or weights instead of `x[x > 0]`" in note and "shapes of Python's ints" in note


def test_scikit_learn_in_a_model_fn_names_the_metrics_of_the_library():
    metrics = pytest.importorskip("sklearn.metrics")

    def mine(features):
        return est.EstimatorSpec("infer", predictions=metrics.accuracy_score(features[:, 0] > 0, features[:, 0] < 0))

    with pytest.raises(jax.errors.TracerArrayConversionError) as raised:
        predict(mine)
    assert raised.value.__notes__[0] == (
        "A value of Python is needed where jax only traces, in model_fn (mine): its arrays have no values yet. "
        "scikit-learn cannot take them: use `est.metrics` in the model_fn, "
        "`eval_metric_ops={'accuracy': est.metrics.accuracy(labels, predictions)}`, or give it what `predict` yields."
    )


@pytest.mark.parametrize(
    ("towers", "use"),
    [(0, lambda features, params: params["learning_rate"]), (2, lambda features, params: features["y"])],
)
def test_a_missing_key_is_explained_by_those_that_there_are(towers, use):
    def mine(features, params):
        return est.EstimatorSpec("infer", predictions=use(features, params))

    model = est.transform(replicate(mine, towers), params={"rate": 0.1})
    with pytest.raises(KeyError, match="y") as raised:
        model.init(jax.random.key(0), {"x": np.ones((2, 1))}, mode="infer")
    ours = [note for note in raised.value.__notes__ if not note.startswith("---")]
    assert ours == ["The keys are ['rate'] in params, and ['x'] in features."]


@pytest.mark.parametrize(("replicated", "mode"), [(False, "train"), (True, "infer")])
def test_an_if_on_an_array_names_the_model_fn_and_what_to_write(replicated, mode):
    def mine(features, labels, mode):
        return est.EstimatorSpec(mode, predictions=features if features.sum() > 0 else -features)

    estimator = est.Estimator(replicate_model_fn(mine) if replicated else mine)
    x = np.ones((8, 1), np.float32)
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        estimator.train(lambda: (x, x)) if mode == "train" else next(estimator.predict(lambda: x))
    ours = [note for note in raised.value.__notes__ if not note.startswith("---")]
    assert ours[0].startswith("A value of Python is needed where jax only traces, in model_fn (mine): its arrays have")
    assert "`jnp.where` or `jax.lax.cond` instead of `if`" in ours[0]
    rest = ["In PREDICT labels are None. Return `EstimatorSpec(mode, predictions=...)` before they are used."]
    assert ours[1:] == (rest if mode == "infer" else [])
