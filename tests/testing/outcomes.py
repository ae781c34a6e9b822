"""What came of processes that a test has started: their ends, what they printed as JSON, and what they wrote."""

import json
import os

import numpy as np

from testing.cluster import shared_cluster


def run(function, *args, processes=2):
    """Runs "module.function" in processes, all of which end well; returns what each has said."""
    return said_by(shared_cluster().run(function, *args, processes=processes))


def said_by(ended):
    """What processes that have ended well have said."""
    for i, process in enumerate(ended):
        assert process.code == 0, f"process {i} ended with {process.code}:\n" + "\n".join(process.lines)
    return [said(process.lines) for process in ended]


def said(lines):
    return [json.loads(line) for line in lines if line.startswith("{")]


def merged(rows):
    """What was said under different names, as one dict; of what was said several times, a list."""
    lists = {}
    for row in rows:
        for name, value in row.items():
            lists.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in lists.items()}


def read(folder, processes, index, name):
    """What `testing.scenarios.team.write` wrote."""
    with np.load(os.path.join(folder, f"{name}-{processes}-{index}.npz")) as arrays:
        return dict(arrays)


def assert_law(folder, name, processes=2):
    """Every process has computed what one alone does."""
    want = read(folder, 1, 0, name)
    for i in range(processes):
        got = read(folder, processes, i, name)
        assert got.keys() == want.keys()
        for key in want:
            np.testing.assert_allclose(got[key], want[key], rtol=2e-5, atol=2e-6, err_msg=f"{name} of {i}: {key}")
