"""The connection of this process to jax's coordination service: what `jax.distributed.initialize` does, in parts.

The public function starts the service within process 0. When that dies, jax's clients abort all other processes, with a
stack trace of C++ (with a `missed_heartbeat_callback` of Python they abort too, by std::bad_cast in jaxlib 0.10); its
heartbeats do the same to all when any other dies; and at its end each process waits for all others, for minutes where
one has failed. So here the service is in the hub, which outlives all, the lifeline notices who dies, and nobody waits
at the end. jax's handler of SIGTERM is left out, since `estimator` has its own.

Other modules get here what jax has no public name for: its key-value store, and its cluster detection.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import clusters as clusters
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from estimator.multihost import _supervisor

# Seconds after the deadline. A connection that comes to nothing ends in an abort, so whoever waits gives up before.
_LATER = 60


def devices_are_started() -> bool:
    return xla_bridge.backends_are_initialized()


def connect(host: str, port: int, num_processes: int, process_id: int, secs: float) -> None:
    """Connects to the service at the port; returns when all processes have."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=max(0, int(secs)) + _LATER,
        heartbeat_timeout=_supervisor.FOREVER,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    state.client, state.coordinator_address = client, address
    state.process_id, state.num_processes = process_id, num_processes
    if jax.config.values["jax_cpu_collectives_implementation"] is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # on GPUs it is NCCL


def key_value_store() -> Any:
    """The client of the coordination service, whichever call has connected it."""
    return distributed.global_state.client


def forget() -> None:
    """Keeps jax from waiting for the other processes at the exit."""
    distributed.global_state.client = None
