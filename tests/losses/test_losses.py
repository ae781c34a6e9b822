"""Losses against formulas written out in numpy float64, and against TensorFlow's golden cases."""

import functools
import json
import pathlib

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import estimator as est
from estimator import losses, metrics
from estimator.core import _frame
from estimator.core._mode_keys import ModeKeys
from estimator.losses import Reduction

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "replicate_model_fn_tf112.json"
CASES = json.loads(GOLDEN.read_text())["eval"]
MEANS = [Reduction.MEAN, Reduction.SUM_OVER_BATCH_SIZE, Reduction.SUM_BY_NONZERO_WEIGHTS]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def log_softmax(x):
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def huber(y, p, delta):
    error = np.abs(p - y)
    return np.where(error <= delta, 0.5 * error**2, delta * error - 0.5 * delta**2)


def reduced(values, weights, reduction):
    weights = np.broadcast_to(weights, values.shape)
    weighted = values * weights
    if reduction == Reduction.NONE:
        return weighted
    denominator = {
        Reduction.SUM: 1,
        Reduction.MEAN: weights.sum(),
        Reduction.SUM_OVER_BATCH_SIZE: weights.size,
        Reduction.SUM_BY_NONZERO_WEIGHTS: (weights != 0).sum(),
    }[reduction]
    return weighted.sum() / denominator if denominator else 0.0


# name -> (loss per element of labels in {0, 1} and outputs in float64, are outputs probabilities)
ELEMENTWISE = {
    "absolute_difference": (lambda y, p: np.abs(p - y), False),
    "mean_squared_error": (lambda y, p: (p - y) ** 2, False),
    "huber_loss": (lambda y, p: huber(y, p, 1.0), False),
    "hinge_loss": (lambda y, p: np.maximum(0, 1 - (2 * y - 1) * p), False),
    "log_loss": (lambda y, p: -y * np.log(p + 1e-7) - (1 - y) * np.log(1 - p + 1e-7), True),
    "sigmoid_cross_entropy": (lambda y, p: -y * np.log(sigmoid(p)) - (1 - y) * np.log(1 - sigmoid(p)), False),
}
WEIGHTS = [1.0, 2, 0.0, np.float32([[0.5], [0], [2], [1]]), np.float32([[3, 0, 1]]), "full"]


def batch(name):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (4, 3))
    outputs = rng.normal(size=(4, 3)) * 2
    if ELEMENTWISE[name][1]:
        outputs = sigmoid(outputs)
    return labels, outputs.astype(np.float32), rng.integers(0, 3, (4, 3)).astype(np.float32)


ALL_OF_ONE = [("absolute_difference", n, reduction) for n in range(len(WEIGHTS)) for reduction in Reduction]
ONE_OF_EACH = [(name, -1, Reduction.MEAN) for name in ELEMENTWISE]


@pytest.mark.quick
@pytest.mark.parametrize("name, n, reduction", dict.fromkeys([*ONE_OF_EACH, *ALL_OF_ONE]))
def test_loss_is_its_formula(name, n, reduction):
    labels, outputs, full = batch(name)
    weights = full if isinstance(WEIGHTS[n], str) else WEIGHTS[n]
    formula = ELEMENTWISE[name][0](labels.astype(np.float64), outputs.astype(np.float64))
    got = getattr(losses, name)(labels, outputs, weights, reduction)
    np.testing.assert_allclose(got, reduced(formula, weights, reduction), rtol=2e-5, atol=2e-6)
    assert got.dtype == jnp.float32


@pytest.mark.parametrize("reduction", list(Reduction))
def test_softmax_losses_are_their_formula_and_agree(reduction):
    weights, rng = np.float32([1, 0, 2, 0.5]), np.random.default_rng(1)
    labels, logits = rng.integers(0, 3, 4), rng.normal(size=(4, 3)).astype(np.float32)
    formula = -log_softmax(logits.astype(np.float64))[np.arange(4), labels]
    want = reduced(formula, weights, reduction)
    sparse = losses.sparse_softmax_cross_entropy(labels, logits, weights, reduction)
    dense = losses.softmax_cross_entropy(np.eye(3)[labels], logits, weights, reduction)
    np.testing.assert_allclose(sparse, want, rtol=1e-5)
    np.testing.assert_allclose(dense, want, rtol=1e-5)


