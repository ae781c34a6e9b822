"""The summaries that train writes: which, at which steps, once for each, and of which values."""

import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorboardX
from testing.estimators import X, endless, make, times
from testing.summaries import Fails, Losses, changing, read, scalars, showing, shown, steps_of
from testing.towers import cpus

import estimator as est
from estimator.hooks import _timer
from estimator.hooks._defaults import with_default_hooks
from estimator.loop._train import Training
from estimator.runtime._shared_programs import forget_programs
from replicate import TowerOptimizer, VariableDistribution, replicate_model_fn

RATES = {"global_step/sec", "examples/sec", "input_wait"}


# Which steps, and which values.


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The losses of 230 steps, each read by itself."""
    hook = Losses()
    make(tmp_path_factory.mktemp("each"), save_summary_steps=None).train(changing, steps=230, hooks=[hook])
    return hook.of


@pytest.mark.quick
@pytest.mark.covers("1.3 loss summary")
@pytest.mark.parametrize("steps_per_loop", [1, 7, "auto"])
def test_the_loss_of_the_steps_1_101_201_is_written(tmp_path, losses, steps_per_loop):
    make(tmp_path / "run", steps_per_loop=steps_per_loop).train(changing, steps=230)
    want = {step: losses[step] for step in (1, 101, 201)}
    assert list(read(tmp_path / "run")) == [1, 101, 201]
    assert read(tmp_path / "run") == pytest.approx(want, rel=1e-5)
    assert scalars(tmp_path / "run")["loss"] == [(s, pytest.approx(v, rel=1e-5)) for s, v in want.items()]
    assert set(scalars(tmp_path / "run")) == {"loss"} | RATES
    rates, examples = read(tmp_path / "run", "global_step/sec"), read(tmp_path / "run", "examples/sec")
    assert rates and rates.keys() == examples.keys() and 1 not in rates
    assert all(rate > 0 and examples[step] == pytest.approx(4 * rate) for step, rate in rates.items())


@pytest.mark.quick
@pytest.mark.covers("1.3 loss summary")
@pytest.mark.parametrize("steps_per_loop", [1, 4])
def test_what_the_model_fn_shows_is_written_as_hooks_see_it(tmp_path, steps_per_loop):
    class Sees(est.Hook):
        def begin(self):
            self.of = {}

        def next_step(self, step):
            return step + 10 - (step - 1) % 10

        def before_run(self, context):
            return ["brightness", "input/values", "input/rows"]

        def after_run(self, context, values):
            self.of[context.global_step] = [values.loss, *values.results]

    hook = Sees()
    make(tmp_path, showing, save_summary_steps=10, steps_per_loop=steps_per_loop).train(
        changing, steps=35, hooks=[hook]
    )
    written = shown(tmp_path)
    assert set(written) == {"loss", "brightness", "input/values", "input/rows/image/0", "input/rows/image/1"} | RATES
    assert list(hook.of) == [1, 11, 21, 31]
    for i, (step, (loss, brightness, histogram, images)) in enumerate(hook.of.items()):
        assert (read(tmp_path)[step], read(tmp_path, "brightness")[step]) == (loss, brightness)
        values = {tag: points[i] for tag, points in written.items() if tag not in RATES}
        assert {at for at, _ in values.values()} == {step}
        assert values["brightness"][1].simple_value == np.float32(brightness)
        histo = values["input/values"][1].histo
        assert (histo.num, histo.min, histo.max) == (8, histogram.minimum, histogram.maximum)
        assert sum(histo.bucket) == histogram.counts.sum() == 8
        assert images.shape[0] == 2 and values["input/rows/image/1"][1].image.width == 2
    assert "quiet" not in est.read_history(tmp_path)[0]


def showing_products(features, labels, mode):
    w = est.get_variable("w", (2, 1), initializer=jax.nn.initializers.ones)
    est.summary.scalar("w", w.mean())
    est.summary.histogram("products", features @ w)
    est.summary.image("rows", features.reshape(-1, 1, 2, 1) / 8, max_outputs=3)
    est.summary.scalar("brightness", features.mean())
    loss = jnp.mean((features @ w - labels) ** 2)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.sgd(0.001)).minimize(loss))


@pytest.mark.quick
@pytest.mark.usefixtures("quick_steps")
@pytest.mark.parametrize("distribution", [None, "SHARED_ROUND_ROBIN"])
def test_programs_of_several_steps_show_what_single_steps_show(tmp_path, monkeypatch, distribution):
    model_fn = showing_products
    if distribution:
        how = VariableDistribution[distribution]
        model_fn = replicate_model_fn(model_fn, devices=cpus(2), variable_distribution=how)
    programs, start = [], Training._start

    def noted(self, run, reporting):
        programs.append(run)
        return start(self, run, reporting)

    monkeypatch.setattr(Training, "_start", noted)
    written = []
    for steps_per_loop in (1, 10):
        directory = tmp_path / str(steps_per_loop)
        estimator = make(directory, model_fn, save_summary_steps=10, steps_per_loop=steps_per_loop)
        del programs[:]
        estimator.train(changing, steps=31)
        written.append([(row["step"], row["loss"], row["w"]) for row in est.read_history(directory)])
        np.testing.assert_allclose(written[-1], written[0], rtol=1e-5)
        histograms = [list(value.histo.bucket) for _, value in shown(directory)["products"]]
        assert len(histograms) == 4 and all(sum(counts) == 4 for counts in histograms)
    if not distribution:
        assert [run.steps for run in programs] == [1, 10, 10, 10]  # no step is a program of its own for it


def test_a_model_fn_that_shows_nothing_compiles_and_runs_no_more(tmp_path, compilations):
    counts = []
    for name, every in (("with", 10), ("without", None)):
        estimator = make(tmp_path / name, save_summary_steps=every, steps_per_loop=20)
        forget_programs()  # that both have
        del compilations[:]
        estimator.train(endless, steps=60)
        counts.append(len(compilations))
    assert counts[0] == counts[1] > 0
    assert len(read(tmp_path / "with")) == 6


@pytest.mark.quick
@pytest.mark.covers("4 SummarySaverHook")
@pytest.mark.parametrize("model_fn", [None, showing])
def test_moments_are_the_same_wherever_a_run_begins(tmp_path, model_fn):
    estimator = make(tmp_path, model_fn, save_summary_steps=10)
    for steps in (7, 4, 1, 13):
        estimator.train(endless, steps=steps)
    assert list(read(tmp_path)) == [1, 11, 21]
    assert steps_of(scalars(tmp_path)["loss"]) == [1, 11, 21]


@pytest.mark.quick
@pytest.mark.covers("4 SummarySaverHook")
@pytest.mark.parametrize("model_fn", [None, showing])
def test_by_the_clock_no_two_steps_are_written_at_once(tmp_path, monkeypatch, model_fn):
    class Ticks(est.Hook):
        """A step takes 0.3 s."""

        def after_run(self, context, values):
            clock.now += 0.3

    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(_timer, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    estimator = make(tmp_path, model_fn, log_step_count_steps=1)
    estimator.train(endless, steps=30, hooks=[Ticks(), est.SummarySaverHook(save_secs=1.5)])
    steps = list(read(tmp_path))
    assert 3 <= len(steps) and min(np.diff(steps)) >= 5  # as many as make 1.5 s; a few more were planned before
    estimator.train(endless, steps=9, hooks=[Ticks(), est.SummarySaverHook(save_secs=1000)])
    assert len([step for step in read(tmp_path) if step > 30]) == 1


@pytest.mark.covers("4 SummarySaverHook")
def test_nothing_is_written_where_the_config_says_never(tmp_path):
    make(tmp_path, showing, save_summary_steps=None).train(endless, steps=2)
    assert all(name.startswith("ckpt-") for name in os.listdir(tmp_path))


def test_towers_write_what_one_device_writes(tmp_path):
    for towers in (1, 2):
        replicated = replicate_model_fn(showing_products, devices=cpus(towers))
        make(tmp_path / str(towers), replicated, save_summary_steps=1).train(endless, steps=2)
    one, two = (shown(tmp_path / towers) for towers in "12")
    assert one.keys() - RATES == two.keys() - RATES
    for tag in one.keys() - RATES:
        for (step, value), (same_step, same) in zip(one[tag], two[tag], strict=True):
            assert step == same_step
            assert value.simple_value == pytest.approx(same.simple_value, rel=1e-5)
            assert value.image == same.image
            assert list(value.histo.bucket) == list(same.histo.bucket)
            np.testing.assert_allclose(value.histo.bucket_limit, same.histo.bucket_limit)


def test_where_the_default_hook_stands_and_what_takes_its_place(tmp_path):
    def kinds(*hooks):
        config = est.RunConfig(model_dir=str(tmp_path))
        return [type(hook).__name__ for hook in with_default_hooks([chief], hooks, config, ())]

    chief, own = Losses(), est.SummarySaverHook(save_steps=3)
    assert kinds(Fails(1)) == ["CheckpointSaverHook", "Losses", "SummarySaverHook", "Fails"]
    assert kinds(Fails(1), own) == ["CheckpointSaverHook", "Losses", "Fails", "SummarySaverHook"]
    here = est.SummarySaverHook(save_steps=3, output_dir=tmp_path / "elsewhere" / "..")
    assert kinds(here) == ["CheckpointSaverHook", "Losses", "SummarySaverHook"]
    elsewhere = est.SummarySaverHook(save_steps=3, output_dir=tmp_path / "elsewhere")
    assert kinds(elsewhere).count("SummarySaverHook") == 2
    with pytest.raises(ValueError, match="Two SummarySaverHooks write into the model_dir, .*: each tag would be there"):
        kinds(own, here)


@pytest.mark.covers("4 SummarySaverHook")
def test_a_writer_of_tensorboardX_and_a_directory_of_its_own_get_the_same(tmp_path):
    with tensorboardX.SummaryWriter(str(tmp_path / "theirs")) as writer:
        hooks = [est.SummarySaverHook(2, summary_writer=writer), est.SummarySaverHook(2, output_dir=tmp_path / "more")]
        make(tmp_path / "run", showing, save_summary_steps=4).train(changing, steps=5, hooks=hooks)
    ours, theirs = shown(tmp_path / "more"), shown(tmp_path / "theirs")
    assert ours.keys() - RATES == theirs.keys() - RATES
    for tag in ours.keys() - RATES:
        assert steps_of(ours[tag]) == steps_of(theirs[tag]) == [1, 3, 5]
        for (_, value), (_, same) in zip(ours[tag], theirs[tag], strict=True):
            assert (value.simple_value, value.histo) == (same.simple_value, same.histo)
            assert (value.image.width, value.image.height) == (same.image.width, same.image.height)
    losses = read(tmp_path / "more")
    assert read(tmp_path / "run") == {step: losses[step] for step in (1, 5)}


def test_only_the_chief_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda *args: 1)
    estimator = make(tmp_path, showing, save_checkpoints_steps=None).train(endless, steps=3)
    estimator.evaluate(times(1))
    assert not tmp_path.exists() or os.listdir(tmp_path) == []


def test_predict_has_no_directory(tmp_path):
    predictions = make(tmp_path).predict(lambda: X, hooks=[est.SummarySaverHook(save_steps=1)])
    with pytest.raises(ValueError, match="SummarySaverHook needs an output_dir in mode 'infer'; got None"):
        next(predictions)
