"""Programs that tests have compiled, for all processes of a run of pytest, and for the next runs in this checkout.

jax's compilation cache writes entries in place. Here each is written under another name and renamed, so that a process
reads all of it or nothing, also where the writer is killed. What no run has read for a week is removed.
"""

import contextlib
import os
import pathlib
import tempfile
import time

import jax
from etils import epath

SCHEME = "renamed://"
FOLDER = "COMPILED_BY_TESTS"  # in the environment
WEEK = 7 * 24 * 3600


@epath.register_path_cls(SCHEME)
class Renamed:
    """A path, with as much of pathlib as jax's cache uses."""

    def __init__(self, address: str):
        self.path = pathlib.Path(address.removeprefix(SCHEME))

    def __str__(self) -> str:
        return SCHEME + str(self.path)

    def joinpath(self, *names: str) -> "Renamed":
        return Renamed(str(self.path.joinpath(*names)))

    __truediv__ = joinpath

    def mkdir(self, **options: bool) -> None:
        self.path.mkdir(**options)

    def exists(self) -> bool:
        return self.path.exists()

    def read_bytes(self) -> bytes:
        os.utime(self.path)  # when it was last used
        return self.path.read_bytes()

    def write_bytes(self, value: bytes) -> None:
        handle, partial = tempfile.mkstemp(dir=self.path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(value)
        os.replace(partial, self.path)


def make_folder(folder: pathlib.Path) -> None:
    """Makes this the folder of this process and those that it starts, unless it has one from its parent."""
    if FOLDER not in os.environ:
        with contextlib.suppress(PermissionError):  # of a checkout that can only be read: then nothing is shared
            folder.mkdir(parents=True, exist_ok=True)
            remove_old(folder)
            os.environ[FOLDER] = str(folder)


def remove_old(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # removed by another run
            if path.stat().st_mtime < time.time() - WEEK:
                path.unlink()


def use_folder() -> None:
    """Lets jax read and write the shared programs, where there are any."""
    if FOLDER in os.environ:
        jax.config.update("jax_compilation_cache_dir", SCHEME + os.environ[FOLDER])
        jax.config.update("jax_persistent_cache_enable_xla_caches", "")  # of GPUs, which differ by process
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
