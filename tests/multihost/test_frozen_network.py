"""Two processes in network namespaces of their own, between which packets are dropped."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest
from testing.signals import wait_until

TESTS = pathlib.Path(__file__).parents[1]
HOSTS = {"10.9.7.1": "estimator-a", "10.9.7.2": "estimator-b"}
SCRIPT = """
import json, os, socket, sys
import jax
jax.config.update("jax_platforms", "cpu")
socket.sethostname(sys.argv[2])
cluster = {"worker": ["10.9.7.1:1234", "10.9.7.2:1234"]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": int(sys.argv[1])}})
from testing.scenarios.distributed import work
work(-1, "", 1.0, 3.0)
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_make_namespaces():
    command = ["unshare", "--net", "--uts", "--mount", "true"]
    return (
        shutil.which("ip") and shutil.which("unshare") and not subprocess.run(command, capture_output=True).returncode
    )


@pytest.fixture
def hosts(tmp_path):
    """The names of two namespaces that are connected, each with a host's name and address."""
    names = list(HOSTS.values())
    folders = [pathlib.Path("/etc/netns") / name for name in names]
    if not can_make_namespaces():
        pytest.skip("network namespaces need Linux, iproute2, and the rights to make them")
    try:
        for name, folder in zip(names, folders, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            lines = [f"{address} {host}" for address, host in HOSTS.items()]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # of a test that was killed
            ip("netns", "add", name)
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for address, name in HOSTS.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            for device in ("veth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name, folder in zip(names, folders, strict=True):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            (folder / "hosts").unlink(missing_ok=True)


def test_a_network_that_drops_all_packets_ends_both_sides(hosts, tmp_path):
    logs = [tmp_path / name for name in hosts]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    processes = []
    for index, (name, log) in enumerate(zip(hosts, logs, strict=True)):
        command = ["ip", "netns", "exec", name, "unshare", "--uts", sys.executable, "-c", SCRIPT, str(index), name]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
    wait_until(lambda: all("working" in log.read_text() for log in logs), lambda: [log.read_text() for log in logs])
    ip("-n", hosts[0], "link", "set", "veth0", "down")
    codes = [process.wait(timeout=60) for process in processes]
    assert codes == [76, -signal.SIGABRT], [log.read_text() for log in logs]  # process 0, and the other by jax
    lost = (
        r"initialize_distributed: process 1 \(host estimator-b, pid \d+\) has died, or its host has: nothing was heard"
    )
    assert re.search(lost, logs[0].read_text())
