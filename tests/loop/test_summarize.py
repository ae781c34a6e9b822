"""A table of a model before training: its variables as it has them, the work and the memory of a step as XLA says."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import cpus

import estimator as est
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn

WIDTH, ROWS = 64, 32
FEATURES, LABELS = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS, 1), jnp.float32)


def model_fn(features, labels, mode, params):
    with est.variable_scope("net"):
        with est.variable_scope("inner"):
            x = features @ est.get_variable("w", (WIDTH, WIDTH))
        x = x * est.get_variable("scale", (), trainable=False, initializer=jax.nn.initializers.ones)
    table = est.get_variable("half", (WIDTH, 1), jnp.bfloat16)
    predictions = (x.astype(jnp.bfloat16) @ table).astype(jnp.float32)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=predictions)
    loss = est.losses.mean_squared_error(labels, predictions)
    train_op = TowerOptimizer(optax.sgd(params["rate"], momentum=0.9)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


PARAMS = {"rate": 0.1}
ROWS_OF_MODEL = [
    est.VariableSummary("half", (WIDTH, 1), "bfloat16", 2 * WIDTH, True),
    est.VariableSummary("net/scale", (), "float32", 4, False),
    est.VariableSummary("net/inner/w", (WIDTH, WIDTH), "float32", 4 * WIDTH**2, True),
]


def test_the_rows_are_the_variables_with_their_totals():
    summary = est.summarize(model_fn, FEATURES, LABELS, params=PARAMS)
    assert list(summary.rows) == ROWS_OF_MODEL
    assert (summary.size, summary.trainable_size) == (WIDTH**2 + WIDTH + 1, WIDTH**2 + WIDTH)
    assert summary.bytes == 4 * WIDTH**2 + 2 * WIDTH + 4
    assert summary.slot_bytes == 4 * WIDTH**2 + 2 * WIDTH
    assert str(summary).splitlines()[:-1] == [
        "variable    shape     dtype     elements   bytes  trainable",
        "half        [64, 1]   bfloat16        64     128  yes",
        "net/                                   1       4",
        "  scale     []        float32          1       4  no",
        "net/inner/                         4,096  16,384",
        "  w         [64, 64]  float32      4,096  16,384  yes",
        "-----------------------------------------------------------",
        "4,161 elements, 16.5 kB, of which trainable: 4,160",
        "slots of optimizers: 16.5 kB",
    ]


def test_flops_and_memory_are_what_xla_says_of_the_step():
    summary = est.summarize(model_fn, FEATURES, LABELS, params=PARAMS)
    # Two products forward; backward for both matrices, and for the input of the second.
    products = 2 * ROWS * WIDTH * (WIDTH + 1) * 2 + 2 * ROWS * WIDTH
    assert products < summary.flops < 1.2 * products
    assert summary.memory == est.memory_report(model_fn, FEATURES, LABELS, PARAMS)["model_fn"]
    shown = str(summary).splitlines()[-1]
    assert shown.startswith(f"a step of 'train' on each device: {summary.flops:.4g} FLOPs; memory: state 33.0 kB, arg")
    assert shown.count("B") + shown.count("bytes") == len(summary.memory)


@pytest.mark.slow
def test_arrays_and_their_shapes_and_an_estimator_have_the_same_summary(tmp_path):
    summary = est.summarize(model_fn, FEATURES, LABELS, params=PARAMS)
    arrays = np.zeros(FEATURES.shape, np.float32), np.zeros(LABELS.shape, np.float32)
    assert est.summarize(model_fn, *arrays, params=PARAMS) == summary
    estimator = est.Estimator(model_fn, str(tmp_path / "model"), params=PARAMS)
    assert est.summarize(estimator, *arrays) == summary
    assert not os.path.exists(estimator.model_dir)
    estimator.train(lambda: [arrays], steps=1)
    before = sorted(os.walk(estimator.model_dir))
    assert est.summarize(estimator, FEATURES, LABELS) == summary
    assert sorted(os.walk(estimator.model_dir)) == before


def test_a_tower_has_the_variables_and_its_part_of_the_work():
    one, two = (
        est.summarize(replicate_model_fn(model_fn, devices=cpus(n)), FEATURES, LABELS, params=PARAMS) for n in (1, 2)
    )
    assert one.rows == two.rows == tuple(ROWS_OF_MODEL)
    assert two.flops == pytest.approx(one.flops / 2, rel=0.2)
    assert two.memory.state == one.memory.state and two.memory.arguments < one.memory.arguments


@pytest.mark.quick
@pytest.mark.parametrize(("mode", "towers"), [("eval", None), ("infer", 2)])
def test_other_modes_have_no_slots_and_less_work(mode, towers):
    wrapped = replicate_model_fn(model_fn, devices=cpus(towers)) if towers else model_fn
    training = est.summarize(wrapped, FEATURES, LABELS, params=PARAMS)
    summary = est.summarize(wrapped, FEATURES, LABELS, params=PARAMS, mode=mode)
    assert (summary.mode, summary.rows, summary.slot_bytes) == (mode, training.rows, 0)
    assert 0 < summary.flops < training.flops / 1.5
    assert summary.memory.state == summary.bytes + 4  # and the global step
    assert summary.memory.donated == 0


def test_a_step_of_several_programs_has_neither_flops_nor_memory():
    distribution = VariableDistribution.SHARED_ROUND_ROBIN
    served = replicate_model_fn(model_fn, devices=cpus(2), variable_distribution=distribution)
    summary = est.summarize(served, FEATURES, LABELS, params=PARAMS)
    assert (summary.rows, summary.flops, summary.memory) == (tuple(ROWS_OF_MODEL), None, None)
    assert str(summary).splitlines()[-1] == "a step of 'train' is several programs: no FLOPs, no memory"


def test_what_cannot_be_summarized_is_refused(tmp_path):
    estimator = est.Estimator(model_fn, str(tmp_path), params=PARAMS)
    with pytest.raises(
        ValueError, match=r"takes the params of the Estimator; got params=\{'rate': 1\}. Leave them out"
    ):
        est.summarize(estimator, FEATURES, LABELS, params={"rate": 1})
    with pytest.raises(ValueError, match="mode must be one of 'train', 'eval', 'infer' .*; got 'testing'"):
        est.summarize(estimator, FEATURES, LABELS, mode="testing")
    with pytest.raises(TypeError, match="model_fn must be a function; got 3"):
        est.summarize(3, FEATURES, LABELS)
