"""Optimizers: an optax transformation behind TensorFlow's `minimize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from estimator._embedding import zero_gradients
from estimator._frame import Frame, PyTree, current_frame
from estimator._indexed_slices import IndexedSlices
from estimator._lazy import update_rows
from estimator._modes import ModeKeys
from estimator._row_rule import Rule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
    """One call of `minimize` or `apply_gradients`.

    Attributes:
      gradients: by variable name; None while they are still to be taken from the loss.
      loss: scalar; None for `apply_gradients`.
      var_list: names of the variables to update.
      slots: name of this call's entry in `State.slots`.
      optimizer: whose transformation turns the gradients into updates.
    """

    gradients: dict[str, PyTree] | None
    loss: jax.Array | None
    var_list: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    slots: str = dataclasses.field(metadata={"static": True})
    optimizer: Optimizer = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainOp:
    """What a training step does to the variables: updates, applied in this order."""

    updates: tuple[Update, ...] = ()


class GradientsNeeded(BaseException):
    """Leaves a run at `compute_gradients`, with the loss whose gradients it needs to go on (see `_gradients.py`).

    No `Exception`, so that a model_fn which catches those does not stop it.
    """

    def __init__(self, loss: jax.Array, var_list: tuple[str, ...]) -> None:
        super().__init__("`compute_gradients` was called in a frame that no runner watches over.")
        self.loss = loss
        self.var_list = var_list


class Optimizer:
    """An optax transformation with the methods of a TensorFlow optimizer.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss = jnp.mean((w * features - labels) ** 2)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.5)).minimize(loss))
    >>> model = est.transform(model_fn)
    >>> state = model.init(jax.random.key(0), jnp.ones(2), jnp.zeros(2))
    >>> state, spec = model.train_step(state, jnp.ones(2), jnp.zeros(2))
    >>> print(spec.loss, state.variables["w"])
    1.0 0.0

    Args:
      optimizer_or_fn: an `optax.GradientTransformation`, or a function without arguments that returns one.
      name: of its entries in `State.slots`; by default "optimizer". A second one of a name gets "_1" added.
    """

    def __init__(
        self,
        optimizer_or_fn: optax.GradientTransformation | Callable[[], optax.GradientTransformation],
        name: str | None = None,
    ) -> None:
        if not _is_transformation(optimizer_or_fn) and not callable(optimizer_or_fn):
            raise TypeError(
                f"`{type(self).__name__}` takes an optax.GradientTransformation such as `optax.adam(1e-3)`, or a "
                f"function that returns one; got {optimizer_or_fn!r}."
            )
        self._optimizer_or_fn = optimizer_or_fn
        self._name = name or "optimizer"
        self.row_rules: dict[Any, Rule] = {}  # what `_lazy.py` found out about the transformation

    def get_name(self) -> str:
        return self._name

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation that does the work; made anew at each call if it was given as a function."""
        made = self._optimizer_or_fn
        if not _is_transformation(made):
            made = made()
            if not _is_transformation(made):
                raise TypeError(
                    f"The function given to `{type(self).__name__}` must return an optax.GradientTransformation; "
                    f"it returned {made!r}."
                )
        return optax.with_extra_args_support(made)

    def minimize(self, loss: jax.Array, var_list: Sequence[str] | None = None) -> TrainOp:
        """The train_op that moves the variables against the gradient of `loss`.

        Args:
          loss: scalar array.
          var_list: names of the variables to move; default: all trainable ones got so far in this run.

        Returns:
          The train_op; outside TRAIN an empty one.
        """
        frame = current_frame(f"{type(self).__name__}.minimize")
        if frame.mode != ModeKeys.TRAIN:
            return TrainOp()
        loss = _checked_loss(f"{type(self).__name__}.minimize", loss)
        names = _checked_var_list(f"{type(self).__name__}.minimize", frame, var_list)
        return TrainOp((Update(None, loss, names, self._open_slots(frame, names), self),))

    def compute_gradients(self, loss: jax.Array, var_list: Sequence[str] | None = None) -> list[tuple[PyTree, str]]:
        """The gradients themselves, to look at or to change before `apply_gradients`.

        Within towers they are the tower's own, of its scaled loss. While a state is initialized they are zeros.

        Returns:
          A list of (gradient, variable name); a gradient has the structure of its variable, or is an
          `est.IndexedSlices` where the variable was read by `est.embedding_lookup` alone.
        """
        caller = f"{type(self).__name__}.compute_gradients"
        frame = current_frame(caller)
        loss = _checked_loss(caller, loss)
        names = _checked_var_list(caller, frame, var_list)
        call = frame.gradient_calls
        frame.gradient_calls += 1
        if frame.initializing:
            gradients = zero_gradients(frame, names)
        elif call < len(frame.known_gradients):
            gradients = frame.known_gradients[call]
        else:
            raise GradientsNeeded(loss, names)
        return [(gradients[name], name) for name in names]

    def apply_gradients(self, grads_and_vars: Iterable[tuple[PyTree, str]]) -> TrainOp:
        """The train_op that applies given gradients.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them. A variable whose gradient is None stays as it is.
        """
        caller = f"{type(self).__name__}.apply_gradients"
        frame = current_frame(caller)
        if frame.mode != ModeKeys.TRAIN:
            return TrainOp()
        gradients: dict[str, PyTree] = {}
        for pair in grads_and_vars:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(
                    f"`{caller}` takes pairs (gradient, variable name) as `compute_gradients` returns; got {pair!r}."
                )
            gradient, name = pair
            if gradient is not None:
                (name,) = _checked_var_list(caller, frame, (name,))
                if name in gradients:
                    raise ValueError(f"`{caller}` got the variable {name!r} twice.")
                _check_gradient(caller, name, gradient, frame.variables[name])
                gradients[name] = gradient
        if not gradients:
            raise ValueError(f"`{caller}` got no gradient for any variable; every one is None.")
        names = tuple(gradients)
        return TrainOp((Update(gradients, None, names, self._open_slots(frame, names), self),))

    def get_slot(self, var_name: str, slot_name: str) -> PyTree | None:
        """The slot of a variable at the start of this run, such as optax.adam's "mu"; None if there is none.

        To be called after `minimize` or `apply_gradients`, as in TensorFlow.
        """
        for slot, by_variable in self._slot_dicts():
            if slot == slot_name and var_name in by_variable:
                return by_variable[var_name]
        return None

    def get_slot_names(self) -> list[str]:
        """The names of the optimizer's slots: the fields of the optax states that hold a value per variable."""
        return sorted({slot for slot, _ in self._slot_dicts()})

    def variables(self) -> list[PyTree]:
        """All arrays of the optimizer's state, counters included, at the start of this run."""
        return jax.tree.leaves(self._states())

    def _states(self) -> list[PyTree]:
        frame = current_frame(f"{type(self).__name__}.variables")
        return [frame.slots[name] for name, owner in frame.slot_owners.items() if owner is self]

    def _slot_dicts(self) -> list[tuple[str, dict[str, PyTree]]]:
        found = []
        is_dict = lambda node: isinstance(node, dict)  # noqa: E731
        for path, node in jax.tree_util.tree_leaves_with_path(self._states(), is_leaf=is_dict):
            fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
            if isinstance(node, dict) and fields:
                found.append((fields[-1], node))
        return found

    def _open_slots(self, frame: Frame, names: tuple[str, ...]) -> str:
        taken = frame.slot_owners
        slots = self._name
        if slots in taken:
            slots = next(s for i in range(1, len(taken) + 2) if (s := f"{self._name}_{i}") not in taken)
        taken[slots] = self
        if frame.initializing:
            frame.slots[slots] = self.transformation.init({n: frame.variables[n] for n in names})
        return slots


