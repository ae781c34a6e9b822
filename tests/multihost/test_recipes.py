"""The recipes of docs/many_hosts.md: what schedulers set, as far as one machine can be several hosts."""

import os
import random
import shutil
import signal
import socket
import sys

import pytest
from testing.cluster import free_port, shared_cluster
from testing.engines.launched import Launched, training, whole
from testing.estimators import saved_at

from estimator.multihost._cluster import is_literally_loopback

TORCHRUN = shutil.which("torchrun", path=os.path.dirname(sys.executable))


def numbers(index, count):
    return {index: "{index}", count: "2"}


SLURM = numbers("SLURM_PROCID", "SLURM_NTASKS") | {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}
SLURM |= {"SLURM_JOB_ID": str(random.randrange(4000)), "SLURM_LOCALID": "{index}"}  # jax chooses the port by the job
ADDRESS, PORT = {"JAX_COORDINATOR_ADDRESS": "localhost:{port}"}, {"JAX_COORDINATOR_PORT": "{port}"}
JAX = numbers("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
PYTORCH_JOB = KUBERNETES | numbers("RANK", "WORLD_SIZE") | {"MASTER_ADDR": "localhost", "MASTER_PORT": "{port}"}
# Its agent has the port, and has restarted the processes once; SLURM has started the agent.
AGENT = SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"} | PYTORCH_JOB
AGENT |= numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE") | {"TORCHELASTIC_RESTART_COUNT": "1"}
RECIPES = {  # as the log names them, or the variables that do: what is set; `test_tf_config.py` has the others
    "SLURM": SLURM,
    "MPI (PMI_RANK)": numbers("PMI_RANK", "PMI_SIZE") | ADDRESS,
    "Kubernetes": {"JOB_COMPLETION_INDEX": "{index}"} | ADDRESS,
    "JAX_NUM_PROCESSES and JAX_PROCESS_ID": JAX | {"JAX_COORDINATOR_ADDRESS": "localhost"} | PORT,
    "torchrun": AGENT | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
}


@pytest.mark.parametrize("source", RECIPES)
def test_processes_join_as_their_scheduler_has_started_them(source):
    # The agent of torchrun has the port in the variable; the processes take the second one after it.
    port = free_port() - 2 * (source == "torchrun")
    environment = {name: value.replace("{port}", str(port)) for name, value in RECIPES[source].items()}
    arguments = {"num_processes": 2} if source == "Kubernetes" else {}
    ended = shared_cluster().run("testing.scenarios.distributed.recipe", environment, arguments)
    for index, process in enumerate(ended):
        assert process.code == 0, process.lines
        assert f"process {index} of 2 sum 8.0" in process.lines
    assert any(f"initialize_distributed: 2 processes ({source})." in line for line in ended[0].lines)


@pytest.mark.parametrize(("recoverable", "starts_devices"), [(False, True), (True, False)])
def test_processes_that_jax_has_connected_already_are_adopted(recoverable, starts_devices):
    arguments = [f"localhost:{free_port()}", recoverable, starts_devices]
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
    return Launched(folder, [TORCHRUN, *options, *training(folder)])


def address_of_this_host():
    """The address by which other hosts would reach this one; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:  # no network
            return "127.0.0.1"
        return probe.getsockname()[0]


@pytest.mark.slow
@needs_torchrun
def test_torchrun_starts_a_training_again_whose_processes_are_killed(tmp_path):
    launched = start_torchrun(tmp_path, "--nproc-per-node=2", "--max-restarts=3")
    for rank in (1, 0):
        pids = launched.new_processes()
        launched.wait_for_steps(0)
        os.kill(pids[rank], signal.SIGKILL)
    launched.finish()
    assert launched.result == whole()


@pytest.mark.slow
@needs_torchrun
def test_torchrun_saves_at_sigterm_answers_1_and_another_number_of_nodes_resumes(tmp_path):
    address = address_of_this_host()
    if is_literally_loopback(address):
        pytest.skip("two nodes need an address of this host other than the loopback one")
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{free_port()}", f"--local-addr={address}")
    options = "--nnodes=2", "--nproc-per-node=1", *rendezvous
    nodes = [start_torchrun(tmp_path, *options, f"--rdzv-conf=is_host={is_host}") for is_host in (1, 0)]
    nodes[0].wait_for_steps(10)
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    for node in nodes:
        node.finish(code=1)
        assert "got signal: 15" in node.out
    assert all((tmp_path / f"preempted-{rank}").exists() for rank in range(2))
    assert 20 <= saved_at(tmp_path / "model")[-1] < 150
    resumed = start_torchrun(tmp_path, "--nnodes=1", "--nproc-per-node=2")
    resumed.finish()
    assert resumed.result == whole()


@pytest.mark.slow
@needs_torchrun
def test_torchrun_answers_1_where_a_process_fails(tmp_path):
    (tmp_path / "model").touch()  # a file, where the model_dir has to be
    launched = start_torchrun(tmp_path, "--nproc-per-node=2")
    launched.finish(code=1)
    assert "NotADirectoryError" in launched.out
