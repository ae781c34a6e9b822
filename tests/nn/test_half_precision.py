"""Every function of `est.nn`, `est.losses`, `est.metrics` and `est.regularizers` computes in float32 at least."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import estimator as est

RNG = np.random.default_rng(0)
CLASSES = RNG.integers(0, 64, 64)
LENGTHS = np.array([64])
KEY = jax.random.key(0)
SAMPLES = (np.arange(9), np.full((64, 1), 0.7, np.float32), np.full(9, 0.4, np.float32))
# Their squares overflow in float16, and their sums stop growing in bfloat16.
X = RNG.normal(0, 100, (64, 64))
P = RNG.uniform(0.01, 0.99, (64, 64))
Y = RNG.integers(0, 2, (64, 64))


def in_model(call):
    """What `call` returns in a model_fn."""
    results = []

    def model_fn(features):
        results.append(call())
        return est.EstimatorSpec("infer", predictions=features)

    with jax.disable_jit():
        est.transform(model_fn).init(KEY, jnp.zeros(1), mode="infer")
    return results[-1]


def regularized(x):
    return est.get_variable("w", initializer=x, dtype=x.dtype, regularizer=lambda w: w[0, 0])


def add_both(f, x):
    f(x[0, 0])
    f(x[0, 1])
    return est.losses.get_total_loss()


# The results of the functions, whose dtype is float32 (or none of floats).
WIDE = {
    "nn.crf_decode": lambda f, x, p, y: f(x[None], x, LENGTHS),
    "nn.crf_log_likelihood": lambda f, x, p, y: f(x[None], CLASSES[None], LENGTHS, x)[0],
    "nn.ctc_loss": lambda f, x, p, y: f(CLASSES[None, :9] % 9, x[:, None, :10], LENGTHS),
    "nn.in_top_k": lambda f, x, p, y: f(x, CLASSES, 3),
    "nn.l2_loss": lambda f, x, p, y: f(x),
    "nn.log_poisson_loss": lambda f, x, p, y: f(y, p),
    "nn.log_uniform_candidate_sampler": lambda f, x, p, y: f(CLASSES[:, None], 1, 9, True, 64, key=KEY)[1:],
    "nn.nce_loss": lambda f, x, p, y: f(x, p[0], CLASSES[:, None], p, 9, 64, sampled_values=SAMPLES),
    "nn.sampled_softmax_loss": lambda f, x, p, y: f(x, p[0], CLASSES[:, None], p, 9, 64, sampled_values=SAMPLES),
    "nn.sequence_loss": lambda f, x, p, y: f(x[None], CLASSES[None], p[:1]),
    "nn.sequence_mask": lambda f, x, p, y: f(CLASSES, 64),
    "nn.sigmoid_cross_entropy_with_logits": lambda f, x, p, y: f(labels=y, logits=x),
    "nn.softmax_cross_entropy_with_logits": lambda f, x, p, y: f(labels=p, logits=x),
    "nn.softmax_cross_entropy_with_logits_v2": lambda f, x, p, y: f(labels=p, logits=x),
    "nn.sparse_softmax_cross_entropy_with_logits": lambda f, x, p, y: f(labels=CLASSES, logits=x),
    "nn.weighted_cross_entropy_with_logits": lambda f, x, p, y: f(y, x, 2.0),
    "nn.zero_fraction": lambda f, x, p, y: f(x),
    "losses.absolute_difference": lambda f, x, p, y: f(y, x),
    "losses.add_loss": lambda f, x, p, y: in_model(lambda: add_both(f, x)),
    "losses.compute_weighted_loss": lambda f, x, p, y: f(x, p, "weighted_sum"),
    "losses.get_losses": lambda f, x, p, y: in_model(lambda: (est.losses.add_loss(x[0, 0]), f())[1]),
    "losses.get_regularization_loss": lambda f, x, p, y: in_model(lambda: (regularized(x), f())[1]),
    "losses.get_regularization_losses": lambda f, x, p, y: in_model(lambda: (regularized(x), f())[1]),
    "losses.get_total_loss": lambda f, x, p, y: in_model(lambda: (regularized(x), f())[1]),
    "losses.hinge_loss": lambda f, x, p, y: f(y, x),
    "losses.huber_loss": lambda f, x, p, y: f(y, x),
    "losses.log_loss": lambda f, x, p, y: f(y, p),
    "losses.mean_squared_error": lambda f, x, p, y: f(y, x),
    "losses.sigmoid_cross_entropy": lambda f, x, p, y: f(y, x),
    "losses.softmax_cross_entropy": lambda f, x, p, y: f(p, x),
    "losses.sparse_softmax_cross_entropy": lambda f, x, p, y: f(CLASSES, x),
    "metrics.accuracy": lambda f, x, p, y: f(y, jnp.round(p), p),
    "metrics.auc": lambda f, x, p, y: f(y, p, p),
    "metrics.false_negatives": lambda f, x, p, y: f(y, jnp.round(p), p),
    "metrics.false_positives": lambda f, x, p, y: f(y, jnp.round(p), p),
    "metrics.mean": lambda f, x, p, y: f(x, p),
    "metrics.mean_absolute_error": lambda f, x, p, y: f(y, x, p),
    "metrics.mean_iou": lambda f, x, p, y: f(y, jnp.round(p), 2, p),
    "metrics.mean_per_class_accuracy": lambda f, x, p, y: f(y, jnp.round(p), 2, p),
    "metrics.mean_squared_error": lambda f, x, p, y: f(y, x, p),
    "metrics.precision": lambda f, x, p, y: f(y, jnp.round(p), p),
    "metrics.precision_at_thresholds": lambda f, x, p, y: f(y, p, [0.3, 0.6], p),
    "metrics.recall": lambda f, x, p, y: f(y, jnp.round(p), p),
    "metrics.recall_at_k": lambda f, x, p, y: f(CLASSES, x, 20, weights=p[0]),
    "metrics.recall_at_thresholds": lambda f, x, p, y: f(y, p, [0.3, 0.6], p),
    "metrics.root_mean_squared_error": lambda f, x, p, y: f(y, x, p),
    "metrics.true_negatives": lambda f, x, p, y: f(y, jnp.round(p), p),
    "metrics.true_positives": lambda f, x, p, y: f(y, jnp.round(p), p),
    "regularizers.l1": lambda f, x, p, y: f(0.5)(x),
    "regularizers.l1_l2": lambda f, x, p, y: f(0.5, 0.5)({"a": x, "b": p}),
    "regularizers.l2": lambda f, x, p, y: f(0.5)(x),
}
# The dtype of the results is that of the array.
SAME = {
    "nn.batch_normalization": lambda f, x, p, y: f(x, x[0], p[0], p[1], p[2], 0.01),
    "nn.clip_by_average_norm": lambda f, x, p, y: f(x, 0.001),
    "nn.clip_by_norm": lambda f, x, p, y: (f(x, np.float32(1.0)), f(jnp.full_like(x, 300), 1.0)),
    "nn.conv1d": lambda f, x, p, y: f(x[None], p[None], 2, "SAME"),
    "nn.conv2d": lambda f, x, p, y: f(x[None, None], p[None, None], 2, "SAME"),
    "nn.crelu": lambda f, x, p, y: f(x),
    "nn.depthwise_conv2d": lambda f, x, p, y: f(x[None, None], p[None, :1, :, None], 1, "SAME"),
    "nn.l2_normalize": lambda f, x, p, y: (f(x, 1), f(jnp.full_like(x, 300), 1), f(jnp.zeros_like(x))),
    "nn.local_response_normalization": lambda f, x, p, y: f(10 * x[None, None]),
    "nn.lrn": lambda f, x, p, y: f(10 * x[None, None]),
    "nn.moments": lambda f, x, p, y: f(x, 0),
    "nn.separable_conv2d": lambda f, x, p, y: f(p[None, None], p[None, :1, :, None], p[None, None], 1, "SAME"),
    "nn.top_k": lambda f, x, p, y: f(x, 3),
    "nn.weighted_moments": lambda f, x, p, y: f(x, 0, p),
    "nn.xw_plus_b": lambda f, x, p, y: f(p, x, -p[0]),
}
IN_BOTH = ["nn.conv2d", "nn.lrn", "nn.moments"]
FUNCTIONS = {
    f"{module.__name__.partition('.')[2]}.{name}": getattr(module, name)
    for module in (est.nn, est.losses, est.metrics, est.regularizers)
    for name in module.__all__
    if not inspect.isclass(getattr(module, name))
}


def test_the_table_has_every_public_function():
    assert FUNCTIONS.keys() == WIDE.keys() | SAME.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype", [*itertools.product(FUNCTIONS, ["float16"]), *itertools.product(IN_BOTH, ["bfloat16"])]
)
def test_half_precision_gives_the_numbers_of_float32(name, dtype):
    call = (WIDE | SAME)[name]
    half = [jnp.asarray(array, dtype) for array in (X, P, Y)]
    got, want = (call(FUNCTIONS[name], *arrays) for arrays in (half, [array.astype(jnp.float32) for array in half]))
    if isinstance(got, est.metrics.Metric):
        got, want = ((metric, metric.result()) for metric in (got, want))
    wanted = jnp.dtype(dtype if name in SAME else "float32")
    for ours, float32 in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == wanted or not jnp.issubdtype(ours.dtype, jnp.floating)
        assert jnp.isfinite(ours).all()
        tolerance = 2 * float(jnp.finfo(wanted).eps)
        np.testing.assert_allclose(np.float64(ours), np.float64(float32), rtol=max(tolerance, 1e-5), atol=1e-6)
