"""What of TensorFlow's has another name here, or none: the errors for it say what to write.

The table is for those who port a model line by line; `docs/from_tf_estimator.md` walks one across.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STEP = "a training step advances the global step by itself, and `est.global_step()` reads it: leave it out"

ARGUMENTS = {
    "global_step": _STEP,
    "name": "the name of an optimizer is given to it: `est.Optimizer(optimizer, name=...)`",
    "colocate_gradients_with_ops": "XLA places what it compiles: leave it out",
    "gate_gradients": "XLA orders what it compiles: leave it out",
    "aggregation_method": "XLA adds gradients up: leave it out",
    "grad_loss": "scale the loss instead",
}
"""Of the methods of optimizers."""

NAMES = {
    "AdamOptimizer": "`est.Optimizer(optax.adam(learning_rate))`",
    "GradientDescentOptimizer": "`est.Optimizer(optax.sgd(learning_rate))`",
    "MomentumOptimizer": "`est.Optimizer(optax.sgd(learning_rate, momentum))`",
    "AdagradOptimizer": "`est.Optimizer(optax.adagrad(learning_rate))`",
    "RMSPropOptimizer": "`est.Optimizer(optax.rmsprop(learning_rate))`",
    "FtrlOptimizer": "an optax transformation in `est.Optimizer`; optax has no FTRL",
    "BoostedTreesClassifier": "nothing: a gradient does not train trees",
    "BoostedTreesRegressor": "nothing: a gradient does not train trees",
    "Scaffold": "nothing: `warm_start_from=`, `est.Hook.after_create_state` and `RunConfig` do its work",
    "SessionRunHook": "`est.Hook`, whose `after_create_session` is called `after_create_state`",
    "SessionRunArgs": "the names that `est.Hook.before_run` returns",
    "SessionRunContext": "the `context` that an `est.Hook` gets",
    "TPUEstimator": "`est.Estimator(replicate_model_fn(model_fn))`, which runs on TPU cores too",
    "TPUEstimatorSpec": "`est.EstimatorSpec`",
    "TowerOptimizer": "`from replicate import TowerOptimizer`",
    "replicate_model_fn": "`from replicate import replicate_model_fn`",
    "clip_by_global_norm": "`optax.chain(optax.clip_by_global_norm(norm), optimizer)`",
    "create_global_step": "`est.global_step()`, which every state has",
    "get_global_step": "`est.global_step()`",
    "get_or_create_global_step": "`est.global_step()`, which every state has",
    "train": "the names of `tf.train` in `est` itself, such as `est.Optimizer` and `est.LoggingTensorHook`",
    "layers": "a Flax module, `est.flax_module(nn.Dense(10), 'net')`, or `x @ est.get_variable('kernel', shape)`",
    "nn": "`jax.nn`",
    "logging": "`absl.logging`, such as `absl.logging.set_verbosity(absl.logging.INFO)`",
    "no_op": "`est.group()`",
    "gradients": "`optimizer.compute_gradients(loss)`, or `est.tower_gradient(jax.grad(fn)(value))`",
    "set_random_seed": "`est.RunConfig(seed=1)`",
    "name_scope": "`jax.named_scope`, or `est.variable_scope` for the names of variables",
    "get_variable_scope": "`est.variable_scope('name')`",
    "get_collection": "what the model_fn keeps in a list of its own",
    "trainable_variables": "names, in `var_list=`; `optimizer.minimize(loss)` takes all trainable variables",
    "global_variables": "`estimator.get_variable_names()`, outside of a model_fn",
    "Variable": "`est.get_variable('name', initializer=value)`",
    "assign_sub": "`est.assign_add('name', -value)`",
    "identity": "`est.record('name', value)` to give a value a name",
    "init_from_checkpoint": "`est.Estimator(..., warm_start_from=est.WarmStartSettings(...))`",
    "stop_gradient": "`jax.lax.stop_gradient`",
    "cond": "`jax.lax.cond`",
    "while_loop": "`jax.lax.while_loop`, or `jax.lax.scan`, through which gradients flow",
    "py_func": "`jax.pure_callback`",
    "DistributeConfig": "`replicate_model_fn(model_fn)`",
}
"""Of the module, besides those that it has."""


def check_arguments(caller: str, given: Mapping[str, Any]) -> None:
    """Raises a TypeError that names the first of the arguments, none of which there is, and what to write."""
    for name in given:
        hint = f": {ARGUMENTS[name]}" if name in ARGUMENTS else ""
        raise TypeError(f"`{caller}` got an unexpected argument {name!r}{hint}.")


def missing(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have."""
    hint = f"; here it is {NAMES[name]}" if name in NAMES else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}.", name=name)
