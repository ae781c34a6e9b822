"""The base of all metrics: states that merge, and a result."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, Self, dataclass_transform

import jax
import numpy as np

from estimator.core._record import parts_of


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(dataclasses.field,))
class Metric(abc.ABC):
    """A metric after some rows: a pytree of states.

    A subclass automatically becomes a frozen dataclass and a pytree. Its fields are the states, arrays;
    a hashable field that is not an array is a `dataclasses.field(metadata={"static": True})`.

    >>> import jax.numpy as jnp
    >>> class Norm(Metric):
    ...     squares: jax.Array
    ...
    ...     def result(self):
    ...         return self.squares**0.5
    >>> Norm(jnp.array(9.0)).merge(Norm(jnp.array(16.0))).result().item()
    5.0

    In a model_fn a metric stands for TensorFlow's pair `(value, update)` too: `accuracy[1]`, and both parts in
    `value, update = est.metrics.accuracy(...)`, are the value in this batch, an array. As in TensorFlow, the second
    part of `mean_iou` is the confusion matrix, and of `mean_per_class_accuracy` the accuracies of the classes. A pair
    of both is a metric for `eval_metric_ops`; reported by `est.summary.scalar` or `est.record`, the value is the one of
    all towers' rows.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Frozen, as a pytree should be; equal only if identical, as arrays have no truth value.
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        jax.tree_util.register_dataclass(cls)

    def merge(self, other: Self) -> Self:
        """The metric of the rows of both: the sum of the states, unless a subclass overrides it.

        Works on jax arrays, also under `jax.jit`, and on numpy arrays, which keep their dtype.

        Raises:
          TypeError: if `other` is not of the same type.
          ValueError: if static fields, or the shapes of states, differ.
        """
        self._check_mergeable(other)
        return jax.tree.map(lambda mine, others: mine + others, self, other)

    def __iter__(self) -> Iterator[Any]:
        return iter(parts_of(self))

    def __getitem__(self, index: int) -> Any:
        return parts_of(self)[index]

    def _parts(self) -> tuple[Any, Any]:
        """TensorFlow's pair `(value, update)` in this batch."""
        value = self.result()
        return value, value

    @abc.abstractmethod
    def result(self) -> Any:
        """The value or values of the metric: a jax array, or a numpy array if the states are."""

    def _check_mergeable(self, other: Metric) -> None:
        name = type(self).__name__
        if type(other) is not type(self):
            raise TypeError(
                f"`{name}.merge` got a `{type(other).__name__}`; only metrics of the same type can be merged."
            )
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is one
            mine, others = getattr(self, field.name), getattr(other, field.name)
            if field.metadata.get("static"):
                if mine != others:
                    raise ValueError(
                        f"`{name}.merge` got a `{name}` of another `{field.name}`: "
                        f"{others!r}, where this one has {mine!r}."
                    )
            # The sum would broadcast other shapes without an error.
            elif jax.tree.map(np.shape, mine) != jax.tree.map(np.shape, others):
                raise ValueError(
                    f"`{name}.merge` got a `{name}` whose `{field.name}` has shape "
                    f"{jax.tree.map(np.shape, others)}, where this one's has "
                    f"{jax.tree.map(np.shape, mine)}."
                )
