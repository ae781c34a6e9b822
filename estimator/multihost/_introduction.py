"""Introductions of the processes of a run at its start, and the check that they fit together."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from estimator.multihost._cluster import ClusterSpec, is_loopback, split_address
from estimator.multihost._coordination_client import coordination_client
from estimator.multihost._process_watch import publish_loss
from estimator.runtime._table import align

_KEY = "estimator/introductions"
_CALLER = "initialize_distributed"


class Introduction(NamedTuple):
    """The facts that a process says of itself."""

    process_id: int
    num_processes: int
    host: str
    pid: int
    jax: str
    jaxlib: str
    python: str
    address: str
    loopback: bool
    visible_devices: str

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


def exchange_introductions(cluster: ClusterSpec, deadline: float) -> list[Introduction]:
    """Tells all processes of this one, waits for theirs, and returns them in the order of the processes."""
    assert cluster.address is not None
    client = coordination_client()
    own = Introduction(
        cluster.process_id,
        cluster.num_processes,
        socket.gethostname(),
        os.getpid(),
        jax.__version__,
        jax.lib.__version__,
        platform.python_version(),
        cluster.address,
        is_loopback(split_address(cluster.address)[0]),
        os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    )
    key = f"{_KEY}/{own.process_id:06}"
    try:
        client.key_value_set(key, json.dumps(own))
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        first = Introduction(*json.loads(client.blocking_key_value_get(key, 1000)))
        # jax has replaced the first one by this process, and aborts it when this one ends: its watch says why.
        publish_loss(f"{first} was replaced by {own} of another run, which connected to its port")
        raise RuntimeError(
            f"{_CALLER}: {own} has come too late: {first} runs already at coordinator_address={own.address!r}. Give "
            "each run a port of its own, and each process its own process_id."
        ) from None
    # After the barrier all introductions can be read.
    client.wait_at_barrier(_KEY, max(1, int(1000 * (deadline - time.monotonic()))))
    introductions = [Introduction(*json.loads(text)) for _, text in sorted(client.key_value_dir_get(_KEY))]
    if problem := find_disagreement(introductions):
        raise RuntimeError(f"{_CALLER}: {problem}")
    return introductions


def find_disagreement(introductions: Sequence[Introduction]) -> str | None:
    """Finds why processes cannot work together; the same text in all of them, as each sees all introductions."""
    first = introductions[0]
    for each in introductions:
        if each.num_processes != first.num_processes:
            return (
                f"{each} was started with num_processes={each.num_processes}, {first} with "
                f"num_processes={first.num_processes}. Give all of them the same."
            )
    for package in ("jax", "jaxlib"):
        for each in introductions:
            if getattr(each, package) != getattr(first, package):
                return (
                    f"different versions of {package}: {getattr(first, package)} in {first}, "
                    f"{getattr(each, package)} in {each}. Install the same everywhere."
                )
    for each in introductions:
        if each.host != first.host and each.loopback:
            return (
                f"coordinator_address={each.address!r} is a loopback address, which every host has for itself, but "
                f"{each} is on another host than {first}. Give the name of process 0's host, as the others know it."
            )
    return None


def check_devices(introductions: Sequence[Introduction]) -> None:
    """Compares the devices of the processes, once they are started."""
    kinds = [_count_devices(each, by_kind=False) for each in introductions]
    for each, kind in zip(introductions, kinds, strict=True):
        if kind != kinds[0]:
            raise RuntimeError(
                f"{_CALLER}: different devices: {kinds[0]} in {introductions[0]}, {kind} in {each}. Give each process "
                "as many, of one platform, by local_device_ids, CUDA_VISIBLE_DEVICES or jax_num_cpu_devices."
            )


def format_table(introductions: Sequence[Introduction]) -> str:
    """Formats a table, with a line per process."""
    rows: list[tuple[str, ...]] = [("process", "host", "pid", "jax", "jaxlib", "python", "devices")]
    for each in introductions:
        cells = (each.process_id, each.host, each.pid, each.jax, each.jaxlib, each.python, _count_devices(each))
        rows.append(tuple(map(str, cells)))
    return "\n".join(align(rows))


def _count_devices(process: Introduction, by_kind: bool = True) -> str:
    devices = [device for device in jax.devices() if device.process_index == process.process_id]
    kind = (devices[0].device_kind if by_kind else devices[0].platform) if devices else ""
    return f"{len(devices)} x {kind}" if devices else "none"
