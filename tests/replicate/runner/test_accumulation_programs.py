"""Gradient accumulation: traces, collectives and memory of the compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.programs import collectives, operations
from testing.towers import regression, replicate

import estimator as est
from replicate import TowerOptimizer

WIDTH, LAYERS = 256, 3
GRADIENTS = LAYERS * WIDTH * WIDTH * 4  # bytes


def wide_model_fn(steps, weighted=False, traces=None):
    def model_fn(features, labels, mode):
        if traces is not None:
            traces.append(features.shape)
        hidden = features
        for i in range(LAYERS):
            hidden = jnp.tanh(hidden @ est.get_variable(f"w{i}", (features.shape[1], features.shape[1])))
        weights = jnp.abs(labels) if weighted else 1.0
        loss = est.losses.mean_squared_error(labels, hidden.mean(1), weights)
        train_op = TowerOptimizer(optax.sgd(0.1), accumulate_steps=steps).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def compiled_step(model_fn, towers, rows, width=WIDTH):
    x, y = np.ones((rows * towers, width), np.float32), np.ones(rows * towers, np.float32)
    model = est.transform(replicate(model_fn, towers), donate=True)
    state = model.init(jax.random.key(0), x, y)
    return jax.jit(model.train_step, donate_argnums=0).lower(state, x, y).compile()


@pytest.mark.parametrize("weighted, expected", [(False, 1), (True, 2)])
def test_the_towers_meet_once_and_once_more_for_denominators(weighted, expected):
    program = compiled_step(wide_model_fn(4, weighted), 4, 8, width=4).as_text()
    assert collectives(program) == {"all-reduce": expected}


def test_there_is_one_all_reduce_per_dtype():
    def model_fn(features, labels, mode):
        est.get_variable("seen", initializer=np.int32(0), trainable=False)
        est.assign_add("seen", jnp.int32(len(features)))
        return wide_model_fn(2)(features, labels, mode)

    assert collectives(compiled_step(model_fn, 2, 4, width=4).as_text()) == {"all-reduce": 2}


@pytest.mark.parametrize("weighted", [False, True])
def test_the_program_holds_the_model_once(weighted):
    """The run that tells the number of micro-batches, and all but the weights of the first loop, are left out."""
    one, four = (operations(compiled_step(wide_model_fn(k, weighted), 1, 8, width=4).as_text()) for k in (1, 4))
    assert four["dot"] == one["dot"] > 0
    assert four["while"] <= 1 + weighted


def memory(towers, steps, rows):
    return compiled_step(wide_model_fn(steps), towers, rows).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("rows", [8, 1024])
def test_memory_holds_one_micro_batch_and_one_copy_of_its_rows_and_of_the_gradients(towers, rows):
    """Where the variables are large, and where the activations are."""
    micro_batch = rows * (WIDTH + 1) * 4
    assert memory(towers, 4, 4 * rows) <= memory(towers, 1, rows) + GRADIENTS + micro_batch + 1024


def test_activations_shrink_with_the_number_of_micro_batches():
    rows = 4096
    activations = LAYERS * rows * WIDTH * 4
    one, four, sixteen = (memory(1, steps, rows) for steps in (1, 4, 16))
    assert one >= activations
    assert one - four >= activations / 2
    assert four - sixteen >= activations / 8


@pytest.mark.slow
def test_one_more_trace_and_one_for_denominators():
    (x,), (y,) = regression(8, steps=1)

    def traced(steps, weighted):
        traces = []
        model = est.transform(replicate(wide_model_fn(steps, weighted, traces), 1))
        state = model.init(jax.random.key(0), x, y)
        traces.clear()
        for _ in range(2):
            state, _ = model.train_step(state, x, y)
        return [shape[0] for shape in traces]

    assert traced(1, True) == [8]
    assert traced(2, False) == [8, 4]
    assert traced(2, True) == [8, 4, 4]
