"""The compiled programs: traces, compilations, collectives, operations, donation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import everything
from testing.programs import collectives, operations
from testing.towers import STEPS, mlp_model_fn, regression, replicate, started
from testing.wide import batches, wide, wide_mlp

import estimator as est
from replicate import TowerOptimizer


@pytest.mark.quick
@pytest.mark.parametrize("towers, parts", [(2, 1), (2, 4)])
def test_a_second_call_traces_and_compiles_nothing(towers, parts, compilations):
    traces, inner = [], wide_mlp(optax.adam(0.1))

    def model_fn(features, labels, mode):
        traces.append(mode)
        return inner(features, labels, mode)

    x, y = batches(8)
    model, first = started(wide(towers, parts, model_fn), x[0], y[0])

    def all_steps(state):
        state, _ = model.train_step(state, x[0], y[0])
        state, _ = model.train_loop(state, (x, y))
        model.eval_step(state, x[0], y[0])
        return jax.block_until_ready(state)

    state = all_steps(first)
    model.eval_step(first, x[0], y[0])
    before = len(traces), len(compilations)
    assert all(before)
    all_steps(all_steps(state))
    model.eval_step(first, x[0], y[0])
    model.train_step(first, x[1], y[1])
    assert (len(traces), len(compilations)) == before


def compiled_train_step(model_fn, *batch):
    model, state = started(model_fn, *batch)
    return jax.jit(model.train_step).lower(state, *batch).compile().as_text()


def without_metrics(model_fn):
    return lambda features, labels, mode: model_fn(features, labels, mode)._replace(eval_metric_ops=None)


def test_there_is_one_all_reduce_per_dtype():
    def model_fn(features, labels, mode):
        est.get_variable("seen", initializer=np.int32(0), trainable=False)
        est.get_variable("steps", initializer=np.int32(0), trainable=False)
        est.assign_add("seen", features.shape[0])
        est.assign_add("steps", (labels > 0).sum(dtype=jnp.int32))
        optimizer = TowerOptimizer(optax.adam(0.1), accumulate_steps=2)
        return without_metrics(mlp_model_fn(optimizer))(features, labels, mode)

    x, y = regression(8, steps=1)
    assert collectives(compiled_train_step(replicate(model_fn, 4), x[0], y[0])) == {"all-reduce": 2}


def test_metrics_of_a_train_step_add_one_collective_at_most():
    x, y = regression(8, steps=1)
    program = compiled_train_step(replicate(mlp_model_fn(optax.adam(0.1)), 4), x[0], y[0])
    assert sum(collectives(program).values()) <= 2, collectives(program)


@functools.cache
def with_everything(towers):
    x, y = regression(7)
    return started(replicate(everything(), towers), x[0], y[0])


@pytest.mark.slow
@pytest.mark.parametrize("step", ["train_step", "train_loop", "eval_step", "predict_step"])
@pytest.mark.usefixtures("users_compiler")
def test_one_device_runs_the_operations_of_the_plain_model_fn_in_every_mode(step):
    x, y = regression(7)
    batch = {"train_loop": ((x, y),), "predict_step": (x[0],)}.get(step, (x[0], y[0]))

    def compiled(towers):
        model, state = with_everything(towers)
        program = jax.jit(lambda *args: getattr(model, step)(*args))
        return operations(program.lower(state, *batch).compile().as_text())

    plain, replicated = compiled(0), compiled(1)
    assert plain["fusion"] > 2
    assert replicated == plain


def test_a_donated_state_is_trained_in_place():
    x, y = regression(8)
    model = est.transform(replicate(mlp_model_fn(optax.adam(0.1)), 2), donate=True)
    state = model.init(jax.random.key(0), x[0], y[0])
    for batch in zip(x, y, strict=True):
        before, (state, _) = state, model.train_step(state, *batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.slots))
    assert state.global_step == STEPS
