"""Names that TensorFlow had, and this library has otherwise."""

import ast
import copy
import importlib
import inspect
import pathlib
import pickle
import re

import absl.app
import absl.logging
import jax
import jax.experimental.multihost_utils
import jax.numpy as jnp
import optax
import pytest
import test_from_caffe2
from golden import GOLDEN
from testing.website import names_page

import estimator as est
import replicate
from estimator.loop._context import RunContext
from estimator.porting import _tensorflow_names
from replicate import _caffe2_names

NAMES = _tensorflow_names.NAMES
OBJECTS = {"Estimator": est.Estimator(lambda features: None, "unused"), "RunConfig": est.RunConfig()}
OBJECTS["Reduction"] = est.Reduction
OBJECTS["Context"] = RunContext(est.ModeKeys.TRAIN)
OBJECTS["Context"].set_readonly_state(est.State({}, {}, 0, None))


def holder(key):
    """The module or object here in which one looks for a name of TensorFlow's; `est` for one that is in its place."""
    for name, prefixes in _tensorflow_names.PARTS.items():
        if key.startswith(prefixes) and NAMES[key] != f"`est.{name.removeprefix('estimator.')}.{key.split('.')[-1]}`":
            return OBJECTS[name] if name in OBJECTS else importlib.import_module(name)
    return est


@pytest.mark.quick
@pytest.mark.parametrize("key", NAMES)
def test_names_of_tensorflow_are_errors_that_say_what_is_there_instead(key):
    name = key.rpartition(".")[2]
    what = NAMES[key].removeprefix("nothing: ")
    assert not hasattr(holder(key), name), "there is one now: take it out of the table"
    with pytest.raises(AttributeError, match=f" has no attribute '{name}'; .*here.* {re.escape(what)}\\.$"):
        getattr(holder(key), name)


KNOWN = {
    "absl": absl,
    "context": OBJECTS["Context"],
    "est": est,
    "estimator": est.Estimator,
    "jax": jax,
    "jnp": jnp,
    "logging": absl.logging,
    "optax": optax,
    "optimizer": est.Optimizer,
    "replicate": replicate,
    "replicate_model_fn": replicate.replicate_model_fn,
    "TowerOptimizer": replicate.TowerOptimizer,
}
OTHERS = ("`python -m", "`tf.", "`TF_CONFIG`", "`warm_start_from=`", "`after_create_session`", "`name`", "`kernel`")


def stands_for(node, known):
    """What an expression of names and attributes stands for; an error where an attribute is missing."""
    if isinstance(node, ast.Attribute):
        owner = stands_for(node.value, known)
        return None if owner is None else getattr(owner, node.attr)
    return known.get(node.id) if isinstance(node, ast.Name) else None


def is_right(code, key):
    """Whether code names something that exists, with the arguments that it has; an error where it does not exist."""
    own = dir(OBJECTS["RunConfig"]) if key.startswith("tf.estimator.RunConfig.") else []  # named without `config.`
    known = KNOWN | dict.fromkeys(own, "an attribute")
    exists = False
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            exists = all(getattr(importlib.import_module(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute):
            exists |= stands_for(node, known) is not None
        elif isinstance(node, ast.Call) and node.keywords and (called := stands_for(node.func, known)):
            parameters = inspect.signature(called.__init__ if inspect.isclass(called) else called).parameters
            assert {keyword.arg for keyword in node.keywords} <= parameters.keys()
    return exists


@pytest.mark.quick
@pytest.mark.parametrize("key", NAMES)
def test_what_is_named_instead_exists(key):
    codes = [code for code in re.findall("`[^`]+`", NAMES[key]) if not code.startswith(OTHERS)]
    right = [is_right(code.strip("`"), key) for code in codes]
    assert any(right) or NAMES[key].startswith("nothing: ") or "`input_fn`" in codes or key == "tf.data"


def test_the_page_of_the_names_is_made_of_the_table():
    page = pathlib.Path(names_page.PAGE).read_text(encoding="utf-8")
    assert page == names_page.page(), "run python tests/testing/website/names_page.py"


def test_the_page_has_every_name_of_the_golden_file():
    cases = [*GOLDEN["optimizers"], *GOLDEN["schedules"], *GOLDEN["nn"]]
    there = {key.removeprefix("tf.").removeprefix("train.").removeprefix("nn.") for key in NAMES}
    assert {case["name"] for case in cases} <= there


def test_a_name_of_another_module_is_known_too():
    with pytest.raises(
        AttributeError, match="'estimator.losses' has no attribute 'AdamOptimizer'; here it is `est.train.Adam"
    ):
        est.losses.AdamOptimizer  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        est,
        est.image,
        est.layers,
        est.losses,
        est.metrics,
        est.nn,
        est.summary,
        est.feature_column,
        est.train,
        replicate,
    ],
)
def test_other_names_are_missing_as_ever(module):
    assert not hasattr(module, "nonsense") and not hasattr(module, "__wrapped__")
    assert getattr(module, "nonsense", 3) == 3
    with pytest.raises(AttributeError, match=f"^module '{module.__name__}' has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018
    # What completes and lists names sees those that exist.
    assert {*module.__all__} <= {*dir(module)} and not {"SessionRunHook", "names_missing_in"} & {*dir(module)}


def test_python_suggests_the_name_that_may_be_meant():
    with pytest.raises(AttributeError) as caught:
        est.EstimatorSpecs  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("EstimatorSpecs", est)  # of which a traceback makes a suggestion


CROSS_TOWER_OPS = {
    "PerDevice": "PerTower",
    "AllReduceCrossTowerOps": "AllReduce",
    "ReductionToOneDeviceCrossTowerOps": "ReductionToOneDevice",
}


@pytest.mark.parametrize("name", CROSS_TOWER_OPS)
def test_names_of_the_sums_over_towers_are_errors_that_say_what_is_there_instead(name):
    match = f"^module 'replicate.cross_tower_ops' has no attribute '{name}'; here it is `{CROSS_TOWER_OPS[name]}.*`\\.$"
    with pytest.raises(AttributeError, match=match):
        getattr(replicate.cross_tower_ops, name)
    assert hasattr(replicate.cross_tower_ops, CROSS_TOWER_OPS[name])


@pytest.mark.parametrize("name", _caffe2_names.NAMES)
def test_names_of_caffe2_are_errors_that_say_what_is_there_instead(name, monkeypatch):
    what = _caffe2_names.NAMES[name]
    with pytest.raises(AttributeError, match=f"^module 'replicate' .*'{name}'; .*{re.escape(what[9:])}\\.$"):
        getattr(replicate, name)
    monkeypatch.setitem(globals(), "KNOWN", KNOWN | vars(replicate))
    codes = re.findall("`([^`]+)`", what)
    assert what.startswith("nothing: ") or any([is_right(code, name) for code in codes])


def test_every_function_of_caffe2s_module_has_a_hint():
    assert {*test_from_caffe2.FUNCTIONS} <= _caffe2_names.NAMES.keys()


def test_an_import_of_a_missing_name_is_an_import_error():
    with pytest.raises(ImportError, match="^cannot import name 'SessionRunHook' from 'estimator'"):
        from estimator import SessionRunHook  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="^No module named 'estimator.contrib'$"):
        importlib.import_module("estimator.contrib")


def test_objects_that_know_names_of_tensorflow_are_copied_and_pickled():
    config = est.RunConfig(seed=3)
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert copy.copy(OBJECTS["Estimator"]).model_dir == OBJECTS["Estimator"].model_dir
