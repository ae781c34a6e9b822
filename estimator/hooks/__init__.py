"""Hooks: code around the steps of a run."""

from typing import TYPE_CHECKING

from estimator.core._hook import Context, Hook, RunValues
from estimator.hooks._checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from estimator.hooks._nan import NanTensorHook
from estimator.hooks._step_counter import StepCounterHook
from estimator.hooks._stop_at_step import StopAtStepHook
from estimator.hooks._summary_saver import SummarySaverHook
from estimator.hooks._timer import SecondOrStepTimer
from estimator.optim._learning_rate import SetLearningRateHook
from estimator.porting._missing_names import names_loaded_later as _names_loaded_later

__all__ = [
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "Context",
    "FinalOpsHook",
    "Hook",
    "InMemoryEvaluatorHook",
    "LoggingTensorHook",
    "NanTensorHook",
    "ProfilerHook",
    "RunValues",
    "SecondOrStepTimer",
    "SetLearningRateHook",
    "StepCounterHook",
    "StopAtSecsHook",
    "StopAtStepHook",
    "WatchdogHook",
    "SummarySaverHook",
]

if TYPE_CHECKING:
    from estimator.hooks._final_ops import FinalOpsHook
    from estimator.hooks._in_memory_evaluator import InMemoryEvaluatorHook
    from estimator.hooks._logging_tensor import LoggingTensorHook
    from estimator.hooks._profiler import ProfilerHook
    from estimator.hooks._stop_at_secs import StopAtSecsHook
    from estimator.hooks._watchdog import WatchdogHook
else:
    __getattr__, __dir__ = _names_loaded_later(
        __name__,
        {
            "_final_ops": "FinalOpsHook",
            "_in_memory_evaluator": "InMemoryEvaluatorHook",
            "_logging_tensor": "LoggingTensorHook",
            "_profiler": "ProfilerHook",
            "_stop_at_secs": "StopAtSecsHook",
            "_watchdog": "WatchdogHook",
        },
    )
