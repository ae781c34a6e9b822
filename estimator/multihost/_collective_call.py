"""Calls that all processes make together, and what process 0 alone does within them."""

from __future__ import annotations

import contextlib
import logging as standard_logging
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
from absl import logging

from estimator.multihost._coordination_client import coordination_client
from estimator.multihost._key_value_group import KeyValueGroup
from estimator.multihost._liveness import ProcessLostError, explained
from estimator.multihost._process_group import ProcessGroup, SingleProcess
from estimator.multihost._runtime import RUNTIME

T = TypeVar("T")

_PACKAGE = os.path.dirname(os.path.dirname(__file__))


@contextlib.contextmanager
def collective_call(call: str) -> Iterator[ProcessGroup]:
    """The processes that make this call, once all are there.

    An error in the block is published to the others, so that none of them waits for a process that has failed.

    Raises:
      RuntimeError: a process calls something else, or process 0 this one alone.
      TimeoutError: one does not come.
    """
    if RUNTIME.chief_is_alone:
        raise RuntimeError(
            f"`{call}` is a call of all processes, but was made where process 0 works alone, as in an exporter."
        )
    if jax.process_count() == 1:
        yield SingleProcess()
        return
    group = KeyValueGroup(call, RUNTIME.group)
    is_outermost = len(RUNTIME.groups) == 1
    RUNTIME.groups.append(group)
    try:
        group.barrier()
        if group.index:
            logging.get_absl_logger().addFilter(_is_for_all)
        while not group.index and RUNTIME.ended_prefixes:  # nobody is in those calls any more
            coordination_client().key_value_delete(f"{RUNTIME.ended_prefixes.pop()}/")
        yield group
    except BaseException as error:
        failure = explained(error)
        group.publish_failure(failure)
        if isinstance(failure, ProcessLostError) and is_outermost:
            RUNTIME.loss_raised.set()
        if failure is not error:
            raise failure from error
        raise
    finally:
        RUNTIME.groups.remove(group)
        if not group.index:
            RUNTIME.ended_prefixes.append(group.prefix)


def run_on_chief(call: str, make: Callable[[], T]) -> T:
    """What `make` returns in process 0, in all processes; it is called nowhere else. Within such a call, another one
    is of process 0 alone."""
    if RUNTIME.chief_is_alone or jax.process_count() == 1:
        return make()

    def alone() -> T:
        RUNTIME.chief_is_alone = True
        try:
            return make()
        finally:
            RUNTIME.chief_is_alone = False

    with collective_call(call) as group:
        return group.broadcast_from_chief(alone)


def _is_for_all(record: standard_logging.LogRecord) -> bool:
    """Log filter: processes other than 0 drop this package's INFO records."""
    return record.levelno > standard_logging.INFO or not record.pathname.startswith(_PACKAGE)
