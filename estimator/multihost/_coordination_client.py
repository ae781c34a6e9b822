"""The one door to private parts of jax: the client of its coordination service, and its cluster detection.

`jax.distributed.initialize` starts the service in process 0 and connects all clients to it. jax has no public name for
the client, which is the key-value store of the processes and knows which of them live, nor for what finds the processes
of SLURM, Open MPI and TPU pods. `tests/multihost/test_coordination_client.py` says what is used of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax._src import clusters as clusters
from jax._src import distributed, xla_bridge
from jax.errors import JaxRuntimeError

_REQUEST_MS = 600_000


def devices_are_started() -> bool:
    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any:
    """The client of this process, whoever has called `jax.distributed.initialize`; None if nobody has."""
    return distributed.global_state.client


def connected_client() -> Any:
    """The client of a process that was connected.

    Raises:
      jax.errors.JaxRuntimeError: `jax.distributed.shutdown` was called. Requests that it cuts off raise it, too.
    """
    client = coordination_client()
    if client is None:
        raise JaxRuntimeError("CANCELLED: This process has disconnected, by jax.distributed.shutdown().")
    return client


def await_value(key: str, is_wanted: Callable[[], bool] = lambda: True) -> str | None:
    """Waits for the value of a key as long as it is wanted, or until its request ends.

    Raises:
      jax.errors.JaxRuntimeError: this process disconnects, or jax is about to end it.
    """
    while is_wanted():
        try:
            text: str = connected_client().blocking_key_value_get(key, _REQUEST_MS)
            return text
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    return None


class Connection(NamedTuple):
    """The arguments of the call of `jax.distributed.initialize` that connected this process."""

    address: str
    num_processes: int
    process_id: int


def get_connection() -> Connection | None:
    """Returns how this process was connected; None if nobody has connected it."""
    state = distributed.global_state
    if state.client is None or state.coordinator_address is None:
        return None
    return Connection(state.coordinator_address, state.num_processes, state.process_id)
