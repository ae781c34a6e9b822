"""Gradient accumulation beside the law that micro-batches in towers equal one big batch (test_same_training.py)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import assigning, constant, minimizing, ones
from testing.programs import collectives, operations
from testing.towers import FOUR, assert_close, one_step, regression, replicate, started

import estimator as est
from replicate import TOWER_AXIS, TowerOptimizer, cross_tower_mean, tower_index

EIGHT = np.array([1.0, 2.0, 3.0, 6.0, -1.0, 4.0, 0.5, 2.5], np.float32)


@pytest.mark.slow
def test_micro_batches_are_towers_that_run_one_after_another():
    """Their random keys too, so that all four ways to run four parts give the same."""

    def model_fn(steps, features, labels, mode):
        w = ones("w", (3,))
        noise = jax.random.normal(est.make_rng("noise"), labels.shape)
        loss = jnp.mean((features @ w + noise - labels) ** 2)
        train_op = TowerOptimizer(optax.sgd(0.1), accumulate_steps=steps).minimize(loss)
        return est.EstimatorSpec(mode, noise, loss, train_op)

    (x,), (y,) = regression(8, steps=1)
    results = []
    for towers, steps in [(4, 1), (2, 2), (1, 4)]:
        state, spec = one_step(replicate(functools.partial(model_fn, steps), towers), x, y)
        results.append((state.variables, spec.loss, spec.predictions))
    assert len(np.unique(results[0][2])) == len(x)
    for result in results[1:]:
        assert_close(result, results[0])


def test_compute_gradients_gives_the_gradient_of_the_micro_batch():
    def model_fn(features, labels, mode):
        w, d = ones("w"), constant("d", 5.0)
        loss = jnp.mean(w * d * features)
        optimizer = TowerOptimizer(optax.adam(0.5), accumulate_steps=2)
        ((gradient, _),) = optimizer.compute_gradients(loss, ["w"])
        train_op = optimizer.apply_gradients([(jnp.minimum(gradient, 3.0), "w"), (None, "d")])
        return est.EstimatorSpec(mode, jnp.broadcast_to(gradient, features.shape), loss, train_op)

    state, spec = one_step(replicate(model_fn, 2), EIGHT)
    gradients = 5 * EIGHT.reshape(4, 2).mean(1) / 4
    np.testing.assert_allclose(spec.predictions, np.repeat(gradients, 2), rtol=1e-6)
    assert set(state.slots["optimizer"][0].mu) == {"w"}  # None is absent
    assert_close(state.slots["optimizer"][0].mu["w"], jnp.float32(0.1 * np.minimum(gradients, 3).sum()))
    assert state.variables["d"] == 5.0


class FirstLast:
    """A metric of clu's protocol whose merge keeps the order."""

    def __init__(self, first, last):
        self.first, self.last = first, last

    def merge(self, other):
        return FirstLast(self.first, other.last)

    def compute(self):
        return self.first, self.last


jax.tree_util.register_pytree_node(FirstLast, lambda m: ((m.first, m.last), None), lambda _, leaves: FirstLast(*leaves))


@pytest.mark.slow
def test_results_come_in_input_order():
    def model_fn(features, labels, mode):
        loss = jnp.mean(ones("w") * features)
        train_op = TowerOptimizer(optax.sgd(0.1), accumulate_steps=2).minimize(loss)
        predictions = {"x": features, "micro": jnp.full(features.shape, len(features), jnp.int32)}
        exports = {"y": est.export.PredictOutput(jnp.stack([features, -features], 1))}
        metrics = {"ends": FirstLast(features[0], features[-1]), "mean": est.metrics.mean(features)}
        return est.EstimatorSpec(mode, predictions, loss, train_op, metrics, exports)

    _, spec = one_step(replicate(model_fn, 2), EIGHT)
    np.testing.assert_array_equal(spec.predictions["x"], EIGHT)
    np.testing.assert_array_equal(spec.predictions["micro"], np.full(8, 2))
    (output,) = jax.tree.leaves(spec.export_outputs["y"])
    np.testing.assert_array_equal(output, np.stack([EIGHT, -EIGHT], 1))
    assert [float(x) for x in spec.eval_metric_ops["ends"].compute()] == [1.0, 2.5]
    assert spec.eval_metric_ops["mean"].result() == EIGHT.mean()


