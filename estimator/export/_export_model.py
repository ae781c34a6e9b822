"""Export: what a model_fn predicts, as programs of `jax.export` and arrays that numpy reads.

An exported folder holds

    metadata.json               features, signatures, weights, global_step, platforms, arguments, versions
    weights.npz                 one array per variable, and "global_step" and "key"
    <signature>.jaxexport       `program(weights, features) -> {name: array}`, serialized by jax
    checksums.json              the sizes and CRC-32C of these files, and of the assets
    README.md                   how to load it without this library
    assets.extra/               what the caller gave
    saved_model.pb, variables/, assets/
                                for `format="saved_model"`: a SavedModel of the same signatures

Of a part of a model, `export_model(..., outputs=[...])`, it holds the weights and features that this part needs.

Weights are arguments of the programs. numpy has no name for dtypes such as bfloat16 and saves their bytes, so the
metadata has the dtypes. A typed PRNG key is saved as its numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from jax import export

from estimator.checkpoint._export_folder import (
    CHECKSUMS_FILE,
    FORMAT,
    METADATA_FILE,
    README_FILE,
    WEIGHTS_FILE,
    ExportFolder,
)
from estimator.checkpoint._named_arrays import from_arrays, to_arrays
from estimator.core._batch import abstract, check_batch
from estimator.core._bcoo import is_jax_sparse
from estimator.core._export_output import DEFAULT_SIGNATURE, ExportOutput, PredictOutput
from estimator.core._frame import Frame
from estimator.core._mode_keys import ModeKeys
from estimator.core._model_fn import ModelFn
from estimator.core._replica import Replica
from estimator.core._state import State
from estimator.core._typing import Features, PyTree
from estimator.export._arguments import describe_features
from estimator.export._chosen_outputs import check_rows, checked_outputs, choose_outputs, prune_unused
from estimator.export._serving import ServingInputReceiver, as_receiver, is_receiver
from estimator.runtime._program import Program
from estimator.steps._gradients import run_model_fn
from estimator.storage._files import expand, is_url, list_dir, rename
from estimator.storage._folders import upload
from estimator.variables._class_names import are_names

ASSETS_DIR = "assets.extra"
_EXPORT = re.compile(r"\d{10}")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

_README = """# An exported model

jax, numpy and flatbuffers (which jax uses to read programs) run it. In this folder:

```python
import json
import jax, jax.export
import numpy as np

with open("metadata.json") as file:
    metadata = json.load(file)
with np.load("weights.npz") as saved:
    weights = {{name: saved[name].view(array["dtype"]) for name, array in metadata["weights"].items()}}
with open(metadata["signatures"]["serving_default"]["file"], "rb") as file:
    predict = jax.jit(jax.export.deserialize(bytearray(file.read())).call)

features = {features}
outputs = predict(weights, features)  # a dict of arrays by name
```

