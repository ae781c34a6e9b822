"""The derivative of several losses, which tells what each of them depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from estimator.core._typing import PyTree

T = TypeVar("T")


class Derivative(Generic[T]):
    """`jax.vjp` of a function that returns losses, each of which is pulled back by itself.

    jax follows the equations of the derivative back from a loss, and knows which inputs it does not come to: through
    loops, branches and `jax.jit`, and up to `jax.lax.stop_gradient`, `argmax` or a cast to integers. A derivative that
    happens to be zero comes to its input. (Of two losses that one loop carries side by side, jax takes each to depend
    on all that the other does.)

    >>> x, y = jnp.ones(()), jnp.zeros(())
    >>> derivative = Derivative(lambda x, y: ([x * jax.lax.stop_gradient(y), x * y], None), (x, y))
    >>> derivative.pull(0, jnp.float32(1))
    ((Array(0., dtype=float32), Array(0., dtype=float32)), (True, False))

    Args:
      fn: returns a list of scalars, and anything.
      inputs: its arguments, pytrees of floating arrays.

    Attributes:
      losses, other: what `fn` returns.
    """

    def __init__(self, fn: Callable[..., tuple[list[jax.Array], T]], inputs: tuple[PyTree, ...]) -> None:
        self._chosen = 0  # the loss that is pulled back
        self._came_to: set[int] = set()

        def forward(inputs: tuple[PyTree, ...], nothing: jax.Array) -> tuple[list[jax.Array], T]:
            leaves, structure = jax.tree.flatten(inputs)
            watched = watch(dict(enumerate(leaves)), self._came_to)
            losses, other = fn(*jax.tree.unflatten(structure, watched.values()))
            return [self._choose(i, loss, nothing) for i, loss in enumerate(losses)], other

        # With an input that all losses depend on, since jax does not pull back one that depends on none.
        self.losses, self._pull, self.other = jax.vjp(forward, inputs, np.float32(0), has_aux=True)

    def pull(self, i: int, cotangent: jax.Array) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
        """The gradients of a loss by the inputs, times the cotangent, and whether it depends on them."""
        self._chosen = i
        self._came_to.clear()
        # Other losses have no cotangent, whatever is given for them.
        gradients, _ = self._pull([cotangent if j == i else jnp.zeros_like(x) for j, x in enumerate(self.losses)])
        leaves, structure = jax.tree.flatten(gradients)
        return gradients, jax.tree.unflatten(structure, [n in self._came_to for n in range(len(leaves))])

    def _choose(self, i: int, loss: jax.Array, nothing: jax.Array) -> jax.Array:
        """The loss, through which a cotangent comes only if it is the chosen one."""

        @jax.custom_vjp
        def identity(loss: jax.Array, nothing: jax.Array) -> jax.Array:
            return loss

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array | None, None]:
            return (cotangent if self._chosen == i else None), None

        identity.defvjp(lambda loss, nothing: (loss, None), backward)
        return identity(loss, nothing)


def watch(inputs: Mapping[int, jax.Array], came_to: set[int]) -> dict[int, jax.Array]:
    """The inputs of what is differentiated; `came_to` gets the keys of those that a backward pass comes to."""

    # One for all: jax takes half a millisecond to trace each.
    @jax.custom_vjp
    def identity(inputs: dict[int, jax.Array]) -> dict[int, jax.Array]:
        return inputs

    def backward(_: None, cotangents: dict[int, Any]) -> tuple[dict[int, jax.Array | None]]:
        came = {key: None if isinstance(x, SymbolicZero) else x for key, x in cotangents.items()}
        came_to.update(key for key, x in came.items() if x is not None)
        return (came,)

    identity.defvjp(lambda inputs: ({key: x.value for key, x in inputs.items()}, None), backward, symbolic_zeros=True)
    return identity(dict(inputs))
