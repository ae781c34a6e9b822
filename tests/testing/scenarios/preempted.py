"""Runs that block for a minute, each in its own way, and print what their hooks see."""

import itertools
import threading
import time

import numpy as np

import estimator as est
from testing.estimators import X, Y, make


class Reports(est.Hook):
    """Prints how a run ended."""

    def __init__(self, name):
        self.name = name

    def end(self, context):
        error = type(context.error).__name__
        print("end of", self.name, context.stop_reason, context.global_step, error, flush=True)


def blocks_after(n, wait=lambda: time.sleep(0.2)):
    """An input of `n` batches, and then nothing for a minute; says so after `wait()`, when a run waits for it."""

    def input_fn():
        yield from itertools.repeat((X, Y), n)
        wait()
        print("blocked", flush=True)
        time.sleep(60)

    return input_fn


class Steps(est.Hook):
    """Lets other threads wait until a run has made some steps."""

    def __init__(self, steps):
        self.steps, self.last, self.done = steps, None, threading.Event()

    def next_step(self, step):
        self.last = self.last or step + self.steps
        return self.last if step < self.last else None

    def after_run(self, context, values):
        self.done.set()


class Evaluating(est.Hook):
    def __init__(self, estimator, input_fn):
        self.evaluate = lambda state: estimator.evaluate_state(state, input_fn, hooks=[Reports("evaluation")])

    def next_step(self, step):
        return 4 if step < 4 else 1000

    def after_run(self, context, values):
        self.evaluate(context.state)


def train(model_dir, n, wait=lambda: time.sleep(0.2)):
    steps = Steps(n)

    def wait_for_steps():
        if n:
            steps.done.wait()
        wait()

    estimator = make(model_dir, steps_per_loop=1)
    estimator.train(blocks_after(n, wait_for_steps), hooks=[steps, Reports("training")])


def evaluate(model_dir, n):
    make(model_dir).evaluate(blocks_after(n), hooks=[Reports("evaluation")])


def predict(model_dir, n):
    for _ in make(model_dir).predict(blocks_after(n), hooks=[Reports("prediction")]):
        pass


def read_predictions(model_dir):
    """Computes little, and does much with each prediction."""
    for _ in make(model_dir).predict(lambda: [X, X], hooks=[Reports("prediction")]):
        print("blocked", flush=True)
        time.sleep(60)


def evaluate_in_training(model_dir, n):
    estimator = make(model_dir)
    hooks = [Evaluating(estimator, blocks_after(n)), Reports("training")]
    estimator.train(lambda: itertools.repeat((X, Y)), hooks=hooks)


def leave_predictions(model_dir):
    """Holds results of a prediction that nobody reads on."""
    predictions = make(model_dir).predict(lambda: itertools.repeat(X))
    next(predictions)
    train(model_dir, 3)


def distill(model_dir):
    """Trains on predictions, which the input's thread reads to their end."""
    teacher = make(model_dir + "/teacher")

    def input_fn():
        for _ in teacher.predict(lambda: [X, X], yield_single_examples=False):
            yield X, Y

    make(model_dir).train(input_fn)
    print("blocked", flush=True)
    time.sleep(60)


def in_a_thread(model_dir):
    def is_saved():
        while not make(model_dir).latest_checkpoint():
            time.sleep(0.01)

    thread = threading.Thread(target=train, args=(model_dir, 3, is_saved), daemon=True)
    thread.start()
    thread.join()


def with_own_handler(model_dir):
    import signal

    signal.signal(signal.SIGTERM, lambda *_: print("own handler", flush=True))
    estimator = make(model_dir, save_checkpoints_steps=1)

    def input_fn():
        for i in range(6):
            if i == 3:
                print("blocked", flush=True)
                time.sleep(1)
            yield np.copy(X), Y

    estimator.train(input_fn, hooks=[Reports("training")])
