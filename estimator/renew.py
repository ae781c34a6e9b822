"""Writes an exported model once more, so that the jax of today, and later ones, can read it.

    python -m estimator.renew EXPORT_DIR --model_fn package.module:model_fn
    python -m estimator.renew EXPORT_DIR --model_fn package.module:model_fn --params '{"units": 10}'

Its weights are in the folder: neither the checkpoint nor the old programs are needed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from estimator._arguments import writer_of
from estimator.checkpoint._export_folder import ExportFolder
from estimator.checkpoint._named_arrays import describe, from_arrays, to_arrays
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn, bind
from estimator.core._run_config import RunConfig
from estimator.core._state import State
from estimator.export._arguments import read_features
from estimator.export._export_model import ASSETS_DIR, Options, check_arguments, write_export
from estimator.export._load import find_existing
from estimator.steps._transform import transform

__all__ = ["renew_export"]


def renew_export(
    path: str | os.PathLike[str], model_fn: ModelFn, params: Any = None, config: RunConfig | None = None
) -> str:
    """Writes an exported model once more, into a new folder beside it, and returns the new path.

    The new export has the weights, step, assets and arguments of the old one, and programs of the installed jax.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     y = features * est.get_variable("w", initializer=np.float32(2))
    ...     return est.EstimatorSpec(mode, predictions=y, loss=y.mean(), train_op=est.group())
    >>> x = np.ones(4, np.float32)
    >>> trained = est.Estimator(model_fn, tempfile.mkdtemp()).train(lambda: [(x, None)])
    >>> path = trained.export_model(tempfile.mkdtemp(), x)
    >>> new = renew_export(path, model_fn)
    >>> new > path, est.load_exported(new)(x)
    (True, {'output': array([2., 2., 2., 2.], dtype=float32)})

    Args:
      path: the path that `export_model` returned, or its export_dir_base, for the newest model in it.
      model_fn: the one that was exported; of a canned Estimator, its `model_fn`.
      params, config: passed on to it.

    Raises:
      ValueError: there is no exported model, one of its files is damaged, it does not have its arguments, or its
        weights do not fit the model_fn. Nothing is left behind.
    """
    folder = ExportFolder(find_existing(path))
    options = _read_options(folder)
    like = transform(model_fn, params, config).abstract_init(options.features, mode=ModeKeys.PREDICT)
    state = _as_state(folder, like, options)
    write_more = writer_of("saved_model" if "saved_model.pb" in folder.files else "jax", has_receiver=False)
    return write_export(os.path.dirname(folder.path), bind(model_fn, params, config), state, options, write_more)


def _read_options(folder: ExportFolder) -> Options:
    arguments = folder.metadata.get("arguments")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"The exported model at {folder.path} does not have the arguments of its export in metadata.json. Export "
            "it from its checkpoint by `Estimator.export_model`."
        )
    if arguments.get("has_receiver"):
        raise ValueError(
            f"The exported model at {folder.path} reads requests by a serving_input_receiver_fn, which is not in it. "
            "Its SavedModel does not expire; export it once more from its checkpoint by `Estimator.export_saved_model`."
        )
    files = folder.files
    assets = {name.removeprefix(f"{ASSETS_DIR}/"): file for name, file in files.items() if name.startswith(ASSETS_DIR)}
    try:
        return check_arguments(
            read_features(arguments["features"]),
            assets,
            arguments["batch_size"],
            folder.metadata["platforms"],
            arguments["outputs"],
        )
    except (LookupError, TypeError, ValueError) as error:
        raise folder.make_error(f"the arguments of its export are not what was written ({error})") from error


def _as_state(folder: ExportFolder, like: State, options: Options) -> State:
    """The weights of an export as a state of the model."""
    there, here = folder.shapes, to_arrays(like)
    # An export of a part of a model lacks the weights that the part does not need, so that any values will do.
    missing = [] if options.outputs else sorted(here.keys() - there.keys())
    unexpected = sorted(there.keys() - here.keys())
    mismatched = [
        f"{name}, {describe(there[name])} there, {describe(here[name])} in the model"
        for name in sorted(there.keys() & here.keys())
        if describe(there[name]) != describe(here[name])
    ]
    if missing or unexpected or mismatched:
        raise ValueError(
            f"The weights of the exported model at {folder.path} do not fit the model_fn; missing: {missing}, "
            f"unexpected: {unexpected}, mismatched: {mismatched}. Give the model_fn and the params that were exported."
        )
    zeros = {name: np.zeros(x.shape, x.dtype) for name, x in here.items()}
    step = {"global_step": np.asarray(folder.metadata["global_step"], here["global_step"].dtype)}
    return jax.device_put(from_arrays({**zeros, **folder.weights, **step}, like))


def _import_function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"write package.module:function; got {path!r}")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise argparse.ArgumentTypeError(f"the module {module} has no function {name!r}")
    return found


def _read_params(text: str) -> Mapping[str, Any]:
    params = json.loads(text)
    if not isinstance(params, dict):
        raise argparse.ArgumentTypeError(f"write a dict in JSON; got {text!r}")
    return params


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, or the given arguments, renews the export, and prints the new path."""
    parser = argparse.ArgumentParser(
        prog="python -m estimator.renew", description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument("export_dir", help="an exported model, or the folder around several, for its newest")
    parser.add_argument("--model_fn", required=True, type=_import_function, help="package.module:function")
    parser.add_argument("--params", type=_read_params, help="of the model_fn, a dict in JSON")
    args = parser.parse_args(arguments)
    # Training may run at the same time and use the memory of the GPU; programs for a GPU are exported without one.
    jax.config.update("jax_platforms", "cpu")
    print(renew_export(args.export_dir, args.model_fn, args.params))


if __name__ == "__main__":
    main()
