"""Reads arrays by orbax, with the settings that writing shares.

orbax takes longer to import than the rest of the package, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging as standard_logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import jax
import numpy as np
from absl import logging
from etils import epath

from estimator.runtime._uninterrupted import shield
from estimator.storage._files import is_inside, read

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    from orbax.checkpoint.metadata import ArrayMetadata

ARRAYS = "arrays"  # their folder in a checkpoint
_OF_FOLDERS = "Skipping merge of OCDBT"  # as always where each array has a folder of its own

F = TypeVar("F", bound=Callable[..., object])


def with_orbax(function: F) -> F:
    """Decorates a function that uses orbax: no signal interrupts it."""
    work = shield(function)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        # Not imported in the thread that does the work, which ends: the import starts threads and event loops.
        import orbax.checkpoint  # noqa: F401

        return work(*args, **kwargs)

    return call  # type: ignore[return-value]


def read_metadata(folder: str) -> dict[str, ArrayMetadata]:
    """Reads objects with `shape` and `dtype`, by the names of the arrays of a checkpoint in a local folder."""
    with _open_reader(folder) as (reader, arrays):
        return reader.metadata(arrays).tree


def read_arrays(folder: str, names: Collection[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of these names."""
    import orbax.checkpoint as ocp

    return _restore(folder, dict.fromkeys(names, 0), {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})


def read_on_devices(
    folder: str, like: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
    """Reads the arrays of these names, each with the sharding of its name."""
    import orbax.checkpoint as ocp

    return _restore(folder, like, {name: ocp.ArrayRestoreArgs(sharding=shardings[name]) for name in like})


def _restore(folder: str, item: Mapping[str, object], restore_args: Mapping[str, ocp.RestoreArgs]) -> dict:
    import orbax.checkpoint as ocp

    with _open_reader(folder) as (reader, arrays):
        return reader.restore(arrays, args=ocp.args.PyTreeRestore(item, restore_args, partial_restore=True))


@contextlib.contextmanager
def _open_reader(folder: str) -> Iterator[tuple[ocp.PyTreeCheckpointHandler, epath.Path]]:
    """Opens a reader of arrays; yields it with the directory that they are in."""
    with (
        quiet_orbax(),
        contextlib.closing(array_handler(processes_of(together=False))) as reader,
        plain_path(folder) as plain,
    ):
        _check_names(read(os.path.join(plain, ARRAYS, "_METADATA")))
        yield reader, epath.Path(plain) / ARRAYS


def _check_names(metadata: bytes) -> None:
    """Checks that no array is outside of the checkpoint: where it has a folder of its own, its name is a path."""
    tree = json.loads(metadata)
    if tree.get("use_ocdbt") is True:
        return
    keys = {key["key"] for entry in tree["tree_metadata"].values() for key in entry["key_metadata"]}
    if outside := [key for key in keys if not is_inside(key)]:
        raise ValueError(f"it names the array {outside[0]!r:.100}")


@contextlib.contextmanager
def plain_path(directory: str) -> Iterator[str]:
    """A path to a directory without characters that orbax or TensorStore treat in another way."""
    # orbax may read the first three as a pattern, TensorStore the last as a separator: such a path is used by a link.
    if not set("*?[\\") & set(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory() as folder:
        link = os.path.join(folder, "link")
        os.symlink(directory, link)
        yield link


def processes_of(together: bool) -> ocp.options.MultiprocessingOptions:
    """Options of orbax for all processes, which work together, or for this one alone."""
    import orbax.checkpoint as ocp

    if together or jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )


def array_handler(processes: ocp.options.MultiprocessingOptions, **options: bool) -> ocp.PyTreeCheckpointHandler:
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
        use_compression=False, type_handler_registry=registry, multiprocessing_options=processes, **options
    )


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Drops what orbax, in any of its threads, would add to the log of the run: dozens of INFO lines, and several
    tracebacks of an error that is raised anyway."""
    import orbax.checkpoint as ocp

    folder = os.path.dirname(ocp.__file__)

    def is_wanted(record: standard_logging.LogRecord) -> bool:
        is_shown = record.levelno > standard_logging.INFO and not record.exc_info
        is_shown = is_shown and _OF_FOLDERS not in str(record.msg)
        return is_shown or not record.pathname.startswith(folder)

    logger = logging.get_absl_logger()
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)
