"""Training in the workers of Ray Train and the trials of Ray Tune: connects the workers, reports, and saves in time.

Each function and hook here is for the function that Ray calls in a worker; the driver needs none of it.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

import jax
import numpy as np

import estimator as est
from estimator.replication import initialize_distributed

__all__ = ["PreemptionHook", "ReportHook", "initialize"]


def initialize(**kwargs: Any) -> None:
    """Makes one run of the workers of a Ray Train trainer, as `replicate.initialize_distributed` does.

    Call it at the start of the function that the trainer calls, before anything else uses jax. Worker 0 chooses a free
    port of its node, and Ray brings the address to the others. If Ray's JaxTrainer has already connected jax, as it
    does for GPUs and TPUs, the workers are the processes. Then a worker that dies is noticed by Ray, which ends the
    others, and starts all again as its `FailureConfig` says; training resumes from the last checkpoint.

    >>> def train(config):
    ...     initialize()
    ...     estimator = est.Estimator(config["model_fn"], config["model_dir"])
    ...     estimator.train(config["input_fn"], hooks=[ReportHook(every_steps=100)], max_steps=1000)

    Args:
      **kwargs: for `initialize_distributed`: `timeout_secs`, `heartbeat_timeout_secs`, `grace_secs`,
        `local_device_ids`.

    Raises:
      ImportError: Ray is not installed.
      RuntimeError: this is not a worker of Ray Train. And what `initialize_distributed` raises.
    """
    context = _import("ray.train").get_context()
    size, rank = context.get_world_size(), context.get_world_rank()
    if jax.distributed.is_initialized():
        initialize_distributed(**kwargs)
        return
    address = _find_address() if rank == 0 else None
    address = _import("ray.train.collective").broadcast_from_rank_zero(address)
    initialize_distributed(address, size, rank, **kwargs)


class ReportHook(est.Hook):
    """Reports to Ray Train or Ray Tune: "step", "loss" (of the step), and the metrics of the newest evaluation.

    The report goes to `ray.tune.report` in a trial of Tune, otherwise to `ray.train.report`, in all workers at the same
    steps; worker 0's count. The state at the end of training is reported too. A scheduler of Tune ends a trial
    by a SystemExit out of the report: its last checkpoint is the one that the config has saved.

    >>> hook = ReportHook(every_steps=100)

    Args:
      every_steps: report at the multiples of this number of global steps.
      eval_dir: `estimator.eval_dir(name)`: reports the metrics that were last recorded there, as "eval/accuracy" and so
        on. If None, there are no metrics.

    Raises:
      ValueError: `every_steps` is not positive.
      ImportError: at the beginning of the run: Ray is not installed.
    """

    def __init__(self, every_steps: int, eval_dir: str | None = None) -> None:
        self._every_steps = _check_steps("ReportHook", every_steps)
        self._eval_dir = eval_dir

    def begin(self) -> None:
        tune = _import("ray.tune")
        is_trial = tune.get_context().get_trial_id() is not None
        self._send = (tune if is_trial else _import("ray.train")).report
        self._reported: int | None = None
        self._losses: dict[str, float] = {}

    def after_create_state(self, context: est.hooks.Context) -> None:
        context.watch_losses(self._note_loss)

    def next_step(self, step: int) -> int:
        return step + self._every_steps - step % self._every_steps

    def after_run(self, context: est.hooks.Context, values: est.hooks.RunValues) -> None:
        self._losses = {"loss": float(np.asarray(values.loss))}
        self._report(context.global_step)

    def end(self, context: est.hooks.Context) -> None:
        # A worker that has failed must not wait for the others here; all have the same reason to stop.
        if (
            context.error is None
            and context.stop_reason not in ("SIGTERM", "SIGINT")
            and self._reported != context.global_step
        ):
            self._report(context.global_step)

    def _note_loss(self, context: est.hooks.Context, step: int, losses: np.ndarray) -> None:
        self._losses = {"loss": float(losses[-1])}  # all of them are known before `end`

    def _report(self, step: int) -> None:
        evaluations = {} if self._eval_dir is None else est.read_eval_metrics(self._eval_dir)
        newest = evaluations[max(evaluations)] if evaluations else {}
        self._send({"step": step, **self._losses, **{f"eval/{name}": value for name, value in newest.items()}})
        self._reported = step


class PreemptionHook(est.Hook):
    """Saves checkpoints once Ray Train has the notice that a node of the workers will be taken away.

    Training continues, as Ray wants it: when the node goes, Ray starts all workers again on others, which is not
    counted as a failure but by `FailureConfig(max_preemption_failures=...)`.

    >>> hook = PreemptionHook(every_steps=20)

    Args:
      every_steps: ask for the notice at the multiples of this number of global steps, for which all workers wait for
        each other; and, after the notice, save there. A multiple should come every few seconds.

    Raises:
      ValueError: `every_steps` is not positive.
      ImportError: at the beginning of the run: Ray is not installed.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = _check_steps("PreemptionHook", every_steps)

    def begin(self) -> None:
        self._get_notice = _import("ray.train").get_preemption_info

    def next_step(self, step: int) -> int:
        return step + self._every_steps - step % self._every_steps

    def after_run(self, context: est.hooks.Context, values: est.hooks.RunValues) -> None:
        if self._get_notice() is not None:
            context.save()


def _check_steps(name: str, every_steps: int) -> int:
    if not isinstance(every_steps, int) or every_steps <= 0:
        raise ValueError(f"{name}: every_steps must be a positive int; got {every_steps!r}.")
    return every_steps


def _find_address() -> str:
    """An address of this node with a port that is free."""
    host = _import("ray.util").get_node_ip_address()
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("replicate.ray needs Ray. Install it in your clone: pip install -e '.[ray]'.") from error
