"""Values that a model_fn reports beside its loss, and how the values of several towers become one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._frame import current_frame, current_trace, innermost_frame
from estimator.core._mode_keys import ModeKeys


class Report:
    """Base of what is reported: a pytree of arrays."""

    value: Any

    def as_value(self) -> Any:
        """The value that a hook gets, of a report whose arrays are on the host."""
        return self.value

    def merge(self, others: Sequence[Any], rows: Sequence[int]) -> Any:
        """One report from this one and the other parts', in input order; part i has `rows[i]` rows."""
        raise AssertionError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scalar(Report):
    """A number; of several towers the mean.

    Attributes:
      value: scalar array.
      metric: the metric whose value it is, if it is one: of several towers, the merged metric's.
      summary: whether it goes into the event files.
      is_sum: whether it is a sum over examples: of several towers the sum.
    """

    value: Any
    metric: Any = None
    summary: bool = dataclasses.field(default=False, metadata={"static": True})
    is_sum: bool = dataclasses.field(default=False, metadata={"static": True})

    def as_value(self) -> Any:
        return self.value.item()

    def merge(self, others: Sequence[Scalar], rows: Sequence[int]) -> Scalar:
        parts = [self, *others]
        # Metrics are merged by their states: a precision of all rows, say, is not the mean of the parts' precisions.
        if self.metric is not None:
            metric = functools.reduce(lambda merged, other: merged.merge(other), [part.metric for part in parts])
            return dataclasses.replace(self, value=jnp.reshape(metric.result(), ()), metric=metric)
        if self.is_sum:
            return dataclasses.replace(self, value=sum(part.value for part in parts))
        if jnp.issubdtype(self.value.dtype, jnp.inexact):
            total = sum(part.value * (n / sum(rows)) for part, n in zip(parts, rows, strict=True))
            return dataclasses.replace(self, value=total)
        # The mean of integers is a float; floats, above, keep their dtype, since Python's float has a weak type.
        shares = (part.value.astype(jnp.float32) * (n / sum(rows)) for part, n in zip(parts, rows, strict=True))
        return dataclasses.replace(self, value=sum(shares))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows(Report):
    """A value for each example: of several towers one after the other, as predictions are.

    Attributes:
      value: array of shape `(batch, ...)`.
      limit: how many rows are kept at most; all if None.
      image: whether it goes into the event files, as images.
    """

    value: Any
    limit: int | None = dataclasses.field(default=None, metadata={"static": True})
    image: bool = dataclasses.field(default=False, metadata={"static": True})

    def merge(self, others: Sequence[Rows], rows: Sequence[int]) -> Rows:
        # Each part has cut off its own rest already; of all that is left, the first rows are the first of the batch.
        return dataclasses.replace(self, value=jnp.concatenate([p.value for p in (self, *others)])[: self.limit])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfTowers(Report):
    """A value of each tower.

    Attributes:
      value: array of shape `(towers, ...)`.
    """

    value: Any

    def merge(self, others: Sequence[OfTowers], rows: Sequence[int]) -> OfTowers:
        """The first tower has run on the rows of the others too: its value is the mean over all rows."""
        parts = [self, *others]
        if not jnp.issubdtype(self.value.dtype, jnp.inexact):
            parts = [OfTowers(part.value.astype(jnp.float32)) for part in parts]
        per_tower = [n / len(part.value) for part, n in zip(parts, rows, strict=True)]
        shares = [n / sum(per_tower) for n in per_tower]
        mean = sum(part.value[0] * share for part, share in zip(parts, shares, strict=True))
        return OfTowers(parts[0].value.at[0].set(mean))


