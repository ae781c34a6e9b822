"""An Estimator for JAX: write one `model_fn(features, labels, mode, params)`, and get the loop around it.

This file is the table of contents; every name has its explanation where it is defined.
"""

from typing import TYPE_CHECKING

from estimator._estimator import Estimator
from estimator.checkpoint._model_dir import CheckpointInfo, checkpoints
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._frame import run_store
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import record
from estimator.core._rng import global_step, make_rng
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.core._train_op import StepReport, TrainOp, group
from estimator.loop._loss_reader import NanLossDuringTrainingError
from estimator.multihost._input_context import InputContext, input_context
from estimator.multihost._preemption import Preempted, request_stop
from estimator.optim._clip import clip_by_global_norm
from estimator.optim._learning_rate import learning_rates, set_learning_rate
from estimator.optim._loss_scale import DynamicLossScale
from estimator.optim._moving_average import ExponentialMovingAverage
from estimator.optim._non_finite import NonFiniteGradientError, skipped_steps
from estimator.optim._optimizer import Optimizer
from estimator.optim._sparse_update import lazy
from estimator.optim._tower_gradient import tower_gradient
from estimator.porting._missing_names import names_loaded_later as _names_loaded_later
from estimator.runtime._limits import Limits
from estimator.sparse._embedding import embedding_lookup
from estimator.sparse._indexed_slices import IndexedSlices
from estimator.steps._transform import Model, transform
from estimator.variables._aggregation import VariableAggregation
from estimator.variables._partitioning import spread
from estimator.variables._policy import Policy
from estimator.variables._variable_scope import AUTO_REUSE, VariableScope, get_variable_scope, variable_scope
from estimator.variables._variables import assign, assign_add, get_variable, read_variable, trainable_variables

__version__ = "0.1.0"  # the one place of it: pyproject.toml reads it here

__all__ = [
    "AUTO_REUSE",
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "BestExporter",
    "BinaryClassHead",
    "CheckpointInfo",
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
    "ExponentialMovingAverage",
    "Exporter",
    "FinalExporter",
    "FinalOpsHook",
    "Goodput",
    "Head",
    "Hook",
    "InMemoryEvaluatorHook",
    "IndexedSlices",
    "InputContext",
    "LatestExporter",
    "Limits",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
    "LoggingTensorHook",
    "LogisticRegressionHead",
    "MemoryReport",
    "MemoryUse",
    "ModeKeys",
    "Model",
    "ModelSummary",
    "MultiClassHead",
    "MultiHead",
    "MultiLabelHead",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "NonFiniteGradientError",
    "Optimizer",
    "OptunaPruningHook",
    "PoissonRegressionHead",
    "Policy",
    "Preempted",
    "ProcessLostError",
    "ProfilerHook",
    "Reduction",
    "RegressionHead",
    "ReplicaMismatchError",
    "RunConfig",
    "SecondOrStepTimer",
    "SetLearningRateHook",
    "State",
    "StepCounterHook",
    "StepReport",
    "StopAtSecsHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "TrainOp",
    "TrainSpec",
    "Transpose",
    "VariableAggregation",
    "VariableScope",
    "VariableSummary",
    "VocabInfo",
    "WarmStartReport",
    "WarmStartSettings",
    "WatchdogHook",
    "add_metrics",
    "assign",
    "assign_add",
    "checkpoint_segments",
    "checkpoints",
    "checkpoints_iterator",
    "clip_by_global_norm",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "experimental",
    "export",
    "export_variables",
    "feature_column",
    "flax_module",
    "forward_features",
    "get_variable",
    "get_variable_scope",
    "global_step",
    "goodput",
    "group",
    "hooks",
    "image",
    "init_from_checkpoint",
    "input_context",
    "inputs",
    "io",
    "layers",
    "lazy",
    "learning_rates",
    "list_variables",
    "load_variable",
    "load_exported",
    "losses",
    "make_early_stopping_hook",
    "make_rng",
    "memory_report",
    "metrics",
    "nn",
    "plot_history",
    "read_eval_metrics",
    "read_history",
    "read_variable",
    "record",
    "regularizers",
    "request_stop",
    "run_store",
    "seq2seq",
    "set_learning_rate",
    "skipped_steps",
    "spread",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "summarize",
    "summary",
    "sync_variables",
    "tower_gradient",
    "trackers",
    "train",
    "train_and_evaluate",
    "trainable_variables",
    "transform",
    "variable_scope",
]

