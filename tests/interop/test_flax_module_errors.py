"""What `est.flax_module` refuses, and what it says then."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from testing.model_fns import minimizing
from testing.refused import rows
from testing.towers import replicate

import estimator as est
from estimator import interop
from replicate import TowerOptimizer

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

X = jnp.ones((4, 3))
DENSE = nn.Dense(2)


def model_of(build):
    """Of a model_fn whose predictions are what `build(features, mode)` returns."""

    def model_fn(features, labels, mode):
        w = est.get_variable("w", ())
        output = build(features, mode)
        train_op = TowerOptimizer(optax.sgd(0.1)).minimize(w**2)
        return est.EstimatorSpec(mode, predictions=output, loss=w**2, train_op=train_op)

    return est.transform(replicate(model_fn, 2))


def init(build):
    return model_of(build).init(jax.random.key(0), X)


@contextlib.contextmanager
def refused(error, *parts):
    with pytest.raises(error) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)


def linear(rngs):
    return nnx.Linear(3, 2, rngs=rngs)


NO_MODULE = "takes a Linen module such as `nn.Dense(10)`, or a function with the one argument `rngs`"
INVALID = {
    TypeError: [
        *(({"module": module}, NO_MODULE) for module in ("net", nn.Dense, jnp.tanh, lambda key: linear(key), None)),
        ({"module": lambda rngs: {"w": 1}}, "for 'net' must return an NNX model; it returned {'w': 1}"),
        (
            {"partition": (None, "part")},
            "needs a function of an array as `partition`; got (None, 'part'). Write `lambda x: ",
        ),
    ],
    ValueError: [
        ({"aggregation": "median"}, "'median' is not a valid VariableAggregation"),
        *(({"name": name}, f"`est.flax_module` needs a non-empty name; got {name!r}.") for name in ("", None, 3)),
        ({"name": "w"}, "`est.get_variable('w')` was called twice in one run"),
        ({"name": "w", "module": linear}, "`est.get_variable('w')` was called twice in one run"),
    ],
}


@pytest.mark.parametrize("error, arguments, message", rows(INVALID))
def test_invalid_arguments_are_errors(error, arguments, message):
    with refused(error, message):
        init(lambda x, mode: est.flax_module(**{"module": DENSE, "name": "net"} | arguments)(x))


def test_an_nnx_model_instead_of_its_factory():
    model = linear(nnx.Rngs(0))
    message = "got an NNX model, a Linear, which holds its own arrays", "`lambda rngs: Linear(..., rngs=rngs)`"
    with refused(TypeError, *message):
        init(lambda x, mode: est.flax_module(model, "net")(x))


def test_streams_for_an_nnx_model():
    with refused(ValueError, "got rngs=('noise',) for an NNX model", "Leave `rngs` out"):
        init(lambda x, mode: est.flax_module(linear, "net", rngs=("noise",))(x))


def test_a_call_outside_of_a_model_fn():
    with refused(RuntimeError, "`est.flax_module` must be called inside a model_fn"):
        est.flax_module(DENSE, "net")


def test_a_module_of_a_run_that_is_over():
    kept = []

    def build(x, mode):
        kept.append(est.flax_module(DENSE, "net"))
        return kept[0](x)

    model = model_of(build)
    with refused(RuntimeError, "The module 'net' was called in another run", "Call `est.flax_module` in the model_fn"):
        model.train_step(model.init(jax.random.key(0), X), X)
    with refused(RuntimeError, "`the module 'net'` must be called inside a model_fn"):
        kept[0](X)


def test_one_name_for_two_modules():
    def build(x, mode):
        return est.flax_module(nn.Dense(3), "net")(est.flax_module(nn.Dense(3), "net")(x))

    with refused(ValueError, "got the name 'net' twice in one run", "call what the first one returned again"):
        init(build)


@pytest.mark.parametrize("second", [nn.Dense(4), linear])
def test_one_name_for_two_modules_in_a_scope_with_reuse(second):
    def build(x, mode):
        with est.variable_scope("tower", reuse=est.AUTO_REUSE):
            est.flax_module(nn.Dense(3), "net")(x)
            return est.flax_module(second, "net")(x)

    with refused(ValueError, "got the name 'tower/net' twice", "Only the same module can share its variables"):
        init(build)


def test_a_scope_that_wants_the_module_to_be_there():
    def build(x, mode):
        with est.variable_scope("tower", reuse=True):
            return est.flax_module(DENSE, "net")(x)

    with refused(ValueError, "`est.flax_module('tower/net')` is in a scope with `reuse=True`", "only none"):
        init(build)


@pytest.mark.parametrize("names", [("net", "net/head"), ("net/head", "net")])
def test_a_module_within_the_name_of_another(names):
    def build(x, mode):
        for name in names:
            x = est.flax_module(nn.Dense(3), name)(x)
        return x

    first, second = names
    with refused(ValueError, f"got the name {second!r} beside {first!r}: one is a prefix of the other"):
        init(build)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (DENSE, "The variables of the module 'net' are not in the state, which has 'w'"),
        (linear, "`est.get_variable('net')`: the state has no such variable, only 'w'"),
    ],
    ids=["linen", "nnx"],
)
def test_a_module_that_the_state_was_not_initialized_with(module, message):
    model = model_of(lambda x, mode: est.flax_module(module, "net")(x) if mode == "eval" else x)
    with refused(ValueError, message, "in the mode that the state was initialized in"):
        model.eval_step(model.init(jax.random.key(0), X), X)


def test_a_method_that_needs_more_than_the_first_call_initialized():
    class TwoParts(nn.Module):
        def setup(self):
            self.one, self.two = nn.Dense(3), nn.Dense(3)

        def __call__(self, x):
            return self.one(x)

        def other(self, x):
            return self.two(x)

    def build(x, mode):
        net = est.flax_module(TwoParts(), "net")
        return net(net(x), method="other")

    with pytest.raises(nn.module.errors.ScopeParamNotFoundError, match='"kernel" in scope "/two"'):
        init(build)


class Stats(nn.Module):
    """Averages and a counter in one collection."""

    @nn.compact
    def __call__(self, x):
        mean = self.variable("stats", "mean", lambda: jnp.float32(0))
        count = self.variable("stats", "count", lambda: jnp.int32(0))
        if not self.is_initializing():
            mean.value, count.value = x.mean(), count.value + 1
        return x


def test_a_collection_of_floats_and_integers_on_towers():
    model = model_of(lambda x, mode: est.flax_module(Stats(), "net")(x))
    state = model.init(jax.random.key(0), X)
    with refused(ValueError, "'net/stats', whose int32 values cannot be averaged", "`aggregation="):
        model.train_step(state, X)
    first = est.VariableAggregation.ONLY_FIRST_TOWER
    model = model_of(lambda x, mode: est.flax_module(Stats(), "net", aggregation=first)(x))
    state, _ = model.train_step(state, X.at[2:].set(5))
    assert (state.variables["net/stats"]["mean"], state.variables["net/stats"]["count"]) == (1, 1)


def test_values_that_a_module_sows_outside_of_intermediates():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "x", x)
            self.sow("losses", "l2", jnp.sum(x**2))
            return x

    model = model_of(lambda x, mode: est.flax_module(Sows(), "net")(x))
    state = model.init(jax.random.key(0), X)
    assert model.predict_step(state, X).predictions.shape == X.shape
    with refused(ValueError, "changed the structure of its collection 'losses'", "let it return them instead"):
        model.train_step(state, X)


@pytest.mark.filterwarnings("ignore:.*nnx.capture:DeprecationWarning")
def test_values_that_an_nnx_model_sows():
    class Sows(nnx.Module):
        def __init__(self, kind, rngs):
            self.kind = kind

        def __call__(self, x):
            self.sow(self.kind, "l2", jnp.sum(x**2))
            return x

    class Loss(nnx.Variable):
        pass

    model = model_of(lambda x, mode: est.flax_module(lambda rngs: Sows(nnx.Intermediate, rngs), "net")(x))
    state, _ = model.train_step(model.init(jax.random.key(0), X), X)
    assert list(state.variables) == ["w"]
    with refused(ValueError, "changed the structure of its collection 'Loss'", "let it return them instead"):
        init(lambda x, mode: est.flax_module(lambda rngs: Sows(Loss, rngs), "net")(x))


@pytest.mark.parametrize("module", [DENSE, linear], ids=["linen", "nnx"])
def test_a_first_call_in_a_function_that_jax_traces_apart(module):
    with refused(ValueError, "The module 'net' is initialized within a function that jax traces apart"):
        init(lambda x, mode: jax.checkpoint(est.flax_module(module, "net"))(x))

    def build(x, mode):
        net = est.flax_module(module, "net")
        return net(x) - jax.checkpoint(net)(x)

    model = model_of(build)
    _, spec = model.train_step(model.init(jax.random.key(0), X), X)
    assert not spec.predictions.any()


@pytest.mark.parametrize(
    "module", [nn.BatchNorm(use_running_average=False), lambda rngs: nnx.BatchNorm(3, rngs=rngs)], ids=["linen", "nnx"]
)
def test_statistics_changed_in_a_function_that_jax_traces_apart(module):
    def build(x, mode):
        net = est.flax_module(module, "net")
        return net(x) + jax.grad(lambda x: net(x).sum())(x)

    with refused(ValueError, "The module 'net' changes its collection 'batch_stats' within a function that jax traces"):
        model = model_of(build)
        model.train_step(model.init(jax.random.key(0), X), X)


class Two(nn.Module):
    """Calls another method of itself, twice."""

    def setup(self):
        self.part = nn.Dense(2)

    def __call__(self, x):
        return self.encode(x) + self.encode(2 * x)

    def encode(self, x):
        return self.part(x)


TWO, KEY = Two(), jax.random.key(0)
NNX_MODEL = linear(nnx.Rngs(0))


def initial(x, key=0):
    return DENSE.init(jax.random.key(key), x)


MAKES = {
    "init within": (lambda x: DENSE.apply(initial(x), x), True),
    "init within, of a part": (lambda x: DENSE.apply({"params": dict(initial(x)["params"])}, x), True),
    "a variable from a function": (lambda x: DENSE.apply(est.get_variable("net", lambda key: initial(x)), x), False),
    "a variable from a value": (lambda x: DENSE.apply(est.get_variable("net", None, None, initial(x)), x), False),
    "only shapes": (lambda x: (jax.eval_shape(TWO.init, KEY, x), est.flax_module(TWO, "net")(x))[1], False),
}


@pytest.mark.parametrize("case, towers", [*((case, 0) for case in MAKES), ("init within", 2)])
def test_weights_that_an_init_in_the_model_fn_makes_are_named(messages, case, towers):
    forward, is_named = MAKES[case]
    model_fn = minimizing(lambda x, y: est.losses.mean_squared_error(y, forward(est.layers.dense(x, 3))))
    model = est.transform(replicate(model_fn, towers))
    state = model.init(jax.random.key(0), X, X[:, :2])
    for _ in range(2):
        with jax.checking_leaks():
            model.train_step(state, X, X[:, :2])
    assert [message for message in messages() if "init" in message] == is_named * [
        "The model_fn calls `init` of the Flax modules ['Dense'] and computes with its weights: they are not "
        "variables, no optimizer trains them, and no checkpoint has them. Write "
        "`net = est.flax_module(net, 'net')`, and `net(x)` instead of `init` and `apply`."
    ]


@pytest.mark.parametrize("forward", [MAKES["init within"][0], NNX_MODEL], ids=["linen", "nnx"])
def test_a_model_whose_only_weights_are_no_variables(forward):
    model_fn = minimizing(lambda x, y: est.losses.mean_squared_error(y, forward(x)), est.Optimizer(optax.sgd(0.1)))
    message = "`Optimizer.minimize` got no variables to optimize; create them", 'or `est.flax_module(net, "net")`. '
    with refused(ValueError, *message):
        est.transform(model_fn).init(jax.random.key(0), X, X[:, :2])


@pytest.mark.covers("11 no hard dependency")
def test_flax_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "estimator.interop._flax_linen", None)
    monkeypatch.delattr(interop, "_flax_linen", raising=False)
    with refused(ImportError, "`est.flax_module` needs Flax: `pip install flax`."):
        init(lambda x, mode: est.flax_module(DENSE, "net")(x))
