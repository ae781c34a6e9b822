"""Variables: created once, shared by scopes, and written by assign."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing import refused
from testing.model_fns import X, as_model_fn, ones, run, zeros
from testing.towers import started

import estimator as est


@pytest.mark.parametrize(
    "call",
    [
        lambda: est.get_variable("w", ()),
        lambda: est.read_variable("w"),
        lambda: est.assign("w", 1.0),
        lambda: est.assign_add("w", 1.0),
        lambda: est.variable_scope("a").__enter__(),
        lambda: est.make_rng(),
        lambda: est.global_step(),
        lambda: est.Optimizer(optax.sgd(0.1)).minimize(jnp.float32(1)),
    ],
    ids=["get", "read", "assign", "assign_add", "scope", "make_rng", "global_step", "minimize"],
)
def test_outside_of_a_run_is_an_error(call):
    with pytest.raises(RuntimeError, match="must be called inside a model_fn that an Estimator or"):
        call()


def test_forms_of_initial_values():
    def body():
        est.get_variable("shape", (2, 3))
        est.get_variable("ints", (2,), jnp.int32)
        ones("fn", (2,))
        est.get_variable("half", (2,), jnp.bfloat16)
        est.get_variable("tree", lambda key: {"a": jax.random.normal(key, (2,)), "b": (jnp.ones(3),)})
        est.get_variable("value", initializer=np.arange(3, dtype=np.float32))
        est.get_variable("number", initializer=2.5)
        est.get_variable("scalar", ())
        est.get_variable("int", 3)
        est.get_variable("numpy", np.int64(2))
        est.get_variable("list", [np.int32(2), 1], int)
        est.get_variable("doubles", initializer=np.ones(2))
        est.get_variable("longs", initializer={"a": np.arange(2), "b": [7]}, dtype=jnp.int32, trainable=False)
        est.get_variable("cast", initializer=np.ones(2), dtype=jnp.bfloat16)
        est.get_variable("cast_tree", lambda key: {"a": jax.random.normal(key, (2,))}, dtype=jnp.float16)
        est.get_variable("flags", initializer=[True, 0.0], dtype=bool)

    variables = run(body).variables
    shapes = jax.tree.map(lambda x: (str(x.dtype), *x.shape), variables)
    assert shapes == {
        "shape": ("float32", 2, 3),
        "ints": ("int32", 2),
        "fn": ("float32", 2),
        "half": ("bfloat16", 2),
        "tree": {"a": ("float32", 2), "b": (("float32", 3),)},
        "value": ("float32", 3),
        "number": ("float32",),
        "scalar": ("float32",),
        "int": ("float32", 3),
        "numpy": ("float32", 2),
        "list": ("int32", 2, 1),
        "doubles": ("float32", 2),
        "longs": {"a": ("int32", 2), "b": [("int32",)]},
        "cast": ("bfloat16", 2),
        "cast_tree": {"a": ("float16", 2)},
        "flags": [("bool",), ("bool",)],
    }
    assert variables["number"] == 2.5
    np.testing.assert_array_equal(variables["ints"], 0)
    limit = np.sqrt(6 / (2 + 3))
    assert 0 < np.abs(variables["shape"]).max() <= limit


def test_initial_values_depend_on_name_and_seed_not_on_order():
    def first():
        est.get_variable("a", (3,))
        est.get_variable("b", (3,))

    def second():
        est.get_variable("b", (3,))
        est.get_variable("a", (3,))

    a, b = run(first).variables, run(second).variables
    np.testing.assert_array_equal(a["a"], b["a"])
    np.testing.assert_array_equal(a["b"], b["b"])
    assert (a["a"] != a["b"]).any()
    other = est.transform(as_model_fn(first)).init(jax.random.key(1), X).variables
    assert (a["a"] != other["a"]).any()


def variable(*args, **options):
    return functools.partial(est.get_variable, "w", *args, **options)


THREE = jnp.array(3)
REFUSED = {
    ValueError: [
        (lambda: est.get_variable(""), "needs a non-empty name; got ''"),
        (lambda: est.get_variable(3, ()), "needs a non-empty name; got 3"),
        (variable(), "needs a `shape` or an `initializer`; got neither"),
        (variable((2,), initializer=jnp.ones(2)), r"got the shape \(2,\) and an initializer that is a value"),
        (variable((2, 0)), r"got the shape \(2, 0\), which has no elements"),
        (
            variable(lambda key: {"a": jnp.ones(2), "b": jnp.ones((0, 3))}),
            r"`est.get_variable\('w'\)` got the shape \(0, 3\) at \['b'\], which has no elements",
        ),
        (
            variable((2,), initializer=jax.nn.initializers.glorot_uniform),
            r"must return an array of shape \(2,\); got .*Some initializers of jax.nn are factories",
        ),
        (
            variable((2,), initializer=lambda *_: jnp.ones(3)),
            r"`est.get_variable\('w'\)`: the initializer must return an array of shape \(2,\)",
        ),
        (
            variable(lambda key: {"a": "text"}),
            r"every leaf of the initial value must be an array; got 'text' at \['a'\]",
        ),
        (
            variable(lambda key: (jnp.ones(1), jnp.ones(1, jnp.int32))),
            "a trainable variable must not mix floating and integer arrays",
        ),
        (variable((), aggregation="median"), "'median' is not a valid VariableAggregation"),
        (variable((2, -1)), r"got the shape \(2, -1\), of which -1 is negative"),
        (variable(2, np.float64), "got the dtype float64, for which jax needs .*x64"),
        (variable(2, np.dtype("int64")), "got the dtype int64, for which jax needs"),
        (
            variable(initializer=np.array([1, 2**40])),
            "the initial value at the top holds 1099511627776, which the dtype int32 do",
        ),
        (variable(initializer=np.array([1e300])), r"holds 1e\+300, which the dtype float32 does not"),
        (
            variable(initializer={"a": [0.5]}, dtype=jnp.int32),
            r"the initial value at \['a'\]\[0\] holds 0.5, which the dtype int32 does not",
        ),
        (
            variable(initializer=lambda key: jax.random.normal(key, (2,)), dtype=jnp.int32),
            "is float32, and the dtype int32. Round it",
        ),
        (variable(initializer=np.array([1j]), dtype=jnp.float32), "is complex, .*float32"),
        (lambda: est.variable_scope("").__enter__(), "needs a non-empty name; got ''"),
    ],
    TypeError: [
        (
            variable((2,), jnp.float32, None, est.regularizers.l2(1.0)),
            "needs True or False as `trainable`, its fifth argument; got .* goes by its name: `regularizer=`",
        ),
        (
            variable(10.0),
            "takes a shape as its second argument, .*; got 10.0, of type float. An initial value goes by `ini",
        ),
        (variable((4, 10 / 2)), r"got 5.0 in \(4, 5.0\), of type float. Divide sizes by `//`"),
        (variable([None, 3]), r"got None in \[None, 3\], of type NoneType. A variable has no unknown dimension"),
        (variable((2, True)), r"got True in \(2, True\), of type bool"),
        (variable(True), "got True, of type bool"),
        (variable(np.float32(2)), "of type float32. An initial value goes by `initializer=`"),
        (variable(np.ones(3)), "of type ndarray. An initial value goes by `initializer=`, without a shape"),
        (variable(np.array([3, 4])), "of type ndarray. An initial value"),
        (variable(THREE), "of type ArrayImpl. An initial value"),
        (variable({"a": np.ones(3)}), "of type dict. An initial value"),
        (variable((np.ones(3), np.ones(3))), "of type ndarray. An initial value"),
        (variable("ab"), "got 'ab', of type str"),
        (variable(2, "floaty"), "needs a dtype such as `jnp.float32`; got 'floaty'"),
        *(
            (variable(2, dtype), f"'w'.` got the dtype {dtype}, which a variable cann")
            for dtype in ("int4", "uint4", "int2", "float4_e2m1fn", "float8_e4m3")
        ),
        (
            variable(lambda key: {"a": jnp.ones(2), "b": jnp.zeros(2, jnp.int4)}),
            r"got the dtype int4 at \['b'\], which a variable cannot have. Use one of 8 bits",
        ),
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize("error, body, message", refused.rows(REFUSED))
def test_bad_declarations_are_errors(error, body, message):
    with pytest.raises(error, match=message):
        run(body)


# Scopes and reuse.


def test_scopes_nest_and_end_and_reuse_reaches_inner_ones():
    def body():
        with est.variable_scope("a"):
            with est.variable_scope("b"):
                est.get_variable("w", ())
            est.get_variable("w", ())
        est.get_variable("w", ())
        with est.variable_scope("a", reuse=True), est.variable_scope("b", reuse=False):
            est.get_variable("w", ())

    assert set(run(body).variables) == {"a/b/w", "a/w", "w"}


def test_the_same_name_twice_is_an_error():
    def body():
        with est.variable_scope("a"):
            est.get_variable("w", ())
            est.get_variable("w", ())

    with pytest.raises(ValueError, match=r"`est.get_variable\('a/w'\)` was called twice in one run"):
        run(body)


@pytest.mark.parametrize("reuse", [True, est.AUTO_REUSE])
def test_a_scope_may_share_a_variable(reuse):
    def body():
        with est.variable_scope("a"):
            one = ones("w")
        with est.variable_scope("a", reuse=reuse):
            two = est.get_variable("w", ())
            with est.variable_scope("b", reuse=None):
                pass
        loss = one + two
        return est.Optimizer(optax.sgd(0.25)).minimize(loss)

    assert run(body).variables == {"a/w": 0.5}


def test_auto_reuse_creates_what_is_missing_and_true_does_not():
    def auto():
        with est.variable_scope("a", reuse=est.AUTO_REUSE):
            est.get_variable("w", ())
            est.get_variable("w", ())

    def strict():
        est.get_variable("v", ())
        with est.variable_scope("a", reuse=True):
            est.get_variable("w", ())

    assert set(run(auto).variables) == {"a/w"}
    with pytest.raises(ValueError, match=r"`reuse=True`, but no such variable .* only 'v'\."):
        run(strict)


def test_reuse_with_another_shape_is_an_error():
    def body():
        with est.variable_scope("a", reuse=est.AUTO_REUSE):
            est.get_variable("w", (2,))
            est.get_variable("w", (3,))

    with pytest.raises(ValueError, match=r"asks for float32\[3\], but in the first call the variable is float32\[2\]"):
        run(body)


def test_a_variable_unknown_to_the_state_is_an_error():
    made = []

    def body():
        est.get_variable("w", ())
        if made:
            est.get_variable("v", ())

    model, state = started(as_model_fn(body), X)
    made.append(True)
    with pytest.raises(ValueError, match=r"\('v'\)`: the state has no such variable, only 'w'\."):
        model.train_step(state, X)


def test_a_state_of_another_shape_or_dtype_is_an_error():
    model, state = started(as_model_fn(lambda: est.get_variable("w", (2,))), X)
    for value, kind in ((jnp.ones(3), r"float32\[3\]"), (jnp.ones(2, jnp.int32), r"int32\[2\]")):
        with pytest.raises(ValueError, match=rf"asks for float32\[2\], but in the state the variable is {kind}"):
            model.eval_step(state._replace(variables={"w": value}), X)


# Writing.


def test_the_dtype_of_a_value_counts_in_later_runs_too():
    def model_fn(features, mode, params):
        est.get_variable("w", initializer=np.ones(2), dtype=params, trainable=False)
        return est.EstimatorSpec(mode, features, jnp.float32(0), est.group())

    state = est.transform(model_fn, jnp.bfloat16).init(jax.random.key(0), X)
    est.transform(model_fn, jnp.bfloat16).train_step(state, X)
    with pytest.raises(ValueError, match=r"asks for float32\[2\], but in the state the variable is bfloat16\[2\]"):
        est.transform(model_fn, jnp.float32).train_step(state, X)


def test_writes_are_seen_at_once_and_kept():
    def body():
        n = est.get_variable("n", (), jnp.int32, trainable=False)
        est.get_variable("seen", (), jnp.int32, trainable=False)
        est.assign_add("n", 2)
        est.assign("seen", est.read_variable("n") - n)
        est.assign_add("n", 3)

    assert run(body, steps=3).variables == {"n": 15, "seen": 2}


def test_the_last_assign_wins_and_later_deltas_count():
    def body():
        zeros("a", (2,), trainable=False)
        est.assign_add("a", jnp.full(2, 100.0))
        est.assign("a", jnp.full(2, 7.0))
        est.assign_add("a", jnp.ones(2))
        zeros("b", (2,), trainable=False)
        with est.variable_scope("s", reuse=est.AUTO_REUSE):
            zeros("c", trainable=False)
            est.assign("c", est.read_variable("a")[0] + 1.0)
            est.assign("b", est.read_variable("a") * 2)

    variables = run(body, steps=2).variables
    np.testing.assert_array_equal(variables["a"], 8)
    np.testing.assert_array_equal(variables["b"], 16)
    assert variables["s/c"] == 9


@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_writes_have_no_effect_outside_of_train(mode):
    def model_fn(features, mode):
        zeros("n", trainable=False)
        est.assign("n", 5.0)
        n = est.read_variable("n")
        return est.EstimatorSpec(mode, predictions=features + n, loss=n, train_op=est.TrainOp())

    model, state = started(model_fn, X)
    assert state.variables["n"] == 0
    spec = model.eval_step(state, X) if mode == "eval" else model.predict_step(state, X)
    np.testing.assert_array_equal(spec.predictions, 1)
    state, spec = model.train_step(state, X)
    assert (state.variables["n"], spec.loss) == (5, 5)


def test_no_gradient_flows_through_what_is_not_trainable():
    def body():
        w = ones("w")
        zeros("n", trainable=False)
        est.assign("n", w * 3)
        return est.Optimizer(optax.sgd(1.0)).minimize(w + est.read_variable("n"))

    assert run(body).variables == {"w": 0, "n": 3}


@pytest.mark.parametrize("write", [est.assign, est.assign_add], ids=["assign", "assign_add"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("w", jnp.ones(2), r"\('w'\)`: the variable is trainable, so its optimizer writes it"),
        ("x", jnp.ones(2), r"\('x'\)` names no variable of this run, which has got 'n', 'w' so far"),
        ("n", jnp.ones(3), r"\('n'\)` got float32\[3\], but the variable is float32\[2\]"),
        ("n", jnp.ones((), jnp.float32), r"got float32\[\], but the variable is float32\[2\]"),
        ("n", jnp.ones(2, jnp.int32), r"got int32\[2\], but the variable is float32\[2\]"),
        ("n", {"a": jnp.ones(2)}, r"got a value of structure .*, but the variable has "),
    ],
)
def test_bad_writes_are_errors(write, name, value, message):
    def body():
        est.get_variable("w", (2,))
        est.get_variable("n", (2,), trainable=False)
        write(name, value)

    with pytest.raises(ValueError, match=rf"`est\.{write.__name__}.*{message}"):
        run(body)


def test_reading_an_unknown_variable_is_an_error():
    with pytest.raises(ValueError, match=r"`est.read_variable\('w'\)` names no variable .* none so"):
        run(lambda: est.read_variable("w"))
