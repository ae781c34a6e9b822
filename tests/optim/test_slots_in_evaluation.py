"""The state of an optimizer, read where a model is evaluated, predicts and is exported."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.model_fns import zeros
from testing.towers import replicate, started

import estimator as est
from replicate import BlockSync, TowerOptimizer, VariableDistribution

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)
TRAINING = [({"x": X[i : i + 8]}, Y[i : i + 8]) for i in range(0, 32, 8)]
SIZES = [({"x": X[:8]}, Y[:8]), ({"x": X[8:15]}, Y[8:15])]  # 7 rows do not divide by the towers


def averaged(optimizer, decay=0.5):
    """Keeps an average of the variables in the optimizer's state."""

    def init(params):
        return optax.EmaState(jnp.zeros((), jnp.int32), params), optimizer.init(params)

    def update(updates, state, params):
        average, inner = state
        updates, inner = optimizer.update(updates, inner, params)
        moved = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda a, x: decay * a + (1 - decay) * x, average.ema, moved)
        return updates, (optax.EmaState(average.count + 1, ema), inner)

    return optax.GradientTransformation(init, update)


def schedule_free(optimizer, variables):
    return optax.contrib.schedule_free_eval_params(optimizer.get_state(), variables)


def mean_of_steps(optimizer, variables):
    return {name: optimizer.get_slot(name, "ema") for name in variables}


KINDS = {
    "schedule_free_adamw": (lambda: optax.contrib.schedule_free_adamw(0.1), schedule_free),
    "average": (lambda: averaged(optax.sgd(0.1)), mean_of_steps),
}


def model_fn_of(kind):
    make, at = KINDS[kind]

    def model_fn(features, labels, mode):
        variables = {"w": est.get_variable("w", 3), "b": zeros("b")}
        optimizer = TowerOptimizer(make())
        if mode != est.ModeKeys.TRAIN:
            variables = at(optimizer, variables)
        output = features["x"] @ variables["w"] + variables["b"]
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"output": output})
        loss = est.losses.mean_squared_error(labels, output)
        return est.EstimatorSpec(mode, {"output": output}, loss, optimizer.minimize(loss))

    return model_fn


def reference(kind):
    """The variables to evaluate at after training by hand."""
    make, _ = KINDS[kind]
    model = est.transform(model_fn_of(kind))
    state = model.init(jax.random.key(1), *TRAINING[0])
    for batch in TRAINING:
        state, _ = model.train_step(state, *batch)
    slots = state.slots["optimizer"]
    at = slots[0].ema if kind == "average" else optax.contrib.schedule_free_eval_params(slots, state.variables)
    return {name: np.asarray(value) for name, value in at.items()}, state.variables


def outputs_of(variables, x=X):
    return x @ variables["w"] + variables["b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "distribution"), [("schedule_free_adamw", "sharded"), ("average", "shared_round_robin")]
)
def test_evaluation_prediction_and_export_are_at_the_point_that_the_optimizer_says(tmp_path, kind, distribution):
    at, trained = reference(kind)
    assert np.abs(at["w"] - trained["w"]).max() > 1e-3  # another point
    want = outputs_of(at)
    loss = np.mean([np.mean((outputs_of(at, f["x"]) - y) ** 2) for f, y in SIZES])
    model_fn = replicate(model_fn_of(kind), 4, variable_distribution=VariableDistribution(distribution))
    config = est.RunConfig(seed=1)
    estimator = est.Estimator(model_fn, tmp_path / "model", config)
    results, _ = est.train_and_evaluate(
        estimator,
        est.TrainSpec(lambda: TRAINING, max_steps=4),
        est.EvalSpec(lambda: SIZES, steps=None, start_delay_secs=0, throttle_secs=0),
    )
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-4)  # in memory
    from_disk = est.Estimator(model_fn, tmp_path / "model", config)
    np.testing.assert_allclose(from_disk.evaluate(lambda: SIZES)["loss"], loss, rtol=1e-4)
    predicted = [each["output"] for each in from_disk.predict(lambda: {"x": X})]
    np.testing.assert_allclose(predicted, want, rtol=1e-3, atol=1e-4)
    exported = est.load_exported(from_disk.export_model(tmp_path / "export", {"x": X}))
    np.testing.assert_allclose(exported({"x": X})["output"], want, rtol=1e-3, atol=1e-4)


