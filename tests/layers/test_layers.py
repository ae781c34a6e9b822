"""Layers by themselves: other formats, precision, modes, options, cost, and errors."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import variables_of

import estimator as est

KEY = jax.random.key(3)
IMAGES = jax.random.normal(KEY, (2, 6, 5, 3))
X = jax.random.normal(KEY, (4, 3))


def model_of(layer):
    def model_fn(features, mode):
        output = layer(features)
        return est.EstimatorSpec(mode, predictions=output, loss=jnp.float32(0), train_op=est.group())

    return est.transform(model_fn)


def applied(layer, x, mode="infer", state=None):
    """The output of a layer and the variables that it starts from."""
    model = model_of(layer)
    state = model.init(jax.random.key(0), x, mode=mode) if state is None else state
    if mode == "train":
        state, spec = model.train_step(state, x)
    else:
        spec = (model.eval_step if mode == "eval" else model.predict_step)(state, x)
    return spec.predictions, state


OF_FORMATS = {
    "conv2d": lambda x, **f: est.layers.conv2d(x, 4, np.array([3, 2]), padding="same", **f),
    "transpose": lambda x, **f: est.layers.conv2d_transpose(x, 4, 3, 2, **f),
    "separable": lambda x, **f: est.layers.separable_conv2d(x, 4, 3, depth_multiplier=2, **f),
    "max2d": lambda x, **f: est.layers.max_pooling2d(x, 2, (2, 1), "same", **f),
    "average2d": lambda x, **f: est.layers.average_pooling2d(x, 3, 2, "SAME", **f),
    "global average2d": lambda x, **f: est.layers.global_average_pooling2d(x, **f),
    "global max2d": lambda x, **f: est.layers.global_max_pooling2d(x, **f),
    "flatten": lambda x, **f: est.layers.flatten(x, **f),
    "batch norm": lambda x, **f: est.layers.batch_normalization(x, axis=1 if f else -1),
    "conv1d": lambda x, **f: est.layers.conv1d(x, 4, 3, **f),
    "max1d": lambda x, **f: est.layers.max_pooling1d(x, 2, 2, **f),
    "average1d": lambda x, **f: est.layers.average_pooling1d(x, 2, 1, "same", **f),
    "global average1d": lambda x, **f: est.layers.global_average_pooling1d(x, **f),
    "global max1d": lambda x, **f: est.layers.global_max_pooling1d(x, **f),
}


@pytest.mark.quick
@pytest.mark.parametrize("names, mode", [([*OF_FORMATS], "infer"), (["batch norm"], "train")], ids=["all", "training"])
def test_channels_first_gives_the_same_numbers(names, mode):
    def layers(x):
        return {name: OF_FORMATS[name](x[:, 0] if name.endswith("1d") else x) for name in names}

    def turned(x):
        given = {name: jnp.moveaxis(x[:, 0] if name.endswith("1d") else x, -1, 1) for name in names}
        outputs = {name: OF_FORMATS[name](given[name], data_format="channels_first") for name in names}
        return {name: jnp.moveaxis(y, 1, -1) if y.ndim == given[name].ndim else y for name, y in outputs.items()}

    (want, last), (got, turned_last) = applied(layers, IMAGES, mode), applied(turned, IMAGES, mode)
    for name, value in last.variables.items():
        np.testing.assert_allclose(turned_last.variables[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("layer", [est.layers.conv2d, est.layers.separable_conv2d])
def test_strides_leave_places_out(layer):
    outputs, state = applied(lambda x: layer(x, 4, 3), IMAGES)
    strided, _ = applied(lambda x: layer(x, 4, 3, strides=2), IMAGES, state=state)
    np.testing.assert_allclose(strided, outputs[:, ::2, ::2], rtol=1e-5, atol=1e-6)


def test_outputs_have_the_dtype_of_the_inputs():
    def layers(x):
        return [
            est.layers.dense(x.mean((1, 2)), 4),
            est.layers.conv2d(x, 4, 3),
            est.layers.batch_normalization(x),
            est.layers.layer_norm(x),
            est.layers.dropout(x),
            est.layers.average_pooling2d(x, 2, 2),
            est.layers.max_pooling2d(x, 2, 2, "same"),
            est.layers.lstm(x[:, 0], 4)[0],
            est.layers.gru(x[:, 0], 4)[0],
        ]

    model, x = model_of(layers), IMAGES.astype(jnp.bfloat16)
    _, spec = jax.eval_shape(model.train_step, model.abstract_init(x), x)
    assert [output.dtype for output in spec.predictions] == [jnp.bfloat16] * 9


def test_dense_compiles_to_the_operations_of_the_same_by_hand():
    def with_layers(features, labels, mode):
        return spec(est.layers.dense(est.layers.dense(features, 8, jax.nn.relu), 1), labels, mode)

    def by_hand(features, labels, mode):
        x = features
        for name, sizes in (("dense", (3, 8)), ("dense_1", (8, 1))):
            with est.variable_scope(name):
                kernel = est.get_variable("kernel", sizes)
                bias = est.get_variable("bias", sizes[1:], initializer=jax.nn.initializers.zeros)
            x = x @ kernel + bias
            x = jax.nn.relu(x) if name == "dense" else x
        return spec(x, labels, mode)

    def spec(output, labels, mode):
        loss = est.losses.mean_squared_error(labels, output)
        return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.adam(0.1)).minimize(loss))

    def program(model_fn):
        model = est.transform(model_fn)
        state = model.abstract_init(X, X[:, :1])
        lowered = jax.jit(lambda *args: model.train_step(*args)[0].variables).lower(state, X, X[:, :1])
        return re.findall(r"stablehlo\.\w+", lowered.as_text())

    assert program(with_layers) == program(by_hand)


@pytest.mark.slow
def test_dropout_drops_in_training_alone_and_differs_by_call():
    def in_training(x):
        same = [est.layers.dropout(x, 0.25), est.layers.dropout(x, 0.25), est.layers.dropout(x, 0.25, seed=1)]
        return *same, est.layers.dropout(x, training=False), est.layers.dropout(x, noise_shape=(None, 1))

    x = jnp.ones((100, 10))
    for mode in ("eval", "infer"):
        off, on = applied(lambda x: (est.layers.dropout(x, 0.25), est.layers.dropout(x, training=True)), x, mode)[0]
        assert (off == 1).all() and (on != 1).any()
    first, second, seeded, off, rows = applied(in_training, x, "train")[0]
    assert set(np.unique(first).round(4)) == {0, np.float32(1.3333)}
    assert 0.7 < (first > 0).mean() < 0.8
    assert (first != second).any() and (first != seeded).any() and (second != seeded).any()
    assert (off == 1).all() and (rows == rows[:, :1]).all() and (rows != rows[0]).any()
    alone = [applied(lambda x, seed=seed: est.layers.dropout(x, seed=seed), x, "train")[0] for seed in (None, 1, 2, 1)]
    assert [(alone[1] == each).all() for each in alone] == [False, True, False, True]


def test_batch_normalization_writes_its_averages_in_train_alone():
    def layer(training):
        return lambda x: est.layers.batch_normalization(x, momentum=0.5, training=training)

    def means(state):
        return state.variables["batch_normalization/moving_mean"]

    _, state = applied(layer(None), X, "train")
    np.testing.assert_allclose(means(state), X.mean(0) / 2, rtol=1e-5)
    frozen, after = applied(layer(False), X, "train", state)
    assert (means(after) == means(state)).all()
    np.testing.assert_allclose(frozen, applied(layer(None), X, "eval", state)[0], rtol=1e-6)
    batch, after = applied(layer(True), X, "eval", state)
    assert (means(after) == means(state)).all()
    np.testing.assert_allclose(batch.mean(0), 0, atol=1e-6)


def test_a_shared_batch_normalization_moves_its_averages_with_each_call():
    def layer(x):
        est.layers.batch_normalization(x, momentum=0.5, name="bn")
        return est.layers.batch_normalization(x + 4, momentum=0.5, name="bn", reuse=True)

    state = applied(layer, X, "train")[1]
    np.testing.assert_allclose(state.variables["bn/moving_mean"], X.mean(0) / 4 + (X.mean(0) + 4) / 2, rtol=1e-5)


def test_batch_normalization_over_several_axes():
    output, state = applied(lambda x: est.layers.batch_normalization(x, axis=[1, -1]), IMAGES, "train")
    assert state.variables["batch_normalization/gamma"].shape == (6, 3)
    np.testing.assert_allclose(output.mean((0, 2)), 0, atol=1e-5)


def test_variables_of_a_layer_that_is_not_trainable_are_not_trained():
    def body(x):
        est.layers.batch_normalization(est.layers.dense(x, 2, trainable=False), trainable=False)
        est.layers.embed(jnp.zeros(2, int), 3, 2, trainable=False)
        assert not est.trainable_variables()

    assert len(variables_of(body, X)) == 7


def test_embed_has_a_sparse_gradient_unless_the_table_is_regularized():
    def model_fn(features, labels, mode, params):
        x = est.layers.embed(features, 10, 2, regularizer=est.regularizers.l2(0.1))
        loss = jnp.sum(x) + (est.losses.get_regularization_loss() if params["all"] else 0)
        ((gradient, name),) = est.Optimizer(optax.sgd(0.1)).compute_gradients(loss)
        kinds.append((name, type(gradient) is est.IndexedSlices))
        return est.EstimatorSpec(mode, loss=loss, train_op=est.TrainOp())

    ids = jnp.array([[3, 4], [3, -1]])
    for everything in (False, True):
        kinds = []
        model = est.transform(model_fn, params={"all": everything})
        jax.eval_shape(model.train_step, model.abstract_init(ids), ids)
        assert kinds[-1] == ("EmbedSequence/embeddings", not everything)


LENGTHS = np.array([4, 1, 3])
SEQUENCES = jax.random.normal(KEY, (3, 4, 2))


def test_the_gates_of_a_gru_are_open_at_first():
    _, state = applied(lambda x: (est.layers.gru(x, 5), est.layers.lstm(x, 5)), SEQUENCES)
    biases = {name.split("/")[-2]: value for name, value in state.variables.items() if name.endswith("bias")}
    assert {name: set(np.unique(value)) for name, value in biases.items()} == {
        "gates": {1},
        "candidate": {0},
        "basic_lstm_cell": {0},  # whose forget bias is added in each step
    }


@pytest.mark.slow
@pytest.mark.parametrize("layer", [est.layers.lstm, est.layers.gru])
def test_steps_after_the_end_of_a_sequence_do_not_matter(layer):
    outputs, state = applied(lambda x: layer(x, 5, sequence_length=LENGTHS), SEQUENCES)
    garbage = jnp.where(jnp.arange(4)[:, None] < LENGTHS[:, None, None], SEQUENCES, 7.0)
    again, _ = applied(lambda x: layer(x, 5, sequence_length=LENGTHS), garbage, state=state)
    jax.tree.map(np.testing.assert_array_equal, outputs, again)
    for i, length in ((1, 1), (2, 3)):
        alone, _ = applied(lambda x: layer(x, 5), SEQUENCES[i : i + 1, :length], state=state)
        np.testing.assert_allclose(outputs[0][i, :length], alone[0][0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(outputs[0][i, length:], 0)
        np.testing.assert_allclose(jax.tree.leaves(outputs[1])[-1][i], alone[0][0, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_backward_layer_goes_from_the_end_of_each_sequence():
    both = est.layers.bidirectional_lstm
    ((forwards, backwards), (_, last)), state = applied(lambda x: both(x, 5, LENGTHS), SEQUENCES)
    for i, length in ((0, 4), (2, 3)):
        reverse = SEQUENCES[i : i + 1, :length][:, ::-1]
        names = {name.replace("/fw/", "/tmp/").replace("/bw/", "/fw/"): v for name, v in state.variables.items()}
        names = {name.replace("/tmp/", "/bw/"): value for name, value in names.items()}
        ((alone, _), _), _ = applied(lambda x: both(x, 5), reverse, state=state._replace(variables=names))
        np.testing.assert_allclose(backwards[i, :length], alone[0, ::-1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(jax.tree.leaves(last)[-1][i], alone[0, -1], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(backwards[i, length:], 0)
    assert forwards.shape == backwards.shape == (3, 4, 5)


def test_sequences_may_have_the_steps_first_and_start_anywhere():
    (outputs, last), state = applied(lambda x: est.layers.lstm(x, 5), SEQUENCES)

    def turned(x):
        return est.layers.lstm(x.swapaxes(0, 1), 5, time_major=True)[0].swapaxes(0, 1)

    np.testing.assert_allclose(applied(turned, SEQUENCES, state=state)[0], outputs, rtol=1e-6)

    def in_two_parts(x):
        _, middle = est.layers.lstm(x[:, :2], 5)
        return est.layers.lstm(x[:, 2:], 5, initial_state=middle, name="rnn", reuse=True)[1]

    np.testing.assert_allclose(applied(in_two_parts, SEQUENCES, state=state)[0].h, last.h, rtol=1e-5)


TF_ORDER = {
    "dense": "inputs units activation use_bias kernel_initializer bias_initializer kernel_regularizer bias_regularizer "
    "activity_regularizer kernel_constraint bias_constraint trainable name reuse",
    "conv2d": "inputs filters kernel_size strides padding data_format dilation_rate activation use_bias "
    "kernel_initializer bias_initializer kernel_regularizer bias_regularizer activity_regularizer kernel_constraint "
    "bias_constraint trainable name reuse",
    "conv2d_transpose": "inputs filters kernel_size strides padding data_format activation use_bias kernel_initializer "
    "bias_initializer kernel_regularizer bias_regularizer activity_regularizer kernel_constraint bias_constraint "
    "trainable name reuse",
    "separable_conv2d": "inputs filters kernel_size strides padding data_format dilation_rate depth_multiplier "
    "activation use_bias depthwise_initializer pointwise_initializer bias_initializer depthwise_regularizer "
    "pointwise_regularizer bias_regularizer activity_regularizer depthwise_constraint pointwise_constraint "
    "bias_constraint trainable name reuse",
    "max_pooling2d": "inputs pool_size strides padding data_format name",
    "average_pooling1d": "inputs pool_size strides padding data_format name",
    "flatten": "inputs name data_format",
    "dropout": "inputs rate noise_shape seed training name",
    "batch_normalization": "inputs axis momentum epsilon center scale beta_initializer gamma_initializer "
    "moving_mean_initializer moving_variance_initializer beta_regularizer gamma_regularizer beta_constraint "
    "gamma_constraint training trainable name reuse renorm renorm_clipping renorm_momentum fused virtual_batch_size "
    "adjustment",
}
TF_ORDER["conv1d"] = TF_ORDER["conv2d"]


@pytest.mark.parametrize("layer", TF_ORDER)
def test_arguments_stand_in_the_order_of_tensorflow(layer):
    parameters = inspect.signature(getattr(est.layers, layer)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == TF_ORDER[layer].split()


REFUSED = {
    ValueError: [
        (lambda: est.layers.dense(X[0], 2), r"at least 2 dimensions; got float32\[3\]"),
        (lambda: est.layers.dense(X, 0), "needs a positive integer as `units`; got 0"),
        (lambda: est.layers.dense(X, 2.0), "needs a positive integer as `units`; got 2.0"),
        (lambda: est.layers.dense(X, 2, "swoosh"), "such as `jax.nn.relu`, or one of 'elu', .*got 'swoosh'"),
        (lambda: est.layers.dense(X, 2, activity_regularizer=jnp.sum),
         r"does not support `activity_regularizer`; .* write `est.losses.add_loss\(regularizer\(output\)\)`"),
        (lambda: est.layers.dense(X, 2, kernel_constraint=abs), "`kernel_constraint`; .*in the optimizer"),
        (lambda: est.layers.conv2d(X, 2, 3), r"inputs of 4 dimensions, \[batch, height, width, channels\]"),
        (lambda: est.layers.conv2d(IMAGES, 2, (3, 3, 3)), r"or 2 of them as `kernel_size`; got \(3, 3, 3\)"),
        (lambda: est.layers.conv2d(IMAGES, 2, 3, 0), "needs positive integers as `strides`; got 0"),
        (lambda: est.layers.conv2d(IMAGES, 2, 3, padding="full"), "'valid' or 'same' as `padding`; got 'fu"),
        (lambda: est.layers.conv2d(IMAGES, 2, 3, data_format="NCHW"), "'channels_first' as `data_format`;"),
        (lambda: est.layers.conv2d(IMAGES, 2, 3, 2, dilation_rate=2),
         r"strides=\(2, 2\) and dilation_rate=\(2, 2\), which do not go together"),
        (lambda: est.layers.max_pooling2d(IMAGES, "a", 2), "as `pool_size`; got 'a'"),
        (lambda: est.layers.conv2d(IMAGES, 2, 6),
         r"conv2d` got kernel_size=\(6, 6\), which is larger than the inputs, of shape \(2, 6, 5, 3\)\. Write `pad"),
        (lambda: est.layers.separable_conv2d(IMAGES, 2, 3, dilation_rate=3), r"separable_conv2d` got kernel_size=\(3"),
        (lambda: est.layers.max_pooling2d(IMAGES, (2, 6), 1),
         r"`est.layers.max_pooling2d` got pool_size=\(2, 6\), whi"),
        (lambda: est.layers.average_pooling1d(SEQUENCES, 9, 1), "`est.layers.average_pooling1d` got pool_size=9, whi"),
        (lambda: est.layers.dropout(X, 1.5), "a rate of at least 0 and less than 1; got 1.5"),
        (lambda: est.layers.dropout(X, noise_shape=(2, 3), training=True), r"noise_shape=\(2, 3\) for inpu"),
        (lambda: est.layers.batch_normalization(X, 2), "dimension of the inputs as `axis`, from -2 to 1; got"),
        (lambda: est.layers.batch_normalization(X, renorm=True), "does not support `renorm`; got True"),
        (lambda: est.layers.layer_norm(X, begin_norm_axis=5), "as `begin_norm_axis`, from -2 to 1; got 5"),
        (lambda: est.layers.lstm(X, 3), r"inputs of 3 dimensions, \[batch, steps, channels\]"),
        (lambda: est.layers.lstm(SEQUENCES, 3, [1, 2]), r"for each of the 3 examples; got shape \(2,\)"),
        (lambda: est.layers.gru(SEQUENCES, 3, initial_state=jnp.ones(3)),
         r"needs an `initial_state` of shape \(3, 3\); got \(3,\)"),
    ],
    TypeError: [
        (lambda: est.layers.dense(X.astype(int), 2), r"needs floating inputs; got int32\[4, 3\]. Write `inp"),
        (lambda: est.layers.dense(X, 2, kernel_regularizer=0.1),
         r"needs a regularizer that is a function of the value, such as `est.regularizers.l2\(1e-4\)`; got 0.1"),
        (lambda: est.layers.dropout(X, "a"), "needs a number as `rate`; got 'a'"),
        (lambda: est.layers.dropout(X, training="yes"), "needs True or False as `training`; got 'yes'. Leave"),
        (lambda: est.layers.embed(X, 3, 2), "needs integer ids"),
        (lambda: est.layers.gru(SEQUENCES, 3, X[:3, 0]), "integers as `sequence_length`; got float32"),
    ],
    AttributeError: [
        (lambda: est.layers.Conv3D, r"has no attribute 'Conv3D'; here it is a Flax module, or `jax.lax.conv_g"),
        (lambda: est.layers.fully_connected, "here it is `est.layers.dense"),
        (lambda: est.layers.dnese, "has no attribute 'dnese'; it has AveragePooling1D, AveragePooling2D"),
    ],
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("error, layer, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors(layer, error, message):
    with pytest.raises(error, match=message):
        applied(lambda x: layer(), X)
