"""Learning rates in the training state, where `optax.inject_hyperparams` keeps them: read, and set from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from optax.tree_utils import tree_get_all_with_path, tree_set

from estimator.core._argument_checks import check_intervals
from estimator.core._hook import Context, Hook, RunValues
from estimator.core._state import State
from estimator.core._typing import Slots

_RATE, _VALUES, _SCHEDULES = "learning_rate", "hyperparams", "hyperparams_states"


class _Rate(NamedTuple):
    """A learning rate, and where in the slots of an optimizer it is."""

    optimizer: str
    path: jax.tree_util.KeyPath
    value: jax.Array  # a scalar, or `[towers]`
    is_schedule: bool


def learning_rates(state: State) -> dict[str, float]:
    """The learning rates of optimizers that have them as an argument, as all of `est.train`, and of those under
    `optax.inject_hyperparams`, wherever in a transformation that is.

    The last step used these; a schedule has its value there. Before the first step they are the ones it will use.
    Reading them waits for the state.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss = jnp.mean((w * features) ** 2)
    ...     optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optimizer).minimize(loss))
    >>> state = est.transform(model_fn).init(jax.random.key(0), jnp.ones(2))
    >>> est.learning_rates(state)
    {'optimizer': 0.5}

    Args:
      state: of mode "train": others have no slots. If each tower has its own optimizers (`block_sync`), the rates are
        from this process's first tower.

    Returns:
      The rates by the name of the optimizer. Several rates in one optimizer are named by their paths in a checkpoint:
      "optimizer/inner_states/head/inner_state". Others are left out.
    """
    return {name: float(_first(rate.value)) for name, rate in _find(state.slots).items()}


def set_learning_rate(state: State, name: str, value: float) -> State:
    """The state with another learning rate, from its next step on, without another compilation.

    >>> import estimator as est, jax, jax.numpy as jnp, optax
    >>> def model_fn(features, labels, mode):
    ...     w = est.get_variable("w", (), initializer=jax.nn.initializers.ones)
    ...     loss = jnp.mean(w * features)
    ...     optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optimizer).minimize(loss))
    >>> model, x = est.transform(model_fn), jnp.ones(2)
    >>> state = est.set_learning_rate(model.init(jax.random.key(0), x), "optimizer", 0.25)
    >>> model.train_step(state, x)[0].variables["w"].item()
    0.75

    Args:
      state: of mode "train"; it stays as it is.
      name: one of `est.learning_rates(state)`.
      value: the rate, of at least 0. It gets the dtype and the placement of the one before; of several processes
        each gives the same value.

    Raises:
      ValueError: there is no such rate; the optimizer is not under `optax.inject_hyperparams`; the rate is a schedule,
        or the argument of an `est.Optimizer`, which the program gives in each step; the value is not a finite number
        of at least 0.
    """
    return state._replace(slots=set_rate("est.set_learning_rate", state.slots, name, value))


class SetLearningRateHook(Hook):
    """Sets learning rates of optimizers under `optax.inject_hyperparams`, every N steps.

    A schedule within the program is better for what is known beforehand. This is for what comes from outside: a file, a
    notebook, a search. The rates hold from the step after, and are saved with the checkpoint of the step: a run that
    resumes from there is the same as one that was not interrupted. Nothing is compiled again, and nothing waits.

    A hook of your own sets a rate by `context.set_learning_rate(name, value)`.

    >>> rates = {"optimizer": 1e-3}  # to be changed during the run
    >>> hook = SetLearningRateHook(rates, every_n_steps=100)
    >>> hook = SetLearningRateHook(lambda step: {"optimizer": 0.1 if step < 1000 else 0.01})

    Args:
      rates: rates by their names in `est.learning_rates(state)`, read each time; or a function of the number of steps
        done that returns such a dict, or None to leave all as they are. Of several processes, process 0 decides.
      every_n_steps: they are set when the number of steps done is a multiple of it; the rates of a dict are also set
        when a run starts, at any step.

    Raises:
      TypeError: `rates`, or what it returns, is neither.
      ValueError: `every_n_steps` is not positive; what `est.set_learning_rate` raises.
    """

    def __init__(
        self, rates: Mapping[str, float] | Callable[[int], Mapping[str, float] | None], every_n_steps: int = 100
    ) -> None:
        check_intervals("SetLearningRateHook", every_n_steps=every_n_steps)
        if not isinstance(rates, Mapping) and not callable(rates):
            raise TypeError(
                "SetLearningRateHook takes a dict of learning rates by name, or a function of the step that returns "
                f'one: `SetLearningRateHook({{"optimizer": 1e-3}})`; got {rates!r}.'
            )
        self._rates = rates
        self._every = every_n_steps

    def after_create_state(self, context: Context) -> None:
        # Rates from a checkpoint would otherwise hold until the next multiple of N.
        if isinstance(self._rates, Mapping) or context.global_step % self._every == 0:
            self._set(context)

    def next_step(self, step: int) -> int:
        return step + self._every - step % self._every

    def after_run(self, context: Context, values: RunValues) -> None:
        if context.global_step % self._every == 0:
            self._set(context)

    def get_state(self) -> Any:
        """None; but a hook that overrides this is called before the one that saves."""

    def _set(self, context: Context) -> None:
        step = context.global_step
        rates = self._rates if isinstance(self._rates, Mapping) else self._rates(step)
        if rates is not None and not isinstance(rates, Mapping):
            raise TypeError(
                f"The function given to SetLearningRateHook returned {rates!r} at step {step}. It returns a dict of "
                'learning rates by name, such as {"optimizer": 1e-3}, or None.'
            )
        # All processes use the rates of process 0: a function may read a clock or a file.
        for name, value in context.agreed(lambda: dict(rates or {})).items():
            context.set_learning_rate(name, value)


def read_rates(slots: Slots) -> dict[str, Any]:
    """The rates in slots, which may be traced, by the names of `learning_rates`: scalars, or `[towers]` where each
    tower has its own."""
    return {name: rate.value for name, rate in _find(slots).items()}


def set_rate(caller: str, slots: Slots, name: str, value: float) -> Slots:
    """The slots with another rate; see `set_learning_rate`, which `caller` names in errors."""
    rates = _find(slots)
    call = f"`{caller}({name!r}, {value!r})`"
    if name in slots and all(rate.optimizer != name for rate in rates.values()):
        raise ValueError(
            f"{call}: the optimizer {name!r} has no learning rate in its state. Write "
            "`optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)` instead of `optax.adam(1e-3)`."
        )
    if name not in rates:
        raise ValueError(f"{call}: there is no such learning rate, only {sorted(rates)}.")
    rate = rates[name]
    if rate.is_schedule:
        raise ValueError(
            f"{call}: this learning rate is a schedule, or the argument of an optimizer, which the program gives in "
            "each step. Write `est.Optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=1e-3))` to set it from "
            "outside."
        )
    array = rate.value
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{call}: this learning rate was made as {array.dtype}; give a float: `learning_rate=1.0`.")
    number = _finite(value, array.dtype)
    if number is None:
        raise ValueError(f"{call}: a learning rate is a finite number of at least 0, as {array.dtype} too.")
    new = jax.lax.full_like(array, number)  # on the devices of the one before, for which programs are compiled
    changed = tree_set(slots[rate.optimizer], lambda path, _: path == rate.path, **{_RATE: new})
    return {**slots, rate.optimizer: changed}


def _find(slots: Slots) -> dict[str, _Rate]:
    rates = []
    for optimizer, state in slots.items():
        # A path of one key is a slot that is itself called "learning_rate".
        entries = [(path, value) for path, value in tree_get_all_with_path(state, _RATE) if len(path) > 1]
        schedules = {path[:-2] for path, _ in entries if getattr(path[-2], "name", None) == _SCHEDULES}
        for path, value in entries:
            # The last two keys are a field of optax's state and the name in its dict; the others lead to that state.
            if getattr(path[-2], "name", None) == _VALUES and jnp.ndim(value) <= 1:
                rates.append(_Rate(optimizer, path, value, path[:-2] in schedules))
    names = rate_names((rate.optimizer, map(spell_key, rate.path[:-2])) for rate in rates)
    return dict(zip(names, rates, strict=True))


def find_saved_rates(slots: Iterable[str]) -> dict[str, str]:
    """The arrays of rates among the names of slots in a checkpoint, by the names of `learning_rates`."""
    end = f"/{_VALUES}/{_RATE}"
    arrays = sorted(name for name in slots if name.endswith(end))
    places = [name.removesuffix(end).split("/") for name in arrays]
    return dict(zip(rate_names((optimizer, rest) for optimizer, *rest in places), arrays, strict=True))


def rate_names(places: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """The optimizer's name, or the full path where it has several rates."""
    places = list(places)
    count = Counter(optimizer for optimizer, _ in places)
    return [optimizer if count[optimizer] == 1 else "/".join([optimizer, *rest]) for optimizer, rest in places]


def spell_key(key: Any) -> str:
    """A part of a path as a checkpoint spells it."""
    return next(str(getattr(key, kind)) for kind in ("name", "key", "idx") if hasattr(key, kind))


def _first(value: jax.Array) -> np.ndarray:
    # Not `value[0]`: of several processes, another one may have the first tower.
    return np.ravel(value.addressable_shards[0].data if isinstance(value, jax.Array) else value)[0]


def _finite(value: float, dtype: np.dtype) -> np.ndarray | None:
    array = np.asarray(value)
    if array.ndim or not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return None
    # A number that is too large for the dtype becomes an infinity, which is refused below.
    with np.errstate(over="ignore"):
        array = array.astype(dtype)
    return array if np.isfinite(array) and array >= 0 else None
