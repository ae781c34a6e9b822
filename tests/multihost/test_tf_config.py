"""The processes of a run, from TF_CONFIG, from a scheduler, or from the arguments."""

import json
import os
import re
import socket
import sys
import types

import pytest

from estimator.multihost._cluster import ClusterSpec, adopt_cluster, find_cluster
from estimator.multihost._coordination_client import Connection, clusters
from estimator.multihost._tf_config import Task, read_role, read_tf_config

CHIEF = {"chief": ["a:1"], "worker": ["b:2", "c:3"]}
WORKERS = {"worker": ["a:1", "b:2"]}


def config(cluster, kind, index):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.covers("3 TF_CONFIG")
@pytest.mark.parametrize(
    ("cluster", "kind", "index", "addresses", "process_id"),
    [
        (CHIEF, "chief", 0, ("a:1", "b:2", "c:3"), 0),
        (CHIEF, "worker", 0, ("a:1", "b:2", "c:3"), 1),
        (CHIEF, "worker", 1, ("a:1", "b:2", "c:3"), 2),
        ({"worker": ["b:2"], "master": ["a:1"]}, "worker", 0, ("a:1", "b:2"), 1),
        (WORKERS, "worker", 0, ("a:1", "b:2"), 0),
        (WORKERS, "worker", 1, ("a:1", "b:2"), 1),
        (WORKERS, "worker", "1", ("a:1", "b:2"), 1),
    ],
)
def test_the_chief_comes_first_then_the_workers(cluster, kind, index, addresses, process_id):
    assert read_tf_config(config(cluster, kind, index)) == Task(addresses, process_id)


def test_evaluators_are_not_among_the_processes():
    cluster = CHIEF | {"evaluator": ["d:4", "e:5"]}
    assert read_tf_config(config(cluster, "worker", 1)) == Task(("a:1", "b:2", "c:3"), 2)
    assert read_role(config(cluster, "worker", 1)) == "trainer"
    assert read_role(config(CHIEF, "worker", 1)) is None and read_role(None) is None
    for one in (cluster, CHIEF, {}):
        assert read_tf_config(config(one, "evaluator", 1)) is None
        assert read_role(config(one, "evaluator", 1)) == "evaluator"


@pytest.mark.covers("3 TF_CONFIG", "13 19 TF_CONFIG")
@pytest.mark.parametrize(
    "text", [None, "", "{}", '{"task": {"type": "worker", "index": 0}}', '{"task": {"index": "0"}}', '{"cluster": {}}']
)
def test_without_a_cluster_it_tells_of_no_others(text):
    assert read_tf_config(text) is None


