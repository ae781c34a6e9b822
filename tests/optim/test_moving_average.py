"""Moving averages of variables: their numbers, where they are read, and what a step that is skipped does to them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import minimizing, ones
from testing.towers import replicate, started

import estimator as est
from replicate import BlockSync, TowerOptimizer, VariableDistribution

RNG = np.random.default_rng(0)
STEPS, ROWS = 6, 8
X = RNG.normal(size=(STEPS, ROWS, 4)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5, 3.0], np.float32))[..., None].astype(np.float32)
BATCHES = list(zip(X, Y, strict=True))
END = "ExponentialMovingAverage"


def model_of(ema=lambda: est.ExponentialMovingAverage(0.8), optimizer=TowerOptimizer, order=1, var_list=None):
    def model_fn(features, labels, mode):
        with est.variable_scope("net"):
            hidden = est.layers.dense(features, 8, jnp.tanh, name="hidden")
        output = est.layers.dense(hidden, 1, name="output")
        averages = ema().apply(var_list)
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=output)
        loss = est.losses.mean_squared_error(labels, output)
        train_op = est.group(*[optimizer(optax.adam(0.05)).minimize(loss), averages][::order])
        return est.EstimatorSpec(mode, output, loss, train_op)

    return model_fn


def output_of(params, x):
    hidden = jnp.tanh(x @ params["net/hidden/kernel"] + params["net/hidden/bias"])
    return hidden @ params["output/kernel"] + params["output/bias"]


@functools.cache
def by_hand(decay=None):
    """The variables and their averages after training by plain jax and optax, where few updates make `decay` smaller.
    If None, it is 0.8."""

    def loss_of(params, x, y):
        return jnp.mean((output_of(params, x) - y) ** 2)

    state = est.transform(model_of()).init(jax.random.key(0), *BATCHES[0])
    params = {name: value for name, value in state.variables.items() if not name.endswith(END)}
    optimizer = optax.adam(0.05)
    slots, averages = optimizer.init(params), params
    for n, batch in enumerate(BATCHES):
        with jax.numpy_dtype_promotion("standard"):
            updates, slots = optimizer.update(jax.grad(loss_of)(params, *batch), slots)
        params = optax.apply_updates(params, updates)
        step = 1 - (0.8 if decay is None else min(decay, (1 + n) / (10 + n)))
        averages = optax.incremental_update(params, averages, step)
    return params, averages


def trained(model_fn, batches=BATCHES, at_once=False):
    model, state = started(model_fn, *batches[0])
    if at_once:
        return model, model.train_loop(state, batches)[0]
    for batch in batches:
        state, _ = model.train_step(state, *batch)
    return model, state


def assert_averages(state, want, atol):
    params, averages = want
    assert {name for name in state.variables if name.endswith(END)} == {f"{name}/{END}" for name in averages}
    for name, value in averages.items():
        np.testing.assert_allclose(state.variables[name], params[name], atol=atol)
        np.testing.assert_allclose(state.variables[f"{name}/{END}"], value, atol=atol)


# The law: the numbers of a loop of optax.


def counting(decay, **options):
    return lambda: est.ExponentialMovingAverage(decay, num_updates=est.global_step(), **options)


def with_a_bad_batch(value):
    return [*BATCHES[:3], (np.full_like(X[0], value), Y[0]), *BATCHES[3:]]


SHARDED, SERVER, IN_TURN = (
    {"variable_distribution": getattr(VariableDistribution, name)}
    for name in ("SHARDED", "SHARED_LOCAL_PARAMETER_SERVER", "SHARED_ROUND_ROBIN")
)
debiased = model_of(counting(0.15, zero_debias=True))
in_micro_batches = model_of(counting(0.8), functools.partial(TowerOptimizer, accumulate_steps=2))
scaled = model_of(optimizer=functools.partial(est.Optimizer, loss_scale=est.DynamicLossScale(2.0**4)))
RUNS = {  # a model_fn, how it is trained, and the decay that the number of updates makes smaller in the beginning
    "grouped before the update, in a loop of steps": (model_of(order=-1), {"at_once": True}, None),
    "4 towers, sharded, num_updates": (replicate(debiased, 4, **SHARDED), {}, 0.15),
    "2 towers, in turn, micro-batches": (replicate(in_micro_batches, 2, **IN_TURN), {"at_once": True}, 0.8),
    "2 towers, server, a skipped step": (
        replicate(model_of(), 2, on_nan="skip", **SERVER),
        {"batches": with_a_bad_batch(np.nan)},
        None,
    ),
    "4 towers of 2 devices": (replicate(model_of(), 4, devices_per_tower=2), {}, None),
    "a step that a loss scale skips": (scaled, {"batches": with_a_bad_batch(np.inf)}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_averages_match_a_loop_by_optax(run):
    model_fn, how, decay = RUNS[run]
    _, state = trained(model_fn, **how)
    want = by_hand(decay)
    assert_averages(state, want, atol=2e-5 if "towers" in run or "loss scale" in run else 1e-6)
    if "skipped" in run:
        assert est.skipped_steps(state) == 1
    if "sharded" in run:
        for name in want[1]:
            assert state.variables[f"{name}/{END}"].sharding == state.variables[name].sharding


# What tf.train.ExponentialMovingAverage (TensorFlow 2.21) made of a variable that is 1, then 2, 4, 8 and 16.
OF_TENSORFLOW = {
    (0.9, False): [1.1, 1.3900001, 2.0510002, 3.4459004],
    (0.2, True): [1.9, 3.6181817, 7.1236362, 14.2247276],
}


@pytest.mark.parametrize(("decay", "counts"), OF_TENSORFLOW)
def test_averages_match_tensorflow(decay, counts):
    def model_fn(features, labels, mode):
        w = ones("w")
        ema = est.ExponentialMovingAverage(decay, est.global_step() if counts else None)
        train_op = est.Optimizer(optax.sgd(1.0)).minimize(-jnp.mean(features * w))
        return est.EstimatorSpec(mode, loss=w, train_op=est.group(train_op, ema.apply(est.trainable_variables())))

    model, state = started(model_fn, np.ones(1, np.float32))
    for step, want in zip((1, 2, 4, 8), OF_TENSORFLOW[decay, counts], strict=True):
        state, _ = model.train_step(state, np.full(1, step, np.float32))
        np.testing.assert_allclose(state.variables[f"w/{END}"], want, rtol=1e-6)


def averaged(loss_of, optimizer, decay=0.5):
    """A model_fn that minimizes `loss_of(features, labels)` and averages all variables."""

    def model_fn(features, labels, mode):
        spec = minimizing(loss_of, optimizer)(features, labels, mode)
        return spec._replace(train_op=est.group(spec.train_op, est.ExponentialMovingAverage(decay).apply()))

    return model_fn


def test_an_average_is_cut_over_the_devices_of_a_tower_as_its_variable_is():
    def loss_of(features, labels):
        w = est.get_variable("w", (4, 8), partition=(None, "part"))
        net = est.get_variable("net", lambda key: {"a": jnp.ones((8, 4))}, partition=lambda x: ("part", None))
        return jnp.mean((features @ w @ net["a"]) ** 2)

    replicated = replicate(averaged(loss_of, TowerOptimizer(optax.sgd(0.1))), 4, devices_per_tower=2)
    variables = trained(replicated, [(X[0], None)])[1].variables
    assert variables[f"w/{END}"].sharding == variables["w"].sharding
    assert variables["w"].addressable_data(0).shape == (4, 4)
    assert variables[f"net/{END}"]["a"].addressable_data(0).shape == (4, 4)


@pytest.mark.slow
def test_with_block_sync_they_follow_the_global_variables():
    """Which change at the end of a block; in each step of it, the averages move towards them once."""
    model, state = started(replicate(model_of(counting(0.8)), 2, block_sync=BlockSync(3)), *BATCHES[0])
    want = dict(state.variables)
    for n, batch in enumerate(BATCHES):
        state, _ = model.train_step(state, *batch)
        for name in list(want):
            if not name.endswith(END):
                step = 1 - min(0.8, (1 + n) / (10 + n))
                want[f"{name}/{END}"] = optax.incremental_update(state.variables[name], want[f"{name}/{END}"], step)
    moved = [name for name in state.variables if name.endswith(END)]
    assert len(moved) == 4
    for name in moved:
        np.testing.assert_allclose(state.variables[name], want[name], atol=1e-6)
        assert not np.allclose(state.variables[name], state.variables[name.removesuffix(f"/{END}")], atol=1e-4)


def evaluating():
    return model_of(lambda: est.ExponentialMovingAverage(0.8, eval_with_averages=True))


@pytest.mark.quick
def test_evaluation_and_prediction_read_them_in_place_of_the_variables():
    params, averages = by_hand()
    model, state = trained(replicate(evaluating(), 4))
    assert_averages(state, (params, averages), atol=2e-5)
    want = output_of(averages, X[0])
    assert not np.allclose(want, output_of(params, X[0]), atol=1e-2)
    loss = np.mean((want - Y[0]) ** 2)
    np.testing.assert_allclose(model.eval_step(state, *BATCHES[0]).loss, loss, rtol=1e-4)
    for rows in (8, 7):  # of which seven do not divide by the towers
        np.testing.assert_allclose(model.predict_step(state, X[0][:rows]).predictions, want[:rows], atol=1e-4)


@pytest.mark.slow
def test_an_estimator_saves_them_and_exports_evaluates_and_predicts_with_them(tmp_path):
    config = est.RunConfig(save_checkpoints_steps=4, seed=0)

    def estimator():
        return est.Estimator(replicate(evaluating(), 2), tmp_path / "model", config)

    first = estimator().train(lambda: BATCHES[:3])
    first.train(lambda: BATCHES[3:])
    averages = by_hand()[1]
    assert {name for name in first.get_variable_names() if name.endswith(END)} == {f"{name}/{END}" for name in averages}
    for name, value in averages.items():
        np.testing.assert_allclose(first.get_variable_value(f"{name}/{END}"), value, atol=2e-5)
    want = output_of(averages, X[0])
    for each in (first, estimator()):
        np.testing.assert_allclose(np.stack(list(each.predict(lambda: [X[0]]))), want, atol=1e-4)
    loss = np.mean((want - Y[0]) ** 2)
    np.testing.assert_allclose(estimator().evaluate(lambda: BATCHES[:1])["loss"], loss, rtol=1e-4)
    exported = first.export_model(tmp_path / "exports", X[0])
    np.testing.assert_allclose(est.load_exported(exported)(X[0])["output"], want, atol=1e-4)


def test_average_reads_one_at_the_start_of_the_run_in_any_mode():
    def model_fn(features, labels, mode):
        w = est.get_variable("w", ())
        with est.variable_scope("a", reuse=True):
            ema = est.ExponentialMovingAverage(0.5, name="ema")
            assert ema.average("w") is None
            averages = ema.apply(["w"])
            average = ema.average("w")
            assert (ema.name, ema.average_name("w")) == ("ema", "w/ema")
        loss = jnp.mean((features * w - labels) ** 2)
        train_op = est.group(est.Optimizer(optax.sgd(0.1)).minimize(loss), averages)
        return est.EstimatorSpec(mode, {"w": w * features, "average": average * features}, loss, train_op)

    model, one = est.transform(model_fn), np.ones(1, np.float32)
    state = model.init(jax.random.key(0), one, one)
    before = state.variables
    state, spec = model.train_step(state, one, one)
    assert spec.predictions["average"] == before["w/ema"] == before["w"]
    predictions = model.eval_step(state, one, one).predictions
    assert predictions["average"] == state.variables["w/ema"] != predictions["w"]


def test_a_getter_reads_them_as_in_tensorflow():
    """The way of tf.train.ExponentialMovingAverage without a Saver: the network again, in a scope that reuses it."""

    def model_fn(features, labels, mode):
        with est.variable_scope("top") as scope:
            output = est.layers.dense(features, 1, name="output")
        ema = est.ExponentialMovingAverage(0.8)
        averages = ema.apply(est.trainable_variables("top"))

        def ema_getter(getter, name, **kwargs):
            value, average = getter(name, **kwargs), ema.average(name)
            return value if average is None else average

        with est.variable_scope(scope, reuse=True, custom_getter=ema_getter):
            smooth = est.layers.dense(features, 1, name="output")
        loss = est.losses.mean_squared_error(labels, output)
        train_op = est.group(est.Optimizer(optax.adam(0.05)).minimize(loss), averages)
        return est.EstimatorSpec(mode, {"raw": output, "smooth": smooth}, loss, train_op)

    model, state = trained(model_fn)
    predictions = model.eval_step(state, *BATCHES[0]).predictions
    kernel, bias = (state.variables[f"top/output/{name}/{END}"] for name in ("kernel", "bias"))
    np.testing.assert_allclose(predictions["smooth"], X[0] @ kernel + bias, atol=1e-5)
    assert not np.allclose(predictions["smooth"], predictions["raw"], atol=1e-3)


def test_averages_of_a_pytree_are_a_pytree():
    def loss_of(features, labels):
        net = est.get_variable("net", lambda key: {"a": jnp.ones(2), "b": {"c": jnp.ones((), jnp.bfloat16)}})
        return jnp.sum(net["a"]) * jnp.mean(features) + net["b"]["c"].astype(jnp.float32)

    _, state = trained(averaged(loss_of, est.Optimizer(optax.sgd(1.0))), [(np.ones(2, np.float32), None)])
    average = jax.tree.map(lambda x: (x.dtype.name, x.tolist()), state.variables[f"net/{END}"])
    assert average == {"a": ("float32", [0.5, 0.5]), "b": {"c": ("float32", 0.5)}}


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "num_updates"), [(jnp.float32, None), (jnp.bfloat16, 10**6)])
def test_the_average_of_a_constant_is_that_constant_in_any_dtype(dtype, num_updates):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", (), dtype, lambda key, shape, dtype: jnp.asarray(1.9, dtype))
        rises = est.get_variable("rises", (), dtype, jax.nn.initializers.zeros, trainable=False)
        if mode == est.ModeKeys.TRAIN:
            est.assign("rises", jnp.ones((), dtype))
        ema = est.ExponentialMovingAverage(0.9999, num_updates, eval_with_averages=True)
        averages = ema.apply(["w", "rises"])
        loss = jnp.mean(features * w.astype(jnp.float32))
        train_op = est.group(est.Optimizer(optax.sgd(0.0)).minimize(loss), averages)
        return est.EstimatorSpec(mode, {"w": w, "rises": rises}, loss, train_op)

    model, state = started(model_fn, X[0])
    state, _ = model.train_loop(state, (jnp.broadcast_to(X[0], (2000, *X[0].shape)), None))
    assert state.variables[f"w/{END}"] == state.variables["w"].astype(jnp.float32)
    np.testing.assert_allclose(state.variables[f"rises/{END}"], 1 - 0.9999**2000, rtol=1e-3)
    predictions = model.eval_step(state, X[0]).predictions
    assert predictions["w"] == state.variables["w"] and predictions["w"].dtype == dtype
    np.testing.assert_allclose(predictions["rises"], 0.1813, rtol=0.01)


@pytest.mark.slow
def test_they_begin_as_the_values_of_a_warm_start_and_of_init_from_checkpoint(tmp_path):
    np.savez(tmp_path / "a.npz", **{"net/hidden/kernel": np.full((4, 8), 3.0)})
    settings = est.WarmStartSettings(tmp_path / "a.npz", "net/hidden/kernel")
    est.Estimator(model_of(), tmp_path / "model", warm_start_from=settings).train(lambda: BATCHES[:1])
    for name in ("net/hidden/kernel", f"net/hidden/kernel/{END}"):
        np.testing.assert_array_equal(est.load_variable(tmp_path / "model" / "ckpt-0", name), np.full((4, 8), 3.0))

    def model_fn(features, labels, mode):
        spec = model_of()(features, labels, mode)
        est.init_from_checkpoint(tmp_path / "a.npz", {"net/hidden/kernel": "net/hidden/kernel"})
        return spec

    state = est.transform(model_fn).init(jax.random.key(0), *BATCHES[0])
    np.testing.assert_array_equal(state.variables[f"net/hidden/kernel/{END}"], np.full((4, 8), 3.0))


@pytest.mark.slow
def test_variables_begin_as_averages_by_variables_to_restore(tmp_path):
    est.Estimator(model_of(), tmp_path).train(lambda: BATCHES)

    def model_fn(features, labels, mode):
        output = est.layers.dense(est.layers.dense(features, 8, name="net/hidden"), 1, name="output")
        ema = est.ExponentialMovingAverage(0.8)
        assert ema.variables_to_restore(["output/bias"])["output/kernel"] == "output/kernel"
        est.init_from_checkpoint(tmp_path, ema.variables_to_restore())
        return est.EstimatorSpec(mode, predictions=output)

    state = est.transform(model_fn).init(jax.random.key(1), X[0], mode="infer")
    for name, value in state.variables.items():
        np.testing.assert_array_equal(value, est.load_variable(tmp_path, f"{name}/{END}"))


def test_a_train_op_without_its_half_is_an_error():
    def with_op(kept):
        def model_fn(features, labels, mode):
            loss = jnp.mean(features * est.get_variable("w", ()))
            train_op = est.Optimizer(optax.sgd(0.1)).minimize(loss)
            averages = est.ExponentialMovingAverage(0.9).apply(est.trainable_variables())
            return est.EstimatorSpec(mode, loss=loss, train_op=(train_op, averages)[kept])

        return est.transform(model_fn)

    fix = "`est.group(train_op, ema.apply(est.trainable_variables()))`"
    for kept, left_out in ((1, "the optimizers ['optimizer']"), (0, f"the averages ['w/{END}']")):
        with pytest.raises(ValueError, match=f"leaves out {re.escape(left_out)}.*{re.escape(fix)}"):
            with_op(kept).init(jax.random.key(0), X[0])


def test_averages_that_a_mode_would_pass_over_are_an_error():
    def model_fn(features, labels, mode):
        output = features * est.get_variable("w", ())
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions=output)
        averages = est.ExponentialMovingAverage(0.9, eval_with_averages=True).apply()
        train_op = est.group(est.Optimizer(optax.sgd(0.1)).minimize(output.mean()), averages)
        return est.EstimatorSpec(mode, loss=output.mean(), train_op=train_op)

    message = (
        r"averages \['w'\] in training, but in mode 'infer' `apply` is not called for them, .* before the model_fn"
    )
    model, state = started(model_fn, X[0])
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            model.predict_step(state, X[0])
    model = est.transform(model_fn)
    model.init(jax.random.key(0), X[0], mode="infer")
    with pytest.raises(ValueError, match=message):
        model.init(jax.random.key(0), X[0])


def ema():
    return est.ExponentialMovingAverage(0.9)


REFUSED = {
    ValueError: [
        (lambda: est.ExponentialMovingAverage(1.5), "needs a decay between 0 and 1, a number; got 1.5"),
        (lambda: est.ExponentialMovingAverage("0.9"), "needs a decay between 0 and 1, a number; got '0.9'"),
        (lambda: est.ExponentialMovingAverage(0.9, X[0]), "needs the number of updates as `num_updates`"),
        (lambda: ema().apply([]), "got no variables to average; create them before the call"),
        (lambda: ema().apply(["v"]), r"\('v'\)` names no variable of this run"),
        (lambda: ema().apply(["w", "w"]), "'w' has an average already, the variable 'w/Exp"),
    ],
    TypeError: [
        (lambda: est.ExponentialMovingAverage(0.9, name=None), "needs a name, a string; got None"),
        (lambda: ema().apply("w"), "needs a list of names of variables, such as `est.trainable_variables"),
        (lambda: ema().apply([X]), r"or of values, such as `\[loss\]`; got \[array"),
        (lambda: ema().apply(["n"]), "'n' holds integers or booleans, which have no average. Leave it out"),
    ],
}


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_invalid_arguments_are_errors(error, call, message):
    def model_fn(features, labels, mode):
        est.get_variable("w", ())
        est.get_variable("n", (), jnp.int32)
        call()
        return est.EstimatorSpec(mode, predictions=features)

    with pytest.raises(error, match=message):
        est.transform(model_fn).init(jax.random.key(0), X[0], mode="infer")


def test_a_model_fn_around_a_replicated_one_has_averages_of_its_own():
    """Both are read in evaluation, though the outer ones were made before the inner ones were known."""

    def inner(features, labels, mode):
        w = ones("w")
        averages = est.ExponentialMovingAverage(0.5, eval_with_averages=True).apply(["w"])
        loss = jnp.mean(w * features)
        train_op = est.group(TowerOptimizer(optax.sgd(1.0)).minimize(loss), averages)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    in_towers = replicate(inner, 2)

    def outer(features, labels, mode):
        scale = est.get_variable("scale", (), initializer=jax.nn.initializers.ones, trainable=False)
        averages = est.ExponentialMovingAverage(0.5, name="smooth", eval_with_averages=True).apply(["scale"])
        spec = in_towers(features, labels, mode)
        if mode == est.ModeKeys.TRAIN:
            est.assign_add("scale", 2.0)
            return spec._replace(train_op=est.group(spec.train_op, averages))
        return spec._replace(predictions={"scale": scale})

    x = jnp.ones(4)
    model = est.transform(outer)
    state, _ = model.train_step(model.init(jax.random.key(0), x), x)
    assert {name: float(value) for name, value in state.variables.items()} == {
        "scale": 3.0,
        "scale/smooth": 2.0,
        "w": 0.0,
        "w/ExponentialMovingAverage": 0.5,
    }
    spec = model.eval_step(state, x)
    assert (float(spec.predictions["scale"]), float(spec.loss)) == (2.0, 0.5)
