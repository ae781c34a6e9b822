"""Validates the user's `tower_transform`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from estimator.typing import Forward

_SUCH_AS = "such as `est.checkpoint_segments` or `functools.partial(jax.checkpoint, policy=...)`"


def checked_transform(transform: Callable[[Forward], Forward] | None) -> Callable[[Forward], Forward] | None:
    """The `tower_transform` of `replicate_model_fn`, less what is wrong with it.

    Raises:
      TypeError: it is not a function; or, later, what it returns is not one.
      ValueError: later, what it returns does not call the forward function, or returns something else.
    """
    if transform is not None and not callable(transform):
        raise TypeError(f"tower_transform must be a function that takes a function, {_SUCH_AS}; got {transform!r}.")
    return None if transform is None else functools.partial(_check_calls, transform)


def _check_calls(transform: Callable[[Forward], Forward], forward: Forward) -> Forward:
    """`transform(forward)`, which must return what `forward` does."""
    returned: list[tuple[Any, dict[str, str]]] = []

    def note_result(*args: Any) -> Any:
        result = forward(*args)
        returned.append(_kind(result))
        return result

    # The structures are compared: a transform that drops an output would lose gradients without an error.
    made = transform(note_result)
    if not callable(made):
        raise TypeError(
            f"tower_transform must return a function, {_SUCH_AS} does; of the tower's forward function it made "
            f"{made!r}."
        )

    def call(*args: Any) -> Any:
        result = made(*args)
        if not returned:
            raise ValueError(
                "The function that tower_transform made did not call the tower's forward function. Call it with the "
                "arguments that it is given, once."
            )
        kind = _kind(result)
        if kind not in returned:
            raise ValueError(
                "The function that tower_transform made must return what the tower's forward function returns, a "
                f"pytree of the same structure, shapes and dtypes; {_difference(kind[1], returned[-1][1])}."
            )
        return result

    return call


def _kind(tree: Any) -> tuple[Any, dict[str, str]]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return structure, {jax.tree_util.keystr(path): _describe(leaf) for path, leaf in leaves}


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype if hasattr(leaf, 'dtype') else jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def _difference(got: dict[str, str], wanted: dict[str, str]) -> str:
    for path in (*wanted, *got):
        if got.get(path) != wanted.get(path):
            name = path or "the whole"
            return f"at {name} it returned {got.get(path, 'nothing')} instead of {wanted.get(path, 'nothing')}"
    return "it returned another structure"
