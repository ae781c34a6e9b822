"""Resumes the input of a training run at the position in its checkpoint."""

from __future__ import annotations

from typing import Any

from absl import logging

from estimator.checkpoint._checkpoint import Checkpoint
from estimator.core._run_config import RunConfig
from estimator.inputs._input_fn import Batches


def resume_input(rest: Batches, path: str, host: dict[str, Any], config: RunConfig) -> int:
    """Resumes an input where an earlier process left it; returns how many batches that process had taken.

    Args:
      rest: the input, at its beginning.
      path: the checkpoint that training resumes from.
      host: what is saved in it beside the arrays.
      config: says how to take it up.

    Raises:
      ValueError: the input has fewer batches than were taken.
    """
    saved = host.get("input", {})
    # At the end of the input there is nothing to resume: the next run begins it again, as TensorFlow does in each run.
    if not saved or config.resume_input is None or Checkpoint(path).is_end("input"):
        return 0
    batches, positions = saved["batches"], saved["positions"]
    # Other processes have other parts of the input: then only the number of batches says where it was, or a position
    # that is the same in all of them.
    as_many = len(positions) == config.process_count
    position = positions[config.process_index] if as_many else positions[0] if rest.is_elastic else None
    if rest.has_position and position is not None:
        try:
            rest.set_state(position)
        except Exception as error:
            error.add_note(f"The position is from {path}. RunConfig(resume_input=None) begins the input again.")
            raise
    elif config.resume_input != "count" and as_many:
        logging.info("The input begins again: there is no position in it; see RunConfig(resume_input=...).")
        return 0
    elif (skipped := rest.skip(batches)) < batches:
        raise ValueError(
            f"Checkpoint {path} was saved after {batches} batches of the input, but input_fn gave only {skipped}. "
            "Give the same input, or begin again by RunConfig(resume_input=None)."
        )
    logging.info("The input resumes after its first %d batches.", batches)
    return batches


def warn_of_resuming(position: Any, config: RunConfig) -> bool:
    """Logs what a process does that resumes from a checkpoint within a run; returns whether it begins the input again.

    Args:
      position: of the input, or None if it has none.
      config: says how to take it up.
    """
    begins_again = position is None and config.resume_input == "position"
    if begins_again:
        logging.info(
            "The input has no position that a checkpoint can hold (`get_state`, `set_state`): after a kill the next "
            "process begins it again, and ends with other values than a run that was not killed. With "
            "RunConfig(resume_input='count') it reads up to the place, and ends with the same."
        )
    return begins_again
