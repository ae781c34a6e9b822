"""Training and evaluation with given cross_tower_ops: the numbers of the default, by other collectives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.cross_tower import collectives
from testing.model_fns import minimizing
from testing.towers import assert_close, cpus, mlp_model_fn, regression

import estimator as est
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn
from replicate.cross_tower_ops import AllReduce, CollectiveAllReduce, CrossTowerOps


def counting_model_fn(features, labels, mode, parts=1):
    """Its variables are assigned and added to, in floats, integers and booleans; it has metrics of two kinds."""
    z = est.get_variable("z", (3, 4))
    a = est.get_variable("a", (4,))
    est.get_variable("seen", initializer=np.int32(0), trainable=False)
    est.get_variable("any", initializer=np.zeros(2, bool), trainable=False, aggregation="only_first_tower")
    est.get_variable("mean", initializer=np.zeros(3, np.float32), trainable=False)
    est.assign_add("seen", features.shape[0])
    est.assign("any", features[0, :2] > 0)
    est.assign("mean", features.mean(0))
    output = jnp.tanh(features @ z) @ a
    losses = (output - labels) ** 2
    loss = losses.mean()
    optimizer = TowerOptimizer(optax.adam(0.05), accumulate_steps=parts)
    metrics = {"error": est.metrics.mean(losses), "correct": est.metrics.accuracy(labels > 0, output > 0)}
    return est.EstimatorSpec(mode, {"output": output}, loss, optimizer.minimize(loss), metrics)


def replicated(ops, towers=4, model_fn=counting_model_fn):
    return est.transform(replicate_model_fn(model_fn, devices=cpus(towers), cross_tower_ops=ops))


def trained(model, rows=12, steps=3):
    x, y = regression(rows, steps=steps)
    state, spec = model.train_loop(model.init(jax.random.key(0), x[0], y[0]), (x, y))
    return state._replace(key=None), spec.loss, spec.eval_metric_ops, spec.predictions


def train_text(model, rows=12):
    x, y = regression(rows, steps=1)
    return jax.jit(model.train_step).lower(model.init(jax.random.key(0), x[0], y[0]), x[0], y[0]).as_text()


def test_an_evaluation_of_any_number_of_rows_takes_the_collectives_of_its_ops_and_compresses_nothing():
    (x,), (y,) = regression(14, steps=1)
    ring = replicated(AllReduce("ring", compress_dtype=jnp.bfloat16))
    text = jax.jit(ring.eval_step).lower(ring.init(jax.random.key(0), x, y, mode="eval"), x, y).as_text()
    assert collectives(text) == {"collective_permute": 6} and "bf16" not in text


@pytest.mark.slow
def test_a_step_takes_the_collectives_of_its_ops():
    """Floats are 12 + 4 gradients, loss, metrics and "mean"; integers "seen" and "any"."""
    assert collectives(train_text(replicated(None))) == {"all_reduce": 2}
    assert collectives(train_text(replicated(AllReduce("ring")))) == {"collective_permute": 2 * 6}
    assert collectives(train_text(replicated(AllReduce("tree", num_packs=2)))) == {"collective_permute": 2 * 2 * 4}
    assert collectives(train_text(replicated(AllReduce("ring"), towers=1))) == {}


# The order of the values, and ops of one's own.


class Recorded(CrossTowerOps):
    """Sums as the default does, and keeps what it was given."""

    def __init__(self):
        self.calls = []

    def sum_in_towers(self, values):
        self.calls.append([value.shape for value in values])
        return AllReduce().sum_in_towers(values)


@pytest.mark.slow
def test_gradients_come_first_in_the_order_in_which_variables_were_created():
    want, *_ = trained(replicated(None))
    for parts in (1, 3):
        ops = Recorded()
        state = trained(replicated(ops, model_fn=functools.partial(counting_model_fn, parts=parts)))
        assert all(shapes[:2] == [(3, 4), (4,)] for shapes in ops.calls) and ops.calls
        assert_close(state[0].variables["a"], want.variables["a"])


# Gradients in a narrower dtype.


@pytest.mark.slow
def test_gradients_are_sent_in_the_narrower_dtype_and_applied_in_their_own():
    model = replicated(AllReduce("ring", compress_dtype=jnp.bfloat16))
    sent = re.findall(r"stablehlo\.collective_permute.*?-> tensor<(\d+)x(\w+)>", train_text(model))
    # 16 elements of gradients in four pieces; the rest in as many.
    assert sent.count(("4", "bf16")) == 6
    assert {dtype for _, dtype in sent} == {"bf16", "f32", "i32"} and len(sent) == 18
    state, *_ = trained(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.slots)} == {jnp.dtype("float32"), jnp.dtype("int32")}


# With what else there is.


def words_loss(features, labels):
    ids = jnp.abs(features * 3).astype(jnp.int32)
    rows = est.embedding_lookup("words", ids, (20, 2)).sum(1)
    return jnp.mean((rows @ est.get_variable("w", (2,)) - labels) ** 2)


words_model_fn = minimizing(words_loss, optax.adam(0.1))


@pytest.mark.slow
def test_sparse_gradients_are_gathered():
    want = trained(replicated(None, model_fn=words_model_fn))
    assert_close(trained(replicated(AllReduce("ring"), model_fn=words_model_fn)), want)


def test_collective_all_reduce_refuses_sparse_gradients():
    message = (
        "`CollectiveAllReduce` cannot sum the gradient of the variable 'words', an `est.IndexedSlices` as "
        "`est.embedding_lookup` makes them. Use other `cross_tower_ops`, such as `AllReduce()`."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        trained(replicated(CollectiveAllReduce(), model_fn=words_model_fn))


@pytest.mark.parametrize("given", ["ring", AllReduce, jax.lax.psum])
def test_other_things_than_ops_are_refused(given):
    message = (
        f'cross_tower_ops must be an object of `replicate.cross_tower_ops`, such as `AllReduce("ring")`; got {given!r}.'
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        replicate_model_fn(mlp_model_fn(optax.sgd(0.1)), cross_tower_ops=given)


@pytest.mark.parametrize(
    "distribution", [VariableDistribution.SHARED_LOCAL_PARAMETER_SERVER, VariableDistribution.SHARED_ROUND_ROBIN]
)
def test_ops_are_refused_where_the_towers_do_not_sum(distribution):
    message = (
        "cross_tower_ops was given, an AllReduce, with a variable_distribution whose gradients are summed on the "
        "devices of the variables, not in the towers. Leave it out, or use VariableDistribution.MIRRORED or SHARDED."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        model_fn = mlp_model_fn(optax.sgd(0.1))
        replicate_model_fn(model_fn, variable_distribution=distribution, cross_tower_ops=AllReduce())
