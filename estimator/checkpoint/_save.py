"""Writes a checkpoint, and removes old ones, by orbax's `CheckpointManager`.

A checkpoint is written under another name and then renamed, and renamed into the folder `removed` before it is removed,
so a directory with the name of a checkpoint is always complete. What a killed process has left unfinished is removed by
the next save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils import epath

from estimator.checkpoint._checkpoint_dir import (
    ARRAYS,
    NotACheckpointError,
    checkpoints_in,
    is_pinned,
    locked,
    name_of,
    step_of,
)
from estimator.checkpoint._orbax import array_handler, processes_of, quiet_orbax

if TYPE_CHECKING:
    from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext, PreservationPolicy
    from orbax.checkpoint.path.step import Metadata

_REMOVED = "removed"  # a folder in the model_dir


def save_checkpoint(
    path: str,
    arrays: Mapping[str, jax.Array | np.ndarray],
    host: dict[str, Any],
    keep_max: int | None = None,
    keep_every_n_hours: float | None = None,
    copied: Callable[[], object] = lambda: None,
    together: bool = True,
    folder_per_array: bool = False,
) -> None:
    """Writes a checkpoint from a copy of arrays in the host's memory, and removes old ones once it is on disk.

    On a GPU orbax makes the copy. On CPU devices it refers to the memory of the arrays, which XLA then does not donate:
    the program that would have used it again takes other memory.

    Args:
      path: of the checkpoint.
      arrays: what to write.
      host: what to save beside them, as JSON.
      keep_max, keep_every_n_hours: which checkpoints to keep, as in `Checkpoints`.
      copied: called once there is a copy; from then on a program may donate the memory of the arrays.
      together: whether all processes write it together. Otherwise this one does it alone.
      folder_per_array: whether a part of the checkpoint can be copied, for those who need a part of its arrays.
    """
    import orbax.checkpoint as ocp

    directory = epath.Path(os.path.abspath(path)).parent
    processes = processes_of(together)
    is_chief = jax.process_index() == processes.primary_host
    if is_chief:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _REMOVED).rmtree(missing_ok=True)
    with quiet_orbax(), contextlib.ExitStack() as locks:
        options = ocp.CheckpointManagerOptions(
            step_name_format=_Names(lists=bool(keep_max)),
            preservation_policy=preservation(
                os.fspath(directory), keep_max, keep_every_n_hours, locks if is_chief else None
            ),
            todelete_subdir=_REMOVED,
            cleanup_tmp_directories=True,
            create=False,
            # Threads that commit for several processes would wait for one that has died; collectives fail at once.
            enable_async_checkpointing=jax.process_count() == 1,
            # Otherwise two saves at a time, of two Estimators, could wait for each other's directories.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            multiprocessing_options=processes,
        )
        registry = ocp.DefaultCheckpointHandlerRegistry()
        registry.add(ARRAYS, ocp.args.PyTreeSave, array_handler(processes, use_ocdbt=not folder_per_array))
        with ocp.CheckpointManager(os.fspath(directory), options=options, handler_registry=registry) as manager:
            args = ocp.args.Composite(**{ARRAYS: ocp.args.PyTreeSave(arrays)})
            manager.save(step_of(path), args=args, custom_metadata=host, force=True)
            copied()
    if is_chief:
        (directory / _REMOVED).rmtree(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class _Names:
    """The `NameFormat` of orbax: how checkpoints are named and listed.

    `lists`: whether orbax is to see those that are there. It reads the time of each, which nobody needs who keeps all.
    """

    lists: bool

    def build_name(self, step: int) -> str:
        return name_of(step)

    def find_all(self, base_path: epath.Path) -> Iterator[Metadata]:
        return (self.find_step(base_path, step_of(path)) for path in checkpoints_in(os.fspath(base_path)) if self.lists)

    def find_step(self, base_path: epath.Path, step: int) -> Metadata:
        import orbax.checkpoint as ocp

        return ocp.path.step.Metadata(step, base_path / name_of(step))


def preservation(
    directory: str, keep_max: int | None, keep_every_n_hours: float | None, locks: contextlib.ExitStack | None
) -> PreservationPolicy:
    """Which checkpoints stay, as in `Checkpoints`; `locks` is as in `_Preservation`."""
    from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSeconds, LatestN

    newest = LatestN(keep_max or None)
    policies = [newest] if keep_every_n_hours is None else [newest, EveryNSeconds(keep_every_n_hours * 3600)]
    return _Preservation(directory, AnyPreservationPolicy(policies), locks)


@dataclasses.dataclass(frozen=True)
class _Preservation:
    """The `PreservationPolicy` of orbax: what a policy keeps, what is pinned, and what is being read.

    Checkpoints that it lets go of stay locked until they are removed, so that nobody begins to read one. Without
    `locks`, in a process that removes none, it keeps all.
    """

    directory: str
    policy: PreservationPolicy
    locks: contextlib.ExitStack | None

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> list[bool]:
        keeps = self.policy.should_preserve(checkpoints, context=context)
        return [keep or self._is_used(info.step) for keep, info in zip(keeps, checkpoints, strict=True)]

    def _is_used(self, step: int) -> bool:
        path = os.path.join(self.directory, name_of(step))
        if self.locks is None or is_pinned(path):
            return True
        try:
            self.locks.enter_context(locked(path, exclusive=True))
        except (BlockingIOError, NotACheckpointError):
            return True
        return False
