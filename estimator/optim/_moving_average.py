"""Moving averages of variables, and of values such as losses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from estimator.core._frame import Frame, ScopeDefaults, current_frame, run_store
from estimator.core._mode_keys import ModeKeys
from estimator.core._train_op import TrainOp
from estimator.core._typing import PyTree, Variables
from estimator.variables._aggregation import VariableAggregation
from estimator.variables._variable_scope import VariableScope, variable_scope
from estimator.variables._variables import assign, get_variable, map_named, read, resolve

_NO_SCOPE = VariableScope("", None, ScopeDefaults())


class ExponentialMovingAverage:
    """Keeps moving averages of variables, and of values such as losses, as `tf.train.ExponentialMovingAverage`.

    After the optimizers of a step, each average becomes `decay * average + (1 - decay) * variable`. An average is a
    variable that is not trained, such as "dense/kernel/ExponentialMovingAverage", and begins as its variable does. It
    is in checkpoints, on towers the same for all, and a step that is skipped for a gradient that is not finite leaves
    it as it is. With `block_sync` it is of the global variables, which change at the end of a block, and moves in each
    step.

    What was

        with tf.control_dependencies([train_op]):
            train_op = ema.apply(tf.trainable_variables())

    is `train_op = est.group(train_op, ema.apply(est.trainable_variables()))`.

    An average of 16-bit floats is kept in float32, which a slow one needs.

    To evaluate, predict and export with the averages in place of the variables, give `eval_with_averages=True`, and
    call `apply` in every mode, so before a `return` for one of them:

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     averages = est.ExponentialMovingAverage(0.5, eval_with_averages=True).apply(est.trainable_variables())
    ...     if mode == est.ModeKeys.PREDICT:
    ...         return est.EstimatorSpec(mode, predictions=w * features)
    ...     loss = jnp.mean(w * features)
    ...     train_op = est.group(est.Optimizer(optax.sgd(1.0)).minimize(loss), averages)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> model, x = est.transform(model_fn), jnp.ones(2)
    >>> state, _ = model.train_step(model.init(jax.random.key(0), x), x)
    >>> print(state.variables["w"], state.variables["w/ExponentialMovingAverage"])
    0.0 0.5
    >>> print(model.predict_step(state, x).predictions)
    [0.5 0.5]

    Args:
      decay: between 0 and 1, often 0.999 or 0.9999.
      num_updates: the number of updates so far, such as `est.global_step()`, an integer or a scalar. With it the decay
        is `min(decay, (1 + num_updates) / (10 + num_updates))`, so that averages move faster in the beginning.
      zero_debias: whether averages of values are divided by `1 - decay**steps`, so that the zero they begin with has no
        part in them. It has no effect on averages of variables, as in TensorFlow.
      name: of the averages, the end of their names.
      eval_with_averages: whether the model_fn reads the average instead of the variable in EVAL and PREDICT, and so in
        exports. Without it they are read by `average`.

    Raises:
      TypeError, ValueError: an argument is of another type, or the decay is not between 0 and 1.
    """

    def __init__(
        self,
        decay: float,
        num_updates: Any = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
        *,
        eval_with_averages: bool = False,
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise ValueError(f"`est.ExponentialMovingAverage` needs a decay between 0 and 1, a number; got {decay!r}.")
        if not isinstance(name, str) or not name:
            raise TypeError(f"`est.ExponentialMovingAverage` needs a name, a string; got {name!r}.")
        if num_updates is not None and not isinstance(num_updates, int) and getattr(num_updates, "shape", None) != ():
            raise ValueError(
                "`est.ExponentialMovingAverage` needs the number of updates as `num_updates`, a scalar such as "
                f"`est.global_step()`; got {num_updates!r}."
            )
        self._decay = float(decay)
        self._num_updates = num_updates
        self._name = name
        self._zero_debias = zero_debias
        self._eval_with_averages = eval_with_averages

    @property
    def name(self) -> str:
        return self._name

    def apply(self, var_list: Iterable[str | jax.Array] | None = None) -> TrainOp:
        """A train_op that moves the averages, to be joined with the optimizer's by `est.group`.

        Averages of variables move after all optimizers of the step, whatever the order in the group is.

        The average of a value, an array that the model_fn has computed, begins at zero as in TensorFlow. It is a
        variable too, which `apply` assigns, so that on towers it is of the mean of the towers' values: of a mean loss
        this is the whole batch's value, of a sum it is not. In EVAL it can be read, and stays as training left it:

        >>> import estimator as est, jax, jax.numpy as jnp, optax
        >>> def model_fn(features, labels, mode):
        ...     loss = jnp.mean((features * est.get_variable("w", ()) - labels) ** 2)
        ...     loss_averages = est.ExponentialMovingAverage(0.9, name="avg")
        ...     loss_averages_op = loss_averages.apply([loss])
        ...     est.summary.scalar("loss", loss_averages.average(loss))
        ...     train_op = est.group(est.Optimizer(optax.sgd(0.1)).minimize(loss), loss_averages_op)
        ...     return est.EstimatorSpec(mode, loss=loss, train_op=train_op)
        >>> model, x = est.transform(model_fn), jnp.ones(2)
        >>> state, spec = model.train_step(model.init(jax.random.key(0), x, x), x, x)
        >>> bool(jnp.isclose(state.variables["value/avg"], 0.1 * spec.loss))
        True

        Args:
          var_list: names of variables that this run has got, and values; default: all trainable variables got so far.
            The average of a value is called "value/ExponentialMovingAverage", in the scopes around the call, of further
            ones "value_1/...": give the same values in the same order in every mode.

        Returns:
          The train_op. Outside of TRAIN it does nothing, and the averages are there to be read. Averages of values
          move without it.

        Raises:
          TypeError: an array holds integers, is the value of a trainable variable, or the list is not one of these.
          ValueError: the run has no variable of one of the names, or it has an average already; so has a value.
        """
        caller = "ExponentialMovingAverage.apply"
        frame = current_frame(caller)
        if var_list is None:
            var_list = frame.declared.trainable_names
        given = [var_list] if isinstance(var_list, str | jax.Array) else list(var_list)
        if isinstance(var_list, str | jax.Array) or not all(isinstance(each, str | jax.Array) for each in given):
            raise TypeError(
                f"`{caller}` needs a list of names of variables, such as `est.trainable_variables()`, or of values, "
                f"such as `[loss]`; got {var_list!r}."
            )
        if not given:
            raise ValueError(f"`{caller}` got no variables to average; create them before the call.")
        for value in given:
            if isinstance(value, jax.Array):
                self._assign_average_of(caller, frame, value)
        names = [each for each in given if isinstance(each, str)]
        pairs = []
        for name in (resolve(caller, frame, name) for name in names):
            value, average = frame.variables[name], self.average_name(name)
            if average in frame.declared.trainable:
                raise ValueError(
                    f"`{caller}`: {name!r} has an average already, the variable {average!r}. Call `apply` once, or "
                    "give the second one another `name`."
                )
            if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(value)):
                raise TypeError(
                    f"`{caller}`: {name!r} holds integers or booleans, which have no average. Leave it out."
                )
            # The name of the average contains the full name of its variable.
            with variable_scope(_NO_SCOPE):
                get_variable(average, initializer=lambda key, value=value: wide(value), trainable=False)
            # An average is computed from its variable, element by element, so it is cut over devices as that is.
            frame.declared.partitions |= {
                (average, *path): axis for (full, *path), axis in frame.declared.partitions.items() if full == name
            }
            frame.declared.notes.get(Averages)[average] = (name, self._eval_with_averages)
            pairs.append((name, average))
        if frame.mode != ModeKeys.TRAIN:
            return TrainOp()
        count = None
        if self._num_updates is not None:
            count = jnp.stack([jnp.asarray(self._num_updates, jnp.float32), jnp.float32(1)])
        return TrainOp(moves=(AverageUpdate(tuple(pairs), self._decay, count),))

    def _assign_average_of(self, caller: str, frame: Frame, value: jax.Array) -> None:
        """Makes the average of a value, and moves it."""
        for name, variable in frame.variables.items():
            if any(leaf is value for leaf in jax.tree.leaves(variable)):
                raise TypeError(f"`{caller}` needs the name of a variable; got the value of {name!r}.")
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            raise TypeError(f"`{caller}` got a value of {value.dtype}, which has no average. Leave it out.")
        if self._name_of_average(value) is not None:
            raise ValueError(f"`{caller}` got a value that has an average already: {value!r}. Call `apply` once.")
        names = ("/".join((*frame.scope, f"value_{i}" if i else "value")) for i in itertools.count())
        average = next(name for name in map(self.average_name, names) if name not in frame.declared.trainable)
        self._values().append((value, average))
        # As in TensorFlow, averages of values start at zero, and averages of variables at the variable.
        zeros = functools.partial(get_variable, initializer=jax.nn.initializers.zeros, trainable=False)
        value, step_size = wide(value), _step_size(self._decay, self._num_updates)
        with variable_scope(_NO_SCOPE):
            old = zeros(average, value.shape, value.dtype)
            if not self._zero_debias:
                return assign(average, _move_average(step_size, value, old))
            biased, steps = f"{average}/biased", f"{average}/local_step"
            new = _move_average(step_size, value, zeros(biased, value.shape, value.dtype))
            count = zeros(steps, (), aggregation=VariableAggregation.ONLY_FIRST_TOWER) + 1
            assign(biased, new)
            assign(steps, count)
            # 1 - decay**count, which in float32 has few digits left where the decay is near to 1
            assign(average, new / -jnp.expm1(count * jnp.log1p(-jnp.float32(step_size))).astype(new.dtype))

    def _name_of_average(self, value: jax.Array) -> str | None:
        return next((name for own, name in self._values() if own is value), None)

    def _values(self) -> list[tuple[jax.Array, str]]:
        """The values that `apply` got in this run, and the names of their averages."""
        return run_store(self, list)

    def average(self, var_name: str | jax.Array) -> PyTree | None:
        """The average of a variable, or of a value, at the start of this run; None if `apply` was not called for it.

        Args:
          var_name: the name of a variable that this run has got, or the very array that `apply` got.
        """
        frame = current_frame("ExponentialMovingAverage.average")
        if isinstance(var_name, jax.Array):
            name = self._name_of_average(var_name)
            return None if name is None else frame.variables[name]
        average = self.average_name(resolve("ExponentialMovingAverage.average", frame, var_name))
        return read(frame, average) if average in frame.declared.notes.get(Averages) else None

    def average_name(self, var_name: str) -> str:
        """The name of the average of a variable, in checkpoints and for `est.read_variable`.

        >>> import estimator as est
        >>> est.ExponentialMovingAverage(0.99).average_name("dense/kernel")
        'dense/kernel/ExponentialMovingAverage'
        """
        return f"{var_name}/{self._name}"

    def variables_to_restore(self, moving_avg_variables: Iterable[str] | None = None) -> dict[str, str]:
        """An assignment_map for `est.init_from_checkpoint`, by which variables begin with their averages there.

        Args:
          moving_avg_variables: the names of variables that have averages there; default: all trainable ones got so far
            in this run. All other variables of the run begin with their own values there.
        """
        frame = current_frame("ExponentialMovingAverage.variables_to_restore")
        if moving_avg_variables is None:
            moving_avg_variables = frame.declared.trainable_names
        averaged = set(moving_avg_variables)
        averages = frame.declared.notes.get(Averages)
        others = [name for name in frame.declared.trainable if name not in averages]
        return {self.average_name(name) if name in averaged else name: name for name in others}


class Averages(dict[str, tuple[str, bool]]):
    """The averages of a model: by name, the name of the variable, and whether the average is read in its place."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AverageUpdate:
    """One call of `ExponentialMovingAverage.apply`; a `Move`.

    Attributes:
      names: pairs of the names of a variable and of its average.
      decay: between 0 and 1.
      count: `[num_updates, 1]`, which makes the decay smaller in the beginning; the second entry counts the parts that
        were summed, so that sum/parts is the number again. If None, the decay stays as it is.
    """

    names: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})
    decay: float = dataclasses.field(metadata={"static": True})
    count: jax.Array | None = None

    def apply(self, before: Variables, after: Variables) -> Variables:
        step_size = _step_size(self.decay, None if self.count is None else self.count[0] / self.count[1])
        return {
            average: jax.tree.map(functools.partial(_move_average, step_size), wide(after[name]), before[average])
            for name, average in self.names
        }


