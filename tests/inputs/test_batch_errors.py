"""Batches that differ from each other, lie elsewhere, or come in a form that nobody meant."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from testing.estimators import Linear, X, Y, make, step_of, times
from testing.model_fns import minimizing, regressing, zeros
from testing.towers import replicate

import estimator as est
from estimator.inputs._input_fn import batches
from replicate import replicate_model_fn


def weighted(features):
    """The sum with a weight for each of the features, which may be an array or a dict of arrays."""
    features = features if isinstance(features, dict) else {"alone": features}
    return sum(x @ est.get_variable(f"w{key}", (x.shape[1], 1)) for key, x in features.items())


by_key = regressing(weighted, optax.sgd(0.01))
needs_a = regressing(lambda x: x["a"] @ est.get_variable("w", (2, 1)), optax.sgd(0.01))  # fails with a dict's KeyError


def outcomes(estimator, input_fn):
    """What each verb gives, in numbers."""
    estimator.train(input_fn)
    weights = estimator.get_variable_value("w*")
    return weights, estimator.evaluate(input_fn)["loss"], list(estimator.predict(input_fn))


def mesh_of(devices, name, *axes):
    return NamedSharding(Mesh(np.array(devices), name), PartitionSpec(*axes))


MESH_OF_FOUR = mesh_of(jax.devices()[:4], "rows", "rows")
PLACES = {  # of the i-th batch
    "changing devices": lambda i: jax.devices()[i % 4],
    "mesh of four": lambda i: MESH_OF_FOUR,
    "mesh of others": lambda i: mesh_of(jax.devices()[4:6], "columns", None, "columns"),
    "features and labels apart": lambda i: (jax.devices()[1], jax.devices()[2]),
}
TWO_COLUMNS = np.concatenate([Y, Y], axis=1)


def first_column(features, labels, mode):
    return by_key(features, None if labels is None else labels[:, :1], mode)


@pytest.fixture(scope="module")
def outcomes_of_numpy(tmp_path_factory):
    """What comes of batches in the memory of the host, by the number of towers."""

    @functools.cache
    def of(towers):
        estimator = make(tmp_path_factory.mktemp("numpy"), replicate(first_column, towers))
        return outcomes(estimator, times(6, (X, TWO_COLUMNS)))

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "where"),
    [(0, "changing devices"), *((4, where) for where in PLACES if where != "changing devices")],
)
def test_batches_are_moved_to_the_devices_of_the_model(tmp_path, outcomes_of_numpy, towers, where):
    placed = [jax.device_put((X, TWO_COLUMNS), PLACES[where](i)) for i in range(6)]
    got = outcomes(make(tmp_path, replicate(first_column, towers)), lambda: placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, outcomes_of_numpy(towers))


def test_batches_on_the_devices_of_the_towers_stay_there(tmp_path):
    placement = est.transform(replicate_model_fn(by_key, devices=jax.devices()[:4])).info(X, Y).placement
    x = jax.device_put(X, MESH_OF_FOUR)
    source = batches([(x, Y), (jnp.asarray(X), Y), (jax.device_put(X, jax.devices()[1]), Y)])
    source.place(placement)
    assert next(source)[0] is x
    assert isinstance(next(source)[0], jax.Array)
    assert type(next(source)[0]) is np.ndarray


# Later batches that are not like the first.

A, B = {"a": X}, {"b": X}
LATER = [
    (A, B, r"features\['a'\] is missing, features\['b'\] is new"),
    (A, {"a": X, "b": X}, r"features\['b'\] is new"),
    (A, {"a": X[:, :1]}, r"features\['a'\] has the shape \(4, 1\) instead of \(4, 2\)"),
    (X, X[:2, :1], r"features has the shape \(2, 1\) instead of \(4, 2\)"),
]


def all_of(estimator, verb, input_fn):
    return list(estimator.predict(input_fn)) if verb == "predict" else getattr(estimator, verb)(input_fn)


@pytest.mark.quick
@pytest.mark.covers("1.6 one structure for all batches")
@pytest.mark.parametrize(
    ("verb", "first", "later", "difference"),
    [("train", *LATER[0]), ("evaluate", *LATER[1]), ("predict", *LATER[2]), ("train", *LATER[3])],
)
def test_a_later_batch_that_the_model_fn_cannot_take_is_named(tmp_path, verb, first, later, difference):
    estimator = make(tmp_path, by_key)
    labels = Y[: len(jax.tree.leaves(later)[0])]
    message = (
        rf"^Batch 4 of the input is not like the one that the model was built with: {difference}\. Its step failed"
    )
    with pytest.raises(ValueError, match=message) as raised:
        all_of(estimator, verb, lambda: [(first, Y)] * 3 + [(later, labels)] * 3)
    assert "equal in all dimensions but the first" in str(raised.value)
    assert raised.value.__cause__ is not None


@pytest.mark.quick
@pytest.mark.parametrize(("verb", "towers"), [("train", 0), ("predict", 2)])
def test_errors_of_jax_and_of_dicts_are_explained_too(tmp_path, verb, towers):
    fn = replicate(needs_a, towers)
    for later, cause in ((B, KeyError), ({"a": X[:, :1]}, TypeError)):
        estimator = make(tmp_path / cause.__name__, fn)
        with pytest.raises(ValueError, match="Batch 3 of the input is not like") as raised:
            all_of(estimator, verb, lambda later=later: [(A, Y)] * 2 + [(later, Y)])
        assert isinstance(raised.value.__cause__, cause)


def test_an_error_of_a_batch_like_the_first_stays_as_it_is(tmp_path):
    def model_fn(features, labels, mode):
        if features.shape[0] == 3:
            raise KeyError("mine")
        return by_key(features, labels, mode)

    with pytest.raises(KeyError, match="mine"):
        make(tmp_path, model_fn).train(lambda: [(X, Y), (X[:3], Y[:3])])


def test_a_later_batch_that_the_model_fn_can_take_is_trained_on(tmp_path):
    assert step_of(make(tmp_path, needs_a).train(lambda: [(A, Y), ({**A, **B}, Y), (A, Y)])) == 3


# Features without arrays, and keys.


@pytest.mark.parametrize("verb", ["train", "evaluate", "predict"])
@pytest.mark.parametrize("batch", [{}, ({}, None), {"a": {}}])
def test_features_without_an_array_are_an_error(tmp_path, verb, batch):
    with pytest.raises(ValueError, match=r"A batch must hold at least one array; got features=\{.*\} and labels=None"):
        all_of(make(tmp_path, by_key), verb, lambda: [batch])
    if batch == {}:
        with pytest.raises(ValueError, match="A batch must hold at least one array"):
            all_of(make(tmp_path, by_key), verb, lambda: batch)


def test_labels_may_come_with_no_features(tmp_path):
    model_fn = minimizing(lambda x, y: jnp.square(y - zeros("mean")).mean(), optax.sgd(0.5))
    estimator = make(tmp_path, model_fn).train(times(3, ({}, Y)))
    assert float(estimator.get_variable_value("mean")) == pytest.approx(float(Y.mean()))
    assert estimator.evaluate(times(1, ({}, Y)))["loss"] == pytest.approx(float(Y.var()), rel=1e-5)


@pytest.mark.quick
@pytest.mark.covers("1.6 keys of features")
@pytest.mark.parametrize(("towers", "keys"), [(0, (1, 2)), (2, (("a", 1), ("b", 2)))])
def test_keys_of_features_may_be_of_any_kind_that_sorts(tmp_path, towers, keys):
    _, _, rows = outcomes(make(tmp_path, replicate(by_key, towers)), times(3, (dict.fromkeys(keys, X), Y)))
    assert len(rows) == 12


@pytest.mark.covers("1.6 keys of features")
@pytest.mark.parametrize("verb", ["train", "evaluate", "predict"])
@pytest.mark.parametrize(
    "batch", [{1: X, "a": X}, {"x": {None: X, "a": X}}, ({"a": X}, {1: Y, "a": Y}), {"x": [{1: X, "a": X}]}]
)
def test_keys_of_several_kinds_are_an_error(tmp_path, verb, batch):
    message = r"keys of a dict in a batch must be of one kind, since jax sorts them; got \[(1|None), 'a'\]. Give all of"
    with pytest.raises(ValueError, match=message):
        all_of(make(tmp_path, by_key), verb, lambda: [batch])


@pytest.mark.parametrize("step", ["init", "train_step", "eval_step", "predict_step"])
def test_the_steps_of_a_model_say_so_too(step):
    model, x = est.transform(by_key), {1: X, "a": X}
    with pytest.raises(ValueError, match=r"keys of a dict in a batch must be of one kind, .*; got \[1, 'a'\]"):
        getattr(model, step)(None if step != "init" else jax.random.key(0), x)


MEAN = est.metrics.mean(jnp.ones(2))
RECORDS = np.zeros(4, [("a", "f4"), ("b", "i4")])
UNKNOWN = {
    np.longdouble: "of dtype float128. Write `x.astype(np.float32)`.",
    np.clongdouble: "of dtype complex256. Write `x.astype(np.complex64)`.",
    RECORDS.dtype: "of dtype [('a', '<f4'), ('b', '<i4')]. Write `{name: x[name] for name in x.dtype.names}`: each",
    "V8": "of dtype |V8, which is bytes. Write `x.view(dtype)` with the dtype of the numbers in them.",
}
WIDE = pytest.mark.skipif(np.longdouble(0).nbytes == 8, reason="here longdouble is float64")


of_unknown_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=WIDE if isinstance(d, type) else ()) for d in UNKNOWN]
)


@pytest.mark.parametrize("verb", ["train", "evaluate", "predict"])
@of_unknown_dtypes
def test_a_dtype_that_jax_has_not_is_an_error_that_names_the_feature(tmp_path, verb, dtype):
    batch = {"x": X, "y": np.zeros(len(X), dtype)}
    message = f"features and labels must be arrays of numbers that jax has; got features['y'] {UNKNOWN[dtype]}"
    with pytest.raises(TypeError, match=re.escape(message)):
        all_of(make(tmp_path, by_key), verb, lambda: [batch])
    with pytest.raises(TypeError, match=re.escape(message)):
        est.transform(by_key).init(jax.random.key(0), batch)


@of_unknown_dtypes
def test_an_initial_value_of_such_a_dtype_is_an_error_that_names_the_variable(dtype):
    def init(*args):
        return est.transform(lambda features: est.get_variable("w", *args)).init(jax.random.key(0), X, mode="infer")

    message = "`est.get_variable('w')`: every leaf of the initial value must have a dtype of jax; got one at ['b'] "
    with pytest.raises(TypeError, match=re.escape(message + UNKNOWN[dtype])):
        init(None, None, {"a": np.ones(2), "b": np.zeros(4, dtype)})
    with pytest.raises(TypeError, match=r"`est.get_variable\('w'\)` needs a dtype such as `jnp.float32`; got "):
        init((2,), dtype)


@of_unknown_dtypes
def test_predictions_and_a_loss_of_such_a_dtype_are_an_error_that_names_them(dtype):
    message = f" must be an array of numbers that jax has, given one {UNKNOWN[dtype]}"
    with pytest.raises(TypeError, match=re.escape("predictions['y']" + message)):
        est.EstimatorSpec("infer", {"x": X, "y": np.zeros(4, dtype)})
    with pytest.raises(TypeError, match=re.escape("loss" + message)):
        est.EstimatorSpec("eval", loss=np.zeros((), dtype))


@pytest.mark.parametrize(
    "what, spec",
    [
        ("predictions", lambda: est.EstimatorSpec("infer", {"x": {1: X, "a": X}})),
        ("eval_metric_ops", lambda: est.EstimatorSpec("eval", None, 1.0, None, {1: MEAN, "a": MEAN})),
    ],
)
def test_keys_of_several_kinds_in_what_a_model_fn_returns_are_an_error(what, spec):
    with pytest.raises(ValueError, match=rf"keys of a dict in {what} must be of one kind, .*; got \[1, 'a'\]\. Give"):
        spec()


# An input_fn that returns a batch instead of batches.


@pytest.mark.quick
@pytest.mark.covers("1.6 arrays given as they are")
def test_training_on_one_batch_says_that_it_ends_after_one_step(tmp_path, messages):
    estimator = make(tmp_path, by_key)
    assert step_of(estimator.train(lambda: (X, Y), steps=100)) == 1
    estimator.train(lambda: (X, Y), max_steps=30)
    assert [message for message in messages() if "one batch" in message] == [
        f"input_fn returned one batch, so that training ends after one step, not after {steps}. Return "
        "`itertools.repeat(batch)` to train on it again and again, or an iterable of batches."
        for steps in (100, 29)
    ]


def test_one_batch_for_one_step_or_in_an_iterable_is_not_worth_a_word(tmp_path, messages):
    estimator = make(tmp_path, Linear())
    estimator.train(lambda: (X, Y), steps=1)
    estimator.train(lambda: (X, Y))
    estimator.train(lambda: (X, Y), max_steps=3)
    estimator.train(lambda: [(X, Y)], steps=5)
    estimator.train(lambda: itertools.repeat((X, Y)), steps=5)
    estimator.evaluate(lambda: (X, Y), steps=5)
    assert not [message for message in messages() if "one batch" in message]


def of_shapes(messages, pairs):
    """What is said of the shapes of batches."""
    list(batches(pairs))
    return [message for message in messages() if "different shapes" in message]


def test_many_shapes_are_warned_of_once(messages):
    pairs = [({"x": np.ones((4, n), np.float32), "y": Y}, Y[:, 0]) for n in [*range(1, 13), 1, 2]]
    [said] = of_shapes(messages, pairs)
    assert said.startswith(
        "The batches came in 10 different shapes, each of which is compiled on its own. Pad them to few lengths: "
        "`est.inputs.pad_batches(input_fn, multiple_of=32, axes={'x': 1})`. Got features['x']: "
        "(4, 1), (4, 2), (4, 3), (4, 4), "
    )
    assert "features['y']" not in said and "labels" not in said


@pytest.mark.parametrize(
    ("make_pair", "call"),
    [
        (lambda n: (np.ones((4, n)), Y), "multiple_of=32, axes=1)"),
        (lambda n: ({"a": np.ones((4, n, 2, n)), "b": X}, Y), "multiple_of=32, axes={'a': (1, 3)})"),
        (lambda n: (np.ones((4, n)), np.ones((4, n))), "multiple_of=32, axes=1, label_axes=1)"),
        (lambda n: ({"a": X}, {"b": np.ones((4, n))}), "multiple_of=32, label_axes={'b': 1})"),
    ],
)
def test_the_warning_has_the_call_that_pads(messages, make_pair, call):
    [said] = of_shapes(messages, (make_pair(n) for n in range(1, 12)))
    assert f"`est.inputs.pad_batches(input_fn, {call}`" in said


def test_many_numbers_of_rows_have_another_remedy(messages):
    x = np.ones((20, 3), np.float32)
    [said] = of_shapes(messages, [({"x": x[:n]}, x[:n, 0]) for n in range(1, 11)])
    assert "Let input_fn give all of them as many rows, but the last. Got features['x']: (1, 3), (2, 3), (3, 3)" in said


def test_a_few_shapes_are_fine(messages):
    x = np.ones((20, 3), np.float32)
    assert not of_shapes(messages, [({"x": x[:n]}, x[:n, 0]) for n in [*range(1, 10)] * 2])
