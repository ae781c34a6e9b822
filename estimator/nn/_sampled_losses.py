"""Losses of a few sampled classes out of many: sampled softmax, and noise contrastive estimation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from estimator.core._argument_checks import as_float, as_int, widen, widen_int
from estimator.core._rng import make_rng
from estimator.nn._cross_entropy import (
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits_v2,
)
from estimator.sparse._embedding import embedding_lookup

Samples = tuple[jax.Array, jax.Array, jax.Array]


def sampled_softmax_loss(
    weights: ArrayLike | str,
    biases: ArrayLike,
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Sequence[ArrayLike] | None = None,
    remove_accidental_hits: bool = True,
    partition_strategy: str = "mod",
    name: str = "sampled_softmax_loss",
    seed: int | None = None,
) -> jax.Array:
    """The softmax cross entropy of each row's classes among a few others, as `tf.nn.sampled_softmax_loss`.

    It is for training with many classes: the log of how often a class is expected among the samples is subtracted
    from its logit. Evaluate by `sparse_softmax_cross_entropy_with_logits` of `inputs @ weights.T + biases`.

    >>> weights, biases, x, labels = jnp.eye(4), jnp.zeros(4), jnp.ones((2, 4)), jnp.array([[1], [3]])
    >>> samples = jnp.array([0, 3]), jnp.ones((2, 1)), jnp.ones(2)
    >>> sampled_softmax_loss(weights, biases, labels, x, 2, 4, sampled_values=samples).round(4)  # log(3), log(2)
    Array([1.0986, 0.6931], dtype=float32)

    On towers each draws its own samples, so that the loss has the same mean as one device's, and other values. With the
    same `sampled_values` the losses of a batch are equal on any number of towers.

    Args:
      weights: `[num_classes, width]`; or the name of such a variable, as for `est.embedding_lookup`, whose gradient is
        then of the rows in use only.
      biases: `[num_classes]`.
      labels: the right classes of each row, integers of shape `[batch, num_true]`.
      inputs: `[batch, width]`.
      num_sampled: how many classes are drawn for a batch.
      num_classes: how many there are.
      num_true: how many classes of a row are right, each with the probability `1 / num_true`.
      sampled_values: what `log_uniform_candidate_sampler` returns. If None, it is called with the key of
        `est.make_rng(name)`, as distinct classes.
      remove_accidental_hits: whether samples that are right for a row are left out there.
      partition_strategy: has no effect: weights are one array.
      name: samples of one name do not change if other layers are added.
      seed: makes the samples other ones, the same in each run with the same seed of `RunConfig`.

    Returns:
      Shape `[batch]`, in float32 at least. A row with a label that is not a class has NaN.

    Raises:
      ValueError: shapes or numbers do not fit.
      TypeError: labels or samples are not integers.
    """
    logits, right, known = _sampled_logits(
        "sampled_softmax_loss", weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values,
        remove_accidental_hits, name, seed,
    )  # fmt: skip
    return jnp.where(known, softmax_cross_entropy_with_logits_v2(labels=right, logits=logits), jnp.nan)


def nce_loss(
    weights: ArrayLike | str,
    biases: ArrayLike,
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Sequence[ArrayLike] | None = None,
    remove_accidental_hits: bool = False,
    partition_strategy: str = "mod",
    name: str = "nce_loss",
) -> jax.Array:
    """The loss of noise contrastive estimation of each row, as `tf.nn.nce_loss`.

    A logistic loss tells the right classes from the sampled ones, summed over both.

    >>> weights, biases, x, labels = jnp.zeros((4, 3)), jnp.zeros(4), jnp.ones((2, 3)), jnp.array([[1], [3]])
    >>> samples = jnp.array([0, 3]), jnp.ones((2, 1)), jnp.ones(2)
    >>> nce_loss(weights, biases, labels, x, 2, 4, sampled_values=samples).round(4)  # 3 * log(2)
    Array([2.0794, 2.0794], dtype=float32)

    Args:
      weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values, remove_accidental_hits,
        partition_strategy, name: as in `sampled_softmax_loss`. By default accidental hits stay, as in TensorFlow.

    Returns:
      Shape `[batch]`, in float32 at least. A row with a label that is not a class has NaN.

    Raises:
      as `sampled_softmax_loss`.
    """
    logits, right, known = _sampled_logits(
        "nce_loss", weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values,
        remove_accidental_hits, name, None,
    )  # fmt: skip
    return jnp.where(known, sigmoid_cross_entropy_with_logits(labels=right, logits=logits).sum(1), jnp.nan)


def log_uniform_candidate_sampler(
    true_classes: ArrayLike,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: int | None = None,
    name: str | None = None,
    *,
    key: jax.Array | None = None,
) -> Samples:
    """Classes drawn with the probability `log((c + 2) / (c + 1)) / log(range_max + 1)`, as TensorFlow's of this name.

    It suits classes that are sorted by how often they occur, the most frequent one first.

    >>> labels = jnp.array([[0], [7]])
    >>> drawn, of_labels, of_drawn = log_uniform_candidate_sampler(labels, 1, 4, True, 9, key=jax.random.key(0))
    >>> drawn.shape, of_labels.shape, of_drawn.shape
    ((4,), (2, 1), (4,))

    Args:
      true_classes: integers of shape `[batch, num_true]`.
      num_true: the number of its columns.
      num_sampled: how many to draw.
      unique: whether they differ: a class that is there already is drawn again.
      range_max: the number of classes.
      seed, name: as in `sampled_softmax_loss`.
      key: of the draw; by default the one of `est.make_rng(name)`, which is another one in each step and tower.

    Returns:
      The samples, int32 of shape `[num_sampled]`; how often each of `true_classes` is expected among them, of its
      shape; and how often each sample is, `[num_sampled]`. None of them has a gradient.

    Raises:
      ValueError: there are fewer classes than distinct samples, or `true_classes` has another shape.
      TypeError: `true_classes` are not integers.
    """
    caller = "log_uniform_candidate_sampler"
    true_classes = _check_labels(caller, true_classes, num_true)
    count, classes = (
        as_int(f"est.nn.{caller}", what, n) for what, n in (("num_sampled", num_sampled), ("range_max", range_max))
    )
    if count < 1 or classes < (count if unique else 1):
        raise ValueError(
            f"`est.nn.{caller}` needs at least one class to draw, and as many classes as distinct samples; got "
            f"num_sampled={num_sampled}, range_max={range_max} and unique={unique}."
        )
    key = make_rng(name or caller) if key is None else key
    if seed is not None:
        key = jax.random.fold_in(key, seed)
    drawn, tries = _draw_distinct(key, count, classes) if unique else (_draw(key, count, classes), jnp.int32(count))

    def expect(ids: jax.Array) -> jax.Array:
        chance = jnp.log1p(1 / (jnp.maximum(ids, 0).astype(jnp.float32) + 1)) / math.log(classes + 1)
        # That a class is among distinct samples at all: not among as many tries as they took.
        return jnp.where(tries == count, chance * count, -jnp.expm1(jnp.log1p(-chance) * tries.astype(chance.dtype)))

    return drawn, expect(true_classes), expect(drawn)


def _draw(key: jax.Array, count: int, classes: int) -> jax.Array:
    coarse, fine = jax.random.uniform(key, (2, count))
    # Two numbers, since one of float32 has 2 ** 23 values, too few to reach each of a million classes.
    span = jnp.float32(math.log(classes + 1))
    return jnp.clip(jnp.exp(coarse * span) * jnp.exp(fine * span * 2.0**-23), 1, classes).astype(jnp.int32) - 1


def _draw_distinct(key: jax.Array, count: int, classes: int) -> tuple[jax.Array, jax.Array]:
    """The first `count` distinct classes of an endless series, and at which draw they were complete."""
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def draw_more(state: State) -> State:
        found, there, rounds, tries = state
        both = jnp.concatenate([found, _draw(jax.random.fold_in(key, rounds), count, classes)])
        # Equal ones lie next to each other, in the order in which they were drawn: the first of them is new.
        order = jnp.argsort(both, stable=True)
        first = jnp.ones(2 * count, bool).at[order[1:]].set(both[order[1:]] != both[order[:-1]])
        new = first[count:].astype(jnp.int32)
        place = there + jnp.cumsum(new, dtype=jnp.int32) - new
        tries += (place < count).sum(dtype=jnp.int32)  # none is drawn once all are there
        place = jnp.where(new > 0, place, count)
        return found.at[place].set(both[count:], mode="drop"), there + new.sum(dtype=jnp.int32), rounds + 1, tries

    start = (jnp.full(count, -1, jnp.int32), jnp.int32(0), jnp.int32(0), jnp.int32(0))
    found, _, _, tries = jax.lax.while_loop(lambda state: state[1] < count, draw_more, start)
    return found, tries


def _sampled_logits(
    caller: str,
    weights: ArrayLike | str,
    biases: ArrayLike,
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int,
    sampled_values: Sequence[ArrayLike] | None,
    remove_accidental_hits: bool,
    name: str,
    seed: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logits of the right classes and of the samples, the probabilities that are right, and the rows that count."""
    labels, x = _check_labels(caller, labels, num_true), widen(as_float(inputs))
    # Other integers than classes are computed as class 0, so that padding of weight 0 has a finite gradient.
    known = (labels >= 0) & (labels < num_classes)
    labels = jnp.where(known, labels, 0)
    if sampled_values is None:
        sampled_values = log_uniform_candidate_sampler(labels, num_true, num_sampled, True, num_classes, seed, name)
    sampled, of_labels, of_sampled = map(jnp.asarray, sampled_values)
    ids = jnp.concatenate([labels.ravel(), sampled.astype(labels.dtype)])
    rows = widen(as_float(_rows(caller, weights, ids, num_classes)))
    bias = widen(as_float(_rows(caller, biases, ids, num_classes)))
    if x.shape != (len(labels), *rows.shape[1:]) or x.ndim != 2 or bias.ndim != 1:
        raise ValueError(
            f"`est.nn.{caller}` needs inputs of shape [batch, width], weights of shape [num_classes, width] and biases "
            f"of shape [num_classes]; got inputs of shape {x.shape} for labels of shape {labels.shape}, and rows of "
            f"shape {rows.shape[1:]} and {bias.shape[1:]}."
        )
    n = labels.size
    right = jnp.einsum("bw,btw->bt", x, rows[:n].reshape(*labels.shape, -1)) + bias[:n].reshape(labels.shape)
    others = x @ rows[n:].T + bias[n:]
    right -= jax.lax.stop_gradient(jnp.log(of_labels))
    others -= jax.lax.stop_gradient(jnp.log(of_sampled))
    if remove_accidental_hits:
        hit = (labels[:, :, None] == sampled).any(1)
        # The least number instead of minus infinity, whose product with a probability of 0 would be NaN.
        others = jnp.where(hit, jnp.finfo(others.dtype).min, others)
    wanted = jnp.concatenate([jnp.full_like(right, 1 / num_true), jnp.zeros_like(others)], 1)
    return jnp.concatenate([right, others], 1), wanted, known.all(1)


def _rows(caller: str, table: ArrayLike | str, ids: jax.Array, num_classes: int) -> jax.Array:
    if isinstance(table, str):
        return embedding_lookup(table, ids)
    if isinstance(table, list | tuple) or jnp.ndim(table) < 1 or len(jnp.asarray(table)) < num_classes:
        shape = f"{len(table)} parts" if isinstance(table, list | tuple) else f"shape {jnp.shape(table)}"
        raise ValueError(
            f"`est.nn.{caller}` needs weights and biases as one array each, with a row for each of {num_classes} "
            f"classes; got {shape}."
        )
    return jnp.asarray(table)[ids]


def _check_labels(caller: str, labels: ArrayLike, num_true: int) -> jax.Array:
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"`est.nn.{caller}` needs integers as classes; got {labels.dtype}.")
    if labels.ndim != 2 or labels.shape[1] != num_true:
        raise ValueError(
            f"`est.nn.{caller}` needs classes of shape [batch, num_true], with num_true={num_true}; got shape "
            f"{labels.shape}. Write `labels[:, None]` for one class of each row."
        )
    return widen_int(labels)
