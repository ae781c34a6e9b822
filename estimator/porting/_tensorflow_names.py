"""TensorFlow names that are renamed or missing, and what to write instead.

`docs/tensorflow_names.md` is made of this table, and `docs/from_tf_estimator.md` walks a whole model across.
"""

from __future__ import annotations

ARGUMENTS = {
    "name": "the name of an optimizer is given to it: `est.Optimizer(optimizer, name=...)`",
    "colocate_gradients_with_ops": "XLA places what it compiles: leave it out",
    "gate_gradients": "XLA orders what it compiles: leave it out",
    "aggregation_method": "XLA adds gradients up: leave it out",
    "grad_loss": "scale the loss instead",
}
"""TensorFlow's arguments of the methods of optimizers, and what to write instead."""

_SAME = "`est.train.{}`"
_IN_NN = (
    *("batch_normalization", "conv1d", "conv2d", "crelu", "ctc_loss", "depthwise_conv2d", "separable_conv2d"),
    *("log_uniform_candidate_sampler", "nce_loss", "sampled_softmax_loss"),
    *("in_top_k", "l2_loss", "l2_normalize", "local_response_normalization", "log_poisson_loss", "lrn"),
    *("moments", "sigmoid_cross_entropy_with_logits", "softmax_cross_entropy_with_logits"),
    *("softmax_cross_entropy_with_logits_v2", "sparse_softmax_cross_entropy_with_logits", "top_k"),
    *("weighted_cross_entropy_with_logits", "weighted_moments", "xw_plus_b", "zero_fraction"),
)
_STEP = "`est.global_step()`, which every state has"
_EXPORT = "`estimator.export_model(export_dir_base, example_features)`, and `est.load_exported` to run what it wrote"
_RECEIVER = (
    "`est.export.build_parsing_serving_input_receiver_fn(feature_spec, columns=columns)`, or "
    "`build_raw_serving_input_receiver_fn(features)`"
)
_FLAX = "a Flax module, by `est.flax_module`"
_CONVOLUTION = "a Flax module, or `jax.lax.conv_general_dilated`"
_CELLS = "BasicLSTMCell DropoutWrapper GRUCell LSTMCell MultiRNNCell RNNCell".split()
_IN_SEQ2SEQ = (
    "AttentionWrapper AttentionWrapperState BahdanauAttention BasicDecoder BasicDecoderOutput BeamSearchDecoder "
    "GreedyEmbeddingHelper LuongAttention TrainingHelper dynamic_decode tile_batch"
).split()
_HELPER = (
    "a helper of your own for `est.seq2seq.BasicDecoder`, whose `sample` calls `jax.random.categorical` with "
    "`est.make_rng()`"
)
_NO_SESSIONS = "nothing: there are no sessions"
_TREES = "nothing: a gradient does not train trees"
_TOWERS = "`replicate_model_fn(model_fn)`, from `replicate`"
_FINALLY = "nothing: a summary is in the event files once `est.summary.scalar` or another one has reported it"
_OWN_METRIC = "a subclass of `est.metrics.Metric`: its fields are sums, and `result` computes the value from them"
_GAN = (
    "a model_fn with an optimizer for each network, as in `examples/ports/dcgan.py`: "
    "`est.group(optimizer_g.minimize(loss_g, var_list=...), ...)`"
)
_MASK = "shapes of a compiled program do not depend on values (docs/how_to/masks.md)"
_IMAGES = "numpy, or Pillow, in the `input_fn`, which decodes, crops and changes images at random"
_STRINGS = "`est.feature_column.encode(features, columns)` in input_fn: strings stay on the host"

_BATCH_SIZE = "input_fn makes the batches: write their size there, or in `params`, which input_fn and model_fn get"