@pytest.mark.covers("3 TF_CONFIG")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"TF_CONFIG must be JSON; got '{'"),
        ("[]", r'TF_CONFIG must be a JSON object with "cluster" and "task"; got'),
        ('{"cluster": ["a:1"]}', r"cluster and task must be JSON objects; got \['a:1'\]"),
        (config(CHIEF | {"ps": ["d:4"]}, "worker", 0), "'ps', which does not exist here. Leave the ps out, .*"),
        (config(CHIEF, "ps", 0), "the role 'ps', which does not exist here"),
        (config(CHIEF, "worker", 2), r'one of the cluster \(chief 0 to 0, worker 0 to 1\); got "task": .*"index": 2'),
        (config(CHIEF, "worker", "zero"), "must be one of the cluster"),
        (config({}, "chief", 0), 'without a cluster .* one process, .*; got "task": {"type": "chief", "index": 0}'),
        (config({}, "worker", 1), "without a cluster there is one process, .*: 1}. Write down the cluster, as in"),
        (config(CHIEF, "coordinator", 0), "must be one of the cluster"),
        (json.dumps({"cluster": CHIEF}), r'must be one of the cluster .*; got "task": {}'),
        (config({"gpu": ["d:4"]}, "worker", 0), "the roles of the cluster are chief, worker and evaluator; got 'gpu'"),
        (config({"worker": "a:1"}, "worker", 0), "worker must be a list of \"host:port\"; got 'a:1'"),
        (config({"worker": ["a"]}, "worker", 0), 'worker must be a list of "host:port"'),
        (config({"chief": ["a:1", "b:2"]}, "chief", 0), "there can be one chief"),
        (config({"chief": ["a:1"], "master": ["b:2"]}, "chief", 0), "there can be one chief"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(text, message):
    with pytest.raises(ValueError, match=message):
        read_tf_config(text)


@pytest.fixture
def environment(monkeypatch):
    """Sets variables of the environment, without this machine's own."""
    own = "TF_CONFIG JAX_COORD JAX_LOCAL JAX_NUM_P JAX_PROC SLURM_ OMPI_ PMI_ JOB_ KUBER NUM_P PROCESS_ COORD RANK "
    own += "WORLD_ MASTER_ LOCAL_ TORCHEL SKYPILOT_"
    for name in list(os.environ):
        if name.startswith(tuple(own.split())):
            monkeypatch.delenv(name)
    return lambda **variables: [monkeypatch.setenv(name, str(value)) for name, value in variables.items()]


AT_N = dict(JAX_COORDINATOR_ADDRESS="n:1")
LAUNCHED, LAUNCHED_BY = AT_N | dict(JAX_NUM_PROCESSES=4, JAX_PROCESS_ID=3), "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
INDEXED_JOB = AT_N | dict(JAX_NUM_PROCESSES=4, JOB_COMPLETION_INDEX=3)
SLURM = dict(SLURM_JOB_ID=4096, SLURM_STEP_NODELIST="node[007-010]", SLURM_NTASKS=8, SLURM_PROCID=5, SLURM_LOCALID=1)
OPEN_MPI = dict(OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_LOCAL_RANK=1)
ORTE = dict(OMPI_MCA_orte_hnp_uri="4096.0;tcp://10.0.0.1,10.1.0.1:34911")


def find(*arguments):
    return find_cluster(*(*arguments, None, None, None, None)[:4])


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"TF_CONFIG": config(CHIEF, "worker", 1)}, ClusterSpec("a:1", 3, 2, "TF_CONFIG")),
        ({"TF_CONFIG": config(CHIEF, "worker", 1), **SLURM}, ClusterSpec("a:1", 3, 2, "TF_CONFIG")),
        ({"TF_CONFIG": config(CHIEF, "evaluator", 0), **SLURM}, ClusterSpec(None, 1, 0, "TF_CONFIG, as an evaluator")),
        (LAUNCHED, ClusterSpec("n:1", 4, 3, LAUNCHED_BY)),
        (LAUNCHED | SLURM, ClusterSpec("n:1", 4, 3, LAUNCHED_BY)),
        (INDEXED_JOB, ClusterSpec("n:1", 4, 3, "JAX_NUM_PROCESSES and JOB_COMPLETION_INDEX")),
        (LAUNCHED | {"JAX_NUM_PROCESSES": 1, "JAX_PROCESS_ID": 0}, ClusterSpec(None, 1, 0, LAUNCHED_BY)),
        (SLURM, ClusterSpec("node007:61440", 8, 5, "SLURM", None, 1)),
        (SLURM | {"JAX_COORDINATOR_PORT": 1234}, ClusterSpec("node007:1234", 8, 5, "SLURM", None, 1)),
        (SLURM | AT_N, ClusterSpec("n:1", 8, 5, "SLURM", None, 1)),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, ClusterSpec("node007:61440", 8, 5, "SLURM", [2, 3], 1)),
        (SLURM | {"SLURM_NTASKS": 1, "SLURM_PROCID": 0}, ClusterSpec(None, 1, 0, "SLURM")),
        (OPEN_MPI | ORTE, ClusterSpec("10.0.0.1:61441", 4, 3, "Open MPI", None, 1)),
        (OPEN_MPI | AT_N, ClusterSpec("n:1", 4, 3, "MPI (OMPI_COMM_WORLD_RANK)", None, 1)),
        ({"PMI_RANK": 1, "PMI_SIZE": 2} | AT_N, ClusterSpec("n:1", 2, 1, "MPI (PMI_RANK)")),
        ({"PMI_RANK": 0, "PMI_SIZE": 1}, ClusterSpec(None, 1, 0, "MPI (PMI_RANK)")),
    ],
)
def test_a_job_is_read_from_the_environment(environment, variables, job):
    environment(**variables)
    assert find() == job


def test_an_indexed_job_of_kubernetes_is_detected_by_what_jax_asks_for(environment, monkeypatch):
    environment(KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX=2)
    spec = types.SimpleNamespace(parallelism=4)
    metadata = types.SimpleNamespace(name="job", labels={})
    pod = types.SimpleNamespace(spec=types.SimpleNamespace(subdomain="pods"))
    monkeypatch.setattr(clusters.K8sCluster, "is_env_present", lambda: True)
    monkeypatch.setattr(clusters.K8sCluster, "_controller", lambda: types.SimpleNamespace(kind="Job"))
    monkeypatch.setattr(clusters.K8sCluster, "_job", lambda: types.SimpleNamespace(spec=spec, metadata=metadata))
    monkeypatch.setattr(clusters.K8sCluster, "_pod", lambda: pod)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "10.0.0.2")
    assert find() == ClusterSpec("job-0.pods:55527", 4, 2, "Kubernetes")


