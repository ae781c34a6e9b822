"""Reads the arrays of a checkpoint by orbax, with the settings that saving shares.

orbax takes longer to import than the rest of the package, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import functools
import logging as standard_logging
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import jax
import numpy as np
from absl import logging
from etils import epath

from estimator.checkpoint._checkpoint_dir import ARRAYS, forget_copies, kept, local_copy
from estimator.checkpoint._named_arrays import SLOT_PREFIX
from estimator.runtime._uninterrupted import shield
from estimator.storage._manifest import DamagedCheckpointError, check_sums, explain_errors

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    from orbax.checkpoint.metadata import ArrayMetadata

_OF_FOLDERS = "Skipping merge of OCDBT"  # as always where each array has a folder of its own
_CHUNK = re.compile(r"(.*)/\d{1,9}(\.\d{1,9})*")  # a file with numbers of an array, in the array's folder

F = TypeVar("F", bound=Callable[..., object])


def with_orbax(function: F) -> F:
    """The function, uninterrupted, once orbax is imported by the thread that calls it.

    Not by the thread that does the work, which ends: what orbax imports starts threads and event loops.
    """
    work = shield(function)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        import orbax.checkpoint  # noqa: F401

        return work(*args, **kwargs)

    return call  # type: ignore[return-value]


def array_metadata(path: str) -> dict[str, ArrayMetadata]:
    """Objects with `shape` and `dtype`, by the names of the arrays of the checkpoint at `path`."""
    with _reader(path, ()) as (reader, arrays):
        return reader.metadata(arrays).tree


def read_arrays(path: str, names: Collection[str]) -> dict[str, np.ndarray]:
    """The arrays of these names."""
    import orbax.checkpoint as ocp

    return _restore(path, dict.fromkeys(names, 0), {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})


def read_on_devices(
    path: str, like: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
    """The arrays of these names, each with the sharding of its name."""
    import orbax.checkpoint as ocp

    return _restore(path, like, {name: ocp.ArrayRestoreArgs(sharding=shardings[name]) for name in like})


def _restore(path: str, item: Mapping[str, object], restore_args: Mapping[str, ocp.RestoreArgs]) -> dict:
    import orbax.checkpoint as ocp

    with _reader(path, item) as (reader, arrays):
        return reader.restore(arrays, args=ocp.args.PyTreeRestore(item, restore_args, partial_restore=True))


@contextlib.contextmanager
def _reader(path: str, names: Collection[str]) -> Iterator[tuple[ocp.PyTreeCheckpointHandler, epath.Path]]:
    """What reads these arrays of the checkpoint at `path`, and the directory that they are in."""
    folders = {f"{ARRAYS}/{name}" for name in names}
    local = _fetch(path, lambda name: (chunk := _CHUNK.fullmatch(name)) is None or chunk[1] in folders)
    with (
        quiet_orbax(),
        contextlib.closing(array_handler(processes_of(together=False))) as reader,
        plain_path(local) as folder,
        explain_errors(path),
    ):
        yield reader, epath.Path(folder) / ARRAYS


def verify(path: str, slots: bool = True) -> None:
    """Compares the checksums of a checkpoint; of one in a store that a run without `slots` reads, not of those.

    Raises:
      DamagedCheckpointError: they are not those that were written.
    """
    with kept(path):
        _fetch(path, lambda name: slots or not name.startswith(f"{ARRAYS}/{SLOT_PREFIX}"))


def _fetch(path: str, wants: Callable[[str], bool]) -> str:
    """A local folder with these files of a checkpoint, which are those that were written."""
    copy = local_copy(path)
    copy.fetch(wants)
    try:
        check_sums(path, copy.path, wants)
    except DamagedCheckpointError:
        forget_copies()
        raise
    return os.path.abspath(copy.path)


@contextlib.contextmanager
def plain_path(directory: str) -> Iterator[str]:
    """A path to a directory without the characters that orbax takes for a pattern, or TensorStore for a separator:
    through a link, where it has any."""
    if not set("*?[\\") & set(directory):
        yield directory
        return
    with tempfile.TemporaryDirectory() as folder:
        link = os.path.join(folder, "link")
        os.symlink(directory, link)
        yield link


def processes_of(together: bool) -> ocp.options.MultiprocessingOptions:
    """All processes, working together; or this one, for itself."""
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
