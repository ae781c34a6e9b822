"""The processes of a run, from arguments and, for what is not given, from the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from estimator.multihost._address import is_literally_loopback, split_address
from estimator.multihost._coordination_client import Connection
from estimator.multihost._engines import KUBERNETES, Detected, check_alone, coordinator_address, detect


class ClusterSpec(NamedTuple):
    """The processes of a run, and which of them this one is."""

    address: str | None  # "host:port" of process 0
    num_processes: int
    process_id: int
    source: str  # where this is from
    local_device_ids: Sequence[int] | None = None
    local_process_id: int | None = None  # the number within the host, where the environment says so


def find_cluster(
    address: str | None, num_processes: int | None, process_id: int | None, local_device_ids: Sequence[int] | None
) -> ClusterSpec:
    """The arguments of `initialize_distributed`, completed from the environment; one process where there is nothing.

    Raises:
      ValueError: something is missing or wrong; or the address is a loopback one though the environment names several
        hosts; or nothing says how to connect, though a variable speaks of several processes.
    """
    address = address or coordinator_address()
    detected = Detected("the arguments", address, num_processes, process_id)
    if None in detected[:4]:
        detected = detect(address)
        address = address or detected.address
        num_processes = detected.num_processes if num_processes is None else num_processes
        process_id = detected.process_id if process_id is None else process_id
    if address is None and num_processes is None and process_id is None:
        check_alone()
        return ClusterSpec(None, 1, 0, "nothing names others: no arguments, TF_CONFIG, SLURM, MPI or Kubernetes")
    _check_numbers(num_processes, process_id)
    if num_processes == 1:
        return ClusterSpec(None, 1, 0, detected.source or "the arguments")
    if address is None or num_processes is None or process_id is None:
        parts = {"coordinator_address": address, "num_processes": num_processes, "process_id": process_id}
        raise ValueError(_missing([name for name, value in parts.items() if value is None], detected.source))
    host, _ = split_address(address)
    if detected.several_hosts and is_literally_loopback(host):
        raise ValueError(
            f"initialize_distributed: coordinator_address={address!r} is a loopback address, which every host has for "
            f"itself, but {detected.source} names several hosts. Give the name of process 0's host."
        )
    if local_device_ids is None and (text := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        local_device_ids = [int(number) for number in text.split(",")]
    source = detected.source or "the arguments"
    return ClusterSpec(address, num_processes, process_id, source, local_device_ids, detected.local_process_id)


def connected_cluster(
    connected: Connection,
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
) -> ClusterSpec:
    """The processes that jax has connected already; the arguments need not be given.

    Raises:
      ValueError: they say something else. A host may have several names, so that of the address the port counts.
    """
    is_other_address = address is not None and split_address(address)[1] != split_address(connected.address)[1]
    given = {
        "coordinator_address": (address, is_other_address),
        "num_processes": (num_processes, num_processes not in (None, connected.num_processes)),
        "process_id": (process_id, process_id not in (None, connected.process_id)),
    }
    for name, (value, is_other) in given.items():
        if is_other:
            raise ValueError(
                f"initialize_distributed: jax is connected already, as process {connected.process_id} of "
                f"{connected.num_processes} at {connected.address!r}; got {name}={value!r}. Leave the arguments out, "
                "or let nothing else call jax.distributed.initialize."
            )
    return ClusterSpec(*connected, "jax.distributed.initialize, which was called before", local_device_ids)


def _check_numbers(count: Any, index: Any) -> None:
    for name, value, least in (("num_processes", count, 1), ("process_id", index, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"initialize_distributed: {name} must be an int of at least {least}; got {value!r}.")
    if count is not None and index is not None and index >= count:
        raise ValueError(
            f"initialize_distributed: process_id must be 0 to {count - 1}, as num_processes is {count}; got {index}."
        )


def _missing(names: list[str], source: str) -> str:
    if source and names == ["coordinator_address"]:
        return (
            f"initialize_distributed: {source} does not say where process 0 is. Give coordinator_address, or set "
            'JAX_COORDINATOR_ADDRESS, to "host:port" of it.'
        )
    if source == KUBERNETES:
        return (
            f"initialize_distributed: {' and '.join(names)} must be given in a job of Kubernetes (JAX_NUM_PROCESSES "
            "says how many pods there are), or jax must be able to ask for it: pip install jax[k8s]."
        )
    return (
        f"initialize_distributed: {' and '.join(names)} must be given too; neither TF_CONFIG, SLURM, MPI nor "
        "Kubernetes says it here. Give none of the arguments for a process that runs alone."
    )
