"""An Estimator for JAX: write one `model_fn(features, labels, mode, params)`, and get the loop around it.

This file is the table of contents; every name has its explanation where it is defined.
"""

from typing import TYPE_CHECKING

from estimator import experimental, export, feature_column, hooks, inputs, losses, metrics, summary
from estimator._early_stopping import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from estimator._embedding import embedding_lookup
from estimator._estimator import Estimator
from estimator._events import read_eval_metrics, read_history
from estimator._exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from estimator._flax import flax_module
from estimator._indexed_slices import IndexedSlices
from estimator._input_context import InputContext, input_context
from estimator._lazy import lazy
from estimator._learning_rates import learning_rates, set_learning_rate
from estimator._load_exported import ExportedModel, load_exported
from estimator._loss_scale import DynamicLossScale
from estimator._memory_report import MemoryReport, MemoryUse, memory_report
from estimator._modes import ModeKeys
from estimator._non_finite import NonFiniteGradientError, skipped_steps
from estimator._optimizer import Optimizer, TrainOp, group, tower_gradient
from estimator._plot_history import plot_history
from estimator._preemption import Preempted
from estimator._processes import ProcessLostError
from estimator._random import global_step, make_rng
from estimator._replica_check import ReplicaMismatchError
from estimator._report import record
from estimator._run_config import RunConfig
from estimator._segments import checkpoint_segments
from estimator._spec import EstimatorSpec
from estimator._spread import spread
from estimator._sync import sync_variables
from estimator._tensorflow_names import missing as _missing
from estimator._train import NanLossDuringTrainingError
from estimator._train_and_evaluate import train_and_evaluate
from estimator._train_spec import EvalSpec, TrainSpec
from estimator._transform import Model, State, transform
from estimator._variables import (
    AUTO_REUSE,
    VariableAggregation,
    assign,
    assign_add,
    get_variable,
    read_variable,
    variable_scope,
)
from estimator._warm_start import WarmStartReport, WarmStartSettings
from estimator.canned import (
    BaselineClassifier,
    BaselineEstimator,
    BaselineRegressor,
    DNNClassifier,
    DNNEstimator,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
    DNNRegressor,
    LinearClassifier,
    LinearEstimator,
    LinearRegressor,
)
from estimator.extenders import add_metrics, forward_features
from estimator.heads import (
    BinaryClassHead,
    Head,
    LogisticRegressionHead,
    MultiClassHead,
    MultiHead,
    MultiLabelHead,
    PoissonRegressionHead,
    RegressionHead,
)
from estimator.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    FinalOpsHook,
    Hook,
    InMemoryEvaluatorHook,
    LoggingTensorHook,
    NanTensorHook,
    ProfilerHook,
    SecondOrStepTimer,
    SetLearningRateHook,
    StalledError,
    StepCounterHook,
    StopAtSecsHook,
    StopAtStepHook,
    SummarySaverHook,
    WatchdogHook,
)
from estimator.losses import Reduction

__all__ = [
    "AUTO_REUSE",
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "BestExporter",
    "BinaryClassHead",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "DynamicLossScale",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "ExportedModel",
    "Exporter",
    "FinalExporter",
    "FinalOpsHook",
    "Head",
    "Hook",
    "InMemoryEvaluatorHook",
    "IndexedSlices",
    "InputContext",
    "LatestExporter",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
    "LoggingTensorHook",
    "LogisticRegressionHead",
    "MemoryReport",
    "MemoryUse",
    "ModeKeys",
    "Model",
    "MultiClassHead",
    "MultiHead",
    "MultiLabelHead",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "NonFiniteGradientError",
    "Optimizer",
    "PoissonRegressionHead",
    "Preempted",
    "ProcessLostError",
    "ProfilerHook",
    "Reduction",
    "RegressionHead",
    "ReplicaMismatchError",
    "RunConfig",
    "SecondOrStepTimer",
    "SetLearningRateHook",
    "StalledError",
    "State",
    "StepCounterHook",
    "StopAtSecsHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "TrainOp",
    "TrainSpec",
    "VariableAggregation",
    "WarmStartReport",
    "WarmStartSettings",
    "WatchdogHook",
    "add_metrics",
    "assign",
    "assign_add",
    "checkpoint_segments",
    "embedding_lookup",
    "experimental",
    "export",
    "feature_column",
    "flax_module",
    "forward_features",
    "get_variable",
    "global_step",
    "group",
    "hooks",
    "input_context",
    "inputs",
    "lazy",
    "learning_rates",
    "load_exported",
    "losses",
    "make_early_stopping_hook",
    "make_rng",
    "memory_report",
    "metrics",
    "plot_history",
    "read_eval_metrics",
    "read_history",
    "read_variable",
    "record",
    "set_learning_rate",
    "skipped_steps",
    "spread",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "summary",
    "sync_variables",
    "tower_gradient",
    "train_and_evaluate",
    "transform",
    "variable_scope",
]

if not TYPE_CHECKING:  # which knows what there is

    def __getattr__(name):
        raise _missing(__name__, name)
