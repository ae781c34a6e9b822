"""The numbers of TensorFlow's `tf.nn`, `tf.image`, `tf.contrib.crf` and `tf.contrib.seq2seq`, through `est`.

Those of TensorFlow 1.12, and of `tf.compat.v1` of 2.21 for what came later.
"""

import json
import pathlib

import jax
import numpy as np
import pytest
from golden import GOLDEN, close
from testing.towers import replicate, started

import estimator as est

LATER = pathlib.Path(__file__).parents[1] / "golden" / "nn_tf221.json"
CASES = GOLDEN["nn"] + json.loads(LATER.read_text())["cases"]
NAMES = [f"{i}-{case['name']}" for i, case in enumerate(CASES)]
IN_JAX = {
    "relu6": jax.nn.relu6,
    "softsign": jax.nn.soft_sign,
    "leaky_relu": lambda x: jax.nn.leaky_relu(x, 0.2),
    "selu": jax.nn.selu,
}


def array(value):
    array = np.array(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def call_of(case):
    """A function of arrays by name that calls the case's, and these arrays."""
    name = case["name"].rpartition(".")[2]
    options = {
        key: array(value) if key != "sampled_values" and np.ndim(value) > 1 else value
        for key, value in case["kwargs"].items()
    }
    options |= {key: array(options[key]) for key in ("labels",) if key in options}
    options |= {key: tuple(map(array, options[key])) for key in ("sampled_values",) if key in options}
    function = IN_JAX.get(name) or getattr(est.nn if hasattr(est.nn, name) else est.image, name)
    given = {str(i): array(value) for i, value in enumerate(case["args"])}
    given |= {key: value for key, value in options.items() if isinstance(value, np.ndarray | tuple)}

    def call(given):
        args = [given[str(i)] for i in range(len(case["args"]))]
        results = function(*args, **{key: given.get(key, value) for key, value in options.items()})
        return results if isinstance(results, tuple) else (results,)

    return call, given


@pytest.mark.quick
@pytest.mark.parametrize("towers, some", [(0, slice(None, None, 8)), (2, slice(None))], ids=["some", "all"])
def test_the_numbers_are_those_of_tensorflow(towers, some):
    """In one program; each tower has the arguments as its row of the batch."""
    cases, names = CASES[some], NAMES[some]
    calls, given = zip(*map(call_of, cases), strict=True)

    def model_fn(features, labels, mode):
        arguments = jax.tree.map(lambda x: x[0], features)
        results = [call(arguments[name]) for call, name in zip(calls, names, strict=True)]
        return est.EstimatorSpec(mode, predictions=jax.tree.map(lambda x: x[None], results))

    rows = jax.tree.map(lambda x: np.stack([x] * max(1, towers)), dict(zip(names, given, strict=True)))
    model, state = started(replicate(model_fn, towers), rows, mode="infer")
    for case, results in zip(cases, jax.device_get(model.predict_step(state, rows).predictions), strict=True):
        for got, want in zip(results, map(array, case["results"]), strict=True):
            assert got.dtype == want.dtype or got.dtype == np.int32, case["name"]
            close(got, np.stack([want] * len(got)))
