"""A hook that computes a value from the state at the end of a run."""

from __future__ import annotations

from collections.abc import Callable

import jax

from estimator.core._hook import Context, Hook
from estimator.core._typing import PyTree


class FinalOpsHook(Hook):
    """Calls a function of the context at the end of a run that did not fail, and keeps what it returns.

    In TensorFlow `final_ops` were operations of the graph.

    >>> hook = FinalOpsHook(lambda context: context.state.variables["w"])

    Args:
      final_ops: function of the `Context`.

    Attributes:
      final_ops_values: what it returned, its arrays as numpy arrays; None before.

    Raises:
      TypeError: it is not a function.
    """

    def __init__(self, final_ops: Callable[[Context], PyTree]) -> None:
        if not callable(final_ops):
            raise TypeError(
                f"FinalOpsHook needs a function of the context, say `lambda context: context.state.variables`; "
                f"got {final_ops!r}."
            )
        self._final_ops = final_ops
        self.final_ops_values: PyTree = None

    def begin(self) -> None:
        self.final_ops_values = None

    def end(self, context: Context) -> None:
        if context.error is None:
            # Copied to the host: the next run may donate the memory of this state.
            self.final_ops_values = jax.device_get(self._final_ops(context))
