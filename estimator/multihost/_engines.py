"""The processes of a run in the environment: variables of a launcher, or of the engine that has started them."""

from __future__ import annotations

import os
import warnings
from typing import NamedTuple

from estimator.multihost._address import is_literally_loopback, join_address, split_address
from estimator.multihost._coordination_client import clusters
from estimator.multihost._tf_config import read_tf_config

KUBERNETES = "Kubernetes"
_LOOKUP_SECS = 60  # for the name of process 0 to become known
_NAMES = {clusters.OmpiCluster: "Open MPI", clusters.SlurmCluster: "SLURM", clusters.K8sCluster: KUBERNETES}
_JOB_INDEX = "JOB_COMPLETION_INDEX"
_OPEN_MPI_4 = "OMPI_MCA_orte_hnp_uri"  # where its first process is
_SKYPILOT_PORT = 8476  # by default: SkyPilot gives none

_JAX = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_JAX_JOB = ("NUM_PROCESSES", "PROCESS_ID", "COORDINATOR_ADDRESS", "COORDINATOR_PORT")
_TORCH = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
_SKYPILOT = ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")

# Rank, size and rank within the host, where an MPI says no more than that.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


class Detected(NamedTuple):
    """The parts of a `ClusterSpec` that the environment has; None and "" where it has none."""

    source: str = ""
    address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_process_id: int | None = None
    several_hosts: bool = False  # as far as the environment says


def coordinator_address() -> str | None:
    """JAX_COORDINATOR_ADDRESS, with JAX_COORDINATOR_PORT where it has no port."""
    address, port = os.environ.get("JAX_COORDINATOR_ADDRESS"), os.environ.get("JAX_COORDINATOR_PORT")
    if address and port and not address.rpartition(":")[2].isdigit():
        return join_address(address, port)
    return address or None


def detect(address: str | None) -> Detected:
    """The processes by the environment: what was configured for this run comes before what an engine says, and a
    launcher before the engine that has started it.

    Args:
      address: of process 0, where it is given; it need not be looked up then.

    Raises:
      ValueError: a variable is not valid.
    """
    for find in (_from_jax, _from_jax_job, _from_tf_config, _from_torch, _from_skypilot):
        if detected := find():
            return detected
    if detected := _from_scheduler(address) or _from_mpi():
        return detected
    return Detected(KUBERNETES, process_id=_number(_JOB_INDEX)) if _JOB_INDEX in os.environ else Detected()


def check_alone() -> None:
    """To be called where nothing says how to connect, so that there is one process.

    Raises:
      ValueError: a variable speaks of several.
    """
    for count, *others in (_JAX, _JAX_JOB, _TORCH, _SKYPILOT):
        lacking = [name for name in others if not os.environ.get(name)]
        if count == "NUM_PROCESSES" and lacking == others:  # which may be a user's own variable
            continue
        if os.environ.get(count, "").isdigit() and _number(count) > 1:
            raise ValueError(
                f"initialize_distributed: {count}={os.environ[count]} speaks of several processes, but there is no "
                f"{' and no '.join(lacking)}, so that each of them would train alone. Set that, or give "
                "coordinator_address, num_processes and process_id; for one process, give num_processes=1, or unset "
                f"{count}."
            )


def _from_jax() -> Detected | None:
    """The variables of `replicate.launch` and Kubeflow Trainer; and of a JobSet, where Kubernetes counts the pods."""
    count, index = _JAX
    if count in os.environ and index in os.environ:
        return Detected(" and ".join(_JAX), None, _number(count), _number(index))
    if count in os.environ and _JOB_INDEX in os.environ:
        return Detected(f"{count} and {_JOB_INDEX}", None, _number(count), _number(_JOB_INDEX))
    return None


def _from_jax_job() -> Detected | None:
    """The variables of a JAXJob of Kubeflow's training operator."""
    if not all(os.environ.get(name) for name in _JAX_JOB):
        return None
    count, index, host, port = _JAX_JOB
    return Detected("a JAXJob", join_address(os.environ[host], os.environ[port]), _number(count), _number(index))


def _from_tf_config() -> Detected | None:
    task = read_tf_config(os.environ.get("TF_CONFIG"))
    if task is None:
        return None
    hosts = {split_address(each)[0] for each in task.addresses}
    several_hosts = len({"" if is_literally_loopback(host) else host for host in hosts}) > 1
    return Detected("TF_CONFIG", task.addresses[0], len(task.addresses), task.process_id, None, several_hosts)


def _from_torch() -> Detected | None:
    """The variables of torchrun, accelerate or a PyTorchJob. At its port torchrun's agent listens already, so ours is
    another one, of every restart its own: the one before may still be in use."""
    if not all(os.environ.get(name) for name in _TORCH):
        return None
    count, index, host, port = _TORCH
    number, source = _number(port), ", ".join(_TORCH)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        source = "torchrun"
        number = 1024 + (number - 1024 + 1 + _number("TORCHELASTIC_RESTART_COUNT", 0)) % (65536 - 1024)
    local = _number("LOCAL_RANK", -1)
    return Detected(
        source,
        join_address(os.environ[host], number),
        _number(count),
        _number(index),
        None if local < 0 else local,
        _number("LOCAL_WORLD_SIZE", _number(count)) < _number(count),
    )


def _from_skypilot() -> Detected | None:
    """A process on each node."""
    if not all(os.environ.get(name) for name in _SKYPILOT):
        return None
    count, index, ips = _SKYPILOT
    hosts = os.environ[ips].split()
    address = join_address(hosts[0], _number("JAX_COORDINATOR_PORT", _SKYPILOT_PORT))
    return Detected("SkyPilot", address, _number(count), _number(index), None, len(set(hosts)) > 1)


def _from_scheduler(address: str | None) -> Detected | None:
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
        return Detected(
            _NAMES.get(cluster, cluster.__name__),
            address or cluster.get_coordinator_address(_LOOKUP_SECS, os.environ.get("JAX_COORDINATOR_PORT")),
            cluster.get_process_count(),
            cluster.get_process_id(),
            cluster.get_local_process_id(),
            _number("SLURM_STEP_NUM_NODES", 1) > 1 if cluster is clusters.SlurmCluster else _mpi_has_several_hosts(),
        )
    return None


def _from_mpi() -> Detected | None:
    """Ranks without an address: Open MPI 5, MPICH, Intel MPI and others that are started as these are."""
    for rank, size, local_rank in _MPI:
        if rank in os.environ and size in os.environ:
            local = _number(local_rank, -1)
            ids = (_number(size), _number(rank), None if local < 0 else local)
            return Detected(f"MPI ({rank})", None, *ids, _mpi_has_several_hosts())
    return None


def _mpi_has_several_hosts() -> bool:
    return _number("OMPI_COMM_WORLD_LOCAL_SIZE", 1) < _number("OMPI_COMM_WORLD_SIZE", 1)


def _number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, str(default))
    if not text.lstrip("-").isdigit():
        raise ValueError(f"initialize_distributed: the environment variable {name} must be a number; got {text!r}.")
    return int(text)
