"""The processes of a run: by arguments and, for what is not given, by the engine or launcher that started this one.

`find_cluster` completes the arguments of `initialize_distributed`. An engine is known by its variables in the
environment: `_read_...` is one function per engine, which returns None if it has not started this process.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from estimator.multihost._coordination_client import Connection, clusters
from estimator.multihost._tf_config import EVALUATOR, read_role, read_tf_config

_LOOKUP_SECS = 60  # for the name of process 0 to become known
_SKYPILOT_PORT = 8476  # by default: SkyPilot gives none

# Environment variables of engines: the number of processes, the number of this one, and how to connect.
_JAX = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_JAX_JOB = ("NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS", "COORDINATOR_PORT")
_TORCH = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
_SKYPILOT = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")
_JOB_INDEX = "JOB_COMPLETION_INDEX"  # in Kubernetes
_OPEN_MPI_4 = "OMPI_MCA_orte_hnp_uri"  # where its first process is

# The number of processes, of this one, and of this one on its host: all that these MPIs set.
_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)

_KUBERNETES = "Kubernetes"
_NAMES = {clusters.OmpiCluster: "Open MPI", clusters.SlurmCluster: "SLURM", clusters.K8sCluster: _KUBERNETES}


class ClusterSpec(NamedTuple):
    """The processes of a run, and which of them this one is."""

    address: str | None  # "host:port" of process 0
    num_processes: int
    process_id: int
    source: str  # where this is from
    local_device_ids: Sequence[int] | None = None
    local_process_id: int | None = None  # the number within the host, where the environment says so


class _Detected(NamedTuple):
    """The parts of a `ClusterSpec` that the environment has; None and "" where it has none."""

    source: str = ""
    address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_process_id: int | None = None
    several_hosts: bool = False  # as far as the environment says


def find_cluster(
    address: str | None, num_processes: int | None, process_id: int | None, local_device_ids: Sequence[int] | None
) -> ClusterSpec:
    """Completes the arguments of `initialize_distributed` from the environment; one process where there is nothing."""
    address = address or _read_coordinator_address()
    detected = _Detected("the arguments", address, num_processes, process_id)
    if None in detected[:4]:
        detected = _detect(address)
        address = address or detected.address
        num_processes = detected.num_processes if num_processes is None else num_processes
        process_id = detected.process_id if process_id is None else process_id
    if address is None and num_processes is None and process_id is None:
        _check_alone()
        return ClusterSpec(None, 1, 0, "nothing names others: no arguments, TF_CONFIG, SLURM, MPI or Kubernetes")
    _check_numbers(num_processes, process_id)
    source = detected.source or "the arguments"
    if num_processes == 1:
        return ClusterSpec(None, 1, 0, source)
    if address is None or num_processes is None or process_id is None:
        parts = {"coordinator_address": address, "num_processes": num_processes, "process_id": process_id}
        raise ValueError(_describe_missing([name for name, value in parts.items() if value is None], detected.source))
    host, _ = split_address(address)
    if detected.several_hosts and is_literally_loopback(host):
        raise ValueError(
            f"initialize_distributed: coordinator_address={address!r} is a loopback address, which every host has for "
            f"itself, but {detected.source} names several hosts. Give the name of process 0's host."
        )
    if local_device_ids is None and (text := os.environ.get("JAX_LOCAL_DEVICE_IDS")):
        local_device_ids = [int(number) for number in text.split(",")]
    return ClusterSpec(address, num_processes, process_id, source, local_device_ids, detected.local_process_id)


def adopt_cluster(
    connected: Connection,
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: Sequence[int] | None,
) -> ClusterSpec:
    """Takes the processes that jax has connected already; the arguments need not be given."""
    # A host may have several names, so that only the ports of the addresses are compared.
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


def _describe_missing(names: list[str], source: str) -> str:
    if source and names == ["coordinator_address"]:
        return (
            f"initialize_distributed: {source} does not say where process 0 is. Give coordinator_address, or set "
            'JAX_COORDINATOR_ADDRESS, to "host:port" of it.'
        )
    if source == _KUBERNETES:
        return (
            f"initialize_distributed: {' and '.join(names)} must be given in a job of Kubernetes (JAX_NUM_PROCESSES "
            "says how many pods there are), or jax must be able to ask for it: pip install jax[k8s]."
        )
    return (
        f"initialize_distributed: {' and '.join(names)} must be given too; neither TF_CONFIG, SLURM, MPI nor "
        "Kubernetes says it here. Give none of the arguments for a process that runs alone."
    )


def _check_alone() -> None:
    """Checks, if nothing says how to connect, that no variable speaks of several processes."""
    for count, *others in (_JAX, _JAX_JOB, _TORCH, _SKYPILOT):
        lacking = [name for name in others if not os.environ.get(name)]
        if count == "NUM_PROCESSES" and lacking == others:  # which may be a user's own variable
            continue
        if os.environ.get(count, "").isdigit() and _read_number(count) > 1:
            raise ValueError(
                f"initialize_distributed: {count}={os.environ[count]} speaks of several processes, but there is no "
                f"{' and no '.join(lacking)}, so that each of them would train alone. Set that, or give "
                "coordinator_address, num_processes and process_id; for one process, give num_processes=1, or unset "
                f"{count}."
            )


def _detect(address: str | None) -> _Detected:
    """Finds the processes in the environment.

    Args:
      address: the address of process 0, where it is given; it need not be looked up then.

    Raises:
      ValueError: a variable is not valid.
    """
    # The order matters: settings for this run come before those of an engine, and a launcher comes before the engine
    # that has started it. torchrun under SLURM is torchrun, and each pod has the variables of Kubernetes.
    for read in (_read_jax, _read_jax_job, _read_tf_config, _read_torch, _read_skypilot):
        if detected := read():
            return detected
    return _ask_jax(address) or _read_mpi() or _read_indexed_job() or _Detected()


def _read_coordinator_address() -> str | None:
    """JAX_COORDINATOR_ADDRESS, with JAX_COORDINATOR_PORT where it has no port."""
    address, port = os.environ.get("JAX_COORDINATOR_ADDRESS"), os.environ.get("JAX_COORDINATOR_PORT")
    if address and port and not address.rpartition(":")[2].isdigit():
        return join_address(address, port)
    return address or None


def _read_jax() -> _Detected | None:
    """The variables of `replicate.launch` and Kubeflow Trainer; and of a JobSet, where Kubernetes counts the pods."""
    count, index = _JAX
    if count in os.environ and index in os.environ:
        return _Detected(" and ".join(_JAX), None, _read_number(count), _read_number(index))
    if count in os.environ and _JOB_INDEX in os.environ:
        return _Detected(f"{count} and {_JOB_INDEX}", None, _read_number(count), _read_number(_JOB_INDEX))
    return None


def _read_jax_job() -> _Detected | None:
    """The variables of a JAXJob of Kubeflow's training operator."""
    if not _has_all(_JAX_JOB):
        return None
    count, index, host, port = _JAX_JOB
    address = join_address(os.environ[host], os.environ[port])
    return _Detected("a JAXJob", address, _read_number(count), _read_number(index))