# What only some runs use is loaded when it is used.
if TYPE_CHECKING:
    from estimator import (
        experimental,
        export,
        feature_column,
        hooks,
        image,
        inputs,
        io,
        layers,
        losses,
        metrics,
        nn,
        regularizers,
        seq2seq,
        summary,
        trackers,
        train,
    )
    from estimator._early_stopping import (
        make_early_stopping_hook,
        stop_if_higher_hook,
        stop_if_lower_hook,
        stop_if_no_decrease_hook,
        stop_if_no_increase_hook,
    )
    from estimator._goodput import Goodput, goodput
    from estimator._summarize import ModelSummary, VariableSummary, summarize
    from estimator._train_and_evaluate import train_and_evaluate
    from estimator._train_spec import EvalSpec, TrainSpec
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
    from estimator.checkpoint._checkpoints_iterator import checkpoints_iterator
    from estimator.checkpoint._export_variables import export_variables
    from estimator.checkpoint._init_from_checkpoint import init_from_checkpoint
    from estimator.checkpoint._readers import list_variables, load_variable
    from estimator.checkpoint._transpose import Transpose
    from estimator.checkpoint._warm_start import WarmStartReport, WarmStartSettings
    from estimator.export._exporters import BestExporter, Exporter, FinalExporter, LatestExporter
    from estimator.export._load import ExportedModel, load_exported
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
        StepCounterHook,
        StopAtSecsHook,
        StopAtStepHook,
        SummarySaverHook,
        WatchdogHook,
    )
    from estimator.integrations._optuna import OptunaPruningHook
    from estimator.interop._flax import flax_module
    from estimator.loop._memory_report import MemoryReport, MemoryUse, memory_report
    from estimator.losses import Reduction
    from estimator.multihost._replica_check import ReplicaMismatchError
    from estimator.multihost._supervisor import ProcessLostError
    from estimator.sparse._embedding_sparse import embedding_lookup_sparse
    from estimator.steps._remat import checkpoint_segments
    from estimator.steps._sync_variables import sync_variables
    from estimator.summary._history import read_eval_metrics, read_history
    from estimator.summary._plot import plot_history
    from estimator.variables._vocab_info import VocabInfo
else:
    __getattr__, __dir__ = _names_loaded_later(
        __name__,
        {
            "_early_stopping": (
                "make_early_stopping_hook stop_if_higher_hook stop_if_lower_hook stop_if_no_decrease_hook "
                "stop_if_no_increase_hook"
            ),
            "_goodput": "Goodput goodput",
            "_summarize": "ModelSummary VariableSummary summarize",
            "_train_and_evaluate": "train_and_evaluate",
            "_train_spec": "EvalSpec TrainSpec",
            "canned": (
                "BaselineClassifier BaselineEstimator BaselineRegressor DNNClassifier DNNEstimator "
                "DNNLinearCombinedClassifier DNNLinearCombinedEstimator DNNLinearCombinedRegressor DNNRegressor "
                "LinearClassifier LinearEstimator LinearRegressor"
            ),
            "checkpoint._checkpoints_iterator": "checkpoints_iterator",
            "checkpoint._export_variables": "export_variables",
            "checkpoint._init_from_checkpoint": "init_from_checkpoint",
            "checkpoint._readers": "list_variables load_variable",
            "checkpoint._transpose": "Transpose",
            "checkpoint._warm_start": "WarmStartReport WarmStartSettings",
            "export._exporters": "BestExporter Exporter FinalExporter LatestExporter",
            "export._load": "ExportedModel load_exported",
            "extenders": "add_metrics forward_features",
            "heads": (
                "BinaryClassHead Head LogisticRegressionHead MultiClassHead MultiHead MultiLabelHead "
                "PoissonRegressionHead RegressionHead"
            ),
            "hooks": (
                "CheckpointSaverHook CheckpointSaverListener FinalOpsHook Hook InMemoryEvaluatorHook "
                "LoggingTensorHook NanTensorHook ProfilerHook SecondOrStepTimer SetLearningRateHook "
                "StepCounterHook StopAtSecsHook StopAtStepHook SummarySaverHook WatchdogHook"
            ),
            "integrations._optuna": "OptunaPruningHook",
            "interop._flax": "flax_module",
            "loop._memory_report": "MemoryReport MemoryUse memory_report",
            "losses": "Reduction",
            "multihost._supervisor": "ProcessLostError",
            "multihost._replica_check": "ReplicaMismatchError",
            "sparse._embedding_sparse": "embedding_lookup_sparse",
            "steps._remat": "checkpoint_segments",
            "steps._sync_variables": "sync_variables",
            "summary._history": "read_eval_metrics read_history",
            "summary._plot": "plot_history",
            "variables._vocab_info": "VocabInfo",
            **dict.fromkeys("experimental export feature_column image inputs io layers metrics nn".split(), ""),
            **dict.fromkeys("regularizers seq2seq summary trackers train".split(), ""),
        },
    )
