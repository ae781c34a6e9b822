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
    "nn": "`jax.nn`",
    "logging": "`absl.logging`, such as `absl.logging.set_verbosity(absl.logging.INFO)`",
    "no_op": "`est.group()`",
    "gradients": "`optimizer.compute_gradients(loss)`, or `est.tower_gradient(jax.grad(fn)(value))`",
    "set_random_seed": "`est.RunConfig(seed=1)`",
    "name_scope": "`jax.named_scope`, or `est.variable_scope` for the names of variables",
    "get_collection": "`est.trainable_variables()`, `est.losses.get_losses()`, or a list of the model_fn's own by "
    "`est.run_store('my_key', list)`; update ops run by themselves",
    "add_to_collection": "`est.losses.add_loss(loss)`, or `est.run_store('my_key', list).append(value)`",
    "GraphKeys": "`est.trainable_variables()`, `est.losses.get_losses()`, "
    "`est.losses.get_regularization_losses()`; update ops run by themselves",
    "keras": "`est.layers`, or a Flax module by `est.flax_module(module, 'net')`",
    "l1_regularizer": "`est.regularizers.l1(scale)`",
    "l2_regularizer": "`est.regularizers.l2(scale)`",
    "l1_l2_regularizer": "`est.regularizers.l1_l2(scale_l1, scale_l2)`",
    "dynamic_rnn": "`est.layers.lstm(inputs, units)` or `est.layers.gru`",
    "bidirectional_dynamic_rnn": "`est.layers.bidirectional_lstm(inputs, units)` or `est.layers.bidirectional_gru`",
    "global_variables": "`estimator.get_variable_names()`, outside of a model_fn",
    "Variable": "`est.get_variable('name', initializer=value)`",
    "assign_sub": "`est.assign_add('name', -value)`",
    "identity": "`est.record('name', value)` to give a value a name",
    "latest_checkpoint": "`estimator.latest_checkpoint()`; `est.checkpoints(model_dir)` lists all",
    "get_checkpoint_state": "`est.checkpoints(model_dir)`",
    "list_variables": "`python -m estimator.inspect model_dir --variables`, or `estimator.get_variable_names()`",
    "init_from_checkpoint": "`est.Estimator(..., warm_start_from=est.WarmStartSettings(...))`",
    "stop_gradient": "`jax.lax.stop_gradient`",
    "cond": "`jax.lax.cond`",
    "while_loop": "`jax.lax.while_loop`, or `jax.lax.scan`, through which gradients flow",
    "py_func": "`jax.pure_callback`",
    "DistributeConfig": "`replicate_model_fn(model_fn)`",
}
"""Of the module, besides those that it has."""

_LSTM = "`est.layers.lstm(inputs, units)`, a function that runs the cell over all steps"

LAYERS = {
    "AveragePooling1D": "`est.layers.average_pooling1d(inputs, pool_size, strides)`, a function",
    "AveragePooling2D": "`est.layers.average_pooling2d(inputs, pool_size, strides)`, a function",
    "BatchNormalization": "`est.layers.batch_normalization(inputs)`, a function",
    "Conv1D": "`est.layers.conv1d(inputs, filters, kernel_size)`, a function",
    "Conv2D": "`est.layers.conv2d(inputs, filters, kernel_size)`, a function",
    "Conv2DTranspose": "`est.layers.conv2d_transpose(inputs, filters, kernel_size)`, a function",
    "Dense": "`est.layers.dense(inputs, units)`, a function; two calls with one `name` and `reuse=est.AUTO_REUSE` "
    "share the variables",
    "Dropout": "`est.layers.dropout(inputs, rate)`, a function",
    "Embedding": "`est.layers.embed(ids, vocab_size, embed_dim)`, a function",
    "Flatten": "`est.layers.flatten(inputs)`, a function",
    "GlobalAveragePooling1D": "`est.layers.global_average_pooling1d(inputs)`, a function",
    "GlobalAveragePooling2D": "`est.layers.global_average_pooling2d(inputs)`, a function",
    "GlobalMaxPooling1D": "`est.layers.global_max_pooling1d(inputs)`, a function",
    "GlobalMaxPooling2D": "`est.layers.global_max_pooling2d(inputs)`, a function",
    "GRU": "`est.layers.gru(inputs, units)`, a function",
    "GRUCell": "`est.layers.gru(inputs, units)`, a function that runs the cell over all steps",
    "LSTM": "`est.layers.lstm(inputs, units)`, a function",
    "LSTMCell": f"{_LSTM}; `cell_name='lstm_cell'` for its names",
    "BasicLSTMCell": _LSTM,
    "MaxPooling1D": "`est.layers.max_pooling1d(inputs, pool_size, strides)`, a function",
    "MaxPooling2D": "`est.layers.max_pooling2d(inputs, pool_size, strides)`, a function",
    "SeparableConv2D": "`est.layers.separable_conv2d(inputs, filters, kernel_size)`, a function",
    "batch_norm": "`est.layers.batch_normalization(inputs)`, with the defaults of `tf.layers`",
    "convolution2d": "`est.layers.conv2d(inputs, filters, kernel_size)`",
    "conv3d": "a Flax module, or `jax.lax.conv_general_dilated`",
    "embed_sequence": "`est.layers.embed(ids, vocab_size, embed_dim)`",
    "embedding_column": "`est.feature_column.embedding_column`",
    "fully_connected": "`est.layers.dense(inputs, units, jax.nn.relu, name='fully_connected')`, whose variables are "
    "`kernel` and `bias`",
    "l1_regularizer": "`est.regularizers.l1(scale)`",
    "l2_regularizer": "`est.regularizers.l2(scale)`",
    "separable_conv1d": "a Flax module, or `jax.lax.conv_general_dilated`",
    "xavier_initializer": "`jax.nn.initializers.glorot_uniform()`",
}
"""Of `tf.layers`, `tf.contrib.layers`, Keras' layers and RNN cells, besides those that `est.layers` has."""


def check_arguments(caller: str, given: Mapping[str, Any]) -> None:
    """Raises a TypeError that names the first of the arguments, none of which there is, and what to write."""
    for name in given:
        hint = f": {ARGUMENTS[name]}" if name in ARGUMENTS else ""
        raise TypeError(f"`{caller}` got an unexpected argument {name!r}{hint}.")


def missing(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have."""
    hint = f"; here it is {NAMES[name]}" if name in NAMES else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}.", name=name)
