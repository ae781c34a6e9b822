"""Optimizer states that start again, while learning rates and schedules continue."""

from __future__ import annotations

from typing import Any

import jax

from estimator.core._frame import Frame, open_frame
from estimator.core._train_op import Update
from estimator.core._typing import PyTree
from estimator.optim._absent import names_in_slots
from estimator.optim._finite import in_dtypes_of
from estimator.optim._loss_scale import LossScaleState
from estimator.optim._optimizer import is_per_variable


def reinitialize_slots(update: Update, state: PyTree, variables: dict[str, PyTree], frame: Frame) -> PyTree:
    """The state of an optimizer in which all that belongs to variables is initialized again.

    Args:
      update: has the optimizer and the names of its variables.
      state: the optimizer's entry in `State.slots`.
      variables: by name.
      frame: for optimizers that ask for the step or a variable.
    """
    params = {name: variables[name] for name in names_in_slots(update, state, (), variables)}
    with open_frame(frame), jax.numpy_dtype_promotion("standard"):  # as for optimizers in a model_fn
        fresh = update.optimizer.transformation.init(params)
    if isinstance(state, LossScaleState):
        new = state._replace(inner=_with_fresh_slots(state.inner, fresh, params))
    else:
        new = _with_fresh_slots(state, fresh, params)
    return in_dtypes_of(state, new)


def _with_fresh_slots(state: PyTree, fresh: PyTree, params: dict[str, PyTree]) -> PyTree:
    """An optax state with the parts of `fresh` that hold values per variable, and the numbers beside them."""

    def is_slot(node: Any) -> bool:
        return (
            isinstance(node, dict)
            and bool(node)
            and all(name in params and is_per_variable(value, params[name]) for name, value in node.items())
        )

    def has_slots(node: Any) -> bool:
        fields = node if isinstance(node, tuple) and hasattr(node, "_fields") else ()
        return is_slot(node) or any(is_slot(field) for field in fields)

    def replace(old: Any, new: Any) -> Any:
        if is_slot(old):
            return new
        # What holds no slots, such as the step count of a schedule, continues.
        if not has_slots(old):
            return old
        fields = zip(old, new, strict=True)
        return type(old)(*(y if hasattr(x, "dtype") else _with_fresh_slots(x, y, params) for x, y in fields))

    return jax.tree.map(replace, state, fresh, is_leaf=has_slots)
