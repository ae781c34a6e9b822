"""Sources of the state of a run: memory, a checkpoint, a warm start, or initial values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

import jax
from absl import logging

from estimator.checkpoint._checkpoint import Checkpoint, NotACheckpointError
from estimator.checkpoint._checkpoints import Checkpoints
from estimator.checkpoint._model_dir import check_not_of_tensorflow
from estimator.checkpoint._newest import newest_readable
from estimator.checkpoint._shared_dir import find_shared
from estimator.core._mode_keys import ModeKeys
from estimator.core._state import State
from estimator.multihost._global_arrays import equalize_copies, is_within_reach, place
from estimator.multihost._process_group import ProcessGroup
from estimator.steps._model_info import ModelInfo
from estimator.steps._pure_steps import with_given_values
from estimator.storage._files import expand, make_absolute
from estimator.storage._sealed_folder import DamagedError

if TYPE_CHECKING:
    from estimator.checkpoint._warm_start import WarmStartReport, WarmStartSettings

T = TypeVar("T")

Init = Callable[[jax.Array], State]
"""Makes the initial state of a mode, for the batch of a run, from a key."""


class StateSource:
    """Finds the checkpoints of a model_dir, while a training run may remove some, and reads the states in them.

    Caches the newest checkpoint's state, so repeated evaluations read it once.

    Args:
      checkpoints: in the model_dir.
      seed: the seed of initial values.
      warm_start_settings: the source of initial values; if None, the initializers.

    Attributes:
      settings: `warm_start_settings`.
      warm_start_report: the report of the last warm start; None if there was none.
    """

    def __init__(
        self, model_dir: str, checkpoints: Checkpoints, seed: int, warm_start_settings: WarmStartSettings | None
    ) -> None:
        self._model_dir = model_dir
        self._checkpoints = checkpoints
        self._seed = seed
        self.settings = warm_start_settings
        self._cached: tuple[tuple[str, object], State] | None = None  # the identity of a checkpoint, and its state
        self.warm_start_report: WarmStartReport | None = None

    def find_newest(self, group: ProcessGroup, writes: bool = False) -> str | None:
        """Finds the newest checkpoint, the same in all processes; None if there is none."""
        path = find_shared(group, self._model_dir, lambda: self._checkpoints.latest(self._make_check(writes)), writes)
        if path is None:
            check_not_of_tensorflow(self._model_dir)
        return path

    def _raise_without_any(self) -> NoReturn:
        check_not_of_tensorflow(self._model_dir)
        raise ValueError(f"Could not find trained model in model_dir: {self._model_dir}. Call `train` first.")

    def find(self, checkpoint_path: str | None, group: ProcessGroup) -> str | None:
        """Finds the checkpoint at a path that a user gives; the newest one where that is None or "latest".

        Raises:
          ValueError: there is none.
        """
        if checkpoint_path not in (None, "latest"):
            self._checkpoints.finish()  # it may be the one that is being written
            checkpoint = Checkpoint(expand(checkpoint_path))
            checkpoint.check_sound()
            checkpoint.names()  # raises if it is not a checkpoint
            checkpoint.log_if_renamed()
            return checkpoint.path
        path = self.find_newest(group)
        if path is None and checkpoint_path is not None:
            self._raise_without_any()
        if path is None:
            logging.warning(
                "Could not find trained model in model_dir: %s, running initialization instead.",
                self._model_dir,
            )
        return path

    def read_state(
        self,
        mode: ModeKeys,
        path: str | None,
        checkpoint_path: str | None,
        group: ProcessGroup,
        info: ModelInfo,
        init: Init,
    ) -> tuple[State, str | None]:
        """Reads the state saved at `path`, and returns it with that path; the newest checkpoint's where the user's
        `checkpoint_path` names none and the one looked up before has been removed since, or is damaged."""
        get = functools.partial(self.get, mode, group=group, info=info, init=init)
        try:
            return get(path), path
        except (NotACheckpointError, DamagedError):
            if checkpoint_path not in (None, "latest") or group.count > 1:
                raise
        check = self._make_check(trains=False)
        found = newest_readable(self._model_dir, lambda each: (get(check(each).path), each.path))
        return found or self._raise_without_any()

    def read_newest(self, read: Callable[[Checkpoint], T]) -> T:
        """Reads the newest checkpoint that can be read; raises if there is none."""

        def read_held(each: Checkpoint) -> tuple[T]:
            with each.check_sound().hold():
                return (read(each),)

        self._checkpoints.finish()
        return (newest_readable(self._model_dir, read_held) or self._raise_without_any())[0]

    def _make_check(self, trains: bool) -> Callable[[Checkpoint], Checkpoint]:
        """Makes a function that compares the checksums of a checkpoint, unless its state is cached: then training
        compares sizes, since it reads more than the state, and other calls nothing."""

        def check(checkpoint: Checkpoint) -> Checkpoint:
            if self._cached_at(checkpoint.path) is None:
                return checkpoint.verify(slots=trains)
            return checkpoint.check_sound() if trains else checkpoint

        return check

    def get(self, mode: ModeKeys, path: str | None, group: ProcessGroup, info: ModelInfo, init: Init) -> State:
        """Reads the state saved at `path`, from the cache if possible; makes the initial state if `path` is None."""
        if path is None:
            state = init(jax.random.key(self._seed))
            if self.settings is not None:
                state = self._warm(self.settings, state, mode, info)
            # Committed to their devices like restored arrays; jax compiles again for uncommitted ones.
            return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))
        like = info.placed_state
        cached = self._find_cached(path, like, group)
        if cached is None:
            # Evaluation does not need a key of another implementation; training, which does, must not find this state.
            other_key = mode != ModeKeys.TRAIN and not Checkpoint(path).has_key_of(like)
            cached = self._restore(mode, path, like, group, jax.random.key(self._seed) if other_key else None)
            if not other_key:
                self._cached = _identity(path), cached
        return take_part(cached, like)

    def _find_cached(self, path: str, like: State, group: ProcessGroup) -> State | None:
        """The cached state of the checkpoint; None if any process has none. Then all read the checkpoint together, for
        the state is put on the devices of all processes."""
        cached = self._cached_at(path)
        serves = cached is not None and _serves(cached, like)
        return cached if all(group.all_gather(serves)) else None

    def _restore(
        self, mode: ModeKeys, path: str, like: State, group: ProcessGroup, key: jax.Array | None = None
    ) -> State:
        checkpoint = Checkpoint(path)
        with checkpoint.hold():
            state = checkpoint.restore(like, mode != ModeKeys.TRAIN, key)
            # A wait for one that reads slowly is here, where it is known for whom, and not in a collective.
            group.all_gather(None)
            return equalize_copies(state)

    def _cached_at(self, path: str) -> State | None:
        cached, identity = self._cached, _identity(path)  # another thread, which evaluates too, may change it meanwhile
        return cached[1] if cached is not None and cached[0] == identity and identity[1] is not None else None

    def take_for_training(self, path: str | None, group: ProcessGroup, info: ModelInfo, init: Init) -> State:
        """Reads the state for training, which donates its memory: a copy of one that a prediction may still read."""
        if path is not None:
            like = info.placed_state
            cached = self._find_cached(path, like, group)
            self._cached = None
            if cached is None:
                return take_part(self._restore(ModeKeys.TRAIN, path, like, group), like)
            state = take_part(cached, like)
            del cached
        else:
            state = self.get(ModeKeys.TRAIN, None, group, info, init)
        leaves, structure = jax.tree.flatten(state)
        # Without these references, the memory of each array is freed after its copy, if no prediction reads it.
        del state
        leaves.reverse()
        return jax.tree.unflatten(structure, [jax.block_until_ready(_copy(leaves.pop())) for _ in range(len(leaves))])

    def keep(self, path: str, state: State) -> None:
        """Caches the state of the checkpoint at `path`."""
        self._cached = _identity(path), state

    def _warm(self, settings: WarmStartSettings, state: State, mode: ModeKeys, info: ModelInfo) -> State:
        from estimator.checkpoint._warm_start import warm_start

        state, report = warm_start(settings, state, info.trainable, mode)
        state = with_given_values(info, state, set(report.used))
        if report != self.warm_start_report:
            logging.log(logging.WARNING if report.missing else logging.INFO, "%s", report)
        self.warm_start_report = report
        return state


def _identity(path: str) -> tuple[str, object]:
    """A key of a checkpoint, another one for each of the same name."""
    return make_absolute(path), Checkpoint(path).version


def _serves(state: State, like: State) -> bool:
    """Returns whether this process can make by itself the state `like` from a state."""
    if not (like.variables.keys() <= state.variables.keys() and like.slots.keys() <= state.slots.keys()):
        return False
    return all(map(is_within_reach, jax.tree.leaves(_part(state, like)), jax.tree.leaves(like)))


def take_part(state: State, like: State) -> State:
    """Takes the part of a state that a mode has, placed as in `like`."""
    # Programs are compiled for one structure, and training may place variables on other devices than evaluation.
    return jax.tree.map(_place, _part(state, like), like)


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


def _place(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    return array if like.sharding is None else place(array, like.sharding)


def _copy(x: jax.Array) -> jax.Array:
    """Copies an array on the same devices."""
    # For `x.copy()` XLA compiles a program for each shape.
    if x.is_fully_addressable:
        return jax.device_put(x, x.sharding, may_alias=False)
    parts = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
