"""`EstimatorSpec`, the result of a model_fn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from estimator.core._batch import check_keys, unknown_dtype
from estimator.core._bcoo import is_sparse
from estimator.core._export_output import DEFAULT_SIGNATURE, ExportOutput, PredictOutput
from estimator.core._hook import Hook, check_methods
from estimator.core._mode_keys import ModeKeys
from estimator.core._record import Report, metric_of
from estimator.core._train_op import StepReport, TrainOp
from estimator.core._typing import PyTree
from estimator.porting._missing_names import check_tpu_arguments


class Mergeable(Protocol):
    """A metric: a pytree whose states over parts of the data are merged; it has `result`, or `compute`, besides."""

    def merge(self, other: Any, /) -> Any: ...


_HOOK_FIELDS = ("training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks")
_RESERVED_METRICS = ("loss", "global_step")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """The outcome of one run of a model_fn; immutable, checked when it is made, and a pytree.

    Fields and rules as in `tf.estimator.EstimatorSpec`.

    >>> import jax.numpy as jnp
    >>> spec = EstimatorSpec("infer", predictions={"class": jnp.array([3, 1])})
    >>> list(spec.export_outputs)
    ['serving_default']

    Attributes:
      mode: a `ModeKeys`, or its string.
      predictions: any pytree of batch-major arrays of numbers: strings cannot be part of a compiled program, so classes
        are integers here, and get their names from what `predict` yields. Required in PREDICT.
      loss: scalar array. Required in TRAIN and EVAL.
      train_op: what `minimize`, `apply_gradients` or `group` returned. Required in TRAIN; `est.group()` changes no
        variable, as `tf.no_op()` did. In the spec that a training step returns, a `StepReport`.
      eval_metric_ops: by name, what the functions of `est.metrics` return, or any pytree with `merge` and `compute`.
      export_outputs: `est.export` outputs by signature; by default, in PREDICT, the predictions.
      training_chief_hooks, training_hooks, evaluation_hooks, prediction_hooks: `est.Hook`s.
      scaffold: always None; what TensorFlow's says is said by `RunConfig`, `warm_start_from=` and hooks.
      reported: by name, what the model_fn reported by `est.summary` and `est.record`; filled in by the run.
      eval_metrics: instead of `eval_metric_ops`, as in `TPUEstimatorSpec`: `(metric_fn, tensors)`. In EVAL `metric_fn`
        gets the tensors, a dict by its names or a list, and returns the metrics; in towers a tower's, whose metrics
        are merged as others are. Not an attribute.

    Raises:
      ValueError, TypeError: a field is missing or of another kind; the message names it.
    """

    mode: ModeKeys
    predictions: PyTree = None
    loss: jax.Array | None = None
    train_op: TrainOp | None = None
    eval_metric_ops: Mapping[str, Mergeable] = dataclasses.field(default_factory=dict)
    export_outputs: dict[str, ExportOutput] | None = None
    training_chief_hooks: Sequence[Hook] = ()
    training_hooks: Sequence[Hook] = ()
    scaffold: None = None
    evaluation_hooks: Sequence[Hook] = ()
    prediction_hooks: Sequence[Hook] = ()
    reported: dict[str, Report] = dataclasses.field(default_factory=dict)
    eval_metrics: dataclasses.InitVar[tuple[Callable[..., dict[str, Mergeable]], Any] | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> EstimatorSpec:
        # Before `__init__`, whose TypeError for such an argument could not say what to write.
        unknown = {name: value for name, value in kwargs.items() if name not in cls.__dataclass_fields__}
        check_tpu_arguments("EstimatorSpec", unknown)
        return super().__new__(cls)

    def __post_init__(self, eval_metrics: Any) -> None:
        mode = ModeKeys(self.mode)
        if self.scaffold is not None:
            raise TypeError(
                f"scaffold of EstimatorSpec must be None, given: {_describe(self.scaffold)}. Initial values come from "
                "`est.init_from_checkpoint` in the model_fn, `warm_start_from=` or the `after_create_state` of an "
                "`est.Hook`, savers are set up by `RunConfig`, and summaries are written as `est.summary` reports them."
            )
        # The train_op before the loss, as in TensorFlow: where both are missing, the error is about the train_op.
        checked = {
            "mode": mode,
            "train_op": _checked_train_op(mode, self.train_op),
            "loss": _checked_loss(mode, self.loss),
            "predictions": _checked_predictions(mode, self.predictions),
            "eval_metric_ops": _checked_metrics(_computed_metrics(mode, self.eval_metric_ops, eval_metrics)),
            "export_outputs": _checked_exports(mode, self.export_outputs, self.predictions),
            "reported": {} if self.reported is None else self.reported,
        }
        checked |= {name: checked_hooks(name, getattr(self, name)) for name in _HOOK_FIELDS}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _replace(self, **changes: Any) -> EstimatorSpec:
        """A copy with other fields, checked again. The mode cannot be changed."""
        if "mode" in changes and ModeKeys(changes["mode"]) != self.mode:
            raise ValueError(
                f"mode of EstimatorSpec cannot be changed: it is {str(self.mode)!r}; "
                f"got {str(changes['mode'])!r}. Make a new EstimatorSpec instead."
            )
        return dataclasses.replace(self, **changes)

    def replace_unchecked(self, **changes: Any) -> EstimatorSpec:
        """A copy with other fields of arrays, which may be less than whole: a tower's, or in parts."""
        arrays, static = self.tree_flatten_with_keys()
        return self.tree_unflatten(static, tuple(changes.get(key.name, value) for key, value in arrays))

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        arrays = tuple((jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in _ARRAY_FIELDS)
        # Hooks are static: as a part of the structure they come out of a compiled program with the spec.
        return arrays, (self.mode, *(getattr(self, name) for name in _HOOK_FIELDS))

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], arrays: tuple[Any, ...]) -> EstimatorSpec:
        # Unchecked: jax also rebuilds specs around placeholders.
        spec = object.__new__(cls)
        for name, value in zip(("mode", *_HOOK_FIELDS), static, strict=True):
            object.__setattr__(spec, name, value)
        for name, value in zip(_ARRAY_FIELDS, arrays, strict=True):
            object.__setattr__(spec, name, value)
        return spec


