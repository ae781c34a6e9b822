"""Calls that all processes make together, and what only process 0 does within them."""

from __future__ import annotations

import contextlib
import logging as standard_logging
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
from absl import logging

from estimator.multihost._coordination_client import coordination_client
from estimator.multihost._process_group import CALLS, ProcessGroup, SingleProcess
from estimator.runtime._limits import Limits

T = TypeVar("T")

_DEFAULT_LIMITS = Limits()
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


@contextlib.contextmanager
def collective_call(call: str, limits: Limits | None = _DEFAULT_LIMITS) -> Iterator[ProcessGroup]:
    """Waits until all processes make this call, and gives them as a group to the block.

    An error in the block is published to the others, so that none of them waits for a process that has failed.

    Args:
      call: the call, the same in all processes.
      limits: how long its phases may take, unless it is within another call.

    Raises:
      RuntimeError: a process calls something else, or process 0 this one alone.
      TimeoutError: one does not come.
    """
    if CALLS.chief_is_alone:
        raise RuntimeError(
            f"`{call}` is a call of all processes, but was made where process 0 works alone, as in an exporter."
        )
    if jax.process_count() == 1:
        yield SingleProcess()
        return
    from estimator.multihost._key_value_group import KeyValueGroup
    from estimator.multihost._limit_watch import LimitWatch
    from estimator.multihost._supervisor import SUPERVISOR, ProcessLostError

    SUPERVISOR.listen()
    group = KeyValueGroup(call, CALLS.group)
    is_outermost = len(CALLS.groups) == 1
    phase, _ = group.progress.moment
    CALLS.groups.append(group)
    try:
        with contextlib.ExitStack() as stack:
            if is_outermost and limits:
                stack.enter_context(contextlib.closing(LimitWatch(group, limits, group.progress)))
            group.barrier()
            if group.index:
                logging.get_absl_logger().addFilter(_is_for_all)
            # A process that passes the barrier has left all calls before it, and does not read their keys any more.
            while not group.index and CALLS.ended_prefixes:
                coordination_client().key_value_delete(f"{CALLS.ended_prefixes.pop()}/")
            yield group
            if is_outermost:
                group.all_gather(None)  # one that hangs in its `end` is missed here, and not at the exit of another
    except BaseException as error:
        # Explained first, so that the others name the process that was lost, and not this one.
        failure = SUPERVISOR.explain(error)
        group.publish_failure(failure)
        if isinstance(failure, ProcessLostError) and is_outermost:
            SUPERVISOR.note_raise()
        if failure is not error:
            raise failure from error
        raise
    finally:
        CALLS.groups.remove(group)
        group.progress.enter(phase)
        if not group.index:
            CALLS.ended_prefixes.append(group.prefix)


def run_on_chief(call: str, make: Callable[[], T]) -> T:
    """Calls `make` only in process 0, and returns its result in all processes. Within such a call, another one is
    only of process 0."""
    if CALLS.chief_is_alone or jax.process_count() == 1:
        return make()

    def alone() -> T:
        CALLS.chief_is_alone = True
        try:
            return make()
        finally:
            CALLS.chief_is_alone = False

    with collective_call(call) as group:
        return group.broadcast_from_chief(alone)


def _is_for_all(record: standard_logging.LogRecord) -> bool:
    """Drops this package's INFO records, as a log filter of processes other than 0."""
    return record.levelno > standard_logging.INFO or not record.pathname.startswith(_PACKAGE)