def group(*train_ops: TrainOp) -> TrainOp:
    """One train_op that does what several do, in their order."""
    for train_op in train_ops:
        if not isinstance(train_op, TrainOp):
            raise TypeError(
                f"`est.group` takes what `minimize`, `apply_gradients` and `group` return; got {train_op!r}. "
                "Write `est.group(est.Optimizer(optimizer).minimize(loss), ...)`."
            )
    return TrainOp(tuple(update for train_op in train_ops for update in train_op.updates))


def apply_updates(
    train_op: TrainOp, variables: dict[str, PyTree], slots: dict[str, PyTree]
) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
    """The variables and slots after a train_op whose gradients are known."""
    for update in train_op.updates:
        if update.slots not in slots:
            raise ValueError(
                f"The state has no slots for the optimizer {update.slots!r}, only {sorted(slots)}. "
                "Initialize it in mode 'train' by the same model_fn."
            )
        params = {name: variables[name] for name in update.gradients or {}}
        extra = {} if update.loss is None else {"value": update.loss}
        changed, new_slots = update_rows(update.optimizer, update.gradients or {}, slots[update.slots], params, extra)
        variables = {**variables, **changed}
        slots = {**slots, update.slots: new_slots}
    return variables, slots


def _is_transformation(candidate: Any) -> bool:
    return callable(getattr(candidate, "init", None)) and callable(getattr(candidate, "update", None))


def _checked_loss(caller: str, loss: Any) -> jax.Array:
    if not isinstance(loss, jax.Array) or loss.size != 1:
        what = f"shape {loss.shape}" if isinstance(loss, jax.Array) else repr(loss)
        raise ValueError(
            f"`{caller}` needs a scalar loss computed by this run; got {what}. "
            "Reduce it, for example by `est.losses.compute_weighted_loss(losses)`."
        )
    return loss.reshape(())


def _checked_var_list(caller: str, frame: Frame, var_list: Any) -> tuple[str, ...]:
    trainable = [name for name, is_trainable in frame.trainable.items() if is_trainable]
    names = tuple(trainable if var_list is None else var_list)
    if isinstance(var_list, str):
        raise TypeError(f"`{caller}`: var_list must be a list of names; write [{var_list!r}].")
    if not names:
        raise ValueError(f"`{caller}` found no variables to optimize; create them before the call.")
    unknown = [name for name in names if name not in trainable]
    if unknown:
        raise ValueError(
            f"`{caller}` was asked to optimize {unknown}, but the trainable variables of this run are {trainable}. "
            "A var_list holds full names of variables."
        )
    return names


def _check_gradient(caller: str, name: str, gradient: PyTree, variable: PyTree) -> None:
    if isinstance(gradient, IndexedSlices):
        gradient.check(caller)
        gradient = jax.ShapeDtypeStruct(gradient.dense_shape, gradient.values.dtype)
    same = jax.tree.structure(gradient) == jax.tree.structure(variable)  # type: ignore[operator]
    if not same or any(
        jnp.shape(g) != jnp.shape(v) for g, v in zip(jax.tree.leaves(gradient), jax.tree.leaves(variable), strict=True)
    ):
        raise ValueError(
            f"`{caller}`: the gradient of {name!r} must have the variable's structure and shapes, "
            f"{jax.tree.map(jnp.shape, variable)}; got {jax.tree.map(jnp.shape, gradient)}."
        )
