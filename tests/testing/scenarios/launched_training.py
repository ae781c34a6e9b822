"""Trains in the processes that a launcher or an engine starts: `launched_training.py <folder> <steps>`."""

import functools
import hashlib
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est
from replicate import TowerOptimizer, initialize_distributed, replicate_model_fn

# Of the process, as each of them says it.
NUMBERS = "JAX_PROCESS_ID", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"


def model_fn(features, labels, mode):
    w = est.get_variable("w", (8, 1), initializer=jax.nn.initializers.normal())
    noise = 0.1 * jax.random.normal(est.make_rng(), features.shape)
    loss = est.losses.mean_squared_error(labels, (features + noise) @ w)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optax.adam(0.01)).minimize(loss))


def input_fn(folder, steps):
    """The same batches for any number of processes. The training lasts long enough to be killed: its last batch waits
    for the file `enough`."""
    context, random = est.input_context(), np.random.default_rng(0)
    size = context.per_process_batch_size(16)
    for i in range(steps):
        features = random.normal(size=(16, 8)).astype(np.float32)[context.index * size :][:size]
        time.sleep(0.01)
        while i == steps - 1 and not (folder / "enough").exists():
            time.sleep(0.05)
        yield features, features.sum(1, keepdims=True)


def main(folder, steps):
    started = folder / f"started-{next(os.environ[name] for name in NUMBERS if name in os.environ)}"
    started.with_suffix(".new").write_text(str(os.getpid()))
    started.with_suffix(".new").rename(started)  # whole at any moment
    initialize_distributed(timeout_secs=60)
    config = est.RunConfig(save_checkpoints_steps=10, keep_checkpoint_max=3, resume_input="count")
    estimator = est.Estimator(replicate_model_fn(model_fn), str(folder / "model"), config)
    try:
        estimator.train(functools.partial(input_fn, folder, steps), max_steps=steps)
    except est.Preempted:
        (folder / f"preempted-{jax.process_index()}").touch()
        raise
    if jax.process_index() == 0:
        w = np.asarray(jnp.asarray(estimator.get_variable_value("w")))
        (folder / "result").write_text(hashlib.sha256(w.tobytes()).hexdigest())


def alone(folder, steps):
    """In one process, for `testing.cluster` to start."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    pathlib.Path(folder, "enough").touch()
    main(pathlib.Path(folder), steps)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