def check_averages_move(train_op: TrainOp, frame: Frame) -> None:
    """Raises a ValueError if the train_op of a spec lacks what `apply` returned, or all else.

    Args:
      frame: of the run, at its end.
    """
    moves = [move for move in train_op.moves if isinstance(move, AverageUpdate)]
    moving = {average for move in moves for _, average in move.names}
    unmoved = [name for name in frame.declared.notes.get(Averages) if name not in moving]
    optimizers = list(frame.declared.slot_owners)
    if unmoved or (moving and optimizers and not train_op.updates):
        what = f"the averages {unmoved}" if unmoved else f"the optimizers {optimizers}"
        raise ValueError(
            f"The train_op of the EstimatorSpec leaves out {what}. Join what `ExponentialMovingAverage.apply` returns "
            "with the other one: `est.group(train_op, ema.apply(est.trainable_variables()))`."
        )


def _step_size(decay: float, num_updates: Any) -> Any:
    return 1 - (decay if num_updates is None else jnp.minimum(decay, (1 + num_updates) / (10 + num_updates)))


def _move_average(step_size: Any, value: jax.Array, average: jax.Array) -> jax.Array:
    """TensorFlow's formula: the average of a constant is that constant, which rounding spoils in the sum of products
    that `optax.incremental_update` computes."""
    return average - (average - value) * jnp.asarray(step_size, average.dtype)


