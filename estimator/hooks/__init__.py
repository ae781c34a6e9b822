"""What may happen around the steps of a run."""

from estimator.hooks._checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from estimator.hooks._hook import Context, Hook, RunValues
from estimator.hooks._nan import NanTensorHook
from estimator.hooks._summary_saver import SummarySaverHook
from estimator.hooks._timer import SecondOrStepTimer

__all__ = [
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "Context",
    "Hook",
    "NanTensorHook",
    "RunValues",
    "SecondOrStepTimer",
    "SummarySaverHook",
]
