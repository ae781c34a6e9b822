"""What happens around the steps of a training run of several processes, for `testing.cluster` to start in each."""

import itertools
import os
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

import estimator as est
import estimator.hooks._checkpoint_saver
from replicate import TowerOptimizer
from testing.hooks import When
from testing.scenarios.team import X, batch, batches, make, own, replicated, say, shown, start, uneven, write


class Clock(est.Hook):
    """Is called when its own clock says so, and notes when that was."""

    def __init__(self):
        self.steps = []
        self._next = 0.0

    def next_step(self, step):
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + (0.02 if jax.process_index() else 0.05)
        return step + 1

    def after_run(self, context, values):
        self.steps.append(context.step)


def stop_in(index, at):
    """A hook by which one process wants to stop."""

    def stop(context):
        if jax.process_index() == index and context.step == at:
            context.request_stop("enough")

    return When(after_run=stop)


def stop_at_the_loss(context):
    """One process wants to stop, at a moment that is not one of a hook."""
    if jax.process_index():
        context.watch_losses(lambda context, step, losses: context.request_stop("the loss"))


def slowly(pairs, secs=0.01):
    for pair in pairs:
        time.sleep(secs)
        yield pair


def with_chief_hook(features, labels, mode):
    spec = shown(features, labels, mode)
    return est.EstimatorSpec(
        mode,
        predictions=spec.predictions,
        loss=spec.loss,
        train_op=spec.train_op,
        training_chief_hooks=[When(end=lambda context: say(chief=jax.process_index()))],
        training_hooks=[est.LoggingTensorHook(["loss"], every_n_iter=2)],
    )


def hooked(folder):
    start()
    logging.set_verbosity(logging.INFO)
    if jax.process_index():  # its clock is ahead, more and more
        estimator.hooks._checkpoint_saver.time = types.SimpleNamespace(monotonic=lambda: 3 * time.monotonic())
    clock, noted = Clock(), When()

    def ended():
        return noted.context.stop_reason, noted.context.global_step

    by_secs = make(os.path.join(folder, "secs"), with_chief_hook, save_checkpoints_secs=0.05, keep_checkpoint_max=None)
    with jax.log_compiles():
        by_secs.train(lambda: slowly(batches(30)), hooks=[clock, noted])
    say(clock=clock.steps, ended=ended(), saved=by_secs.latest_checkpoint())

    trackers = [est.trackers.CsvTracker()]
    stopped = make(os.path.join(folder, "stopped"), save_summary_steps=2, trackers=trackers)
    for index in (0, 1):
        stopped.train(lambda: batches(20), hooks=[stop_in(index, 5 + 8 * index), noted])
        say(stopped=ended())
    stopped.train(lambda: batches(20), hooks=[est.StopAtStepHook(3), noted])
    say(stopped=ended())
    stopped.train(lambda: slowly(batches(400)), hooks=[est.StopAtSecsHook(0.2 * (1 + jax.process_index())), noted])
    say(by_secs=ended())
    stopped.train(lambda: batches(1000), hooks=[When(after_create_state=stop_at_the_loss), noted])
    say(watched=ended())
    stopped.train(lambda: batches(9 - 3 * jax.process_index()), hooks=[noted])
    say(shorter=ended())
    timed = make(os.path.join(folder, "timed"), steps_per_loop="0.01s", log_step_count_steps=20)
    timed.train(lambda: itertools.islice(itertools.cycle(batches()), 300), hooks=[noted])
    say(timed=ended())
    nan = [*batches(3), (batch(0)[0], np.full_like(batch(0)[1], np.nan)), *batches(300)]
    timed.train(lambda: nan, hooks=[est.NanTensorHook(fail_on_nan_loss=False), noted])
    say(ended_by_nan=ended()[0])
    evaluator = est.InMemoryEvaluatorHook(stopped, uneven, every_n_iter=2)
    stopped.train(lambda: batches(3), hooks=[evaluator])
    say(in_memory=evaluator.results)

    slow = make(os.path.join(folder, "slow"), log_step_count_steps=10)
    slow.train(lambda: slowly(batches(30), secs=0.05 * jax.process_index()))
    say(waited=[row["input"] for row in est.goodput(slow.model_dir).rows])

    # One process gives up what it has in memory; the others must not take theirs then.
    if jax.process_index():
        list(stopped.predict(uneven))
    say(evaluated=stopped.evaluate(uneven))
    exported = stopped.export_model(os.path.join(folder, "exported"), {"x": X[:1], "ids": np.zeros((1, 2), np.int32)})
    say(exported=exported)
    warm = est.Estimator(replicated(shown), os.path.join(folder, "warm"), warm_start_from=stopped.model_dir)
    warm.train(lambda: batches(1), steps=1)
    say(warm=sorted(warm.warm_start_report.used), moved=float(abs(warm.get_variable_value("w")).sum()))


def table_model(features, labels, mode):
    """Of whose variables the metric "m" has for the number of steps that led to them what a table has."""
    table = jnp.array([0, 0, 9, 9, 5, 5, 3, 3, 4, 4, 4, 4, 6, 6, 6, 6, 6, 6], jnp.float32)
    w = est.get_variable("w", (3, 1))
    steps = est.get_variable("steps", (), initializer=lambda *_: jnp.float32(0), trainable=False)
    output = features["x"] @ w
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"output": output})
    est.assign("steps", (est.global_step() + 1).astype(jnp.float32))
    loss = jnp.mean((labels - output) ** 2)
    metrics = {"m": est.metrics.mean(table[steps.astype(jnp.int32)])}
    train_op = TowerOptimizer(optax.sgd(0.1)).minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


class Evaluates(est.Exporter):
    """Calls in process 0 alone what needs all."""

    name = "evaluates"

    def export(self, estimator, *args):
        return estimator.evaluate(uneven)


def trained_and_evaluated(folder):
    """Everything that `train_and_evaluate` does around a training run."""
    start()
    example = own({"x": X[:2], "ids": np.zeros((2, 2), np.int32)})[0]
    trained = make(os.path.join(folder, f"t{jax.process_count()}"), table_model)
    exporters = [est.BestExporter("best", example), est.FinalExporter("final", example)]
    hook = est.stop_if_no_decrease_hook(trained, "m", max_evals_without_decrease=2, restore_best=True)
    result = est.train_and_evaluate(
        trained,
        est.TrainSpec(lambda: batches(40), 30, hooks=[hook]),
        [est.EvalSpec(uneven, exporters=exporters), est.EvalSpec(uneven, name="late", throttle_secs=600)],
        eval_every_steps=2,
    )
    say(result=result, evaluated=list(est.read_eval_metrics(trained.eval_dir())))
    write(folder, "t", trained.get_variable_value("*"))
    again = est.train_and_evaluate(
        trained, est.TrainSpec(lambda: batches(40), 10), est.EvalSpec(uneven, exporters=exporters)
    )
    say(again=again)
    if jax.process_count() > 1:
        spec = est.EvalSpec(uneven, name="wrong", exporters=Evaluates())
        try:
            est.train_and_evaluate(trained, est.TrainSpec(lambda: batches(40), 10), spec)
        except RuntimeError as error:
            say(wrong=str(error))
