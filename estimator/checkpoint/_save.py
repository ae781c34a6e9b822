"""Writes a checkpoint by orbax's `CheckpointManager`, to a disk or to a store, and removes old ones.

A kill at any time leaves no half of a checkpoint under the name of one. On a disk:

    ckpt-7.unfinished/          made and marked; the next save removes it, and only folders that are marked so
    ckpt-7.unfinished/ckpt-7/   written by orbax, then the manifest, then all of it is synced
    ckpt-7/                     renamed: from here on it is one
    ckpt-7.removed/             renamed back before its files go

A store has no renames, and orbax cannot write to it: the checkpoint is written here, and uploaded. The file that says
that it is whole is uploaded last and removed first, so that what a killed process leaves does not have it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from estimator.checkpoint._checkpoint import PIN, UNFINISHED, WHOLE_FILE, Checkpoint, name_of
from estimator.checkpoint._model_dir import list_folders, remove_leftovers
from estimator.checkpoint._orbax import ARRAYS, array_handler, plain_path, processes_of, quiet_orbax
from estimator.checkpoint._retention import remove_old
from estimator.multihost._collective_call import run_on_chief
from estimator.multihost._global_arrays import gather_on_chief
from estimator.storage._files import is_url, rename
from estimator.storage._folders import upload
from estimator.storage._manifest import MANIFEST, write_manifest
from estimator.storage._own_folders import MARK, is_own, make_own, mark_own, remove_own

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
) -> None:
    """Writes a checkpoint from a copy of arrays in the host's memory, and removes old ones once it is there.

    On a GPU orbax makes the copy. On CPU devices it refers to the memory of the arrays, which XLA then does not donate:
    the program that would have used it again takes other memory.

    Args:
      path: of the checkpoint, or its URL.
      arrays: what to write.
      host: what to save beside them, as JSON.
      keep_max, keep_every_n_hours: which checkpoints to keep, as in `Checkpoints`.
      copied: called once there is a copy; from then on a program may donate the memory of the arrays.
      together: whether all processes write it together. Otherwise this one does it alone. To a store, from the disks of
        their own, process 0 writes for all.
    """
    saved = Checkpoint(path if is_url(path) else os.path.abspath(path))

    def finish() -> None:
        remove_old(saved, keep_max, keep_every_n_hours)

    if not is_url(path):
        _save_on_disk(saved, arrays, host, copied, finish, together)
    elif together and jax.process_count() > 1:
        arrays = gather_on_chief(arrays)
        copied()
        run_on_chief("save", lambda: _save_in_store(saved, arrays, host, copied, finish))
    else:
        _save_in_store(saved, arrays, host, copied, finish)


def _save_on_disk(
    saved: Checkpoint,
    arrays: Mapping[str, jax.Array | np.ndarray],
    host: dict[str, Any],
    copied: Callable[[], object],
    finish: Callable[[], None],
    together: bool,
    folder_per_array: bool = False,
) -> None:
    """Writes a checkpoint on a disk.

    Args:
      finish: called when the checkpoint is in its place.
      folder_per_array: whether a part of the checkpoint can be copied, for those who need a part of its arrays.
    """
    path = saved.path
    unfinished = path + UNFINISHED
    processes = processes_of(together)

    def put_in_place() -> None:
        written = os.path.join(unfinished, os.path.basename(path))
        # Mark, manifest and sync come before the rename: what has the name is complete, also after a crash of the
        # machine. Old checkpoints are removed only after it.
        mark_own(written)
        write_manifest(written, without=(PIN,))
        if os.path.isdir(path):
            saved.check_place()
            saved.remove()
        rename(written, path)
        finish()

    with contextlib.ExitStack() as stack:
        if jax.process_index() == processes.primary_host:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            remove_leftovers(os.path.dirname(path))
            make_own(unfinished)
            stack.callback(remove_own, unfinished)
        with quiet_orbax(), plain_path(unfinished) as folder:
            _write(folder, saved.named_step, arrays, host, copied, processes, use_ocdbt=not folder_per_array)
        if together:
            run_on_chief("save", put_in_place)
        else:
            put_in_place()


def _save_in_store(
    saved: Checkpoint,
    arrays: Mapping[str, jax.Array | np.ndarray],
    host: dict[str, Any],
    copied: Callable[[], object],
    finish: Callable[[], None],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        local = Checkpoint(os.path.join(folder, os.path.basename(saved.path)))
        _save_on_disk(local, arrays, host, copied, lambda: None, together=False, folder_per_array=True)
        # A checkpoint that is replaced is removed right before the upload: until then a kill does not change it.
        for each in list_folders(os.path.dirname(saved.path)):
            if each == saved or (is_own(each.path) and not each.exists()):
                each.check_place()
                each.remove()
        upload(local.path, saved.path, first=(MARK,), last=(MANIFEST, WHOLE_FILE))
    finish()


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
    """The `NameFormat` of orbax: names checkpoints. It finds none of those that are there, so orbax removes none."""

    def build_name(self, step: int) -> str:
        return name_of(step)

    def find_all(self, base_path: epath.Path) -> Iterator[Metadata]:
        return iter(())

    def find_step(self, base_path: epath.Path, step: int) -> Metadata:
        import orbax.checkpoint as ocp

        return ocp.path.step.Metadata(step, base_path / name_of(step))
