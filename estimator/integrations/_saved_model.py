"""SavedModels of TensorFlow, made of the programs that an export has.

A SavedModel holds each signature as one operation of TensorFlow, `XlaCallModule`, whose program is StableHLO: what
`jax.export` has made, written once more in the version of StableHLO that the installed TensorFlow reads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import export

from estimator.core._export_output import ClassificationOutput, RegressionOutput
from estimator.export._export_model import Signature
from estimator.export._serving import ServingInputReceiver
from estimator.integrations._requests import Requests, shape_of
from estimator.runtime._extras import import_extra


def import_tensorflow() -> Any:
    """Imports TensorFlow, or says how to install it."""
    return import_extra('export_model(format="saved_model")', "tensorflow", "saved_model")


def write_saved_model(
    folder: str,
    signatures: Mapping[str, Signature],
    weights: Mapping[str, np.ndarray],
    receiver: ServingInputReceiver | None,
) -> None:
    """Writes a SavedModel into a folder, beside what is there.

    Args:
      folder: a local one.
      signatures: programs of weights and features, by name.
      weights: the arrays by name, the same for all programs.
      receiver: what clients send; if None, the features.
    """
    tf = import_tensorflow()
    module = tf.Module()
    # A TensorFlow that sees GPUs would put variables there, where jax has taken the memory.
    with tf.device("CPU:0"), tempfile.TemporaryDirectory() as vocabularies:
        variables = {name: tf.Variable(value, trainable=False) for name, value in weights.items()}
        module.weights = list(variables.values())  # those that the module does not have are not saved
        requests = Requests(tf, receiver, vocabularies)
        module.tables = list(requests.tables.values())
        functions = {name: _as_function(tf, each, variables, requests) for name, each in signatures.items()}
        tf.saved_model.save(module, folder, signatures=functions)
    if requests.parses:
        # Of all others TensorFlow's own name, Predict, is right.
        methods = tf.compat.v1.saved_model.signature_def_utils.MethodNameUpdater(folder)
        for name, signature in signatures.items():
            methods.replace_method_name(name, _method(tf, signature))
        methods.save()


def _method(tf: Any, signature: Signature) -> Any:
    """The request of TensorFlow Serving that a signature answers, if it takes serialized examples."""
    if signature.kind is ClassificationOutput:
        return tf.saved_model.CLASSIFY_METHOD_NAME
    return (
        tf.saved_model.REGRESS_METHOD_NAME if signature.kind is RegressionOutput else tf.saved_model.PREDICT_METHOD_NAME
    )


def _as_function(tf: Any, signature: Signature, variables: Mapping[str, Any], requests: Requests) -> Any:
    """The signature as a function of TensorFlow whose inputs and outputs have the names that clients use."""
    call = _as_operation(tf, signature.program)
    (_, features), _ = jax.tree.unflatten(signature.program.in_tree, signature.program.in_avals)
    is_predict = _method(tf, signature) == tf.saved_model.PREDICT_METHOD_NAME

    def run(**inputs: Any) -> dict[str, Any]:
        outputs = call(variables, requests.read(inputs, features))
        if signature.class_names:
            # As TensorFlow's heads have it: a row of all names for each example.
            rows = tf.shape(next(iter(inputs.values())))[0]
            outputs["classes"] = tf.tile(tf.constant([signature.class_names]), [rows, 1])
        for name, names in signature.strings.items():
            ids = outputs[name]
            outputs[name] = tf.strings.as_string(ids) if names is None else tf.gather(tf.constant(names), ids)
        return outputs if is_predict or not requests.parses else _as_answer(tf, outputs)

    specs = requests.inputs(features, serialized="examples" if is_predict else tf.saved_model.CLASSIFY_INPUTS)
    return tf.function(run, autograph=False).get_concrete_function(**specs)


def _as_answer(tf: Any, outputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs of a classification or a regression as TensorFlow Serving takes them."""
    if "value" in outputs:
        return {tf.saved_model.REGRESS_OUTPUTS: tf.cast(outputs["value"], tf.float32)}
    answer = {}
    if "scores" in outputs:
        answer[tf.saved_model.CLASSIFY_OUTPUT_SCORES] = tf.cast(outputs["scores"], tf.float32)
    if "classes" in outputs:
        # A class is a string for clients, and an example has a row of them.
        classes = outputs["classes"]
        classes = classes if classes.dtype == tf.string else tf.strings.as_string(classes)
        answer[tf.saved_model.CLASSIFY_OUTPUT_CLASSES] = classes if classes.shape.rank > 1 else classes[:, None]
    return answer


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
            Sout=[shape_of(x) for x in program.out_avals],
            platforms=[name.upper() for name in program.platforms],
        )
        return jax.tree.unflatten(program.out_tree, outputs)

    return call
