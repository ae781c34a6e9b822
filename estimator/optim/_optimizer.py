"""Optimizers: an optax transformation behind TensorFlow's `minimize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

from estimator.core._frame import Frame, check_is_known_outside, current_frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._train_op import GradientsNeeded, TrainOp, Update
from estimator.core._typing import PyTree, Variables
from estimator.optim import _loss_scale
from estimator.optim._absent import is_masked
from estimator.optim._apply_updates import StepGradients
from estimator.optim._arguments import (
    WHY_NO_GRADIENTS,
    check_global_step,
    check_gradient,
    check_initial_slots,
    check_is_outermost,
    check_loss,
    check_loss_scale,
    check_makes_optimizer,
    check_pair,
    check_scaled,
    check_var_list,
    in_order,
    is_transformation,
    list_names,
)
from estimator.optim._given_rate import GivenRate, LearningRate, to_carry, with_learning_rate
from estimator.optim._gradient_calls import GradientCalls, Reached
from estimator.optim._loss_scale import DynamicLossScale
from estimator.porting._missing_names import check_arguments
from estimator.sparse._embedding import zero_gradients


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
      optimizer_or_fn: an `optax.GradientTransformation` (or what acts as one, as `optax.MultiSteps`), or a function
        without arguments that returns one, which may call `est.global_step()` and `est.read_variable(name)`. Of the
        arguments that some optax updates take besides gradients, `grad` and `grad_fn` are given, and after `minimize`
        `value`, `value_fn` and `obj_fn`. Each call of one of the functions runs the model_fn again.
      name: of its entries in `State.slots`; by default "optimizer". A second one of a name gets "_1" added.
      loss_scale: for half-precision backward passes; see `est.DynamicLossScale`.
      learning_rate: a number, a function of the global step, or a scalar that the model_fn has computed. With it
        optimizer_or_fn is a function of the rate, as in `est.Optimizer(optax.adam, learning_rate=rate)`, and logs
        and summaries show the rate. Towers may compute it; if they differ, their mean counts.
    """

    def __init__(
        self,
        optimizer_or_fn: optax.GradientTransformation | Callable[..., optax.GradientTransformation],
        name: str | None = None,
        loss_scale: DynamicLossScale | None = None,
        learning_rate: LearningRate | None = None,
    ) -> None:
        if learning_rate is not None:
            optimizer_or_fn = with_learning_rate(type(self).__name__, optimizer_or_fn, learning_rate)
        if not is_transformation(optimizer_or_fn) and not callable(optimizer_or_fn):
            raise TypeError(
                f"`{type(self).__name__}` takes an optax.GradientTransformation such as `optax.adam(1e-3)`, or a "
                f"function that returns one; got {optimizer_or_fn!r}."
            )
        if not is_transformation(optimizer_or_fn):
            check_makes_optimizer(type(self).__name__, optimizer_or_fn)
        self._optimizer_or_fn = optimizer_or_fn
        self._name = name or "optimizer"
        self.loss_scale = _loss_scale.check_argument(type(self).__name__, loss_scale)
        self._learning_rate = optimizer_or_fn.learning_rate if isinstance(optimizer_or_fn, GivenRate) else None

    sums_over_towers = False
    """Whether towers may sum its gradients: true of a `TowerOptimizer`, and of one that the library makes by name."""

    def get_name(self) -> str:
        return self._name

    @property
    def transformation(self) -> optax.GradientTransformation:
        """The optax transformation that does the work; a function is called for it each time."""
        if is_transformation(self._optimizer_or_fn):
            return self._optimizer_or_fn
        transformation = self._optimizer_or_fn()
        if isinstance(transformation, Optimizer):
            transformation = transformation.transformation
        if not is_transformation(transformation):
            raise TypeError(
                f"The function given to `{type(self).__name__}` must return an optax.GradientTransformation; "
                f"it returned {transformation!r}."
            )
        return transformation

    def minimize(
        self,
        loss: jax.Array,
        *given: Any,
        var_list: Sequence[str] | None = None,
        global_step: jax.Array | None = None,
        **tensorflows: object,
    ) -> TrainOp:
        """The train_op that moves the variables against the gradient of `loss`.

        Args:
          loss: scalar array, of floats.
          *given: `global_step` and `var_list` by position, in this order as in TensorFlow, or the other way round.
          var_list: names of the variables to move; default: all trainable ones got so far in this run. Those that the
            loss does not depend on have no gradient, and stay as they are.
          global_step: `est.global_step()`, which a step advances whether it is given or not.
          **tensorflows: none; the error for one of TensorFlow's says what to write.

        Returns:
          The train_op; outside TRAIN an empty one.

        Raises:
          ValueError: the loss is not a scalar, or, in a training step, depends on none of the variables.
        """
        caller = f"{type(self).__name__}.minimize"
        check_arguments(caller, tensorflows)
        frame = current_frame(caller)
        var_list = in_order(caller, frame, given, var_list, global_step)
        if frame.mode != ModeKeys.TRAIN:
            self._note(frame, list_names(caller, frame, var_list))
            return TrainOp()
        check_is_outermost(caller, frame)
        loss = check_loss(caller, loss)
        names = check_var_list(caller, frame, var_list)
        return self._train_op(frame, loss, names)

    def compute_gradients(
        self, loss: jax.Array, var_list: Sequence[str] | None = None, *others: object, **tensorflows: object
    ) -> list[tuple[PyTree, str]]:
        """The gradients themselves, to look at or to change before `apply_gradients`.

        Within towers they are the tower's own, of its scaled loss. While a state is initialized they are zeros.

        Returns:
          A list of (gradient, variable name); a gradient has the structure of its variable, or is a
          sparse one (`est.embedding_lookup`) if the variable was read only by rows, or is None, as in TensorFlow, if
          the loss does not depend on the variable.
        """
        caller = f"{type(self).__name__}.compute_gradients"
        check_arguments(caller, dict(zip(("gate_gradients", "aggregation_method"), others, strict=False)) | tensorflows)
        frame = current_frame(caller)
        check_is_outermost(caller, frame)
        loss = check_loss(caller, loss)
        names = check_var_list(caller, frame, var_list)
        calls = frame.notes.get(GradientCalls)
        calls.count += 1
        slots = None
        # The gradients need the scale, which is in the entry that `apply_gradients` opens only later.
        if self.loss_scale:
            slots = self._next_slots(frame)
            frame.declared.reserved_slots[slots] = self
        if frame.initializing:
            gradients = zero_gradients(frame, names)
        elif calls.count <= len(calls.known):
            # The n-th call gets what was computed for the n-th one of the pass before.
            gradients = calls.known[calls.count - 1]
        else:
            # Only the caller of the model_fn can differentiate it: it computes these gradients and runs the model_fn
            # again.
            raise GradientsNeeded(loss, names, slots)
        calls.scaled.update(names)
        calls.unreached.update(name for name in names if name not in gradients)
        if self.loss_scale:
            calls.loss_scaled_by |= dict.fromkeys(names, self)
        return [(gradients.get(name), name) for name in names]

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[PyTree, str]], global_step: jax.Array | None = None, **tensorflows: object
    ) -> TrainOp:
        """The train_op that applies given gradients.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them. A variable whose gradient is None stays as it is.
          global_step: as for `minimize`.
          **tensorflows: as for `minimize`.

        Raises:
          ValueError: in one of several towers, or of several micro-batches, a gradient was taken in another way, and
            nothing says that it is scaled as the loss is: see `est.tower_gradient`. Or an optimizer with a loss scale
            has computed a gradient that another one is to apply.
        """
        caller = f"{type(self).__name__}.apply_gradients"
        check_arguments(caller, tensorflows)
        frame = current_frame(caller)
        check_global_step(caller, frame, global_step)
        pairs = [check_pair(caller, pair) for pair in grads_and_vars]
        # The slots have the variables that the loss does not depend on too: only a step finds them.
        unreached = frame.notes.get(GradientCalls).unreached
        names = tuple(name for gradient, name in pairs if gradient is not None or name in unreached)
        if frame.mode != ModeKeys.TRAIN:
            self._note(frame, names)
            return TrainOp()
        check_is_outermost(caller, frame)
        gradients: dict[str, PyTree] = {}
        for gradient, name in pairs:
            if gradient is not None:
                (name,) = check_var_list(caller, frame, (name,))
                if name in gradients:
                    raise ValueError(f"`{caller}` got the variable {name!r} twice.")
                check_gradient(caller, name, gradient, frame.variables[name])
                gradients[name] = gradient
        if not gradients:
            listed = [name for _, name in pairs]
            raise ValueError(
                f"No gradients provided for any variable: `{caller}` got None for all of {listed}. {WHY_NO_GRADIENTS}"
            )
        check_scaled(caller, frame, gradients)
        check_loss_scale(caller, frame, gradients, self)
        frame.declared.notes.get(Reached).names.update(gradients)
        train_op = self._train_op(frame, None, names)
        frame.notes.get(StepGradients).by_slots[train_op.updates[0].slots] = gradients
        return train_op

    def _train_op(self, frame: Frame, loss: jax.Array | None, names: tuple[str, ...]) -> TrainOp:
        # A learning rate that the model_fn computes is passed on with the gradients: the update is made outside of the
        # towers.
        slots, rate = self._open_slots(frame, names), to_carry(self._learning_rate)
        return TrainOp((Update(loss, names, slots, self, frame.tracing.run, learning_rate=rate),))

    # Of the state at the start of the run. It is a part of the programs of evaluation and prediction, and taken from a
    # checkpoint for them, only if the model_fn calls one of these.

    def get_slot(self, var_name: str, slot_name: str) -> PyTree | None:
        """The slot of a variable at the start of this run, such as optax.adam's "mu", or None.

        In TRAIN to be called after `minimize` or `apply_gradients`, as in TensorFlow; else see `get_state`.
        """
        for slot, by_variable in self._slot_dicts("get_slot"):
            if slot == slot_name and not isinstance(by_variable.get(var_name), optax.MaskedNode | None):
                return by_variable[var_name]
        return None

    def get_slot_names(self) -> list[str]:
        """The names of the optimizer's slots: the fields of the optax states that hold a value per variable.

        Counters are none, nor are hyperparameters as `optax.inject_hyperparams` keeps them.
        """
        return sorted({slot for slot, _ in self._slot_dicts("get_slot_names")})

    def variables(self) -> list[jax.Array]:
        """All arrays of the optimizer's state, counters included, at the start of this run."""
        return jax.tree.leaves(self._states("variables"))

    def get_state(self, var_list: Sequence[str] | None = None) -> optax.OptState | None:
        """The optax state at the start of this run, in which what belongs to variables is in dicts by their names.

        It is there in EVAL and PREDICT too, so that a model can be evaluated at another point than it is trained
        at: by `optax.contrib.schedule_free_eval_params`, or at an average that the optimizer keeps.

        >>> import estimator as est, jax, jax.numpy as jnp, optax
        >>> def model_fn(features, labels, mode):
        ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
        ...     optimizer = est.Optimizer(optax.contrib.schedule_free_sgd(0.25))
        ...     if mode != est.ModeKeys.TRAIN:
        ...         w = optax.contrib.schedule_free_eval_params(optimizer.get_state(), {"w": w})["w"]
        ...     loss = jnp.mean((w * features - labels) ** 2)
        ...     return est.EstimatorSpec(mode, predictions=w * features, loss=loss, train_op=optimizer.minimize(loss))
        >>> model = est.transform(model_fn)
        >>> x, y = jnp.ones(1), jnp.zeros(1)
        >>> state = model.init(jax.random.key(0), x, y)
        >>> for _ in range(2):
        ...     state, _ = model.train_step(state, x, y)
        >>> print(f"{state.variables['w']:.4f}", model.eval_step(state, x, y).predictions.round(4))
        0.3625 [0.375]

        In TRAIN to be called after `minimize` or `apply_gradients`; before, it is None. In EVAL and PREDICT to be
        called after the variables were got. There the optimizer is known by its name: if there are several, give each
        its own.

        Args:
          var_list: names of the variables that the optimizer trains, for EVAL and PREDICT; default: all trainable
            ones got so far in this run, or the ones of an earlier `minimize` or `apply_gradients` of the run.

        Raises:
          ValueError: it was called for several of this optimizer's train_ops at once; or, in EVAL and PREDICT, the
            state is of other variables, or another optimizer of this name was used before.
        """
        states = self._states("get_state", var_list)
        if len(states) > 1:
            raise ValueError(
                f"`{type(self).__name__}.get_state` has {len(states)} states, one for each `minimize` of "
                f"{self._name!r}. Use an optimizer of its own, with a name, for each."
            )
        if not states:
            return None
        return states[0].inner if self.loss_scale else states[0]

    def _states(self, method: str, var_list: Sequence[str] | None = None) -> list[optax.OptState]:
        frame = current_frame(f"{type(self).__name__}.{method}")
        entries = [name for name, owner in frame.declared.slot_owners.items() if owner is self]
        if frame.mode != ModeKeys.TRAIN:
            entries = entries or [self._known_by_name(frame, method, var_list)]
            for name in entries:
                self._find_or_create(frame, name)
        return [frame.slots[name] for name in entries]

    def _known_by_name(self, frame: Frame, method: str, var_list: Sequence[str] | None) -> str:
        """The entry of an optimizer whose state is read before anything else was done with it, outside of TRAIN."""
        owner = frame.declared.reserved_slots.get(self._name, frame.declared.slot_owners.get(self._name))
        if owner not in (None, self):
            raise ValueError(
                f"`{type(self).__name__}.{method}` reads the state of the optimizer {self._name!r} in mode "
                f"{str(frame.mode)!r}, where another one of this name was used before. Give each a name of its own."
            )
        frame.declared.reserved_slots[self._name] = self
        names = frame.declared.trainable_names if var_list is None else tuple(var_list)
        frame.notes.get(GradientCalls).slot_variables.setdefault(self._name, names)
        return self._name

    def _find_or_create(self, frame: Frame, name: str) -> None:
        if frame.initializing:
            if name not in frame.slots:
                check_is_known_outside(
                    f"`{type(self).__name__}.get_state`",
                    frame,
                    "outside of which the state is not known. Call it before",
                )
                names = frame.notes.get(GradientCalls).slot_variables[name]
                unknown = [n for n in names if n not in frame.variables]
                if unknown or not names:
                    raise ValueError(
                        f"The state of the optimizer {name!r} was read in mode {str(frame.mode)!r} before its "
                        f"variables {unknown or ''} were got, without which it is not known. Get all variables first."
                    )
                frame.slots[name] = self._initial(frame, names)
        elif name not in frame.slots:
            raise ValueError(
                f"The state has no slots for the optimizer {name!r}, only {sorted(frame.slots)}, but the model_fn "
                f"reads them in mode {str(frame.mode)!r}. Give the optimizer the name that it has in training."
            )

    def _note(self, frame: Frame, names: tuple[str, ...]) -> None:
        """Remembers, outside of TRAIN, which variables it trains, for those who read its state."""
        slots = self._next_slots(frame)
        frame.declared.reserved_slots.pop(slots, None)
        frame.declared.slot_owners[slots] = self
        read = frame.notes.get(GradientCalls).slot_variables.setdefault(slots, names)
        if slots in frame.slots and {*read} != {*names}:
            raise ValueError(
                f"The state of the optimizer {slots!r} was read in mode {str(frame.mode)!r} for the variables "
                f"{sorted(read)}, but it trains {sorted(names)}. Get all variables first, or name those that it "
                "trains: `get_state(var_list)`."
            )

    def _initial(self, frame: Frame, names: Sequence[str]) -> optax.OptState:
        with jax.numpy_dtype_promotion("standard"):  # as in `apply_updates`
            state = self.transformation.init({n: frame.variables[n] for n in names})
        check_initial_slots(type(self).__name__, state)
        return self.loss_scale.initial(state) if self.loss_scale else state

    def _slot_dicts(self, method: str) -> list[tuple[str, Variables]]:
        frame = current_frame(f"{type(self).__name__}.{method}")

        def is_slot(node: object) -> bool:
            return isinstance(node, dict) and all(
                frame.declared.trainable.get(name) and is_per_variable(value, frame.variables[name])
                for name, value in node.items()
            )

        slots = []
        for path, node in jax.tree_util.tree_leaves_with_path(self._states(method), is_leaf=is_slot):
            fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
            if isinstance(node, dict) and node and fields:
                slots.append((fields[-1], node))
        return slots

    def _open_slots(self, frame: Frame, names: tuple[str, ...]) -> str:
        slots = self._next_slots(frame)
        frame.declared.reserved_slots.pop(slots, None)
        frame.declared.slot_owners[slots] = self
        if frame.initializing:
            frame.slots[slots] = self._initial(frame, names)
        return slots

    def _next_slots(self, frame: Frame) -> str:
        for slots, owner in frame.declared.reserved_slots.items():
            if owner is self:
                return slots
        # Numbered in the order of calls, which is the same in each run, so that names in checkpoints do not change.
        taken = frame.declared.slot_owners.keys() | frame.declared.reserved_slots.keys()
        if self._name not in taken:
            return self._name
        return next(s for i in range(1, len(taken) + 2) if (s := f"{self._name}_{i}") not in taken)


def is_per_variable(value: PyTree, variable: PyTree) -> bool:
    """Returns whether a part of an optimizer's state belongs to a variable, or to one that `optax.masked` left out."""
    leaves, structure = jax.tree.flatten(value, is_leaf=is_masked)
    try:  # a mask may leave out a whole branch
        parts = structure.flatten_up_to(variable)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return is_masked(value)
    return all(is_masked(leaf) or jax.tree_util.all_leaves([part]) for leaf, part in zip(leaves, parts, strict=True))
