"""`NanTensorHook`: the choice between an error and a stop at a NaN loss."""

from __future__ import annotations

from typing import Any

from estimator.core._hook import Hook


class NanTensorHook(Hook):
    """Says what a NaN loss does to a training run. `train` always looks, every 100 steps and before it saves.

    >>> hook = NanTensorHook(fail_on_nan_loss=False)

    Args:
      loss_tensor: has no meaning here: it is the loss of the EstimatorSpec that is looked at.
      fail_on_nan_loss: whether `train` raises `NanLossDuringTrainingError`, as it does without this hook. Otherwise it
        warns and ends, and nothing is saved from there on.
    """

    def __init__(self, loss_tensor: Any = None, fail_on_nan_loss: bool = True) -> None:
        del loss_tensor
        self.fail_on_nan_loss = fail_on_nan_loss
