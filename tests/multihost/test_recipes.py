"""The recipes of docs/many_hosts.md: what schedulers set, as far as one machine can be several hosts."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from testing.cluster import free_port, shared_cluster

ROOT = pathlib.Path(__file__).parents[2]
TORCHRUN = shutil.which("torchrun", path=os.path.dirname(sys.executable))


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


def job_set(port):
    return indexed_job(port) | {"JAX_NUM_PROCESSES": "2"}


def launched(port):
    numbers = {"JAX_PROCESS_ID": "{index}", "JAX_NUM_PROCESSES": "2"}
    return numbers | {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}


def kubeflow_trainer(port):
    return launched(port) | {"JAX_COORDINATOR_ADDRESS": "localhost", "JAX_COORDINATOR_PORT": str(port)}


def jax_job(port):
    numbers = {"PROCESS_ID": "{index}", "NUM_PROCESSES": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    return numbers | {"COORDINATOR_ADDRESS": "localhost", "COORDINATOR_PORT": str(port)}


def pytorch_job(port):
    numbers = {"RANK": "{index}", "WORLD_SIZE": "2"}
    return numbers | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def torchrun(port):
    """Its agent has the port, and has restarted the processes once; SLURM has started the agent."""
    variables = slurm(port) | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"} | pytorch_job(port - 2)
    numbers = {"LOCAL_RANK": "{index}", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    return variables | numbers | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def skypilot(port):
    numbers = {"SKYPILOT_NODE_RANK": "{index}", "SKYPILOT_NUM_NODES": "2", "JAX_COORDINATOR_PORT": str(port)}
    return numbers | {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "arguments", "source"),
    [
        (slurm, {}, "SLURM"),
        (mpi, {}, "MPI (PMI_RANK)"),
        (indexed_job, {"num_processes": 2}, "Kubernetes"),
        (job_set, {}, "JAX_NUM_PROCESSES and JOB_COMPLETION_INDEX"),
        (launched, {}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        (kubeflow_trainer, {}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        (jax_job, {}, "a JAXJob"),
        (pytorch_job, {}, "WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT"),
        (torchrun, {}, "torchrun"),
        (skypilot, {}, "SkyPilot"),
    ],
)
def test_processes_join_as_their_scheduler_has_started_them(environment, arguments, source):
    ended = shared_cluster().run("testing.scenarios.distributed.recipe", environment(free_port()), arguments)
    for index, process in enumerate(ended):
        assert process.code == 0, process.lines
        assert f"process {index} of 2 sum 8.0" in process.lines
    assert any(f"initialize_distributed: 2 processes ({source})." in line for line in ended[0].lines)


@pytest.mark.parametrize("devices", ["started", "not started"])
@pytest.mark.parametrize("recoverable", [False, True])
def test_processes_that_jax_has_connected_already_are_adopted(devices, recoverable):
    arguments = [f"localhost:{free_port()}", recoverable, devices == "started"]
    ended = shared_cluster().run("testing.scenarios.distributed.adopt", *arguments)
    for index, process in enumerate(ended):
        assert process.code == 0, process.lines
        assert f"process {index} of 2 sum 8.0 watched {recoverable}" in process.lines
        (error,) = (line for line in process.lines if "ValueError" in line)
        assert (
            f"initialize_distributed: jax is connected already, as process {index} of 2 at 'localhost:" in error
            and "got num_processes=3. Leave the arguments out, or let nothing else call" in error
        )
        assert any("RuntimeError: initialize_distributed was called before" in line for line in process.lines)
    source = "jax.distributed.initialize, which was called before"
    assert any(f"initialize_distributed: 2 processes ({source})." in line for line in ended[0].lines)


@pytest.mark.slow
@pytest.mark.skipif(TORCHRUN is None, reason="needs torchrun, of the package torch")
def test_torchrun_starts_a_training_again_whose_processes_are_killed(tmp_path):
    def start(name):
        (tmp_path / name).mkdir()
        script = ROOT / "tests" / "testing" / "scenarios" / "launched_training.py"
        environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        return subprocess.Popen(
            [TORCHRUN, "--nproc-per-node=2", "--max-restarts=3", script, tmp_path / name, "150"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    whole, killed = start("whole"), start("killed")
    (tmp_path / "whole" / "enough").touch()
    _, err = whole.communicate(timeout=120)
    assert whole.returncode == 0, err
    seen = set()
    for rank in (1, 0):
        pids = set()
        while len(pids) < 2 or pids & seen or not list((tmp_path / "killed").glob("model/ckpt-*0")):
            time.sleep(0.1)
            pids = {int(file.read_text()) for file in (tmp_path / "killed").glob("started-?")}
            assert killed.poll() is None
        seen |= pids
        os.kill(int((tmp_path / "killed" / f"started-{rank}").read_text()), signal.SIGKILL)
    (tmp_path / "killed" / "enough").touch()
    _, err = killed.communicate(timeout=120)
    assert killed.returncode == 0, err
    assert (tmp_path / "killed" / "result").read_text() == (tmp_path / "whole" / "result").read_text()
