"""A new Estimator from one that exists: with more metrics, or with features among its predictions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from estimator._estimator import Estimator
from estimator.core._bcoo import has_sparse
from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._export_output import DEFAULT_SIGNATURE, PredictOutput
from estimator.core._mode_keys import ModeKeys
from estimator.core._run_config import RunConfig
from estimator.core._typing import Features, Labels

MetricFn = Callable[..., dict[str, Any]]
_METRIC_FN_ARGS = ("features", "labels", "predictions", "config")


def add_metrics(estimator: Estimator, metric_fn: MetricFn) -> Estimator:
    """A new Estimator whose `evaluate` has the metrics of `metric_fn` too.

    It has the model, model_dir, params, config and warm start of the given one. As in TensorFlow, a new metric
    replaces one of the same name. With a replicated model_fn, `metric_fn` gets the predictions of all towers.

    >>> import estimator as est, jax.numpy as jnp, numpy as np, tempfile
    >>> def model_fn(features, labels, mode):
    ...     return est.EstimatorSpec(mode, predictions=2 * features, loss=jnp.mean(features))
    >>> def metric_fn(labels, predictions):
    ...     return {"error": est.metrics.mean_absolute_error(labels, predictions)}
    >>> estimator = est.add_metrics(est.Estimator(model_fn, tempfile.mkdtemp()), metric_fn)
    >>> x = np.array([1.0, 2.0], np.float32)
    >>> estimator.evaluate(lambda: (x, 3 * x))
    {'error': 1.5, 'loss': 1.5, 'global_step': 0}

    Args:
      estimator: the Estimator to start from; it stays as it is.
      metric_fn: function of any of `features, labels, predictions, config` that returns a dict of metrics by name.
        Features and labels are the batch, predictions are what the model_fn returns in EVAL.

    Raises:
      TypeError: one of the two is of another kind, or, in `evaluate`, `metric_fn` does not return a dict.
      ValueError: `metric_fn` has other arguments.
    """
    _check_estimator("add_metrics", estimator)
    if not callable(metric_fn):
        raise TypeError(f"`add_metrics` needs a function as metric_fn; got {metric_fn!r}.")
    signature = inspect.signature(metric_fn).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    shown = f"metric_fn ({getattr(metric_fn, '__name__', metric_fn)})"
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    unknown = [
        name
        for name, p in signature.items()
        if name not in _METRIC_FN_ARGS and p.kind not in variadic and p.default is p.empty
    ]
    if unknown:
        raise ValueError(
            f"{shown} has following not expected args: {unknown}. It may have {', '.join(_METRIC_FN_ARGS)}; "
            "bind others by functools.partial or give them defaults."
        )

    def extend(spec: EstimatorSpec, features: Features, labels: Labels, config: RunConfig) -> EstimatorSpec:
        if spec.mode != ModeKeys.EVAL:
            return spec
        offered = dict(zip(_METRIC_FN_ARGS, (features, labels, spec.predictions, config), strict=True))
        metrics = metric_fn(**{n: v for n, v in offered.items() if takes_all or n in signature})
        if not isinstance(metrics, dict):
            raise TypeError(f"{shown} must return a dict of metrics by name; got {metrics!r}.")
        return spec._replace(eval_metric_ops={**spec.eval_metric_ops, **metrics})

    return _extend(estimator, extend)


def forward_features(estimator: Estimator, keys: str | Sequence[str] | None = None) -> Estimator:
    """A new Estimator whose predictions hold features too, such as the ids to join them by.

    It has the model, model_dir, params, config and warm start of the given one. The features are also in the outputs
    for export called "serving_default" and "predict", where these are `PredictOutput`s. As in TensorFlow, nothing that
    the model_fn predicts is replaced; unlike there, only PREDICT is changed.

    >>> import estimator as est, numpy as np, tempfile
    >>> def model_fn(features, mode):
    ...     return est.EstimatorSpec(mode, predictions={"y": 2 * features["x"]})
    >>> estimator = est.forward_features(est.Estimator(model_fn, tempfile.mkdtemp()), "id")
    >>> features = {"x": np.array([0.5, 1.5], np.float32), "id": np.array([7, 9])}
    >>> [(int(row["id"]), float(row["y"])) for row in estimator.predict(lambda: features)]
    [(7, 1.0), (9, 3.0)]

    Args:
      estimator: the Estimator to start from; it stays as it is.
      keys: the feature, or the list of features, to forward; all if None.

    Raises:
      TypeError: `estimator` or `keys` is of another kind.
      ValueError: in `predict`, the features or the predictions are not a dict, a key is not in the features or is
        in the predictions already, or a feature is sparse.
    """
    _check_estimator("forward_features", estimator)
    chosen = _checked_keys(keys)

    def extend(spec: EstimatorSpec, features: Features, labels: Labels, config: RunConfig) -> EstimatorSpec:
        if spec.mode != ModeKeys.PREDICT:
            return spec
        forwarded = _chosen(features, chosen)
        predictions = _join("predictions", spec.predictions, forwarded)
        exports = {
            name: PredictOutput(_join(f"export_outputs[{name!r}]", output.outputs, forwarded))
            if name in (DEFAULT_SIGNATURE, "predict") and isinstance(output, PredictOutput)
            else output
            for name, output in (spec.export_outputs or {}).items()
        }
        return spec._replace(predictions=predictions, export_outputs=exports)

    return _extend(estimator, extend)


def _check_estimator(caller: str, estimator: object) -> None:
    if not isinstance(estimator, Estimator):
        raise TypeError(f"`{caller}` needs an `est.Estimator`; got {estimator!r}.")


def _extend(estimator: Estimator, extend: Callable[..., EstimatorSpec]) -> Estimator:
    # With `params`, although it has no use for them: a model_fn without is refused where an Estimator has some.
    def model_fn(features: Features, labels: Labels, mode: str, params: Any, config: RunConfig) -> EstimatorSpec:
        del params  # of the new Estimator, for its input_fn: the same
        spec = estimator.model_fn(features, labels, mode, config)
        return extend(spec, features, labels, config)

    return Estimator(model_fn, estimator.model_dir, estimator.config, estimator.params, estimator.warm_start_from)


def _checked_keys(keys: object) -> tuple[str, ...] | None:
    if keys is None:
        return None
    if isinstance(keys, str):
        return (keys,)
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"keys of `forward_features` must be a string or a list of strings; got {keys!r}.")
    return tuple(keys)


def _chosen(features: Features, keys: tuple[str, ...] | None) -> dict[str, Any]:
    if not isinstance(features, dict):
        raise ValueError(
            "`forward_features` needs features that are a dict, to know them by their keys; "
            f"got features of type {type(features).__name__}."
        )
    keys = tuple(features) if keys is None else keys
    unknown = [key for key in keys if key not in features]
    if unknown:
        raise ValueError(f"keys of `forward_features` should exist in features: {unknown} not in {sorted(features)}.")
    for key in keys:
        if has_sparse(features[key]):
            raise ValueError(
                f"`forward_features` cannot forward the feature {key!r}, which is sparse. Leave it out by `keys`, "
                "or let input_fn add it as an array."
            )
    return {key: features[key] for key in keys}


def _join(name: str, outputs: object, forwarded: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(outputs, dict):
        raise ValueError(
            f"Predictions should be a dict to be able to forward features; got {type(outputs).__name__}. "
            "Name them in the model_fn, for example `predictions={'output': output}`."
        )
    twice = sorted(forwarded.keys() & outputs.keys())
    if twice:
        raise ValueError(
            f"Cannot forward features {twice}, since {name} has them already. "
            "Choose other features by keys of `forward_features`."
        )
    return {**outputs, **forwarded}