@functools.cache
def bucket_limits() -> np.ndarray:
    """The upper ends of a histogram's buckets: TensorFlow's, each a tenth wider than the one nearer to zero."""
    # 774 limits lie between 1e-12 and 1e20, as in TensorFlow's loop; the last bucket takes all larger values.
    positive = 1e-12 * 1.1 ** np.arange(774)
    return np.concatenate([-positive[::-1], [0.0], positive, [np.finfo(np.float32).max]]).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Histogram(Report):
    """The number of values in each bucket; of several towers all of them together.

    >>> histogram = Histogram.of(jnp.arange(4.0))
    >>> histogram.describe()
    {'count': 4, 'mean': 1.5, 'std': 1.118033988749895, 'min': 0.0, 'max': 3.0}
    >>> counts, edges = histogram.rebin(3)
    >>> int(counts.sum()), edges.tolist()
    (4, [0.0, 1.0, 2.0, 3.0])

    Attributes:
      counts: int32 array, by bucket (see `bucket_limits`).
      minimum, maximum, sum, sum_squares: scalars, of the values.
    """

    counts: Any
    minimum: Any
    maximum: Any
    sum: Any
    sum_squares: Any

    @classmethod
    def of(cls, values: jax.Array) -> Histogram:
        flat = values.astype(jnp.float32).ravel()
        limits = jnp.asarray(bucket_limits())
        # Infinity, and NaN, which sorts last, come behind the last limit, and count in the last bucket.
        buckets = jnp.clip(jnp.searchsorted(limits, flat, side="left"), 0, len(limits) - 1)
        # Integers: a float32 that counts by ones stops at 2**24.
        counts = jnp.zeros(len(limits), jnp.int32).at[buckets].add(1)
        return cls(counts, flat.min(), flat.max(), flat.sum(), (flat**2).sum())

    def as_value(self) -> Histogram:
        return self

    def merge(self, others: Sequence[Histogram], rows: Sequence[int]) -> Histogram:
        parts = [self, *others]
        return Histogram(
            counts=sum(p.counts for p in parts),
            minimum=functools.reduce(jnp.minimum, [p.minimum for p in parts]),
            maximum=functools.reduce(jnp.maximum, [p.maximum for p in parts]),
            sum=sum(p.sum for p in parts),
            sum_squares=sum(p.sum_squares for p in parts),
        )

    def describe(self) -> dict[str, float]:
        """The number of values, their mean, standard deviation, minimum and maximum, by these names."""
        count = int(np.sum(self.counts))
        mean = float(self.sum) / count
        variance = max(float(self.sum_squares) / count - mean**2, 0.0) if np.isfinite(mean) else np.nan
        low, high = float(self.minimum), float(self.maximum)
        return {"count": count, "mean": mean, "std": float(np.sqrt(variance)), "min": low, "max": high}

    def rebin(self, bins: int) -> tuple[np.ndarray, np.ndarray]:
        """The counts in bins of equal width, nearly, and the edges of these bins."""
        counts, limits = np.asarray(self.counts), bucket_limits().astype(np.float64)
        (used,) = np.nonzero(counts)
        lower = np.concatenate([[np.finfo(np.float32).min], limits[:-1]])
        # What is not finite is in the last bucket, and then no minimum or maximum says where to begin or end.
        low = float(self.minimum) if np.isfinite(self.minimum) else lower[used[0]]
        high = float(self.maximum) if np.isfinite(self.maximum) else limits[used[-1]]
        middles = np.clip((lower[used] + limits[used]) / 2, low, high)
        return np.histogram(middles, bins, (low, high), weights=counts[used])


def merge_reports(
    parts: Sequence[dict[str, Report]], rows: Sequence[int], are_towers: bool = False
) -> dict[str, Report]:
    """One report for each name from the reports of several parts of a batch; part i has `rows[i]` rows."""
    first, *others = parts

    def merge(name: str, report: Report) -> Report:
        of_others: list[Any] = [other[name] for other in others]
        if are_towers and isinstance(report, OfTowers):
            return OfTowers(jnp.concatenate([part.value for part in (report, *of_others)]))
        return report.merge(of_others, rows)

    return {name: merge(name, report) for name, report in first.items()}


