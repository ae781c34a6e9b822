"""SavedModels of TensorFlow, made of the programs that an export has.

A SavedModel holds each signature as one operation of TensorFlow, `XlaCallModule`, whose program is StableHLO: what
`jax.export` has made, written once more in the version of StableHLO that the installed TensorFlow reads.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from estimator.export._export_model import name_leaves
from estimator.runtime._extras import import_extra


def import_tensorflow() -> Any:
    """Imports TensorFlow, or says how to install it."""
    return import_extra('export_model(format="saved_model")', "tensorflow", "saved_model")


def write_saved_model(
    folder: str,
    programs: Mapping[str, export.Exported],
    weights: Mapping[str, np.ndarray],
    class_names: Mapping[str, Sequence[str]],
) -> None:
    """Writes a SavedModel into a folder, beside what is there.

    Args:
      folder: a local one.
      programs: functions of weights and features, by signature.
      weights: the arrays by name, the same for all programs.
      class_names: the strings of "classes", by signature.
    """
    tf = import_tensorflow()
    module = tf.Module()
    # A TensorFlow that sees GPUs would put variables there, where jax has taken the memory.
    with tf.device("CPU:0"):
        variables = {name: tf.Variable(value, trainable=False) for name, value in weights.items()}
        module.weights = list(variables.values())  # those that the module does not have are not saved
        signatures = {
            name: _as_signature(tf, program, variables, class_names.get(name)) for name, program in programs.items()
        }
        tf.saved_model.save(module, folder, signatures=signatures)


def _as_signature(
    tf: Any, program: export.Exported, variables: Mapping[str, Any], class_names: Sequence[str] | None
) -> Any:
    """The program as a function of TensorFlow whose inputs and outputs have the names of features and outputs."""
    call = _as_operation(tf, program)
    (_, features), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    named, structure = _name_inputs(features), jax.tree.structure(features)

    def signature(**inputs: Any) -> dict[str, Any]:
        arrays = [inputs[name] for name in named]
        outputs = call(variables, jax.tree.unflatten(structure, arrays))
        if class_names is not None:
            # As TensorFlow's heads have it: a row of all names for each example.
            outputs["classes"] = tf.tile(tf.constant([list(class_names)]), [tf.shape(arrays[0])[0], 1])
        return outputs

    specs = {name: tf.TensorSpec(_shape(x), x.dtype, name=name) for name, x in named.items()}
    return tf.function(signature, autograph=False).get_concrete_function(**specs)


def _name_inputs(features: Any) -> dict[str, Any]:
    """The features by names that TensorFlow takes for inputs: letters, digits and "_", a letter first; but
    "features_self" for "self", and "features_class" for "class" as for each word of Python."""
    inputs: dict[str, Any] = {}
    for name, feature in name_leaves(features, alone="features").items():
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        # TensorFlow passes inputs to its own methods by keyword.
        is_usable = plain[:1].isalpha() and not keyword.iskeyword(plain) and plain != "self"
        plain = plain if is_usable else f"features_{plain}"
        if plain.lower() in map(str.lower, inputs):
            raise ValueError(
                f"Two features have the name {plain!r} in a SavedModel, where letters of any case, digits and '_' make "
                f"a name: {name!r} is the second one. Rename one of them."
            )
        inputs[plain] = feature
    return inputs


def _as_operation(tf: Any, program: export.Exported) -> Any:
    """The program as a function of weights and features, tensors in the containers that jax has them in."""
    from jax.extend.mlir.dialects import stablehlo
    from tensorflow.compiler.mlir.stablehlo import stablehlo as stablehlo_of_tensorflow
    from tensorflow.compiler.tf2xla.python import xla

    # jax writes for readers that are a few weeks older than itself, which TensorFlow's releases are not.
    version = stablehlo_of_tensorflow.get_current_version()
    module = stablehlo.serialize_portable_artifact_str(program.mlir_module(), version)

    def call(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        outputs = xla.call_module(
            [leaves[i] for i in program.module_kept_var_idx],
            version=program.calling_convention_version,
            module=module,
            Tout=[tf.as_dtype(x.dtype) for x in program.out_avals],
            Sout=[_shape(x) for x in program.out_avals],
            platforms=[name.upper() for name in program.platforms],
        )
        return jax.tree.unflatten(program.out_tree, outputs)

    return call


def _shape(array: Any) -> list[int | None]:
    """A shape as TensorFlow has it, with None for any batch size."""
    return [size if isinstance(size, int) else None for size in array.shape]
