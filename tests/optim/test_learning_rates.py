"""Learning rates under `optax.inject_hyperparams`: seen, set, set by hooks, logged and summarised."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import Linear, X, Y, endless, make, times
from testing.hooks import Noted
from testing.model_fns import minimizing, ones
from testing.summaries import read
from testing.towers import one_step, replicate, started

import estimator as est
from replicate import VariableDistribution

inject = optax.inject_hyperparams
PARAMS = {"w": jnp.ones(2), "learning_rate": jnp.ones(3)}  # one called so, to be left alone
BOTH = {"w": "a", "learning_rate": "b"}

TRANSFORMATIONS = {
    "alone": (inject(optax.adam)(0.1), {"": 0.1}),
    "chain": (optax.chain(optax.clip(1.0), inject(optax.adam)(0.1)), {"": 0.1}),
    "MultiSteps": (optax.MultiSteps(inject(optax.sgd)(0.1), 2), {"": 0.1}),
    "masked": (optax.masked(inject(optax.adam)(0.1), {"w": True, "learning_rate": False}), {"": 0.1}),
    "multi_transform": (
        optax.multi_transform({"a": inject(optax.adam)(0.1), "b": inject(optax.sgd)(0.2)}, BOTH),
        {"/inner_states/a/inner_state": 0.1, "/inner_states/b/inner_state": 0.2},
    ),
    "one of two": (optax.multi_transform({"a": inject(optax.adam)(0.1), "b": optax.sgd(0.2)}, BOTH), {"": 0.1}),
    "within another": (
        inject(lambda learning_rate: optax.chain(inject(optax.sgd)(0.2), optax.scale(learning_rate)))(0.1),
        {"": 0.1, "/inner_state/0": 0.2},
    ),
}


def state_of(**transformations):
    slots = {name: transformation.init(PARAMS) for name, transformation in transformations.items()}
    return est.State(PARAMS, slots, jnp.int32(0), jax.random.key(0))


def injected(rate=0.01):
    return Linear(lambda: inject(optax.sgd)(learning_rate=rate, momentum=0.5))


def by_step(step):
    return {"optimizer": 0.01 / (1 + step)}


@pytest.mark.parametrize("kind", TRANSFORMATIONS)
def test_each_rate_is_listed_and_set_alone(kind):
    transformation, expected = TRANSFORMATIONS[kind]
    state = state_of(it=transformation, plain=optax.adam(0.1))
    before = est.learning_rates(state)
    assert before == pytest.approx({f"it{path}": rate for path, rate in expected.items()})
    for name in before:
        after = est.set_learning_rate(state, name, 0.5)
        assert est.learning_rates(after) == {**before, name: 0.5}
        assert jax.tree.structure(after) == jax.tree.structure(state)
        pairs = zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True)
        assert sum(new is not old for new, old in pairs) == 1
    assert est.learning_rates(state) == before


def test_rates_of_optimizers_with_a_loss_scale_and_of_half_precision():
    optimizer = est.Optimizer(inject(optax.sgd)(0.1), name="scaled", loss_scale=est.DynamicLossScale())
    model_fn = minimizing(lambda x, y: jnp.mean(x.astype(jnp.bfloat16) @ ones("w", (2, 1), jnp.bfloat16)), optimizer)
    state = est.set_learning_rate(started(model_fn, X)[1], "scaled", np.float32(0.3))
    assert est.learning_rates(state) == {"scaled": float(jnp.bfloat16(0.3))}
    assert state.slots["scaled"].inner.hyperparams["learning_rate"].dtype == jnp.bfloat16


def on_two_towers(distribution):
    model_fn = minimizing(lambda x, y: jnp.mean((x @ ones("w", (2, 1)) - y) ** 2), inject(optax.sgd)(0.01))
    return replicate(model_fn, 2, variable_distribution=distribution)


@pytest.mark.quick
@pytest.mark.parametrize("distribution", [VariableDistribution.MIRRORED, VariableDistribution.SHARED_ROUND_ROBIN])
def test_a_set_rate_keeps_placement_and_programs_and_acts(distribution, compilations):
    model, state = started(on_two_towers(distribution), X, Y)
    state, _ = model.train_step(state, X, Y)
    assert est.learning_rates(state) == pytest.approx({"optimizer": 0.01})
    state, _ = model.train_step(state, X, Y)
    est.set_learning_rate(state, "optimizer", 0.03)  # compiles how a rate is written, in a newer jax
    before, rate = len(compilations), state.slots["optimizer"].hyperparams["learning_rate"]
    changed = est.set_learning_rate(state, "optimizer", 0.02)
    new = changed.slots["optimizer"].hyperparams["learning_rate"]
    assert (new.dtype, new.sharding, new.committed) == (rate.dtype, rate.sharding, rate.committed)
    (a, seen), (b, _) = model.train_step(changed, X, Y), model.train_step(state, X, Y)
    assert len(compilations) == before
    start, a, b = (jax.device_get(s.variables["w"]) for s in (state, a, b))
    np.testing.assert_allclose(a - start, 2 * (b - start), rtol=1e-5)
    assert seen.train_op.learning_rates == {"optimizer": np.float32(0.02)}


def test_without_inject_hyperparams_a_step_gives_nothing_more():
    _, spec = one_step(Linear(), X, Y)
    assert jax.tree.leaves(spec.train_op) == []
    assert est.learning_rates(state_of(optimizer=optax.adam(0.1))) == {}


def test_a_schedule_is_shown_and_not_set():
    model, state = started(injected(lambda count: 0.5 ** (1 + count)), X, Y)
    shown = [est.learning_rates(state)["optimizer"]]
    for _ in range(3):
        state, spec = model.train_step(state, X, Y)
        shown.append(est.learning_rates(state)["optimizer"])
        assert spec.train_op.learning_rates == {"optimizer": shown[-1]}
    assert shown == [0.5, 0.5, 0.25, 0.125]  # of the first step, and then of the last one
    with pytest.raises(ValueError, match=r"`est.set_learning_rate\('optimizer', 0.1\)`: .* is a schedule"):
        est.set_learning_rate(state, "optimizer", 0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1e300, "0.1", None, True, [0.1], 0.1j])
def test_a_rate_must_be_a_number_that_one_can_train_with(value):
    with pytest.raises(ValueError, match="a learning rate is a finite number of at least 0, as float32 too"):
        est.set_learning_rate(state_of(adam=inject(optax.adam)(0.1)), "adam", value)


@pytest.mark.parametrize("value", [0, 0.0, 1, np.float64(0.25), np.float32(0.25), jnp.float32(0.25), np.int64(2)])
def test_numbers_of_all_kinds_are_rates(value):
    state = est.set_learning_rate(state_of(adam=inject(optax.adam)(0.1)), "adam", value)
    assert est.learning_rates(state) == {"adam": float(value)}


def test_errors_say_which_rates_there_are_and_what_to_write():
    state = state_of(adam=inject(optax.adam)(0.1), plain=optax.adam(0.1), two=TRANSFORMATIONS["multi_transform"][0])
    names = r"\['adam', 'two/inner_states/a/inner_state', 'two/inner_states/b/inner_state'\]"
    for name in ("sgd", "two", "adam/hyperparams"):
        with pytest.raises(ValueError, match=rf"`est.set_learning_rate\('{name}', 0.1\)`: there is no .* {names}"):
            est.set_learning_rate(state, name, 0.1)
    line = r"Write `optax.inject_hyperparams\(optax.adam\)\(learning_rate=1e-3\)`"
    with pytest.raises(ValueError, match=f"'plain' has no learning rate in its state. {line}"):
        est.set_learning_rate(state, "plain", 0.1)
    with pytest.raises(ValueError, match="was made as int32; give a float: `learning_rate=1.0`"):
        est.set_learning_rate(state_of(adam=inject(optax.adam)(1)), "adam", 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("users_compiler")
def test_a_hook_sets_rates_without_compiling_and_the_run_resumes_exactly(tmp_path, compilations):
    config = {"steps_per_loop": 4, "save_summary_steps": 1, "save_checkpoints_steps": 4}
    hooks = lambda: [est.SetLearningRateHook(by_step, every_n_steps=8)]  # noqa: E731
    straight = make(str(tmp_path / "a"), injected(), **config).train(endless, hooks(), steps=4)
    compiled = len(compilations)
    straight.train(endless, hooks(), steps=12)  # by programs before which a rate was set, and others
    assert len(compilations) == compiled
    expected = {step: np.float32(0.01 if step <= 8 else 0.01 / 9) for step in range(1, 17)}
    assert read(straight.model_dir, "learning_rate") == expected
    for steps in (8, 2, 6):  # stops where a rate is set, and where none is
        cut = make(str(tmp_path / "b"), injected(), **config).train(endless, hooks(), steps=steps)
    assert read(cut.model_dir, "learning_rate") == expected
    for name in straight.get_variable_names():
        np.testing.assert_array_equal(straight.get_variable_value(name), cut.get_variable_value(name))
    assert straight.get_learning_rates() == pytest.approx({"optimizer": 0.01 / 17})


def test_a_dict_of_rates_holds_from_where_a_run_resumes(tmp_path):
    estimator = make(str(tmp_path), injected()).train(endless, steps=3)
    estimator.train(endless, [est.SetLearningRateHook({"optimizer": 0.25})], steps=1)
    assert estimator.get_learning_rates() == {"optimizer": 0.25}


def test_a_dict_of_rates_is_read_each_time_and_sets_the_first_step(tmp_path):
    rates = {"optimizer": 0.004}

    def halve(context, values):
        rates["optimizer"] /= 2

    hooks = [Noted("", [], after_run=halve), est.SetLearningRateHook(rates, every_n_steps=2)]
    estimator = make(str(tmp_path), injected(), save_summary_steps=1).train(endless, hooks, steps=6)
    shown = read(str(tmp_path), "learning_rate")
    # The hook with a state is called first: after step 2 it finds what was halved after step 1.
    assert list(shown.values()) == pytest.approx([0.004, 0.004, 0.002, 0.002, 0.0005, 0.0005])
    assert estimator.get_learning_rates() == pytest.approx({"optimizer": 0.000125})


def test_a_rate_set_after_the_checkpoint_of_the_last_step_is_lost_in_memory_too(tmp_path):
    def late(context, values):
        context.set_learning_rate("optimizer", 0.5 if context.global_step == 4 else 0.002)

    config = {"save_checkpoints_steps": 2, "save_summary_steps": 1}
    estimator = make(str(tmp_path), injected(), **config).train(endless, [Noted("", [], after_run=late)], steps=4)
    assert estimator.get_learning_rates() == pytest.approx({"optimizer": 0.002})
    estimator.train(endless, steps=1)
    assert read(str(tmp_path), "learning_rate")[5] == np.float32(0.002)


def test_hooks_refuse_what_cannot_be(tmp_path):
    with pytest.raises(TypeError, match=r"takes a dict of learning rates by name, or a function .*; got 0.1"):
        est.SetLearningRateHook(0.1)
    with pytest.raises(ValueError, match="every_n_steps of SetLearningRateHook must be a positive int; got 0"):
        est.SetLearningRateHook({}, every_n_steps=0)
    estimator = make(str(tmp_path), injected())
    with pytest.raises(TypeError, match=r"given to SetLearningRateHook returned 0.1 at step 0"):
        estimator.train(endless, [est.SetLearningRateHook(lambda step: 0.1)], steps=1)
    with pytest.raises(ValueError, match=r"`context.set_learning_rate\('adam', 0.1\)`: there is no .*\['optimizer'\]"):
        estimator.train(endless, [est.SetLearningRateHook({"adam": 0.1})], steps=1)
    at_end = Noted("", [], end=lambda context: context.set_learning_rate("optimizer", 0.1))
    with pytest.raises(RuntimeError, match="is for hooks of a training.*got mode 'train', phase 'end'"):
        estimator.train(endless, [at_end], steps=1)
    reads = Noted("", [], after_create_state=lambda context: context.set_learning_rate("optimizer", 0.1))
    with pytest.raises(RuntimeError, match="is for hooks of a training.*got mode 'eval'"):
        estimator.evaluate(times(1), hooks=[reads])


@pytest.mark.quick
def test_logs_and_summaries_have_the_rate_of_their_step(tmp_path, messages):
    def model_fn(features, labels, mode):
        spec = injected(lambda count: 0.01 / (1 + count))(features, labels, mode)
        est.summary.scalar("seen", features.mean())
        return spec

    class Values(est.Hook):
        def next_step(self, step):
            return step + 7

        def after_run(self, context, values):
            rates.append(values.learning_rates)

    rates = []
    config = {"steps_per_loop": 5, "log_step_count_steps": 3, "save_summary_steps": 5}
    make(str(tmp_path), model_fn, **config).train(endless, [Values()], steps=12)
    rate = {step: float(np.float32(0.01 / step)) for step in range(1, 13)}
    assert read(str(tmp_path), "learning_rate") == pytest.approx({step: rate[step] for step in (1, 6, 11)})
    assert rates.pop() == pytest.approx({"optimizer": rate[7]})
    lines = [text for text in messages() if text.startswith("loss = ")]
    for step, line in zip((1, 3, 6, 9, 12), lines, strict=True):
        assert f", step = {step}, learning_rate = {rate[step]:.6g}" in line


def test_rates_on_devices_of_variables_outlive_the_state_that_the_next_step_takes(tmp_path):
    model_fn = on_two_towers(VariableDistribution.SHARED_ROUND_ROBIN)
    hook = est.SetLearningRateHook(by_step, every_n_steps=3)
    make(str(tmp_path), model_fn, save_summary_steps=1).train(endless, [hook], steps=6)
    expected = {step: 0.01 if step <= 3 else 0.01 / 4 for step in range(1, 7)}
    assert read(str(tmp_path), "learning_rate") == pytest.approx(expected)


def of_two(*transformations):
    """Two losses with an optimizer for each, "of_a" and "of_b"."""

    def model_fn(features, labels, mode):
        losses = {name: jnp.mean((features @ est.get_variable(name, (2, 1)) - labels) ** 2) for name in "ab"}
        pairs = zip(losses.items(), transformations, strict=True)
        ops = [est.Optimizer(tx, name=f"of_{name}").minimize(loss, [name]) for (name, loss), tx in pairs]
        return est.EstimatorSpec(mode, loss=sum(losses.values()), train_op=est.group(*ops))

    return model_fn


def test_several_rates_are_shown_by_name_and_one_that_the_model_shows_itself_stays(tmp_path, messages):
    def model_fn(features, labels, mode):
        est.summary.scalar("learning_rate/of_b", jnp.float32(7))
        return of_two(inject(optax.sgd)(0.01), inject(optax.adam)(0.02))(features, labels, mode)

    config = {"log_step_count_steps": 2, "save_summary_steps": 1}
    estimator = make(str(tmp_path), model_fn, **config).train(endless, steps=2)
    assert make(str(tmp_path)).get_learning_rates() == pytest.approx({"of_a": 0.01, "of_b": 0.02})
    assert any(", learning_rate/of_a = 0.01, learning_rate/of_b = 0.02" in text for text in messages())
    assert read(estimator.model_dir, "learning_rate/of_a") == pytest.approx({1: 0.01, 2: 0.01})
    assert read(estimator.model_dir, "learning_rate/of_b") == {1: 7, 2: 7}


@pytest.mark.quick
def test_of_two_optimizers_the_one_with_a_rate_is_named_everywhere_alike(tmp_path, messages):
    seen = []

    def look(context, values):
        seen.append((values.learning_rates, est.learning_rates(context.state), [*context.report.learning_rates]))
        for name in context.report.learning_rates:
            context.set_learning_rate(name, 0.5)

    model_fn = of_two(inject(optax.sgd)(0.01), optax.adam(0.02))
    estimator = make(str(tmp_path), model_fn, save_summary_steps=1, log_step_count_steps=1)
    estimator.train(endless, [Noted("", [], after_run=look)], steps=2)
    assert seen[-1] == ({"of_a": 0.5}, {"of_a": 0.5}, ["of_a"])
    assert read(estimator.model_dir, "learning_rate/of_a") == pytest.approx({1: 0.01, 2: 0.5})
    assert any("step = 2, learning_rate/of_a = 0.5" in text for text in messages())


def test_rates_of_a_checkpoint_match_its_state(tmp_path):
    def model_fn(features, labels, mode):
        est.get_variable("x/hyperparams/learning_rate", (), trainable=False)
        w = {name: est.get_variable(name, (2, 1)) for name in "ab"}
        loss = jnp.mean((features @ w["a"] - labels) ** 2) + jnp.mean((features @ w["b"]) ** 2)
        parts = {"a": inject(optax.sgd)(0.01), "b": inject(optax.adam)(lambda count: 0.5 ** (1 + count))}
        optimizer = est.Optimizer(optax.multi_transform(parts, {"a": "a", "b": "b"}), name="two")
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    estimator = make(str(tmp_path), model_fn)
    with pytest.raises(ValueError, match="Could not find trained model in model_dir"):
        estimator.get_learning_rates()
    rates = {}

    def look(context, values):
        rates.update(est.learning_rates(context.state))

    estimator.train(endless, [Noted("", [], after_run=look)], steps=2)
    want = {"two/inner_states/a/inner_state": 0.01, "two/inner_states/b/inner_state": 0.25}
    assert rates == estimator.get_learning_rates() == pytest.approx(want)


def test_an_optimizer_without_a_rate_in_its_state_has_none_in_a_checkpoint(tmp_path):
    assert make(str(tmp_path)).train(endless, steps=1).get_learning_rates() == {}