def test_sparse_labels_and_weights_of_one_column_are_squeezed():
    rng = np.random.default_rng(2)
    labels, logits = rng.integers(0, 3, 4), rng.normal(size=(4, 3)).astype(np.float32)
    weights = np.float32([1, 2, 0, 3])
    want = losses.sparse_softmax_cross_entropy(labels, logits, weights)
    got = losses.sparse_softmax_cross_entropy(labels[:, None], logits, weights[:, None])
    assert got == want


@pytest.mark.parametrize("label", [-1, 3])
def test_a_sparse_label_out_of_range_gives_nan(label):
    got = losses.sparse_softmax_cross_entropy(jnp.array([label, 0]), jnp.zeros((2, 3)), reduction=Reduction.NONE)
    assert jnp.isnan(got).tolist() == [True, False]


@pytest.mark.parametrize("loss", [losses.sparse_softmax_cross_entropy, est.nn.sparse_softmax_cross_entropy_with_logits])
def test_a_sparse_label_in_a_byte_is_not_wrapped_around(loss):
    assert jnp.isnan(loss(labels=jnp.array([-1], jnp.int8), logits=jnp.zeros((1, 300)))).all()


def test_huber_delta_and_log_loss_epsilon_are_used():
    y, p = np.array([0.0, 0.0]), np.float32([0.5, 5.0])
    np.testing.assert_allclose(
        losses.huber_loss(y, p, delta=2.0, reduction=Reduction.NONE), huber(y, p, 2.0), rtol=1e-6
    )
    got = losses.log_loss(jnp.array([1.0]), jnp.array([0.0]), epsilon=0.1)
    np.testing.assert_allclose(got, -np.log(0.1), rtol=1e-6)


def test_label_smoothing_moves_labels_towards_uniform():
    logits = jnp.array([[2.0, -1.0, 0.5]])
    got = losses.softmax_cross_entropy(jnp.array([[1, 0, 0]]), logits, label_smoothing=0.3)
    want = losses.softmax_cross_entropy(jnp.array([[0.8, 0.1, 0.1]]), logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    got = losses.sigmoid_cross_entropy(jnp.array([[1, 0, 0]]), logits, label_smoothing=0.2)
    want = losses.sigmoid_cross_entropy(jnp.array([[0.9, 0.1, 0.1]]), logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@hypothesis.given(
    hnp.arrays(np.float32, (5, 2), elements=st.floats(-100, 100, width=32)),
    hnp.arrays(np.float32, (5, 2), elements=st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])),
    st.sampled_from(list(Reduction)),
)
@hypothesis.settings(deadline=None, max_examples=30)
def test_weighted_loss_is_its_formula_in_float64(values, weights, reduction):
    got = losses.compute_weighted_loss(values, weights, reduction)
    want = reduced(values.astype(np.float64), weights.astype(np.float64), reduction)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, reduction, weights",
    [
        *((name, Reduction.MEAN, np.zeros((4, 3), np.float32)) for name in ELEMENTWISE),
        *(("log_loss", reduction, 0.0) for reduction in MEANS),
    ],
    ids=str,
)
def test_zero_weights_give_zero_and_zero_gradients(name, reduction, weights):
    labels, outputs, _ = batch(name)
    loss = getattr(losses, name)
    value, gradient = jax.value_and_grad(lambda p: loss(labels, p, weights, reduction))(outputs)
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(outputs))


ONE_HOT = {"softmax_cross_entropy": [0.0, 1.0, 0.0], "sparse_softmax_cross_entropy": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, wrong, reduction",
    [
        *((name, np.nan, Reduction.MEAN) for name in [*ELEMENTWISE, *ONE_HOT]),
        *((name, np.inf, Reduction.SUM) for name in ("log_loss", "softmax_cross_entropy")),
    ],
)
def test_a_row_of_weight_zero_is_absent(name, wrong, reduction):
    loss = functools.partial(getattr(losses, name), reduction=reduction)
    if name == "log_loss":
        loss = functools.partial(loss, epsilon=0.0)
    shape, weights = ((3, 3), np.float32([2, 0, 1])) if name in ONE_HOT else ((3, 1), np.float32([[2], [0], [1]]))
    labels = np.stack([np.asarray(ONE_HOT.get(name, [1.0]))] * 3)
    outputs = np.full(shape, 0.25, np.float32)
    want, want_gradient = jax.value_and_grad(lambda p: loss(labels, p, weights))(outputs)
    outputs[1] = wrong
    wrong_labels = labels.copy()
    wrong_labels[1] = -1 if name == "sparse_softmax_cross_entropy" else wrong
    for given in (labels, wrong_labels):
        got, gradient = jax.value_and_grad(lambda p, y=given: loss(y, p, weights))(outputs)
        assert got == want
        np.testing.assert_array_equal(gradient, want_gradient.at[1].set(0))