def wide(variable: PyTree) -> PyTree:
    """The values of a variable in the dtype of their average, which needs more digits than 16 bits have."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x, variable)


def variables_to_read(averages: Averages, mode: ModeKeys, variables: Variables) -> Variables:
    """The variables as a model_fn reads them in a mode: outside of TRAIN, averages in place of the variables that they
    are of, where that is wanted."""
    if mode == ModeKeys.TRAIN:
        return variables
    # The average of 16-bit floats is wider; the model_fn reads the dtype that its variable has.
    instead = {
        name: jax.tree.map(lambda x, like: x.astype(like.dtype), variables[average], variables[name])
        for average, (name, is_read) in averages.items()
        if is_read
    }
    return {**variables, **instead}


def check_averages_read(by_mode: Mapping[ModeKeys, tuple[Averages, Variables]]) -> None:
    """Raises a ValueError if training makes averages to evaluate with, and another mode does not have them.

    Args:
      by_mode: the averages and the variables of a model_fn in some modes.
    """
    in_training = by_mode[ModeKeys.TRAIN][0] if ModeKeys.TRAIN in by_mode else {}
    for mode, (averages, variables) in by_mode.items():
        missing = [name for name, (_, is_read) in in_training.items() if is_read and name not in averages]
        unread = [name for name in (in_training[average][0] for average in missing) if name in variables]
        if unread:
            raise ValueError(
                f"`est.ExponentialMovingAverage(..., eval_with_averages=True)` averages {unread} in training, but in "
                f"mode {str(mode)!r} `apply` is not called for them, so that the variables themselves would be read. "
                "Call it in every mode: before the model_fn returns for one of them."
            )


def begin_averages(averages: Averages, variables: Variables, given: set[str]) -> Variables:
    """The variables with averages that begin as their variables do, where those alone were given other values.

    Args:
      given: the names of the arrays with other values.
    """

    def is_given(name: str) -> bool:
        arrays: set[str] = set()
        map_named(lambda array, _: arrays.add(array), {name: variables[name]})
        return not arrays.isdisjoint(given)

    new = {
        # Copies: a training step donates the state, in which no two arrays may share memory.
        average: jax.tree.map(lambda x, like: jnp.array(x, like.dtype), variables[name], variables[average])
        for average, (name, _) in averages.items()
        if is_given(name) and not is_given(average)
    }
    return {**variables, **new}