def _read_tf_config() -> _Detected | None:
    text = os.environ.get("TF_CONFIG")
    if read_role(text) == EVALUATOR:
        return _Detected("TF_CONFIG, as an evaluator", None, 1, 0)
    task = read_tf_config(text)
    if task is None:
        return None
    hosts = {split_address(each)[0] for each in task.addresses}
    several_hosts = len({"" if is_literally_loopback(host) else host for host in hosts}) > 1
    return _Detected("TF_CONFIG", task.addresses[0], len(task.addresses), task.process_id, None, several_hosts)


def _read_torch() -> _Detected | None:
    """The variables of torchrun, accelerate or a PyTorchJob."""
    if not _has_all(_TORCH):
        return None
    count, index, host, port = _TORCH
    number, source = _read_number(port), ", ".join(_TORCH)
    # torchrun's agent listens at its port already, and the port of the start before may still be in use: each restart
    # uses the next port, from 1024.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        source = "torchrun"
        number = 1024 + (number - 1024 + 1 + _read_number("TORCHELASTIC_RESTART_COUNT", 0)) % (65536 - 1024)
    return _Detected(
        source,
        join_address(os.environ[host], number),
        _read_number(count),
        _read_number(index),
        _read_local_number("LOCAL_RANK"),
        _read_number("LOCAL_WORLD_SIZE", _read_number(count)) < _read_number(count),
    )


