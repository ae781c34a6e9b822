"""Batches: pytrees of arrays, dense or sparse, that agree in their first dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves

from estimator.core._bcoo import find_sparse, is_jax_sparse, is_sparse
from estimator.core._typing import Features, Labels, PyTree

if TYPE_CHECKING:
    from jax.experimental.sparse import JAXSparse

T = TypeVar("T")


def check_batch(features: Features, labels: Labels = None) -> int:
    """The number of examples in a batch.

    Raises:
      TypeError: a leaf is not a numeric array, or a sparse one that is not a `BCOO`.
      ValueError: there is no array, or a leaf has no batch dimension, another batch size than the rest, or no rows.
    """
    # Arrays of all sparse formats of jax are leaves here, so that the ones that are not BCOO can be named.
    leaves = named_leaves(features, labels, is_leaf=is_jax_sparse)
    sizes = {name: _rows(name, leaf) for name, leaf in leaves.items()}
    if not sizes:
        raise ValueError(f"A batch must hold at least one array; got features={features!r} and labels={labels!r}.")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {rows}" for name, rows in sizes.items())
        raise ValueError(
            f"All arrays of a batch must have the same batch size (first dimension); got {listed}. Give all of them a "
            "row for each example, and by params what is the same for all."
        )
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise ValueError(f"Got an empty batch: {', '.join(sizes)} have 0 rows. Let input_fn leave it out.")
    return rows


def named_leaves(
    features: Features, labels: Labels = None, is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """The leaves of a batch by what error messages call them.

    >>> named_leaves({"x": 1}, 2)
    {"features['x']": 1, 'labels': 2}
    """
    try:
        return {
            name + jax.tree_util.keystr(path): leaf
            for name, tree in (("features", features), ("labels", labels))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
        }
    except ValueError:
        # jax's message does not say which dict, and which keys, it could not sort.
        check_keys("a batch", (features, labels))
        raise


def check_keys(what: str, tree: PyTree) -> None:
    """Raises a ValueError that names the keys of a dict, in `what`, which jax cannot sort."""
    keys = _unsorted_keys(tree)
    if keys is not None:
        raise ValueError(
            f"The keys of a dict in {what} must be of one kind, since jax sorts them; got {keys}. Give all of them "
            "as strings, for example."
        )


def _unsorted_keys(tree: Any) -> list[Any] | None:
    if isinstance(tree, dict):
        try:
            sorted(tree)
        # Only checked after a failure, since a check in each step would cost time.
        except TypeError:
            return list(tree)
        return next(filter(None, map(_unsorted_keys, tree.values())), None)
    return next(filter(None, map(_unsorted_keys, tree)), None) if isinstance(tree, (tuple, list)) else None


def unknown_dtype(dtype: Any) -> str | None:
    """The end of an error about a dtype of numpy's that jax has not: it says what to write. None for other dtypes.

    >>> unknown_dtype(np.dtype("V8"))
    'of dtype |V8, which is bytes. Write `x.view(dtype)` with the dtype of the numbers in them.'
    """
    # PRNG keys: numpy does not know their dtypes.
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    dtype = np.dtype(dtype)
    # Asked first, since the type of a dtype with fields is np.void too.
    if dtype.names is not None:
        return f"of dtype {dtype}. Write `{{name: x[name] for name in x.dtype.names}}`: each field is an array then."
    if dtype.type is np.void:
        return f"of dtype {dtype}, which is bytes. Write `x.view(dtype)` with the dtype of the numbers in them."
    # np.longdouble and np.clongdouble: jax has no float beyond 64 bits.
    if dtype.type in (np.longdouble, np.clongdouble):
        return f"of dtype {dtype}. Write `x.astype({'np.float32' if dtype.kind == 'f' else 'np.complex64'})`."
    if dtype.kind in "Mm":
        return f"of dtype {dtype}. Write `x.astype(np.int64)`."
    return f"of dtype {dtype}, which is not a number. Leave it out." if dtype.kind in "OSU" else None


def rows_of(features: Features, labels: Labels = None) -> int:
    """The number of examples in a batch, read off one array; all are looked at where that is none."""
    # One array is enough, since the batch was checked when it was read. This runs in each step.
    if type(features) is np.ndarray and features.shape:
        return features.shape[0]
    leaves = tree_leaves((features, labels), is_leaf=find_sparse())
    shape = getattr(leaves[0], "shape", ()) if leaves else ()
    return shape[0] if shape else check_batch(features, labels)


def describe_nan(features: Features, labels: Labels = None) -> str:
    """The arrays of a batch that hold NaN or infinities, and their rows, in words; nothing if there are none.

    >>> describe_nan({"x": np.array([[0, np.inf], [np.nan, 1], [np.nan, np.nan]])})
    "features['x'] holds 3 NaN, in rows 1 and 2, and 1 inf, in row 0"
    """
    found = []
    for name, leaf in named_leaves(features, labels, is_leaf=is_sparse).items():
        is_here = isinstance(leaf, jax.Array) and not leaf.is_deleted() and leaf.is_fully_addressable
        if (is_here or isinstance(leaf, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            kinds = {kind: np.argwhere(is_kind(leaf)) for kind, is_kind in (("NaN", np.isnan), ("inf", np.isinf))}
            holds = [f"{len(at)} {kind}, in {_list_rows(at[:, 0])}" for kind, at in kinds.items() if len(at)]
            found.extend([f"{name} holds {', and '.join(holds)}"] if holds else [])
    return "; ".join(found)


def _list_rows(rows: np.ndarray) -> str:
    first, *others = [str(row) for row in np.unique(rows)]
    if not others:
        return f"row {first}"
    shown = [first, *others][:5]
    return f"rows {', '.join(shown)} ..." if len(others) >= 5 else f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """An array of a batch as programs are traced for it: its dtype is the one that it has on devices."""
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))


def call_with_batch_errors(step: Callable[..., T], features: Features, labels: Labels, *args: Any) -> T:
    """`step(*args)`; says in our words what jax does not take in the batch among the arguments."""
    try:
        return step(*args)
    except TypeError:
        # It finds nothing where the model_fn itself raised the error, which is then raised as it was.
        check_batch(features, labels)
        raise


class BatchGuard:
    """Calls the steps of a run, and says in our words what is wrong with a batch that they cannot take.

    >>> import numpy as np
    >>> guard = BatchGuard({"x": np.ones((2, 3))}, None)
    >>> guard(4, ({"y": np.ones((2, 3))}, None), lambda features: features["x"], {})
    Traceback (most recent call last):
    ValueError: Batch 4 of the input is not like the one that the model was built with: features['x'] is missing, ...

    Args:
      features, labels: of the batch that the model was built with, arrays or `jax.ShapeDtypeStruct`s.
    """

    def __init__(self, features: Features, labels: Labels) -> None:
        self._built_with = _shapes(features, labels)
        # Only of numpy's arrays: jax's would have to be fetched, and abstract ones have no values.
        self._label_ranges = ", ".join(
            f"{name} from {leaf.min()} to {leaf.max()}"
            for name, leaf in named_leaves(None, labels).items()
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu" and leaf.size
        )

    def about_nan(self) -> str:
        """The causes of a NaN loss to look for: labels first, with their range in the batch that this was made of."""
        seen = f" (the first batch has {self._label_ranges})" if self._label_ranges else ""
        return (
            f"Look first for labels out of range, whose loss is NaN{seen}: for n classes they are integers from 0 to "
            "n - 1. Then look for a division by zero or a logarithm of zero"
        )

    def __call__(self, number: int, pair: tuple[PyTree, PyTree], step: Callable[..., T], *args: Any) -> T:
        """`step(*args)`, of a batch with that number in the input, counted from 1."""
        try:
            return step(*args)
        except (TypeError, ValueError, LookupError) as error:
            # A TypeError may be jax's, for a leaf that is not an array; a model_fn raises the others where a feature is
            # missing, or has another shape.
            if isinstance(error, TypeError):
                check_batch(*pair)
            differences = self._differences(pair)
            if not differences:
                raise
            raise ValueError(
                f"Batch {number} of the input is not like the one that the model was built with: {differences}. "
                f"Its step failed: {error} Give batches of the same features, equal in all dimensions but the first."
            ) from error

    def _differences(self, pair: tuple[PyTree, PyTree]) -> str:
        """In words; nothing where only the numbers of rows differ."""
        before, now = self._built_with, _shapes(*pair)
        changes = []
        for name in {**before, **now}:
            if name not in now:
                changes.append(f"{name} is missing")
            elif name not in before:
                changes.append(f"{name} is new")
            elif before[name][1:] != now[name][1:]:
                changes.append(f"{name} has the shape {now[name]} instead of {before[name]}")
        return ", ".join(changes)


def _shapes(features: Features, labels: Labels) -> dict[str, tuple[int, ...]]:
    leaves = named_leaves(features, labels, is_leaf=is_sparse)
    return {name: getattr(leaf, "shape", ()) for name, leaf in leaves.items()}


def _rows(name: str, leaf: Any) -> int:
    if is_jax_sparse(leaf):
        _check_sparse(name, leaf)
    elif not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise TypeError(
            f"features and labels must be arrays or pytrees of arrays; got {name} = {leaf!r} "
            f"of type {type(leaf).__name__}. Convert it, for example by np.asarray."
        )
    # Arrays of jax are not asked: they hold no strings, and numpy does not know the dtypes of some, such as keys.
    elif not isinstance(leaf, jax.Array) and np.dtype(leaf.dtype).kind in "OSU":
        raise TypeError(
            f"features and labels must be arrays of numbers; got {name} of dtype {leaf.dtype}. "
            "Turn strings into integers in input_fn, by `est.feature_column.encode(features, columns)` for example, "
            "those of labels by `est.feature_column.encode_labels(labels, label_vocabulary)`; `pandas_input_fn` and "
            "`csv_input_fn` do it for `columns=columns` and `label_vocabulary=label_vocabulary`. Write "
            "`.astype(np.int32)` for integers in an array of objects."
        )
    elif fix := unknown_dtype(leaf.dtype):
        raise TypeError(f"features and labels must be arrays of numbers that jax has; got {name} {fix}")
    if not leaf.shape:
        raise ValueError(
            f"Every array of a batch needs a batch dimension; {name} is a scalar. "
            "Give values that are the same for all examples by params."
        )
    return leaf.shape[0]


def _check_sparse(name: str, leaf: JAXSparse) -> None:
    if not is_sparse(leaf):
        raise TypeError(
            f"Sparse features and labels must be of type jax.experimental.sparse.BCOO; got {name} = {leaf!r} of type "
            f"{type(leaf).__name__}. Convert it, for example by `BCOO.fromdense(x.todense())`."
        )
    if not (jnp.issubdtype(leaf.dtype, jnp.integer) or jnp.issubdtype(leaf.dtype, jnp.floating)):
        raise TypeError(
            f"Sparse features and labels must hold integers or floats; got {name} of dtype {leaf.dtype}. "
            "Convert its data, for example by `.astype(np.float32)`."
        )
    if leaf.shape and not leaf.n_batch + leaf.n_sparse:
        raise ValueError(
            f"The rows of a sparse array must be a sparse or a batch dimension; all dimensions of {name} = {leaf!r} "
            "are dense. Give `x.todense()`."
        )
    if not jnp.issubdtype(leaf.indices.dtype, jnp.integer):
        raise TypeError(f"The indices of a sparse array must be integers; {name} has {leaf.indices.dtype}.")
    largest = max(leaf.shape[leaf.n_batch : leaf.n_batch + leaf.n_sparse], default=0)
    if largest > np.iinfo(leaf.indices.dtype).max:
        raise ValueError(
            f"The indices of {name} = {leaf!r} are {leaf.indices.dtype}, which cannot hold {largest}, the index that "
            "jax gives to padding. Convert them to int32."
        )
