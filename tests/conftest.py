"""Fixtures for all tests, and markers for those that start processes or need a GPU."""

import functools
import inspect
import types

import jax
import pytest

from estimator.runtime._shared_programs import forget_programs

# A test gets the marker if its code, or a fixture or helper that it uses, names something of these modules.
STARTERS = {
    "soak.kills": "multiprocess",
    "subprocess": "subprocess",
    "testing.cluster": "multiprocess",
    "testing.processes": "multiprocess",
    "testing.website.scripts": "subprocess",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function):
            for marker in starts(item.function):
                item.add_marker(marker)
            if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
                item.add_marker(pytest.mark.skip(f"needs a GPU; jax.default_backend() is {jax.default_backend()!r}"))


@functools.cache  # of the many cases of a test
def starts(function: object) -> list[str]:
    """The markers of a test that starts processes."""
    return sorted({STARTERS[module] for module in modules_used(function, set()) & STARTERS.keys()})


def modules_used(function: object, seen: set[object]) -> set[str]:
    """The modules that the names in a function's code stand for, its fixtures and helpers included."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function in seen:
        return set()
    seen.add(function)
    modules = set()
    decorated = [mark.args for mark in getattr(function, "pytestmark", ()) if mark.name == "usefixtures"]
    for name in names_in(function.__code__).union(*decorated):
        value = function.__globals__.get(name)
        module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None) or ""
        modules.add(module)
        if module == function.__module__ or module.startswith("testing."):
            modules |= modules_used(value, seen)
    return modules


def names_in(code: types.CodeType) -> set[str]:
    """The globals, attributes and arguments that code names, functions within it included; fixtures are arguments."""
    inner = [names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}.union(*inner)


@pytest.fixture
def messages(caplog):
    caplog.set_level("INFO", logger="absl")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "absl"]


@pytest.fixture
def compilations():
    """The list of compilations so far; grows by one at each. No program is left from the test before."""
    events = []
    forget_programs()

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
