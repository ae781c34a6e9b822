"""Warm start: which variables begin with the values of a checkpoint, and when."""

import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from testing.estimators import refuse, saved_steps
from testing.model_fns import minimizing
from testing.towers import replicate

import estimator as est
from estimator.checkpoint._checkpoint import Checkpoint
from estimator.checkpoint._named_arrays import named_leaves
from estimator.checkpoint._warm_start import warm_start
from replicate import TowerOptimizer, VariableDistribution

X = np.arange(16, dtype=np.float32).reshape(8, 2) / 16
Y = X.sum(axis=1)
TRAINABLE = {"hidden/b", "hidden/w", "net/Dense_0/kernel"}
SLOTS = {f"opt/0/trace/{name}" for name in TRAINABLE}


def model_fn(features, labels, mode, params):
    """Three trainable arrays, one of them within a tree, one that is not trainable, and a slot for each trainable."""
    with est.variable_scope(params.get("scope", "hidden")):
        w = est.get_variable("w", (2, 4), params.get("dtype", jnp.float32))
        b = est.get_variable("b", (params.get("width", 4),))
    net = est.get_variable("net", lambda key: {"Dense_0": {"kernel": jax.random.normal(key, (4, 1))}})
    bias = est.get_variable(params["new"], ()) if "new" in params else 0
    output = (jnp.tanh(features @ w.astype(b.dtype) + b[:4]) @ net["Dense_0"]["kernel"])[:, 0] + bias
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions=output)
    est.get_variable("seen", (4,), initializer=jax.nn.initializers.zeros, trainable=False)
    est.assign_add("seen", jnp.ones(4))
    loss = est.losses.mean_squared_error(labels, output)
    train_op = TowerOptimizer(optax.sgd(0.1, momentum=0.9), name="opt").minimize(loss)
    return est.EstimatorSpec(mode, loss=loss, train_op=train_op)


def batches():
    return [(X, Y)] * 10


