"""Estimators whose evaluations a test lays down, for hooks that stop early."""

import json
import os

import jax.numpy as jnp
import numpy as np
import optax

import estimator as est
from estimator.loop._context import RunContext
from testing.hooks import When, raising

TABLE = [9, 9, 8, 9, 7, 9, 7.5, 9, 6, 9, 6.5, 9, 6.2, 9, 7, 9, 1] + 30 * [9]  # best before it stops: 6, at step 8
ONE = np.ones((2, 1), np.float32)


def make(model_dir, table=(0,) * 50, optimizer=None, wrap=lambda model_fn: model_fn, **config):
    """The metric "m" of its variables is what a table has for the number of steps that led to them."""
    table = np.array(table, np.float32)
    optimizer = optimizer or est.Optimizer(optax.sgd(0.1, momentum=0.9))

    def model_fn(features, mode):
        w = est.get_variable("w", (1, 1))
        steps = est.get_variable("steps", (), initializer=lambda *_: jnp.float32(0), trainable=False)
        est.assign("steps", (est.global_step() + 1).astype(jnp.float32))
        loss = jnp.mean((features @ w) ** 2)
        metrics = {"m": est.metrics.mean(jnp.asarray(table)[steps.astype(jnp.int32)])}
        return est.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss), eval_metric_ops=metrics)

    config = est.RunConfig(**({"save_checkpoints_steps": 100} | config))
    return est.Estimator(wrap(model_fn), str(model_dir), config)


def run(estimator, hook, max_steps=40, every=2, hooks=(), hooks_=(), batches=100, **eval_spec):
    spec = est.EvalSpec(lambda: ONE, hooks=hooks_, **eval_spec)
    train_spec = est.TrainSpec(lambda: [ONE] * batches, max_steps, [hook, *hooks])
    return est.train_and_evaluate(estimator, train_spec, spec, every)


def evaluated(estimator):
    return list(est.read_eval_metrics(estimator.eval_dir()))


def record(estimator, values, name=None, time=0.0):
    os.makedirs(estimator.eval_dir(name), exist_ok=True)
    with open(os.path.join(estimator.eval_dir(name), "history.jsonl"), "a") as file:
        for step, value in values.items():
            file.write(json.dumps({"step": step, "time": time, "loss": value}) + "\n")


def stops(hook, estimator, step=10_000):
    """Whether a training run that resumes at a step ends at once."""
    context = RunContext("train", estimator.model_dir, step)
    hook.begin()
    hook.after_create_state(context)
    return context.stop_requested


class KillAt(When):
    """Ends a run with an error, in which nothing is saved."""

    def __init__(self, step):
        super().__init__(step, after_run=raising(KeyboardInterrupt))


class KillEvaluation(est.Hook):
    """Ends an evaluation with an error."""

    def __init__(self, step):
        self.step = step

    def after_create_state(self, context):
        if context.global_step == self.step:
            raise KeyboardInterrupt


def no_decrease(estimator, **options):
    return est.stop_if_no_decrease_hook(estimator, "m", **({"max_evals_without_decrease": 3} | options))
