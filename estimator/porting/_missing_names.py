"""Errors that say what there is instead of TensorFlow's names, and modules that load names when they are used."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def check_arguments(caller: str, arguments: Mapping[str, Any]) -> None:
    """Raises a TypeError for the first of the arguments, which do not exist here, and says what to write."""
    for name in arguments:
        from estimator.porting._tensorflow_names import ARGUMENTS

        hint = f": {ARGUMENTS[name]}" if name in ARGUMENTS else ""
        raise TypeError(f"`{caller}` got an unexpected argument {name!r}{hint}.")


def check_tpu_arguments(kind: str, arguments: Mapping[str, Any]) -> None:
    """Raises a TypeError for the first of the arguments that only TPUEstimator's class has, and says what to write."""
    for name, value in arguments.items():
        from estimator.porting._tensorflow_names import TPU_ARGUMENTS

        # Other names are left to the class, which knows its own.
        if name in TPU_ARGUMENTS[kind]:
            raise TypeError(
                f"{kind} has no `{name}`, as TensorFlow's TPU{kind} has: {TPU_ARGUMENTS[kind][name]}; got {value!r}."
            )


def explain_missing_key(error: Exception, **given: Any) -> None:
    """Adds to an error for a missing key which keys there are in the dicts of what a user's function was given.

    For `batch_size`, which TPUEstimator adds to params, it says how to get it there.
    """
    # `params.batch_size` fails with an AttributeError, which has a name; `params["batch_size"]` with a KeyError.
    if getattr(error, "name", None) == "batch_size" or isinstance(error, KeyError) and error.args == ("batch_size",):
        note = (
            "`params` are what the Estimator got: TPUEstimator's `batch_size` is not added. Write it yourself: "
            "`est.Estimator(model_fn, params={..., 'batch_size': 32})`; it is the size of a whole batch, of all towers."
        )
    elif isinstance(error, KeyError):
        keys = [f"{list(each)} in {name}" for name, each in given.items() if isinstance(each, Mapping)]
        note = f"The keys are {', and '.join(keys)}." if keys else ""
    else:
        return
    if note and note not in getattr(error, "__notes__", ()):  # a replicated model_fn is in another one
        error.add_note(note)


@functools.cache
def _by_last_part() -> dict[str, list[str]]:
    """The keys of `NAMES` by what stands behind their last dot."""
    # Read at the first name that is missing: most programs never need it.
    from estimator.porting._tensorflow_names import NAMES

    keys: dict[str, list[str]] = {}
    for key in NAMES:
        keys.setdefault(key.rpartition(".")[2], []).append(key)
    return keys


def _error(message: str, keys: list[str], name: str, otherwise: str = "") -> AttributeError:
    if keys:
        from estimator.porting._tensorflow_names import NAMES

        # The caller puts the names of its own part of TensorFlow first.
        return _explain(message, NAMES[keys[0]], name)
    return AttributeError(message + otherwise)  # without `name`: Python then adds it, and suggests a name like it


def _explain(message: str, hint: str, name: str) -> AttributeError:
    # An entry that begins with "nothing: " gives a reason instead of a replacement.
    why = hint.removeprefix("nothing: ")
    instead = f"here it is {hint}" if why == hint else f"there is nothing like it here: {why}"
    return AttributeError(f"{message}; {instead}.", name=name)


def names_missing_in(
    module: str, otherwise: str = "", others: Mapping[str, str] = types.MappingProxyType({})
) -> Callable[[str], Any]:
    """The `__getattr__` of a module: its errors say what there is instead of TensorFlow's names.

    Names of the module's own part of TensorFlow come first: a model_fn may have been ported by another module's name.

    Args:
      module: its `__name__`.
      otherwise: what to say where the name is not TensorFlow's.
      others: names that this module is asked for beside the table's, and what to write instead.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        from estimator.porting._tensorflow_names import PARTS

        keys = _by_last_part().get(name, [])
        # A module without an entry, such as `estimator` itself, stands for all of TensorFlow.
        keys = [key for key in keys if key.startswith(PARTS.get(module, "tf."))] + keys
        message = f"module {module!r} has no attribute {name!r}"
        raise _explain(message, others[name], name) if name in others else _error(message, keys, name, otherwise)

    return __getattr__


def names_loaded_later(
    module: str, later: Mapping[str, str], otherwise: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a module that loads names when they are used, since few programs use them.

    Args:
      module, otherwise: as in `names_missing_in`.
      later: names, between spaces, by the module within this one that has them, which is such a name itself.
    """
    found = {name: inner for inner, names in later.items() for name in (inner, *names.split())}
    missing = names_missing_in(module, otherwise)

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in found:
            return missing(name)
        inner = importlib.import_module(f"{module}.{found[name]}")
        value = inner if found[name] == name else getattr(inner, name)
        setattr(sys.modules[module], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807
        own = vars(sys.modules[module])
        return sorted({*own, *own["__all__"]})

    return __getattr__, __dir__


def missing_attribute(of: object, kind: str, name: str) -> AttributeError:
    """The error for a name that an object does not have; `kind` is the class of TensorFlow's that it stands for."""
    # Only names of this class: a function of TensorFlow that has the same name is another thing.
    from estimator.porting._tensorflow_names import PARTS

    keys = [key for key in _by_last_part().get(name, []) if key.startswith(PARTS[kind])]
    return _error(f"{type(of).__name__!r} object has no attribute {name!r}", keys, name)