def test_an_indexed_job_of_kubernetes_needs_no_package_where_the_rest_is_given(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    environment(KUBERNETES_SERVICE_HOST="10.0.0.1", JOB_COMPLETION_INDEX=2)
    assert find("job-0.pods:1234", 4) == ClusterSpec("job-0.pods:1234", 4, 2, "Kubernetes")
    with pytest.raises(ValueError, match="num_processes must be given in a job of Kubernetes.*pip install jax.k8s."):
        find("job-0.pods:1234")


def test_a_pod_that_is_not_of_an_indexed_job_is_alone(environment, monkeypatch):
    monkeypatch.setattr(clusters.K8sCluster, "is_env_present", lambda: pytest.fail("Kubernetes was called"))
    environment(KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert find()[:3] == (None, 1, 0)


def test_arguments_come_before_the_environment(environment):
    environment(TF_CONFIG=config(CHIEF, "worker", 1))
    assert find("n:9", 2, 1) == ClusterSpec("n:9", 2, 1, "the arguments")
    assert find("n:9") == ClusterSpec("n:9", 3, 2, "TF_CONFIG")
    assert find("n:9", 2, 1, [0])[4] == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("n:1", 2, 2), "process_id must be 0 to 1, as num_processes is 2; got 2."),
        (("n:1", 2, -1), "process_id must be an int of at least 0; got -1."),
        (("n:1", 0, 0), "num_processes must be an int of at least 1; got 0."),
        (("n:1", 2.0, 0), "num_processes must be an int of at least 1; got 2.0."),
        (("n:1", 2), "process_id must be given too; neither TF_CONFIG, SLURM, MPI nor Kubernetes"),
        (("n:1",), "num_processes and process_id must be given too"),
        ((None, 2, 1), "coordinator_address must be given too"),
        (("n", 2, 1), "coordinator_address must be \"host:port\"; got 'n'."),
        (("n:x", 2, 1), 'coordinator_address must be "host:port"'),
        (("n:70000", 2, 1), 'coordinator_address must be "host:port"'),
    ],
)
def test_arguments_that_make_no_sense_are_refused(environment, arguments, message):
    with pytest.raises(ValueError, match=message):
        find(*arguments)


