"""Writes a checkpoint by orbax's `CheckpointManager`.

It is written in a folder `ckpt-<step>.unfinished` beside its place and then renamed, and renamed again before it is
removed, so a directory with the name of a checkpoint is always complete. What a killed process has left is removed by
the next save, if a file in it says that an Estimator has made it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from estimator.checkpoint._checkpoint_dir import (
    ARRAYS,
    PIN,
    UNFINISHED,
    check_place,
    name_of,
    named_step,
    remove,
    remove_leftovers,
)
from estimator.checkpoint._orbax import array_handler, plain_path, processes_of, quiet_orbax
from estimator.checkpoint._retention import remove_old
from estimator.multihost._collective_call import run_on_chief
from estimator.storage._files import rename
from estimator.storage._manifest import write_manifest
from estimator.storage._own_folders import make_own, mark_own, remove_own

if TYPE_CHECKING:
    from etils import epath
    from orbax.checkpoint.path.step import Metadata


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
    path = os.path.abspath(path)
    unfinished = path + UNFINISHED
    processes = processes_of(together)

    def put_in_place() -> None:
        written = os.path.join(unfinished, os.path.basename(path))
        mark_own(written)
        write_manifest(written, without=(PIN,))
        if os.path.isdir(path):
            check_place(path)
            remove(path)
        rename(written, path)
        remove_old(path, keep_max, keep_every_n_hours)

    with contextlib.ExitStack() as stack:
        if jax.process_index() == processes.primary_host:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            remove_leftovers(os.path.dirname(path))
            make_own(unfinished)
            stack.callback(remove_own, unfinished)
        with quiet_orbax(), plain_path(unfinished) as folder:
            _write(folder, named_step(path), arrays, host, copied, processes, use_ocdbt=not folder_per_array)
        if together:
            run_on_chief("save", put_in_place)
        else:
            put_in_place()


def _write(
    folder: str,
    step: int,
    arrays: Mapping[str, jax.Array | np.ndarray],
    host: dict[str, Any],
    copied: Callable[[], object],
    processes: Any,
    use_ocdbt: bool,
) -> None:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        step_name_format=_Names(),
        create=False,
        # Threads that commit for several processes would wait for one that has died; collectives fail at once.
        enable_async_checkpointing=jax.process_count() == 1,
        # Otherwise two saves at a time, of two Estimators, could wait for each other's directories.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        multiprocessing_options=processes,
    )
    registry = ocp.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.PyTreeSave, array_handler(processes, use_ocdbt=use_ocdbt))
    with ocp.CheckpointManager(folder, options=options, handler_registry=registry) as manager:
        args = ocp.args.Composite(**{ARRAYS: ocp.args.PyTreeSave(arrays)})
        manager.save(step, args=args, custom_metadata=host, force=True)
        copied()


@dataclasses.dataclass(frozen=True)
class _Names:
    """The `NameFormat` of orbax: how checkpoints are named; it sees none of those that are there."""

    def build_name(self, step: int) -> str:
        return name_of(step)

    def find_all(self, base_path: epath.Path) -> Iterator[Metadata]:
        return iter(())

    def find_step(self, base_path: epath.Path, step: int) -> Metadata:
        import orbax.checkpoint as ocp

        return ocp.path.step.Metadata(step, base_path / name_of(step))
