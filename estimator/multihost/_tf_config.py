"""The processes of a run as TensorFlow writes them down: the JSON of the environment variable TF_CONFIG."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_CHIEFS = ("chief", "master")
_NO_PS = (
    "TF_CONFIG has the role 'ps', which does not exist here. Leave the ps out, they have no part here: variables live "
    "on the devices of the workers, where `variable_distribution` of replicate_model_fn says."
)
TRAINER, EVALUATOR = "trainer", "evaluator"


class Task(NamedTuple):
    """A process among others."""

    addresses: tuple[str, ...]  # "host:port" by process id; process 0 is the coordinator
    process_id: int


def read_tf_config(text: str | None) -> Task | None:
    """Reads the processes of the cluster, and the place of this one.

    The chief comes first, then the workers; without a chief worker 0 is first. Evaluators are not among them.

    >>> read_tf_config('{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}')
    Task(addresses=('a:1', 'b:1'), process_id=1)

    Args:
      text: the value of TF_CONFIG.

    Returns:
      None if it does not name several processes: it is missing, has no cluster, or is the evaluator's.
    """
    cluster, task = _read_parts(text)
    kind, index = task.get("type"), _to_number(task.get("index"))
    if kind == EVALUATOR:
        return None
    if "ps" in cluster or kind == "ps":
        raise ValueError(_NO_PS)
    if not cluster:
        if kind not in (None, "worker") or index not in (None, 0):
            raise ValueError(
                'TF_CONFIG: without a cluster there is one process, {"type": "worker", "index": 0}; got "task": '
                f'{json.dumps(task)}. Write down the cluster, as in "cluster": {{"worker": ["host:port", ...]}}.'
            )
        return None
    addresses = _read_addresses(cluster)
    if kind not in addresses or not isinstance(index, int) or not 0 <= index < len(addresses[kind]):
        there = ", ".join(f"{role} 0 to {len(hosts) - 1}" for role, hosts in addresses.items())
        raise ValueError(f'TF_CONFIG: the task must be one of the cluster ({there}); got "task": {json.dumps(task)}.')
    before = sum(len(hosts) for role, hosts in addresses.items() if role in _CHIEFS and role != kind)
    return Task(tuple(address for hosts in addresses.values() for address in hosts), before + index)


def read_role(text: str | None) -> str | None:
    """Reads the role that TF_CONFIG gives this process in `train_and_evaluate`.

    >>> read_role('{"task": {"type": "evaluator", "index": 0}}')
    'evaluator'

    Returns:
      "evaluator"; "trainer" where the cluster has an evaluator, and this process is another one; None if it has
      none, as far as it says.

    Raises:
      ValueError: it is not such JSON.
    """
    cluster, task = _read_parts(text)
    if task.get("type") == EVALUATOR:
        return EVALUATOR
    return TRAINER if EVALUATOR in cluster else None


def _read_parts(text: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the cluster and the task, which may be empty."""
    config = _parse(text)
    cluster, task = config.get("cluster") or {}, config.get("task") or {}
    for part in (cluster, task):
        if not isinstance(part, dict):
            raise ValueError(f"TF_CONFIG: cluster and task must be JSON objects; got {part!r}.")
    return cluster, task


def _to_number(index: Any) -> Any:
    # As in TensorFlow, the index of a task may be a string.
    return int(index) if isinstance(index, str) and index.isdecimal() else index


def _parse(text: str | None) -> dict[str, Any]:
    try:
        config = json.loads(text or "{}")
    except json.JSONDecodeError as e:
        raise ValueError(f"TF_CONFIG must be JSON; got {text!r} ({e}).") from e
    if not isinstance(config, dict):
        raise ValueError(f'TF_CONFIG must be a JSON object with "cluster" and "task"; got {text!r}.')
    return config


def _read_addresses(cluster: dict[str, Any]) -> dict[str, list[str]]:
    """Reads the addresses by role, the chief's first."""
    for role, hosts in cluster.items():
        if role not in (*_CHIEFS, "worker", EVALUATOR):
            raise ValueError(f"TF_CONFIG: the roles of the cluster are chief, worker and evaluator; got {role!r}.")
        if not isinstance(hosts, list) or not hosts or not all(isinstance(x, str) and ":" in x for x in hosts):
            raise ValueError(f'TF_CONFIG: {role} must be a list of "host:port"; got {hosts!r}.')
    if sum(len(cluster.get(role, ())) for role in _CHIEFS) > 1:
        raise ValueError(f"TF_CONFIG: there can be one chief; got {json.dumps(cluster)}.")
    return {role: cluster[role] for role in (*_CHIEFS, "worker") if role in cluster}