TORCH = dict(WORLD_SIZE=4, RANK=3, MASTER_ADDR="n", MASTER_PORT=9, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
AGENT = TORCH | dict(TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=0)
JAX_JOB = dict(NUM_PROCESSES=4, PROCESS_ID=3, COORDINATOR_ADDRESS="n", COORDINATOR_PORT=9)
SKYPILOT = dict(SKYPILOT_NUM_NODES=4, SKYPILOT_NODE_RANK=3, SKYPILOT_NODE_IPS="n\nm\no\np")


@pytest.mark.parametrize(
    ("variables", "address", "source"),
    [
        (TORCH, "n:9", "WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT"),
        (TORCH | {"MASTER_ADDR": "fe80::1"}, "[fe80::1]:9", "WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT"),
        (AGENT | {"MASTER_PORT": 2000}, "n:2001", "torchrun"),
        (AGENT | {"MASTER_PORT": 2000, "TORCHELASTIC_RESTART_COUNT": 5}, "n:2006", "torchrun"),
        (AGENT | {"MASTER_PORT": 65535}, "n:1024", "torchrun"),
        (AGENT | SLURM | {"MASTER_PORT": 2000}, "n:2001", "torchrun"),
        (JAX_JOB, "n:9", "a JAXJob"),
        (SKYPILOT, "n:8476", "SkyPilot"),
        (SKYPILOT | {"JAX_COORDINATOR_PORT": 9}, "n:9", "SkyPilot"),
        (SKYPILOT | AGENT | {"MASTER_PORT": 2000}, "n:2001", "torchrun"),
        (LAUNCHED | {"JAX_COORDINATOR_ADDRESS": "n", "JAX_COORDINATOR_PORT": 9}, "n:9", LAUNCHED_BY),
    ],
)
def test_engines_are_known_by_their_variables(environment, variables, address, source):
    environment(**variables)
    assert find()[:4] == (address, 4, 3, source)


@pytest.mark.parametrize("variables", [TORCH, AGENT, JAX_JOB, SKYPILOT, LAUNCHED])
def test_one_process_of_an_engine_is_one(environment, variables):
    counts = {"WORLD_SIZE", "NUM_PROCESSES", "SKYPILOT_NUM_NODES", "JAX_NUM_PROCESSES"}
    indices = {"RANK", "PROCESS_ID", "SKYPILOT_NODE_RANK", "JAX_PROCESS_ID"}
    one = {name: 1 if name in counts else 0 if name in indices else value for name, value in variables.items()}
    environment(**one)
    assert find()[:3] == (None, 1, 0)


@pytest.mark.parametrize(
    ("variables", "lacking"),
    [
        ({"WORLD_SIZE": 2}, "RANK and no MASTER_ADDR and no MASTER_PORT"),
        ({"WORLD_SIZE": 2, "RANK": 1, "MASTER_PORT": 9}, "MASTER_ADDR"),
        ({"NUM_PROCESSES": 2, "PROCESS_ID": 1}, "COORDINATOR_ADDRESS and no COORDINATOR_PORT"),
        ({"SKYPILOT_NUM_NODES": 2, "SKYPILOT_NODE_RANK": 1}, "SKYPILOT_NODE_IPS"),
        ({"JAX_NUM_PROCESSES": 2}, "JAX_PROCESS_ID"),
    ],
)
def test_one_of_several_that_cannot_connect_is_refused(environment, variables, lacking):
    environment(**variables)
    count = next(iter(variables))
    message = (
        f"initialize_distributed: {count}=2 speaks of several processes, but there is no {lacking}, so that each of "
        "them would train alone. Set that, or give coordinator_address, num_processes and process_id; for one process, "
        f"give num_processes=1, or unset {count}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        find()
    assert find(None, 1)[:3] == (None, 1, 0)
    assert find("n:1", 2, 1)[:4] == ("n:1", 2, 1, "the arguments")


def test_a_number_of_processes_alone_may_be_for_something_else(environment):
    environment(NUM_PROCESSES=8)
    assert find()[:3] == (None, 1, 0)


def test_ranks_without_an_address_are_refused(environment):
    environment(**OPEN_MPI)
    with pytest.raises(ValueError, match=r"MPI \(OMPI_COMM_WORLD_RANK\) does not say where process 0 is. Give coord"):
        find()


def test_a_number_that_is_none_is_refused(environment):
    environment(PMI_RANK="x", PMI_SIZE=2)
    with pytest.raises(ValueError, match="PMI_RANK must be a number; got 'x'"):
        find("n:1")


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1"])
@pytest.mark.parametrize(
    "variables",
    [
        SLURM | {"SLURM_STEP_NUM_NODES": 4},
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": 2},
        {"TF_CONFIG": config(CHIEF, "worker", 1)},
    ],
)
def test_a_loopback_address_is_refused_where_the_environment_names_several_hosts(environment, variables, address):
    environment(**variables)
    with pytest.raises(ValueError, match="is a loopback address, which every host has for itself, but .* names sev"):
        find(address)


def test_a_loopback_address_is_taken_for_one_host(environment):
    environment(TF_CONFIG=config({"worker": ["localhost:1", "127.0.0.1:2"]}, "worker", 1))
    assert find() == ClusterSpec("localhost:1", 2, 1, "TF_CONFIG")
    environment(**SLURM, TF_CONFIG="", SLURM_STEP_NUM_NODES=1)
    assert find("localhost:1") == ClusterSpec("localhost:1", 8, 5, "SLURM", None, 1)


CONNECTED = Connection("n:1", 2, 1)


@pytest.mark.parametrize(
    "arguments", [(None, None, None, None), ("n:1", 2, 1, None), ("other-name:1", None, None, [3])]
)
def test_arguments_that_agree_with_what_jax_has_connected_are_accepted(arguments):
    cluster = adopt_cluster(CONNECTED, *arguments)
    assert cluster[:3] == ("n:1", 2, 1) and cluster.local_device_ids == arguments[3]


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (("n:2", 2, 1), "coordinator_address='n:2'"),
        (("n:1", 3, 1), "num_processes=3"),
        ((None, None, 0), "process_id=0"),
    ],
)
def test_arguments_that_say_something_else_than_jax_are_refused(arguments, got):
    message = (
        f"jax is connected already, as process 1 of 2 at 'n:1'; got {got}. Leave the arguments out, or let nothing"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        adopt_cluster(CONNECTED, *arguments, None)
