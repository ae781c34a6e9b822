"""Batches read from CSV files."""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from estimator.inputs._array_iterator import RowBatches
from estimator.inputs._pandas import pandas_input_fn


def csv_input_fn(
    file_pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    batch_size: int = 128,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[Any] | Mapping[str, Any] | None = None,
    label_name: str | None = None,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    *,
    select_columns: Sequence[str] | None = None,
    field_delim: str = ",",
    header: bool = True,
    columns: Iterable[Any] | None = None,
    label_vocabulary: Sequence[str] | None = None,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Callable[[], RowBatches]:
    """Returns an input_fn of the rows of CSV files, which pandas reads into memory at once.

    Features are a dict of columns, as for `pandas_input_fn`. Arguments have the names of
    `tf.contrib.data.make_csv_dataset`, which repeats its rows by default; the `record_defaults` of `tf.decode_csv` may
    be given as `column_defaults`.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "census.csv")
    >>> with open(path, "w") as file:
    ...     _ = file.write("39,State-gov,0\\n,Private,1\\n")
    >>> input_fn = csv_input_fn(path, 2, ["age", "work", "rich"], [0.0, "", 0], "rich", header=False, shuffle=False)
    >>> features, labels = next(input_fn())
    >>> features["age"], features["work"].tolist(), labels
    (array([39.,  0.], dtype=float32), ['State-gov', 'Private'], array([0, 1], dtype=int32))

    Args:
      file_pattern: the path of a file, or a pattern such as "data/*.csv", or several of them. Rows of files follow each
        other, the files of a pattern in the order of their names.
      batch_size, num_epochs, shuffle, seed, drop_remainder: as for `numpy_input_fn`.
      column_names: of all columns in the files, in their order; if None, the first line of the files has them.
      column_defaults: for each column that is read, the value of an empty field, whose kind is the column's: a float
        (float32), an int (int32) or a string; by name, or in the order of the columns. If None, pandas decides on the
        kinds, and an empty field is NaN.
      label_name: the column that is the labels; if None, there are only features.
      select_columns: the names of the columns to read; all if None.
      field_delim: the character between fields.
      header: whether the first line of each file is not a row. As in TensorFlow it must be the same in all files.
      columns, label_vocabulary: as for `pandas_input_fn`: they turn strings into integers.

    Returns:
      An input_fn, as `pandas_input_fn` returns one.

    Raises:
      TypeError: pandas is not installed.
      ValueError: there is no file, a column is unknown, a row does not have a field for each column, headers differ, a
        field is not of its column's kind, or a number of defaults or names is wrong; or as `pandas_input_fn` does.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise TypeError("csv_input_fn reads files by pandas. Install it (`pip install pandas`).") from error
    given = [file_pattern] if isinstance(file_pattern, str | os.PathLike) else file_pattern
    patterns = [os.fspath(pattern) for pattern in given]
    # A pattern without a match is opened as a path, and the error names it.
    paths = [path for pattern in patterns for path in sorted(glob.glob(pattern)) or [pattern]]
    if not paths or (not header and column_names is None):
        raise ValueError(
            "csv_input_fn needs the path of a file, and `column_names` where files have no header; got "
            f"{file_pattern!r} and column_names={column_names!r}."
        )
    if not isinstance(field_delim, str) or len(field_delim) != 1:
        raise ValueError(f"csv_input_fn needs one character as field_delim, such as ';'; got {field_delim!r}.")
    names = _column_names(paths, column_names, field_delim, header)
    chosen = names if select_columns is None else [name for name in names if name in select_columns]
    missing = {*(select_columns or ()), *([] if label_name is None else [label_name])} - {*chosen}
    defaults = _defaults(chosen, column_defaults)
    if missing:
        raise ValueError(f"csv_input_fn got the columns {sorted(missing)}, which are not among {chosen}.")
    # The type of a default is the dtype of its column, as in `record_defaults`.
    kinds = {name: {float: "float32", int: "int32"}.get(type(default), str) for name, default in defaults.items()}
    first = 0 if header else None
    frames = []
    for path in paths:
        text = {name: str for name in defaults}
        # Columns with a default are read as strings, and cast when their empty fields are filled: the dtype that pandas
        # infers may differ from file to file. As in TensorFlow, with defaults only an empty field is missing: "NA" is a
        # string.
        frame = pd.read_csv(
            path,
            sep=field_delim,
            names=names,
            header=first,
            usecols=chosen,
            dtype=text,
            skipinitialspace=True,
            keep_default_na=not defaults,
            na_values=[""],
            low_memory=False,  # else pandas decides on the kind of a column for each part of a file
        )
        frames.append(frame.fillna({name: str(value) for name, value in defaults.items()}).astype(kinds))
    rows = pd.concat(frames, ignore_index=True)
    labels = None if label_name is None else rows.pop(label_name)
    return pandas_input_fn(
        rows,
        labels,
        batch_size,
        num_epochs,
        shuffle,
        target_column="",
        columns=columns,
        label_vocabulary=label_vocabulary,
        seed=seed,
        drop_remainder=drop_remainder,
    )


def _column_names(paths: list[str], given: Sequence[str] | None, field_delim: str, header: bool) -> list[str]:
    """The names of the columns, after a check that all files and rows have these columns; pandas would cut and fill."""
    first = [_first_row(path, field_delim, None if given is None else len(given)) for path in paths]
    names = first[0] if given is None else list(given)
    if len({*names}) < len(names):
        raise ValueError(f"csv_input_fn needs columns of different names; got {names}, in {paths[0]!r}.")
    for path, row in zip(paths, first, strict=True) if header else ():
        if row != first[0]:
            raise ValueError(
                f"All files of csv_input_fn must have the same column names in their first line; {path!r} has {row}, "
                f"{paths[0]!r} has {first[0]}. Call csv_input_fn for each of them, or write its columns in that order."
            )
    if header and names != first[0] and sorted(names) == sorted(first[0]):
        raise ValueError(
            f"csv_input_fn got column_names={names}, but {paths[0]!r} has its columns in the order {first[0]}. Leave "
            "column_names out."
        )
    return names


def _first_row(path: str, field_delim: str, width: int | None) -> list[str]:
    """The fields of the first row of a file, all of whose rows must have `width` fields, or as many as the first."""
    import fsspec

    first: list[str] = []
    with fsspec.open(path, "rt", compression="infer", newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter=field_delim, skipinitialspace=True)
        for row in rows:
            if row and row != [""]:  # pandas leaves out blank lines
                first = first or row
                if len(row) != (width or len(first)):
                    raise ValueError(
                        f"csv_input_fn expects {width or len(first)} fields in each row, one for each column; line "
                        f"{rows.line_num} of {path!r} has {len(row)}: {row}."
                    )
    if not first:
        raise ValueError(f"csv_input_fn found no rows in {path!r}.")
    return first


def _defaults(columns: list[str], defaults: Sequence[Any] | Mapping[str, Any] | None) -> dict[str, Any]:
    """The value of an empty field by column; TensorFlow's `record_defaults` has lists of one."""
    if defaults is None:
        return {}
    if not isinstance(defaults, Mapping):
        if len(defaults) != len(columns):
            raise ValueError(f"csv_input_fn got {len(defaults)} column_defaults for the columns {columns}.")
        defaults = dict(zip(columns, defaults, strict=True))
    values = {name: value[0] if isinstance(value, list) else value for name, value in defaults.items()}
    for name, value in values.items():
        if name not in columns or type(value) not in (int, float, str):
            raise ValueError(
                f"csv_input_fn needs column_defaults that are floats, ints or strings, for columns of {columns}; got "
                f"{name!r}: {value!r}."
            )
    return values
