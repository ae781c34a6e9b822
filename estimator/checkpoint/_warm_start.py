"""Warm start: initial values from another model that was trained."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from estimator.checkpoint._named_arrays import (
    ShapeDtype,
    close_matches,
    named_leaves,
    tensorflow_slot_names,
    with_named_leaves,
)
from estimator.checkpoint._transpose import Transpose
from estimator.core._mode_keys import ModeKeys
from estimator.core._state import State
from estimator.multihost._global_arrays import put
from estimator.storage._array_files import Kind
from estimator.variables._vocab_info import VocabInfo, move_rows, resize

if TYPE_CHECKING:
    from estimator.checkpoint._readers import Reader

_STEP = "global_step"


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Variables of an Estimator that begin with the values of a checkpoint, for its argument `warm_start_from`.

    Names are as in `Estimator.get_variable_names()`: "dense/w", and "net/Dense_0/kernel" for an array within the
    variable "net". As in TensorFlow, a pattern matches the beginning of a name: "dense" matches "dense2/w" too.
    PRNG keys are not taken: they follow from the seed.

    >>> settings = WarmStartSettings("/tmp/digits", vars_to_warm_start="hidden/")
    >>> settings.vars_to_warm_start
    'hidden/'

    Args:
      ckpt_to_initialize_from: a model_dir, for its newest checkpoint, or the path of a checkpoint; or the path that
        `export_model` returned, or its export_dir_base; or weights from elsewhere, as `est.list_variables` takes them:
        a checkpoint of TensorFlow, an .npz or .safetensors file, or weights of PyTorch. Of those, 64 bits become 32
        without x64. A half-precision float becomes float32 if the variable is float32.
      vars_to_warm_start: a regular expression, for trainable variables only; or a list of them, for all variables
        and optimizer slots. The list takes global_step only if it contains "global_step" itself.
      var_name_to_prev_var_name: the names in the checkpoint of variables that have another name there: a dict from new
        to old names, or a function of a new name that returns the old one. A slot is renamed by its own name. An old
        name is a string, or an `est.Transpose` for an array that lies transposed there.
        In a checkpoint of TensorFlow the slots of `est.train`'s optimizers have their names there by themselves.

    Raises:
      ValueError: a field has an invalid value.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[str] = ".*"
    var_name_to_prev_var_name: Mapping[str, str | Transpose] | Callable[[str], str | Transpose] | None = None
    var_name_to_vocab_info: Mapping[str, VocabInfo] | None = None

    def __post_init__(self) -> None:
        source, patterns, renames, vocabularies = (getattr(self, field.name) for field in dataclasses.fields(self))
        if not isinstance(source, str | os.PathLike) or not os.fspath(source):
            raise ValueError(
                "`ckpt_to_initialize_from` MUST be set in WarmStartSettings, to a model_dir or the path of a "
                f"checkpoint or of an exported model; got {source!r}."
            )
        object.__setattr__(self, "ckpt_to_initialize_from", os.fspath(source))  # the class is frozen
        if not isinstance(patterns, str):
            if not isinstance(patterns, Sequence) or not patterns:
                raise ValueError(f"`vars_to_warm_start` must be a regex or a list of regexes; got {patterns!r}.")
            object.__setattr__(self, "vars_to_warm_start", tuple(patterns))
        for pattern in _patterns(self):
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"`vars_to_warm_start` must hold regexes; got {pattern!r}.")
            try:
                re.compile(pattern)
            except re.error as e:
                raise ValueError(f"`vars_to_warm_start` has {pattern!r}, which is not a regex: {e}.") from e
        is_dict = isinstance(renames, Mapping) and all(
            isinstance(new, str) and isinstance(old, str | Transpose) for new, old in renames.items()
        )
        if not (renames is None or callable(renames) or is_dict):
            raise ValueError(
                "`var_name_to_prev_var_name` must be a dict from new to old names, or a function of a new name; "
                f"got {renames!r}."
            )
        infos = vocabularies.values() if isinstance(vocabularies, Mapping) else [vocabularies]
        if vocabularies is not None and not all(isinstance(info, VocabInfo) for info in infos):
            raise ValueError(
                f"`var_name_to_vocab_info` must be a dict of `est.VocabInfo` by new names; got {vocabularies!r}."
            )


class WarmStartReport(NamedTuple):
    """The result of a warm start; its `str` is logged.

    Attributes:
      source: the path of the checkpoint.
      used: the names in the source of the variables that were warm-started, by their names in the model.
      missing: requested, but not in the source; they have their initial values.
      unexpected: requested and in the source, but not in the model.
      mismatched: of another shape or dtype in the source; each line has both. They are an error.
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
    """The settings for `Estimator(warm_start_from=...)`; a path stands for all trainable variables there."""
    if warm_start_from is None or isinstance(warm_start_from, WarmStartSettings):
        return warm_start_from
    if not isinstance(warm_start_from, str | os.PathLike):
        raise ValueError(f"warm_start_from must be a string or a WarmStartSettings; got {warm_start_from!r}.")
    return WarmStartSettings(os.fspath(warm_start_from))


