"""The hooks that a training run has by default."""

from __future__ import annotations

from collections.abc import Sequence

from absl import logging

from estimator.core._hook import Hook
from estimator.core._run_config import RunConfig
from estimator.hooks._checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from estimator.hooks._summary_saver import SummarySaverHook
from estimator.multihost._process_group import ProcessGroup


def with_default_hooks(
    chief: Sequence[Hook], hooks: Sequence[Hook], config: RunConfig, listeners: Sequence[CheckpointSaverListener]
) -> tuple[Hook, ...]:
    """All hooks of a run, in the order in which they are called: first those with a state, so that the checkpoint of a
    step holds their state after it.

    Raises:
      ValueError: there are listeners, but no hook saves checkpoints; two hooks write summaries into the model_dir.
    """
    first: list[Hook] = []
    if config.check_replicas_every:
        from estimator.hooks._replica_check import ReplicaCheckHook

        # Before the saver: copies that differ must not be saved.
        first.append(ReplicaCheckHook(config.check_replicas_every))
    of_caller = (*chief, *hooks)
    savers = [hook for hook in of_caller if isinstance(hook, CheckpointSaverHook)]
    if not savers and (config.save_checkpoints_steps or config.save_checkpoints_secs):
        savers = [CheckpointSaverHook(save_secs=config.save_checkpoints_secs, save_steps=config.save_checkpoints_steps)]
        first += savers
    if listeners and not savers:
        raise ValueError(
            "There should be a CheckpointSaverHook to use saving_listeners. Please set one of "
            "RunConfig.save_checkpoints_steps or RunConfig.save_checkpoints_secs."
        )
    if not savers and config.is_chief:
        logging.warning(
            "No checkpoint of this run will be in %s, unless a hook calls `context.save()`: save_checkpoints_steps and "
            "save_checkpoints_secs of its RunConfig are both None.",
            config.model_dir,
        )
    for saver in savers:
        # Only the first one, so that a listener is called once for a checkpoint.
        saver.listen(listeners if saver is savers[0] else ())
    first += chief
    writers = [hook for hook in of_caller if isinstance(hook, SummarySaverHook) and hook.writes_to(config.model_dir)]
    if len(writers) > 1:
        raise ValueError(
            f"Two SummarySaverHooks write into the model_dir, {config.model_dir!r}: each tag would be there twice. "
            "Give one of them an output_dir of its own."
        )
    if not writers and config.save_summary_steps:
        first.append(SummarySaverHook(config.save_summary_steps))
    return tuple(sorted((*first, *hooks), key=lambda hook: type(hook).get_state is Hook.get_state))


def hooks_for_process(group: ProcessGroup, hooks: Sequence[Hook], chief: Sequence[Hook] = ()) -> tuple[Hook, ...]:
    """The hooks of one process of a group. `chief` hooks do nothing outside of process 0, unless they save checkpoints,
    which all processes write together.

    Raises:
      ValueError: the hooks of the processes are not of the same classes.
    """
    of_all = group.all_gather([type(hook).__name__ for hook in hooks])
    for i, names in enumerate(of_all):
        if names != of_all[0]:
            raise ValueError(
                f"All processes need the same hooks; process 0 has {of_all[0]}, process {i} has {names}. A hook that "
                "is to do something in process 0 alone looks at `jax.process_index()`."
            )
    if not group.index:
        return tuple(hooks)
    inactive = {id(hook) for hook in chief if not isinstance(hook, CheckpointSaverHook)}
    # They are replaced by hooks that do nothing: processes agree on the positions of the hooks that are due.
    return tuple(Hook() if id(hook) in inactive else hook for hook in hooks)
