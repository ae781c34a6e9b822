"""A model that is cut over the devices of a tower, with shapes that nothing else has."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import estimator as est
from replicate import TowerOptimizer, replicate_model_fn
from testing.towers import cpus, reduced

# A gradient near 0 is all rounding, and adam's step would be all of it without an eps.
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.02, eps=1e-3),
    "clipped_adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.02, eps=1e-3)),
}
CUT = {"w": (24, 104), "v": (104, 40)}  # the shapes of the large variables


def wide(towers, parts, model_fn, **options):
    return replicate_model_fn(
        model_fn, est.Reduction.SUM_OVER_BATCH_SIZE, cpus(towers * parts), devices_per_tower=parts, **options
    )


def wide_mlp(optimizer="sgd", **options):
    def model_fn(features, labels, mode):
        w = est.get_variable("w", CUT["w"], partition=(None, "part"))
        b = est.get_variable("b", (104,), initializer=jax.nn.initializers.zeros, partition=("part",))
        v = est.get_variable("v", CUT["v"], partition=("part",))
        o = est.get_variable("o", (40, 1))
        output = (jnp.tanh(est.spread(jnp.tanh(features @ w + b), -1) @ v) @ o)[:, 0]
        export = {"serving_default": est.export.PredictOutput(output)}
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"output": output}, export_outputs=export)
        losses = (output - labels) ** 2
        loss = reduced(losses, "mean")
        made = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer
        return est.EstimatorSpec(
            mode,
            predictions={"output": output},
            loss=loss,
            train_op=TowerOptimizer(made, **options).minimize(loss),
            eval_metric_ops={
                "mean_loss": est.metrics.mean(losses),
                "accuracy": est.metrics.accuracy(labels > 0, output > 0),
            },
        )

    return model_fn


def batches(rows, steps=3, seed=0):
    x = np.random.default_rng(seed).normal(size=(steps, rows, 24)).astype(np.float32)
    return x, np.sin(x.sum(-1)).astype(np.float32)


def program(fn, *args):
    return jax.jit(fn, donate_argnums=0).lower(*args).compile()


def whole_arrays(compiled):
    """The lines of a program with an array that holds a large variable whole: as it is, turned, raveled, or with more
    dimensions in front."""
    names = [f"{m},{n}|{n},{m}|{m * n}" for m, n in CUT.values()]
    wanted = re.compile(rf"\[(?:\d+,)*(?:{'|'.join(names)})\]")
    return [line for line in compiled.as_text().splitlines() if wanted.search(line)]