def warm_start(
    settings: WarmStartSettings, state: State, trainable: Sequence[str], mode: ModeKeys
) -> tuple[State, WarmStartReport]:
    """Replaces values of the initial state as the settings request, each with the placement of the old value.

    Args:
      settings: which values, and from where.
      state: the initial state in `mode`.
      trainable: the names of its trainable variables.
      mode: TRAIN, or another mode, in which the model may have fewer variables: a name that only TRAIN has is
        accepted there.

    Raises:
      ValueError: there is no such checkpoint, a pattern matches nothing, a renamed variable is not in the model or not
        in the source, or shapes or dtypes differ.
    """
    from estimator.checkpoint._readers import read_newest

    return read_newest(
        "WarmStartSettings",
        settings.ckpt_to_initialize_from,
        lambda source: _warm_start(source, settings, state, trainable, mode),
    )


def _warm_start(
    source: Reader, settings: WarmStartSettings, state: State, trainable: Sequence[str], mode: ModeKeys
) -> tuple[State, WarmStartReport]:
    from estimator.checkpoint._readers import as_of_jax, find_mismatches, read_values

    leaves = named_leaves(state)
    is_whole = mode == ModeKeys.TRAIN
    matches = _match_names(settings, source, state, trainable)
    chosen = {new: old for names in matches.values() for new, old in names.items()}
    infos = settings.var_name_to_vocab_info or {}
    problems = _check_renames(settings, source, chosen, leaves, is_whole)
    if not problems:
        _check_patterns(matches, source, leaves, is_whole)
    _check_used("var_name_to_vocab_info", infos, chosen, leaves, is_whole)
    available = {new: old for new, old in chosen.items() if old in source.shapes}
    transposes = {new: old for new in available if isinstance(old := _find_source(settings, new), Transpose)}
    there = {new: as_of_jax(source.shapes[old]) for new, old in available.items()}
    there |= {new: transpose.kind(there[new]) for new, transpose in transposes.items()}
    there = {new: _widen(kind, leaves[new]) for new, kind in there.items()}
    # A variable with vocabularies has another size in the source: it is compared with the size by the new vocabulary.
    there |= {new: resize(info, there[new], leaves[new]) for new, info in infos.items() if new in there}
    # All differences are found before an array is read, and are in one error.
    mismatches = find_mismatches(there, leaves, dtypes=True)
    report = WarmStartReport(
        source.path,
        used={new: old for new, old in available.items() if new not in mismatches},
        missing=tuple(new for new in chosen if new not in available),
        unexpected=_find_unexpected(settings, source, state, leaves.keys() | available.values()),
        mismatched=tuple(f"{new}, {was} there, {now} in the model" for new, (was, now) in mismatches.items()),
    )
    if report.mismatched:
        problems.append("Variables to warm-start have other shapes or dtypes in the source.")
    if problems:
        advice = "Leave them out by `vars_to_warm_start`, or change the model."
        raise ValueError("\n".join([*problems, str(report), advice]))
    values = read_values(source, report.used, leaves)
    values |= {new: values[new].transpose(each.order(values[new].ndim)) for new, each in transposes.items()}
    values |= {
        new: move_rows(info, new, values[new], leaves[new], state.key) for new, info in infos.items() if new in values
    }
    return with_named_leaves(state, put(values, {new: leaves[new].sharding for new in values})), report


