"""How orbax writes and reads a checkpoint: a flat dict of arrays in one directory.

orbax takes longer to import than the rest of the package, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import functools
import logging as standard_logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import jax
import numpy as np
from absl import logging

from estimator.runtime._uninterrupted import uninterrupted

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    from orbax.checkpoint.metadata import ArrayMetadata

F = TypeVar("F", bound=Callable[..., object])

METADATA_FILE = "_METADATA"


def with_orbax(function: F) -> F:
    """The function, uninterrupted, once orbax is imported by the thread that calls it.

    Not by the thread that does the work, which ends: what orbax imports starts threads and event loops.
    """
    work = uninterrupted(function)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        import orbax.checkpoint  # noqa: F401

        return work(*args, **kwargs)

    return call  # type: ignore[return-value]


class ArrayStore:
    """The arrays in one directory, open for reading or writing (see `open_arrays`)."""

    def __init__(self, path: str, checkpointer: ocp.Checkpointer) -> None:
        self._path = os.path.abspath(path)
        self._checkpointer = checkpointer

    def metadata(self) -> dict[str, ArrayMetadata]:
        """Objects with `shape` and `dtype`, by the names of the arrays."""
        return self._checkpointer.metadata(self._path).item_metadata.tree

    def read(self, names: Collection[str]) -> dict[str, np.ndarray]:
        import orbax.checkpoint as ocp

        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return self._restore(dict.fromkeys(names, 0), as_numpy)

    def read_on_devices(
        self, like: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, jax.sharding.Sharding]
    ) -> dict[str, jax.Array]:
        import orbax.checkpoint as ocp

        return self._restore(like, {name: ocp.ArrayRestoreArgs(sharding=shardings[name]) for name in like})

    def write(self, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
        import orbax.checkpoint as ocp

        # force: something that is not a checkpoint may be in the way.
        self._checkpointer.save(self._path, args=ocp.args.PyTreeSave(arrays), force=True)

    def _restore(self, item: Mapping[str, object], restore_args: Mapping[str, ocp.RestoreArgs]) -> dict:
        import orbax.checkpoint as ocp

        args = ocp.args.PyTreeRestore(item, restore_args, partial_restore=True)
        return self._checkpointer.restore(self._path, args=args)


@contextlib.contextmanager
def open_arrays(path: str, together: bool = False) -> Iterator[ArrayStore]:
    """Opens the directory at `path`.

    Args:
      path: the directory.
      together: whether all processes write it together. Otherwise each process works for itself.
    """
    import orbax.checkpoint as ocp

    processes = ocp.options.MultiprocessingOptions()
    if not together and jax.process_count() > 1:
        me = jax.process_index()
        processes = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
        )
    with (
        _quiet_orbax(),
        ocp.Checkpointer(_handler(processes), multiprocessing_options=processes) as checkpointer,
    ):
        yield ArrayStore(path, checkpointer)


def write_behind(path: str, arrays: Mapping[str, jax.Array | np.ndarray], copied: Callable[[], object]) -> None:
    """Writes arrays into the directory at `path`, in a single process, from a copy of them in the host's memory.

    On a GPU orbax makes the copy. On CPU devices it refers to the memory of the arrays, which XLA then does not donate:
    the program that would have used it again takes other memory.

    Args:
      path: the directory, which appears when it is whole.
      arrays: what to write.
      copied: called once there is a copy; from then on a program may donate the memory of the arrays.
    """
    import orbax.checkpoint as ocp

    processes = ocp.options.MultiprocessingOptions()
    # Otherwise two saves at a time, of two Estimators, could wait for each other's directories.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    with (
        _quiet_orbax(),
        ocp.AsyncCheckpointer(
            _handler(processes), async_options=options, multiprocessing_options=processes
        ) as checkpointer,
    ):
        # force: something that is not a checkpoint may be in the way.
        checkpointer.save(os.path.abspath(path), args=ocp.args.PyTreeSave(arrays), force=True)
        copied()
        checkpointer.wait_until_finished()


def _handler(processes: ocp.options.MultiprocessingOptions) -> ocp.PyTreeCheckpointHandler:
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    # Replica-parallel writing cuts a replicated array into a piece per device: with 8 devices that
    # doubles the time of a small save, and the first one compiles the cuts for half a second.
    registry = type_handlers.create_type_handler_registry(
        (jax.Array, type_handlers.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, type_handlers.NumpyHandler()),
    )
    # Compressing weights takes three times as long as writing them, and a second copy of them, for 8 % of the bytes.
    return ocp.PyTreeCheckpointHandler(
        use_compression=False, type_handler_registry=registry, multiprocessing_options=processes
    )


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Drops what orbax, in any of its threads, would add to the log of the run: dozens of INFO lines, and several
    tracebacks of an error that is raised anyway."""
    import orbax.checkpoint as ocp

    folder = os.path.dirname(ocp.__file__)

    def is_wanted(record: standard_logging.LogRecord) -> bool:
        is_shown = record.levelno > standard_logging.INFO and not record.exc_info
        return is_shown or not record.pathname.startswith(folder)

    logger = logging.get_absl_logger()
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)
