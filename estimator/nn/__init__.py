"""Functions of TensorFlow's `tf.nn`, `tf.contrib.crf` and `tf.contrib.seq2seq` that `jax.nn` does not have."""

from typing import TYPE_CHECKING

from estimator.nn._clip import clip_by_average_norm, clip_by_norm
from estimator.nn._convolution import conv1d, conv2d, depthwise_conv2d, separable_conv2d
from estimator.nn._crf import crf_decode, crf_log_likelihood
from estimator.nn._cross_entropy import (
    log_poisson_loss,
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits_v2,
    sparse_softmax_cross_entropy_with_logits,
    weighted_cross_entropy_with_logits,
)
from estimator.nn._moments import moments, weighted_moments, zero_fraction
from estimator.nn._ops import crelu, l2_loss, l2_normalize, local_response_normalization, lrn, xw_plus_b
from estimator.nn._sequence import sequence_loss, sequence_mask
from estimator.nn._top_k import TopK, in_top_k, top_k
from estimator.porting._missing_names import names_missing_in as _names_missing_in

__all__ = [
    "TopK",
    "clip_by_average_norm",
    "clip_by_norm",
    "conv1d",
    "conv2d",
    "crelu",
    "crf_decode",
    "crf_log_likelihood",
    "depthwise_conv2d",
    "in_top_k",
    "l2_loss",
    "l2_normalize",
    "local_response_normalization",
    "log_poisson_loss",
    "lrn",
    "moments",
    "separable_conv2d",
    "sequence_loss",
    "sequence_mask",
    "sigmoid_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits_v2",
    "sparse_softmax_cross_entropy_with_logits",
    "top_k",
    "weighted_cross_entropy_with_logits",
    "weighted_moments",
    "xw_plus_b",
    "zero_fraction",
]

if not TYPE_CHECKING:  # which would take any name for an attribute
    __getattr__ = _names_missing_in(__name__, f"; it has {', '.join(__all__)}. See `jax.nn`, `jax.numpy` and `optax`.")
