"""Initial values from a checkpoint, chosen in the model_fn."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.towers import one_step, replicate, started

import estimator as est
from replicate import BlockSync, TowerOptimizer

TENSORFLOW = pathlib.Path(__file__).parents[1] / "golden" / "tf_checkpoint"
X = np.ones((8, 80), np.float32)
Y = np.zeros((8, 5), np.float32)


def there(name, path=TENSORFLOW):
    return est.load_variable(path, name)


def model_of(path, assignment_map, optimizer=lambda: optax.sgd(0.1), early=False):
    """A dense layer in the scope "new", and one more variable; it begins as said, before or after `minimize`."""

    def model_fn(features, labels, mode):
        with est.variable_scope("new"):
            logits = est.layers.dense(features, 5, name="dense")
        est.get_variable("own", (2, 2), partition=("part", None))
        if early:
            est.init_from_checkpoint(path, assignment_map)
        loss = est.losses.mean_squared_error(labels, logits) if mode != "infer" else None
        train_op = None if loss is None else TowerOptimizer(optimizer()).minimize(loss)
        if not early:
            est.init_from_checkpoint(path, assignment_map)
        return est.EstimatorSpec(mode, predictions=logits, loss=loss, train_op=train_op)

    return model_fn


def init(model_fn, mode="train"):
    return est.transform(model_fn).init(jax.random.key(0), X, Y, mode=mode)


@pytest.fixture
def npz(tmp_path):
    """Saves arrays."""

    def save(**arrays):
        np.savez(tmp_path / "weights.npz", **arrays)
        return tmp_path / "weights.npz"

    return save


# What is taken.

MAPS = {
    "scope": {"dense/": "new/dense/"},
    "top": [("dense/kernel", "new/dense/kernel"), ("dense/bias", "new/dense/bias")],
    "everything of a scope": {"/": "new/"},
}


@pytest.fixture(scope="module")
def cold():
    return init(model_of(TENSORFLOW, {"half": "own"}))


@pytest.mark.parametrize("kind", MAPS)
def test_variables_begin_with_the_values_that_the_map_names(kind, cold):
    state = init(model_of(TENSORFLOW, MAPS[kind]))
    for name in ("dense/kernel", "dense/bias"):
        np.testing.assert_array_equal(state.variables[f"new/{name}"], there(name))
        assert not np.array_equal(cold.variables[f"new/{name}"], there(name)) or name == "dense/bias"
    np.testing.assert_array_equal(cold.variables["own"], there("half").astype(np.float32))
    assert not np.array_equal(state.variables["own"], cold.variables["own"])


def test_a_single_name_counts_more_than_a_scope(npz):
    arrays = {"new/dense/kernel": np.zeros((80, 5)), "new/dense/bias": np.ones(5), "own": np.ones((2, 2))}
    path = npz(**arrays, b=np.zeros(5))
    state = init(model_of(path, {"b": "new/dense/bias", "/": "/"}))
    np.testing.assert_array_equal(state.variables["new/dense/bias"], np.zeros(5))
    np.testing.assert_array_equal(state.variables["own"], np.ones((2, 2)))


def test_arrays_of_a_pytree_have_names_of_their_own(npz):
    def model_fn(features, labels, mode):
        def initial(key):
            return {"a": jnp.zeros(2), "b": {"c": jnp.zeros(2), "key": key}}

        net = est.get_variable("net", initial, trainable=False)
        est.init_from_checkpoint(path, {"x/": "net/b/"})
        return est.EstimatorSpec(mode, predictions=features * net["a"].sum())

    path = npz(**{"x/c": np.array([1.0, 2.0])})
    state = init(model_fn, "infer")
    assert jax.tree.map(np.sum, {k: state.variables["net"][k] for k in "a"}) == {"a": 0}
    np.testing.assert_array_equal(state.variables["net"]["b"]["c"], [1, 2])


@pytest.mark.parametrize("early", [True, False])
def test_the_state_of_an_optimizer_begins_with_the_values_too(early):
    state = init(model_of(TENSORFLOW, MAPS["scope"], lambda: optax.contrib.schedule_free_sgd(0.1), early))
    np.testing.assert_array_equal(state.slots["optimizer"].z["new/dense/kernel"], there("dense/kernel"))


# Parts, one of each on a device that may be another; and towers of two devices, and of variables of their own.
PLACEMENTS = [{"variable_distribution": each} for each in ("sharded", "shared_round_robin")]
PLACEMENTS += [{"devices_per_tower": 2}, {"block_sync": BlockSync(2)}]


@pytest.fixture(scope="module")
def want():
    """The state after a step without towers."""
    return one_step(model_of(TENSORFLOW, MAPS["scope"]), X, Y)[0]


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("options", PLACEMENTS, ids=lambda each: str(*each.values()).split("(")[0])
def test_it_works_in_towers_wherever_variables_are(options, want):
    model, state = started(replicate(model_of(TENSORFLOW, MAPS["scope"]), 4, **options), X, Y)
    for name in ("dense/kernel", "dense/bias"):
        np.testing.assert_array_equal(state.variables[f"new/{name}"], there(name))
    after, spec = model.train_step(state, X, Y)
    if "block_sync" not in options:
        np.testing.assert_allclose(after.variables["new/dense/kernel"], want.variables["new/dense/kernel"], atol=1e-6)
    assert np.isfinite(spec.loss)


@pytest.mark.slow
def test_training_resumes_from_its_own_checkpoint_and_needs_the_file_no_more(tmp_path, npz):
    path = npz(kernel=there("dense/kernel"), bias=there("dense/bias"))
    model_fn = model_of(path, {"/": "new/dense/"})
    estimator = est.Estimator(model_fn, tmp_path / "model", est.RunConfig(save_checkpoints_steps=1))
    estimator.train(lambda: [(X, Y)] * 2)
    first = est.load_variable(f"{estimator.model_dir}/ckpt-0", "new/dense/kernel")
    np.testing.assert_array_equal(first, there("dense/kernel"))
    trained = estimator.get_variable_value("new/dense/kernel")
    path.unlink()
    again = est.Estimator(model_fn, tmp_path / "model")
    again.evaluate(lambda: [(X, Y)])
    next(again.predict(lambda: [X]))
    np.testing.assert_array_equal(again.get_variable_value("new/dense/kernel"), trained)
    again.train(lambda: [(X, Y)] * 4)
    assert again.get_variable_value("global_step") > 2


def test_the_file_is_read_once_to_begin_and_not_for_programs(monkeypatch):
    from estimator.checkpoint import _init_from_checkpoint as module

    reads, real = [], module.read_newest
    monkeypatch.setattr(module, "read_newest", lambda *args: reads.append(args) or real(*args))
    model, state = started(model_of(TENSORFLOW, MAPS["scope"]), X, Y)
    model.train_step(state, X, Y)
    model.eval_step(state, X, Y)
    model.train_loop(state, [(X, Y)] * 2)
    assert len(reads) == 1


def test_a_warm_start_counts_more(tmp_path, npz):
    settings = est.WarmStartSettings(npz(**{"new/dense/bias": np.full(5, 7.0)}), "new/dense/bias")
    estimator = est.Estimator(model_of(TENSORFLOW, MAPS["scope"]), tmp_path / "model", warm_start_from=settings)
    estimator.train(lambda: [(X, Y)])
    got = est.load_variable(f"{estimator.model_dir}/ckpt-0", "new/dense/bias")
    np.testing.assert_array_equal(got, np.full(5, 7.0))


# Errors.

ERRORS = {
    "no such name there": (
        {"dense/kernal": "new/dense/kernel"},
        "is to begin with 'dense/kernal', which is not in .*ckpt-3. Near it, that has ['dense/kernel'",
    ),
    "a scope that lacks one": (
        {"words/": "new/dense/"},
        "is to begin with 'words/bias', which is not in .*To leave it out, name the others one by one, as {'name ",
    ),
    "another shape": (
        {"conv2d/kernel": "new/dense/kernel"},
        "'conv2d/kernel' there is float32[3, 3, 3, 4], and 'new/dense/kernel' here float32[80, 5]. Leave these out",
    ),
    "no such variable": (
        {"dense/kernel": "new/dense/kernal"},
        "'new/dense/kernal' names no variable that this run has got so far. Near it: ['new/dense/kernel'",
    ),
    "a scope without '/'": ({"dense": "new/dense"}, 'Did you mean the scope, {"dense/": "new/dense/"}?'),
    "no such scope": ({"dense/": "old/"}, "no variable in the scope 'old/' so far, only ['new/dense/bias', 'new/"),
    "a name for a scope": ({"dense/kernel": "new/"}, "'new/' is a scope, and 'dense/kernel' is none"),
    "a scope for a name": ({"dense/": "own"}, "'own' is a variable, and 'dense/' a scope"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_does_not_fit_is_an_error_that_names_both_sides(kind):
    assignment_map, message = ERRORS[kind]
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ValueError, match=pattern) as caught:
        init(model_of(TENSORFLOW, assignment_map))
    assert str(caught.value).startswith("`est.init_from_checkpoint`: ")


def test_a_value_that_the_dtype_does_not_hold_is_an_error(npz):
    path = npz(**{"own": np.full((2, 2), 1e300)})
    with pytest.raises(ValueError, match="'own' in .*weights.npz holds 1e.300, which the dtype float32 does not"):
        init(model_of(path, {"own": "own"}))


def test_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=f"`est.init_from_checkpoint` cannot read '{tmp_path}': it is neither"):
        init(model_of(tmp_path, {"own": "own"}))


@pytest.mark.parametrize("given", [None, "dense/", {}, ["dense/"], {"dense/kernel": X}], ids=str)
def test_a_map_of_another_type_is_an_error(given):
    with pytest.raises(TypeError, match="`est.init_from_checkpoint` needs a dict from names in the checkpoint to"):
        init(model_of(TENSORFLOW, given))
    with pytest.raises(TypeError, match="`est.init_from_checkpoint` needs a path, a string; got 3"):
        init(model_of(3, {"own": "own"}))


def test_it_is_called_in_a_model_fn():
    with pytest.raises(RuntimeError, match="`est.init_from_checkpoint` must be called inside a model_fn"):
        est.init_from_checkpoint(TENSORFLOW, {"/": "/"})
