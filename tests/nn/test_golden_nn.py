"""The numbers that TensorFlow 1.12's `tf.nn`, `tf.contrib.crf` and `tf.contrib.seq2seq` gave, through `est.nn`."""

import jax
import numpy as np
import pytest
from golden import GOLDEN, close
from testing.towers import replicate, started

import estimator as est

CASES = GOLDEN["nn"]
IN_JAX = {
    "relu6": jax.nn.relu6,
    "softsign": jax.nn.soft_sign,
    "leaky_relu": lambda x: jax.nn.leaky_relu(x, 0.2),
    "selu": jax.nn.selu,
}


def array(value):
    array = np.array(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


@pytest.mark.parametrize("towers", [0, 4])
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{i}-{case['name']}" for i, case in enumerate(CASES)])
def test_the_numbers_are_those_of_tensorflow(number, towers):
    """On towers each one has the arguments as its row of the batch."""
    case = CASES[number]
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

    def model_fn(features, labels, mode):
        results = call({key: value[0] for key, value in features.items()})
        return est.EstimatorSpec(mode, predictions=[result[None] for result in results])

    if towers:
        rows = {key: np.stack([value] * towers) for key, value in given.items()}
        model, state = started(replicate(model_fn, towers), rows, mode="infer")
        results = model.predict_step(state, rows).predictions
        wanted = [np.stack([array(want)] * towers) for want in case["results"]]
    else:
        results, wanted = call(given), [array(want) for want in case["results"]]
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == want.dtype or got.dtype == np.int32
        close(got, want)
