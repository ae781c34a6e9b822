"""What hooks read of a step, on any number of towers; what reading costs; and that programs of several steps change
neither values nor moments."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import Linear, X, Y, endless, make, times
from testing.model_fns import minimizing, ones
from testing.summaries import scalars
from testing.towers import cpus

import estimator as est
from estimator.loop._programs import Programs
from replicate import BlockSync, TowerOptimizer, replicate_model_fn

ArrayImpl = type(jnp.zeros(()))  # what holds values of devices
NAMES = ["loss", "mean", "rows", "net/count", "histogram", "image"]


class Asking(est.Hook):
    """Requests values every N steps, counted from the first step of all, and keeps them."""

    def __init__(self, names, every=1):
        self.names, self.every, self.got = names, every, []

    def next_step(self, step):
        return step + self.every - step % self.every

    def before_run(self, context):
        return self.names

    def after_run(self, context, values):
        self.got.append((context.global_step, context.examples, values.results))


class Looking(Asking):
    """Asks for nothing; notes its moments, and keeps the values to be read later."""

    before_run = est.Hook.before_run

    def __init__(self, every=1):
        super().__init__(None, every)

    def after_run(self, context, values):
        self.got.append((context.global_step, context.examples, values))


def reporting_model_fn(features, mode, labels=None):
    y = (features @ ones("w", (2, 1)))[:, 0]
    with est.variable_scope("net"):
        est.record("count", jnp.int32(7))
    est.summary.histogram("histogram", features)
    est.summary.image("image", jnp.tile(y[:, None, None, None], (1, 2, 2, 3)), max_outputs=2)
    return spec(features, labels, mode, y)


def small_model_fn(features, mode, labels=None):
    return spec(features, labels, mode, (features @ ones("w", (2, 1)))[:, 0])


def spec(features, labels, mode, y):
    est.record("mean", features.mean())
    est.record("rows", features * 2)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, y)
    loss = jnp.mean((y - labels[:, 0]) ** 2)
    return est.EstimatorSpec(mode, y, loss, TowerOptimizer(optax.sgd(0.01)).minimize(loss))


def read(model_fn, model_dir, batch, *runs):
    """What a hook reads in a training run of two steps, and in an evaluation and a prediction of that model."""
    estimator = make(model_dir, model_fn)
    hook = Asking(NAMES)
    estimator.train(lambda: [(X, Y), (X + 1, Y)], hooks=[hook])
    if "evaluate" in runs:
        estimator.evaluate(lambda: [batch], hooks=[hook])
    if "predict" in runs:
        hook.names = NAMES[1:]
        list(estimator.predict(lambda: [batch], hooks=[hook]))
    return [values for _, _, values in hook.got]


def same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(one) is type(other) or {type(one), type(other)} == {int, float}  # a count averaged over towers
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.covers("4 SessionRunHook", "13 13 low level hooks")
def test_values_of_towers_match_one_big_batch(tmp_path):
    five = np.concatenate([X, X[:1] + 9]), np.concatenate([Y, Y[:1]])
    want = read(reporting_model_fn, tmp_path / "plain", five, "evaluate", "predict")
    first = dict(zip(NAMES, want[0], strict=True))
    assert first["loss"] == pytest.approx(np.mean((X.sum(1) - Y[:, 0]) ** 2))
    assert first["mean"] == pytest.approx(X.mean()) and first["net/count"] == 7
    np.testing.assert_array_equal(first["rows"], X * 2)
    assert first["histogram"].counts.sum() == X.size and first["histogram"].maximum == X.max()
    np.testing.assert_array_equal(first["image"][:, 1, 1, 2], X.sum(1)[:2])
    assert want[2][2].shape == (5, 2) and want[3][1].shape == (5, 2)
    two = replicate_model_fn(reporting_model_fn, devices=cpus(2))
    same(read(two, tmp_path / "2", five, "evaluate"), want[:3])


def record_of_each_tower(features, labels):
    est.record("means", features.mean(), per_tower=True)
    est.record("columns", features.sum(0), per_tower=True)
    est.record("count", 7, per_tower=True)
    return jnp.mean((features @ ones("w", (2, 1)) - labels) ** 2)


@pytest.mark.parametrize(
    ("towers", "micro_batches", "options"),
    [(0, 1, {}), (4, 1, {}), (2, 2, {}), (2, 1, {"block_sync": BlockSync(2)})],
)
def test_a_value_of_each_tower_is_an_array_over_towers(towers, micro_batches, options, tmp_path, messages):
    model_fn = minimizing(record_of_each_tower, optax.sgd(0.0), accumulate_steps=micro_batches)
    if towers:
        model_fn = replicate_model_fn(model_fn, devices=cpus(towers), **options)
    estimator = make(tmp_path, model_fn, save_checkpoints_steps=None, save_summary_steps=1)
    hook, log = Asking(["means", "columns", "count"]), est.LoggingTensorHook(["means"], every_n_iter=1)
    estimator.train(lambda: [(X, Y)], hooks=[hook, log])
    estimator.evaluate(lambda: [(np.concatenate([X, X[:1] + 9]), np.concatenate([Y, Y[:1]]))], hooks=[hook])
    own = X.reshape(max(towers, 1), -1, 2)
    (means, columns, count), (of_five, *_) = (values for *_, values in hook.got)
    np.testing.assert_allclose(means, own.mean((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(columns, own.sum(1) / micro_batches, rtol=1e-6)
    assert count.tolist() == [7] * len(own)
    shown = [scalars(tmp_path)[f"means/tower_{i}"] for i in range(len(own))]
    np.testing.assert_allclose([value for [(step, value)] in shown], means, rtol=1e-6)
    assert any(f"means = {np.array_str(means, precision=6, suppress_small=True)}" in line for line in messages())
    if towers:  # the first tower has the fifth row too
        want = [np.concatenate([own[0], X[:1] + 9]).mean(), *means[1:]]
        np.testing.assert_allclose(of_five, want, rtol=1e-6)


@pytest.mark.covers("4 SessionRunHook")
def test_values_have_the_structure_that_was_asked_for(tmp_path):
    estimator = make(tmp_path, small_model_fn, save_checkpoints_steps=None)
    hook = Asking({"a": ["mean", ("loss",)], "b": "rows", "c": None})
    estimator.train(times(1), hooks=[hook, one := Asking("mean"), Asking(None)])
    ((_, _, got),) = hook.got
    assert set(got) == {"a", "b", "c"} and isinstance(got["a"][1], tuple) and got["c"] is None
    assert got["a"][0] == one.got[0][2] == X.mean()


@pytest.mark.covers("4 SessionRunHook")
@pytest.mark.parametrize("run", ["train", "evaluate", "predict"])
def test_an_unknown_name_is_an_error_even_if_no_one_reads_it(tmp_path, run):
    estimator = make(tmp_path, small_model_fn, save_checkpoints_steps=None)
    hook = Asking(["meen", "mean"])
    hook.after_run = None  # never called
    known = ["loss"] * (run != "predict") + ["mean", "rows"]
    with pytest.raises(ValueError, match="A hook requests the value 'meen', but the model_fn reports only ") as raised:
        list(getattr(estimator, run)(times(1), hooks=[hook]))
    assert str(known) in str(raised.value) and "Write `est.record('meen', value)` in the" in str(raised.value)


def test_there_is_no_loss_in_a_prediction(tmp_path):
    estimator = make(tmp_path)
    with pytest.raises(ValueError, match=r"A hook requests the value 'loss', but the model_fn reports only \[\]"):
        list(estimator.predict(times(1), hooks=[Asking("loss")]))
    list(estimator.predict(times(1), hooks=[hook := Looking()]))
    assert hook.got[0][2].loss is None


def test_values_are_asked_for_by_name(tmp_path):
    estimator = make(tmp_path, save_checkpoints_steps=None)
    with pytest.raises(TypeError, match=r"Asking object .*\.before_run requested array\(3\.\), but values are"):
        estimator.train(times(1), hooks=[Asking({"a": np.array(3.0)})])


# What a hook costs.


@pytest.fixture
def waits(monkeypatch):
    """A list that grows with each wait for an array: at its value, or until it is computed."""
    seen = []
    value = ArrayImpl._value

    def fetched(self):
        seen.append("fetch")
        return value.fget(self)

    def block(self):
        seen.append("block")
        return original(self)

    original = ArrayImpl.block_until_ready
    monkeypatch.setattr(ArrayImpl, "_value", property(fetched))
    monkeypatch.setattr(ArrayImpl, "block_until_ready", block)
    return seen


@pytest.fixture
def started(monkeypatch):
    """A list of the programs that are made ready: how many steps, and whether it computes what is reported."""
    programs, runs = [], Programs.runs

    def noted(self, *args):
        made = runs(self, *args)
        programs.extend((run.steps, run.reporting is not None) for run in made)
        return made

    monkeypatch.setattr(Programs, "runs", noted)
    return programs


@pytest.mark.covers("4 a hook that asks for nothing")
@pytest.mark.usefixtures("quick_steps")
def test_a_hook_that_asks_for_nothing_waits_for_nothing(tmp_path, waits, started):
    estimator = make(tmp_path, small_model_fn, save_checkpoints_steps=None, steps_per_loop=5)

    def train(*hooks):
        waits.clear(), started.clear()
        estimator.train(endless, hooks=hooks, steps=20)
        return list(waits), list(started)

    train()  # compiles
    without = train()
    assert without[1] == [(5, False)] * 4
    assert train(quiet := Looking(every=5)) == without
    assert [step for step, *_ in quiet.got] == [5, 10, 15, 20]
    waited, programs = train(Asking("mean", every=10))
    assert len(waited) > len(without[0])
    # Only the steps that are requested compute what is reported.
    assert programs == [(5, False), (4, False), (1, True)] * 2


# Steps in programs of several.


def trained(model_dir, steps_per_loop, messages):
    """All that someone sees of two training runs with several hooks."""
    first = len(messages())
    config = {"save_checkpoints_steps": 9, "log_step_count_steps": 6, "steps_per_loop": steps_per_loop}
    estimator = make(model_dir, small_model_fn, **config)
    hooks = [Asking({"loss": "loss", "mean": "mean"}, 7), Asking(["loss"], 5), Looking(4)]
    hooks += [est.LoggingTensorHook(["mean"], every_n_iter=8)]
    batches = [(X + i % 5, Y) for i in range(29)]
    estimator.train(lambda: batches, hooks=hooks, max_steps=25)
    estimator.train(lambda: batches[:4], hooks=hooks)
    losses = [(step, examples, values.loss) for step, examples, values in hooks[2].got]
    log = [text.split(" (")[0] for text in messages()[first:] if text.startswith(("loss = ", "mean = "))]
    w = estimator.get_variable_value("w")
    return hooks[0].got, hooks[1].got, losses, log, sorted(p.name for p in model_dir.glob("ckpt-*")), w


@pytest.mark.slow
@pytest.mark.covers("4 steps_per_loop")
def test_results_calls_and_logs_match_one_step_at_a_time(tmp_path, messages):
    want = trained(tmp_path / "1", 1, messages)
    assert [step for step, *_ in want[0]] == [7, 14, 21, 28]
    assert [step for step, *_ in want[1]] == [5, 10, 15, 20, 25]
    assert [(step, examples) for step, examples, _ in want[2]] == [*((n, 4 * n) for n in range(4, 25, 4)), (28, 12)]
    shown = [line.split(", ")[1] for line in want[3] if "step" in line]
    assert shown == [f"step = {n}" for n in (1, 6, 12, 18, 24, 26)]
    # Of the steps 1, 9, 17, 25; and 26, the second run's first.
    assert sum(line.startswith("mean") for line in want[3]) == 5
    for steps_per_loop in (3, "0.5s"):
        got = trained(tmp_path / str(steps_per_loop), steps_per_loop, messages)
        assert got[3:5] == want[3:5], steps_per_loop
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if not isinstance(one, str):
                np.testing.assert_allclose(one, other, rtol=1e-5)


def test_hooks_know_which_variables_are_trainable(tmp_path):
    seen = {}

    class Names(est.Hook):
        def after_create_state(self, context):
            seen[str(context.mode)] = context.trainable_variables
            assert {*context.trainable_variables} < {*context.state.variables}

    def model_fn(features, mode):
        est.get_variable("moving", (), trainable=False)
        predictions = features * est.get_variable("w", ()) + est.get_variable("b", ())
        return est.EstimatorSpec(mode, predictions, predictions.sum(), est.group())

    estimator, one = est.Estimator(model_fn, tmp_path), lambda: np.ones(2, np.float32)
    estimator.train(one, [Names()]).evaluate(one, hooks=[Names()])
    list(estimator.predict(one, hooks=[Names()]))
    assert seen == dict.fromkeys(["train", "eval", "infer"], ("w", "b"))


class ReadsTheState(est.Hook):
    """Reads the state while it is shown losses, which has the losses of later steps read too."""

    def after_create_state(self, context):
        self.seen = []
        context.watch_losses(self.watch)

    def watch(self, context, step, losses):
        self.seen.append((step, len(losses)))
        assert int(context.state.global_step) == context.global_step


def test_a_watcher_of_losses_may_read_the_state(tmp_path, messages):
    hook = ReadsTheState()
    config = est.RunConfig(log_step_count_steps=3, steps_per_loop=1)
    est.Estimator(Linear(), str(tmp_path), config).train(endless, steps=12, hooks=[hook])
    spans = sorted(hook.seen)
    assert [step for step, _ in spans] == [1 + sum(n for _, n in spans[:i]) for i in range(len(spans))]
    assert sum(n for _, n in spans) == 12
    logged = [int(re.search(r"step = (\d+)", line)[1]) for line in messages() if line.startswith("loss = ")]
    assert logged == sorted(set(logged)) and logged[-1] == 12
