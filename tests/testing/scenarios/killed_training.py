"""A training run that shows in its last bits what is done otherwise, and in a variable which example was used when."""

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import estimator as est
from replicate import TowerOptimizer, num_towers, replicate_model_fn, tower_index

ROWS, BATCH, STEPS, SAVE_EVERY = 60, 16, 300, 24
IMAGES = np.random.default_rng(0).normal(size=(ROWS, 8, 8, 1)).astype(np.float32)
READ_AHEAD = {"num_threads": 1, "prefetch_buffer_size": 8}  # else each process makes 500 batches, in 16 threads
LABELS = (np.arange(ROWS) % 3).astype(np.int32)


def model_fn(features, labels, mode, params):
    """A convolution, which a CPU computes in another way within a loop; dropout; and "seen", ids by step and place."""
    kernel = est.get_variable("kernel", (3, 3, 1, 8))
    x = jax.lax.conv_general_dilated(
        features["image"], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.nn.relu(x).reshape(x.shape[0], -1)
    x = jnp.where(jax.random.bernoulli(est.make_rng(), 0.8, x.shape), x, 0)
    logits = x @ est.get_variable("w", (x.shape[1], 3)) + est.get_variable("b", (3,))
    loss = est.losses.sparse_softmax_cross_entropy(labels, logits)
    est.get_variable("seen", (STEPS, BATCH), jnp.int32, jax.nn.initializers.zeros, trainable=False)
    ids, rows = features["id"][None], BATCH // num_towers()
    seen = jnp.zeros((STEPS, BATCH), jnp.int32)
    est.assign_add("seen", jax.lax.dynamic_update_slice(seen, ids, (est.global_step(), tower_index() * rows)))
    est.record("largest", jnp.abs(logits).max())
    est.summary.scalar("norm", jnp.sum(logits**2))
    optimizer = optax.adam(1e-2) if params["optimizer"] == "adam" else optax.sgd(1e-2, momentum=0.9)
    return est.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(optimizer).minimize(loss))


def examples(ids):
    return {"image": IMAGES[ids], "id": ids.astype(np.int32)}, LABELS[ids]


def map_dataset():
    import grain

    dataset = grain.MapDataset.range(ROWS).shuffle(seed=1).repeat().batch(BATCH).map(examples)
    return dataset.to_iter_dataset(grain.ReadOptions(**READ_AHEAD))


def data_loader():
    import grain.python as pygrain

    class Examples(pygrain.MapTransform):
        def map(self, ids):
            return examples(ids)

    sampler = pygrain.IndexSampler(ROWS, shard_options=pygrain.NoSharding(), shuffle=True, num_epochs=None, seed=2)
    return pygrain.DataLoader(
        data_source=pygrain.RangeDataSource(0, ROWS, 1),
        sampler=sampler,
        operations=[pygrain.Batch(BATCH), Examples()],
        worker_count=0,
        read_options=pygrain.ReadOptions(**READ_AHEAD),
    )


def generator():
    rng = np.random.default_rng(3)
    for _ in itertools.count():
        yield examples(rng.permutation(ROWS)[:BATCH])


def arrays():
    features = {"image": IMAGES, "id": np.arange(ROWS, dtype=np.int32)}
    return est.inputs.numpy_input_fn(features, LABELS, BATCH, None, shuffle=True, seed=4)()


RUNS = {  # the input, towers, steps in a program, optimizer
    "grain's MapDataset": (map_dataset, 2, "auto", "adam"),
    "grain's DataLoader": (data_loader, 1, 7, "momentum"),
    "numpy_input_fn": (arrays, 1, "auto", "momentum"),
    "a generator": (generator, 2, 1, "adam"),
}


class Progress(est.Hook):
    """Prints every tenth step, and gives others time to kill the process, more so after some lines; remembers these
    steps."""

    def __init__(self, slow_after):
        self.steps, self.left = [], slow_after

    def get_state(self):
        return self.steps

    def set_state(self, state):
        self.steps = state

    def next_step(self, step):
        return step + 10 - step % 10

    def after_run(self, context, values):
        self.steps.append(context.global_step)
        print("step", context.global_step, flush=True)
        self.left -= 1
        time.sleep(0.01 if self.left > 0 else 1)

    def end(self, context):
        print("remembered", *self.steps, flush=True)


def make(name, model_dir):
    _, towers, steps_per_loop, optimizer = RUNS[name]
    return make_with(
        model_dir,
        towers,
        optimizer,
        steps_per_loop=steps_per_loop,
        save_checkpoints_steps=SAVE_EVERY,
        save_summary_steps=50,
        trackers=[est.trackers.CsvTracker()],
        resume_input="count" if name == "a generator" else "position",
    )


def make_with(model_dir, towers, optimizer, **config):
    replicated = replicate_model_fn(model_fn, devices=[f"/cpu:{i}" for i in range(towers)])
    return est.Estimator(replicated, model_dir, est.RunConfig(**config), {"optimizer": optimizer})


def train(name, model_dir, compiles_all=False, slow_after=STEPS):
    """One process of such a run. Some of its moments depend on where it begins; they must not show.

    Args:
      compiles_all: whether to use no program that another process has compiled.
      slow_after: the lines after which it waits for a signal; it gets one, unless the machine is very busy.
    """
    if compiles_all:
        jax.config.update("jax_compilation_cache_dir", None)
    hooks = [Progress(slow_after), est.LoggingTensorHook(["largest"], every_n_iter=13)]
    make(name, model_dir).train(RUNS[name][0], hooks=hooks, max_steps=STEPS)


def train_with_slow_disk(*args):
    """`train`, where each checkpoint takes a while longer to be written."""
    finalize = ocp.PyTreeCheckpointHandler.finalize

    def finalize_later(self, directory):
        time.sleep(0.1)
        finalize(self, directory)

    ocp.PyTreeCheckpointHandler.finalize = finalize_later
    train(*args)
