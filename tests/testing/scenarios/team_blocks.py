"""Processes whose towers are averaged once per block (see `testing.scenarios.team`)."""

import os

import jax
import optax

import estimator as est
from replicate import BlockSync
from testing.scenarios import team as team

DILOCO = optax.sgd(0.7, momentum=0.9, nesterov=True)


def trained(folder):
    """A warm-up, a block, and one that has begun; and a run that stops within a block and resumes."""
    team.start()
    block_sync = BlockSync(2, DILOCO, warmup_steps=1, sync=["mean", "seen"])
    model = est.transform(team.replicated(team.rich(), block_sync=block_sync))
    state = model.init(jax.random.key(3), *team.batch(0))
    state, specs = model.train_loop(state, team.batches(4))
    team.write(folder, "blocks", {"state": state, "losses": specs.loss, "reported": specs.reported})

    model_fn = team.replicated(team.shown, block_sync=BlockSync(2, DILOCO))
    config = est.RunConfig(save_checkpoints_steps=1000, steps_per_loop=2)
    for steps in (3, 5):
        estimator = est.Estimator(model_fn, os.path.join(folder, f"blocks-{jax.process_count()}"), config)
        estimator.train(lambda: team.batches(6), max_steps=steps)
    team.write(folder, "blocks-resumed", estimator.get_variable_value("*"))
    team.write(folder, "blocks-evaluated", estimator.evaluate(team.uneven))
