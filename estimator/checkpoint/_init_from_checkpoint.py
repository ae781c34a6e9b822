"""Initial values from a checkpoint, chosen in the model_fn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging

from estimator.checkpoint._named_arrays import close_matches, is_key
from estimator.checkpoint._readers import Reader, find_mismatches, read_newest, read_values
from estimator.core._frame import current_frame
from estimator.core._typing import Variables
from estimator.variables._initial_value import InitialValues
from estimator.variables._variables import map_named

_CALLER = "est.init_from_checkpoint"


def init_from_checkpoint(
    ckpt_dir_or_file: str | os.PathLike[str], assignment_map: Mapping[str, str] | Sequence[tuple[str, str]]
) -> None:
    """Lets variables of this run begin with values of a checkpoint, as `tf.train.init_from_checkpoint`.

    It takes the place of their initializers: it has an effect if training starts from nothing, not if it resumes from a
    checkpoint in the model_dir. The file is read then only, and need not be there later. Slots and other copies of
    the variables start from these values, whether they were made before this call or after it.

    >>> import estimator as est, jax, jax.numpy as jnp, numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> np.savez(path, **{"encoder/kernel": np.ones((3, 2)), "encoder/bias": np.zeros(2)})
    >>> def model_fn(features, labels, mode):
    ...     x = est.layers.dense(features, 2, name="bert")
    ...     est.init_from_checkpoint(path, {"encoder/": "bert/"})
    ...     return est.EstimatorSpec(mode, predictions=est.layers.dense(x, 1))
    >>> state = est.transform(model_fn).init(jax.random.key(0), jnp.ones((1, 3)), mode="infer")
    >>> print(state.variables["bert/kernel"][0], list(state.variables))
    [1. 1.] ['bert/bias', 'bert/kernel', 'dense/bias', 'dense/kernel']

    Args:
      ckpt_dir_or_file: as for `est.list_variables`: a checkpoint of this library or of TensorFlow, an .npz or
        .safetensors file, an exported model.
      assignment_map: from names there to names of variables that this run has got already, as a dict or as pairs. Names
        are full ones, without the scope around the call; an array within a pytree has a name like "net/Dense_0/kernel".
        A name that ends with "/" is a scope, and stands for all variables in it, also those that are not trained:
        `{"encoder/": "bert/"}`; "/" is all, so that `{"/": "bert/"}` takes "kernel" for "bert/kernel", and `{"/": "/"}`
        every variable by its own name. A single name counts more than a scope around it.

    Raises:
      TypeError: the path or the map is of another type. A variable goes by its name: `get_variable` returns a value.
      ValueError: a name is not a variable of this run, or a scope has none; or, when the values are read, there is no
        such checkpoint, a name or variable is not in it, or has another shape, or a value does not fit into the dtype.
      RuntimeError: no model_fn is running.
    """
    frame = current_frame(_CALLER)
    if not isinstance(ckpt_dir_or_file, str | os.PathLike):
        raise TypeError(f"`{_CALLER}` needs a path, a string; got {ckpt_dir_or_file!r}.")
    pairs = _check_pairs(assignment_map)
    if not frame.initializing:  # compiled programs read no files: the values are in the state
        return
    names: list[str] = []
    map_named(lambda name, leaf: None if is_key(leaf) else names.append(name), frame.variables)
    old_names: dict[str, str] = {}
    # Scopes first, so that a single name overrides its scope.
    for old, new in sorted(pairs, key=lambda pair: not pair[1].endswith("/")):
        old_names |= _match_names(old, new, names)
    # Read after the model_fn has returned: what it makes of the variables later, such as slots, starts from them, too.
    frame.declared.notes.get(InitialValues).append(_Start(os.fspath(ckpt_dir_or_file), tuple(old_names.items())))


class _Start(NamedTuple):
    """Arrays of variables that begin with values of a checkpoint.

    Attributes:
      path: of the checkpoint.
      names: pairs of the name of an array here, and the name there.
    """

    path: str
    names: tuple[tuple[str, str], ...]

    def read(self, variables: Variables) -> dict[str, jax.Array]:
        """Reads the values, by the names of the arrays, with the dtypes of `variables`."""
        return read_newest(_CALLER, self.path, lambda reader: self._read(reader, variables))

    def _read(self, reader: Reader, variables: Variables) -> dict[str, jax.Array]:
        for new, old in self.names:
            if old not in reader.shapes:
                raise ValueError(
                    f"`{_CALLER}`: {new!r} is to begin with {old!r}, which is not in {reader.path}. Near it, that has "
                    f"{close_matches(old, reader.shapes)}; `est.list_variables` lists all. To leave it out, name "
                    "the others one by one, as {'name there': 'name here'}."
                )
        like: dict[str, Any] = {}
        map_named(like.__setitem__, variables)
        old_names = dict(self.names)
        mismatches = find_mismatches({new: reader.shapes[old] for new, old in self.names}, like, dtypes=False)
        if mismatches:
            lines = (
                f"{old_names[new]!r} there is {was}, and {new!r} here {now}" for new, (was, now) in mismatches.items()
            )
            raise ValueError(
                f"`{_CALLER}`: shapes in {reader.path} are not those of the model: {'; '.join(lines)}. Leave "
                "these out by naming the others one by one, or change the model."
            )
        values = read_values(reader, old_names, like, f"`{_CALLER}`: ")
        logging.info("%d arrays begin with values of %s.", len(self.names), reader.path)
        return values


def _check_pairs(assignment_map: Any) -> list[tuple[str, str]]:
    pairs = assignment_map.items() if isinstance(assignment_map, Mapping) else assignment_map
    if not isinstance(pairs, str) and hasattr(pairs, "__iter__"):
        pairs = list(pairs)
        wrong = [p for p in pairs if not (isinstance(p, tuple) and len(p) == 2 and all(isinstance(n, str) for n in p))]
        if pairs and not wrong:
            return pairs
        assignment_map = wrong[0] if wrong else assignment_map
    raise TypeError(
        f"`{_CALLER}` needs a dict from names in the checkpoint to names of variables, such as "
        f'{{"encoder/": "bert/"}}; got {assignment_map!r}. A variable goes by its name, since `est.get_variable` '
        "returns a value."
    )


def _match_names(old: str, new: str, names: Sequence[str]) -> dict[str, str]:
    """Matches a pair of names with the arrays of this run; returns their old names."""
    if not new.endswith("/"):
        if new in names and not old.endswith("/"):
            return {new: old}
        inside = any(name.startswith(f"{new}/") for name in names)
        if new in names:
            raise ValueError(f"`{_CALLER}`: {new!r} is a variable, and {old!r} a scope. Give both as names.")
        fix = f"Near it: {close_matches(new, names)}."
        if inside:
            fix = f'Did you mean the scope, {{"{old.rstrip("/")}/": "{new}/"}}?'
        raise ValueError(f"`{_CALLER}`: {new!r} names no variable that this run has got so far. {fix}")
    if not old.endswith("/"):
        raise ValueError(
            f"`{_CALLER}`: {new!r} is a scope, and {old!r} is none. Give both with a '/' at the end, or both without."
        )
    scope, there = new.removesuffix("/"), old.removesuffix("/")
    of_scope = [name for name in names if not scope or name.startswith(f"{scope}/")]
    if not of_scope:
        raise ValueError(
            f"`{_CALLER}`: this run has got no variable in the scope {new!r} so far, only {list(names)}. Call it after "
            "the variables were got, and name a scope of theirs."
        )
    own = {name: name.removeprefix(f"{scope}/") if scope else name for name in of_scope}
    return {name: f"{there}/{rest}" if there else rest for name, rest in own.items()}
