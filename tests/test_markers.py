"""Tests are marked by what they name, also in fixtures and helpers, and costly ones are left out (`testing/runs`)."""

import collections
import re
import subprocess
import time
import types

import jax
import pytest
from testing.cluster import shared_cluster
from testing.runs import seconds, selection


@pytest.fixture
def fixture():
    return subprocess.run


def helper():
    return shared_cluster


def markers(request):
    return {marker.name for marker in request.node.iter_markers()} - {"usefixtures", "quick", "slow"}


@pytest.mark.quick
def test_by_a_fixture(request, fixture):
    assert markers(request) == {"subprocess"}


@pytest.mark.quick
@pytest.mark.usefixtures("fixture")
def test_by_a_fixture_that_it_uses(request):
    assert markers(request) == {"subprocess"}


@pytest.mark.quick
def test_by_a_helper_of_a_helper(request):
    def nested():
        return helper()

    assert nested() is shared_cluster
    assert markers(request) == {"multiprocess"}


def test_what_starts_nothing_has_no_marker(request):
    assert markers(request) == set()


@pytest.mark.gpu
def test_what_needs_a_gpu_is_run_where_there_is_one():
    assert jax.default_backend() == "gpu"


@pytest.fixture
def make(request):
    def make(name, *marks, function=lambda: None):
        item = pytest.Function.from_parent(request.node.parent, name=name, callobj=function)
        for mark in marks:
            item.add_marker(mark)
        return item

    return make


def select(items, *args, every=False, expression=""):
    """The names of those that are run, and what is said about the others."""
    config = types.SimpleNamespace(
        args=args,
        hook=types.SimpleNamespace(pytest_deselected=lambda items: None),
        invocation_params=types.SimpleNamespace(dir=items[0].path.parent),
        option=types.SimpleNamespace(all=every, markexpr=expression),
        stash={selection.LEFT_OUT: collections.Counter()},
    )
    hook = selection.pytest_collection_modifyitems(config, items := [*items])
    next(hook)  # here an expression of `-m` chooses
    marked = collections.Counter(name for item in items for name in selection.costs(item))
    assert marked == {"slow": 4, "multiprocess": 2, "library": 1}
    with pytest.raises(StopIteration):
        hook.send(None)
    return [item.name for item in items], dict(config.stash[selection.LEFT_OUT])


def uses_a_library():
    pytest.importorskip("flax.linen")


@pytest.mark.quick
def test_costly_tests_are_left_out_but_for_the_first_quick_case_and_what_is_named(make):
    names = ["a", "b[1]", "b[2]", "c[1]", "c[2]", "d[1]", "d[2]"]
    marks = {"b": ["slow"], "c": ["quick"], "d": ["multiprocess"]}
    items = [make(name, *marks.get(name[0], ())) for name in names] + [make("e", function=uses_a_library)]
    for chosen in ({"every": True}, {"expression": "slow"}):
        assert select(items, **chosen) == ([*names, "e"], {})
    assert select(items) == (["a", "c[1]"], {"slow": 3, "multiprocess": 2, "library": 1})
    file = items[0].path.name
    assert select(items, file, f"{file}::b[2]", f"{file}::d", "other.py::e")[0] == ["a", "b[2]", "c[1]", "d[1]", "d[2]"]


@pytest.mark.parametrize(
    ("marks", "compiling", "slowness", "fails"),
    [((), 0, 1, True), (("slow",), 0, 1, False), ((), 9, 1, False), ((), 0, 99, False)],
)
def test_a_test_over_a_second_fails_unless_it_is_marked_compiles_or_the_machine_is_slow(
    make, marks, compiling, slowness, fails
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seconds, "LIMIT", 0.02)
        patch.setattr(seconds, "compiled", [0.0])
        patch.setattr(seconds, "measure_slowness", lambda: slowness)
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        call = seconds.pytest_runtest_call(make("test", *marks))
        next(call)
        seconds.count_compilations("/jax/core/compile/backend_compile_duration", compiling)
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        with pytest.raises(pytest.fail.Exception if fails else StopIteration) as raised:
            call.send(None)
    if fails:
        message = (
            r"The test took 0\.\d CPU seconds, and compiled for 0\.0\. Make it cheaper, or mark it `slow` and leave a "
        )
        assert re.fullmatch(message + r"cheap case of its law unmarked\.", str(raised.value))
