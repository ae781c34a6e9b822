"""Hooks that note what happens, and a model that others find noted."""

import os

import jax
import optax

import estimator as est
from testing.estimators import X, Y


class Noted(est.Hook):
    """Notes its moments as "name.moment", and calls in one of them a function that it is given."""

    def __init__(self, name, calls, **does):
        self.name, self.calls, self.does = name, calls, does

    def _note(self, moment, *args):
        self.calls.append(f"{self.name}.{moment}")
        return self.does[moment](*args) if moment in self.does else None

    def begin(self):
        self._note("begin")

    def after_create_state(self, context):
        self._note("after_create_state", context)

    def before_run(self, context):
        return self._note("before_run", context)

    def after_run(self, context, values):
        self._note("after_run", context, values)

    def end(self, context):
        self.context = context
        self._note("end", context)


class When(est.Hook):
    """Calls functions of the context at moments, as `When(after_run=f, end=g)`; after the steps that are given only,
    if there are any."""

    def __init__(self, *steps, **does):
        self.steps, self.does = steps, does

    def next_step(self, step):
        if not self.steps:
            return step + 1 if "after_run" in self.does else None
        return min((s for s in self.steps if s > step), default=None)

    def after_create_state(self, context):
        self._call("after_create_state", context)

    def after_run(self, context, values):
        if not self.steps or context.step in self.steps:
            self._call("after_run", context)

    def end(self, context):
        self.context = context
        self._call("end", context)

    def _call(self, moment, context):
        if moment in self.does:
            self.does[moment](context)


class At(When):
    """Does something after a step."""

    def __init__(self, step, does):
        super().__init__(step, after_run=lambda context: does())


class AtSteps(When):
    """Calls functions of the context after steps, by step; that of 0 before the first."""

    def __init__(self, calls):
        first = {"after_create_state": calls[0]} if 0 in calls else {}
        super().__init__(*(set(calls) - {0}), after_run=lambda context: calls[context.step](context), **first)


def raising(error):
    """A function that raises an error, whatever it gets."""

    def does(*_):
        raise error

    return does


class NotedListener(est.CheckpointSaverListener):
    """Notes its moments, and in those around a checkpoint whether that is on the disk."""

    def __init__(self, calls, stop_at=None):
        self.calls, self.stop_at = calls, stop_at

    def begin(self):
        self.calls.append("listener.begin")

    def before_save(self, context, step):
        self._note("before_save", context, step)

    def after_save(self, context, step):
        self._note("after_save", context, step)
        return step == self.stop_at

    def end(self, context, step):
        self.calls.append(f"listener.end {step}")

    def _note(self, moment, context, step):
        there = os.path.isdir(os.path.join(context.model_dir, f"ckpt-{step}"))
        self.calls.append(f"listener.{moment} {step}{' (there)' if there else ''}")


class WithHooks:
    """A model_fn whose EstimatorSpec has hooks, new ones in each of its runs."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, features, labels, mode):
        self.calls.append("model_fn")
        w = est.get_variable("w", (2, 1), initializer=jax.nn.initializers.zeros)
        loss = None if labels is None else est.losses.mean_squared_error(labels, features @ w)
        return est.EstimatorSpec(
            mode,
            predictions=features @ w,
            loss=loss,
            train_op=None if labels is None else est.Optimizer(optax.sgd(0.01)).minimize(loss),
            training_chief_hooks=[Noted("chief", self.calls)],
            training_hooks=[Noted("training", self.calls)],
            evaluation_hooks=[Noted("evaluation", self.calls)],
            prediction_hooks=[Noted("prediction", self.calls)],
        )


def noted_input_fn(calls, batches):
    def input_fn():
        calls.append("input_fn")
        return [(X, Y)] * batches

    return input_fn