def test_a_probability_that_is_none_is_absent_too():
    def loss(p):
        return losses.log_loss(jnp.ones(3), p, jnp.array([0.0, 0.0, 1.0]), epsilon=0.0)

    value, gradient = jax.value_and_grad(loss)(jnp.array([0.0, -1.0, 0.5]))
    assert value == -jnp.log(0.5) and gradient.tolist() == [0, 0, -2]


def test_a_weight_of_zero_has_the_gradient_of_its_loss():
    losses_of = jnp.array([3.0, 5.0, jnp.inf])
    gradient = jax.grad(lambda w: losses.compute_weighted_loss(losses_of, w, Reduction.SUM))(jnp.zeros(3))
    assert gradient.tolist() == [3, 5, 0]


def test_the_mean_of_no_elements_is_zero():
    assert losses.mean_squared_error(jnp.zeros((0, 1)), jnp.zeros((0, 1))) == 0


def test_half_precision_losses_are_summed_in_float32():
    values = jnp.full((4096,), 1.0, jnp.bfloat16)
    got = losses.compute_weighted_loss(values)
    assert got == 1 and got.dtype == jnp.float32
    assert losses.compute_weighted_loss(values, reduction=Reduction.SUM) == 4096
    assert losses.compute_weighted_loss(values, reduction=Reduction.NONE).dtype == jnp.float32


