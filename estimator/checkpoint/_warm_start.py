"""Warm start: a model that begins with values another one was trained to."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from estimator.checkpoint import _checkpoints
from estimator.checkpoint._checkpoints import Checkpoints, describe
from estimator.checkpoint._export_folder import ExportFolder, find_export
from estimator.core._mode_keys import ModeKeys
from estimator.core._state import State
from estimator.multihost._global_arrays import put

_STEP = "global_step"


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Which variables of an Estimator begin with the values of a checkpoint, as `warm_start_from` of the Estimator.

    Names are those of `Estimator.get_variable_names()`: "dense/w", and "net/Dense_0/kernel" for an array within the
    variable "net". As in TensorFlow a pattern is matched from the beginning of a name: "dense" matches "dense2/w" too.
    PRNG keys are not taken: randomness follows from the seed.

    >>> settings = WarmStartSettings("/tmp/digits", vars_to_warm_start="hidden/")
    >>> settings.vars_to_warm_start
    'hidden/'

    Args:
      ckpt_to_initialize_from: a model_dir, for its newest checkpoint, or the path of a checkpoint; or what
        `export_model` returned, or was given as export_dir_base.
      vars_to_warm_start: a regular expression, for trainable variables alone; or a list of them, for all variables
        and optimizer slots. The list takes global_step only where "global_step" itself is in it.
      var_name_to_prev_var_name: the names in the checkpoint of variables that have another one there: a dict from new
        to old names, or a function of a new name that returns the old one. A slot has a name of its own.

    Raises:
      ValueError: a field has a value that it cannot have.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[str] = ".*"
    var_name_to_prev_var_name: Mapping[str, str] | Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        source, patterns, renames = (getattr(self, field.name) for field in dataclasses.fields(self))
        if not isinstance(source, str | os.PathLike) or not os.fspath(source):
            raise ValueError(
                "`ckpt_to_initialize_from` MUST be set in WarmStartSettings, to a model_dir or the path of a "
                f"checkpoint or of an exported model; got {source!r}."
            )
        object.__setattr__(self, "ckpt_to_initialize_from", os.fspath(source))
        if not isinstance(patterns, str):
            if not isinstance(patterns, Sequence) or not patterns:
                raise ValueError(f"`vars_to_warm_start` must be a regex or a list of regexes; got {patterns!r}.")
            object.__setattr__(self, "vars_to_warm_start", tuple(patterns))
        for pattern in self._patterns:
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"`vars_to_warm_start` must hold regexes; got {pattern!r}.")
            try:
                re.compile(pattern)
            except re.error as e:
                raise ValueError(f"`vars_to_warm_start` has {pattern!r}, which is no regex: {e}.") from e
        is_dict = isinstance(renames, Mapping) and all(isinstance(n, str) for pair in renames.items() for n in pair)
        if not (renames is None or callable(renames) or is_dict):
            raise ValueError(
                "`var_name_to_prev_var_name` must be a dict from new to old names, or a function of a new name; "
                f"got {renames!r}."
            )

    @property
    def _patterns(self) -> Sequence[str]:
        given = self.vars_to_warm_start
        return (given,) if isinstance(given, str) else given

    def _old_name(self, name: str) -> str:
        renames = self.var_name_to_prev_var_name
        if name == _STEP or renames is None:
            return name
        old = renames(name) if callable(renames) else renames.get(name, name)
        if not isinstance(old, str):
            raise ValueError(f"`var_name_to_prev_var_name` must return the old name; it returned {old!r} for {name!r}.")
        return old


class WarmStartReport(NamedTuple):
    """What a warm start did; its `str` is what was logged.

    Attributes:
      source: the path of the checkpoint.
      used: by the name of each variable that was warm-started, its name in the source.
      missing: asked for, but not in the source; they have their initial values.
      unexpected: in the source and asked for, but not in the model.
      mismatched: of other shapes or dtypes in the source, each with both. They are an error.
    """

    source: str
    used: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    def __str__(self) -> str:
        used = [new if new == old else f"{new} (there {old})" for new, old in self.used.items()]
        parts = {"used": used, "missing": self.missing, "unexpected": self.unexpected, "mismatched": self.mismatched}
        lines = [f"  {kind} ({len(names)}): {', '.join(names)}" for kind, names in parts.items() if names]
        return "\n".join([f"Warm start from {self.source}:", *lines])


def as_settings(warm_start_from: Any) -> WarmStartSettings | None:
    """The settings that `Estimator(warm_start_from=...)` stands for; a path is that of all trainable variables."""
    if warm_start_from is None or isinstance(warm_start_from, WarmStartSettings):
        return warm_start_from
    if not isinstance(warm_start_from, str | os.PathLike):
        raise ValueError(f"warm_start_from must be a string or a WarmStartSettings; got {warm_start_from!r}.")
    return WarmStartSettings(os.fspath(warm_start_from))


def warm_start(
    settings: WarmStartSettings, state: State, trainable: Sequence[str], mode: ModeKeys
) -> tuple[State, WarmStartReport]:
    """The initial state with the values that the settings ask for, each placed as the one it replaces.

    Args:
      settings: what to take, and from where.
      state: the initial state in `mode`.
      trainable: the names of its trainable variables.
      mode: TRAIN, or another one, which may know less of the model: a name that only TRAIN knows is no error there.

    Raises:
      ValueError: there is no such checkpoint, a pattern finds nothing, a renamed variable is not in the model or not
        in the source, or shapes or dtypes differ.
    """
    source = _source(settings.ckpt_to_initialize_from)
    leaves = _checkpoints.named_leaves(state)
    asked = _asked(settings, state, trainable)
    chosen = {new: old for names in asked.values() for new, old in names.items()}
    _check_renames(settings, source, chosen, leaves, is_whole=mode == ModeKeys.TRAIN)
    _check_patterns(asked, source, leaves, is_whole=mode == ModeKeys.TRAIN)
    found = {new: old for new, old in chosen.items() if old in source.shapes}
    kinds = {new: (describe(source.shapes[old]), describe(leaves[new])) for new, old in found.items()}
    report = WarmStartReport(
        source.path,
        used={new: found[new] for new, (was, now) in kinds.items() if was == now},
        missing=tuple(new for new in chosen if new not in found),
        unexpected=_unexpected(settings, source, state, leaves.keys() | found.values()),
        mismatched=tuple(f"{new}, {was} there, {now} in the model" for new, (was, now) in kinds.items() if was != now),
    )
    if report.mismatched:
        raise ValueError(
            f"Variables to warm-start have other shapes or dtypes in the source.\n{report}\n"
            "Leave them out by `vars_to_warm_start`, or change the model."
        )
    arrays = source.read(sorted(set(report.used.values())))
    new = {name: arrays[old] for name, old in report.used.items()}
    return _checkpoints.with_named_leaves(state, put(new, {name: leaves[name].sharding for name in new})), report


class _Source(Protocol):
    """What is read from: shapes and dtypes by name, and arrays.

    Attributes:
      path: the folder.
      shapes: of everything in it, by name.
    """

    path: str
    shapes: dict[str, Any]

    def variables(self) -> list[str]:
        """The names that are not those of slots."""

    def read(self, names: Sequence[str]) -> dict[str, Any]: ...


class _Checkpoint:
    def __init__(self, path: str) -> None:
        self.path = path
        self.shapes = _checkpoints.shapes(path)

    def variables(self) -> list[str]:
        return list(_checkpoints.shapes(self.path, slots=False))

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        return _checkpoints.read_all(self.path, names)


class _Export:
    """An exported model; it has no slots."""

    _PREFIX = "variables/"

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = ExportFolder(path)
        arrays = self._folder.metadata["weights"].items()
        self.shapes: dict[str, Any] = {
            name.removeprefix(self._PREFIX): jax.ShapeDtypeStruct(x["shape"], jnp.dtype(x["dtype"]))
            for name, x in arrays
            if name == _STEP or name.startswith(self._PREFIX)
        }

    def variables(self) -> list[str]:
        return list(self.shapes)

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        weights = self._folder.weights
        return {name: weights[name if name == _STEP else self._PREFIX + name] for name in names}


def _source(path: str) -> _Source:
    newest = Checkpoints(path).latest()
    if newest is None and (export := find_export(path)):
        return _Export(export)
    try:
        return _Checkpoint(newest or path)
    except ValueError as e:
        raise ValueError(
            f"Cannot warm-start from {path!r}: it is neither a checkpoint, nor a model_dir that has one, nor an "
            "exported model."
        ) from e


def _asked(settings: WarmStartSettings, state: State, trainable: Sequence[str]) -> dict[str, dict[str, str]]:
    """By pattern, what it matches: old names by new ones."""
    is_list = not isinstance(settings.vars_to_warm_start, str)
    if not is_list:
        state = state._replace(variables={name: state.variables[name] for name in trainable}, slots={})
    names = [name for name in _checkpoints.named_leaves(state) if name != _STEP]
    asked = {p: [name for name in names if re.match(p, name)] for p in settings._patterns}
    if is_list and _STEP in asked:
        asked[_STEP].append(_STEP)
    return {p: {name: settings._old_name(name) for name in matched} for p, matched in asked.items()}


def _check_renames(
    settings: WarmStartSettings, source: _Source, chosen: dict[str, str], leaves: dict[str, Any], is_whole: bool
) -> None:
    renames = settings.var_name_to_prev_var_name
    if renames is None or callable(renames):
        return
    for new, old in renames.items():
        if new not in chosen and (is_whole or new in leaves):
            raise ValueError(
                f"`var_name_to_prev_var_name` names {new!r}, which was not used. Perhaps you misspelled it? "
                f"Near it, `vars_to_warm_start` takes {_near(new, chosen)} of the model."
            )
        if old not in source.shapes:
            raise ValueError(
                f"`var_name_to_prev_var_name` says that {new!r} was {old!r}, but {source.path} has no such variable. "
                f"Did you mean one of {_near(old, source.shapes)}?"
            )


def _check_patterns(asked: dict[str, dict[str, str]], source: _Source, leaves: dict[str, Any], is_whole: bool) -> None:
    for pattern, names in asked.items():
        only_in_training = [] if is_whole else [n for n in source.shapes if n not in leaves and re.match(pattern, n)]
        if only_in_training or source.shapes.keys() & names.values():
            continue
        if names:
            what = f"what it matches in the model, {list(names)}, is not in {source.path}"
        else:
            what = f"it matches no name in the model, such as {_near(pattern, leaves)}"
            others = [name for name in leaves if re.match(pattern, name)]
            if others:
                what = (
                    f"{others} are not trainable variables; for these give a list of regexes, and for the step "
                    "'global_step' itself"
                )
        raise ValueError(f"`vars_to_warm_start` has {pattern!r}, which warm-starts nothing: {what}.")


def _near(name: str, names: Collection[str]) -> list[str]:
    return difflib.get_close_matches(name, list(names), cutoff=0.5) or sorted(names)[:5]


def _unexpected(settings: WarmStartSettings, source: _Source, state: State, known: Set[str]) -> tuple[str, ...]:
    """Slots are unexpected only where slots were asked for."""
    wants_slots = not isinstance(settings.vars_to_warm_start, str) and state.slots
    names = source.shapes if wants_slots else source.variables()
    return tuple(n for n in sorted(names) if n not in known and any(re.match(p, n) for p in settings._patterns))