def _match_names(
    settings: WarmStartSettings, source: Reader, state: State, trainable: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Matches names by each pattern: returns old names by new ones."""
    is_list = not isinstance(settings.vars_to_warm_start, str)
    if not is_list:
        state = state._replace(variables={name: state.variables[name] for name in trainable}, slots={})
    # A pattern such as ".*" does not choose the step: training would not begin at step 0.
    names = [name for name in named_leaves(state) if name != _STEP]
    matches = {p: [name for name in names if re.match(p, name)] for p in _patterns(settings)}
    if is_list and _STEP in matches:
        matches[_STEP].append(_STEP)
    slots = tensorflow_slot_names(state, functools.partial(_old_name, settings))

    def old_name(name: str) -> str:
        old = _old_name(settings, name)
        # TensorFlow's name of a slot is used only if the source does not have the name that is used here.
        return slots[name] if old not in source.shapes and slots.get(name) in source.shapes else old

    return {p: {name: old_name(name) for name in of_pattern} for p, of_pattern in matches.items()}


def _patterns(settings: WarmStartSettings) -> Sequence[str]:
    patterns = settings.vars_to_warm_start
    return (patterns,) if isinstance(patterns, str) else patterns


def _find_source(settings: WarmStartSettings, name: str) -> str | Transpose:
    renames = settings.var_name_to_prev_var_name
    if name == _STEP or renames is None:
        return name
    old = renames(name) if callable(renames) else renames.get(name, name)
    if not isinstance(old, str | Transpose):
        raise ValueError(f"`var_name_to_prev_var_name` must return the old name; it returned {old!r} for {name!r}.")
    return old


def _old_name(settings: WarmStartSettings, name: str) -> str:
    old = _find_source(settings, name)
    return old.name if isinstance(old, Transpose) else old


def _widen(there: ShapeDtype, here: ShapeDtype) -> ShapeDtype:
    """The kind of an array of half precision that becomes the variable's float32, in which no digit is lost."""
    is_half = jnp.issubdtype(there.dtype, jnp.floating) and np.dtype(there.dtype).itemsize == 2
    return Kind(there.shape, here.dtype) if is_half and here.dtype == jnp.float32 else there


def _check_renames(
    settings: WarmStartSettings, source: Reader, chosen: dict[str, str], leaves: dict[str, Any], is_whole: bool
) -> list[str]:
    """Checks the names of a dict; returns a line for each old name that is not in the source."""
    renames = settings.var_name_to_prev_var_name
    if renames is None or callable(renames):
        return []
    _check_used("var_name_to_prev_var_name", renames, chosen, leaves, is_whole)
    old_names = {new: _old_name(settings, new) for new in renames}
    return [
        f"`var_name_to_prev_var_name` says that {new!r} was {old!r}, but {source.path} has no such variable. "
        f"Did you mean one of {close_matches(old, source.shapes)}?"
        for new, old in old_names.items()
        if old not in source.shapes
    ]


def _check_used(
    argument: str, names: Iterable[str], chosen: dict[str, str], leaves: dict[str, Any], is_whole: bool
) -> None:
    """Checks that an argument has no name that is not warm-started."""
    for new in names:
        if new not in chosen and (is_whole or new in leaves):
            raise ValueError(
                f"`{argument}` names {new!r}, which was not used. Perhaps you misspelled it? "
                f"Near it, `vars_to_warm_start` takes {close_matches(new, chosen)} of the model."
            )


def _check_patterns(matches: dict[str, dict[str, str]], source: Reader, leaves: dict[str, Any], is_whole: bool) -> None:
    for pattern, names in matches.items():
        # Other modes have no slots, for example: a pattern that matches nothing there may match in TRAIN.
        only_in_training = [] if is_whole else [n for n in source.shapes if n not in leaves and re.match(pattern, n)]
        if only_in_training or source.shapes.keys() & names.values():
            continue
        if names:
            what = f"what it matches in the model, {list(names)}, is not in {source.path}"
        else:
            what = f"it matches no name in the model, such as {close_matches(pattern, leaves)}"
            others = [name for name in leaves if re.match(pattern, name)]
            if others:
                what = (
                    f"{others} are not trainable variables; for these give a list of regexes, and for the step "
                    "'global_step' itself"
                )
        raise ValueError(f"`vars_to_warm_start` has {pattern!r}, which warm-starts nothing: {what}.")


def _find_unexpected(settings: WarmStartSettings, source: Reader, state: State, known: Set[str]) -> tuple[str, ...]:
    """Finds the names in the source that are not in the model; slots only where the settings request slots."""
    wants_slots = not isinstance(settings.vars_to_warm_start, str) and state.slots
    names = source.shapes if wants_slots else source.variables()
    # Patterns are of new names, which say nothing about old ones where variables were renamed.
    patterns = _patterns(settings) if settings.var_name_to_prev_var_name is None else [""]
    return tuple(n for n in sorted(names) if n not in known and any(re.match(p, n) for p in patterns))
