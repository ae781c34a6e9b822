"""The tests of a run: without `--all`, those that are cheap.

A test is costly if it is marked `slow` or `quick` by hand, or if it has a marker that it gets here, by what it uses or
where it stands. Costly ones are left out without `--all`, except the first case of those that are marked `quick`, for
the others, and those that the command names: by a path with `::`. With an expression of `-m` it alone decides.
"""

import collections
import functools
import inspect
import pathlib
import re
import types
from collections.abc import Iterator

import jax
import pytest

# A test gets the marker if its code, or a fixture or helper that it uses, names something of these modules.
USES = {
    "soak.kills": "multiprocess",
    "subprocess": "subprocess",
    "testing.cluster": "multiprocess",
    "testing.object_store": "library",
    "testing.website.browser": "site",
    "testing.website.scripts": "subprocess",
}
FOLDERS = {"website": "site"}  # in tests/
COSTLY = {
    "slow": "slow",
    "multiprocess": "several processes",
    "subprocess": "fresh interpreters",
    "library": "other libraries",
    "site": "the site",
}
# Libraries that the extra `test` leaves out.
LIBRARIES = set("datasets equinox flax grain griffe haiku matplotlib mlflow moto mypy nbformat optuna pandas".split())
LIBRARIES |= set("ray s3fs safetensors tensorflow torch torchdata wandb zensical".split())
AT_THE_TOP = re.compile(r"""^(?:import |from |(?:\w+ = )?pytest\.importorskip\(["'])(\w+)""", re.M)
TESTS = pathlib.Path(__file__).parents[2]
NO_CASE = types.SimpleNamespace(marks=())  # of a test without parameters
LEFT_OUT = pytest.StashKey[collections.Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run all tests, also the costly ones: " + ", ".join(COSTLY.values())
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = collections.Counter()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if item.get_closest_marker("quick"):
            item.add_marker("slow")
        if isinstance(item, pytest.Function):
            for marker in markers(item.function, item.path):
                item.add_marker(marker)
            if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
                item.add_marker(pytest.mark.skip(f"needs a GPU; jax.default_backend() is {jax.default_backend()!r}"))
    result = yield  # other plugins choose by `-k` and, of markers, by `-m`
    if not (config.option.all or config.option.markexpr):
        kept = first_cases(items) | named_ones(items, config)
        left_out = {item: costs(item)[0] for item in items if costs(item) and item not in kept}
        items[:] = [item for item in items if item not in left_out]
        leave_out(config, list(left_out.values()))
    return result


def costs(item: pytest.Item) -> list[str]:
    own = {marker.name for marker in item.iter_markers()}
    return [name for name in COSTLY if name in own]


def first_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """The first case of each function that is marked `quick`, and the cases that are marked so themselves."""
    marked = [item for item in items if item.get_closest_marker("quick")]
    first = {item.nodeid.partition("[")[0]: item for item in reversed(marked)}
    itself = [item for item in marked if "quick" in {mark.name for mark in getattr(item, "callspec", NO_CASE).marks}]
    functions = {item.nodeid.partition("[")[0] for item in itself}
    return {*itself, *(item for name, item in first.items() if name not in functions)}


def named_ones(items: list[pytest.Item], config: pytest.Config) -> set[pytest.Item]:
    """The tests that the command names by a path with `::`: a function or a case."""
    split = [each.partition("::") for each in config.args]
    named = {(config.invocation_params.dir.joinpath(path).resolve(), rest) for path, _, rest in split}
    ends = {item: item.nodeid.partition("::")[2] for item in items}
    return {item for item, end in ends.items() if {(item.path, end), (item.path, end.partition("[")[0])} & named}


def leave_out(config: pytest.Config, kinds: list[str]) -> None:
    config.stash[LEFT_OUT].update(kinds)
    if kinds:
        config.hook.pytest_deselected(items=[types.SimpleNamespace(kind=kind) for kind in kinds])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # in a process of pytest-xdist
        session.config.workeroutput["left_out"] = list(session.config.stash[LEFT_OUT].elements())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """All processes of pytest-xdist collect the same tests, and leave out the same: one of them says it."""
    if not node.config.stash[LEFT_OUT]:
        leave_out(node.config, getattr(node, "workeroutput", {}).get("left_out", []))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash[LEFT_OUT]:
        terminalreporter.section(f"left out: {count.total()} tests; --all runs them, too")
        terminalreporter.write_line(", ".join(f"{said}: {count[kind]}" for kind, said in COSTLY.items() if count[kind]))


@functools.cache  # of the many cases of a test
def markers(function: object, path: pathlib.Path) -> list[str]:
    """The markers that a test gets by what it uses and where it stands."""
    used = modules_used(function, set())
    libraries = {name.partition(".")[0] for name in used}.union(AT_THE_TOP.findall(path.read_text(encoding="utf-8")))
    folders = path.relative_to(TESTS).parts[:-1] if path.is_relative_to(TESTS) else ()
    found = {USES[module] for module in used & USES.keys()} | {FOLDERS[name] for name in folders if name in FOLDERS}
    return sorted(found | ({"library"} if libraries & LIBRARIES else set()))


def modules_used(function: object, seen: set[object]) -> set[str]:
    """The names in a function's code and the modules that they stand for, its fixtures and helpers included."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function in seen:
        return set()
    seen.add(function)
    decorated = [mark.args for mark in getattr(function, "pytestmark", ()) if mark.name == "usefixtures"]
    names = names_in(function.__code__).union(*decorated)
    modules = names - function.__globals__.keys()  # what it imports itself is among them
    for name in names:
        value = function.__globals__.get(name)
        module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None) or ""
        modules.add(module)
        if module == function.__module__ or module.startswith("testing."):
            modules |= modules_used(value, seen)
    return modules


def names_in(code: types.CodeType) -> set[str]:
    """The globals, attributes, imports and arguments that code names, with its functions; fixtures are arguments."""
    inner = [names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    strings = [const for const in code.co_consts if isinstance(const, str)] if "importorskip" in code.co_names else []
    return {*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *strings}.union(*inner)