def test_collectives_of_the_model_fn_go_over_the_towers_of_one_micro_batch():
    def model_fn(features, labels, mode):
        loss = jnp.mean(ones("w") * features)
        train_op = TowerOptimizer(optax.sgd(0.1), accumulate_steps=2).minimize(loss)
        seen = {"mean": cross_tower_mean(features), "total": jax.lax.psum(features, TOWER_AXIS)}
        seen["tower"] = jnp.broadcast_to(tower_index(), features.shape)
        return est.EstimatorSpec(mode, seen, loss, train_op)

    _, spec = one_step(replicate(model_fn, 2), EIGHT)
    total = np.tile(EIGHT[:4] + EIGHT[4:], 2)
    np.testing.assert_array_equal(spec.predictions["total"], total)
    np.testing.assert_array_equal(spec.predictions["mean"], total / 2)
    np.testing.assert_array_equal(spec.predictions["tower"], [0] * 4 + [1] * 4)


# Without towers, and with an est.Optimizer inside.


def test_without_towers_a_batch_runs_in_one_piece_and_one_warning_says_so(messages):
    def model_fn(steps, features, labels, mode):
        w = ones("w")
        made = [TowerOptimizer(est.Optimizer(optax.sgd(0.1)), accumulate_steps=steps) for _ in range(2)]
        loss = jnp.mean(w * features)
        seen = jnp.full(features.shape, len(features), jnp.int32)
        return est.EstimatorSpec(mode, seen, loss, est.group(*(each.minimize(loss) for each in made)))

    want, _ = one_step(functools.partial(model_fn, 1), FOUR)
    assert not messages()
    got, spec = one_step(functools.partial(model_fn, 2), FOUR)
    assert_close(got.variables, want.variables)
    np.testing.assert_array_equal(spec.predictions, np.full(4, 4))
    (warning,) = messages()
    assert warning.startswith("TowerOptimizer(..., accumulate_steps=2) has no effect without `replicate_model_fn`")
    got, spec = one_step(replicate(functools.partial(model_fn, 2), 1), FOUR)
    assert_close(got.variables, want.variables)
    np.testing.assert_array_equal(spec.predictions, np.full(4, 2))
    assert len(messages()) == 1


def test_a_wrapped_tower_optimizer_keeps_its_number():
    inner = TowerOptimizer(optax.sgd(0.1), accumulate_steps=4)
    assert TowerOptimizer(inner).accumulate_steps == 4
    assert TowerOptimizer(inner, accumulate_steps=2).accumulate_steps == 2
    assert TowerOptimizer(est.Optimizer(optax.sgd(0.1))).accumulate_steps == 1


@pytest.mark.parametrize("wrong", [0, 2.0, "2", None, True])
def test_what_is_no_number_of_micro_batches(wrong):
    with pytest.raises(ValueError, match=r"needs an integer of at least 1 as `accumulate_steps`.*; got"):
        TowerOptimizer(optax.sgd(0.1), accumulate_steps=wrong)


def test_rows_that_do_not_divide():
    model_fn = replicate(assigning(lambda x: None, steps=4), 2)
    message = (
        "Batch size 12 needs to be divisible by the number of towers, which is 2, times `accumulate_steps`, which is "
        "4. Choose a batch size that is a multiple of 8, or another"
    )
    with pytest.raises(ValueError, match=message):
        one_step(model_fn, np.ones(12, np.float32))


@pytest.mark.parametrize("make_other", [lambda o: TowerOptimizer(o, "other", accumulate_steps=3), est.Optimizer])
def test_different_numbers_in_one_step(make_other):
    def model_fn(features, labels, mode):
        loss = jnp.mean(ones("w") * features)
        one, other = TowerOptimizer(optax.sgd(0.1), "one", accumulate_steps=2), make_other(optax.sgd(0.1))
        return est.EstimatorSpec(mode, loss=loss, train_op=est.group(one.minimize(loss), other.minimize(loss)))

    with pytest.raises(
        ValueError, match=r"different `accumulate_steps`: 'one' for 2 and '(other' for 3|optimizer' for 1)"
    ):
        one_step(replicate(model_fn, 1), FOUR)


def test_integers_cannot_be_averaged_over_micro_batches():
    model_fn = assigning(lambda x: est.assign("s", jnp.int32(1)), initial=np.int32(0), steps=2)
    with pytest.raises(ValueError, match="The micro-batches assign to the variable 's', whose int32 values cannot"):
        one_step(replicate(model_fn, 1), FOUR)