def test_before_any_training_it_is_the_initial_state():
    model, state = started(model_fn_of("average"), *TRAINING[0], mode="eval")
    want = outputs_of({name: np.asarray(value) for name, value in state.variables.items()}, X[:8])
    np.testing.assert_allclose(model.eval_step(state, *TRAINING[0]).predictions["output"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reads", [True, False])
def test_slots_are_a_part_of_evaluation_only_if_they_are_read(reads):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", 3)
        optimizer = est.Optimizer(optax.adam(0.1))
        loss = jnp.mean((features["x"] @ w - labels) ** 2)
        train_op = optimizer.minimize(loss)
        if reads:
            assert optimizer.get_slot_names() == ["mu", "nu"]
            assert len(optimizer.variables()) == 3
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    model = est.transform(model_fn)
    assert bool(model.abstract_init(*TRAINING[0], mode="eval").slots) is reads
    model.eval_step(model.init(jax.random.key(0), *TRAINING[0]), *TRAINING[0])


def test_an_optimizer_of_some_variables_names_them_or_is_asked_after_minimize():
    def model_fn(features, labels, mode, params):
        w, fixed = est.get_variable("w", 3), est.get_variable("fixed", 3)
        first = est.Optimizer(optax.sgd(0.1, momentum=0.9), name="first")
        second = est.Optimizer(optax.sgd(0.1, momentum=0.9), name="second")
        loss = jnp.mean((features["x"] @ (w + fixed) - labels) ** 2)
        if params == "named" and mode != "train":
            momenta = first.get_state(["w"])[0].trace["w"], second.get_state(["fixed"])[0].trace["fixed"]
        train_op = est.group(first.minimize(loss, ["w"]), second.minimize(loss, ["fixed"]))
        if params == "after minimize" or mode == "train":
            momenta = first.get_slot("w", "trace"), second.get_slot("fixed", "trace")
            assert first.get_slot("fixed", "trace") is None
        rows = {"momenta": jnp.broadcast_to(jnp.concatenate(momenta), (len(labels), 6))}
        return est.EstimatorSpec(mode, rows, loss, train_op)

    for way in ("named", "after minimize"):
        model, state = started(model_fn, *TRAINING[0], params=way)
        for batch in TRAINING[:2]:
            state, spec = model.train_step(state, *batch)
        want = np.concatenate([state.slots[name][0].trace[of] for name, of in [("first", "w"), ("second", "fixed")]])
        np.testing.assert_array_equal(model.eval_step(state, *TRAINING[0]).predictions["momenta"][0], want)


def test_the_state_under_a_loss_scale_matches_optax():
    def model_fn(features, labels, mode):
        w = est.get_variable("w", 3)
        optimizer = est.Optimizer(optax.adam(0.1), loss_scale=est.DynamicLossScale(16.0))
        loss = jnp.mean((features["x"] @ w - labels) ** 2)
        train_op = optimizer.minimize(loss)
        seen = jnp.broadcast_to(optimizer.get_state()[0].mu["w"], (len(labels), 3))
        return est.EstimatorSpec(mode, {"mu": seen}, loss, train_op)

    model = est.transform(model_fn)
    state, _ = model.train_step(model.init(jax.random.key(0), *TRAINING[0]), *TRAINING[0])
    got = model.eval_step(state, *TRAINING[0]).predictions["mu"][0]
    np.testing.assert_array_equal(got, state.slots["optimizer"].inner[0].mu["w"])


def evaluating(body, mode="eval", wrap=lambda model_fn: model_fn):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", 3) if mode == "train" else None
        return est.EstimatorSpec(mode, features, body(w, mode), est.group())

    return est.transform(wrap(model_fn)).abstract_init(*TRAINING[0], mode=mode)


def late(w, mode):
    est.Optimizer(optax.sgd(0.1)).get_state()
    return jnp.sum(est.get_variable("late", 3))


def twins(w, mode):
    v = est.get_variable("v", 3)
    for _ in range(2):
        est.Optimizer(optax.sgd(0.1)).get_state()
    return jnp.sum(v)


def others(w, mode):
    v, optimizer = est.get_variable("v", 3), est.Optimizer(optax.sgd(0.1))
    optimizer.get_state()
    loss = jnp.sum(v * est.get_variable("u", 3))
    optimizer.minimize(loss)
    return loss


def in_blocks(w, mode):
    v = est.get_variable("v", 3)
    TowerOptimizer(optax.sgd(0.1)).get_state()
    return jnp.sum(v)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (late, "The state of the optimizer 'optimizer' was read in mode 'eval' before its variables"),
        (twins, "reads the state of the optimizer 'optimizer' in mode 'eval', where another one of this name was used"),
        (others, r"read in mode 'eval' for the variables \['v'\], but it trains \['u', 'v'\]"),
    ],
)
def test_what_is_not_known_is_said(body, message):
    with pytest.raises(ValueError, match=message):
        evaluating(body)


def test_with_block_sync_there_is_not_one_state():
    def wrap(model_fn):
        return replicate(model_fn, 2, block_sync=BlockSync(2))

    with pytest.raises(ValueError, match=r"reads the state of the optimizers \['optimizer'\] in mode 'eval'. With `bl"):
        evaluating(in_blocks, wrap=wrap)


def test_a_state_without_it():
    def model_fn(features, labels, mode):
        loss = jnp.mean((features["x"] @ est.get_variable("w", 3) - labels) ** 2)
        optimizer = est.Optimizer(optax.sgd(0.1), name="one" if mode == "train" else "other")
        if mode != "train":
            optimizer.get_state()
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    model = est.transform(model_fn)
    with pytest.raises(ValueError, match="The state has no slots for the optimizer 'other', only .*Give the optimizer"):
        model.eval_step(model.init(jax.random.key(0), *TRAINING[0]), *TRAINING[0])
