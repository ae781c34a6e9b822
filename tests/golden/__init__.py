"""The numbers of TensorFlow 1.12's optimizers, schedules and pieces of `tf.nn`, and how near others have to be."""

import json
import pathlib

import numpy as np

GOLDEN = json.loads((pathlib.Path(__file__).parent / "optimizers_tf112.json").read_text())


def close(actual, desired):
    """Asserts that all differ by 1e-6 at most, relatively above 1."""
    actual, desired = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
    scale = np.maximum(1, np.abs(desired))
    np.testing.assert_allclose(actual / scale, desired / scale, rtol=0, atol=1e-6)