{batch} It was written by jax {jax}; jax reads exported programs for at least six months.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `export_model`, checked.

    Attributes:
      features: `jax.ShapeDtypeStruct`s with the batch size of the example, or `batch_size`.
      assets: source files by destination.
      batch_size: of the program; if None, it takes any.
      platforms: names of jax's platforms.
      outputs: the names of the values to export; if None, the `export_outputs`.
      receiver: what clients send; if None, the features.
    """

    features: Features
    assets: dict[str, str]
    batch_size: int | None
    platforms: tuple[str, ...]
    outputs: tuple[str, ...] | None
    receiver: ServingInputReceiver | None = None

    def symbolic_features(self) -> PyTree:
        """The features to export for: their first dimension is "b", unless there is a `batch_size`."""
        widths = {} if self.receiver is None else self.receiver.widths
        # One symbol for the rows of all features, which have the same number of them.
        names = [*dict.fromkeys(["b"] * (self.batch_size is None) + [*widths.values()])]
        if not names:
            return self.features
        symbols = dict(zip(names, export.symbolic_shape(", ".join(names)), strict=True))
        rows = symbols.get("b", self.batch_size)
        if not widths:
            return jax.tree.map(lambda x: x.update(shape=(rows, *x.shape[1:])), self.features)
        sizes = {key: [symbols[widths[key]]] if key in widths else x.shape[1:2] for key, x in self.features.items()}
        return {key: x.update(shape=(rows, *sizes[key], *x.shape[2:])) for key, x in self.features.items()}


@dataclasses.dataclass(frozen=True)
class Signature:
    """One of the programs of an export.

    Attributes:
      kind: the class of its `ExportOutput`.
      program: a function of weights and features that returns arrays by name.
      class_names: the strings of the "classes" of a `ClassificationOutput`; none if they are integers.
      strings: the outputs of a `PredictOutput` that are positions in names, and the names; None for the numbers
        themselves.
    """

    kind: type[ExportOutput]
    program: export.Exported
    class_names: list[str]
    strings: dict[str, tuple[str, ...] | None]

    def describe(self, file: str) -> dict[str, Any]:
        """Its entry in the metadata."""
        outputs = jax.tree.unflatten(self.program.out_tree, self.program.out_avals)
        entry = {"file": file, "outputs": _describe_arrays(outputs)}
        if self.class_names:
            entry["class_names"] = self.class_names
        return {**entry, "strings": self.strings} if self.strings else entry


def check_arguments(example_features: Any, assets_extra: Any, batch_size: Any, platforms: Any, outputs: Any) -> Options:
    """Checks all arguments of `export_model`, before anything is read or computed."""
    receiver = None
    if is_receiver(example_features):
        receiver = as_receiver("export_model", example_features)
        if batch_size is not None:
            raise ValueError(
                f"`export_model` got batch_size={batch_size!r} and a serving_input_receiver_fn. Give its builder "
                f"`default_batch_size={batch_size!r}` instead."
            )
        example_features, batch_size = receiver.features, receiver.batch_size
    if example_features is None:
        raise TypeError(
            "`export_model` needs example_features: arrays, or `jax.ShapeDtypeStruct`s, as the model_fn takes them, "
            f"for example `next(iter(input_fn()))[0]`; got {example_features!r}."
        )
    _check_containers("example_features", example_features)
    check_batch(example_features)
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size of `export_model` must be a positive int, or None for any; got {batch_size!r}.")
    names = (platforms,) if isinstance(platforms, str) else tuple(platforms or ())
    unknown = [name for name in names if name not in PLATFORMS]
    if unknown or not names:
        raise ValueError(f"platforms of `export_model` must be some of {list(PLATFORMS)}; got {platforms!r}.")

    features = jax.tree.map(abstract, example_features)
    if batch_size is not None:
        features = jax.tree.map(lambda x: x.update(shape=(batch_size, *x.shape[1:])), features)
    return Options(features, _checked_assets(assets_extra), batch_size, names, checked_outputs(outputs), receiver)


def write_export(
    base: str | os.PathLike[str],
    call: ModelFn,
    state: State,
    options: Options,
    write_more: Callable[..., None] | None = None,
) -> str:
    """Writes the model into a new folder in `base`, and returns its path.

    Args:
      call: the model_fn, as a function of features, labels and mode.
      state: the state in PREDICT, on any devices.
      write_more: writes the model into the folder in another format too; a function of the folder, the signatures, the
        weights, and what clients send.
    """
    model = _as_function(call, state, options.outputs)
    arrays = to_arrays(state)
    weights = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    # First with the batch size of the example: an error in the model_fn is raised as it is, not as an error of the
    # export.
    outputs = jax.eval_shape(model, weights, options.features)
    for name, output in outputs.items():
        if not _arrays(output):
            raise ValueError(f"The model_fn offers the signature {name!r} for export, but without any array.")
    signatures = {name: _export_signature(model, name, output, weights, options) for name, output in outputs.items()}
    default = signatures[DEFAULT_SIGNATURE].program  # the arguments of all are the same
    (weights, features), _ = jax.tree.unflatten(default.in_tree, default.in_avals)
    # The user names the signatures: "a/b" must be one file, not a folder.
    files = {name: urllib.parse.quote(name, safe=" ") + ".jaxexport" for name in signatures}
    metadata = {
        "format": FORMAT,
        "global_step": int(state.global_step),
        "features": _describe_arrays(name_leaves(features, alone="features")),
        "signatures": {name: signature.describe(files[name]) for name, signature in signatures.items()},
        "weights": _describe_arrays(weights),
        "platforms": list(options.platforms),
        "arguments": {
            "features": describe_features(options.features),
            "batch_size": options.batch_size,
            "outputs": options.outputs,
            "has_receiver": options.receiver is not None,
        },
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "numpy": np.__version__},
    }

    def fill(folder: str) -> None:
        # `weights` are now the arguments of the programs: if `outputs` are given, only the variables that they need.
        values = jax.device_get({name: arrays[name] for name in weights})
        # numpy has no name for the dtypes of jax alone: their bytes are saved, and the metadata has the name.
        plain = {name: x if x.dtype.isbuiltin == 1 else x.view(f"V{x.itemsize}") for name, x in values.items()}
        np.savez(os.path.join(folder, WEIGHTS_FILE), **plain)
        for name, signature in signatures.items():
            with open(os.path.join(folder, files[name]), "wb") as file:
                file.write(signature.program.serialize())
        for destination, source in options.assets.items():
            path = os.path.join(folder, ASSETS_DIR, destination)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            shutil.copy(source, path)
        with open(os.path.join(folder, README_FILE), "w", encoding="utf-8") as file:
            has_strings = any(signature.strings for signature in signatures.values())
            file.write(_readme(features, options.batch_size, has_strings))
        if write_more is not None:
            write_more(folder, signatures, values, options.receiver)
        # Written after the files that it names: without it a folder is not an export.
        with open(os.path.join(folder, METADATA_FILE), "w", encoding="utf-8") as file:
            json.dump(metadata, file, indent=1)
        ExportFolder(folder).seal(without=(README_FILE,))

    try:
        path = _new_folder(expand(base), fill)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"`export_model` cannot write the model into {os.fspath(base)!r}, and has left nothing there "
            f"({error}). Look whether the disk is full, or the directory cannot be written",
        ) from error
    logging.info("Exported %s at step %d to %s", ", ".join(signatures), metadata["global_step"], path)
    return path


def name_leaves(tree: PyTree, alone: str = "output") -> dict[str, Any]:
    """Names leaves by the keys on their path, joined by "/", also within a tuple as a key. A single leaf is `alone`."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=are_names):
        name = "/".join(map(_key_name, path)) or alone
        if name in leaves:
            raise ValueError(f"Two arrays are called {name!r} in what is to be exported. Rename one of them.")
        leaves[name] = leaf
    return leaves


