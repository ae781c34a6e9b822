"""Layers as objects, and cells: named by their first use, with one set of variables, the numbers of the functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import predicting, variables_of
from testing.towers import predict, started

import estimator as est

IMAGES = np.random.default_rng(0).normal(size=(2, 6, 6, 3)).astype(np.float32)
SEQUENCES = IMAGES[:, 0]
LENGTHS = np.array([6, 3])
CLASSES = {
    "AveragePooling1D": (SEQUENCES, 2, 2),
    "AveragePooling2D": (IMAGES, 2, 2),
    "BatchNormalization": (IMAGES,),
    "Conv1D": (SEQUENCES, 4, 3),
    "Conv2D": (IMAGES, 4, 3),
    "Conv2DTranspose": (IMAGES, 4, 3),
    "Dense": (SEQUENCES, 4),
    "Dropout": (IMAGES, 0.5),
    "Flatten": (IMAGES,),
    "MaxPooling1D": (SEQUENCES, 2, 2),
    "MaxPooling2D": (IMAGES, 2, 2),
    "SeparableConv2D": (IMAGES, 4, 3),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CLASSES)
def test_an_object_is_its_function_in_names_and_numbers(name):
    x, *arguments = CLASSES[name]
    kind = getattr(est.layers, name)

    training = {"training": True} if name in ("Dropout", "BatchNormalization") else {}
    layer, function = kind(*arguments), getattr(est.layers, kind(*arguments).name)

    def model_fn(features, labels, mode, params):
        with est.variable_scope("block"):
            output = params["apply"](features)
        loss = jnp.mean(output**2) + 0 * est.get_variable("w", ())
        return est.EstimatorSpec(mode, output, loss, est.Optimizer(optax.sgd(0.1)).minimize(loss))

    applications = [
        lambda x: function(x, *arguments, **training),
        lambda x: kind(*arguments)(x, **training),
        lambda x: layer(x, **training),  # made outside of the model_fn, for all of its runs
    ]
    programs = []
    for apply in applications:
        model = est.transform(model_fn, {"apply": apply})
        state = model.abstract_init(x)
        init = jax.jit(lambda key, model=model: model.init(key, x)).lower(jax.random.key(0))
        step = jax.jit(model.train_step).lower(state, x)
        programs.append((state.variables.keys(), step.out_info, init.as_text(), step.as_text()))
    assert programs[1] == programs[2] == programs[0]


def names_of(body):
    names = variables_of(body, SEQUENCES[:, 0])
    return [name.removesuffix("/kernel") for name in names if name.endswith("kernel")]


def test_names_go_by_the_first_use_as_in_tensorflow():
    def body(x):
        a, b, c, d = (est.layers.Dense(3, name=name) for name in (None, None, "logits", "logits"))
        b(x)
        with est.variable_scope("inner"):
            c(a(x))
        est.layers.dense(x, 3)
        with est.variable_scope("inner", reuse=True):
            est.layers.Dense(3)(x)
        d(b(a(b.apply(x))))

    assert names_of(body) == ["dense", "dense_1", "inner/dense", "inner/logits", "logits"]  # sorted


@pytest.mark.slow
def test_cells_on_top_of_each_other_are_layers_on_top_of_each_other():
    def by_cells(x):
        cells = est.layers.MultiRNNCell([est.layers.LSTMCell(4), est.layers.GRUCell(3)])
        outputs, states = est.layers.dynamic_rnn(cells, x, LENGTHS)
        return outputs, *states

    def by_functions(x):
        with est.variable_scope("rnn"):
            x, first = est.layers.lstm(x, 4, LENGTHS, name="cell_0", cell_name="lstm_cell")
            x, second = est.layers.gru(x, 3, LENGTHS, name="cell_1")
        return x, first, second

    model, state = started(predicting(by_cells), SEQUENCES, mode="infer")
    flat = {"/".join(p for p in name.split("/") if p != "multi_rnn_cell"): v for name, v in state.variables.items()}
    other = est.transform(predicting(by_functions))
    assert flat.keys() == other.abstract_init(SEQUENCES, mode="infer").variables.keys()
    got = model.predict_step(state, SEQUENCES).predictions
    want = other.predict_step(state._replace(variables=flat), SEQUENCES).predictions
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert isinstance(got[1], est.layers.LSTMState) and not got[0][1, 3:].any()


def test_a_cell_that_is_used_twice_has_its_variables_once():
    def body(x):
        cell = est.layers.GRUCell(3)
        est.layers.dynamic_rnn(cell, SEQUENCES)
        est.layers.dynamic_rnn(cell, SEQUENCES)
        est.layers.dynamic_rnn(est.layers.GRUCell(3), SEQUENCES)

    names = {name.partition("/")[0] for name in names_of(body)}
    assert names == {"rnn", "rnn_2"}  # TensorFlow takes `rnn` each time, and raises an error at the last one


@pytest.mark.slow
def test_dropout_of_a_cell_differs_in_each_step_and_is_off_in_evaluation():
    class Ones(est.layers.RNNCell):
        output_size = 50

        def zero_state(self, batch_size, dtype=jnp.float32):
            return est.layers.LSTMState(jnp.ones((batch_size, 50)), jnp.ones((batch_size, 50)))

        def call(self, inputs, state):
            return inputs, state

    def model_fn(features, labels, mode):
        cell = est.layers.DropoutWrapper(Ones(), input_keep_prob=0.5, output_keep_prob=0.8, state_keep_prob=0.9)
        outputs, state = est.layers.dynamic_rnn(cell, features)
        loss = jnp.mean(est.get_variable("w", ()) * outputs)
        return est.EstimatorSpec(mode, (outputs, state), loss, est.Optimizer(optax.sgd(0.1)).minimize(loss))

    x = np.ones((20, 4, 50), np.float32)
    model, state = started(model_fn, x)
    state, spec = model.train_step(state, x)
    outputs, last = spec.predictions
    masks = [np.asarray(outputs[:, step] == 0) for step in range(4)]
    np.testing.assert_allclose([mask.mean() for mask in masks], 1 - 0.5 * 0.8, atol=0.05)
    assert all((a != b).mean() > 0.3 for a, b in zip(masks, masks[1:], strict=False))
    np.testing.assert_allclose((last.h == 0).mean(), 1 - 0.9**4, atol=0.05)
    assert (last.c == 1).all()
    assert (np.asarray(model.train_step(state, x)[1].predictions[0][:, 0] == 0) != masks[0]).mean() > 0.3
    np.testing.assert_array_equal(model.eval_step(state, x).predictions[0], x)


@pytest.mark.slow
def test_dropout_of_a_cell_in_a_loop_of_your_own_is_an_error():
    def model_fn(features, mode):
        cell = est.layers.DropoutWrapper(est.layers.GRUCell(3), 0.5)
        est.layers.dynamic_rnn(cell, features[0])  # makes the variables
        last, _ = jax.lax.scan(lambda state, x: (est.layers.dynamic_rnn(cell, x, initial_state=state)[1], None), *start)
        return est.EstimatorSpec(mode, last, jnp.sum(last), est.group())

    start = jnp.zeros((2, 3)), np.stack([SEQUENCES] * 2)
    with pytest.raises(ValueError, match=r"in a function that `jax.lax.scan` runs many times, each time with the same"):
        started(model_fn, start[1])


REFUSED = {
    TypeError: [
        (lambda: est.layers.Dense(3, nmae="x"),
         "Dense` got an unexpected keyword argument 'nmae'; it has the arguments units, acti"),
        (lambda: est.layers.Conv2D(3), "missing a required argument: 'kernel_size'"),
        (lambda: est.layers.Dense(3, name=""), "`est.layers.Dense` needs a name that is a string, or none; got ''"),
        (lambda: est.layers.Dense(3)(SEQUENCES, training=True), "is called with its inputs; got 'training' too. Other"),
        (lambda: est.layers.Dropout()(SEQUENCES, rate=1), "its inputs and `training`; got 'rate' too"),
        (lambda: est.layers.MultiRNNCell([64, 64]),
         r"needs cells, such as `est.layers.GRUCell\(64\)`; got 64. A class"),
        (lambda: est.layers.MultiRNNCell([]), "`est.layers.MultiRNNCell` needs cells"),
        (lambda: est.layers.dynamic_rnn(SEQUENCES, est.layers.GRUCell(3)),
         "`est.layers.dynamic_rnn` needs cells, such"),
    ],
    ValueError: [
        (lambda: est.layers.Dense(0)(SEQUENCES), "`est.layers.dense` needs a positive integer as `units`; got 0"),
        (lambda: est.layers.GRUCell(0), "`est.layers.GRUCell` needs a positive integer as `num_units`; got 0"),
        (lambda: est.layers.LSTMCell(3, num_proj=2), "`est.layers.LSTMCell` does not support `num_proj`; got 2"),
        (lambda: est.layers.BasicLSTMCell(3, state_is_tuple=False), "does not support `state_is_tuple`; got 'False'"),
        (lambda: est.layers.MultiRNNCell([est.layers.GRUCell(3)] * 2)(SEQUENCES[:, 0], (jnp.ones((2, 3)),)),
         r"of 2 cells needs a tuple of as many states; got \(\(2, 3\),\)"),
    ],
    NotImplementedError: [
        (lambda: est.layers.dynamic_rnn(est.layers.RNNCell(), SEQUENCES), r"RNNCell defines no `zero_state\(batch_siz"),
        (lambda: est.layers.RNNCell()(SEQUENCES[:, 0], ()), r"RNNCell defines no `call\(inputs, state\)`"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("error, call, message", refused.rows(REFUSED))
def test_wrong_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        predict(predicting(lambda x: call()), jnp.ones(3))


def test_a_layer_works_in_a_model_fn_alone():
    with pytest.raises(RuntimeError, match="`est.layers.Dense` must be called inside a model_fn"):
        est.layers.Dense(3)(SEQUENCES)
