"""What tests have compiled, shared by all processes of a run of pytest: its workers, and those that they fork.

jax's compilation cache writes entries in place. Here each is written under another name and renamed, so that a process
reads all of it or nothing, also where the writer is killed.
"""

import os
import pathlib
import shutil
import tempfile

import jax
from etils import epath

SCHEME = "renamed://"
FOLDER = "COMPILED_BY_TESTS"  # in the environment


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
        return self.path.read_bytes()

    def write_bytes(self, value: bytes) -> None:
        handle, partial = tempfile.mkstemp(dir=self.path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(value)
        os.replace(partial, self.path)


def make_folder() -> bool:
    """Makes the folder for this process and those that it starts; False if it has one from its parent."""
    if FOLDER in os.environ:
        return False
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="compiled-by-tests-")
    return True


def remove_folder() -> None:
    shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


def use_folder() -> None:
    """Lets jax read and write the shared programs, where there are any."""
    if FOLDER in os.environ:
        jax.config.update("jax_compilation_cache_dir", SCHEME + os.environ[FOLDER])
        jax.config.update("jax_persistent_cache_enable_xla_caches", "")  # of GPUs, which differ by process
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
