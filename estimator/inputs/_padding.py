"""Batches padded to few lengths, so that few programs are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from estimator.core._bcoo import is_sparse
from estimator.core._typing import Features, PyTree
from estimator.inputs._input_fn import call_input_fn, is_one_batch, pair_of
from estimator.inputs._row_groups import RowGroups

Axes = int | tuple[int, ...]
AxesByName = Axes | Mapping[Any, Axes] | None
Lengths = dict[Any, np.ndarray]  # by name
Room = Callable[[str, int], int]  # the padded length for the name and the length of an array


def pad_batches(
    batches: Callable[..., Any] | Iterable[Any],
    multiple_of: int = 1,
    *,
    axes: AxesByName = None,
    label_axes: AxesByName = None,
    values: Any = 0,
    label_values: Any = 0,
    pad_to: int | Sequence[int] | None = None,
    lengths: str | Mapping[Any, str] | None = None,
    batch_size: int | None = None,
    drop_remainder: bool = False,
) -> Any:
    """Pads sequences of varying length, so that all batches have one of a few shapes.

    A step is compiled for each shape of its batches. `padded_batch` of `tf.data` pads the rows of a batch to the
    longest row; this function pads them to the next multiple of a number, or to one of a few lengths.

    Features and labels that are a list of rows, or a numpy array of objects, become one array, whose second dimension
    fits the longest row. Arrays are padded in the dimensions in `axes`.

    >>> def input_fn():
    ...     yield {"words": [[3, 1, 2], [4]], "age": np.array([30, 40])}, np.array([0, 1])
    ...     yield {"words": [[5, 6], [7, 8, 9, 1, 2]], "age": np.array([50, 60])}, np.array([1, 0])
    >>> padded = pad_batches(input_fn, multiple_of=4, lengths="length")
    >>> for features, labels in padded():
    ...     print(features["words"], features["length"])
    [[3 1 2 0]
     [4 0 0 0]] [3 1]
    [[5 6 0 0 0 0 0 0]
     [7 8 9 1 2 0 0 0]] [2 5]

    A model_fn masks the padding by the lengths: `mask = jnp.arange(words.shape[1]) < length[:, None]`, for example
    as the weights of a loss. The length of an array that was padded before is its size.

    With `batch_size` the input has single rows, features or pairs `(features, labels)`, which are batched first, as by
    `padded_batch`:

    >>> rows = [({"words": [3, 1, 2]}, 0), ({"words": [4]}, 1), ({"words": [5, 6]}, 1)]
    >>> for features, labels in pad_batches(rows, batch_size=2):
    ...     print(features["words"].tolist(), labels)
    [[3, 1, 2], [4, 0, 0]] [0 1]
    [[5, 6]] [1]

    The position of the input (`get_state`, `set_state`) is kept.

    Args:
      batches: an input_fn, or an iterable of batches as an input_fn may return it; with `batch_size`, of rows.
      multiple_of: lengths are rounded up to a multiple of this number; 1: the longest row of a batch has none.
      axes: which dimensions of features are padded, an int or a tuple, from 1: features that are an array have an int
        or a tuple, a dict of features has a dict by name. Features that are not named stay as they are. Default: the
        second dimension of an array, and of each list of rows in a dict.
      label_axes: the same for labels; by default only lists of rows are padded.
      values: the padding value; for a dict of features a dict by name, 0 for features that it does not name.
      label_values: the same for labels.
      pad_to: instead of `multiple_of`, the lengths to choose from, such as `(32, 64, 128)`; an int: the only length.
      lengths: the name of a feature to add: the lengths of the rows before padding, an int32 array. If several features
        are padded, a dict of such names by feature.
      batch_size: the number of rows of a batch, if the input has single rows. What is in `axes` is padded, by
        default all but scalars, as by `tf.data`; everything else must have one shape.
      drop_remainder: whether the last rows are left out where they are fewer.

    Returns:
      An input_fn, or an iterable of batches, like `batches`.

    Raises:
      TypeError: `batches` is neither.
      ValueError: an argument is invalid; later, for a batch: it lacks a name, a row is longer than `pad_to` allows,
        rows differ in other dimensions, or `values` do not fit an array.
    """
    padding = _Padding(multiple_of, axes, label_axes, values, label_values, pad_to, lengths)
    if batch_size is None and drop_remainder:
        raise ValueError("pad_batches got drop_remainder=True without a batch_size. Give both where it reads rows.")
    if batch_size is not None and (not _is_int(batch_size) or batch_size < 1):
        raise ValueError(f"batch_size must be an int >= 1, the number of rows of a batch; got {batch_size!r}.")
    groups = None if batch_size is None else RowGroups(batch_size, drop_remainder, axes, label_axes)

    def pad(result: Any) -> Any:
        if not is_one_batch(result):
            return _PaddedBatches(result, padding, groups)
        if groups is not None:
            raise ValueError(
                f"pad_batches got batch_size={batch_size}, which is for an iterable of single rows, and one batch, a "
                f"{type(result).__name__}. Leave batch_size out."
            )
        return padding.batch(result)

    if not callable(batches):
        return pad(batches)

    # With all parameters that an Estimator passes; the user's function gets those in its signature.
    def input_fn(mode: object = None, params: object = None, config: object = None) -> Any:
        return pad(call_input_fn(batches, mode, params, config))

    return input_fn


class _PaddedBatches(Iterable[Any]):
    def __init__(self, batches: Iterable[Any], padding: _Padding, groups: RowGroups | None) -> None:
        self._batches, self._padding, self._groups = batches, padding, groups

    def __iter__(self) -> Iterator[Any]:
        return _PaddedIterator(iter(self._batches), self._padding, self._groups)


class _PaddedIterator(Iterator[Any]):
    """Has `get_state` and `set_state` if the iterator that it pads has them: padding has no state."""

    def __init__(self, elements: Iterator[Any], padding: _Padding, groups: RowGroups | None) -> None:
        self._elements, self._padding = elements, padding
        self._read = next if groups is None else groups.read

    def __next__(self) -> Any:
        return self._padding.batch(self._read(self._elements))

    def __getattr__(self, name: str) -> Any:
        # Not methods, since a loop uses `hasattr` to find out whether an input has a position.
        if name in ("get_state", "set_state"):
            return getattr(self._elements, name)
        raise AttributeError(name)


@dataclasses.dataclass(frozen=True)
class _Padding:
    """The checked arguments of `pad_batches`, applied to batches."""

    multiple_of: int
    axes: AxesByName
    label_axes: AxesByName
    values: Any
    label_values: Any
    pad_to: int | Sequence[int] | None
    lengths: str | Mapping[Any, str] | None

    def __post_init__(self) -> None:
        if not _is_int(self.multiple_of) or self.multiple_of < 1:
            raise ValueError(f"multiple_of must be an int >= 1; got {self.multiple_of!r}.")
        for name, argument in (("axes", self.axes), ("label_axes", self.label_axes)):
            for axes in argument.values() if isinstance(argument, Mapping) else [argument]:
                if axes is not None and not all(_is_int(axis) and axis >= 1 for axis in _as_tuple(axes)):
                    raise ValueError(
                        f"{name} must be an int >= 1, a tuple of such, or a dict of these by name; got {argument!r}. "
                        "The first dimension, 0, counts the rows and is not padded."
                    )
        if self.pad_to is not None:
            if self.multiple_of != 1:
                raise ValueError(
                    f"Only one of multiple_of and pad_to may be given; got multiple_of={self.multiple_of} and "
                    f"pad_to={self.pad_to!r}."
                )
            if not _as_tuple(self.pad_to) or not all(_is_int(n) and n >= 1 for n in _as_tuple(self.pad_to)):
                raise ValueError(f"pad_to must be an int >= 1, or several of them; got {self.pad_to!r}.")

    def batch(self, element: Any) -> Any:
        """The padded batch."""
        features, labels = pair_of(element)
        features, lengths = _pad_arrays("features", features, self._axes(features), self.values, self.room)
        if self.lengths is not None:
            features = self._with_lengths(features, lengths)
        if not isinstance(element, (tuple, list)):
            return features
        label_axes = {} if self.label_axes is None else self.label_axes
        return features, _pad_arrays("labels", labels, label_axes, self.label_values, self.room)[0]

    def room(self, name: str, length: int) -> int:
        """The padded length of an array."""
        if self.pad_to is None:
            # At least one multiple, so that a batch of empty sequences does not need another program.
            return max(1, -(-length // self.multiple_of)) * self.multiple_of
        enough = [n for n in _as_tuple(self.pad_to) if n >= length]
        if not enough:
            raise ValueError(
                f"{name} has the length {length}, and pad_to={self.pad_to!r} has none as large. Cut it in input_fn, or "
                "give a larger one."
            )
        return min(enough)

    def _axes(self, features: Features) -> Axes | Mapping[Any, Axes]:
        if self.axes is not None:
            return self.axes
        if not isinstance(features, Mapping):
            return 1
        # Lists of rows do not need a name: they are always padded.
        if any(map(_has_rows, features.values())):
            return {}
        raise ValueError(
            f"pad_batches needs the names of what to pad where features are a dict of arrays; got {list(features)}. "
            "Give them with their dimensions, for example `axes={" + repr(next(iter(features), "x")) + ": 1}`."
        )

    def _with_lengths(self, features: Features, row_lengths: Lengths) -> dict[Any, Any]:
        if not isinstance(features, Mapping):
            raise ValueError(
                f"lengths={self.lengths!r} adds a feature, for which features must be a dict; got "
                f"{type(features).__name__}. Let input_fn give a dict."
            )
        names = self.lengths
        if isinstance(names, str):
            if len(row_lengths) != 1:
                raise ValueError(
                    f"lengths={names!r} names the lengths of one feature; {len(row_lengths)} are padded: "
                    f"{list(row_lengths)}. Give a dict of names by feature."
                )
            names = dict.fromkeys(row_lengths, names)
        assert names is not None
        for feature, name in names.items():
            if feature not in row_lengths:
                raise ValueError(
                    f"lengths has the feature {feature!r}, which is not padded; padded are {list(row_lengths)}."
                )
            if name in features:
                raise ValueError(f"lengths adds a feature {name!r}, which the batch has already. Choose another name.")
        return {**features, **{name: row_lengths[feature] for feature, name in names.items()}}


def _pad_arrays(
    name: str, tree: PyTree, axes: Axes | Mapping[Any, Axes], values: Any, room: Room
) -> tuple[PyTree, Lengths]:
    """Pads features or labels; also returns the lengths of the rows before, by name."""
    if not isinstance(tree, Mapping):
        if isinstance(axes, Mapping):
            if axes or not _has_rows(tree):
                _check_named(name, axes, ())
                return tree, {}
            axes = 1
        padded, of_rows = _pad_array(name, tree, _as_tuple(axes), values, room)
        return padded, {None: of_rows}
    if not isinstance(axes, Mapping):
        raise ValueError(
            f"{name} are a dict, {list(tree)}, so that their axes must be one by name, for example "
            f"`{{{next(iter(tree), 'x')!r}: {axes!r}}}`; got {axes!r}."
        )
    _check_named(name, axes, tree)
    if isinstance(values, Mapping):
        _check_named(name, values, tree)
    # A copy, since the user's dict may be yielded again.
    arrays = dict(tree)
    lengths: Lengths = {}
    for key, x in tree.items():
        if key in axes or _has_rows(x):
            value = values.get(key, 0) if isinstance(values, Mapping) else values
            arrays[key], lengths[key] = _pad_array(f"{name}[{key!r}]", x, _as_tuple(axes.get(key, 1)), value, room)
    return arrays, lengths


def _pad_array(name: str, x: Any, axes: tuple[int, ...], value: ArrayLike, room: Room) -> tuple[np.ndarray, np.ndarray]:
    if is_sparse(x):
        raise ValueError(f"{name} is sparse: one program serves many sizes of it already. Leave it out of `axes`.")
    rows = [np.asarray(row) for row in x] if _has_rows(x) else np.asarray(x)
    if not len(rows):
        raise ValueError(f"{name} has no rows. Let input_fn leave the batch out.")
    shapes = np.array(_same_rank(name, rows)) if isinstance(rows, list) else np.array([rows.shape[1:]])
    if max(axes) > shapes.shape[1]:
        raise ValueError(f"{name} has {shapes.shape[1] + 1} dimensions, and so no dimension {max(axes)} to be padded.")
    shape = []
    for axis, sizes in enumerate(shapes.T, 1):
        if axis not in axes and len(set(sizes)) > 1:
            raise ValueError(
                f"The rows of {name} differ in dimension {axis}: {sorted(set(sizes.tolist()))}. Give it in `axes`, to "
                "be padded too."
            )
        shape.append(room(name, int(sizes.max())) if axis in axes else int(sizes.max()))
    # The first padded dimension gives the length. All rows of an array have the same shape.
    lengths = np.broadcast_to(shapes[:, axes[0] - 1], (len(rows),)).astype(np.int32)
    dtype = _common_dtype(x, rows, value) if isinstance(rows, list) else rows.dtype
    padded = np.full((len(rows), *shape), _cast_exactly(name, value, dtype))
    if isinstance(rows, list):
        for target, row in zip(padded, rows, strict=True):
            # Padding comes after the row, where lengths and masks expect it.
            target[tuple(map(slice, row.shape))] = row
    else:
        padded[tuple(map(slice, rows.shape))] = rows
    return padded, lengths


def _same_rank(name: str, rows: list[np.ndarray]) -> list[tuple[int, ...]]:
    shapes = [row.shape for row in rows]
    if len(set(map(len, shapes))) > 1 or () in shapes:
        raise ValueError(
            f"The rows of {name} must be sequences, or arrays of one number of dimensions; got shapes {shapes}."
        )
    return shapes


def _common_dtype(x: Iterable[object], rows: list[np.ndarray], value: ArrayLike) -> np.dtype[Any]:
    """The dtype of the rows in `x`. Empty lists do not count: they have no dtype, and numpy makes floats of them."""
    dtypes = {row.dtype for row, original in zip(rows, x, strict=True) if row.size or hasattr(original, "dtype")}
    return np.result_type(*dtypes) if dtypes else np.asarray(value).dtype


def _cast_exactly(name: str, value: ArrayLike, dtype: np.dtype[Any]) -> np.ndarray:
    """The value in a dtype that can hold it."""
    try:
        array = np.array(value).astype(dtype)
        fits = array.ndim == 0 and (array == value or value != value)  # NaN differs from itself
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{name} is of dtype {dtype}, which has no {value!r} to be padded with. Give another value.")
    return array


def _check_named(name: str, by_name: Mapping[Any, Any], tree: Any) -> None:
    unknown = [key for key in by_name if key not in tree]
    if unknown:
        raise ValueError(f"pad_batches got {unknown} by name, which {name} have not; they have {list(tree)}.")


def _has_rows(x: object) -> bool:
    """Returns whether it is a list of rows, which may differ in length, instead of an array."""
    return isinstance(x, list) or (isinstance(x, np.ndarray) and x.dtype == object)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _is_int(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)