def _key_name(key: Any) -> str:
    # The predictions of a MultiHead have pairs as keys.
    if isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, tuple):
        return "/".join(map(str, key.key))
    return jax.tree_util.keystr((key,), simple=True)


def _as_function(
    call: ModelFn, like: State, names: tuple[str, ...] | None
) -> Callable[[dict[str, Any], PyTree], dict[str, ExportOutput]]:
    """A function of weights by name and features that returns the export outputs by signature.

    If there are `names`, the values called so are the only signature.
    """
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)

    def model(weights: dict[str, Any], features: Features) -> dict[str, ExportOutput]:
        state = from_arrays(weights, structs)
        frame = Frame(
            ModeKeys.PREDICT,
            state.variables,
            state.slots,
            key=jax.random.fold_in(state.key, state.global_step),
            global_step=state.global_step,
            # A replicated model_fn runs as one tower, on the one device that serves it.
            replica=Replica(one_tower=True),
        )
        spec = run_model_fn(lambda: call(features, None, ModeKeys.PREDICT), frame, differentiate=False).spec
        if names is None:
            return spec.export_outputs or {}
        return {DEFAULT_SIGNATURE: PredictOutput(choose_outputs(names, name_leaves(spec.predictions), spec.reported))}

    return model


def _export_signature(
    model: Callable[..., Any], name: str, output: ExportOutput, weights: dict[str, Any], options: Options
) -> Signature:
    def signature(weights: dict[str, Any], features: Features) -> dict[str, Any]:
        return _arrays(model(weights, features)[name])

    args = signature, weights, options.symbolic_features()
    try:
        fn, weights, features = args if options.outputs is None else prune_unused(*args)
        program = Program(fn).export(options.platforms, weights, features)
    except Exception as e:
        if options.batch_size is not None:
            raise
        # jax raises many kinds; the model_fn has run before with a batch of the example's size
        reason = str(e).partition("\n")[0]
        raise ValueError(
            f"`export_model` could not export the signature {name!r} for batches of any size on {options.platforms}: "
            f"{type(e).__name__}: {reason} A model_fn that is exported so must not need the number of examples as a "
            "Python int: write `x.shape[0]` for `len(x)`, and no `if` or `for` over it. Or export for one size by "
            "`export_model(..., batch_size=...)`."
        ) from e
    if options.outputs is not None:
        rows = jax.tree.leaves(features)[0].shape[0]
        check_rows(jax.tree.unflatten(program.out_tree, program.out_avals), rows)
    return Signature(type(output), program, _class_names(output), _strings(output))


def _arrays(output: ExportOutput) -> dict[str, Any]:
    leaves = name_leaves(output.outputs if isinstance(output, PredictOutput) else output)
    return {name: leaf.ids if are_names(leaf) else leaf for name, leaf in leaves.items()}


def _strings(output: ExportOutput) -> dict[str, tuple[str, ...] | None]:
    leaves = name_leaves(output.outputs) if isinstance(output, PredictOutput) else {}
    return {name: leaf.names for name, leaf in leaves.items() if are_names(leaf)}


def _describe_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    def sizes(shape: Any) -> list[Any]:
        return [size if isinstance(size, int) else str(size) for size in shape]

    return {name: {"shape": sizes(x.shape), "dtype": np.dtype(x.dtype).name} for name, x in arrays.items()}


