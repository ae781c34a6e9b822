"""Policies: in which dtype a model_fn computes, while its variables stay in float32."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._frame import current_frame, open_frames
from estimator.core._typing import PyTree

F = TypeVar("F", bound=Callable[..., Any])

_HALF = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Computations in half precision: variables stay in float32, losses and metrics are taken in float32.

    Above a model_fn it holds for all of it; as a block within one, for what is in the block. The innermost one counts,
    so that `with est.Policy("float32"):` makes an exception.

    - `est.get_variable` and the layers make variables in float32 and see their values in `compute_dtype`. A variable
      with a dtype of its own, such as `dtype=jnp.float32`, is seen as it is, and so is one that is not trainable, and
      what `est.read_variable` and `est.embedding_lookup` return.
    - `est.layers` cast their inputs to it. Batch and layer norm still take their moments in float32.
    - `est.flax_module` casts parameters and inputs, and layers of Flax that say no `dtype` compute in it. Batch
      statistics, and the parameters of norms, stay in float32. A module that has a `dtype` of its own computes in that.
    - `est.losses`, `est.metrics`, and the sums, norms and likelihoods of `est.nn` are computed in float32, as without a
      policy.

    Gradients and optimizers see float32. bfloat16 has the range of float32; float16 needs an `est.DynamicLossScale`.

    >>> import estimator as est, jax, jax.numpy as jnp
    >>> @est.Policy("bfloat16")
    ... def model_fn(features, labels, mode):
    ...     hidden = est.layers.dense(features, 8, jax.nn.relu)
    ...     with est.Policy("float32"):
    ...         output = est.layers.dense(hidden, 1)
    ...     print(hidden.dtype, output.dtype)
    ...     return est.EstimatorSpec(mode, predictions=output)
    >>> state = est.transform(model_fn).init(jax.random.key(0), jnp.ones((2, 3)), mode="infer")
    bfloat16 float32
    >>> {str(value.dtype) for value in state.variables.values()}
    {'float32'}

    Args:
      compute_dtype: "bfloat16", "float16", or "float32", as a string or a dtype.

    Raises:
      ValueError: it is another dtype.
      RuntimeError: a block is not within a model_fn.
    """

    compute_dtype: Any

    def __post_init__(self) -> None:
        try:
            name = jnp.dtype(self.compute_dtype).name
        except TypeError:
            name = ""
        if name not in (*_HALF, "float32"):
            raise ValueError(f'`est.Policy` needs "bfloat16", "float16" or "float32"; got {self.compute_dtype!r}.')
        object.__setattr__(self, "compute_dtype", jnp.dtype(name))  # the class is frozen

    def __call__(self, model_fn: F) -> F:
        """The model_fn under this policy, a model_fn again."""

        @functools.wraps(model_fn)
        def under_policy(*args: Any, **kwargs: Any) -> Any:
            with self:
                return model_fn(*args, **kwargs)

        return under_policy  # type: ignore[return-value]

    def __enter__(self) -> Policy:
        # In the frame and not in this object, which several runs, and threads, may share.
        current_frame("est.Policy").notes.get(_Open).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        current_frame("est.Policy").notes.get(_Open).pop()

    def storage_dtype(self, dtype: Any) -> Any:
        """The dtype of a variable that is asked for with this one."""
        return jnp.float32 if _is_half(dtype) else dtype

    def cast_variable(self, value: PyTree, dtype: Any, trainable: bool) -> PyTree:
        """The value that is seen of a variable asked for with this dtype."""
        if not (_is_half(dtype) or (dtype is None and trainable)):
            return value
        return jax.tree.map(lambda x: x.astype(self.compute_dtype) if x.dtype == jnp.float32 else x, value)


class _Open(list[Policy]):
    """The open policies of one run, the innermost last."""


def innermost_policy() -> Policy | None:
    """The policy that holds here, of this run or of one around it: a tower is run by another one."""
    policies = [policy for frame in open_frames() for policy in frame.notes.get(_Open)]
    return policies[-1] if policies else None


def cast_to_compute(x: Any) -> Any:
    """An input of a layer; an array of floats in the dtype that the policy around says."""
    policy = innermost_policy()
    if policy is None or not isinstance(x, jax.Array | np.ndarray) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype(policy.compute_dtype)


def _is_half(dtype: Any) -> bool:
    return dtype is not None and jnp.dtype(dtype).name in _HALF
