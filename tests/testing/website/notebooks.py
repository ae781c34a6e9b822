"""Runs a notebook of examples/notebooks/, and keeps what its cells print and show.

python tests/testing/website/notebooks.py examples/notebooks/*.ipynb
"""

import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]


def execute(notebook):
    """Runs all cells of a notebook, in an empty folder."""
    import nbclient

    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute(env=env)


def run(path: pathlib.Path):
    """The notebook after a run of all its cells; those have no log lines, no bars and no counts of executions."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    execute(notebook)
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr" and not is_bar(each)]
            for each in cell.outputs:
                if "execution_count" in each:
                    each.execution_count = None
                if "image/png" in each.get("data", ()):
                    each.data.pop("text/plain", None)  # a path in the folder
    notebook.metadata.pop("widgets", None)
    return notebook


def is_bar(output) -> bool:
    return "application/vnd.jupyter.widget-view+json" in output.get("data", ())


def printed(notebook) -> list[str]:
    """What each code cell has printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(each["text"] for each in cell.outputs if each.output_type == "stream") for cell in cells]


if __name__ == "__main__":
    import nbformat

    for each in map(pathlib.Path, sys.argv[1:]):
        nbformat.write(run(each), each)