def _class_names(output: ExportOutput) -> list[str]:
    """The strings of a ClassificationOutput, which are the same for all batches; a program cannot hold strings."""
    classes = getattr(output, "classes", None)
    is_strings = isinstance(classes, np.ndarray) and classes.dtype.kind in "SU"
    return classes.astype(str).tolist() if is_strings else []  # type: ignore[union-attr]


class _Zeros:
    """Stand-in for an array; its `repr` is `np.zeros(shape, dtype)`, for the README of an export."""

    def __init__(self, like: jax.ShapeDtypeStruct) -> None:
        self._like = like

    def __repr__(self) -> str:
        shape = tuple(size if isinstance(size, int) else 1 for size in self._like.shape)
        return f'np.zeros({shape}, "{np.dtype(self._like.dtype).name}")'


def _readme(features: Features, batch_size: int | None, has_strings: bool) -> str:
    batch = "Batches may have any size." if batch_size is None else f"Batches have {batch_size} examples."
    if has_strings:
        batch += ' Outputs that "strings" of a signature in metadata.json names are positions in those strings.'
    return _README.format(features=jax.tree.map(_Zeros, features), batch=batch, jax=jax.__version__)


def _new_folder(base: str, fill: Callable[[str], None]) -> str:
    """Creates a folder in `base`, named by the time in seconds, or by a later one so that it is the last.

    `fill` fills and seals the folder under another name, and it is then renamed. A store has no renames: there metadata
    and manifest are uploaded last (see `find_export`).
    """
    if is_url(base):
        with tempfile.TemporaryDirectory() as folder:
            fill(folder)
            path = os.path.join(base, str(_next_number(base)))
            upload(folder, path, last=(METADATA_FILE, CHECKSUMS_FILE))
            return path
    is_new = not os.path.isdir(base)
    temporary = os.path.join(base, f"temp-{uuid.uuid4().hex}")
    try:
        os.makedirs(temporary)
        fill(temporary)
        number = _next_number(base)
        # Two exports in one second: the later one takes the next number.
        while True:
            path = os.path.join(base, str(number))
            if not os.path.exists(path):
                try:
                    rename(temporary, path)
                    return path
                except OSError:
                    if not os.path.exists(path):  # else another process was faster
                        raise
            number += 1
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(base)
        raise


def _next_number(base: str) -> int:
    later = (int(name) + 1 for name in list_dir(base) if _EXPORT.fullmatch(name))
    return max([int(time.time()), *later])  # the newest has the largest, even where others were removed


def _check_containers(name: str, tree: Any) -> None:
    """Raises for containers that could not be loaded without the user's code."""
    if is_jax_sparse(tree):
        raise TypeError(
            f"`export_model` cannot export for sparse features; got {name} = {tree!r}. Let the model_fn take dense "
            "arrays too, such as ids and weights of a fixed number of entries for each example, and export for these."
        )
    # Exactly these types: the process that loads the export may not have the class of a NamedTuple.
    if type(tree) in (list, tuple):
        for i, item in enumerate(tree):
            _check_containers(f"{name}[{i}]", item)
    elif type(tree) is dict:
        for key, item in tree.items():
            if not isinstance(key, str):
                raise TypeError(f"`export_model` needs strings as keys of features; {name} has the key {key!r}.")
            _check_containers(f"{name}[{key!r}]", item)
    elif tree is not None and not jax.tree_util.all_leaves([tree]):
        raise TypeError(
            f"`export_model` takes features in dicts, lists and tuples, which can be loaded without your code; got "
            f"{name} of type {type(tree).__name__}. Let the model_fn take a dict."
        )


def _checked_assets(assets_extra: Any) -> dict[str, str]:
    if assets_extra is None:
        return {}
    if not isinstance(assets_extra, Mapping):
        raise TypeError(
            "assets_extra must be a dict of source files by their destination, for example "
            f"{{'vocabulary.txt': '/data/vocabulary.txt'}}; got {assets_extra!r}."
        )
    assets = {}
    for destination, source in assets_extra.items():
        parts = os.path.normpath(destination).split(os.sep)
        # No asset may be written outside of the export.
        if os.path.isabs(destination) or parts[0] in ("..", "."):
            raise ValueError(
                f"assets_extra: {destination!r} must be a path within `{ASSETS_DIR}/`, such as 'words.txt'."
            )
        if not os.path.isfile(source):
            raise ValueError(f"assets_extra: there is no file {os.fspath(source)!r} to copy to {destination!r}.")
        assets[destination] = os.fspath(source)
    return assets
