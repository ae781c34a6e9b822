"""Runs that block for a minute, each in its own way, and print what their hooks see."""

import itertools
import multiprocessing
import os
import signal
import threading
import time

import numpy as np

import estimator as est
from testing.estimators import X, Y, make, saved_at
from testing.hooks import At, When


def reports(name):
    """A hook that prints how a run ended."""

    def end(context):
        error = type(context.error).__name__ if context.error else "-"
        print("end:", name, context.stop_reason, context.global_step, error, flush=True)

    return When(end=end)


def blocks_after(n, wait=lambda: time.sleep(0.2)):
    """An input of `n` batches, and then nothing for a minute; says so after `wait()`, when a run waits for it."""

    def input_fn():
        yield from itertools.repeat((X, Y), n)
        wait()
        print("blocked", flush=True)
        time.sleep(60)

    return input_fn


def train(model_dir, n, wait=lambda: time.sleep(0.2)):
    has_trained = threading.Event()

    def wait_for_steps():
        if n:
            has_trained.wait()
        wait()

    last = At((saved_at(model_dir) or [0])[-1] + n, has_trained.set)
    make(model_dir, steps_per_loop=1).train(blocks_after(n, wait_for_steps), hooks=[last, reports("training")])


def evaluate(model_dir, n):
    make(model_dir).evaluate(blocks_after(n), hooks=[reports("evaluation")])


def predict(model_dir, n):
    for _ in make(model_dir).predict(blocks_after(n), hooks=[reports("prediction")]):
        pass


def read_predictions(model_dir):
    """Computes little, and does much with each prediction."""
    for _ in make(model_dir).predict(lambda: [X, X], hooks=[reports("prediction")]):
        print("blocked", flush=True)
        time.sleep(60)


def evaluate_in_training(model_dir, n):
    estimator = make(model_dir)

    def evaluate(context):
        estimator.evaluate_state(context.state, blocks_after(n), hooks=[reports("evaluation")])

    estimator.train(lambda: itertools.repeat((X, Y)), hooks=[When(4, after_run=evaluate), reports("training")])


def export_after_training(model_dir):
    class Blocks(est.Exporter):
        name = "blocks"

        def export(self, *arguments):
            if arguments[-1]:  # after the training
                print("blocked", flush=True)
                time.sleep(60)

    endless = est.TrainSpec(lambda: itertools.repeat((X, Y)), 3)
    est.train_and_evaluate(make(model_dir), endless, est.EvalSpec(lambda: [(X, Y)], exporters=[Blocks()]))


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


def _work(i):
    time.sleep(0.05 if i < 4 else 60)
    return X


def pool_in_input(model_dir):
    """A loader whose workers are forked within the run, and which waits for their end.

    A signal finds them at work: a pool never ends if one of its workers died while it held the lock of their queue.
    """
    os.setpgrp()
    has_trained = threading.Event()

    def input_fn():
        yield X, Y
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for i, x in enumerate(pool.imap(_work, range(100_000))):
                yield x, Y
                if i == 3:
                    has_trained.wait()
                    time.sleep(0.2)
                    print("blocked", flush=True)
        pool.join()

    make(model_dir, steps_per_loop=1).train(input_fn, hooks=[At(5, has_trained.set), reports("training")])


def with_own_handler(model_dir):
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: print("end: own handler", flush=True))
    estimator = make(model_dir, save_checkpoints_steps=1)

    def input_fn():
        for i in range(6):
            if i == 3:
                print("blocked", flush=True)
                time.sleep(1)
            yield np.copy(X), Y

    estimator.train(input_fn, hooks=[reports("training")])
