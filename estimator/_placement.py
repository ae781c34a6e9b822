"""Where a batch, the variables and the optimizer slots live."""

from __future__ import annotations

from typing import Any


class Placement:
    """Everything on the default device: the placement of a plain model_fn.

    A replicated model_fn puts another one into its frame. Shardings are pytree prefixes; None leaves the choice to jax.
    """

    def state(self, like: Any) -> Any:
        """The shardings of a State; `like` has its abstract arrays."""
        del like
        return None

    def batch(self, rows: int) -> Any:
        """The sharding of features and labels of `rows` examples."""
        del rows
        return None
