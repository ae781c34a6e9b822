"""Connects the processes of a run."""

from __future__ import annotations

import atexit
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from estimator.core._argument_checks import check_intervals
from estimator.multihost import _coordination_client
from estimator.multihost._cluster import Job, find_job
from estimator.multihost._liveness import ProcessLostError, explained
from estimator.multihost._runtime import RUNTIME
from estimator.multihost._supervisor_client import Lifeline, connect, introduce, is_loopback, split_address, start_hub

_HUB_SECS = 5.0  # for the hub to start and to answer


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout_secs: float = 300.0,
    heartbeat_timeout_secs: float = 100.0,
    grace_secs: float = 10.0,
) -> None:
    """Makes one run of several processes: after it `jax.devices()` are the devices of all of them.

    Call it once, before anything else that uses jax. What is not given comes from the environment: `TF_CONFIG`, SLURM,
    MPI, an indexed job of Kubernetes, or a TPU pod. Where nothing speaks of several processes there is one, and the
    same script runs alone.

    All processes connect to process 0, which is the chief, and check that they fit together: number, ids, hosts,
    versions. Then a sum over all devices is checked, and the chief logs a table of the processes.

    From then on each process hears when another dies, or ends with an error. What it does together with others raises
    `est.ProcessLostError`, which names that process, in the Estimator's calls. A process that is still in a collective
    `grace_secs` later is ended, with a line on stderr and exit code 76. A process may end before the others,
    also by `sys.exit`: that is not a loss, though one that still needs it in a collective waits in vain.

    >>> initialize_distributed("localhost:1234", num_processes=2, process_id=2)
    Traceback (most recent call last):
    ...
    ValueError: initialize_distributed: process_id must be 0 to 1, as num_processes is 2; got 2.

    Args:
      coordinator_address: "host:port" of process 0, as the others reach it; also in JAX_COORDINATOR_ADDRESS.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      local_device_ids: the numbers of the GPUs that this process uses. None: all that it sees; under SLURM and Open
        MPI, where several processes of a host see the same ones, one each.
      timeout_secs: seconds within which all must be there and have summed.
      heartbeat_timeout_secs: seconds after which a process that is not heard of counts as dead, for its host may have
        crashed; one that dies alone is noticed at once. A call that keeps Python's global lock for so long looks the
        same.
      grace_secs: seconds that a process may wait for one that has died.

    Raises:
      ValueError: the arguments, or the environment, do not make sense; or a loopback address is given for several
        hosts.
      RuntimeError: it was called before, or after jax has started its devices; or the processes do not fit together.
      OSError: the port is in use on the host of process 0.
      TimeoutError: not all processes have come, or the sum has not, within timeout_secs.
    """
    check_intervals("initialize_distributed", timeout_secs=timeout_secs)
    check_intervals("initialize_distributed", heartbeat_timeout_secs=heartbeat_timeout_secs)
    check_intervals("initialize_distributed", grace_secs=grace_secs)
    job = find_job(coordinator_address, num_processes, process_id, local_device_ids)
    if RUNTIME.is_initialized:
        raise RuntimeError("initialize_distributed was called before; call it once, at the start of the script.")
    if _coordination_client.devices_are_started():
        raise RuntimeError(
            "initialize_distributed must be called before jax starts its devices; they have been started, by a "
            "computation, jax.devices() or the like. Call it at the start of the script."
        )
    if job.num_processes == 1:
        logging.info("initialize_distributed: one process (%s).", job.source)
    else:
        _join(job, timeout_secs, heartbeat_timeout_secs, grace_secs)
    RUNTIME.is_initialized = True


def _join(job: Job, timeout_secs: float, heartbeat_secs: float, grace_secs: float) -> None:
    RUNTIME.start_timeout_secs = timeout_secs
    deadline = time.monotonic() + timeout_secs
    assert job.address is not None
    host, _ = split_address(job.address)
    hub = start_hub(job.address, job.num_processes, timeout_secs, heartbeat_secs) if job.process_id == 0 else None
    try:
        channel = connect(job.address, deadline)
    except BaseException:
        if hub is not None:
            hub.kill()
            hub.wait()
        raise
    if hub is not None:
        hub.returncode = 0  # it ends by itself, after all others; subprocess would warn about that
    # The hub knows best who is missing, so process 0 waits for what it says.
    answer = introduce(channel, job.address, _introduction(job), deadline + (_HUB_SECS if hub else 0.0))
    Lifeline(channel, answer["chief"], heartbeat_secs, grace_secs)
    _choose_devices(job, answer["shares_devices"])
    secs = deadline - time.monotonic()
    _start_devices(
        lambda: _coordination_client.connect(host, answer["begin"], job.num_processes, job.process_id, secs),
        deadline,
        timeout_secs,
    )
    if job.process_id == 0:
        logging.info("initialize_distributed: %d processes (%s).\n%s", job.num_processes, job.source, _table(answer))


def _introduction(job: Job) -> dict[str, Any]:
    assert job.address is not None
    return {
        "process_id": job.process_id,
        "num_processes": job.num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "python": platform.python_version(),
        "address": job.address,
        "loopback": is_loopback(split_address(job.address)[0]),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    }


def _choose_devices(job: Job, shares_devices: bool) -> None:
    ids = job.local_device_ids
    if ids is None and shares_devices and job.local_process_id is not None:
        ids = [job.local_process_id]
    if ids is not None:
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, ",".join(map(str, ids)))


def _start_devices(connect: Callable[[], None], deadline: float, timeout_secs: float) -> None:
    """Connects the processes, starts their devices, and sees that all of these reach each other, by a checked sum."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            connect()
            outcome.append(_sum_of_device_numbers())
        except BaseException as e:
            outcome.append(e)

    # In a thread, since none of it has a timeout that ends in an error of Python.
    thread = threading.Thread(target=work, name="start-devices", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline and not RUNTIME.loss:
        thread.join(0.1)
    if thread.is_alive():
        atexit.register(_end_at_once)
    if not outcome:
        if RUNTIME.loss:
            raise ProcessLostError(RUNTIME.loss)
        raise TimeoutError(
            f"initialize_distributed: the first sum over all devices has not come within {timeout_secs:g} s. All "
            "processes are there, so look for a firewall between their hosts, a proxy (http_proxy), or devices that do "
            "not start."
        )
    if isinstance(outcome[0], BaseException):
        raise explained(outcome[0])
    total, expected = outcome[0]
    if total != expected:
        raise RuntimeError(
            f"initialize_distributed: the sum over all {jax.device_count()} devices is wrong: {total} instead of "
            f"{expected}. Their connections, or drivers, cannot be trusted."
        )


def _end_at_once() -> None:
    """At the exit: where a thread hangs in compiled code, the end of Python would abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _sum_of_device_numbers() -> tuple[int, int]:
    devices = jax.devices()
    sharding = NamedSharding(Mesh(np.array(devices), "device"), PartitionSpec("device"))
    numbers = np.arange(1, len(devices) + 1, dtype=np.int32)
    numbers_by_device = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(numbers_by_device)
    return int(total), int(numbers.sum())


def _table(answer: dict[str, Any]) -> str:
    """One line per process."""
    keys = ("process_id", "host", "pid", "jax", "jaxlib", "python")
    rows = [["process", *keys[1:], "devices"]]
    for hello in answer["processes"]:
        mine = [device for device in jax.devices() if device.process_index == hello["process_id"]]
        devices = f"{len(mine)} x {mine[0].device_kind}" if mine else "none"
        rows.append([*(str(hello[key]) for key in keys), devices])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)
