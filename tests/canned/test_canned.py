"""Canned estimators, against numpy; and the original's integration test: one of them replicated over three towers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.towers import assert_close, cpus, one_step, replicate, started

import estimator as est
from estimator.canned._linear import linear_logits_fn
from replicate import TowerOptimizer, replicate_model_fn

fc = est.feature_column
RNG = np.random.default_rng(0)
ROWS = 24
FEATURES = {
    "x": RNG.normal(size=(ROWS, 2)).astype(np.float32),
    "kind": RNG.integers(0, 6, ROWS).astype(np.int32),
    "w": np.concatenate([np.full(8, 4.0), RNG.random(16)]).astype(np.float32),
}
LABELS = (FEATURES["x"].sum(1) + FEATURES["kind"] > 2.5).astype(np.int32)
X = fc.numeric_column("x", 2)
KIND = fc.categorical_column_with_identity("kind", 6)
COLUMNS = [X, fc.embedding_column(KIND, 3)]


def sgd(learning_rate=0.1):
    return est.Optimizer(optax.sgd(learning_rate))


def batches(n, labels=LABELS):
    return lambda: [(FEATURES, labels)] * n


def variables(estimator):
    """The newest values of what is trained."""
    names = [name for name in estimator.get_variable_names() if name.split("/")[0] in ("dnn", "linear", "baseline")]
    return {name: estimator.get_variable_value(name) for name in names}


def first_step(estimator, features=FEATURES, labels=LABELS):
    """The variables after one step."""
    return one_step(estimator.model_fn, features, labels)[0].variables


# The original's integration test.


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    dnn = classifier(tmp_path_factory.mktemp("one"))
    dnn.train(batches(10))
    rest = {name: column[:22] for name, column in FEATURES.items()}
    evaluated, predicted = dnn.evaluate(lambda: (rest, LABELS[:22])), list(dnn.predict(lambda: rest))
    return variables(dnn), evaluated, rest, predicted, dnn.model_dir


def classifier(model_dir):
    return est.DNNClassifier(
        hidden_units=np.array([4]),
        feature_columns=COLUMNS,
        model_dir=model_dir,
        weight_column="w",
        optimizer=TowerOptimizer(optax.adagrad(0.05)),
    )


@pytest.mark.slow
@pytest.mark.covers("11 the original's integration test")
@pytest.mark.parametrize("distribution", ["mirrored", "shared_round_robin"])
def test_a_classifier_replicated_over_three_towers_matches_one_device(one_device, distribution, tmp_path):
    dnn = classifier(tmp_path)
    replicated = replicate_model_fn(dnn.model_fn, devices=cpus(3), variable_distribution=distribution)
    estimator = est.Estimator(replicated, dnn.model_dir)
    estimator.train(batches(10))
    after, evaluated, rest, predicted, _ = one_device
    assert_close(variables(estimator), after)
    result = estimator.evaluate(lambda: (rest, LABELS[:22]))  # 22 rows do not divide by 3
    assert result == {name: pytest.approx(value, rel=2e-5) for name, value in evaluated.items()}
    assert result["global_step"] == 10
    assert_close(list(estimator.predict(lambda: rest)), predicted)
    loaded = est.load_exported(estimator.export_model(tmp_path / "export", rest))
    probabilities = loaded(rest, signature="predict")["probabilities"]
    assert_close(probabilities, np.stack([row["probabilities"] for row in predicted]))


@pytest.mark.slow
def test_a_network_starts_warm_from_another(one_device, tmp_path):
    _, _, rest, predicted, model_dir = one_device
    dnn = est.DNNClassifier([4], COLUMNS, tmp_path, weight_column="w", warm_start_from=model_dir)
    assert_close(list(dnn.predict(lambda: rest)), predicted)


def test_towers_ask_for_a_wrapped_optimizer(tmp_path):
    dnn = est.DNNClassifier([4], COLUMNS, tmp_path)
    with pytest.raises(ValueError, match="Please wrap optimizers with TowerOptimizer"):
        est.Estimator(replicate_model_fn(dnn.model_fn, devices=cpus(3)), tmp_path).train(batches(1))


# Networks.


@pytest.mark.slow
@pytest.mark.covers("11 canned estimators")
def test_a_network_computes_what_it_says(tmp_path):
    dnn = est.DNNClassifier([4, 3], COLUMNS, tmp_path, n_classes=3, optimizer=sgd(), activation_fn=jnp.tanh)
    dnn.train(batches(1), steps=1)
    values = variables(dnn)
    layers = ["hiddenlayer_0", "hiddenlayer_1", "logits"]
    embedding = "dnn/input_from_feature_columns/input_layer/kind_embedding/embedding_weights"
    assert values.keys() == {f"dnn/{layer}/{part}" for layer in layers for part in ("kernel", "bias")} | {embedding}
    net = np.concatenate([values[embedding][FEATURES["kind"]], FEATURES["x"]], axis=1)
    for layer in layers:
        net = net @ values[f"dnn/{layer}/kernel"] + values[f"dnn/{layer}/bias"]
        net = net if layer == "logits" else np.tanh(net)
    predictions = list(dnn.predict(lambda: FEATURES))
    np.testing.assert_allclose([p["logits"] for p in predictions], net, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal([p["class_ids"][0] for p in predictions], net.argmax(1))


@pytest.mark.quick
def test_dropout_leaves_out_parts_of_a_layer_in_training_alone():
    ones = fc.numeric_column("one", 500)
    seen = []

    def spy(x):
        seen.append(x)
        return jnp.ones_like(x)

    dnn = est.DNNRegressor([1000], [ones], dropout=0.25, activation_fn=spy, optimizer=sgd())
    features, labels = {"one": np.ones((4, 500), np.float32)}, np.zeros(4)
    model, state = started(dnn.model_fn, features, labels)
    kernel = jnp.ones((1000, 1))
    state = state._replace(variables={**state.variables, "dnn/logits/kernel": kernel})
    trained = np.asarray(model.train_step(state, features, labels)[1].predictions["predictions"])[:, 0]
    kept = trained * 0.75 / 1000  # what is kept is scaled up by 1 / 0.75
    assert len(set(kept.tolist())) > 1 and np.all(abs(kept - 0.75) < 0.06)
    evaluated = model.eval_step(state, features, labels).predictions["predictions"]
    np.testing.assert_array_equal(evaluated, np.full((4, 1), 1000.0))


def test_batch_norm_normalizes_by_the_batch_then_by_moving_averages():
    dnn = est.DNNRegressor([3], [X], batch_norm=True, activation_fn=lambda x: x, optimizer=sgd(0.0))
    model, state = started(dnn.model_fn, FEATURES, LABELS)
    after, spec = model.train_step(state, FEATURES, LABELS)
    values = {name.removeprefix("dnn/"): np.asarray(value) for name, value in state.variables.items()}
    net = FEATURES["x"] @ values["hiddenlayer_0/kernel"]

    def output(mean, variance):
        return (net - mean) / np.sqrt(variance + 1e-3) @ values["logits/kernel"]

    np.testing.assert_allclose(spec.predictions["predictions"], output(net.mean(0), net.var(0)), rtol=1e-4, atol=1e-5)
    moving = [after.variables[f"dnn/hiddenlayer_0/batchnorm_0/moving_{what}"] for what in ("mean", "variance")]
    np.testing.assert_allclose(moving[0], 0.001 * net.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(moving[1], 0.999 + 0.001 * net.var(0), rtol=1e-5)
    evaluated = model.eval_step(after, FEATURES, LABELS).predictions["predictions"]
    np.testing.assert_allclose(evaluated, output(*moving), rtol=1e-4, atol=1e-5)
    assert {"gamma", "beta"} <= {name.rsplit("/")[-1] for name in values}


# Linear models.


@pytest.mark.quick
@pytest.mark.slow
@pytest.mark.parametrize("optimizer, rate", [(None, 1 / 6), ("Ftrl", 0.2)], ids=["default", "by name"])
def test_many_columns_make_the_learning_rate_of_the_default_optimizer_alone_smaller(optimizer, rate):
    linear = est.LinearRegressor([fc.numeric_column(f"n{i}") for i in range(36)], optimizer=optimizer)
    after = first_step(linear, {f"n{i}": np.zeros(2) for i in range(36)}, np.ones(2))
    bias = after["linear/linear_model/bias_weights"]
    assert bias == pytest.approx(2 * rate / np.sqrt(0.1 + 2**2), rel=1e-4)  # 1 / sqrt(36) < 0.2


def test_a_linear_regressor_finds_the_weighted_least_squares(tmp_path):
    labels = (FEATURES["x"] @ [[1.0, -2.0], [0.5, 3.0]] + RNG.normal(size=(ROWS, 2))).astype(np.float32)
    linear = est.LinearRegressor([X], tmp_path, label_dimension=2, weight_column="w", optimizer=sgd(0.2))
    linear.train(batches(200, labels))
    root, rows = np.sqrt(FEATURES["w"])[:, None], np.concatenate([FEATURES["x"], np.ones((ROWS, 1))], axis=1)
    expected = np.linalg.lstsq(root * rows, root * labels)[0]
    values = variables(linear)
    np.testing.assert_allclose(values["linear/linear_model/x/weights"], expected[:2], atol=1e-3)
    np.testing.assert_allclose(values["linear/linear_model/bias_weights"], expected[2], atol=1e-3)


# Models that look at nothing.


@pytest.mark.quick
def test_a_baseline_learns_how_frequent_the_classes_are(tmp_path):
    labels = np.arange(ROWS) % 8 // 3  # 0: 3/8, 1: 3/8, 2: 2/8
    baseline = est.BaselineClassifier(tmp_path, n_classes=3, label_vocabulary=["a", "b", "c"])
    baseline.train(batches(200, labels.astype(np.uint32)))
    [first, *_] = baseline.predict(lambda: {"x": np.zeros(2)})
    np.testing.assert_allclose(first["probabilities"], [3 / 8, 3 / 8, 2 / 8], atol=1e-3)


def test_a_baseline_of_numbers_learns_their_weighted_mean(tmp_path):
    labels = RNG.normal(size=(ROWS, 2)).astype(np.float32)
    baseline = est.BaselineRegressor(tmp_path, 2, "w", sgd(0.3)).train(batches(100, labels))
    mean = np.average(labels, axis=0, weights=FEATURES["w"])
    np.testing.assert_allclose(variables(baseline)["baseline/bias"], mean, atol=1e-4)


@pytest.mark.quick
def test_the_default_steps_match_adagrad_with_tensorflows_rates():
    gradient = 0.5 - LABELS.mean()
    step = pytest.approx(-gradient / np.sqrt(0.1 + gradient**2), rel=1e-4)
    assert first_step(est.BaselineClassifier())["baseline/bias"] / 0.3 == step
    dead = est.DNNClassifier([2], [X], activation_fn=jnp.zeros_like)
    assert first_step(dead)["dnn/logits/bias"] / 0.05 == step


# Both at once, and any head.


def combined(**kwargs):
    both = {"linear_feature_columns": [KIND], "dnn_feature_columns": [X], "dnn_hidden_units": [3]}
    return both | {"linear_optimizer": sgd(), "dnn_optimizer": sgd()} | kwargs


@pytest.mark.quick
@pytest.mark.parametrize("frozen", ["linear", "dnn"])
def test_wide_and_deep_are_added_and_have_optimizers_of_their_own(frozen):
    estimator = est.DNNLinearCombinedClassifier(**combined(**{f"{frozen}_optimizer": sgd(0.0)}))
    model, before = started(estimator.model_fn, FEATURES, LABELS)
    before.variables["linear/linear_model/kind/weights"] = weights = np.arange(6, dtype=np.float32)[:, None]
    after, spec = model.train_step(before, FEATURES, LABELS)
    moved = {name for name, value in after.variables.items() if np.any(value != before.variables[name])}
    assert moved and not any(name.startswith(f"{frozen}/") for name in moved)
    dnn = est.transform(est.DNNClassifier([3], [X], optimizer=sgd()).model_fn)
    part = {name: value for name, value in before.variables.items() if name.startswith("dnn/")}
    alone = dnn.predict_step(before._replace(variables=part, slots={}), FEATURES).predictions["logits"]
    np.testing.assert_allclose(spec.predictions["logits"], alone + weights[FEATURES["kind"]], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_wide_and_deep_on_towers_match_one_device():
    optimizers = {"linear": est.train.FtrlOptimizer(0.2), "dnn": est.train.AdagradOptimizer(0.05)}
    kwargs = combined(**{f"{name}_optimizer": TowerOptimizer(optimizer) for name, optimizer in optimizers.items()})
    model_fn = est.DNNLinearCombinedClassifier(**kwargs).model_fn
    (got, spec), (want, want_spec) = (one_step(fn, FEATURES, LABELS) for fn in (replicate(model_fn, 2), model_fn))
    assert_close((got[:2], spec.loss), (want[:2], want_spec.loss))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["linear", "both"])
def test_default_optimizers_are_those_of_tensorflow(kind):
    """`tests/train/test_golden_optimizers.py` has their numbers."""
    ftrl, adagrad = est.train.FtrlOptimizer, est.train.AdagradOptimizer
    default, given = {
        "linear": (est.LinearClassifier([X, KIND]), est.LinearClassifier([X, KIND], optimizer=ftrl(0.2))),
        "both": [
            est.DNNLinearCombinedClassifier(**combined(linear_optimizer=linear, dnn_optimizer=dnn))
            for linear, dnn in ((None, None), (ftrl(0.005), adagrad(0.001)))
        ],
    }[kind]
    got, want = (one_step(each.model_fn, FEATURES, LABELS)[0] for each in (default, given))
    assert_close(got[:2], want[:2], rtol=0, atol=0)


@pytest.mark.slow
def test_wide_and_deep_fit_numbers(tmp_path):
    labels = FEATURES["x"].sum(1) + FEATURES["kind"]
    estimator = est.DNNLinearCombinedRegressor(tmp_path, **combined()).train(batches(100, labels))
    assert estimator.evaluate(batches(1, labels))["average_loss"] < 0.1 * labels.var()


@pytest.mark.quick
def test_canned_models_take_any_head(tmp_path):
    head = est.MultiHead([est.RegressionHead(2, name="a"), est.PoissonRegressionHead(name="b")])
    labels = {"a": FEATURES["x"], "b": FEATURES["kind"]}
    for estimator in (
        est.DNNEstimator(head, [3], COLUMNS, tmp_path, optimizer=sgd()),
        est.LinearEstimator(head, [X, KIND], tmp_path, optimizer=sgd),
        est.BaselineEstimator(head, tmp_path, sgd()),
    ):
        result = estimator.evaluate(batches(1, labels))
        assert {"loss/a", "loss/b", "average_loss/a", "label/mean/b"} <= result.keys()


def test_an_optimizer_may_be_made_in_each_run(tmp_path):
    def optimizer():
        return est.Optimizer(optax.sgd(optax.linear_schedule(0.0, 1.0, 1)(est.global_step())))

    baseline = est.BaselineClassifier(tmp_path, optimizer=optimizer).train(batches(1))
    assert variables(baseline)["baseline/bias"] == 0
    baseline.train(batches(1))
    assert variables(baseline)["baseline/bias"] == pytest.approx(LABELS.mean() - 0.5, rel=1e-5)


@pytest.mark.quick
@pytest.mark.covers("11 optimizers by name")
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("SGD", lambda g, rate: rate * g),
        ("Adagrad", lambda g, rate: rate * g / np.sqrt(0.1 + g**2)),
        ("Ftrl", lambda g, rate: rate * g / np.sqrt(0.1 + g**2)),
        ("RMSProp", lambda g, rate: rate * g / np.sqrt(0.9 + 0.1 * g**2)),
        ("Adam", lambda g, rate: rate * np.sign(g)),
    ],
)
def test_optimizers_by_name_make_tensorflows_first_step(name, step):
    """The learning rate is that of the kind of model."""
    estimator, variable, rate = {
        "SGD": (est.LinearClassifier([X, KIND], optimizer="SGD"), "linear/linear_model/bias_weights", 0.2),
        "Adam": (est.DNNClassifier([2], [X], optimizer="Adam", activation_fn=jnp.zeros_like), "dnn/logits/bias", 0.05),
    }.get(name, (est.BaselineClassifier(optimizer=name), "baseline/bias", 0.3))
    assert first_step(estimator)[variable] == pytest.approx(-step(0.5 - LABELS.mean(), rate), rel=1e-4)


@pytest.mark.quick
@pytest.mark.covers("11 DNNLinearCombined with columns of one kind")
@pytest.mark.parametrize("part", ["linear", "dnn"])
def test_wide_and_deep_with_one_part_is_that_part(part):
    kwargs = combined(**{f"{'dnn' if part == 'linear' else 'linear'}_feature_columns": None})
    alone = {
        "linear": lambda: est.LinearClassifier([KIND], optimizer=sgd()),
        "dnn": lambda: est.DNNClassifier([3], [X], optimizer=sgd()),
    }[part]()
    want, got = first_step(alone), first_step(est.DNNLinearCombinedClassifier(**kwargs))
    assert_close(got, want, rtol=0, atol=0)


# What training shows.


@pytest.mark.slow
@pytest.mark.covers("11 networks' and linear models' summaries")
@pytest.mark.parametrize("units", [1, 3])
def test_training_shows_layers_and_weights(units):
    kwargs = combined(dnn_hidden_units=[4, 3]) | {"n_classes": units if units > 1 else 2}
    model, state = started(est.DNNLinearCombinedClassifier(**kwargs).model_fn, FEATURES, LABELS)
    ones = {"linear/linear_model/kind/weights": jnp.zeros((6, units)).at[0].set(1.0)}
    assert ones.keys() < state.variables.keys()
    bias = state.variables["linear/linear_model/bias_weights"] + 2
    state = state._replace(variables=state.variables | ones | {"linear/linear_model/bias_weights": bias})
    spec = model.train_step(state, FEATURES, LABELS)[1]
    layers = ["dnn/hiddenlayer_0", "dnn/hiddenlayer_1", "dnn/logits", "linear"]
    tags = {f"{layer}/fraction_of_zero_values" for layer in layers}
    assert spec.reported.keys() == tags | {"linear/bias", "linear/fraction_of_zero_weights"}
    got = {name: jax.device_get(report).as_value() for name, report in spec.reported.items()}
    assert got["linear/fraction_of_zero_weights"] == pytest.approx(5 / 6)
    assert got["linear/bias"] == 2.0 if units == 1 else got["linear/bias"].counts.sum() == 3

    assert got["linear/fraction_of_zero_values"] == 0
    kernel, first = (state.variables[f"dnn/hiddenlayer_0/{name}"] for name in ("kernel", "bias"))
    net = np.maximum(FEATURES["x"] @ kernel + first, 0)
    assert got["dnn/hiddenlayer_0/fraction_of_zero_values"] == pytest.approx((net == 0).mean())
    assert not model.eval_step(state, FEATURES, LABELS).reported


def test_a_large_table_has_a_sparse_gradient_though_its_zeros_are_counted():
    def model_fn(features, labels, mode):
        logits = linear_logits_fn("test", 1, [many], "sum")(features, mode)
        optimizer = sgd()
        loss = jnp.mean((logits[:, 0] - labels) ** 2)
        kinds.extend(type(gradient) for gradient, name in optimizer.compute_gradients(loss) if "kind" in name)
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    kinds = []
    many = fc.categorical_column_with_identity("kind", 5000)
    model = est.transform(model_fn)
    labels = LABELS.astype(np.float32)
    _, spec = model.train_step(model.init(jax.random.key(0), FEATURES, labels), FEATURES, labels)
    assert set(kinds) == {est.IndexedSlices}
    assert spec.reported["linear/fraction_of_zero_weights"].value == 1


REFUSED = {
    ValueError: [
        (lambda: est.DNNClassifier([3], [X], n_classes=1), "n_classes must be > 2: 1"),
        (lambda: est.DNNClassifier([], [X]),
         r"`DNNClassifier` needs the widths of its layers as hidden_units, as in \[64, 32\]; got \(\)"),
        (lambda: est.DNNRegressor(np.array([3, 0]), [X]), r"`DNNRegressor` .* got \(3, 0\)"),
        (lambda: est.DNNClassifier([3], [KIND]), "Wrap a categorical column"),
        (lambda: est.LinearClassifier([]), "feature_columns must not be empty"),
        (lambda: est.DNNClassifier([3], [X], dropout=1.0), r"needs a number in \[0, 1\), or None, as dropout; got 1.0"),
        (lambda: est.LinearRegressor([X], sparse_combiner="max"), "`LinearRegressor`: sparse_combiner must be one of"),
        (lambda: est.BaselineRegressor(optimizer="ftrl"),
         r"`BaselineRegressor` got an unsupported optimizer name: 'ftrl'. Supported names are \['Adagrad', "),
        (lambda: est.DNNLinearCombinedClassifier(dnn_hidden_units=[3]),
         "Either linear_.* or dnn_feature_columns must be given to `DNNLinearCombinedClassifier`; got None and None"),
        (lambda: est.DNNRegressor([3], [X]).train(lambda: (FEATURES["x"], LABELS)),
         "features should be a dictionary of arrays"),
        (lambda: est.DNNRegressor([3], [X]).train(lambda: FEATURES),
         "You must provide labels to `RegressionHead`. Given: None."),
    ],
    TypeError: [
        (lambda: est.DNNClassifier([3, 2.0], [X]), "`DNNClassifier` needs an int as hidden_units; got 2.0"),
        (lambda: est.DNNClassifier([3], [X], activation_fn="relu"),
         "needs a function such as `jax.nn.relu` as activation_fn; got 'relu'"),
        (lambda: est.DNNClassifier([3], [X], optimizer=optax.adam(0.1)), (
             r"`DNNClassifier` needs an `est.Optimizer` or a `TowerOptimizer` as optimizer; got .* Write "
             r"`optimizer=est.Optimizer\(optax.adam\(1e-3\)\)`"
         )),
        (lambda: est.BaselineRegressor(optimizer=lambda: optax.sgd(0.1)).train(batches(1)),
         "`BaselineRegressor` needs an `est.Optimizer`"),
        (lambda: est.DNNEstimator("a", [3], [X]), "`DNNEstimator` needs a head such as .* got 'a'"),
    ],
}  # fmt: skip


@pytest.mark.covers("11 canned estimators")
@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_canned_models_say_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()