def _read_skypilot() -> _Detected | None:
    """The variables of SkyPilot, which starts a process on each node."""
    if not _has_all(_SKYPILOT):
        return None
    count, index, ips = _SKYPILOT
    hosts = os.environ[ips].split()
    address = join_address(hosts[0], _read_number("JAX_COORDINATOR_PORT", _SKYPILOT_PORT))
    return _Detected("SkyPilot", address, _read_number(count), _read_number(index), None, len(set(hosts)) > 1)


def _ask_jax(address: str | None) -> _Detected | None:
    """The result of jax's own detection: Open MPI 4, SLURM, TPU pods, Kubernetes where its package is installed."""
    for cluster in clusters.ClusterEnv._cluster_types:
        # Every pod is in Kubernetes; one of several processes is in an indexed job.
        if cluster.opt_in_only_method or (cluster is clusters.K8sCluster and _JOB_INDEX not in os.environ):
            continue
        # With Open MPI 5, jax 0.12 needs mpi4py; see `_read_mpi`.
        if cluster is clusters.OmpiCluster and _OPEN_MPI_4 not in os.environ:
            continue
        with warnings.catch_warnings(action="ignore"):  # an error here says that the package is missing
            if not cluster.is_env_present():
                continue
        return _Detected(
            _NAMES.get(cluster, cluster.__name__),
            address or cluster.get_coordinator_address(_LOOKUP_SECS, os.environ.get("JAX_COORDINATOR_PORT")),
            cluster.get_process_count(),
            cluster.get_process_id(),
            cluster.get_local_process_id(),
            _read_number("SLURM_STEP_NUM_NODES", 1) > 1 if cluster is clusters.SlurmCluster else _has_mpi_many_hosts(),
        )
    return None


def _read_mpi() -> _Detected | None:
    """Ranks without an address: Open MPI 5, MPICH, Intel MPI and others that are started as these are."""
    for count, index, local in _MPI:
        if count in os.environ and index in os.environ:
            numbers = (_read_number(count), _read_number(index), _read_local_number(local))
            return _Detected(f"MPI ({index})", None, *numbers, _has_mpi_many_hosts())
    return None


def _read_indexed_job() -> _Detected | None:
    """The number of a pod in an indexed job of Kubernetes, where jax cannot ask for the rest."""
    return _Detected(_KUBERNETES, process_id=_read_number(_JOB_INDEX)) if _JOB_INDEX in os.environ else None


def _has_mpi_many_hosts() -> bool:
    return _read_number("OMPI_COMM_WORLD_LOCAL_SIZE", 1) < _read_number("OMPI_COMM_WORLD_SIZE", 1)


def _has_all(names: Sequence[str]) -> bool:
    return all(os.environ.get(name) for name in names)


def _read_local_number(name: str) -> int | None:
    number = _read_number(name, -1)
    return None if number < 0 else number


def _read_number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.lstrip("-").isdigit():
        raise ValueError(f"initialize_distributed: the environment variable {name} must be a number; got {text!r}.")
    return int(text)


def is_ray_worker() -> bool:
    """Returns whether Ray has started this process to work for a driver."""
    ray = sys.modules.get("ray")  # which a worker has imported
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f'initialize_distributed: coordinator_address must be "host:port"; got {address!r}.')
    return host.strip("[]"), int(port)


def join_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Returns whether a name, as this host resolves it, leads back to this host by its loopback device."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(x.partition("%")[0]).is_loopback for x in addresses)


def is_literally_loopback(host: str) -> bool:
    """Returns whether a name says itself that it is of the loopback device."""
    # Names are not resolved: on its own host, the name of process 0 may be 127.0.1.1, and another address on others.
    return host == "localhost" or (host.replace(".", "").isdigit() or ":" in host) and is_loopback(host)
