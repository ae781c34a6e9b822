"""The numbers that TensorFlow's `tf.nn`, `tf.contrib.crf` and `tf.contrib.seq2seq` gave, through `est.nn`.

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
    options = {key: array(value) if np.ndim(value) > 1 else value for key, value in case["kwargs"].items()}
    options |= {key: array(options[key]) for key in ("labels",) if key in options}
    function = IN_JAX.get(name) or getattr(est.nn, name)
    given = {str(i): array(value) for i, value in enumerate(case["args"])}
    given |= {key: value for key, value in options.items() if isinstance(value, np.ndarray)}

    def call(given):
        args = [given[str(i)] for i in range(len(case["args"]))]
        results = function(*args, **{key: given.get(key, value) for key, value in options.items()})
        return results if isinstance(results, tuple) else (results,)

    return call, given


def assert_numbers(results, wanted):
    for got, want in zip(results, map(array, wanted), strict=True):
        assert got.dtype == want.dtype or got.dtype == np.int32
        close(got, want)


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_numbers_are_those_of_tensorflow(case):
    call, given = call_of(case)
    assert_numbers(call(given), case["results"])


@pytest.mark.slow
def test_towers_give_the_numbers_of_all_cases():
    """In one program; each tower has the arguments as its row of the batch."""
    calls, given = zip(*map(call_of, CASES), strict=True)

    def model_fn(features, labels, mode):
        arguments = jax.tree.map(lambda x: x[0], features)
        results = [call(arguments[name]) for call, name in zip(calls, NAMES, strict=True)]
        return est.EstimatorSpec(mode, predictions=jax.tree.map(lambda x: x[None], results))

    rows = jax.tree.map(lambda x: np.stack([x] * 4), dict(zip(NAMES, given, strict=True)))
    model, state = started(replicate(model_fn, 4), rows, mode="infer")
    for case, results in zip(CASES, model.predict_step(state, rows).predictions, strict=True):
        for tower in range(4):
            assert_numbers([result[tower] for result in jax.device_get(results)], case["results"])
