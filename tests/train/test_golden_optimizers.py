"""The numbers of TensorFlow 1.12's optimizers (tests/golden), dense and sparse, alone and on towers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import GOLDEN, close

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn

START = {name: np.asarray(value, np.float32) for name, value in GOLDEN["start"].items()}
NOTHING = len(START["table"])  # an index beyond the table, which a lookup leaves out


def named(case):
    return f"{case['name']}-{len(case['args'])}"


def optimizer_of(case):
    name, args = case["name"].removeprefix("contrib.opt."), dict(case["args"])
    if name == "AdagradDAOptimizer":
        args["global_step"] = est.global_step()
    return getattr(est.train, name)(**args)


def model_fn_of(case, wrap):
    """Of 4 rows: each has a quarter of the dense gradient, and one of the sparse one's values or none."""

    def model_fn(features, labels, mode):
        a = est.get_variable("a", initializer=START["a"])
        rows = est.embedding_lookup(
            "table", features["index"], START["table"].shape, initializer=lambda *_: START["table"]
        )
        loss = jnp.sum(a * features["dense"]) + jnp.sum(rows * features["value"])
        optimizer = wrap(optimizer_of(case))
        train_op = optimizer.minimize(loss, est.global_step())
        assert optimizer.get_slot_names() == sorted(case["slots_after"])
        assert all(optimizer.get_slot("a", slot).shape == START["a"].shape for slot in case["slots_after"])
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def batches():
    for dense, indices, values in zip(
        GOLDEN["dense_gradients"], GOLDEN["sparse_indices"], GOLDEN["sparse_values"], strict=True
    ):
        yield {
            "dense": np.stack([np.asarray(dense, np.float32) / 4] * 4),
            "index": np.array([*indices, NOTHING]),
            "value": np.array([*values, [0, 0]], np.float32),
        }


@pytest.mark.quick
@pytest.mark.parametrize(
    "case, towers",
    [*((case, 0) for case in GOLDEN["optimizers"]), *((case, 4) for case in GOLDEN["optimizers"][::8])],
    ids=lambda each: each if isinstance(each, int) else named(each),
)
def test_optimizers_have_the_numbers_of_tensorflow(case, towers):
    model_fn = model_fn_of(case, TowerOptimizer if towers else lambda optimizer: optimizer)
    if towers:
        model_fn = replicate_model_fn(model_fn, est.Reduction.SUM, devices=[f"cpu:{i}" for i in range(towers)])
    model = est.transform(model_fn)
    steps = list(batches())
    state = model.init(jax.random.key(0), steps[0])
    for batch, (a, table) in zip(steps, case["dense_and_sparse_after"], strict=True):
        state, _ = model.train_step(state, batch)
        close(state.variables["a"], a)
        close(state.variables["table"], table)
    (slots,) = state.slots.values()
    for slot, values in case["slots_after"].items():
        for name, value in values.items():
            close(getattr(slots.inner, slot)[name], value)
    rate = case["args"]["learning_rate"]
    assert list(est.learning_rates(state).values()) == [np.float32(rate)]
