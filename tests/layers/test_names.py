"""Default names of layers: as in TensorFlow, the same in every mode, on every tower, in every trace."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from testing import refused
from testing.model_fns import predicting, variables_of
from testing.towers import replicate, started

import estimator as est
from replicate import TowerOptimizer

X, Y = jnp.ones((8, 3)), jnp.ones((8, 1))
NETWORK = ["dense", "dense_1", "block/dense", "block/norm", "block/dense_1", "block_1/dense", "dense_2"]


def network(features):
    x = est.layers.dense(features, 4)
    x = est.layers.dense(x, 4)
    for _ in range(2):
        with est.variable_scope(None, "block", [x]):
            x = est.layers.dense(x, 4)
            if est.get_variable_scope().name == "block":
                est.layers.batch_normalization(x, name="norm")
                x = est.layers.dense(x, 4)
    return est.layers.dense(x, 1)


def model_fn(features, labels, mode, params, seen):
    output = network(features)
    seen.append(list(dict.fromkeys(name.rpartition("/")[0] for name in est.trainable_variables())))
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=output)
    loss = est.losses.mean_squared_error(labels, output)
    optimizer = TowerOptimizer(optax.sgd(0.1), accumulate_steps=params.get("steps", 1))
    if params.get("gradients"):
        train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss))  # runs the model_fn once more
    else:
        train_op = optimizer.minimize(loss)
    return est.EstimatorSpec(mode, output, loss, train_op)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "params"),
    [(0, {}), (0, {"gradients": True}), (2, {"steps": 2}), (2, {"gradients": True})],
)
def test_names_are_the_same_in_every_run_of_the_model_fn(towers, params):
    seen = []
    model = est.transform(replicate(functools.partial(model_fn, seen=seen), towers), params)
    state = model.abstract_init(X, Y)
    jax.eval_shape(model.train_step, state, X, Y)  # names are given where a model_fn is traced
    jax.eval_shape(model.eval_step, state, X[:7], Y[:7])
    for rows in (8, 3):
        jax.eval_shape(model.predict_step, state, X[:rows])
    assert len(seen) >= 4 and all(names == NETWORK for names in seen)


def names_of(body):
    """The names of the variables that a model_fn gets."""
    return sorted(variables_of(body, X))


def kernels(body):
    return [name for name in names_of(body) if name.endswith("kernel")]


def test_a_scope_opened_again_counts_from_the_beginning_as_in_tensorflow():
    def twice(reuse):
        def body(x):
            for _ in range(2):
                with est.variable_scope("net", reuse=reuse):
                    est.layers.dense(x, 2)
                    est.layers.dense(x, 2)

        return body

    assert kernels(twice(est.AUTO_REUSE)) == ["net/dense/kernel", "net/dense_1/kernel"]
    with pytest.raises(ValueError, match="`est.get_variable\\('net/dense/kernel'\\)` was called twice in one run"):
        names_of(twice(None))


@pytest.mark.parametrize(
    "layer, variables, reuses",
    [
        ("lstm", 2, "later"),
        ("gru", 4, "by the layer"),
        ("bidirectional_lstm", 4, "at once"),
        ("bidirectional_gru", 8, "by the layer"),
    ],
)
def test_recurrent_layers_share_variables_where_the_scope_reuses_them_as_in_tensorflow(layer, variables, reuses):
    def body(x):
        call = functools.partial(getattr(est.layers, layer), x[:, None], 4)
        with est.variable_scope("siamese", reuse=est.AUTO_REUSE if reuses == "at once" else None) as scope:
            call()
            if reuses == "later":
                scope.reuse_variables()
            call(reuse=True if reuses == "by the layer" else None)

    assert len(variables_of(body, X)) == variables


def test_a_scope_entered_by_its_object_counts_on():
    def body(x):
        with est.variable_scope("net") as scope:
            est.layers.dense(x, 2)
            with est.variable_scope("other"), est.variable_scope(scope):
                est.layers.dense(x, 2)
                assert est.get_variable_scope().name == "net"
            est.layers.dense(x, 2, name="last")
        with est.variable_scope("other"):
            est.layers.dense(x, 2)

    assert kernels(body) == ["net/dense/kernel", "net/dense_1/kernel", "net/last/kernel", "other/dense/kernel"]


def test_a_scope_object_keeps_its_reuse_and_defaults():
    def body(x):
        with est.variable_scope("net", initializer=jax.nn.initializers.ones) as scope:
            first = est.get_variable("w", (2,))
            scope.reuse_variables()
            assert est.get_variable("w", (2,)) is first
        assert scope.reuse is True
        with est.variable_scope(scope):
            est.get_variable("w", (2,))
            with pytest.raises(ValueError, match="in a scope with `reuse=True`, but no such variable"):
                est.get_variable("v", (2,))
        est.get_variable("v", (2,))  # outside of the scope

    assert names_of(body) == ["net/w", "v"]


def test_default_names_of_scopes_are_unique_within_the_scope_around():
    def body(x):
        for _ in range(2):
            with est.variable_scope(None, "a"):
                est.get_variable("w", ())
        with est.variable_scope("a_2"):
            est.get_variable("w", ())
        with est.variable_scope("outer"), est.variable_scope(None, default_name="a"):
            est.get_variable("w", ())
        with est.variable_scope(None, "a"):
            est.get_variable("w", ())
        with est.variable_scope("b", "unused"):
            est.get_variable("w", ())

    assert names_of(body) == ["a/w", "a_1/w", "a_2/w", "a_3/w", "b/w", "outer/a/w"]


def test_getters_of_scopes_see_every_variable_the_inner_one_first():
    calls = []

    def getter(label, factor):
        def custom(getter, name, **arguments):
            calls.append((label, name))
            return factor * getter(name, **arguments)

        return custom

    def body(x):
        ones = jax.nn.initializers.ones
        with est.variable_scope("a", custom_getter=getter("outer", 2.0), initializer=ones):
            with est.variable_scope("b", custom_getter=getter("inner", 3.0)):
                return est.layers.dense(x, 1, use_bias=False)

    model, state = started(predicting(body), X, mode="infer")
    assert (model.predict_step(state, X).predictions == 18).all()  # 3 inputs of 1, times 2 times 3
    assert calls[:2] == [("inner", "a/b/dense/kernel"), ("outer", "a/b/dense/kernel")]
    assert (state.variables["a/b/dense/kernel"] == 1).all()


def test_a_layer_may_be_shared():
    def body(x):
        for reuse in (None, True):
            est.layers.dense(x, 2, name="d", reuse=reuse)
        est.layers.dense(x, 2, name="e", reuse=est.AUTO_REUSE)
        est.layers.dense(x, 2, name="e", reuse=est.AUTO_REUSE)

    assert kernels(body) == ["d/kernel", "e/kernel"]


def test_other_default_names():
    def body(x):
        sequence = x.reshape(2, 4, 3)
        for _ in range(2):
            est.layers.layer_norm(x)
            est.layers.batch_normalization(x, center=False, scale=False)
            est.layers.embed(jnp.zeros(3, int), 5, 2)
            est.layers.lstm(sequence, 2, cell_name="lstm_cell")
        est.layers.bidirectional_gru(sequence, 2)

    names, moments = names_of(body), ("moving_mean", "moving_variance")
    own = {"EmbedSequence": ("embeddings",), "LayerNorm": ("beta", "gamma"), "batch_normalization": moments}
    assert [name for name in names if name.startswith(tuple(own))] == [
        f"{layer}{number}/{part}" for layer, parts in own.items() for number in ("", "_1") for part in parts
    ]
    assert [name for name in names if name.endswith("kernel")] == [
        *(f"bidirectional_rnn/{way}/gru_cell/{part}/kernel" for way in ("bw", "fw") for part in ("candidate", "gates")),
        *(f"rnn{number}/lstm_cell/kernel" for number in ("", "_1")),
    ]


REFUSED = {
    ValueError: [
        (lambda: est.variable_scope(None).__enter__(), "needs a non-empty name; got None. Or give None, and"),
        (
            lambda: est.variable_scope(None, "a", reuse=True).__enter__(),
            "cannot know which of the scopes so named is to be reused. Give the name",
        ),
        (lambda: est.layers.dense(X, 2, name="d", reuse=True), "no such variable was created in this run"),
        (lambda: [est.layers.dense(X, 2, name="d") for _ in "ab"], "was called twice in one run"),
        (lambda: [est.layers.embed(X.astype(int), 5, 2, scope="e") for _ in "ab"], "called twice in one"),
    ],
    TypeError: [
        (lambda: est.variable_scope(3).__enter__(), "`est.variable_scope` needs a name, or a scope; got 3"),
        (lambda: est.variable_scope("a", True).__enter__(), "takes a default name second, .* Write `reuse=`"),
        (lambda: est.variable_scope("a", None, True).__enter__(), "takes `values` third, .*; got True. Write `reuse=`"),
        (
            lambda: est.variable_scope("a", initializer=0.5).__enter__(),
            r"`est.variable_scope\('a'\)` needs a function as `initializer`; got 0.5",
        ),
        (lambda: est.layers.dense(X, 2, name=3), "`est.layers.dense` needs a name that is a string, or non"),
    ],
}


@pytest.mark.parametrize("error, body, message", refused.rows(REFUSED))
def test_wrong_names_are_errors(body, error, message):
    with pytest.raises(error, match=message):
        names_of(lambda x: body())


def test_a_layer_outside_of_a_model_fn_is_an_error():
    with pytest.raises(RuntimeError, match="`est.layers.dense` must be called inside a model_fn"):
        est.layers.dense(X, 2)
