"""Scripts, each run in a process of its own: a copy of one that has imported jax and the like but started nothing."""

import pathlib
import tempfile

from testing.cluster import shared_cluster

MODULE = "testing.scenarios.scripts"


def run_script(path, *args, folder, **environment):
    """What a script that ends well writes to stdout and to stderr."""
    with tempfile.TemporaryDirectory() as written:
        files = [pathlib.Path(written, name) for name in ("out", "err")]
        cluster = shared_cluster(MODULE)
        (ended,) = cluster.run(f"{MODULE}.run", *files, folder, environment, path, *args, processes=1, timeout=300)
        out, err = (file.read_text(encoding="utf-8") for file in files)
    assert ended.code == 0, err
    return out, err
