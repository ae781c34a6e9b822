"""CPU seconds of tests: those of the ten slowest files, and of a test that takes over a second and is not marked so.

It is CPU time, of this process and of children that have ended, since a clock counts what else the machine does. A test
fails for it only if it takes that much on any day: a second more is free, since a virtual machine that stands still for
a while counts that, too; a slow machine has a higher limit, and in CI, on machines that nobody looks at and whose speed
changes within a test, it is five seconds; two seconds in which XLA compiles are free, since a program that is compiled
today may be found in the cache, or made by another test, tomorrow; and so is a test that is the first of its process to
import something, such as orbax.
"""

import collections
import os
import resource
import sys
import time
from collections.abc import Iterator

import jax
import pytest

from testing.runs.selection import TESTS, costs

LIMIT = 5.0 if os.environ.get("CI") else 2.0  # of the call of a test, with the second that is free
FREE = 2.0  # of its compilations
REFERENCE = 0.020  # of `measure_slowness`, on the machine where the limit was set
START = pytest.StashKey[float]()
PROPERTY = "CPU seconds"

compiled = [0.0]  # by this process, in seconds


def count_compilations(event: str, seconds: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compiled[0] += seconds


def pytest_configure() -> None:
    jax.monitoring.register_event_duration_secs_listener(count_compilations)


def read_cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure_slowness() -> float:
    """Returns how much slower the machine is now than the one where the limit was set; at least 1."""
    start = time.thread_time()
    sum(hash(str(i)) for i in range(100_000))
    return max(1.0, (time.thread_time() - start) / REFERENCE)


def most_seconds(compiling: float) -> float:
    return measure_slowness() * (LIMIT + min(compiling, FREE))


def is_limited(item: pytest.Item) -> bool:
    """Returns whether it is a test that is marked as cheap, run on a CPU by programs that are compiled in a hurry."""
    hurry = "xla_backend_optimization_level=0" in os.environ.get("XLA_FLAGS", "")
    return item.path.is_relative_to(TESTS) and not costs(item) and hurry and jax.default_backend() == "cpu"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[START] = read_cpu_seconds()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    start, compiled_before, imported = read_cpu_seconds(), compiled[0], len(sys.modules)
    result = yield
    seconds, compiling = read_cpu_seconds() - start, compiled[0] - compiled_before
    is_first = len(sys.modules) > imported
    if seconds > LIMIT and not is_first and is_limited(item) and seconds > most_seconds(compiling):
        pytest.fail(
            f"The test took {seconds:.1f} CPU seconds, and compiled for {compiling:.1f}. Make it cheaper, or mark it "
            "`slow` and leave a cheap case of its law unmarked.",
            pytrace=False,
        )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((PROPERTY, read_cpu_seconds() - item.stash[START]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds = collections.Counter()
    for report in sum(terminalreporter.stats.values(), []):
        if isinstance(report, pytest.TestReport) and report.when == "teardown":
            seconds[report.nodeid.partition("::")[0]] += dict(report.user_properties)[PROPERTY]
    if len(seconds) > 1:
        terminalreporter.section("slowest files, in CPU seconds")
        for file, each in seconds.most_common(10):
            terminalreporter.write_line(f"{each:7.1f}  {file}")
