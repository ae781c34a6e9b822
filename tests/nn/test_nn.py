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
    best = all_tags[every.argmax()]
    padded = jnp.array([[*best, *[0] * (4 - length)]])
    likelihood, _ = est.nn.crf_log_likelihood(SCORES[None, row], padded, LENGTHS[None, row], TRANSITIONS)
    assert likelihood[0] == pytest.approx(every.max() - np.log(np.exp(every).sum()), abs=1e-5)
    tags, score = est.nn.crf_decode(SCORES[None, row], TRANSITIONS, LENGTHS[None, row])
    assert tags.tolist() == padded.tolist() and score[0] == pytest.approx(every.max(), abs=1e-5)


def test_an_empty_sequence_is_certain():
    lengths = jnp.array([0, 4])
    likelihood, _ = est.nn.crf_log_likelihood(SCORES, jnp.zeros((2, 4), int), lengths, TRANSITIONS)
    assert likelihood[0] == 0 and likelihood[1] < 0


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


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_may_be_integers_of_any_size_under_x64(dtype):
    with jax.enable_x64(True):
        lengths, tags = LENGTHS.astype(dtype), np.zeros((2, 4), dtype)
        mask = est.nn.sequence_mask(lengths, 4, SCORES.dtype)
        assert mask.sum(1).tolist() == [4, 2]
        assert est.nn.sequence_loss(SCORES, tags, mask).dtype == SCORES.dtype
        assert est.nn.crf_log_likelihood(SCORES, tags, lengths, TRANSITIONS)[0].dtype == SCORES.dtype
        assert not est.nn.crf_decode(SCORES, TRANSITIONS, lengths)[0][1, 2:].any()


def test_moments_of_half_precision_are_computed_in_float32():
    x = jnp.full((4096,), 300.0, jnp.float16)
    mean, variance = est.nn.moments(x, [0], keep_dims=True)
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
        (lambda: est.nn.lrn(X), r"channels\]; got shape \(2, 3\)"),
        (lambda: est.nn.in_top_k(X, jnp.ones((2, 1), int), 1), r"got shapes \(2, 3\) and \(2, 1\)"),
        (lambda: jax.jit(est.nn.sequence_mask)(jnp.ones(2, int)), r"needs `maxlen` here.*`maxlen=x.shape\[1\]`"),
        (lambda: est.nn.sequence_loss(X, X, X), r"logits of shape \[batch, steps, classes\], .* got shapes \(2, 3\)"),
        (lambda: est.nn.crf_decode(X, X, X), r"scores of shape \[batch, steps, tags\]"),
        (lambda: est.nn.crf_log_likelihood(X[None], X, jnp.ones(1, int), X), r"needs tags of shape \(1, 2\)"),
    ],
    TypeError: [
        (
            lambda: est.nn.sparse_softmax_cross_entropy_with_logits(labels=X[:, 0], logits=X),
            "needs integers as `labels`",
        ),
        (lambda: est.nn.in_top_k(X, X[:, 0], 1), "needs integers as `targets`; got float32"),
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
