"""Checks of the arguments of an Estimator."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable

from absl import logging

from estimator.checkpoint._model_dir import check_model_dir
from estimator.core._model_fn import ModelFn
from estimator.core._run_config import RunConfig


def chosen_dir(model_dir: str | os.PathLike[str] | None, config: RunConfig) -> str:
    path = os.fspath(model_dir) if isinstance(model_dir, os.PathLike) else model_dir
    given, configured = RunConfig(model_dir=path or None).model_dir, config.model_dir  # checked alike
    if given and configured and given != configured:
        raise ValueError(
            "`model_dir` are set both in constructor and `RunConfig`, but with different values: "
            f"{given!r} and {configured!r}. Set it in one place."
        )
    if chosen := given or configured:
        return check_model_dir(chosen)
    # As in TensorFlow nobody removes it: `estimator.model_dir` leads to its checkpoints.
    made = tempfile.mkdtemp()
    logging.warning("Using temporary folder as model directory: %s", made)
    return made


def needs_params(model_fn: ModelFn) -> bool:
    params = inspect.signature(model_fn).parameters.get("params")
    return params is not None and params.default is params.empty


def writer_of(format: object, has_receiver: bool) -> Callable[..., None] | None:
    """The function that writes a format of `export_model` beside the programs of jax, or None if there is none.

    Raises:
      ValueError: the format is unknown, or takes no serving_input_receiver_fn.
      ImportError: the package that the format needs is not installed.
    """
    if format is None:
        format = "saved_model" if has_receiver else "jax"
    if format == "jax":
        if has_receiver:
            raise ValueError(
                'A serving_input_receiver_fn is for `format="saved_model"`, in which TensorFlow reads requests; got '
                "format='jax'. For programs of jax give example_features: `next(iter(input_fn()))[0]`."
            )
        return None
    if format != "saved_model":
        raise ValueError(f'format of `export_model` must be "jax" or "saved_model"; got {format!r}.')
    from estimator.integrations._saved_model import import_tensorflow, write_saved_model

    # Before the model is computed and exported, which may take minutes.
    import_tensorflow()
    return write_saved_model