_ARRAY_FIELDS = ("predictions", "loss", "train_op", "eval_metric_ops", "export_outputs", "reported")


def loss_of(spec: EstimatorSpec) -> jax.Array:
    """The loss of a spec in TRAIN or EVAL, which has one."""
    assert spec.loss is not None
    return spec.loss


def train_op_of(spec: EstimatorSpec) -> TrainOp:
    """The train_op of a spec in TRAIN, which has one."""
    assert spec.train_op is not None
    return spec.train_op


def report_of(spec: EstimatorSpec) -> StepReport:
    """The report in the spec of a training step that was made."""
    assert isinstance(spec.train_op, StepReport)
    return spec.train_op


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def _checked_train_op(mode: ModeKeys, train_op: Any) -> TrainOp | None:
    if train_op is None:
        if mode == ModeKeys.TRAIN:
            raise ValueError(
                "Missing train_op: in TRAIN an EstimatorSpec needs what "
                "`est.Optimizer(optax.adam(1e-3)).minimize(loss)` returns, or `est.group()`, which changes no variable."
            )
    elif not isinstance(train_op, TrainOp):
        raise TypeError(
            "train_op must be what `minimize`, `apply_gradients` or `est.group` returned; "
            f"got {_describe(train_op)}. Write `train_op=est.Optimizer(optimizer).minimize(loss)`, or "
            "`train_op=est.group()` to change no variable."
        )
    return train_op


def _checked_loss(mode: ModeKeys, loss: Any) -> jax.Array | None:
    if loss is None:
        if mode != ModeKeys.PREDICT:
            raise ValueError(f"Missing loss: an EstimatorSpec needs one in mode {str(mode)!r}.")
        return None
    # A number of Python is taken, which TensorFlow refuses: jnp makes an array of it.
    if not _is_array(loss) and not isinstance(loss, int | float):
        raise TypeError(f"loss must be a scalar array, given: {_describe(loss)}.")
    if _is_array(loss):
        _check_arrays("loss", loss)
    loss = jnp.asarray(loss)
    if jnp.iscomplexobj(loss):
        raise TypeError(f"loss must be real, given: {_describe(loss)}. Write `loss.real`, or `jnp.abs(loss)`.")
    if loss.size != 1:
        raise ValueError(
            f"Loss must be scalar, given: an array of shape {loss.shape}. "
            "Reduce it, for example by `est.losses.compute_weighted_loss(losses)`."
        )
    # As in TensorFlow, a single element is a scalar, whatever its shape.
    return loss if loss.ndim == 0 else loss.reshape(())


def _checked_predictions(mode: ModeKeys, predictions: PyTree) -> PyTree:
    if predictions is None and mode == ModeKeys.PREDICT:
        raise ValueError("Missing predictions: an EstimatorSpec needs them in mode 'infer'.")
    _check_arrays("predictions", predictions)
    return {} if predictions is None else predictions


def _check_arrays(field: str, tree: PyTree) -> None:
    check_keys(field, tree)
    # A sparse array is a leaf, which is refused; the arrays that it consists of would pass.
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse):
        name = field + jax.tree_util.keystr(path)
        if not _is_array(leaf):
            raise TypeError(f"{name} must be an array, given: {_describe(leaf)}.")
        if not isinstance(leaf, jax.Array) and np.dtype(leaf.dtype).kind in "OSUMm":
            raise TypeError(
                f"{name} must be an array of numbers, given one of dtype {leaf.dtype}, which no compiled program "
                "holds. Strings stay on the host: return integer classes, and look up their names in what `predict` "
                "yields."
            )
        if fix := unknown_dtype(leaf.dtype):
            raise TypeError(f"{name} must be an array of numbers that jax has, given one {fix}")