def make(model_dir, warm_start_from=None, params=None, fn=model_fn, seed=1):
    config = est.RunConfig(save_checkpoints_steps=1, keep_checkpoint_max=None, seed=seed)
    return est.Estimator(fn, model_dir, config, {} if params is None else params, warm_start_from)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An Estimator trained for three steps."""
    return make(tmp_path_factory.mktemp("source"), seed=0).train(batches, steps=3)


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """The initial values of the Estimators of `make`, without warm start."""
    return values(make(tmp_path_factory.mktemp("cold")).train(batches, steps=1), 0)


def started(mode, **params):
    """A function of settings that starts a state warm, and gives it with the report."""
    model, labels = est.transform(model_fn, params), None if mode == "infer" else Y
    state = model.init(jax.random.key(1), X, labels, mode=mode)
    trainable = model.info(X, labels, mode=mode).trainable
    return lambda settings: (*warm_start(settings, state, trainable, mode), state)


@pytest.fixture(scope="module")
def initial():
    return {mode: started(mode, new="new") for mode in est.ModeKeys}


def values(estimator, step=None):
    path = estimator.latest_checkpoint() if step is None else f"{estimator.model_dir}/ckpt-{step}"
    return Checkpoint(path).read_all(["*"])


def bits(named):
    return {name: np.asarray(value).tobytes() for name, value in named.items()}


def assert_taken(start, there, initial, names):
    """These names have the bits of the source; all others those that they have without warm start."""
    start, there, initial = bits(start), bits(there), bits(initial)
    assert start == initial | {name: there[name] for name in names}
    assert all(there[name] != initial[name] for name in names if name != "new")


def settings(source, *args, **kwargs):
    return est.WarmStartSettings(source.model_dir, *args, **kwargs)


# What is taken.


@pytest.mark.slow
@pytest.mark.covers("8 source")
def test_a_path_takes_all_trainable_variables_and_nothing_else(tmp_path, source, cold):
    estimator = make(tmp_path, source.model_dir).train(batches, steps=2)
    assert_taken(values(estimator, 0), values(source), cold, TRAINABLE)
    assert saved_steps(estimator) == [0, 1, 2]
    for same in (source.latest_checkpoint(), pathlib.Path(source.model_dir)):
        assert next(make(tmp_path / "b", same).predict(batches)) == next(source.predict(batches))


@pytest.mark.quick
@pytest.mark.slow
@pytest.mark.covers("8 source")
def test_an_older_checkpoint_is_taken_where_its_path_is_given(source, initial):
    state, report, _ = initial["train"](est.WarmStartSettings(f"{source.model_dir}/ckpt-1"))
    older = values(source, 1)["hidden/w"]
    np.testing.assert_array_equal(state.variables["hidden/w"], older)
    assert not np.array_equal(values(source)["hidden/w"], older)
    assert report.source == f"{source.model_dir}/ckpt-1"


@pytest.mark.slow
@pytest.mark.covers("8 source")
def test_an_exported_model_is_a_source_too(tmp_path, source, cold, initial):
    path = source.export_model(tmp_path / "base", X)
    estimator = make(tmp_path / "model", tmp_path / "base").train(batches, steps=1)
    assert_taken(values(estimator, 0), values(source), cold, TRAINABLE)
    assert estimator.warm_start_report.source == path
    state, report, before = initial["train"](est.WarmStartSettings(path, [".*", "global_step"]))
    taken = TRAINABLE | {"global_step"}  # of what `predict` needs: no slots, nor what only training has
    assert_taken(named_leaves(state), values(source), named_leaves(before), taken)
    assert set(report.missing) == SLOTS | {"seen", "new", "opt/0/trace/new"} and not report.unexpected


def test_an_exported_model_that_is_damaged_is_no_source(tmp_path, source):
    path = source.export_model(tmp_path / "base", X, platforms="cpu")
    os.truncate(os.path.join(path, "weights.npz"), 100)
    with pytest.raises(ValueError, match=r"weights\.npz has 100 bytes; \d+ were written"):
        make(tmp_path / "new", path).train(batches, steps=1)


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.covers("8 str and list of regexes", "8 global_step")
@pytest.mark.parametrize(
    ("patterns", "taken"),
    [
        ("hidden/w", {"hidden/w"}),
        ("hid", {"hidden/b", "hidden/w"}),
        ("net/Dense_0", {"net/Dense_0/kernel"}),
        (".*(w|kernel)$", {"hidden/w", "net/Dense_0/kernel"}),
        (["seen"], {"seen"}),
        (["hidden/w", "opt/.*/hidden/w"], {"hidden/w", "opt/0/trace/hidden/w"}),
        ([".*"], TRAINABLE | SLOTS | {"seen"}),
        ((".*", "global_step"), TRAINABLE | SLOTS | {"seen", "global_step"}),
        (["net", "global_step"], {"net/Dense_0/kernel", "global_step"}),
    ],
)
def test_what_patterns_take(source, initial, patterns, taken):
    state, report, before = initial["train"](settings(source, patterns))
    assert_taken(named_leaves(state), values(source), named_leaves(before), taken)
    assert report.used == {name: name for name in taken}


@pytest.mark.covers("8 global_step")
def test_the_step_counts_on_where_it_was_taken(tmp_path, source, messages):
    everything = settings(source, [".*", "global_step"])
    estimator = make(tmp_path / "a", everything).train(batches, max_steps=5)
    assert saved_steps(estimator) == [3, 4, 5]
    done = make(tmp_path / "b", everything).train(batches, max_steps=3)
    assert done.latest_checkpoint() is None
    assert "Skipping training since the warm start is at max_steps already." in messages()


@pytest.mark.covers("8 rename", "13 15 names and renames")
def test_names_may_have_changed(source):
    renames = {"body/w": "hidden/w", "body/b": "hidden/b"}
    slots = {f"opt/0/trace/{name}" for name in renames}  # a slot has a name of its own
    start, there = started("train", scope="body"), values(source)
    for given, missing in ((renames, slots), (lambda name: name.replace("body/", "hidden/"), set())):
        state, report, _ = start(settings(source, [".*"], given))
        for new, old in renames.items():
            assert np.asarray(state.variables[new]).tobytes() == there[old].tobytes()
        assert report.used["body/w"] == "hidden/w"
        assert set(report.missing) == missing and set(report.used) >= slots - missing


@pytest.mark.covers("8 rename")
def test_one_variable_may_start_two(tmp_path, source):
    warm = settings(source, ".*", {"v": "seen", "seen2": "seen"})
    variable = est.get_variable
    two = minimizing(lambda x, y: jnp.sum(variable("v", (4,)) * variable("seen2", (4,))), optax.sgd(1.0))
    config = est.RunConfig(save_checkpoints_steps=1)
    trained = values(est.Estimator(two, tmp_path, config, warm_start_from=warm).train(batches, steps=1))
    np.testing.assert_array_equal(trained["v"], np.float32([0, 0, 0, 0]))  # 3 - 1.0 * 3
    np.testing.assert_array_equal(trained["seen2"], trained["v"])


# When.


@pytest.mark.covers("8 when")
def test_training_resumes_from_its_own_checkpoint(tmp_path, source):
    copy = tmp_path / "source"
    shutil.copytree(source.model_dir, copy)
    make(tmp_path / "a", copy).train(batches, steps=1)
    shutil.rmtree(copy)
    again = make(tmp_path / "a", copy).train(batches, steps=2)
    assert saved_steps(again) == [0, 1, 2, 3]
    assert again.warm_start_report is None


@pytest.mark.slow
@pytest.mark.covers("8 when")
def test_evaluation_and_prediction_start_warm_only_without_a_checkpoint(tmp_path, source):
    want, rows = source.evaluate(batches), list(source.predict(batches))
    estimator = make(tmp_path, source.model_dir)
    assert estimator.evaluate(batches) == want | {"global_step": 0}
    assert list(estimator.predict(batches)) == rows
    older = source.evaluate(batches, checkpoint_path=f"{source.model_dir}/ckpt-0")
    assert estimator.evaluate(batches, checkpoint_path=f"{source.model_dir}/ckpt-0") == older != want
    shutil.copytree(f"{source.model_dir}/ckpt-0", tmp_path / "ckpt-0")
    assert estimator.evaluate(batches) == older
    assert list(estimator.predict(batches)) != rows


@pytest.mark.covers("8 when")
def test_a_mode_that_knows_less_of_the_model_finds_no_fault(source, initial):
    """PREDICT has no slots and no `seen`."""
    slot = "opt/0/trace/hidden/w"
    state, report, before = initial["infer"](settings(source, [".*", "seen", "opt/.*"], {"seen": "seen", slot: slot}))
    assert set(report.used) == TRAINABLE
    assert_taken(named_leaves(state), values(source), named_leaves(before), TRAINABLE)
    state, report, before = initial["infer"](settings(source, ["seen"]))
    assert report.used == {}
    assert bits(named_leaves(state)) == bits(named_leaves(before))


@pytest.mark.covers("8 when")
def test_extended_estimators_start_warm_too(tmp_path, source, caplog):
    caplog.set_level("INFO", logger="absl")
    estimator = make(tmp_path, source.model_dir)
    extended = est.add_metrics(estimator, lambda labels: {"label": est.metrics.mean(labels)})
    assert extended.evaluate(batches)["loss"] == source.evaluate(batches)["loss"]
    report = str(extended.warm_start_report)
    assert [r.levelname for r in caplog.records if r.getMessage() == report] == ["INFO"]


# Towers.


@pytest.mark.slow
@pytest.mark.covers("8 differences")
@pytest.mark.parametrize(
    ("mode", "distribution"),
    [("train", "sharded"), ("train", "shared_round_robin"), ("infer", "mirrored")],
)
def test_in_towers_a_warm_start_is_what_a_restored_state_is(source, distribution, mode):
    """With all that training changes warm-started, the state continues like the source, in the same placement."""
    model = est.transform(replicate(model_fn, 4, variable_distribution=distribution), {})
    batch = (X, Y) if mode == "train" else (X,)
    state = model.init(jax.random.key(0), *batch, mode=mode)
    trainable = model.info(*batch, mode=mode).trainable
    assert set(trainable) == {"hidden/w", "hidden/b", "net"}
    started, _ = warm_start(settings(source, [".*", "global_step"]), state, trainable, est.ModeKeys(mode))
    like = model.abstract_init(*batch, mode=mode)
    restored = Checkpoint(source.latest_checkpoint()).restore(like, partial=mode != "train")
    assert jax.tree.structure(started) == jax.tree.structure(state) == jax.tree.structure(restored)
    for new, want, placed in zip(*map(jax.tree.leaves, (started, restored, state)), strict=True):
        assert new.sharding == placed.sharding
        assert new.dtype == want.dtype
        assert jnp.array_equal(new, want) if new.dtype == started.key.dtype else (np.asarray(new) == want).all()


@pytest.mark.slow
@pytest.mark.covers("8 differences")
def test_towers_train_on_from_one_device_and_one_device_from_towers(tmp_path, source, cold):
    towers = replicate(model_fn, 4, variable_distribution=VariableDistribution.SHARDED)
    there = make(tmp_path / "towers", source.model_dir, fn=towers).train(batches, steps=1)
    assert_taken(values(there, 0), values(source), cold, TRAINABLE)
    one = make(tmp_path / "one", there.model_dir).train(batches, steps=1)
    assert_taken(values(one, 0), values(there), cold, TRAINABLE)


# The report.


@pytest.mark.covers("8 differences")
def test_the_report_names_everything_and_is_logged_once(tmp_path, source, caplog):
    """As a warning where something is missing."""
    caplog.set_level("INFO", logger="absl")
    warm = settings(source, ".*", {"body/w": "hidden/w"})
    estimator = make(tmp_path, warm, {"scope": "body", "new": "head/bias"})
    estimator.evaluate(batches)
    estimator.evaluate(batches)
    report = estimator.warm_start_report
    assert report == est.WarmStartReport(
        source=source.latest_checkpoint(),
        used={"body/w": "hidden/w", "net/Dense_0/kernel": "net/Dense_0/kernel"},
        missing=("body/b", "head/bias"),
        unexpected=("hidden/b",),
        mismatched=(),
    )
    assert [r.levelname for r in caplog.records if r.getMessage() == str(report)] == ["WARNING"]
    assert str(report).splitlines() == [
        f"Warm start from {source.latest_checkpoint()}:",
        "  used (2): body/w (there hidden/w), net/Dense_0/kernel",
        "  missing (2): body/b, head/bias",
        "  unexpected (1): hidden/b",
    ]


# What is refused.


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.covers("8 no match", "13 15 names and renames")
@pytest.mark.parametrize(
    ("patterns", "renames", "message"),
    [
        ("hiden/", None, "has 'hiden/', which warm-starts nothing: it matches no name in the model, such as ['hidden/"),
        (["hidden/", "nte"], None, "has 'nte', which warm-starts nothing: it matches no name in the model"),
        ("seen", None, "warm-starts nothing: ['seen'] are not trainable variables; for these give a list of regexes"),
        ("global_step", None, "['global_step'] are not trainable variables; for these give a list of regexes, and for"),
        (["global.*"], None, "['global_step'] are not trainable variables"),
        ("new", None, "has 'new', which warm-starts nothing: what it matches in the model, ['new'], is not in "),
        ("net", {"hidden/w": "hidden/w"}, "names 'hidden/w', which was not used. Perhaps you misspelled it?"),
        (".*", {"new": "seed"}, "says that 'new' was 'seed', but "),
        (".*", {"new": "seed"}, "has no such variable. Did you mean one of ['seen'"),
        (".*", lambda name: None, "must return the old name; it returned None for 'hidden/"),
        (".*", {"new": "seen"}, "new, float32[4] there, float32[] in the model"),
    ],
)
def test_what_finds_nothing_is_an_error(source, initial, patterns, renames, message):
    for mode in ("train", "eval"):
        with pytest.raises(ValueError, match=re.escape(message)):
            initial[mode](settings(source, patterns, renames))


@pytest.mark.covers("8 rename")
def test_a_renamed_variable_that_the_model_has_not_is_an_error(source, initial):
    """TRAIN knows all of the model; in other modes the variable may be one of those that only TRAIN has."""
    warm = settings(source, ".*", {"hiden/w": "hidden/w"})
    message = "'hiden/w', which was not used. Perhaps you misspelled it? Near it, `vars_to_warm_start` takes ['hidden"
    with pytest.raises(ValueError, match=re.escape(message)):
        initial["train"](warm)
    assert "hiden/w" not in initial["infer"](warm)[1].used


@pytest.mark.covers("8 no match")
def test_an_error_of_a_warm_start_comes_from_the_verbs_and_leaves_nothing(tmp_path, source):
    estimator = make(tmp_path, settings(source, "nowhere"))
    for verb in (estimator.train, lambda fn: list(estimator.predict(fn))):
        with pytest.raises(ValueError, match="has 'nowhere', which warm-starts nothing"):
            verb(batches)
    assert estimator.latest_checkpoint() is None


@pytest.mark.covers("8 differences")
def test_every_other_shape_or_dtype_is_named(tmp_path, source):
    estimator = make(tmp_path, source.model_dir, {"width": 5, "dtype": jnp.bfloat16})
    with pytest.raises(ValueError, match="Variables to warm-start have other shapes or dtypes in the source") as raised:
        estimator.train(batches)
    _, where, used, mismatched, advice = str(raised.value).splitlines()
    assert where == f"Warm start from {source.latest_checkpoint()}:"
    assert used == "  used (1): net/Dense_0/kernel"
    assert re.fullmatch(r"  mismatched \(2\): .*", mismatched)
    assert "hidden/w, float32[2, 4] there, bfloat16[2, 4] in the model" in mismatched
    assert "hidden/b, float32[4] there, float32[5] in the model" in mismatched
    assert advice == "Leave them out by `vars_to_warm_start`, or change the model."


@pytest.mark.covers("8 source")
def test_a_source_without_checkpoint_is_an_error(tmp_path, initial):
    for start in initial.values():
        message = f"cannot read '{tmp_path}': it is neither a checkpoint, nor a model_dir that has one"
        with pytest.raises(ValueError, match=re.escape(f"`WarmStartSettings` {message}")):
            start(est.WarmStartSettings(tmp_path))
        with pytest.raises(ValueError, match="`WarmStartSettings` cannot read '.*/nothing'"):
            start(est.WarmStartSettings(f"{tmp_path}/nothing"))


@pytest.mark.covers("1.1 warm_start_from")
@pytest.mark.parametrize("given", [3, ["/tmp/a"], {"ckpt_to_initialize_from": "/tmp/a"}])
def test_warm_start_from_is_a_path_or_settings(tmp_path, given):
    message = f"warm_start_from must be a string or a WarmStartSettings; got {given!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        make(tmp_path, given, fn=refuse)


@pytest.mark.covers("8 str and list of regexes")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ckpt_to_initialize_from": None}, "`ckpt_to_initialize_from` MUST be set in WarmStartSettings.*got None"),
        ({"ckpt_to_initialize_from": ""}, "`ckpt_to_initialize_from` MUST be set in WarmStartSettings.*got ''"),
        ({"vars_to_warm_start": None}, "`vars_to_warm_start` must be a regex or a list of regexes; got None"),
        ({"vars_to_warm_start": []}, r"`vars_to_warm_start` must be a regex or a list of regexes; got \[\]"),
        ({"vars_to_warm_start": ""}, "`vars_to_warm_start` must hold regexes; got ''"),
        ({"vars_to_warm_start": ["a", 1]}, "`vars_to_warm_start` must hold regexes; got 1"),
        ({"vars_to_warm_start": ["a", "(b"]}, r"`vars_to_warm_start` has '\(b', which is not a regex: missing \)"),
        ({"var_name_to_prev_var_name": ["a"]}, r"`var_name_to_prev_var_name` must be a dict .*; got \['a'\]"),
        ({"var_name_to_prev_var_name": {"a": 1}}, "`var_name_to_prev_var_name` must be a dict .*; got {'a': 1}"),
    ],
)
def test_settings_are_checked_when_made(given, message):
    with pytest.raises(ValueError, match=message):
        est.WarmStartSettings(**({"ckpt_to_initialize_from": "/tmp/a"} | given))
