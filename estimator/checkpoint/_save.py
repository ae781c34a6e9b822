"""Writes a checkpoint by orbax's `AsyncCheckpointer`, to a disk or to a store, and removes old ones.

A kill at any time leaves no half of a checkpoint under the name of one. On a disk:

    ckpt-7.unfinished/          made and marked; the next save removes it, and only folders that are marked so
    ckpt-7.unfinished/ckpt-7/   written by orbax, then the manifest, then all of it is synced
    ckpt-7/                     renamed: from here on it is one
    ckpt-7.removed/             renamed back before its files go

A store has no renames, and orbax cannot write to it: the checkpoint is written here, and uploaded. The file that says
that it is whole is uploaded last and removed first, so that what a killed process leaves does not have it.

Several processes make a copy of the state together, while each of them waits. After it they may train: their threads
write, and agree through a `ProcessGroup` of their own: a collective would come between different steps in each process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from estimator.checkpoint._checkpoint import PIN, UNFINISHED, WHOLE_FILE, Checkpoint
from estimator.checkpoint._model_dir import list_folders, remove_leftovers
from estimator.checkpoint._orbax import ARRAYS, array_handler, plain_path, processes_of, quiet_orbax
from estimator.checkpoint._retention import remove_old
from estimator.multihost._global_arrays import gather_on_chief
from estimator.multihost._process_group import ProcessGroup, SingleProcess
from estimator.storage._files import is_url, rename
from estimator.storage._folders import upload
from estimator.storage._sealed_folder import MANIFEST, MARK, SealedFolder

_MOST_BYTES_TO_HOLD = 1 << 26


def save_checkpoint(
    path: str,
    arrays: Mapping[str, jax.Array | np.ndarray],
    host: dict[str, Any],
    keep_max: int | None = None,
    keep_every_n_hours: float | None = None,
    copied: Callable[[], object] = lambda: None,
    group: ProcessGroup | None = None,
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
      group: the processes that write it together; if None, only this one does. To a store, from the disks of their
        own, process 0 writes for all.
    """
    group = group or SingleProcess()
    saved = Checkpoint(path if is_url(path) else os.path.abspath(path))
    if not is_url(path):
        _save_on_disk(saved, arrays, host, copied, group)
    else:
        if group.count > 1:
            arrays = gather_on_chief(arrays)
            copied()
        group.broadcast_from_chief(lambda: _save_in_store(saved, arrays, host, copied))
    group.broadcast_from_chief(lambda: remove_old(saved, keep_max, keep_every_n_hours))


def hold_arrays(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array] | None:
    """The same arrays on CPU devices, in the same memory, which XLA then does not donate; None on other devices, and
    for many bytes, since the first step takes other memory then."""
    on_cpus = all(device.platform == "cpu" for x in arrays.values() for device in x.devices())
    if not on_cpus or jax.process_count() > 1 or sum(x.nbytes for x in arrays.values()) > _MOST_BYTES_TO_HOLD:
        return None

    def hold(x: jax.Array) -> jax.Array:
        parts = [jax.device_put(np.asarray(shard.data), shard.device) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

    return {name: hold(x) for name, x in arrays.items()}


def _save_on_disk(
    saved: Checkpoint,
    arrays: Mapping[str, jax.Array | np.ndarray],
    host: dict[str, Any],
    copied: Callable[[], object],
    group: ProcessGroup,
    folder_per_array: bool = False,
) -> None:
    """Writes a checkpoint on a disk.

    Args:
      folder_per_array: whether a part of the checkpoint can be copied, for those who need a part of its arrays.
    """
    path = saved.path
    unfinished = SealedFolder(path + UNFINISHED)
    written = Checkpoint(unfinished.file(os.path.basename(path)))

    def put_in_place() -> None:
        # Mark, manifest and sync come before the rename: what has the name is complete, also after a crash of the
        # machine.
        written.mark()
        written.seal(without=(PIN,))
        if os.path.isdir(path):
            saved.check_place()
            saved.remove()
        rename(written.path, path)

    with contextlib.ExitStack() as stack:
        if group.index == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            remove_leftovers(os.path.dirname(path))
            unfinished.make()
            # After an error of one array, TensorStore may still write others, and make the folders for them again.
            stack.callback(unfinished.empty)
        with quiet_orbax(), plain_path(unfinished.path) as folder:
            _write(os.path.join(folder, os.path.basename(path)), arrays, host, copied, group, not folder_per_array)
        group.broadcast_from_chief(put_in_place)
        stack.pop_all()
    if group.index == 0:
        unfinished.remove_files()


def _save_in_store(
    saved: Checkpoint, arrays: Mapping[str, jax.Array | np.ndarray], host: dict[str, Any], copied: Callable[[], object]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        local = Checkpoint(os.path.join(folder, os.path.basename(saved.path)))
        _save_on_disk(local, arrays, host, copied, SingleProcess(), folder_per_array=True)
        # A checkpoint that is replaced is removed right before the upload: until then a kill does not change it.
        for each in list_folders(os.path.dirname(saved.path)):
            if each == saved or (each.is_own() and not each.exists()):
                each.check_place()
                each.remove()
        upload(local.path, saved.path, first=(MARK,), last=(MANIFEST, WHOLE_FILE))


def _write(
    path: str,
    arrays: Mapping[str, jax.Array | np.ndarray],
    host: dict[str, Any],
    copied: Callable[[], object],
    group: ProcessGroup,
    use_ocdbt: bool,
) -> None:
    import orbax.checkpoint as ocp

    processes = processes_of(together=group.count > 1)
    # orbax would make directories in threads that know saves by one number of the process: of two saves at a time, of
    # two Estimators, one would wait for the directories of the other, or write before its own are there.
    options = ocp.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=Barrier(group))
    registry = ocp.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.PyTreeSave, array_handler(processes, use_ocdbt=use_ocdbt))
    handler = ocp.CompositeCheckpointHandler(
        handler_registry=registry,
        composite_options=ocp.CompositeOptions(async_options=options, multiprocessing_options=processes),
    )
    # A time limit would go by the wall clock, which may be set meanwhile.
    no_limit = int(threading.TIMEOUT_MAX)
    with ocp.AsyncCheckpointer(
        handler, no_limit, async_options=options, multiprocessing_options=processes
    ) as checkpointer:
        args = ocp.args.Composite(**{ARRAYS: ocp.args.PyTreeSave(arrays)})
        checkpointer.save(path, args=args, custom_metadata=host, force=True)
        copied()


class Barrier:
    """Barrier of the threads that commit. One that waits sees that another process has died, failed or hangs."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        keys = self._group.all_gather(key)
        if len(set(keys)) > 1:
            raise RuntimeError(f"The processes wait at different places of a save: {keys}.")
