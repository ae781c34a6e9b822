"""Connects the processes of a run."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from estimator.core._argument_checks import check_intervals
from estimator.multihost import _coordination_client
from estimator.multihost._cluster import (
    ClusterSpec,
    adopt_cluster,
    find_cluster,
    is_literally_loopback,
    is_loopback,
    split_address,
)
from estimator.multihost._introduction import Introduction, check_devices, exchange_introductions, format_table
from estimator.multihost._process_group import CALLS
from estimator.multihost._process_watch import ProcessWatch
from estimator.multihost._supervisor import SUPERVISOR
from estimator.runtime._log_lines import show_log_lines
from estimator.runtime._program import Program
from estimator.runtime._uninterrupted import Work

_CALLER = "initialize_distributed"
_LATER = 60  # seconds after the deadline: jax aborts a process whose connection comes to nothing, so we give up before
_LINGER_SECS = 2.0  # of process 0, whose end aborts the others, for them to give up by themselves

_is_initialized = False  # whether `initialize_distributed` was called


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout_secs: float = 300.0,
    heartbeat_timeout_secs: float = 30.0,
    grace_secs: float = 10.0,
) -> None:
    """Makes one run of several processes: after it `jax.devices()` are the devices of all of them.

    Call it once, before anything else that uses jax. Arguments that are not given come from the environment:
    `replicate.launch`, Kubeflow (Trainer, JAXJob, PyTorchJob), `TF_CONFIG`, torchrun, SkyPilot, SLURM, MPI, an indexed
    job of Kubernetes, or a TPU pod. If nothing there names several processes, the same script runs as one process.

    It is `jax.distributed.initialize`, with which jax's coordination service runs in process 0, the chief. Where that
    was called already, as by Ray's JaxTrainer, the processes are those that it has connected. Then the
    processes check that they fit together (versions, hosts, number, devices), a sum over all devices is checked, and
    process 0 logs a table of the processes.

    From then on a process that loses another one ends too: with `est.ProcessLostError` in the Estimator's calls, or, if
    it is still in a collective `grace_secs` later, with exit code 76; if process 0 is lost, jax aborts the others. A
    process that ends in order before the others, also by `sys.exit`, is not lost. Process 0 waits for the others at its
    exit, at which all disconnect: leave out `jax.distributed.shutdown`, which in process 0 lets jax abort those that
    are still connected. If something else has called `jax.distributed.initialize`, without jax's recoverability, jax
    itself aborts the others when one is lost. `docs/many_hosts.md` says more.

    >>> initialize_distributed("localhost:1234", num_processes=2, process_id=2)
    Traceback (most recent call last):
    ...
    ValueError: initialize_distributed: process_id must be 0 to 1, as num_processes is 2; got 2.

    Args:
      coordinator_address: "host:port" of process 0, as the others reach it; also in JAX_COORDINATOR_ADDRESS.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      local_device_ids: the numbers of the GPUs that this process uses. If None, all that it sees; under SLURM and Open
        MPI, where several processes of a host see the same ones, one each.
      timeout_secs: seconds within which all must be there and have summed.
      heartbeat_timeout_secs: seconds after which a process that is not heard of counts as lost, since it has died or
        its host has; threads of jax send the heartbeats, whatever Python does. On a host that has far more to do than
        CPUs, a short time ends processes that live. A death that a launcher or an engine sees ends the run at once.
      grace_secs: seconds that a process may wait for one that has died.

    Raises:
      ValueError: the arguments, or the environment, do not make sense; a loopback address is given for several
        hosts; or a variable speaks of several processes, and nothing says how to connect.
      RuntimeError: it was called before, or after jax has started its devices; or the processes do not fit together.
      OSError: the port is in use on the host of process 0.
      TimeoutError: not all processes have come, or the sum has not, within timeout_secs. If a process_id is given
        twice, or is too large, jax aborts that process.
    """
    global _is_initialized
    show_log_lines()
    check_intervals("initialize_distributed", timeout_secs=timeout_secs)
    check_intervals("initialize_distributed", heartbeat_timeout_secs=heartbeat_timeout_secs)
    check_intervals("initialize_distributed", grace_secs=grace_secs)
    connected = None if _is_initialized else _coordination_client.get_connection()
    if connected:
        cluster = adopt_cluster(connected, coordinator_address, num_processes, process_id, local_device_ids)
    else:
        cluster = find_cluster(coordinator_address, num_processes, process_id, local_device_ids)
    if _is_initialized:
        raise RuntimeError("initialize_distributed was called before; call it once, at the start of the script.")
    if (not connected or local_device_ids is not None) and _coordination_client.devices_are_started():
        raise RuntimeError(
            "initialize_distributed must be called before jax starts its devices; they have been started, by a "
            "computation, jax.devices() or the like. Call it at the start of the script."
        )
    if cluster.num_processes == 1:
        logging.info("initialize_distributed: one process (%s).", cluster.source)
    else:
        CALLS.start_timeout_secs = timeout_secs
        times = _Times(time.monotonic() + timeout_secs, timeout_secs, heartbeat_timeout_secs, grace_secs)
        (_adopt if connected else _start)(cluster, times)
    _is_initialized = True


class _Times(NamedTuple):
    """The limits of a start, in seconds, and of the watch after it."""

    deadline: float  # by `time.monotonic()`
    timeout: float
    heartbeat: float
    grace: float


def _start(cluster: ClusterSpec, times: _Times) -> None:
    """Connects the processes, then starts them together."""
    if cluster.process_id == 0:
        _check_port_is_free(cluster)
    else:
        _wait_for_process_0(cluster, times)
    late = (
        f"not all of {cluster.num_processes} processes have come to coordinator_address={cluster.address!r} within "
        f"{times.timeout:g} s. Start each of them once, with this address and its own process_id, 0 to "
        f"{cluster.num_processes - 1}; see their logs for those that have failed."
    )
    _run_in_time(lambda: _connect(cluster, times), cluster, times, late)

    def introduce() -> list[Introduction]:
        try:
            return exchange_introductions(cluster, times.deadline)
        except RuntimeError:
            _disconnect_in_order(cluster)
            raise

    _get_together(introduce, cluster, times)


def _adopt(cluster: ClusterSpec, times: _Times) -> None:
    """Starts processes together that jax has connected already, and that stay connected where they do not fit."""
    _get_together(lambda: exchange_introductions(cluster, times.deadline), cluster, times)


def _get_together(introduce: Callable[[], list[Introduction]], cluster: ClusterSpec, times: _Times) -> None:
    """Starts the watch and the devices of processes that are connected, and checks that they sum."""

    def work() -> None:
        processes = introduce()
        # The watch begins before the first collective, in which another process may die. Without recoverability, if jax
        # was connected before, jax aborts all when one dies, and a watch would wait at the exit.
        if jax.config.values["jax_enable_recoverability"]:
            ProcessWatch([str(process) for process in processes], cluster.process_id, times.heartbeat, times.grace)
        if not _coordination_client.devices_are_started():
            _choose_collectives()
            _choose_devices(cluster, processes)
        _check_sum(*_sum_device_numbers())
        check_devices(processes)
        if cluster.process_id == 0:
            logging.info("%s: %d processes (%s).\n%s", _CALLER, len(processes), cluster.source, format_table(processes))

    late = (
        f"the first sum over all devices has not come within {times.timeout:g} s. All processes are there, so look "
        "for a firewall between their hosts, a proxy (http_proxy), or devices that do not start."
    )
    _run_in_time(work, cluster, times, late)


def _run_in_time(work: Callable[[], None], cluster: ClusterSpec, times: _Times, late: str) -> None:
    """Calls `work` until the deadline, or until a process is lost; raises what it raises.

    Raises:
      ProcessLostError: a process was lost.
      TimeoutError: the deadline has passed, with the text `late`.
    """
    # In its own thread, since no call of jax here has a timeout that raises an error in Python.
    start = Work(work, "initialize-distributed", SUPERVISOR.notify)
    start.thread.start()
    secs = times.deadline - time.monotonic()
    SUPERVISOR.wait_for(lambda: start.done.is_set() or SUPERVISOR.loss is not None, secs)
    if not start.done.is_set():  # the thread still hangs in jax
        atexit.register(_end_at_once, _LINGER_SECS if cluster.process_id == 0 else 0.0)
        SUPERVISOR.raise_if_lost()
        raise TimeoutError(f"{_CALLER}: {late}")
    try:
        start.result()
    except BaseException as error:
        raise SUPERVISOR.explain(error)  # noqa: B904


def _check_port_is_free(cluster: ClusterSpec) -> None:
    """Raises OSError if the port of process 0 is in use."""
    assert cluster.address is not None
    # jax's service could share the port with another one, and each would get some of the processes.
    dual = socket.has_dualstack_ipv6()
    try:
        socket.create_server(
            ("", split_address(cluster.address)[1]),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
        ).close()
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            f"{_CALLER}: port {split_address(cluster.address)[1]} of coordinator_address={cluster.address!r} is in use "
            "on this host, by another program or another process 0. Give another port, to all processes, or end the "
            "one that has it."
        ) from e


def _wait_for_process_0(cluster: ClusterSpec, times: _Times) -> None:
    """Waits until something listens at the address of process 0.

    Raises:
      TimeoutError: nobody answers.
    """
    assert cluster.address is not None
    # jax would wait, too, but it retries only one second after a failed attempt.
    while True:
        left = times.deadline - time.monotonic()
        try:
            socket.create_connection(split_address(cluster.address), timeout=max(0.1, min(5.0, left))).close()
            return
        except OSError as e:
            if left <= 0:
                hint = (
                    " A loopback address reaches no other host."
                    if is_loopback(split_address(cluster.address)[0])
                    else ""
                )
                raise TimeoutError(
                    f"{_CALLER}: nobody answers at coordinator_address={cluster.address!r} for {times.timeout:g} s "
                    f"({e}). Process 0 must run on that host, with the same address.{hint}"
                ) from e
        time.sleep(max(0.0, min(0.02, left)))


def _connect(cluster: ClusterSpec, times: _Times) -> None:
    """Connects jax; returns when all processes have connected."""
    assert cluster.address is not None
    jax.config.update("jax_enable_recoverability", True)  # else the death of any process aborts all
    jax.config.update("jax_enable_preemption_service", False)  # `_preemption.py` handles SIGTERM, and says why
    listens_to_itself = is_literally_loopback(split_address(cluster.address)[0])
    jax.distributed.initialize(
        cluster.address,
        cluster.num_processes,
        cluster.process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=int(times.timeout) + _LATER,
        heartbeat_timeout_seconds=max(1, round(times.heartbeat)),
        coordinator_bind_address=cluster.address if listens_to_itself else None,
    )


def _disconnect_in_order(cluster: ClusterSpec) -> None:
    """Disconnects jax, process 0 last."""
    # jax aborts the processes that are connected when its service ends. This call returns when all others have
    # disconnected.
    if cluster.process_id == 0:
        _coordination_client.coordination_client().get_live_nodes(list(range(cluster.num_processes)))
    jax.distributed.shutdown()


def _choose_collectives() -> None:
    if jax.config.values["jax_cpu_collectives_implementation"] is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # on GPUs it is NCCL


def _choose_devices(cluster: ClusterSpec, processes: Sequence[Introduction]) -> None:
    """Divides the GPUs of a host among processes that see the same ones, where the environment numbers these."""
    ids = cluster.local_device_ids
    if ids is None and cluster.local_process_id is not None:
        host = processes[cluster.process_id].host
        visible = [process.visible_devices for process in processes if process.host == host]
        if len(visible) > len(set(visible)):
            ids = [cluster.local_process_id]
    if ids is not None:
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, ",".join(map(str, ids)))


def _end_at_once(linger_secs: float) -> None:
    """Ends the process, at its exit."""
    # If a thread hangs in compiled code, the end of Python would abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(linger_secs)
    os._exit(1)


def _check_sum(total: int, expected: int) -> None:
    if total != expected:
        raise RuntimeError(
            f"{_CALLER}: the sum over all {jax.device_count()} devices is wrong: {total} instead of {expected}. Their "
            "connections, or drivers, cannot be trusted."
        )


def _sum_device_numbers() -> tuple[int, int]:
    devices = jax.devices()
    sharding = NamedSharding(Mesh(np.array(devices), "device"), PartitionSpec("device"))
    numbers = np.arange(1, len(devices) + 1, dtype=np.int32)
    numbers_by_device = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
    total = Program(lambda x: x.sum(), out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
    return int(total(numbers_by_device)), int(numbers.sum())
