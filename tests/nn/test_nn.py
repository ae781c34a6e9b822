"""Laws of `est.nn` beyond TensorFlow's numbers: towers, edges, and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused

import estimator as est
import replicate
from estimator.testing import assert_towers_match_one_batch
from replicate import TowerOptimizer

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(2, 4, 3)).astype(np.float32)
TRANSITIONS = RNG.normal(size=(3, 3)).astype(np.float32)
LENGTHS = np.array([4, 2])


def score_of(scores, tags):
    return sum(scores[t, tag] for t, tag in enumerate(tags)) + sum(
        TRANSITIONS[a, b] for a, b in itertools.pairwise(tags)
    )


@pytest.mark.parametrize("row", [0, 1])
def test_a_conditional_random_field_sums_and_searches_all_sequences_of_tags(row):
    scores, length = SCORES[row], LENGTHS[row]
    all_tags = list(itertools.product(range(3), repeat=int(length)))
    every = np.array([score_of(scores, tags) for tags in all_tags])
    padded = jnp.array([[*all_tags[every.argmax()], *[0] * (4 - length)]])
    likelihood, _ = est.nn.crf_log_likelihood(SCORES[None, row], padded, LENGTHS[None, row], TRANSITIONS)
    assert likelihood[0] == pytest.approx(every.max() - np.log(np.exp(every).sum()), abs=1e-5)
    tags, score = est.nn.crf_decode(SCORES[None, row], TRANSITIONS, LENGTHS[None, row])
    assert tags.tolist() == padded.tolist() and score[0] == pytest.approx(every.max(), abs=1e-5)


@pytest.mark.slow
def test_an_empty_sequence_is_certain_and_has_no_tags():
    lengths = jnp.array([0, 4])
    likelihood, _ = est.nn.crf_log_likelihood(SCORES, jnp.zeros((2, 4), int), lengths, TRANSITIONS)
    assert likelihood[0] == 0 and likelihood[1] < 0
    tags, scores = est.nn.crf_decode(jnp.ones((2, 4, 3)).at[0, 0, 1].set(9), TRANSITIONS, lengths)
    assert not tags[0].any() and scores[0] == 0 < scores[1]


@pytest.mark.quick
def test_what_is_behind_the_end_of_a_sequence_may_be_anything():
    lengths, tags = jnp.array([0, 2]), jnp.array([[9, -1, -1, -1], [1, 2, 9, -1]])

    def likelihood(scores, transitions, tags):
        return est.nn.crf_log_likelihood(scores, tags, lengths, transitions)[0].sum()

    runs = est.nn.sequence_mask(lengths, 4)[..., None]
    scores = jnp.where(runs, SCORES, jnp.nan)
    got = jax.value_and_grad(likelihood, (0, 1))(scores, TRANSITIONS, tags)
    want = jax.value_and_grad(likelihood, (0, 1))(jnp.asarray(SCORES), TRANSITIONS, jnp.where(runs[..., 0], tags, 0))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    decoded = [est.nn.crf_decode(given, TRANSITIONS, lengths) for given in (scores, SCORES)]
    jax.tree.map(np.testing.assert_array_equal, *decoded)


@pytest.mark.parametrize("wrong", [-1, 3])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8])
def test_a_tag_out_of_range_gives_nan(wrong, dtype):
    tags = jnp.array([[0, wrong, 1, 1], [0, 1, 1, 1]], dtype)
    assert jnp.isnan(est.nn.crf_log_likelihood(SCORES, tags, LENGTHS, TRANSITIONS)[0]).tolist() == [True, False]


def test_scores_of_half_precision_are_taken_with_transitions_of_float32():
    scores = jnp.asarray(SCORES, jnp.bfloat16)
    got, want = (est.nn.crf_decode(x, TRANSITIONS, LENGTHS) for x in (scores, scores.astype(jnp.float32)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.quick
@pytest.mark.parametrize("batch, steps", [(0, 4), (2, 0), (0, 0)])
def test_no_rows_and_no_steps_are_no_error(batch, steps):
    scores, tags, lengths = jnp.zeros((batch, steps, 3)), jnp.zeros((batch, steps), int), jnp.zeros(batch, int)
    likelihood, _ = est.nn.crf_log_likelihood(scores, tags, lengths, TRANSITIONS)
    decoded, score = est.nn.crf_decode(scores, TRANSITIONS, lengths)
    assert likelihood.tolist() == score.tolist() == [0] * batch and decoded.shape == (batch, steps)
    assert est.nn.sequence_loss(scores, tags, jnp.zeros((batch, steps))) == 0
    assert est.nn.sequence_mask(lengths).shape == (batch, 0)


@pytest.mark.quick
@pytest.mark.parametrize("function", ["sparse", "own"])
def test_a_step_of_weight_zero_is_absent(function):
    own = {} if function == "sparse" else {"softmax_loss_function": lambda labels, logits: (logits**2).sum(-1)}
    weights, targets = jnp.array([[1.0, 0], [2, 1], [0, 0]]), jnp.array([[1, 1], [2, 1], [1, 1]])

    def loss(logits, targets):
        return est.nn.sequence_loss(logits, targets, weights, **own)

    logits = jnp.asarray(RNG.normal(size=(3, 2, 3)), jnp.float32)
    wanted, gradient = jax.value_and_grad(loss)(logits, targets)
    bad = jnp.where(weights[..., None] == 0, jnp.inf, logits)
    got = jax.value_and_grad(loss)(bad, jnp.where(weights == 0, -1, targets))
    jax.tree.map(np.testing.assert_array_equal, got, (wanted, gradient))


def test_a_row_of_weight_zero_has_no_moments():
    x, weights = jnp.array([1.0, jnp.nan, 3.0, jnp.inf]), jnp.array([3.0, 0, 1, 0])
    assert [moment.item() for moment in est.nn.weighted_moments(x, 0, weights)] == [1.5, 0.75]
    gradient = jax.grad(lambda x: est.nn.weighted_moments(x, 0, weights)[1])(x)
    assert jnp.isfinite(gradient).all() and not gradient[1]


def test_of_zeros_whatever_their_sign_the_first_is_in_the_top_k():
    values, indices = jax.jit(est.nn.top_k, static_argnums=1)(jnp.array([-1.0, -0.0, 0.0]), 2)
    assert indices.tolist() == [1, 2] and jnp.signbit(values).tolist() == [True, False]
    gradient = jax.grad(lambda x: est.nn.top_k(x, 2).values @ jnp.array([1.0, 2.0]))(jnp.array([-1.0, -0.0, 0.0]))
    assert gradient.tolist() == [0, 1, 2]


def tagger(features, labels, mode):
    logits = est.layers.dense(features["x"], 3)
    lengths = features["length"]
    transitions = est.get_variable("transitions", (3, 3))
    tags, _ = est.nn.crf_decode(logits, transitions, lengths)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=tags)
    weights = est.nn.sequence_mask(lengths, logits.shape[1], jnp.float32)
    loss = est.nn.sequence_loss(logits, labels, weights)
    loss += est.nn.sequence_loss(logits, labels, weights, average_across_timesteps=False).sum()
    likelihood, same = est.nn.crf_log_likelihood(logits, labels, lengths, transitions)
    assert same is transitions
    loss += est.losses.compute_weighted_loss(-likelihood)
    return est.EstimatorSpec(mode, tags, loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))


@pytest.mark.slow
def test_sequences_on_towers_are_those_of_one_batch():
    lengths = np.array([1, 4, 4, 4, 2, 4, 1, 1])
    features = {"x": RNG.normal(size=(8, 4, 5)).astype(np.float32), "length": lengths}
    assert_towers_match_one_batch(
        tagger, features, RNG.integers(0, 3, (8, 4)), towers=(2,), replicate=replicate.replicate_model_fn
    )


def test_transitions_that_are_not_given_are_a_variable():
    def model_fn(features):
        likelihood, transitions = est.nn.crf_log_likelihood(features, jnp.zeros((2, 4), int), LENGTHS)
        return est.EstimatorSpec("infer", predictions=likelihood)

    state = est.transform(model_fn).init(jax.random.key(0), SCORES, mode="infer")
    assert {name: value.shape for name, value in state.variables.items()} == {"transitions": (3, 3)}


def test_no_gradient_flows_to_labels_but_by_v2():
    logits = jnp.array([[1.0, 2.0]])
    gradient = jax.grad(lambda labels, function: function(labels=labels, logits=logits)[0])
    assert not gradient(jnp.array([[0.5, 0.5]]), est.nn.softmax_cross_entropy_with_logits).any()
    assert gradient(jnp.array([[0.5, 0.5]]), est.nn.softmax_cross_entropy_with_logits_v2).all()


@pytest.mark.parametrize("clip", [est.nn.clip_by_norm, est.nn.clip_by_average_norm])
def test_what_is_zero_is_clipped_to_zero_with_a_finite_gradient(clip):
    assert not clip(jnp.zeros(3), 1.0).any()
    assert jnp.isfinite(jax.grad(lambda x: clip(x, 1.0).sum())(jnp.zeros(3))).all()


def test_rows_that_are_not_finite_and_targets_out_of_range_are_not_in_the_top_k():
    predictions = jnp.array([[1.0, 2.0], [1.0, jnp.nan], [1.0, jnp.inf], [1.0, 2.0], [1.0, 2.0], [3.0, 3.0]])
    targets = jnp.array([1, 0, 1, 2, -1, 1])
    assert est.nn.in_top_k(predictions, targets, 1).tolist() == [True, False, False, False, False, True]


def test_a_mask_without_a_length_is_as_long_as_the_longest():
    assert est.nn.sequence_mask(jnp.array([[2], [0]])).tolist() == [[[True, True]], [[False, False]]]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_may_be_integers_of_any_size_under_x64(dtype):
    with jax.enable_x64(True):
        lengths, tags = LENGTHS.astype(dtype), np.zeros((2, 4), dtype)
        mask = est.nn.sequence_mask(lengths, 4, SCORES.dtype)
        assert mask.sum(1).tolist() == [4, 2]
        assert est.nn.sequence_loss(SCORES, tags, mask).dtype == SCORES.dtype
        assert est.nn.crf_log_likelihood(SCORES, tags, lengths, TRANSITIONS)[0].dtype == SCORES.dtype
        assert not est.nn.crf_decode(SCORES, TRANSITIONS, lengths)[0][1, 2:].any()


@pytest.mark.quick
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "depthwise_conv2d", "separable_conv2d"])
def test_channels_may_come_first(name):
    convolve, last = getattr(est.nn, name), "NWC" if name == "conv1d" else "NHWC"
    kernels = [jnp.asarray(RNG.normal(size=(3, 2, 3, 2)), jnp.float32), jnp.ones((1, 1, 6, 2))][: 1 + (name[0] == "s")]
    kernels = [kernels[0][0]] if name == "conv1d" else kernels
    x = jnp.asarray(RNG.normal(size=(2, 5, 4, 3)[-len(last) :]), jnp.float32)
    x, stride = x[..., : kernels[0].shape[-2]], 2
    want = convolve(x, *kernels, stride, "SAME", data_format=last)
    first = convolve(jnp.moveaxis(x, -1, 1), *kernels, stride, "SAME", data_format="N" + "C" + last[1:-1])
    np.testing.assert_allclose(jnp.moveaxis(first, 1, -1), want, rtol=1e-5, atol=1e-5)


def test_moments_of_half_precision_are_computed_in_float32():
    mean, variance = est.nn.moments(jnp.full((4096,), 300.0, jnp.float16), [0], keep_dims=True)
    assert (mean.dtype, mean.shape, mean[0], variance[0]) == (jnp.float16, (1,), 300, 0)


X = jnp.ones((2, 3))
REFUSED = {
    ValueError: [
        (
            lambda: est.nn.sigmoid_cross_entropy_with_logits(X, X),
            r"arguments: write `sigmoid.*\(labels=\.\.\., logits=",
        ),
        (lambda: est.nn.sparse_softmax_cross_entropy_with_logits(logits=X), "takes named arguments"),
        (
            lambda: est.nn.softmax_cross_entropy_with_logits(labels=X[:1], logits=X),
            "`est.nn.softmax.* got labels of sh",
        ),
        (
            lambda: est.nn.sparse_softmax_cross_entropy_with_logits(labels=jnp.ones((2, 1), int), logits=X),
            r"shape \(2,\)",
        ),
        (
            lambda: est.nn.conv1d(X[None], jnp.ones((1, 2, 4)), 1, "SAME"),
            r"`est.nn.conv1d` needs an input of shape \[N, W, C\] and a kernel of shape \[W, C, outputs\] with the "
            r"same C; got shapes \(1, 2, 3\) and \(1, 2, 4\)",
        ),
        (lambda: est.nn.conv1d(X[None], X[None], 1, "same"), "needs 'SAME' or 'VALID' as `padding`; got 'same'"),
        (lambda: est.nn.conv1d(X[None], X[None], 1, "SAME", None, "NXC"), "needs NWC or NCW as `data_format`; got 'NX"),
        (
            lambda: est.nn.conv2d(X[None, None], X.T[None, None], [2, 1, 1, 1], "SAME"),
            r"a positive integer as `strides`, or 2, or one for each letter of NHWC, 1 for N and C; got \[2, 1, 1, 1\]",
        ),
        (
            lambda: est.nn.conv2d(X[None, None], X.T[None, None], 0.5, "SAME"),
            "positive integer as `strides`.*; got 0.5",
        ),
        (lambda: est.nn.lrn(X), r"channels\]; got shape \(2, 3\)"),
        (lambda: est.nn.in_top_k(X, jnp.ones((2, 1), int), 1), r"got shapes \(2, 3\) and \(2, 1\)"),
        (lambda: jax.jit(est.nn.sequence_mask)(jnp.ones(2, int)), r"needs `maxlen` here.*`maxlen=x.shape\[1\]`"),
        (lambda: est.nn.sequence_loss(X, X, X), r"logits of shape \[batch, steps, classes\], .* got shapes \(2, 3\)"),
        (lambda: est.nn.crf_decode(X, X, X), r"scores of shape \[batch, steps, tags\]"),
        (
            lambda: est.nn.crf_log_likelihood(X[None], jnp.ones((2, 3), int), jnp.ones(1, int), X),
            r"needs tags of shape \(1, 2\)",
        ),
        (
            lambda: est.nn.crf_log_likelihood(X[None], jnp.ones((1, 2), int), jnp.ones(1, int), jnp.ones((4, 4))),
            r"`est.nn.crf_log_likelihood` needs transitions of shape \(3, 3\) for scores of shape \(1, 2, 3\); got sh",
        ),
        (
            lambda: est.nn.crf_decode(X[None], jnp.ones((1, 1)), jnp.ones(1, int)),
            r"`est.nn.crf_decode` needs transitions of shape \(3, 3\)",
        ),
    ],
    TypeError: [
        (
            lambda: est.nn.sparse_softmax_cross_entropy_with_logits(labels=X[:, 0], logits=X),
            "needs integers as `labels`",
        ),
        (lambda: est.nn.in_top_k(X, X[:, 0], 1), "needs integers as `targets`; got float32"),
        (
            lambda: est.nn.crf_log_likelihood(X[None], jnp.ones((1, 2)), jnp.ones(1, int), jnp.ones((3, 3))),
            "`est.nn.crf_log_likelihood` needs integers as tags; got float32",
        ),
        (
            lambda: est.nn.crf_decode(X[None], jnp.ones((3, 3)), jnp.ones(1)),
            "`est.nn.crf_decode` needs integers as lengths; got float32",
        ),
        (lambda: est.nn.sequence_mask(X), "needs integers as `lengths`"),
        (lambda: jax.jit(est.nn.sequence_mask)(jnp.ones(2, int), 3), "needs an int as `maxlen`; got a value of the"),
    ],
    AttributeError: [
        (lambda: est.nn.relu, "module 'estimator.nn' has no attribute 'relu'; here it is `jax.nn.relu`"),
        (
            lambda: est.nn.nonsense,
            "no attribute 'nonsense'; it has TopK, .*zero_fraction. See `jax.nn`, `jax.numpy` and",
        ),
        (lambda: est.sequence_mask, "here it is `est.nn.sequence_mask"),
    ],
}


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors_that_say_what_to_write(call, error, message):
    with pytest.raises(error, match=message):
        call()
