"""A training run that can be stopped in the middle of an upload."""

import asyncio
import time

import numpy as np
import optax

import estimator as est
from estimator.checkpoint import _checkpoints_iterator
from replicate import VariableDistribution, replicate_model_fn
from testing.estimators import refuse
from testing.scenarios import team, team_lives

STEPS, SAVE_EVERY = 20, 10
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(64, 4)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True))


def model_fn(features, labels, mode):
    y = features @ est.get_variable("w", (4, 1)) + est.get_variable("b", (1,))
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"y": y})
    loss = est.losses.mean_squared_error(labels, y)
    return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.adam(0.1)).minimize(loss))


def make(model_dir, **config):
    settings = {"save_checkpoints_steps": SAVE_EVERY, "save_summary_steps": 5, "steps_per_loop": 1} | config
    return est.Estimator(model_fn, model_dir, est.RunConfig(**settings))


def input_fn():
    return est.inputs.numpy_input_fn(X, Y, 16, num_epochs=None, shuffle=True, seed=1)()


def eval_input_fn():
    return [(X, Y)]


def train(model_dir, stop_at=None):
    """Trains to the end; or up to the upload of a file whose path holds `stop_at`, where it says so and waits."""
    if stop_at is not None:
        import s3fs

        put_file = s3fs.S3FileSystem._put_file

        async def wait_before(self, lpath, rpath, *args, **kwargs):
            if stop_at in rpath:
                await asyncio.sleep(0.1)  # for the uploads of other files
                print("uploading", flush=True)
                time.sleep(60)
            return await put_file(self, lpath, rpath, *args, **kwargs)

        s3fs.S3FileSystem._put_file = wait_before
    make(model_dir).train(input_fn, max_steps=STEPS)


def evaluate(model_dir):
    """Evaluates what another process trains."""
    _checkpoints_iterator._STORE_POLL_SECS = 0.2
    specs = est.TrainSpec(refuse, STEPS), est.EvalSpec(eval_input_fn)
    metrics, _ = est.train_and_evaluate(make(model_dir), *specs, role="evaluator")
    print("evaluated", metrics["global_step"], metrics["loss"], flush=True)


def sharded(model_dir):
    """An Estimator whose variables are cut over the towers, of all processes where there are several."""
    replicated = replicate_model_fn(
        team.shown, devices=team.devices(), variable_distribution=VariableDistribution.SHARDED
    )
    return est.Estimator(replicated, model_dir, est.RunConfig(save_checkpoints_steps=4))


def train_sharded(model_dir, max_steps):
    team.start()
    estimator = sharded(model_dir)
    cut = []

    class Look(est.Hook):
        def after_create_state(self, context):
            cut.extend(name for name, x in context.state.variables.items() if not x.is_fully_replicated)

    estimator.train(lambda: team_lives.Source(positions=False), max_steps=max_steps, hooks=[Look()])
    metrics = estimator.evaluate(lambda: team_lives.Source(), steps=3)
    values = {name: value.tolist() for name, value in estimator.get_variable_value("*").items()}
    team.say(values=values, metrics=metrics, cut=cut)
