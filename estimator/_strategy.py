"""Puts the model_fn of an Estimator into the towers of its config's strategies."""

from __future__ import annotations

from typing import Any

from estimator.core._estimator_spec import EstimatorSpec
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn, bind
from estimator.core._run_config import RunConfig
from estimator.core._typing import Features, Labels


def replicate_by(config: RunConfig, model_fn: ModelFn, params: object) -> ModelFn:
    """The model_fn in the towers of the config's strategies; as it is if there are none."""
    train, evaluate = config.train_distribute, config.eval_distribute
    if train is None and evaluate is None:
        return model_fn
    bind(model_fn, params)  # whose errors are about the user's own function, and come now
    in_train = model_fn if train is None else train.replicate(model_fn)
    if evaluate is None or evaluate is train:
        return in_train
    in_eval = evaluate.replicate(model_fn)

    def model_fn_by_mode(
        features: Features, labels: Labels, mode: str, params: Any = None, config: Any = None
    ) -> EstimatorSpec:
        chosen = in_eval if mode == ModeKeys.EVAL else in_train
        return bind(chosen, params, config)(features, labels, ModeKeys(mode))

    return model_fn_by_mode
