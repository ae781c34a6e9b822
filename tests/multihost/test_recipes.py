"""The recipes of docs/many_hosts.md: what schedulers set, as far as one machine can be several hosts."""

import random

import pytest
from testing.cluster import free_port, shared_cluster


def slurm(port):
    """jax chooses the port by the number of the job."""
    del port
    return {
        "SLURM_JOB_ID": str(random.randrange(4000)),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "{index}",
        "SLURM_LOCALID": "{index}",
    }


def mpi(port):
    return {"PMI_RANK": "{index}", "PMI_SIZE": "2", "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}


def indexed_job(port):
    return {"JOB_COMPLETION_INDEX": "{index}", "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}


def launched(port):
    numbers = {"JAX_PROCESS_ID": "{index}", "JAX_NUM_PROCESSES": "2"}
    return numbers | {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}


@pytest.mark.parametrize(
    ("environment", "arguments", "source"),
    [
        (slurm, {}, "SLURM"),
        (mpi, {}, "MPI (PMI_RANK)"),
        (indexed_job, {"num_processes": 2}, "Kubernetes"),
        (launched, {}, "replicate.launch"),
    ],
)
def test_processes_join_as_their_scheduler_has_started_them(environment, arguments, source):
    ended = shared_cluster().run("testing.scenarios.distributed.recipe", environment(free_port()), arguments)
    for index, process in enumerate(ended):
        assert process.code == 0, process.lines
        assert f"process {index} of 2 sum 8.0" in process.lines
    assert any(f"initialize_distributed: 2 processes ({source})." in line for line in ended[0].lines)