def record(name: str, value: Any, per_tower: bool = False) -> None:
    """Reports a value of this run of the model_fn, for hooks and `export_model(outputs=...)` to read by its name.

    A scalar is averaged over towers, and the value of a metric is the one of all rows; an array must have the batch as
    its first dimension, and is put together in input order, as predictions are; `per_tower` reports the value of each
    tower instead. It costs nothing in steps for which no hook asks for a value.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> def model_fn(features, labels, mode):
    ...     est.record("largest", features.max())
    ...     return est.EstimatorSpec(mode, predictions=features)
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.ones(3), mode="infer")
    >>> print(model.predict_step(state, jnp.arange(3.0)).reported["largest"].value)
    2.0

    Args:
      name: prefixed by the variable scopes around the call. As in TensorFlow, a name that the run has reported before,
        by `est.summary` too, gets "_1" added, or the next free number; so does "loss", the EstimatorSpec's. So does the
        prefix if a scope is entered again: in a scope `d` entered twice, "h" is "d/h" and then "d_1/h".
      value: a number, or an array of numbers.
      per_tower: whether the value of each tower is reported, not one of all: an array with the towers as its first
        dimension, of length 1 without `replicate_model_fn`. The value of a tower that runs several times on a batch, in
        micro-batches or on the remainder of an evaluation, is the mean over its rows. Numbers are also shown for
        TensorBoard, as "name/tower_0", "name/tower_1" ...

    Raises:
      ValueError: the value is not known outside of a function that jax traces.
      TypeError: the value is not an array of numbers.
    """
    array = as_reported_array("est.record", name, value)
    if per_tower:
        report("est.record", name, OfTowers(array[None]))
        return
    report("est.record", name, Scalar(array, metric_of(value)) if array.ndim == 0 else Rows(array))


def as_reported_array(caller: str, name: str, value: Any) -> jax.Array:
    """`value` as an array."""
    try:
        return jnp.asarray(value)
    except TypeError as error:
        hint = " The value of a metric in this batch is `metric[1]`." if hasattr(value, "merge") else ""
        raise TypeError(f"`{caller}({name!r})` needs a number or an array of numbers; got {value!r}.{hint}") from error


def report(caller: str, name: str, value: Report) -> str:
    """Adds a report to the current run; returns its full name."""
    frame = current_frame(caller)
    if not isinstance(name, str) or not name:
        raise ValueError(f"`{caller}` needs a non-empty name; got {name!r}.")
    full = unique_name("/".join((*frame.name_scope, name)), {"loss", *frame.reported})
    # Stricter than for variables: in a function under `jax.grad` a value may be a tracer of the derivative.
    if frame.tracing.trace != current_trace():
        raise ValueError(
            f"`{caller}({full!r})` was called within a function that jax traces apart (`jax.jit`, `jax.lax.scan`, "
            "`jax.checkpoint` ...), outside of which the value is not known. Return it, and report it outside."
        )
    frame.reported[full] = value
    return full


def unique_name(name: str, others: Container[str]) -> str:
    """The name, with "_1" added, or the next free number, where it is among the others."""
    numbered = (f"{name}_{i}" for i in itertools.count(1))
    return name if name not in others else next(each for each in numbered if each not in others)


def report_in_training(name: str, make: Callable[[], Report]) -> None:
    """Reports what a ready-made part of a model shows by itself. It stays out of the way: it does nothing in other
    modes, outside of a run, where the value is not known outside (see `report`), and where the name is taken.

    Raises:
      ValueError: the full name is "loss", under which `train` shows the loss of the EstimatorSpec.
    """
    frame = innermost_frame()
    if frame is None or frame.mode != ModeKeys.TRAIN or frame.tracing.trace != current_trace():
        return
    full = "/".join((*frame.name_scope, name))
    if full == "loss":
        raise ValueError(
            '`report_in_training("loss", ...)` was called outside of a name scope, where "loss" is the loss of the '
            "EstimatorSpec. Give the value another name."
        )
    if full not in frame.reported:
        frame.reported[full] = make()


class _MetricParts(list[tuple[Any, tuple[Any, Any]]]):
    """The metrics whose parts the model_fn has seen in one run, each with the parts."""


def parts_of(metric: Any) -> tuple[Any, Any]:
    """TensorFlow's value and update of a metric; in one run always the same arrays, known to `metric_of`."""
    frame = innermost_frame()
    if frame is None or frame.tracing.trace != current_trace():  # outside of a function traced apart it is not known
        return metric._parts()
    known = frame.notes.get(_MetricParts)
    for other, parts in known:
        if other is metric:
            return parts
    parts = metric._parts()
    known.append((metric, parts))
    return parts


def metric_of(part: Any) -> Any:
    """The metric that this very array is a part of, in the current run; None for any other value."""
    frame = innermost_frame()
    known = [] if frame is None else frame.notes.get(_MetricParts)
    # By `is`: traced arrays have no values to compare.
    return next((metric for metric, parts in known if any(own is part for own in parts)), None)