def test_no_gradient_flows_to_one_hot_labels():
    gradient = jax.grad(losses.softmax_cross_entropy)(jnp.eye(3), jnp.ones((3, 3)))
    np.testing.assert_array_equal(gradient, np.zeros((3, 3)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_loss_matches_tensorflow(case):
    reduction = Reduction.SUM if case["loss_reduction"] == "sum" else Reduction.MEAN
    per_batch = [
        losses.sparse_softmax_cross_entropy(jnp.array(y), jnp.array(x) @ jnp.array(case["w"]), reduction=reduction)
        for x, y in zip(case["x"], case["y"], strict=True)
    ]
    np.testing.assert_allclose(np.mean(per_batch), case["results"]["loss"], rtol=5e-5)


def frame_that_halves_denominators(seen):
    def average(denominator, index):
        seen.append(float(denominator))
        return denominator / 2

    return _frame.Frame(
        mode=ModeKeys.TRAIN,
        variables={},
        slots={},
        key=jax.random.key(0),
        global_step=jnp.int32(0),
        replica=_frame.Replica(average_denominator=average),
    )


@pytest.mark.parametrize("reduction, denominator", [*zip(MEANS, [5.0, 4.0, 2.0], strict=True)])
def test_denominators_of_array_weights_are_averaged_over_towers(reduction, denominator):
    seen = []
    with _frame.open_frame(frame_that_halves_denominators(seen)):
        got = losses.compute_weighted_loss(jnp.ones(4), jnp.array([2.0, 3.0, 0, 0]), reduction)
    assert seen == [denominator]
    np.testing.assert_allclose(got, 5 / (denominator / 2))


@pytest.mark.parametrize("reduction", list(Reduction))
def test_denominators_of_a_plain_number_are_not_averaged(reduction):
    seen = []
    with _frame.open_frame(frame_that_halves_denominators(seen)):
        losses.compute_weighted_loss(jnp.ones(4), 2.0, reduction)
        losses.compute_weighted_loss(jnp.ones(4), jnp.float32(2.0), Reduction.SUM)
    assert seen == []


def test_a_weighted_mean_over_towers_is_the_exact_global_mean():
    values, weights = jnp.arange(8.0), jnp.array([1.0, 1, 0, 0, 0, 3, 0, 0])

    def tower(values, weights):
        frame = frame_that_halves_denominators([])
        frame.replica = _frame.Replica(average_denominator=lambda d, index: jax.lax.pmean(d, "towers"))
        with _frame.open_frame(frame):
            return jax.lax.psum(losses.compute_weighted_loss(values, weights) / 4, "towers")

    got = jax.vmap(tower, axis_name="towers")(values.reshape(4, 2), weights.reshape(4, 2))
    np.testing.assert_allclose(got, np.full(4, (0 + 1 + 15) / 3), rtol=1e-6)


def test_reductions_have_tensorflows_values_and_are_taken_by_value():
    assert [r.value for r in Reduction] == [
        "none",
        "weighted_sum",
        "weighted_mean",
        "weighted_sum_over_batch_size",
        "weighted_sum_by_nonzero_weights",
    ]
    assert losses.compute_weighted_loss(jnp.array([1.0, 2.0]), reduction="weighted_sum") == 3


def test_an_unknown_reduction_is_an_error_naming_the_known_ones():
    message = r"Unknown loss reduction 'avg'; .*Reduction\.NONE \('none'\), .*Reduction\.MEAN"
    with pytest.raises(ValueError, match=message):
        losses.compute_weighted_loss(jnp.ones(2), reduction="avg")


@pytest.mark.parametrize("name", [*ELEMENTWISE, "softmax_cross_entropy"])
def test_rows_against_a_column_are_an_error_and_not_broadcast(name):
    what = "logits" if "entropy" in name or "hinge" in name else "predictions"
    message = (
        rf"`{name}` got labels of shape \(4,\) and {what} of shape \(4, 1\), which would be "
        r"broadcast .* equal: write `labels\.reshape\(\(4, 1\)\)`"
    )
    with pytest.raises(ValueError, match=message):
        getattr(losses, name)(jnp.ones(4), jnp.ones((4, 1)))


def test_shapes_of_different_size_are_an_error():
    with pytest.raises(ValueError, match=r"must be equal: give both one value for each element"):
        losses.mean_squared_error(jnp.ones(1), jnp.ones(4))


@pytest.mark.parametrize("shape", [(3,), (4,), (1, 4, 3), (2, 3)])
def test_weights_that_numpy_might_broadcast_but_tensorflow_would_not_are_an_error(shape):
    message = r"`mean_squared_error` got weights of shape .* for losses of shape \(4, 3\)\."
    with pytest.raises(ValueError, match=message):
        losses.mean_squared_error(jnp.ones((4, 3)), jnp.ones((4, 3)), jnp.ones(shape))


@pytest.mark.parametrize("labels", [jnp.array([1, 0]), jnp.array([[0, 1, 0], [1, 0, 0]]), jnp.ones((2, 3), bool)])
@pytest.mark.parametrize(
    "name", ["sparse_softmax_cross_entropy", "softmax_cross_entropy", "sigmoid_cross_entropy", "hinge_loss"]
)
def test_labels_and_logits_that_have_changed_places_are_an_error(name, labels):
    message = (
        rf"`{name}` takes \(labels, logits\), in this order; got labels of dtype float32 and shape \(2, 3\), and "
        rf"logits of dtype {labels.dtype} and shape .* Write `{name}\(labels, logits\)`\."
    )
    with pytest.raises(TypeError, match=message):
        getattr(losses, name)(jnp.zeros((2, 3)), labels)


@pytest.mark.parametrize("function", [losses.mean_squared_error, losses.log_loss, metrics.mean_squared_error])
def test_complex_numbers_are_an_error_and_do_not_lose_their_imaginary_part(function):
    real, other = jnp.ones((4, 1)), jnp.ones((4, 1), "complex64")
    for given in ((real, other), (other, real), (real, real, other)):
        with pytest.raises(TypeError, match=r"Real numbers .* dtype complex64 and shape \(4, 1\).* `jnp.real\(x\)`"):
            function(*given)
    for one in (losses.compute_weighted_loss, metrics.mean):
        with pytest.raises(TypeError, match="Real numbers are needed here"):
            one(other)


def test_one_hot_labels_for_the_sparse_loss_are_an_error():
    with pytest.raises(ValueError, match=r"for one-hot labels call `softmax_cross_entropy`"):
        losses.sparse_softmax_cross_entropy(jnp.ones((4, 3), int), jnp.ones((4, 3)))
    with pytest.raises(TypeError, match=r"takes integer labels, .*; got float32"):
        losses.sparse_softmax_cross_entropy(jnp.ones(4), jnp.ones((4, 3)))