def test_predictions_of_the_whole_batch():
    def model_fn(features, labels, mode):
        return assigning(lambda x: None, steps=2)(features, labels, mode)._replace(predictions=features.sum())

    with pytest.raises(
        ValueError, match=r"from several micro-batches; it has shape \(\) in a micro-batch of 2 examples"
    ):
        one_step(replicate(model_fn, 1), FOUR)


def apply(optimizer, loss):
    return optimizer.apply_gradients(optimizer.compute_gradients(loss))


@pytest.mark.slow
@pytest.mark.parametrize("update", [TowerOptimizer.minimize, apply])
def test_weights_that_are_trained_are_refused_unless_no_gradient_flows(update):
    def model_fn(steps, stop, features, labels, mode):
        weights = stop(jax.nn.sigmoid(features @ ones("u", (3,))))
        loss = est.losses.mean_squared_error(labels, features @ ones("w", (3,)), weights, est.Reduction.MEAN)
        optimizer = TowerOptimizer(optax.sgd(0.5), accumulate_steps=steps)
        return est.EstimatorSpec(mode, loss=loss, train_op=update(optimizer, loss))

    (x,), (y,) = regression(8, steps=1)
    stopped = functools.partial(model_fn, stop=jax.lax.stop_gradient)
    want, _ = one_step(functools.partial(stopped, 1), x, y)
    got, _ = one_step(replicate(functools.partial(stopped, 2), 2), x, y)
    assert_close(got.variables, want.variables)
    with pytest.raises(ValueError, match=r"divides by the sum of weights that depend on trainable variables\. With"):
        one_step(replicate(functools.partial(model_fn, 2, lambda x: x), 2), x, y)


# Gradient accumulation: traces, collectives and memory of the compiled programs.

WIDTH, LAYERS = 256, 3
GRADIENTS = LAYERS * WIDTH * WIDTH * 4  # bytes


def wide_model_fn(steps, weighted=False, traces=None):
    def loss_of(features, labels):
        if traces is not None:
            traces.append(features.shape)
        hidden = features
        for i in range(LAYERS):
            hidden = jnp.tanh(hidden @ est.get_variable(f"w{i}", (features.shape[1], features.shape[1])))
        weights = jnp.abs(labels) if weighted else 1.0
        return est.losses.mean_squared_error(labels, hidden.mean(1), weights)

    return minimizing(loss_of, optax.sgd(0.1), accumulate_steps=steps)


def compiled_step(model_fn, towers, rows, width=WIDTH):
    x, y = np.ones((rows * towers, width), np.float32), np.ones(rows * towers, np.float32)
    model = est.transform(replicate(model_fn, towers), donate=True)
    state = model.init(jax.random.key(0), x, y)
    return jax.jit(model.train_step, donate_argnums=0).lower(state, x, y).compile()


@pytest.mark.quick
@pytest.mark.parametrize("weighted, expected", [(False, 1), (True, 2)])
def test_the_towers_meet_once_and_once_more_for_denominators(weighted, expected):
    program = compiled_step(wide_model_fn(4, weighted), 4, 8, width=4).as_text()
    assert collectives(program) == {"all-reduce": expected}


@pytest.mark.quick
@pytest.mark.parametrize("weighted", [False, True])
def test_the_program_holds_the_model_once(weighted):
    """The run that tells the number of micro-batches, and all but the weights of the first loop, are left out."""
    one, four = (operations(compiled_step(wide_model_fn(k, weighted), 1, 8, width=4).as_text()) for k in (1, 4))
    assert four["dot"] == one["dot"] > 0
    assert four["while"] <= 1 + weighted


def memory(towers, steps, rows):
    return compiled_step(wide_model_fn(steps), towers, rows).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "rows"), [(1, 8), (2, 1024)])
def test_memory_holds_one_micro_batch_and_one_copy_of_its_rows_and_of_the_gradients(towers, rows):
    """Where the variables are large, and where the activations are."""
    micro_batch = rows * (WIDTH + 1) * 4
    assert memory(towers, 4, 4 * rows) <= memory(towers, 1, rows) + GRADIENTS + micro_batch + 1024


@pytest.mark.slow
def test_one_more_trace_and_one_for_denominators():
    (x,), (y,) = regression(8, steps=1)

    def traced(steps, weighted):
        traces = []
        model, state = started(replicate(wide_model_fn(steps, weighted, traces), 1), x, y)
        traces.clear()
        for _ in range(2):
            state, _ = model.train_step(state, x, y)
        return [shape[0] for shape in traces]

    assert traced(1, True) == [8]
    assert traced(2, False) == [8, 4]
    assert traced(2, True) == [8, 4, 4]