def _computed_metrics(mode: ModeKeys, metrics: Any, eval_metrics: Any) -> Any:
    """The metrics themselves, or what the function of TPUEstimatorSpec's `eval_metrics` makes of its tensors."""
    if eval_metrics is None:
        return metrics
    if metrics:
        raise ValueError("An EstimatorSpec takes `eval_metric_ops` or `eval_metrics`, given both. Leave out one.")
    if not isinstance(eval_metrics, tuple | list) or len(eval_metrics) != 2 or not callable(eval_metrics[0]):
        raise TypeError(f"eval_metrics must be a pair (metric_fn, tensors), given: {_describe(eval_metrics)}.")
    metric_fn, tensors = eval_metrics
    if not isinstance(tensors, dict | tuple | list):
        raise TypeError(f"The tensors of eval_metrics must be a dict or a list, given: {_describe(tensors)}.")
    if mode != ModeKeys.EVAL:
        return None
    return metric_fn(**tensors) if isinstance(tensors, dict) else metric_fn(*tensors)


def _checked_metrics(metrics: Any) -> dict[str, Mergeable]:
    if metrics is None:
        return {}
    if not isinstance(metrics, dict):
        raise TypeError(f"eval_metric_ops must be a dict of metrics by name, given: {_describe(metrics)}.")
    check_keys("eval_metric_ops", metrics)
    metrics = {name: _join_pair(metric) for name, metric in metrics.items()}
    for name, metric in metrics.items():
        if name in _RESERVED_METRICS:
            raise ValueError(
                f'Metric with name "{name}" is not allowed, because `evaluate` reports a {name} itself. Rename it.'
            )
        if not hasattr(metric, "merge") or not (hasattr(metric, "result") or hasattr(metric, "compute")):
            raise TypeError(
                f"eval_metric_ops[{name!r}] must be a metric, given: {_describe(metric)}. Use a function of "
                "`est.metrics`, for example `est.metrics.mean(value)`, or an object with `merge` and `compute`. A pair "
                "(value, update) has to be the parts of one metric."
            )
    return metrics


def _join_pair(metric: Any) -> Any:
    """The metric, of its parts `(value, update)`."""
    # A port takes a metric apart as TensorFlow's pair and gives both parts back.
    if isinstance(metric, tuple) and len(metric) == 2:
        value, update = map(metric_of, metric)
        return metric if value is None or value is not update else value
    return metric


def _checked_exports(mode: ModeKeys, exports: Any, predictions: PyTree) -> dict[str, ExportOutput] | None:
    if exports is None:
        return {DEFAULT_SIGNATURE: PredictOutput(predictions)} if mode == ModeKeys.PREDICT else None
    if not isinstance(exports, dict):
        raise TypeError(f"`export_outputs` must be dict, given: {_describe(exports)}.")
    for name, output in exports.items():
        if not isinstance(output, ExportOutput):
            raise TypeError(
                f"export_outputs[{name!r}] must be one of `est.export`'s outputs, such as "
                f"`est.export.PredictOutput(predictions)`; given: {_describe(output)}."
            )
    _check_arrays("export_outputs", exports)
    if DEFAULT_SIGNATURE not in exports:
        if len(exports) != 1:
            raise ValueError(
                "Multiple `export_outputs` were provided, but none of them are specified as the default. "
                f"Name one of {sorted(exports)} {DEFAULT_SIGNATURE!r}."
            )
        # As in TensorFlow, an output that is the only one is the default as well, under both names.
        exports = {**exports, DEFAULT_SIGNATURE: next(iter(exports.values()))}
    return exports


def checked_hooks(name: str, hooks: Any) -> tuple[Hook, ...]:
    """An iterable of hooks, or None, as a tuple."""
    if hooks is None:
        return ()
    if not isinstance(hooks, Iterable) or isinstance(hooks, str):
        raise TypeError(f"{name} must be an iterable of hooks, given: {_describe(hooks)}.")
    hooks = tuple(hooks)
    for hook in hooks:
        if not isinstance(hook, Hook):
            mend = "Derive its class from `est.Hook`; its `after_create_session` is called `after_create_state` here."
            if isinstance(hook, type) and issubclass(hook, Hook):
                mend = f"That is a class. Call it: `{hook.__name__}(...)`."
            raise TypeError(f"All hooks must be hook instances, but {name} holds {_describe(hook)}. {mend}")
        check_methods(Hook, hook)
    return hooks


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) < 100 else text[:97] + '...'} of type {type(value).__name__}"
