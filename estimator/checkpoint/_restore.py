"""Sources of the state of a run: memory, a checkpoint, a warm start, or initial values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from absl import logging

from estimator.checkpoint import _checkpoints
from estimator.checkpoint._checkpoint_dir import kept, written_ns
from estimator.checkpoint._warm_start import WarmStartReport, WarmStartSettings, warm_start
from estimator.core._mode_keys import ModeKeys
from estimator.core._state import State
from estimator.core._typing import Features, Labels
from estimator.multihost._global_arrays import equalize_copies, is_within_reach, place
from estimator.multihost._process_group import ProcessGroup
from estimator.optim._moving_average import at_averages
from estimator.steps._transform import Model
from estimator.storage._files import absolute
from estimator.variables._variables import map_named


class StateSource:
    """The states of a model, for the batches and the mode of a run.

    Caches the newest checkpoint's state, so repeated evaluations read it once.

    Args:
      model: the model.
      seed: the seed of initial values.
      warm_start_settings: the source of initial values; None: the initializers.

    Attributes:
      settings: `warm_start_settings`.
      warm_start_report: the report of the last warm start; None if there was none.
    """

    def __init__(self, model: Model, seed: int, warm_start_settings: WarmStartSettings | None) -> None:
        self._model = model
        self._seed = seed
        self.settings = warm_start_settings
        self._cached: tuple[tuple[str, int], State] | None = None  # the identity of a checkpoint, and its state
        self.warm_start_report: WarmStartReport | None = None

    def get(
        self, mode: ModeKeys, path: str | None, group: ProcessGroup, features: Features, labels: Labels = None
    ) -> State:
        """The state saved at `path`, from the cache if possible; the initial state if `path` is None.

        If any process of the `group` has dropped its cache, for a prediction, all of them read the checkpoint together.
        """
        if path is None:
            state = self._model.init(jax.random.key(self._seed), features, labels, mode=mode)
            if self.settings is not None:
                state = self._warm(self.settings, state, mode, features, labels)
            # Committed to their devices like restored arrays; jax compiles again for uncommitted ones.
            return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))
        like = self._model.abstract_init(features, labels, mode=mode)
        cached = self._cached  # another thread, which evaluates too, may change it meanwhile
        is_cached = cached is not None and cached[0] == _identity(path) and _serves(cached[1], like)
        if not all(group.all_gather(is_cached)):
            with kept(path):
                state = equalize_copies(_checkpoints.restore(path, like, partial=mode != ModeKeys.TRAIN))
                cached = self._cached = _identity(path), state
        assert cached is not None
        return _as_wanted(cached[1], like)

    def is_cached(self, path: str) -> bool:
        """Whether the state of the checkpoint at `path` is in memory."""
        cached, identity = self._cached, _identity(path)
        return cached is not None and cached[0] == identity

    def take_for_training(self, path: str | None, group: ProcessGroup, features: Features, labels: Labels) -> State:
        """A copy for training, which donates its memory; a prediction may still read the original."""
        state = self.get(ModeKeys.TRAIN, path, group, features, labels)
        self._cached = None
        leaves, structure = jax.tree.flatten(state)
        del state  # so that the memory of each array is free once it is copied
        leaves.reverse()
        return jax.tree.unflatten(structure, [jax.block_until_ready(_copied(leaves.pop())) for _ in range(len(leaves))])

    def for_evaluation(self, state: State, features: Features, labels: Labels) -> State:
        """The state of a running training in the form that evaluation takes."""
        return _as_wanted(state, self._model.abstract_init(features, labels, mode=ModeKeys.EVAL))

    def for_export(self, state: State, features: Features) -> State:
        """A state of PREDICT, with moving averages in place of the variables where they are read so."""
        averages = self._model.traits(features, mode=ModeKeys.PREDICT).averages
        return state._replace(variables=at_averages(averages, state.variables))

    def keep(self, path: str, state: State) -> None:
        """Caches the state of the checkpoint at `path`."""
        self._cached = _identity(path), state

    def _warm(
        self, settings: WarmStartSettings, state: State, mode: ModeKeys, features: Features, labels: Labels
    ) -> State:
        info = self._model.traits(features, labels, mode)
        state, report = warm_start(settings, state, info.trainable, mode)
        state = _with_averages(state, info.averages, report)
        if report != self.warm_start_report:
            logging.log(logging.WARNING if report.missing else logging.INFO, "%s", report)
        self.warm_start_report = report
        return state


def _with_averages(state: State, averages: dict[str, tuple[str, bool]], report: WarmStartReport) -> State:
    """The state with averages that begin as their variables do, where the warm start has changed those alone."""

    def taken(name: str) -> bool:
        arrays: set[str] = set()
        map_named(lambda array, _: arrays.add(array), {name: state.variables[name]})
        return not arrays.isdisjoint(report.used)

    new = {
        average: jax.tree.map(lambda x, like: jnp.array(x, like.dtype), state.variables[name], state.variables[average])
        for average, (name, _) in averages.items()
        if taken(name) and not taken(average)
    }
    return state._replace(variables={**state.variables, **new})


def _identity(path: str) -> tuple[str, int]:
    """Differs between two checkpoints of the same name."""
    return absolute(path), written_ns(path)


def _serves(state: State, like: State) -> bool:
    """Whether this process alone can make the state `like` from a state."""
    if not (like.variables.keys() <= state.variables.keys() and like.slots.keys() <= state.slots.keys()):
        return False
    return all(map(is_within_reach, jax.tree.leaves(_part(state, like)), jax.tree.leaves(like)))


def _as_wanted(state: State, like: State) -> State:
    """The part of a state that a mode has, placed as in `like`: programs are compiled for one structure, and training
    may place variables elsewhere than evaluation reads them."""
    return jax.tree.map(_placed, _part(state, like), like)


def _part(state: State, like: State) -> State:
    for name, slots in like.slots.items():
        trained, read = jax.tree.structure(state.slots[name]), jax.tree.structure(slots)
        if trained != read:  # type: ignore[operator]
            raise ValueError(
                f"The model_fn reads the state of the optimizer {name!r} for other variables than it trains: training "
                f"has the state {trained}, but the model_fn reads {read}. Get all variables first, or name "
                "the trained ones: `get_state(var_list)`."
            )
    return state._replace(
        variables={name: state.variables[name] for name in like.variables},
        slots={name: state.slots[name] for name in like.slots},
    )


def _placed(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    return array if like.sharding is None else place(array, like.sharding)


def _copied(x: jax.Array) -> jax.Array:
    """A copy on the same devices. For `x.copy()` XLA compiles a program for each shape."""
    return jax.device_put(x, x.sharding, may_alias=False) if x.is_fully_addressable else x.copy()
