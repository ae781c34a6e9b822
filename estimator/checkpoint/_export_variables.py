"""Variables of a checkpoint as a file that other libraries read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from estimator.checkpoint._named_arrays import close_matches
from estimator.checkpoint._readers import Reader, read_newest
from estimator.checkpoint._transpose import Transpose
from estimator.runtime._extras import import_extra
from estimator.storage._array_files import SAFETENSORS_DTYPES
from estimator.storage._files import expand, write

_CALLER = "est.export_variables"
_STEP = "global_step"

Names = Mapping[str, str | Transpose] | Callable[[str], str | Transpose]


def export_variables(
    path: str | os.PathLike[str],
    ckpt_dir_or_file: str | os.PathLike[str],
    names: Names | None = None,
    vars_to_export: str = ".*",
) -> None:
    """Writes the variables of a checkpoint into a .safetensors file, for PyTorch and other libraries.

    It is the other way of `WarmStartSettings`: its `var_name_to_prev_var_name` serves as `names` here, and a variable
    that is the transpose of an array there is transposed back. Optimizer slots and the global step are left out.

    >>> import estimator as est, numpy as np, os, tempfile
    >>> checkpoint, path = (os.path.join(tempfile.mkdtemp(), name) for name in ("weights.npz", "model.safetensors"))
    >>> np.savez(checkpoint, **{"dense/kernel": np.zeros((3, 2)), "dense/bias": np.zeros(2)})
    >>> def old_name(name):
    ...     scope, kind = name.split("/")
    ...     return est.Transpose(f"{scope}.weight") if kind == "kernel" else f"{scope}.{kind}"
    >>> est.export_variables(path, checkpoint, old_name)  # doctest: +SKIP
    >>> est.list_variables(path)  # doctest: +SKIP
    [('dense.bias', [2]), ('dense.weight', [2, 3])]

    Args:
      path: of the file, which ends with ".safetensors"; an existing one is replaced.
      ckpt_dir_or_file: as for `est.list_variables`: a model_dir, for its newest checkpoint, or a checkpoint.
      names: the names in the file: a dict by the names of variables (others keep their names), or a function of a name.
        Each is a string or an `est.Transpose`.
      vars_to_export: a regular expression that the beginning of a variable's name matches.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: the path has another ending; there is no such checkpoint; nothing matches; the format lacks the dtype
        of a variable; `names` has a name that no variable has, or two variables get the same one. No file is written.
    """
    path = expand(path)
    if not path.endswith(".safetensors"):
        raise ValueError(f"`{_CALLER}` writes a file *.safetensors; got the path {path!r}.")
    save = import_extra(_CALLER, "safetensors.numpy", "safetensors").save
    arrays = read_newest(_CALLER, ckpt_dir_or_file, lambda reader: _read(reader, names, vars_to_export))
    for name, array in arrays.items():
        if array.dtype.name not in SAFETENSORS_DTYPES.values():
            raise ValueError(
                f"`{_CALLER}`: {name!r} is of dtype {array.dtype}, which a .safetensors file lacks. Leave it out by "
                "`vars_to_export`."
            )
    # The format has the bytes of arrays in C order; `np.ascontiguousarray` would give a scalar the shape [1].
    write(path, save({name: np.asarray(array, order="C") for name, array in arrays.items()}))


def _read(reader: Reader, names: Names | None, pattern: str) -> dict[str, np.ndarray]:
    chosen = [name for name in reader.variables() if name != _STEP and re.match(pattern, name)]
    if not chosen:
        raise ValueError(
            f"`{_CALLER}`: vars_to_export={pattern!r} matches no variable of {reader.path}, such as "
            f"{close_matches(pattern, reader.variables())}."
        )
    if isinstance(names, Mapping):
        unknown = sorted(names.keys() - set(chosen))
        if unknown:
            raise ValueError(
                f"`{_CALLER}`: names has {unknown}, which are not exported of {reader.path}. Near the first one, these "
                f"are: {close_matches(unknown[0], chosen)}."
            )
    values = reader.read(chosen)
    arrays: dict[str, np.ndarray] = {}
    for variable in chosen:
        there = _name_there(names, variable)
        name = there.name if isinstance(there, Transpose) else there
        if name in arrays:
            raise ValueError(f"`{_CALLER}`: names gives {name!r} to {variable!r} and to another variable. Change one.")
        arrays[name] = there.invert(values[variable]) if isinstance(there, Transpose) else values[variable]
    return arrays


def _name_there(names: Names | None, variable: str) -> str | Transpose:
    there: Any = variable
    if names is not None:
        there = names.get(variable, variable) if isinstance(names, Mapping) else names(variable)
    if not isinstance(there, str | Transpose) or not there:
        raise ValueError(
            f"`{_CALLER}`: names must give a string or an `est.Transpose` for each variable; got {there!r} for "
            f"{variable!r}."
        )
    return there
