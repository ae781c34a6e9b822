"""Memory of the training step: half of it and less by computing parts again; no second copy of the state."""

import jax
import jax.numpy as jnp
import optax
import pytest
from testing.estimators import make
from testing.hooks import When
from testing.model_fns import minimizing
from testing.towers import cpus, mlp_model_fn, regression

import estimator as est
from replicate import VariableDistribution, replicate_model_fn

WIDTH = 32


def transformer(features, blocks=4, heads=2):
    """Of sequences of shape `(batch, length, width)`; blocks with the norm first."""

    def dense(x, name, width):
        return x @ est.get_variable(name, (x.shape[-1], width))

    def norm(x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    x = features
    for i in range(blocks):
        with est.variable_scope(f"block{i}"):
            qkv = dense(norm(x), "qkv", 3 * WIDTH).reshape(*x.shape[:2], 3, heads, WIDTH // heads)
            q, k, v = (qkv[:, :, j] for j in range(3))
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // heads) ** 0.5)
            x = x + dense(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), "mixed", WIDTH)
            x = x + dense(jax.nn.gelu(dense(norm(x), "up", 4 * WIDTH)), "down", WIDTH)
    return x


@pytest.mark.slow
def test_segments_need_at_most_half_the_temporary_bytes():
    model_fn = minimizing(lambda x, y: est.losses.mean_squared_error(y, transformer(x)))
    model_fns = {
        name: replicate_model_fn(model_fn, devices=cpus(2), tower_transform=transform)
        for name, transform in (("plain", None), ("segments", est.checkpoint_segments))
    }
    batch = jax.ShapeDtypeStruct((16, 32, WIDTH), jnp.float32)
    report = est.memory_report(model_fns, batch, batch)
    assert report["segments"].temporary <= report["plain"].temporary / 2, f"\n{report}"
    assert report["segments"].arguments == report["plain"].arguments


@pytest.mark.quick
@pytest.mark.parametrize("distribution", [VariableDistribution.MIRRORED, VariableDistribution.SHARDED])
def test_the_state_is_donated_whole_variables_and_slots(distribution):
    model_fn = replicate_model_fn(mlp_model_fn(optax.adam(0.1)), devices=cpus(2), variable_distribution=distribution)
    x, y = regression(8)
    use = est.memory_report(model_fn, x[0], y[0])["model_fn"]
    sizes = {"hidden/w": 12, "hidden/b": 4, "v": 4}
    if distribution == VariableDistribution.SHARDED:
        sizes = {name: size // 2 for name, size in sizes.items()}
    assert use.state == 4 * (3 * sum(sizes.values()) + 2)  # two moments, two counters
    assert use.donated == use.state
    assert use.arguments - use.state == 4 * 4 * 4  # four rows of three and a label; the random key is not used
    assert use.peak == use.arguments + use.outputs - use.donated + use.temporary


@pytest.mark.quick
@pytest.mark.parametrize("steps_per_loop", [1, 2])
def test_an_estimator_trains_in_the_memory_of_its_state(tmp_path, steps_per_loop):
    x, y = regression(8)
    states = []
    hook = When(1, after_run=lambda context: states.append(context.state))
    estimator = make(tmp_path, model_fn_of_regression(), steps_per_loop=steps_per_loop)
    estimator.train(lambda: [(x[0], y[0])] * 4, hooks=[hook])
    leaves = jax.tree.leaves((states[0].variables, states[0].slots))
    assert len(leaves) == 10 and all(leaf.is_deleted() for leaf in leaves)


def model_fn_of_regression():
    return replicate_model_fn(mlp_model_fn(optax.adam(0.1)), devices=cpus(2))


def test_a_report_of_several_model_fns_is_a_table():
    x, y = regression(8)
    both = {"a": model_fn_of_regression(), "longer name": mlp_model_fn(optax.adam(0.1))}
    report = est.memory_report(both, x[0], y[0])
    title, head, *rows = str(report).splitlines()
    assert title == "bytes on each device in a training step"
    assert head.split() == list(est.MemoryUse._fields)
    assert {len(line) for line in (head, *rows)} == {len(head)}
    for row, (name, use) in zip(rows, report.items(), strict=True):
        assert row.startswith(name) and row[len(name) :].split() == [f"{n:,}" for n in use]


def test_what_cannot_be_reported_is_refused():
    x, y = regression(8)
    with pytest.raises(ValueError, match="needs a model_fn, or several by name; got an empty dict"):
        est.memory_report({}, x[0], y[0])
    with pytest.raises(TypeError, match="model_fn must be a function; got 3"):
        est.memory_report({"three": 3}, x[0], y[0])
    served = replicate_model_fn(
        mlp_model_fn(optax.sgd(0.1)), devices=cpus(2), variable_distribution=VariableDistribution.SHARED_ROUND_ROBIN
    )
    with pytest.raises(ValueError, match="SHARED_ROUND_ROBIN\\) make it several. Give the same model_fn with MIRRORED"):
        est.memory_report(served, x[0], y[0])
