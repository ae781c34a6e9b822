"""Laws of `est.nn` beyond TensorFlow's numbers: towers, edges, and what is refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse
from testing import refused
from testing.model_fns import variables_of
from testing.towers import assert_same_training, replicate

import estimator as est
from replicate import TowerOptimizer

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(2, 4, 3)).astype(np.float32)
TRANSITIONS = RNG.normal(size=(3, 3)).astype(np.float32)
LENGTHS = np.array([4, 2])
likelihoods, decode = jax.jit(lambda *args: est.nn.crf_log_likelihood(*args)[0]), jax.jit(est.nn.crf_decode)
ctc_loss = jax.jit(est.nn.ctc_loss, static_argnames="ignore_longer_outputs_than_inputs")


def score_of(scores, tags):
    return sum(scores[t, tag] for t, tag in enumerate(tags)) + sum(
        TRANSITIONS[a, b] for a, b in itertools.pairwise(tags)
    )


@pytest.mark.quick
def test_a_conditional_random_field_sums_and_searches_all_sequences_of_tags():
    rows = [(scores, list(itertools.product(range(3), repeat=n))) for scores, n in zip(SCORES, LENGTHS, strict=True)]
    every = [np.array([score_of(scores, tags) for tags in all_tags]) for scores, all_tags in rows]
    best = [all_tags[each.argmax()] for (_, all_tags), each in zip(rows, every, strict=True)]
    padded = jnp.array([[*tags, *[0] * (4 - len(tags))] for tags in best])
    want = [each.max() - np.log(np.exp(each).sum()) for each in every]
    np.testing.assert_allclose(likelihoods(SCORES, padded, LENGTHS, TRANSITIONS), want, atol=1e-5)
    tags, score = decode(SCORES, TRANSITIONS, LENGTHS)
    assert tags.tolist() == padded.tolist() and score.tolist() == pytest.approx([each.max() for each in every])


@pytest.mark.slow
def test_an_empty_sequence_is_certain_and_has_no_tags():
    lengths = np.array([0, 4])
    likelihood = likelihoods(SCORES, jnp.zeros((2, 4), int), lengths, TRANSITIONS)
    assert likelihood[0] == 0 and likelihood[1] < 0
    tags, scores = decode(np.ones((2, 4, 3), np.float32), TRANSITIONS, lengths)
    assert not tags[0].any() and scores[0] == 0 < scores[1]


@pytest.mark.quick
def test_what_is_behind_the_end_of_a_sequence_may_be_anything():
    lengths, tags = jnp.array([0, 2]), jnp.array([[9, -1, -1, -1], [1, 2, 9, -1]])

    def likelihood(scores, transitions, tags):
        return likelihoods(scores, tags, lengths, transitions).sum()

    runs = est.nn.sequence_mask(lengths, 4)[..., None]
    scores = jnp.where(runs, SCORES, jnp.nan)
    both = jax.jit(jax.value_and_grad(likelihood, (0, 1)))
    got, want = both(scores, TRANSITIONS, tags), both(SCORES, TRANSITIONS, jnp.where(runs[..., 0], tags, 0))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    decoded = [decode(given, TRANSITIONS, lengths) for given in (scores, SCORES)]
    jax.tree.map(np.testing.assert_array_equal, *decoded)


@pytest.mark.parametrize("wrong, dtype", [(-1, jnp.int8), (3, jnp.int32)])
def test_a_tag_out_of_range_gives_nan(wrong, dtype):
    tags = jnp.array([[0, wrong, 1, 1], [0, 1, 1, 1]], dtype)
    assert jnp.isnan(likelihoods(SCORES, tags, LENGTHS, TRANSITIONS)).tolist() == [True, False]


def test_scores_of_half_precision_are_taken_with_transitions_of_float32():
    scores = jnp.asarray(SCORES, jnp.bfloat16)
    got, want = (decode(x, TRANSITIONS, LENGTHS) for x in (scores, scores.astype(jnp.float32)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.quick
@pytest.mark.parametrize("batch, steps", [(0, 4), (2, 0)])
def test_no_rows_and_no_steps_are_no_error(batch, steps):
    scores, tags, lengths = jnp.zeros((batch, steps, 3)), jnp.zeros((batch, steps), int), jnp.zeros(batch, int)
    decoded, score = decode(scores, TRANSITIONS, lengths)
    assert likelihoods(scores, tags, lengths, TRANSITIONS).tolist() == score.tolist() == [0] * batch
    assert decoded.shape == (batch, steps)
    assert est.nn.sequence_loss(scores, tags, jnp.zeros((batch, steps))) == 0
    assert est.nn.sequence_mask(lengths).shape == (batch, 0)


@pytest.mark.quick
@pytest.mark.parametrize("function", ["sparse", "own"])
def test_a_step_of_weight_zero_is_absent(function):
    own = {} if function == "sparse" else {"softmax_loss_function": lambda labels, logits: (logits**2).sum(-1)}
    weights, targets = jnp.array([[1.0, 0], [2, 1], [0, 0]]), jnp.array([[1, 1], [2, 1], [1, 1]])

    def loss(logits, targets):
        return est.nn.sequence_loss(logits, targets, weights, **own)

    logits, both = jnp.asarray(RNG.normal(size=(3, 2, 3)), jnp.float32), jax.jit(jax.value_and_grad(loss))
    bad = jnp.where(weights[..., None] == 0, jnp.inf, logits)
    got = both(bad, jnp.where(weights == 0, -1, targets))
    jax.tree.map(np.testing.assert_array_equal, got, both(logits, targets))


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


LABELS = np.array([[0, 1, -1], [2, 2, 1], [1, -1, -1], [3, 0, 2], [-1, -1, -1], [0, 0, 0], [1, 2, 3], [3, -1, -1]])
STEPS = np.array([6, 5, 3, 4, 2, 6, 3, 1])
EXPECTED = RNG.uniform(0.1, 2, (8, 1)).astype(np.float32)
SAMPLED = [est.nn.sampled_softmax_loss, est.nn.nce_loss]


def sequences_and_samples(features, labels, mode):
    x, lengths = est.layers.dense(features["x"], 5), features["length"]
    transitions = est.get_variable("transitions", (5, 5))
    w, b = est.get_variable("w", (4, 5)), est.get_variable("b", (4,))
    tags, _ = est.nn.crf_decode(x, transitions, lengths)
    weights = est.nn.sequence_mask(lengths, x.shape[1], jnp.float32)
    loss = est.nn.sequence_loss(x, labels["tags"], weights)
    loss += est.nn.sequence_loss(x, labels["tags"], weights, average_across_timesteps=False).sum()
    likelihood, same = est.nn.crf_log_likelihood(x, labels["tags"], lengths, transitions)
    assert same is transitions
    ctc = est.nn.ctc_loss(labels["symbols"], x, features["steps"], time_major=False)
    samples = np.array([2, 0, 3]), features["expected"], np.array([0.5, 1, 2], np.float32)
    right = jnp.abs(labels["symbols"][:, :1])
    sampled = [function(w, b, right, x[:, 0], 3, 4, sampled_values=samples) for function in SAMPLED]
    loss += sum(map(est.losses.compute_weighted_loss, (-likelihood, ctc, *sampled)))
    return est.EstimatorSpec(mode, (tags, *sampled), loss, TowerOptimizer(optax.sgd(0.1)).minimize(loss))


@pytest.mark.slow
def test_losses_of_sequences_and_of_samples_on_towers_are_those_of_one_batch():
    features = {"x": RNG.normal(size=(8, 6, 5)).astype(np.float32), "length": np.array([1, 6, 4, 6, 2, 4, 1, 1])}
    features |= {"steps": STEPS, "expected": EXPECTED}
    batch = features, {"tags": RNG.integers(0, 5, (8, 6)), "symbols": LABELS}
    two_steps = jax.tree.map(lambda x: np.stack([x, x]), batch)
    assert_same_training(sequences_and_samples, replicate(sequences_and_samples, 2), two_steps, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_each_tower_and_step_draws_its_own_samples_and_a_run_draws_them_again():
    def model_fn(features, labels, mode):
        drawn = [est.nn.log_uniform_candidate_sampler(features, 1, 8, False, 10**6, seed)[0] for seed in (None, 5)]
        return est.EstimatorSpec(mode, loss=jnp.float32(0), predictions=jnp.stack(drawn)[None])

    labels = jnp.zeros((2, 1), int)
    model = est.transform(replicate(model_fn, 2))

    def drawn_by(key):
        state = model.init(jax.random.key(key), labels, mode="eval")
        for step in range(2):
            at_step = state._replace(global_step=jnp.full_like(state.global_step, step))
            yield from model.eval_step(at_step, labels).predictions.reshape(4, 8).tolist()

    one, again, other = map(list, map(drawn_by, (0, 0, 1)))
    assert one == again and len({*map(tuple, one + other)}) == 16


@pytest.mark.slow
def test_distinct_classes_are_drawn_as_by_drawing_until_enough_differ():
    count, classes, trials = 4, 9, 1000
    chance = np.log1p(1 / (np.arange(classes) + 1)) / np.log(classes + 1)

    def draw(key):
        every = jnp.arange(classes)[:, None]
        drawn, expected, of_drawn = est.nn.log_uniform_candidate_sampler(every, 1, count, True, classes, key=key)
        return drawn, expected[:, 0], of_drawn

    drawn, expected, of_drawn = map(np.array, jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), trials)))
    assert all(len({*row}) == count for row in drawn.tolist()) and {*drawn.ravel()} == {*range(classes)}
    np.testing.assert_array_equal(of_drawn, np.take_along_axis(expected, drawn, 1))
    tries = np.log1p(-expected[:, 1:]) / np.log1p(-chance[1:])  # but where there are `count` tries
    tries = np.where(np.isclose(expected[:, 1:], count * chance[1:]), count, tries)
    np.testing.assert_allclose(tries, np.broadcast_to(np.round(tries[:, :1]), tries.shape), rtol=1e-4)
    # The same by hand.
    wanted, took = np.zeros((trials, classes)), np.zeros(trials)
    rng = np.random.default_rng(1)
    for row in range(trials):
        while wanted[row].sum() < count:
            wanted[row, rng.choice(classes, p=chance)] = 1
            took[row] += 1
    got = (drawn[:, :, None] == np.arange(classes)).any(1)
    assert abs(got.mean(0) - wanted.mean(0)).max() < 5 * np.sqrt(0.5 / trials)
    assert abs(tries[:, 0].mean() - took.mean()) < 5 * took.std() * np.sqrt(2 / trials)


def test_any_of_a_million_classes_is_drawn():
    ends = jnp.array([[0], [10**6 - 1]])
    draw = jax.jit(lambda key: est.nn.log_uniform_candidate_sampler(ends, 1, 10**5, False, 10**6, key=key))
    drawn, expected, _ = draw(jax.random.key(0))
    drawn, chance = np.array(drawn), np.log1p([1, 1e-6]) / np.log1p(1e6)
    np.testing.assert_allclose(expected[:, 0], 1e5 * chance, rtol=1e-5)
    assert drawn.min() == 0 and abs((drawn == 0).sum() - 1e5 * chance[0]) < 5 * np.sqrt(1e5 * chance[0])
    # As many of the last half of the numbers are odd as even, which one uniform float32 would not give.
    last = drawn[drawn > 5 * 10**5]
    assert 4000 < len(last) and abs((last % 2).mean() - 0.5) < 3 / np.sqrt(len(last))


@pytest.mark.slow
def test_a_variables_name_as_weights_gives_the_same_gradient_of_the_rows_in_use():
    samples = np.array([2, 5]), EXPECTED[:2], EXPECTED[:2, 0]

    def model_fn(features, labels, mode, by_name):
        w = est.get_variable("w", (9, 3)) if not by_name else "w"
        if by_name:
            est.embedding_lookup("w", features[:0, 0].astype(int), (9, 3))
        b, optimizer = est.get_variable("b", (9,)), est.Optimizer(optax.sgd(0.1))
        losses = [function(w, b, labels, features, 2, 9, sampled_values=samples).sum() for function in SAMPLED]
        gradients = optimizer.compute_gradients(sum(losses))
        assert isinstance(gradients[0][0], est.IndexedSlices) == by_name
        return est.EstimatorSpec(mode, losses, sum(losses), optimizer.apply_gradients(gradients))

    x, labels, states = jnp.asarray(SCORES[:, 0]), jnp.array([[2], [7]]), []
    for by_name in (False, True):
        model = est.transform(functools.partial(model_fn, by_name=by_name))
        states += [model.train_step(model.init(jax.random.key(0), x, labels), x, labels)[0].variables]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), *states)


@pytest.mark.quick
@pytest.mark.parametrize("function", SAMPLED)
def test_a_sample_that_is_right_is_left_out_and_a_label_that_is_no_class_gives_nan(function):
    given = (np.array([2, 1]), EXPECTED[:3], EXPECTED[:2, 0])

    def loss(w, labels):
        losses = function(w, jnp.zeros(4), labels, SCORES[0, :3], 2, 4, 1, given, True)
        return est.losses.compute_weighted_loss(losses, jnp.array([1.0, 0, 0])), losses  # weights as padding has them

    w, derive = RNG.normal(size=(4, 3)).astype(np.float32), jax.jit(jax.grad(loss, has_aux=True))
    gradient, losses = derive(w, jnp.array([[2], [0], [0]]))
    assert jnp.isfinite(gradient).all() and gradient.any(1).tolist() == [False, True, True, False]
    assert losses[0] < 20  # and not as for the least number, which stands for the sample
    labels = jnp.array([[0], [4], [-1]])
    gradient, losses = derive(w, labels)
    assert jnp.isnan(losses).tolist() == [False, True, True]
    assert jnp.isfinite(gradient).all() and gradient.any()
    drawn = jax.jit(lambda key: est.nn.log_uniform_candidate_sampler(labels, 1, 2, True, 4, key=key))
    assert jnp.isfinite(drawn(jax.random.key(0))[1]).all()


@pytest.mark.slow
def test_ctc_takes_sparse_labels_and_nothing_behind_an_end_and_has_finite_gradients():
    @jax.jit
    def both(logits, labels):
        loss = functools.partial(est.nn.ctc_loss, ignore_longer_outputs_than_inputs=True)
        losses, pull_back = jax.vjp(lambda x: loss(labels, x, STEPS), logits)
        return losses, *pull_back(jnp.ones_like(losses))

    logits = jnp.asarray(RNG.normal(size=(6, 8, 5)), jnp.float32)
    want, gradient = both(logits, LABELS)
    behind = jnp.arange(6)[:, None, None] >= STEPS[:, None]
    jax.tree.map(np.testing.assert_array_equal, both(jnp.where(behind, jnp.nan, logits), LABELS), (want, gradient))
    assert jnp.isfinite(gradient).all() and gradient.any((0, 2)).sum() == 8
    at = np.argwhere(LABELS >= 0)
    at, values = np.concatenate([at, [[8, 3]]]), np.append(LABELS[LABELS >= 0], 7)  # with padding of its entries
    np.testing.assert_allclose(both(logits, sparse.BCOO((values, at), shape=LABELS.shape))[0], want, rtol=1e-6)
    rows = jnp.array([0, 2, 4, 7])
    np.testing.assert_array_equal(both(logits, np.roll(LABELS, 1, 1))[0][rows], want[rows])


def test_rows_whose_labels_do_not_fit_or_are_no_classes_have_a_ctc_loss_of_nan():
    labels, logits = jnp.array([[0, 0], [1, 0], [1, 3], [1, -1]]), jnp.zeros((2, 4, 4))
    for ignore in (False, True):
        losses = ctc_loss(labels, logits, np.full(4, 2), ignore_longer_outputs_than_inputs=ignore)
        assert jnp.isnan(losses).tolist() == [not ignore, False, True, False] and (not ignore or losses[0] == 0)


@pytest.mark.slow
def test_a_ctc_loss_of_thousands_of_improbable_steps_is_exact():
    logits = jnp.zeros((3000, 1, 3)).at[:, :, 0].set(100)  # and neither the label 1 nor the blank
    want = 3e5 - np.log(3000 * 3001 / 2)
    assert ctc_loss(jnp.array([[1]]), logits, np.array([3000]))[0] == pytest.approx(want, rel=2e-5)


def test_transitions_that_are_not_given_are_a_variable():
    variables = variables_of(lambda x: est.nn.crf_log_likelihood(x, jnp.zeros((2, 4), int), LENGTHS), SCORES)
    assert {name: value.shape for name, value in variables.items()} == {"transitions": (3, 3)}


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_may_be_integers_of_any_size_under_x64(dtype):
    with jax.enable_x64(True):
        lengths, tags = LENGTHS.astype(dtype), np.zeros((2, 4), dtype)
        mask = est.nn.sequence_mask(lengths, 4, SCORES.dtype)
        assert mask.sum(1).tolist() == [4, 2]
        likelihood = jax.eval_shape(likelihoods, SCORES, tags, lengths, TRANSITIONS)
        assert est.nn.sequence_loss(SCORES, tags, mask).dtype == likelihood.dtype == SCORES.dtype
        assert not decode(SCORES, TRANSITIONS, lengths)[0][1, 2:].any()


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


X, Y = jnp.ones((2, 3)), jnp.ones((2, 1), int)
SAMPLES = (jnp.arange(2), jnp.ones((2, 1)), jnp.ones(2))
REFUSED = {
    ValueError: [
        (lambda: est.nn.sigmoid_cross_entropy_with_logits(X, X),
         r"arguments: write `sigmoid.*\(labels=\.\.\., logits="),
        (lambda: est.nn.sparse_softmax_cross_entropy_with_logits(logits=X), "takes named arguments"),
        (lambda: est.nn.softmax_cross_entropy_with_logits(labels=X[:1], logits=X),
         "`est.nn.softmax.* got labels of sh"),
        (lambda: est.nn.sparse_softmax_cross_entropy_with_logits(labels=jnp.ones((2, 1), int), logits=X),
         r"shape \(2,\)"),
        (lambda: est.nn.conv1d(X[None], jnp.ones((1, 2, 4)), 1, "SAME"),
         r"`est.nn.conv1d` needs an input of shape \[N, W, C\] and a kernel of shape \[W, C, outputs\] with the "
         r"same C; got shapes \(1, 2, 3\) and \(1, 2, 4\)"),
        (lambda: est.nn.conv1d(X[None], X[None], 1, "same"), "needs 'SAME' or 'VALID' as `padding`; got 'same'"),
        (lambda: est.nn.conv1d(X[None], X[None], 1, "SAME", None, "NXC"), "needs NWC or NCW as `data_format`; got 'NX"),
        (lambda: est.nn.conv2d(X[None, None], X.T[None, None], [2, 1, 1, 1], "SAME"),
         r"a positive integer as `strides`, or 2, or one for each letter of NHWC, 1 for N and C; got \[2, 1, 1, 1\]"),
        (lambda: est.nn.conv2d(X[None, None], X.T[None, None], 0.5, "SAME"),
         "positive integer as `strides`.*; got 0.5"),
        (lambda: est.nn.lrn(X), r"channels\]; got shape \(2, 3\)"),
        (lambda: est.image.resize_bilinear(X, (2, 2)), r"channels\]; got shape \(2, 3\). Write `images\[None\]`"),
        (lambda: est.image.resize_nearest_neighbor(X[None, None], 3), "two positive integers as `size`; got 3"),
        (lambda: est.nn.ctc_loss(Y, X[None], Y[0], ctc_merge_repeated=False), "needs `ctc_merge_repeated=True`"),
        (lambda: est.nn.ctc_loss(Y, X[None], Y[0]),
         r"inputs of shape \[steps, batch, classes \+ 1\] .*; got shapes \(2, 1\), \(1, 2, 3\) and \(1,\)\. `time_"),
        (lambda: est.nn.nce_loss([X, X], X[0], Y, X, 2, 3, 1, SAMPLES),
         "as one array each, with a row .* 3 classes; got 2 parts"),
        (lambda: est.nn.nce_loss(X, X[0], Y, X, 2, 3, 1, SAMPLES), r"row for each of 3 classes; got shape \(2, 3\)"),
        (lambda: est.nn.nce_loss(X.T, X[0], Y, X, 2, 3, 1, SAMPLES),
         r"inputs of shape \(2, 3\) .*rows of shape \(2,\)"),
        (lambda: est.nn.nce_loss(X, X[0], Y[:, 0], X, 2, 2),
         r"num_true=1; got shape \(2,\). Write `labels\[:, None\]`"),
        (lambda: est.nn.log_uniform_candidate_sampler(Y, 1, 3, True, 2),
         "many classes as distinct samples; got num_sampled=3, range_max=2 and unique=True"),
        (lambda: est.nn.in_top_k(X, jnp.ones((2, 1), int), 1), r"got shapes \(2, 3\) and \(2, 1\)"),
        (lambda: jax.jit(est.nn.sequence_mask)(jnp.ones(2, int)), r"needs `maxlen` here.*`maxlen=x.shape\[1\]`"),
        (lambda: est.nn.sequence_loss(X, X, X), r"logits of shape \[batch, steps, classes\], .* got shapes \(2, 3\)"),
        (lambda: est.nn.crf_decode(X, X, X), r"scores of shape \[batch, steps, tags\]"),
        (lambda: est.nn.crf_log_likelihood(X[None], jnp.ones((2, 3), int), jnp.ones(1, int), X),
         r"needs tags of shape \(1, 2\)"),
        (lambda: est.nn.crf_log_likelihood(X[None], jnp.ones((1, 2), int), jnp.ones(1, int), jnp.ones((4, 4))),
         r"`est.nn.crf_log_likelihood` needs transitions of shape \(3, 3\) for scores of shape \(1, 2, 3\); got sh"),
        (lambda: est.nn.crf_decode(X[None], jnp.ones((1, 1)), jnp.ones(1, int)),
         r"`est.nn.crf_decode` needs transitions of shape \(3, 3\)"),
    ],
    TypeError: [
        (lambda: est.nn.sparse_softmax_cross_entropy_with_logits(labels=X[:, 0], logits=X),
         "needs integers as `labels`"),
        (lambda: est.nn.in_top_k(X, X[:, 0], 1), "needs integers as `targets`; got float32"),
        (lambda: est.nn.crf_log_likelihood(X[None], jnp.ones((1, 2)), jnp.ones(1, int), jnp.ones((3, 3))),
         "`est.nn.crf_log_likelihood` needs integers as tags; got float32"),
        (lambda: est.nn.crf_decode(X[None], jnp.ones((3, 3)), jnp.ones(1)),
         "`est.nn.crf_decode` needs integers as lengths; got float32"),
        (lambda: est.nn.nce_loss(X, X[0], X[:, :1], X, 2, 2), "needs integers as classes; got float32"),
        (lambda: est.nn.ctc_loss(Y, X[None], X[0]), "needs integers as `sequence_length`; got float32"),
        (lambda: est.image.resize_bilinear(X[None, None], (2, 0.5)), "needs an int as size; got .*0.5"),
        (lambda: est.nn.sequence_mask(X), "needs integers as `lengths`"),
        (lambda: jax.jit(est.nn.sequence_mask)(jnp.ones(2, int), 3), "needs an int as `maxlen`; got a value of the"),
    ],
    AttributeError: [
        (lambda: est.nn.relu, "module 'estimator.nn' has no attribute 'relu'; here it is `jax.nn.relu`"),
        (lambda: est.nn.nonsense,
         "no attribute 'nonsense'; it has TopK, .*zero_fraction. See `jax.nn`, `jax.numpy` and"),
        (lambda: est.image.nonsense,
         "'nonsense'; it has resize_bilinear, resize_nearest_neighbor. See `jax.image`; im"),
        (lambda: est.sequence_mask, "here it is `est.nn.sequence_mask"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors_that_say_what_to_write(call, error, message):
    with pytest.raises(error, match=message):
        call()
