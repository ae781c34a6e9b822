"""Types that have a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

PyTree = Any

Tree = TypeVar("Tree")
"""A pytree, where a function returns one of the same structure."""

Features = PyTree
"""The features of a batch: arrays with the examples as their first dimension."""

Labels = PyTree
"""The labels of a batch: arrays like those of the features, or None."""

Variables = dict[str, PyTree]
"""By full name: an array, or a pytree of arrays."""

Slots = dict[str, PyTree]
"""By optimizer name: the state of an optax transformation."""

Gradients = dict[str, PyTree]
"""By the full name of a variable."""

Forward = Callable[..., Any]
"""The forward pass of a tower, pure: `(trained, rest, batch) -> (losses, others)`, pytrees of arrays."""

Shardings = PyTree
"""A prefix of a pytree with a `jax.sharding.Sharding` as each leaf; None leaves the choice to jax."""

Partitions = dict[tuple[Any, ...], int]
"""The sharded dimension of an array, by the name of its variable and the keys of its path."""
