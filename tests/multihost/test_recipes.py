"""The recipes of docs/many_hosts.md: what schedulers set, as far as one machine can be several hosts."""

import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from testing.cluster import free_port, shared_cluster
from testing.estimators import saved_at

from estimator.multihost._cluster import is_literally_loopback

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


needs_torchrun = pytest.mark.skipif(TORCHRUN is None, reason="needs torchrun, of the package torch")


def start_torchrun(folder, *options):
    """A training of two processes."""
    folder.mkdir(exist_ok=True)
    script = ROOT / "tests" / "testing" / "scenarios" / "launched_training.py"
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.Popen(
        [TORCHRUN, *options, script, folder, "150"], stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )


def finish(torchrun, folder, code=0):
    (folder / "enough").touch()
    _, err = torchrun.communicate(timeout=120)
    assert torchrun.returncode == code, err
    return (folder / "result").read_text() if not code else err


def pids(folder):
    return {int(file.read_text()) for file in folder.glob("started-?")}


def has_new_processes(folder, seen):
    new = pids(folder)
    return len(new) == 2 and not new & seen and [*folder.glob("model/ckpt-*0")]


def address_of_this_host():
    """The address by which other hosts would reach this one; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:  # no network
            return "127.0.0.1"
        return probe.getsockname()[0]


def wait_until(torchrun, is_so, *args):
    deadline = time.monotonic() + 120
    while not is_so(*args):
        assert torchrun.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The result of a training that nothing disturbs."""
    folder = tmp_path_factory.mktemp("torchrun") / "whole"
    return finish(start_torchrun(folder, "--nproc-per-node=2"), folder)


@pytest.mark.slow
@needs_torchrun
def test_torchrun_starts_a_training_again_whose_processes_are_killed(tmp_path, whole):
    folder, seen = tmp_path / "killed", set()
    killed = start_torchrun(folder, "--nproc-per-node=2", "--max-restarts=3")
    for rank in (1, 0):
        wait_until(killed, has_new_processes, folder, seen)
        seen |= pids(folder)
        os.kill(int((folder / f"started-{rank}").read_text()), signal.SIGKILL)
    assert finish(killed, folder) == whole


@pytest.mark.slow
@needs_torchrun
def test_torchrun_saves_at_sigterm_answers_1_and_another_number_of_nodes_resumes(tmp_path, whole):
    address = address_of_this_host()
    if is_literally_loopback(address):
        pytest.skip("two nodes need an address of this host other than the loopback one")
    folder = tmp_path / "terminated"
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{free_port()}", f"--local-addr={address}")
    nodes = [
        start_torchrun(folder, "--nnodes=2", "--nproc-per-node=1", *rendezvous, f"--rdzv-conf=is_host={is_host}")
        for is_host in (1, 0)
    ]
    wait_until(nodes[0], lambda: saved_at(folder / "model")[-1:] > [10])
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    for node in nodes:
        assert "got signal: 15" in finish(node, folder, code=1)
    assert all((folder / f"preempted-{rank}").exists() for rank in range(2))
    assert 20 <= saved_at(folder / "model")[-1] < 150
    assert finish(start_torchrun(folder, "--nnodes=1", "--nproc-per-node=2"), folder) == whole


@pytest.mark.slow
@needs_torchrun
def test_torchrun_answers_1_where_a_process_fails(tmp_path):
    (tmp_path / "model").touch()  # a file, where the model_dir has to be
    assert "NotADirectoryError" in finish(start_torchrun(tmp_path, "--nproc-per-node=2"), tmp_path, code=1)
