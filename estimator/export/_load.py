"""Runs exported models, without their model code."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from estimator.checkpoint._export_folder import METADATA_FILE, ExportFolder, find_export
from estimator.core._export_output import DEFAULT_SIGNATURE
from estimator.core._typing import Features, PyTree
from estimator.export._export_model import name_leaves
from estimator.runtime._program import Program
from estimator.storage._files import expand
from estimator.variables._class_names import ClassNames


class ExportedModel:
    """A model that `load_exported` has read.

    `model(features, signature="serving_default")` returns the outputs as numpy arrays by name: for a `PredictOutput`
    its keys (nested ones joined by "/", a single array is "output"; classes of a head are strings), for a
    `ClassificationOutput` "scores" and "classes", for a `RegressionOutput` "value". Each batch size is compiled at its
    first call. Threads may share it.

    Attributes:
      path: the folder.
      metadata: the contents of its `metadata.json`, such as "global_step", "platforms", "versions".
      signatures: the names of its signatures.
      features: the expected features, `jax.ShapeDtypeStruct`s; a first dimension "b" is any batch size.
    """

    def __init__(self, path: str) -> None:
        folder = ExportFolder(path)
        self.path = path
        self.metadata: dict[str, Any] = folder.metadata
        self.signatures: tuple[str, ...] = tuple(self.metadata["signatures"])
        programs = {name: self._program(folder, entry["file"]) for name, entry in self.metadata["signatures"].items()}
        first = programs[DEFAULT_SIGNATURE]
        # Before weights are put on a device: on the wrong platform that would raise an error of jax.
        _check_process(path, first)
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in first.in_avals]
        (_, self.features), _ = jax.tree.unflatten(first.in_tree, structs)
        self._programs = {name: Program(program.call) for name, program in programs.items()}
        self._weights = jax.device_put(folder.weights)

    def __call__(self, features: Features, signature: str = DEFAULT_SIGNATURE) -> dict[str, np.ndarray]:
        if signature not in self._programs:
            raise ValueError(f"{self.path} has no signature {signature!r}; it has {sorted(self.signatures)}.")
        _check_features(features, self.features)
        outputs = jax.device_get(self._programs[signature](self._weights, features))
        entry = self.metadata["signatures"][signature]
        for name, names in entry.get("strings", {}).items():
            outputs[name] = np.asarray(ClassNames(outputs[name], names))
        names = entry.get("class_names")
        return outputs if names is None else {**outputs, "classes": np.array(names)}

    def __repr__(self) -> str:
        return f"ExportedModel({self.path!r}, signatures={list(self.signatures)})"

    def _program(self, folder: ExportFolder, name: str) -> export.Exported:
        data = folder.read(name)
        try:
            program = export.deserialize(data)
            (weights, _), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
            kinds = {key: (x.shape, x.dtype) for key, x in weights.items()}
        except Exception as e:  # parsing bytes raises many kinds
            raise ValueError(
                f"jax {jax.__version__} cannot read {os.path.join(self.path, name)}, which jax "
                f"{self.metadata['versions']['jax']} wrote. jax reads programs of versions up to six months older and "
                "three weeks newer. Write it once more: `python -m estimator.renew`."
            ) from e
        # Files that do not belong together would fail within XLA, or give wrong numbers.
        if kinds != {key: (x.shape, x.dtype) for key, x in folder.shapes.items()}:
            raise folder.make_error(f"{name} is a program for other weights than those of {METADATA_FILE}")
        return program


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """Loads a model that `Estimator.export_model` has written, ready to be called.

    TensorFlow's counterpart is a predictor from a SavedModel; neither model_fn nor checkpoint is needed. The README
    in the folder shows how to do the same with only jax and numpy. As jax promises, a program can be read for six
    months after the release of the jax that exported it, and by jax versions up to three weeks older.

    >>> import estimator as est, numpy as np, optax, tempfile
    >>> def model_fn(features, labels, mode):
    ...     y = features["x"] * est.get_variable("w", initializer=np.float32(2))
    ...     if mode == est.ModeKeys.PREDICT:
    ...         return est.EstimatorSpec(mode, predictions={"y": y})
    ...     loss = est.losses.mean_squared_error(labels, y)
    ...     return est.EstimatorSpec(mode, loss=loss, train_op=est.Optimizer(optax.sgd(0.5)).minimize(loss))
    >>> x = {"x": np.ones(4, np.float32)}
    >>> estimator = est.Estimator(model_fn, tempfile.mkdtemp()).train(lambda: [(x, 3 * x["x"])])
    >>> path = estimator.export_model(tempfile.mkdtemp(), x)
    >>> model = est.load_exported(path)
    >>> model.features
    {'x': ShapeDtypeStruct(shape=(b,), dtype=float32)}
    >>> model({"x": np.array([1, 2], np.float32)})
    {'y': array([3., 6.], dtype=float32)}

    Args:
      path: the path that `export_model` returned, or its `export_dir_base`, for the newest model in it.

    Raises:
      ValueError: there is no exported model, one of its files is missing or damaged, or this process has another
        platform or cannot have its dtypes. When called, the model raises it for an unknown signature, and for features
        with other names, shapes or dtypes.
    """
    return ExportedModel(find_existing(path))


def find_existing(path: str | os.PathLike[str]) -> str:
    """Finds the folder of the exported model at `path`, or of the newest one in it; there must be one."""
    base = expand(path)
    folder = find_export(base)
    if folder is None:
        raise ValueError(
            f"There is no exported model at {base}: neither a {METADATA_FILE} nor a folder called by a number that has "
            "one. Give the path that `Estimator.export_model` returned, or its export_dir_base."
        )
    return folder


def _check_process(path: str, program: export.Exported) -> None:
    here = export.default_export_platform()
    if here not in program.platforms:
        raise ValueError(
            f"{path} was exported for {', '.join(program.platforms)}, but jax runs on {here} here. Export it with "
            f"`platforms=[..., {here!r}]`, or set JAX_PLATFORMS={program.platforms[0]}."
        )
    wide = [x.dtype.name for x in program.in_avals if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype]
    if wide:
        raise ValueError(
            f"{path} was exported with jax_enable_x64 and has arrays of dtype {wide[0]}. "
            'Call `jax.config.update("jax_enable_x64", True)` before loading it.'
        )


def _check_features(features: Features, expected: PyTree) -> None:
    arrays, structs = name_leaves(features, "features"), name_leaves(expected, "features")
    missing, extra = sorted(structs.keys() - arrays.keys()), sorted(arrays.keys() - structs.keys())
    if missing or extra:
        raise ValueError(
            f"The exported model takes the features {sorted(structs)}; missing: {missing}, extra: {extra}."
        )
    if jax.tree.structure(features) != jax.tree.structure(expected):  # type: ignore[operator]
        raise ValueError(f"The exported model takes features in containers such as {expected!r}; got {features!r}.")
    for name, like in structs.items():
        _check_feature(name, arrays[name], like)
    sizes = {name: len(value) for name, value in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"All features of a batch must have the same batch size (first dimension); got {sizes}.")


def _check_feature(name: str, value: object, like: jax.ShapeDtypeStruct) -> None:
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"The feature {name!r} must be an array, {_type_of(like)}; got {value!r}.")
    fits = value.ndim == len(like.shape) and len(value) > 0 and all(map(_fits, value.shape, like.shape))
    dtype = value.dtype
    if jnp.issubdtype(dtype, np.number):
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # without jax_enable_x64, jax takes 64 bits as 32
    if not fits or dtype != like.dtype:
        raise ValueError(f"The feature {name!r} must be {_type_of(like)}; got {_type_of(value)}.")


def _fits(size: int, like: object) -> bool:
    return not isinstance(like, int) or size == like


def _type_of(array: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"
