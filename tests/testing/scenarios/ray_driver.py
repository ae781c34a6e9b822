"""Drives trainings in workers of Ray, on a cluster that it starts on this host: `ray_driver.py <folder>`.

It reads names of work, one a line, and writes what came of each into <folder>/<name>.json.
"""

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train.v2.jax import JaxTrainer

CONFIG = {"keep_checkpoint_max": 2, "save_summary_steps": None, "resume_input": "count"}


def make(model_dir, save=10):
    """The Estimator; what uses jax is imported in workers alone."""
    import estimator as est
    from replicate import replicate_model_fn
    from testing.scenarios.launched_training import model_fn

    config = est.RunConfig(save_checkpoints_steps=save, **CONFIG)
    return est.Estimator(replicate_model_fn(model_fn), model_dir, config)


def input_fn():
    """Batches of 16 rows, the same whatever the number of processes."""
    import estimator as est

    context, random = est.input_context(), np.random.default_rng(0)
    size = context.per_process_batch_size(16)
    while True:
        features = random.normal(size=(16, 8)).astype(np.float32)[context.index * size :][:size]
        yield features, features.sum(1, keepdims=True)


def fingerprint(estimator):
    values = estimator.get_variable_value("*")
    return hashlib.sha256(
        b"".join(name.encode() + np.asarray(values[name]).tobytes() for name in sorted(values))
    ).hexdigest()


def worker(config):
    """Trains in one of the workers; at the steps of `accidents`, one in each attempt, something happens to one."""
    import jax

    devices = 2 // ray.train.get_context().get_world_size()
    jax.config.update("jax_num_cpu_devices", devices)
    import estimator as est
    from replicate.ray import PreemptionHook, ReportHook, initialize
    from testing import compiled

    compiled.use_folder()
    initialize(timeout_secs=60)
    rank, folder = jax.process_index(), pathlib.Path(config["folder"])
    attempt = len(list(folder.glob(f"attempt-{rank}-*")))
    estimator = make(config["model_dir"], save=config.get("save", 10))
    begins = os.path.basename(estimator.latest_checkpoint() or "")
    (folder / f"attempt-{rank}-{attempt}").write_text(begins)
    accidents = config.get("accidents", [])

    class Accident(est.Hook):
        def next_step(self, step):
            return step + 1

        def after_run(self, context, values):
            if attempt < len(accidents):
                kind, whom, step = accidents[attempt]
                if context.global_step == step and rank == whom:
                    if kind == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    asks = threading.Thread(target=est.request_stop)
                    asks.start()
                    asks.join()
            if attempt == 0 and config.get("is_preempted"):  # in the half of its steps that is left the notice comes
                (folder / "trains").touch()
                time.sleep(1)
                while context.global_step > config["max_steps"] - 25 and not (folder / "drained").exists():
                    time.sleep(0.1)

    hooks = [Accident(), ReportHook(every_steps=20), PreemptionHook(every_steps=5)]
    (folder / "node").write_text(ray.get_runtime_context().get_node_id())
    estimator.train(input_fn, hooks=hooks, max_steps=config["max_steps"])
    begun = [(folder / f"attempt-{rank}-{i}").read_text() for i in range(attempt + 1)]
    said = {"sha": fingerprint(estimator), "processes": jax.process_count(), "from": begun}
    try:
        est.Estimator(lambda features, mode: None, "runs/digits")
    except ValueError as error:
        said["relative"] = str(error)
    return said


def fit(folder, workers=2, **config):
    """Trains by a JaxTrainer the model of all trainings; returns what worker 0 does."""
    config = {"folder": str(folder), "model_dir": str(folder.parent / "model"), **config}
    folder.mkdir(exist_ok=True)
    result = JaxTrainer(
        worker,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name=f"{folder.name}-{time.monotonic_ns()}",
            storage_path=str(folder.parent / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=3, max_preemption_failures=3),
        ),
    ).fit()
    return result.return_value


def drain(cluster, node):
    """Gives the notice that a cloud gives before it takes a node away."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
    reason = ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run([*command, *reason, "--deadline-remaining-seconds", "60"], check=True, capture_output=True)


def preempt(folder, cluster, nodes, **config):
    """A training whose node is taken away, in favor of another one. Its config saves at the end alone; it is slow at
    first, since the notice takes seconds to come, and waits for it to be given."""
    nodes = {node.node_id: node for node in [*nodes, cluster.add_node(num_cpus=2)]}

    def saved():
        return {path.name for path in (folder.parent / "model").glob("ckpt-*[05]")}

    def take_away():
        while not (folder / "trains").exists():
            time.sleep(0.1)
        node, before = nodes[(folder / "node").read_text()], saved()
        drain(cluster, node)
        (folder / "drained").touch()
        while saved() == before:
            time.sleep(0.1)
        cluster.remove_node(node)

    thread = threading.Thread(target=take_away, daemon=True)
    thread.start()
    result = fit(folder, is_preempted=True, save=1000, **config)
    thread.join(30)
    return result


def main(folder):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}, connect=True)
    node = cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, ignore_reinit_error=True)
    accidents = [("kill", 1, 25), ("kill", 0, 37), ("stop", 1, 45)]
    work = {
        "killed": lambda: fit(folder / "killed", max_steps=50, accidents=accidents),
        "alone": lambda: fit(folder / "alone", workers=1, max_steps=60),
        "preempted": lambda: preempt(folder / "preempted", cluster, [node], max_steps=110),
    }
    for name in map(str.strip, sys.stdin):
        (folder / "result").write_text(json.dumps(work[name]()))
        os.rename(folder / "result", folder / f"{name}.json")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