# Programs for TPUEstimator pass these on, once they call `est.Estimator` as the table below says.
TPU_ARGUMENTS = {
    "EstimatorSpec": {
        "host_call": "write `est.summary.scalar(name, value)` in the model_fn, and leave it out",
        "scaffold_fn": "initial values come from `warm_start_from=` or `est.init_from_checkpoint`; leave it out",
    },
    "Estimator": {
        "use_tpu": "`replicate_model_fn(model_fn)`, from `replicate`, takes what devices there are; leave it out",
        "train_batch_size": _BATCH_SIZE,
        "eval_batch_size": _BATCH_SIZE,
        "predict_batch_size": _BATCH_SIZE,
        "batch_axis": "the first axis is the batch's; leave it out",
        "eval_on_tpu": "all modes run on the same devices; leave it out",
        "export_to_tpu": "`estimator.export_model(..., platforms=...)` says what for; leave it out",
    },
}
"""Arguments of TPUEstimatorSpec and TPUEstimator that the classes here do not have, and what to write."""

NAMES = {
    # tf.estimator and tf.contrib.estimator
    "tf.estimator.BoostedTreesClassifier": _TREES,
    "tf.estimator.BoostedTreesRegressor": _TREES,
    "tf.estimator.classifier_parse_example_spec": "`est.feature_column.classifier_parse_example_spec(columns, key)`",
    "tf.estimator.regressor_parse_example_spec": "`est.feature_column.regressor_parse_example_spec(columns, key)`",
    "tf.estimator.Estimator.export_savedmodel": (
        "`estimator.export_saved_model(export_dir_base, serving_input_receiver_fn)`"
    ),
    "tf.estimator.Estimator.experimental_export_all_saved_models": _EXPORT,
    "tf.estimator.Estimator.fit": "`estimator.train(input_fn)`",
    "tf.estimator.Estimator.score": "`estimator.evaluate(input_fn)`",
    "tf.estimator.Estimator.train_and_evaluate": "`est.train_and_evaluate(estimator, train_spec, eval_spec)`",
    "tf.estimator.RunConfig.cluster_spec": "`process_count`; only `replicate.initialize_distributed` reads TF_CONFIG",
    "tf.estimator.RunConfig.evaluation_master": _NO_SESSIONS,
    "tf.estimator.RunConfig.global_id_in_cluster": "`process_index`",
    "tf.estimator.RunConfig.master": _NO_SESSIONS,
    "tf.estimator.RunConfig.num_ps_replicas": "nothing: there are no parameter servers",
    "tf.estimator.RunConfig.num_worker_replicas": "`process_count`",
    "tf.estimator.RunConfig.service": "nothing: only `replicate.initialize_distributed` reads TF_CONFIG",
    "tf.estimator.RunConfig.task_id": "`process_index`",
    "tf.estimator.RunConfig.task_type": "`is_chief`: all processes train and evaluate alike",
    "tf.estimator.RunConfig.tf_random_seed": "`seed`",
    "tf.estimator.export.ServingInputReceiver": _RECEIVER,
    "tf.estimator.export.TensorServingInputReceiver": _RECEIVER,
    "tf.contrib.estimator.TowerOptimizer": "`from replicate import TowerOptimizer`",
    "tf.contrib.estimator.replicate_model_fn": "`from replicate import replicate_model_fn`",
    "tf.contrib.estimator.binary_classification_head": "`est.BinaryClassHead()`",
    "tf.contrib.estimator.logistic_regression_head": "`est.LogisticRegressionHead()`",
    "tf.contrib.estimator.multi_class_head": "`est.MultiClassHead(n_classes)`",
    "tf.contrib.estimator.multi_head": "`est.MultiHead(heads)`",
    "tf.contrib.estimator.multi_label_head": "`est.MultiLabelHead(n_classes)`",
    "tf.contrib.estimator.poisson_regression_head": "`est.PoissonRegressionHead()`",
    "tf.contrib.estimator.regression_head": "`est.RegressionHead()`",
    "tf.contrib.estimator.clip_gradients_by_norm": "`optax.chain(est.clip_by_global_norm(norm), optimizer)`",
    "tf.contrib.tpu.TPUEstimator": f"`est.Estimator` on {_TOWERS}, which takes TPU cores too",
    "tf.contrib.tpu.TPUEstimatorSpec": "`est.EstimatorSpec`",
    "tf.contrib.tpu.TPUConfig": "`est.RunConfig(steps_per_loop=...)`",
    "tf.contrib.tpu.CrossShardOptimizer": "`TowerOptimizer`, from `replicate`",
    "tf.contrib.distribute.DistributeConfig": "`est.RunConfig(train_distribute=..., eval_distribute=...)`",
    "tf.contrib.distribute.CollectiveAllReduceStrategy": "`replicate.CollectiveAllReduceStrategy`",
    "tf.contrib.distribute.MirroredStrategy": "`replicate.MirroredStrategy`",
    "tf.contrib.distribute.OneDeviceStrategy": "`replicate.OneDeviceStrategy`",
    "tf.contrib.distribute.ParameterServerStrategy": "`replicate.ParameterServerStrategy`",
    "tf.distribute.MultiWorkerMirroredStrategy": "`replicate.CollectiveAllReduceStrategy`",
    "tf.distribute.experimental.CentralStorageStrategy": "`replicate.ParameterServerStrategy`",
    "tf.contrib.gan.estimator.GANEstimator": _GAN,
    "tf.contrib.gan.estimator.TPUGANEstimator": _GAN,
    "tf.contrib.training.HParams": "a dict, or an object of your own: `est.Estimator(model_fn, params=params)`",
    "tf.contrib.predictor.from_saved_model": "`est.load_exported(folder)`",
    # tf.train
    "tf.train.AdadeltaOptimizer": _SAME.format("AdadeltaOptimizer"),
    "tf.train.AdagradDAOptimizer": _SAME.format("AdagradDAOptimizer"),
    "tf.train.AdagradOptimizer": _SAME.format("AdagradOptimizer"),
    "tf.train.AdamOptimizer": _SAME.format("AdamOptimizer"),
    "tf.train.FtrlOptimizer": _SAME.format("FtrlOptimizer"),
    "tf.train.GradientDescentOptimizer": _SAME.format("GradientDescentOptimizer"),
    "tf.train.MomentumOptimizer": _SAME.format("MomentumOptimizer"),
    "tf.train.ProximalAdagradOptimizer": _SAME.format("ProximalAdagradOptimizer"),
    "tf.train.ProximalGradientDescentOptimizer": _SAME.format("ProximalGradientDescentOptimizer"),
    "tf.train.RMSPropOptimizer": _SAME.format("RMSPropOptimizer"),
    "tf.train.SyncReplicasOptimizer": "`TowerOptimizer`, from `replicate`",
    "tf.train.cosine_decay": _SAME.format("cosine_decay"),
    "tf.train.cosine_decay_restarts": _SAME.format("cosine_decay_restarts"),
    "tf.train.exponential_decay": _SAME.format("exponential_decay"),
    "tf.train.inverse_time_decay": _SAME.format("inverse_time_decay"),
    "tf.train.linear_cosine_decay": _SAME.format("linear_cosine_decay"),
    "tf.train.natural_exp_decay": _SAME.format("natural_exp_decay"),
    "tf.train.piecewise_constant": _SAME.format("piecewise_constant"),
    "tf.train.piecewise_constant_decay": "`est.train.piecewise_constant(x, boundaries, values)`",
    "tf.train.polynomial_decay": _SAME.format("polynomial_decay"),
    "tf.train.noisy_linear_cosine_decay": "`est.train.linear_cosine_decay`, plus noise by `est.make_rng`",
    "tf.contrib.opt.AdaMaxOptimizer": _SAME.format("AdaMaxOptimizer"),
    "tf.contrib.opt.AdamWOptimizer": _SAME.format("AdamWOptimizer"),
    "tf.contrib.opt.AddSignOptimizer": _SAME.format("AddSignOptimizer"),
    "tf.contrib.opt.LazyAdamOptimizer": _SAME.format("LazyAdamOptimizer"),
    "tf.contrib.opt.MovingAverageOptimizer": "`est.ExponentialMovingAverage(decay, eval_with_averages=True)`",
    "tf.contrib.opt.MomentumWOptimizer": _SAME.format("MomentumWOptimizer"),
    "tf.contrib.opt.PowerSignOptimizer": _SAME.format("PowerSignOptimizer"),
    "tf.train.create_global_step": _STEP,
    "tf.train.get_global_step": "`est.train.get_global_step()` or `est.global_step()`, in a hook `context.global_step`",
    "tf.train.get_or_create_global_step": "`est.train.get_or_create_global_step()` or `est.global_step()`",
    "tf.train.get_checkpoint_state": "`est.checkpoints(model_dir)`",
    "tf.train.latest_checkpoint": "`estimator.latest_checkpoint()`; `est.checkpoints(model_dir)` lists all",
    "tf.train.load_checkpoint": "`est.list_variables(path)` and `est.load_variable(path, name)`",
    "tf.train.NewCheckpointReader": "`est.list_variables(path)` and `est.load_variable(path, name)`",
    "tf.train.Saver": "`est.RunConfig(save_checkpoints_steps=100)`: the Estimator saves and restores; in a hook "
    "`context.save()`",
    "tf.train.Scaffold": "`est.init_from_checkpoint` instead of its `init_fn`; `warm_start_from=`, "
    "`est.Hook.after_create_state` and `est.RunConfig` do the rest",
    "tf.train.MonitoredTrainingSession": "`estimator.train(input_fn, hooks)`, or your own loop around `est.transform`",
    "tf.train.FeedFnHook": "the `input_fn` of `estimator.train`, which yields the values",
    "tf.train.GlobalStepWaiterHook": "nothing: all processes take each step together",
    "tf.train.SessionRunArgs": "the names that `est.Hook.before_run` returns",
    "tf.train.SessionRunContext": "the `context` that an `est.Hook` gets",
    "tf.train.SessionRunHook": "`est.Hook`, with a `context` instead of a session; its `after_create_session` is "
    "called `after_create_state`",
    "tf.train.SessionRunValues": "the `values` that `est.Hook.after_run` gets",
    "tf.train.SessionRunContext.session": "`context.state`, whose `variables` and `slots` are arrays by name",
    "tf.train.SessionRunContext.original_args": "what `est.Hook.before_run` has returned",
    # the losses, metrics, summaries, columns and input functions
    "tf.losses.Reduction.SUM_OVER_NONZERO_WEIGHTS": "`est.Reduction.SUM_BY_NONZERO_WEIGHTS`",
    "tf.losses.cosine_distance": "`est.losses.compute_weighted_loss(1 - (labels * predictions).sum(-1))`, of vectors "
    "of length 1",
    "tf.losses.mean_pairwise_squared_error": "`est.losses.compute_weighted_loss(losses)` of your own losses",
    "tf.metrics.average_precision_at_k": _OWN_METRIC,
    "tf.metrics.false_negatives_at_thresholds": _OWN_METRIC,
    "tf.metrics.false_positives_at_thresholds": _OWN_METRIC,
    "tf.metrics.mean_cosine_distance": "`est.metrics.mean(1 - (labels * predictions).sum(-1))`, of vectors of length 1",
    "tf.metrics.mean_relative_error": "`est.metrics.mean(jnp.where(normalizer == 0, 0, errors / normalizer))`, where "
    "`errors = jnp.abs(labels - predictions)`",
    "tf.metrics.mean_tensor": _OWN_METRIC,
    "tf.metrics.percentage_below": "`est.metrics.mean(values < threshold)`",
    "tf.metrics.precision_at_k": _OWN_METRIC,
    "tf.metrics.precision_at_top_k": _OWN_METRIC,
    "tf.metrics.recall_at_top_k": _OWN_METRIC,
    "tf.metrics.sensitivity_at_specificity": _OWN_METRIC,
    "tf.metrics.sparse_average_precision_at_k": _OWN_METRIC,
    "tf.metrics.sparse_precision_at_k": _OWN_METRIC,
    "tf.metrics.specificity_at_sensitivity": _OWN_METRIC,
    "tf.metrics.true_negatives_at_thresholds": _OWN_METRIC,
    "tf.metrics.true_positives_at_thresholds": _OWN_METRIC,
    "tf.summary.FileWriter": "`context.events()`, in a hook",
    "tf.summary.audio": "nothing: `est.summary` has scalars, histograms and images",
    "tf.summary.merge": _FINALLY,
    "tf.summary.merge_all": _FINALLY,
    "tf.summary.tensor_summary": "`est.record('name', value)`, for a hook to read",
    "tf.summary.text": "nothing: a compiled program has no strings; `logging.info` at the place where the text is made",
    # tf.layers, tf.contrib.layers, and the layers and cells of others
    "tf.layers.Conv3D": _CONVOLUTION,
    "tf.layers.average_pooling3d": "`jax.lax.reduce_window`",
    "tf.layers.conv3d": _CONVOLUTION,
    "tf.layers.conv3d_transpose": _CONVOLUTION,
    "tf.layers.max_pooling3d": "`jax.lax.reduce_window`",
    "tf.layers.separable_conv1d": _CONVOLUTION,
    "tf.contrib.layers.batch_norm": "`est.layers.batch_normalization(inputs)`, with the defaults of `tf.layers`",
    "tf.contrib.layers.convolution2d": "`est.layers.conv2d(inputs, filters, kernel_size)`",
    "tf.contrib.layers.embed_sequence": "`est.layers.embed(ids, vocab_size, embed_dim)`",
    "tf.contrib.layers.embedding_column": "`est.feature_column.embedding_column`",
    "tf.contrib.layers.fully_connected": "`est.layers.dense(inputs, units, jax.nn.relu, name='fully_connected')`, "
    "whose variables are `kernel` and `bias`",
    "tf.contrib.layers.l1_l2_regularizer": "`est.regularizers.l1_l2(scale_l1, scale_l2)`",
    "tf.contrib.layers.l1_regularizer": "`est.regularizers.l1(scale)`",
    "tf.contrib.layers.l2_regularizer": "`est.regularizers.l2(scale)`",
    "tf.contrib.layers.optimize_loss": "`est.train.optimize_loss(loss, global_step, learning_rate, optimizer)`",
    "tf.contrib.layers.xavier_initializer": "`jax.nn.initializers.glorot_uniform()`",
    "tf.contrib.layers.xavier_initializer_conv2d": "`jax.nn.initializers.glorot_uniform()`",
    "tf.contrib.rnn.stack_bidirectional_dynamic_rnn": "`est.layers.stack_bidirectional_rnn(inputs, units)`",
    "tf.keras": f"`est.layers`, or {_FLAX}",
    "tf.keras.layers.Embedding": "`est.layers.embed(ids, vocab_size, embed_dim)`, a function",
    "tf.keras.layers.GRU": "`est.layers.gru(inputs, units)`, a function",
    "tf.keras.layers.GlobalAveragePooling1D": "`est.layers.global_average_pooling1d(inputs)`, a function",
    "tf.keras.layers.GlobalAveragePooling2D": "`est.layers.global_average_pooling2d(inputs)`, a function",
    "tf.keras.layers.GlobalMaxPooling1D": "`est.layers.global_max_pooling1d(inputs)`, a function",
    "tf.keras.layers.GlobalMaxPooling2D": "`est.layers.global_max_pooling2d(inputs)`, a function",
    "tf.keras.layers.LSTM": "`est.layers.lstm(inputs, units)`, a function",
    "tf.nn.rnn_cell": "`est.layers`, such as `est.layers.MultiRNNCell`",
    **{f"tf.nn.rnn_cell.{name}": f"`est.layers.{name}`" for name in _CELLS},
    "tf.nn.rnn_cell.BasicRNNCell": "a subclass of `est.layers.RNNCell`",
    "tf.nn.rnn_cell.DeviceWrapper": "nothing: a tower's device is chosen for the whole of it; leave it out",
    "tf.nn.rnn_cell.LSTMStateTuple": "`est.layers.LSTMState`",
    "tf.nn.rnn_cell.ResidualWrapper": "a subclass of `est.layers.RNNCell`",
    "tf.contrib.rnn": "`est.layers`, such as `est.layers.MultiRNNCell`",
    "tf.contrib.rnn.OutputProjectionWrapper": "`est.layers.OutputProjectionWrapper`",
    # tf.nn and what is in `est.nn` of others
    **{f"tf.nn.{name}": f"`est.nn.{name}`" for name in _IN_NN},
    "tf.clip_by_average_norm": "`est.nn.clip_by_average_norm(t, clip_norm)`",
    "tf.clip_by_norm": "`est.nn.clip_by_norm(t, clip_norm)`",
    "tf.contrib.crf.crf_decode": "`est.nn.crf_decode(potentials, transition_params, sequence_length)`",
    "tf.contrib.crf.crf_log_likelihood": "`est.nn.crf_log_likelihood(inputs, tag_indices, sequence_lengths)`",
    **{f"tf.contrib.seq2seq.{name}": f"`est.seq2seq.{name}`" for name in _IN_SEQ2SEQ},
    "tf.contrib.seq2seq.SampleEmbeddingHelper": _HELPER,
    "tf.contrib.seq2seq.ScheduledEmbeddingTrainingHelper": _HELPER,
    "tf.contrib.seq2seq.sequence_loss": "`est.nn.sequence_loss(logits, targets, weights)`",
    "tf.sequence_mask": "`est.nn.sequence_mask(lengths, maxlen)`, whose `maxlen` is an int, such as `x.shape[1]`",
    "tf.nn.atrous_conv2d": "`est.layers.conv2d(inputs, filters, kernel_size, dilation_rate=2)`",
    "tf.nn.avg_pool": "`est.layers.average_pooling2d(inputs, pool_size, strides)`, with strides of height and width",
    "tf.nn.bias_add": "`jnp.add(x, b)`, or `x + b`",
    "tf.nn.bidirectional_dynamic_rnn": "`est.layers.bidirectional_lstm(inputs, units)` or "
    "`est.layers.bidirectional_gru`",
    "tf.nn.conv2d_transpose": "`est.layers.conv2d_transpose(inputs, filters, kernel_size)`, or "
    "`jax.lax.conv_transpose(x, kernel, strides, padding, transpose_kernel=True)`",
    "tf.nn.conv3d": _CONVOLUTION,
    "tf.nn.convolution": "`est.nn.conv1d` or `est.nn.conv2d`",
    "tf.nn.ctc_beam_search_decoder": "nothing: decode what `predict` gives, on the host",
    "tf.nn.ctc_greedy_decoder": "`jnp.argmax(logits, -1)`, of which the host drops repeated classes, then blanks",
    "tf.nn.depthwise_conv2d_native": "`est.nn.depthwise_conv2d`",
    "tf.nn.dropout": "`est.layers.dropout(x, rate)`, where `rate` is `1 - keep_prob`",
    "tf.nn.dynamic_rnn": "`est.layers.dynamic_rnn(cell, inputs, sequence_length)`, or `est.layers.lstm(inputs, units)`",
    "tf.nn.elu": "`jax.nn.elu`",
    "tf.nn.embedding_lookup": "`est.embedding_lookup(name, ids)` of a variable's name, or `table[ids]`",
    "tf.nn.embedding_lookup_sparse": "`est.embedding_lookup_sparse(name, ids)` of a variable's name",
    "tf.nn.fused_batch_norm": "`est.layers.batch_normalization(inputs)`",
    "tf.nn.leaky_relu": "`jax.nn.leaky_relu(x, 0.2)`: 0.2 is TensorFlow's default, 0.01 is jax's",
    "tf.nn.log_softmax": "`jax.nn.log_softmax`",
    "tf.nn.max_pool": "`est.layers.max_pooling2d(inputs, pool_size, strides)`, with strides of height and width",
    "tf.nn.relu": "`jax.nn.relu`",
    "tf.nn.relu6": "`jax.nn.relu6`",
    "tf.nn.selu": "`jax.nn.selu`",
    "tf.nn.sigmoid": "`jax.nn.sigmoid`",
    "tf.nn.softmax": "`jax.nn.softmax`",
    "tf.nn.softplus": "`jax.nn.softplus`",
    "tf.nn.softsign": "`jax.nn.soft_sign`",
    "tf.nn.swish": "`jax.nn.swish`",
    "tf.nn.tanh": "`jnp.tanh`",
    # the rest of the graph
    "tf.GraphKeys": "`est.trainable_variables()`, `est.losses.get_losses()`, "
    "`est.losses.get_regularization_losses()`; update ops run by themselves",
    "tf.Session": "nothing: the Estimator compiles and runs the steps",
    "tf.Variable": "`est.get_variable('name', initializer=value)`",
    "tf.add_to_collection": "`est.losses.add_loss(loss)`, or `est.run_store('my_key', list).append(value)`",
    "tf.ConfigProto": "nothing: jax takes all devices that it sees; environment variables such as "
    "XLA_PYTHON_CLIENT_MEM_FRACTION limit their memory",
    "tf.app": "`absl.app`, by `from absl import app`",
    "tf.argmax": "`jnp.argmax(x, axis)`, or `x.argmax(axis)`",
    "tf.assign_sub": "`est.assign_add('name', -value)`",
    "tf.boolean_mask": f"`jnp.where(mask, x, 0)`, or the `weights` of `est.losses` and `est.metrics`: {_MASK}",
    "tf.cast": "`jnp.asarray(x, dtype)`, or `x.astype(dtype)`",
    "tf.cond": "`jax.lax.cond`",
    "tf.confusion_matrix": "`jnp.zeros((n, n), jnp.int32).at[labels, predictions].add(1)`",
    "tf.constant_initializer": "`jax.nn.initializers.constant(value)`",
    "tf.contrib": "`replicate`, `est.layers`, `est.regularizers` and the heads in `est`, such as `est.MultiClassHead`",
    "tf.control_dependencies": "nothing: leave it out; update ops run by themselves, and "
    "`est.group(train_op, other)` makes one of several train_ops",
    "tf.count_nonzero": "`jnp.count_nonzero(x)`",
    "tf.dynamic_partition": f"`jnp.where(partitions == i, x, 0)` for each part: {_MASK}",
    "tf.image.central_crop": _IMAGES,
    "tf.image.decode_image": _IMAGES,
    "tf.image.decode_jpeg": _IMAGES,
    "tf.image.decode_png": _IMAGES,
    "tf.image.per_image_standardization": "`jax.nn.standardize(images, (1, 2, 3))`; TensorFlow "
    "divides by `1 / sqrt(n)` of n numbers at least",
    "tf.image.random_brightness": _IMAGES,
    "tf.image.random_flip_left_right": _IMAGES,
    "tf.image.resize_bicubic": "`jax.image.resize(images, shape, 'cubic')`, which samples at the centres of pixels",
    "tf.image.resize_bilinear": "`est.image.resize_bilinear`",
    "tf.image.resize_image_with_crop_or_pad": _IMAGES,
    "tf.image.resize_images": "`est.image.resize_bilinear(images, size)`, or `est.image.resize_nearest_neighbor`",
    "tf.image.resize_nearest_neighbor": "`est.image.resize_nearest_neighbor`",
    "tf.keras.optimizers": "`est.train`, or an `est.Optimizer` of one of optax",
    "tf.map_fn": "`jax.lax.map`, or `jax.vmap`, which takes all rows at once",
    "tf.contrib.data.make_csv_dataset": "`est.inputs.csv_input_fn(file_pattern, batch_size)`, an input_fn",
    "tf.decode_csv": "`est.inputs.csv_input_fn(file_pattern, batch_size, column_names, record_defaults)`, an input_fn",
    "tf.FixedLenFeature": "`est.io.FixedLenFeature(shape, np.float32)`",
    "tf.FixedLenSequenceFeature": "`est.io.FixedLenSequenceFeature(shape, np.float32, allow_missing=True)`",
    "tf.SparseTensorValue": "`est.io.SparseTensorValue`",
    "tf.VarLenFeature": "`est.io.VarLenFeature(np.int64)`, or of `str`",
    "tf.parse_example": "`est.io.parse_example(serialized, features)`, on the host",
    "tf.parse_single_example": "`est.io.parse_single_example(serialized, features)`, on the host",
    "tf.parse_single_sequence_example": "`est.io.parse_single_sequence_example(serialized, context, sequences)`",
    "tf.python_io.TFRecordWriter": "`est.io.TFRecordWriter(path)`",
    "tf.python_io.tf_record_iterator": "`est.io.tf_record_iterator(path)`",
    "tf.train.Example": "`est.io.Example`",
    "tf.train.SequenceExample": "`est.io.SequenceExample`",
    "tf.contrib.data.make_batched_features_dataset": "`est.inputs.tfrecord_input_fn(pattern, features, batch_size)`",
    "tf.data.TFRecordDataset": "`est.inputs.tfrecord_input_fn(pattern, features, batch_size)`, an input_fn",
    "tf.data": "any iterable of batches, a `tf.data.Dataset` too, which input_fn returns",
    "tf.data.Dataset.padded_batch": "`est.inputs.pad_batches(rows, batch_size=n)`, of an iterable of single rows",
    "tf.estimator": "`est` itself",
    "tf.flags": "`absl.flags`, by `from absl import flags`",
    "tf.get_collection": "`est.trainable_variables()`, `est.losses.get_losses()`, or a list of the model_fn's own by "
    "`est.run_store('my_key', list)`; update ops run by themselves",
    "tf.get_default_graph": "nothing: a model_fn is a function that jax traces",
    "tf.gfile": "nothing: `open(path)` for files on a disk, and `epath.Path(url)`, from `etils`, for those in a store",
    "tf.global_variables": "`estimator.get_variable_names()`, outside of a model_fn",
    "tf.global_variables_initializer": "nothing: the Estimator makes the initial values",
    "tf.glorot_normal_initializer": "`jax.nn.initializers.glorot_normal()`",
    "tf.glorot_uniform_initializer": "`jax.nn.initializers.glorot_uniform()`, the default of `est.get_variable`",
    "tf.gradients": "`optimizer.compute_gradients(loss)`, or `est.tower_gradient(jax.grad(fn)(value))`",
    "tf.identity": "`est.record('name', value)` to give a value a name",
    "tf.initializers": "`jax.nn.initializers`",
    "tf.logging": "`absl.logging`, such as `absl.logging.set_verbosity(absl.logging.INFO)`",
    "tf.name_scope": "`jax.named_scope`, or `est.variable_scope` for the names of variables",
    "tf.no_op": "`est.group()`",
    "tf.ones_initializer": "`jax.nn.initializers.ones`",
    "tf.orthogonal_initializer": "`jax.nn.initializers.orthogonal()`",
    "tf.placeholder": "nothing: input_fn yields arrays",
    "tf.py_func": "`jax.pure_callback`",
    "tf.random_normal_initializer": "`jax.nn.initializers.normal(stddev)`; TensorFlow's default is 1.0, jax's 0.01",
    "tf.random_uniform_initializer": "`jax.nn.initializers.uniform(scale)`, from 0 to `scale`",
    "tf.set_random_seed": "`est.RunConfig(seed=1)`",
    "tf.stop_gradient": "`jax.lax.stop_gradient`",
    "tf.string_to_hash_bucket_fast": _STRINGS,
    "tf.tables_initializer": "nothing: tables of strings are a part of input_fn",
    "tf.to_float": "`jnp.asarray(x, jnp.float32)`, or `x.astype(jnp.float32)`",
    "tf.to_int32": "`jnp.asarray(x, jnp.int32)`, or `x.astype(jnp.int32)`",
    "tf.truncated_normal_initializer": "`jax.nn.initializers.truncated_normal(stddev)`; TensorFlow's default is 1.0, "
    "jax's 0.01",
    "tf.uniform_unit_scaling_initializer": "`jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform')`",
    "tf.variance_scaling_initializer": "`jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'truncated_normal')`; "
    "`jax.nn.initializers.he_normal()` has the defaults of tf.contrib.layers",
    "tf.while_loop": "`jax.lax.while_loop`, or `jax.lax.scan`, through which gradients flow",
    "tf.zeros_initializer": "`jax.nn.initializers.zeros`",
}
"""By TensorFlow's name, what to write here."""

PARTS = {
    "Reduction": ("tf.losses.Reduction.",),
    "estimator.layers": ("tf.layers.", "tf.contrib.layers.", "tf.keras.layers.", "tf.nn.rnn_cell.", "tf.contrib.rnn."),
    "estimator.losses": ("tf.losses.",),
    "estimator.nn": ("tf.nn.",),
    "estimator.seq2seq": ("tf.contrib.seq2seq.",),
    "estimator.metrics": ("tf.metrics.",),
    "estimator.summary": ("tf.summary.",),
    "estimator.feature_column": ("tf.feature_column.",),
    "estimator.image": ("tf.image.",),
    "estimator.io": ("tf.io.",),
    "estimator.export": ("tf.estimator.export.",),
    "Estimator": ("tf.estimator.Estimator.",),
    "RunConfig": ("tf.estimator.RunConfig.",),
    "Context": ("tf.train.SessionRunContext.",),
}
"""The parts of TensorFlow whose names a module, or the objects of a class, have."""
