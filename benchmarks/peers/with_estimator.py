"""This project's Estimator with its defaults: log lines, summaries, checkpoints, NaN checks.

python benchmarks/peers/with_estimator.py mlp
"""

import common
import jax
import optax
from jax_models import loss_of

import estimator as est


def model_fn_of(work):
    def model_fn(features, labels, mode):
        variables = {name: est.get_variable(name, initializer=value) for name, value in work.initial().items()}
        loss = loss_of(work.model, variables, features, labels)
        train_op = est.Optimizer(optax.adam(common.LEARNING_RATE)).minimize(loss)
        return est.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


class Clock(est.Hook):
    before_run_may_be_early = True

    def __init__(self, work, watch):
        self.marks, self.watch = work.marks, watch

    def next_step(self, step):
        return next((mark for mark in self.marks if mark > step), None)

    def after_run(self, context, values):
        float(values.loss)  # waits for the step
        self.watch.done(context.global_step)


def train(work, watch):
    estimator = est.Estimator(model_fn_of(work), common.temporary())
    input_fn = est.inputs.numpy_input_fn(work.x, work.y, work.batch_size, shuffle=False)
    estimator.train(input_fn, hooks=[Clock(work, watch)])
    first = work.x[: work.batch_size], work.y[: work.batch_size]
    return float(estimator.evaluate(lambda: [first])["loss"])


if __name__ == "__main__":
    common.main(train, {"jax": jax.__version__, "optax": optax.__version__})
