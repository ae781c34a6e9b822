"""Cluster detection: which processes a run has, from arguments and from the environment."""

from __future__ import annotations

import ipaddress
import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from estimator.multihost._coordination_client import clusters
from estimator.multihost._tf_config import read_tf_config

_LOOKUP_SECS = 60  # for the name of process 0 to become known
_NAMES = {clusters.OmpiCluster: "Open MPI", clusters.SlurmCluster: "SLURM", clusters.K8sCluster: "Kubernetes"}
_JOB_INDEX = "JOB_COMPLETION_INDEX"
_LAUNCHED = {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}  # by `replicate.launch`
_OPEN_MPI_4 = "OMPI_MCA_orte_hnp_uri"  # where its first process is

# Rank, size and rank within the host, where an MPI says no more than that.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


class ClusterSpec(NamedTuple):
    """The processes of a run, and which of them this one is."""

    address: str | None  # "host:port" of process 0
    num_processes: int
    process_id: int
    source: str  # where this is from
    local_device_ids: Sequence[int] | None = None
    local_process_id: int | None = None  # the number within the host, where the environment says so


class _Detected(NamedTuple):
    source: str = ""
    address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_process_id: int | None = None
    several_hosts: bool = False  # as far as the environment says


def find_cluster(
    address: str | None, num_processes: int | None, process_id: int | None, local_device_ids: Sequence[int] | None
) -> ClusterSpec:
    """The arguments of `initialize_distributed`, completed from the environment; one process where there is nothing.

    Raises:
      ValueError: something is missing or wrong, or the address is a loopback one though the environment names several
        hosts.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    detected = _Detected("the arguments", address, num_processes, process_id)
    if None in detected[:4]:
        detected = _from_environment(address)
        address = address or detected.address
        num_processes = detected.num_processes if num_processes is None else num_processes
        process_id = detected.process_id if process_id is None else process_id
    if address is None and num_processes is None and process_id is None:
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
    if source == "Kubernetes":
        return (
            f"initialize_distributed: {' and '.join(names)} must be given in a job of Kubernetes, or jax must be "
            "able to ask for it: pip install jax[k8s]."
        )
    return (
        f"initialize_distributed: {' and '.join(names)} must be given too; neither TF_CONFIG, SLURM, MPI nor "
        "Kubernetes says it here. Give none of the arguments for a process that runs alone."
    )


def _from_environment(address: str | None) -> _Detected:
    """What was configured for this run comes before what the scheduler says."""
    if _LAUNCHED.issubset(os.environ):
        return _Detected("replicate.launch", None, _number("JAX_NUM_PROCESSES", 0), _number("JAX_PROCESS_ID", 0))
    if task := read_tf_config(os.environ.get("TF_CONFIG")):
        hosts = {split_address(each)[0] for each in task.addresses}
        several_hosts = len({"" if is_literally_loopback(host) else host for host in hosts}) > 1
        return _Detected("TF_CONFIG", task.addresses[0], len(task.addresses), task.process_id, None, several_hosts)
    if detected := _from_scheduler(address) or _from_mpi():
        return detected
    return _Detected("Kubernetes", process_id=_number(_JOB_INDEX, 0)) if _JOB_INDEX in os.environ else _Detected()


def _from_scheduler(address: str | None) -> _Detected | None:
    """The result of jax's own detection: Open MPI 4, SLURM, TPU pods, Kubernetes where its package is installed."""
    for cluster in clusters.ClusterEnv._cluster_types:
        # Every pod is in Kubernetes; one of several processes is in an indexed job.
        if cluster.opt_in_only_method or (cluster is clusters.K8sCluster and _JOB_INDEX not in os.environ):
            continue
        # From Open MPI 5 on jax asks mpi4py; see `_from_mpi`.
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
            _number("SLURM_STEP_NUM_NODES", 1) > 1 if cluster is clusters.SlurmCluster else _mpi_has_several_hosts(),
        )
    return None


def _from_mpi() -> _Detected | None:
    """Ranks without an address: Open MPI 5, MPICH, Intel MPI and others that are started as these are."""
    for rank, size, local_rank in _MPI:
        if rank in os.environ and size in os.environ:
            local = _number(local_rank, -1)
            ids = (_number(size, 0), _number(rank, 0), None if local < 0 else local)
            return _Detected(f"MPI ({rank})", None, *ids, _mpi_has_several_hosts())
    return None


def _mpi_has_several_hosts() -> bool:
    return _number("OMPI_COMM_WORLD_LOCAL_SIZE", 1) < _number("OMPI_COMM_WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.lstrip("-").isdigit():
        raise ValueError(f"initialize_distributed: the environment variable {name} must be a number; got {text!r}.")
    return int(text)


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f'initialize_distributed: coordinator_address must be "host:port"; got {address!r}.')
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a name, as this host resolves it, leads back to this host by its loopback device."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(x.partition("%")[0]).is_loopback for x in addresses)


def is_literally_loopback(host: str) -> bool:
    """Not by what a name resolves to: process 0's own host may call itself 127.0.1.1, and the others know better."""
    return host == "localhost" or (host.replace(".", "").isdigit() or ":" in host) and is_loopback(host)
