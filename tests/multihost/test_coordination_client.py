"""What this library uses of jax that has no public name, on whichever jax is installed."""

import atexit
import inspect
import pathlib
import re
import threading

import jax
import pytest

import estimator
import replicate
from estimator.multihost import _coordination_client
from estimator.multihost._supervisor import Supervisor

PRIVATE = re.compile(r"^\s*(from|import) (jax\._src|jaxlib)", re.MULTILINE)
FOLDERS = [pathlib.Path(package.__file__).parent for package in (estimator, replicate)]


def test_one_file_alone_imports_private_parts_of_jax():
    files = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    private = [path.name for path in files if PRIVATE.search(path.read_text())]
    assert len(files) > 100 and private == ["_coordination_client.py"]


def test_nobody_is_connected_without_a_call():
    assert _coordination_client.coordination_client() is None


def test_devices_are_known_to_be_started():
    import jax

    jax.devices()
    assert _coordination_client.devices_are_started()


METHODS = {
    "key_value_set": "key value allow_overwrite",
    "blocking_key_value_get": "key timeout_in_ms",
    "key_value_dir_get": "key",
    "key_value_delete": "key",
    "wait_at_barrier": "barrier_id timeout_in_ms",
    "get_live_nodes": "process_ids",
}


@pytest.mark.parametrize("name", METHODS)
def test_the_client_has_the_methods_that_are_used(name):
    from jax._src.lib import _jax

    text = getattr(_jax.DistributedRuntimeClient, name).__doc__ or ""
    assert all(argument in text for argument in METHODS[name].split()), text


def test_clusters_are_detected_by_the_methods_that_are_used():
    clusters = _coordination_client.clusters
    assert {clusters.OmpiCluster, clusters.SlurmCluster, clusters.K8sCluster} <= set(clusters.ClusterEnv._cluster_types)
    for kind in clusters.ClusterEnv._cluster_types:
        assert isinstance(kind.opt_in_only_method, bool)
        assert callable(kind.is_env_present) and callable(kind.get_local_process_id)
        assert callable(kind.get_process_count) and callable(kind.get_process_id)
        assert list(inspect.signature(kind.get_coordinator_address).parameters) == [
            "timeout_secs",
            "override_coordinator_port",
        ]


def test_a_shutdown_between_two_requests_ends_the_thread_that_waits_for_news(monkeypatch):
    class Client:
        def blocking_key_value_get(self, key, _timeout_ms):
            if clients:  # jax forgets the client at the first news
                clients.clear()
                return ""
            raise jax.errors.JaxRuntimeError("CANCELLED")

    clients, failures = [Client()], []
    monkeypatch.setattr(_coordination_client, "coordination_client", lambda: clients[0] if clients else None)
    monkeypatch.setattr(threading, "excepthook", failures.append)
    supervisor = Supervisor()
    supervisor.listen()
    assert supervisor.wait_for(lambda: not supervisor._requests, 60)
    atexit.unregister(supervisor._close)
    assert supervisor.news == 1 and not failures
