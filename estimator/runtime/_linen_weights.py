"""Linen modules whose `init` a model_fn calls itself: no optimizer sees their weights."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def watch_linen() -> Iterator[set[str]]:
    """Finds the modules that are called in the block with weights that an `init` in it has made; yields their classes.

    `est.get_variable` and `est.flax_module` make weights only where a state is made.
    """
    found: set[str] = set()
    linen: Any = sys.modules.get("flax.linen")  # most programs never import it
    if linen is None:
        yield found
        return
    # By id. Weak references, since a tracer must not live longer than the function that is traced.
    made: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()

    def look(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, output = context.module, call(*args, **kwargs)
        if module.scope is None or module.path:  # not bound, or within another module
            return output
        weights = [leaf for leaf in jax.tree.leaves(module.variables.get("params", {})) if isinstance(leaf, jax.Array)]
        if module.is_initializing():
            made.update({id(leaf): leaf for leaf in weights})
        elif any(made.get(id(leaf)) is leaf for leaf in weights):
            found.add(type(module).__name__)
        return output

    with linen.intercept_methods(look):
        yield found
