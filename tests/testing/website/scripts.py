"""Scripts, each run in a process of its own: a copy of one that has imported jax and the like but started nothing."""

import atexit
import functools
import pathlib
import tempfile

from testing.processes import Processes


@functools.cache
def shared_processes():
    """One for all tests of this process, since its start takes seconds."""
    processes = Processes("testing.scenarios.scripts")
    atexit.register(processes.close)
    return processes


def run_script(path, *args, folder, **environment):
    """What a script that ends well writes to stdout and to stderr."""
    with tempfile.TemporaryDirectory() as written:
        files = [pathlib.Path(written, name) for name in ("out", "err")]
        shared_processes().start("run", *map(str, files), str(folder), environment, str(path), *args)
        code = shared_processes().ended()
        out, err = (file.read_text(encoding="utf-8") for file in files)
    assert code == 0, err
    return out, err
