"""All metrics of the library in one table; and metrics of a user's own, none of which merges by a sum of its states."""

import dataclasses

import jax
import jax.numpy as jnp

import estimator as est

THRESHOLDS = [0.3, 0.5, 0.7]


def all_metrics(y, classes, logits, yb, p, weight=None):
    """Every metric of the library; y, classes, weight [B], logits [B, C], yb and p [B, 1]."""
    metrics, rounded = est.metrics, jnp.round(p)
    return {
        "accuracy": metrics.accuracy(y, classes, weight),
        "per_class": metrics.mean_per_class_accuracy(y, classes, logits.shape[-1], weight),
        "mean_iou": metrics.mean_iou(y, classes, logits.shape[-1], weight),
        "top2": metrics.recall_at_k(y, logits, 2, weights=weight),
        "mean_p": metrics.mean(p, weight),
        "mse": metrics.mean_squared_error(yb, p, weight),
        "rmse": metrics.root_mean_squared_error(yb, p, weight),
        "mae": metrics.mean_absolute_error(yb, p, weight),
        "auc": metrics.auc(yb, p, weight),
        "auc_pr": metrics.auc(yb, p, weight, curve="PR", summation_method="careful_interpolation"),
        "precision": metrics.precision(yb, rounded, weight),
        "recall": metrics.recall(yb, rounded, weight),
        "tp": metrics.true_positives(yb, rounded, weight),
        "fp": metrics.false_positives(yb, rounded, weight),
        "tn": metrics.true_negatives(yb, rounded, weight),
        "fn": metrics.false_negatives(yb, rounded, weight),
        "precision_at": metrics.precision_at_thresholds(yb, p, THRESHOLDS, weight),
        "recall_at": metrics.recall_at_thresholds(yb, p, THRESHOLDS, weight),
    }


@jax.tree_util.register_pytree_node_class
class Largest:
    """A metric of clu's protocol whose states do not merge by a sum."""

    def __init__(self, value):
        self.value = value

    def merge(self, other):
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Collected:
    """clu's protocol again: all values, one after the other; the state grows."""

    values: jax.Array

    def merge(self, other):
        return Collected(jnp.concatenate([self.values, other.values]))

    def compute(self):
        return self.values


class Span(est.metrics.Metric):
    """From the smallest to the largest value."""

    low: jax.Array
    high: jax.Array

    def merge(self, other):
        return Span(jnp.minimum(self.low, other.low), jnp.maximum(self.high, other.high))

    def result(self):
        return self.high - self.low


class Deviation(est.metrics.Metric):
    """The standard deviation, by the stable merge of counts, means and squares."""

    count: jax.Array
    mean: jax.Array
    squares: jax.Array

    def merge(self, other):
        count = self.count + other.count
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart**2 * self.count * other.count / count
        return Deviation(count, self.mean + apart * other.count / count, squares)

    def result(self):
        return (self.squares / self.count) ** 0.5


class Sample(est.metrics.Metric):
    """The values of highest priority, `size` of them: a sample without replacement."""

    priorities: jax.Array
    values: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    def merge(self, other):
        priorities = jnp.concatenate([self.priorities, other.priorities])
        values = jnp.concatenate([self.values, other.values])
        _, best = jax.lax.top_k(priorities, self.size)
        return Sample(priorities[best], values[best], self.size)

    def result(self):
        return self.values


class StepOutputs(est.metrics.Metric):
    """Whether any row had it: states of booleans, merged by the default rule."""

    value: jax.Array

    def result(self):
        return self.value


def all_of(values):
    """Every metric here; values: float32 of shape `(batch,)`."""
    rows = jnp.float32(values.shape[0])
    return {
        "largest": Largest(values.max()),
        "collected": Collected(values),
        "span": Span(values.min(), values.max()),
        "deviation": Deviation(rows, values.mean(), ((values - values.mean()) ** 2).sum()),
        "sample": Sample(jnp.cos(values), values, 3).merge(Sample(jnp.full(3, -2.0), jnp.zeros(3), 3)),
        "seen": StepOutputs((values > 2).any()),
        "unseen": StepOutputs((values > 100).any()),
    }
