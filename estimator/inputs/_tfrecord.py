"""Batches read from TFRecord files of `tf.Example`s."""

from __future__ import annotations

import collections
import glob
import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from estimator.feature_column._encode import encode, encode_labels
from estimator.inputs._array_iterator import Order
from estimator.io._features import Config, SparseTensorValue
from estimator.io._parse import Parsed, check_features, parse_example
from estimator.io._records import check_compression, read_records
from estimator.storage._files import is_url, store_of

_CALLER = "tfrecord_input_fn"
_DRAWS = 1024  # random numbers at a time: numpy takes as long for one


class _Record(NamedTuple):
    """A record, and where it is."""

    path: str
    offset: int
    data: bytes


def tfrecord_input_fn(
    file_pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    features: Mapping[str, Config],
    batch_size: int = 128,
    label_key: str | None = None,
    shuffle: bool = True,
    num_epochs: int | None = 1,
    compression: str | None = None,
    seed: int | None = None,
    drop_remainder: bool = False,
    *,
    shuffle_buffer_size: int = 10_000,
    cycle_length: int = 4,
    columns: Iterable[Any] | None = None,
    label_vocabulary: Sequence[str] | None = None,
) -> Callable[[], RecordBatches]:
    """Returns an input_fn of the `tf.Example`s in TFRecord files, which are read as they are needed.

    It is `tf.contrib.data.make_batched_features_dataset`, without TensorFlow. Features are a dict of arrays. A
    `VarLenFeature` becomes an array of shape `(batch, k)`, filled up with what feature columns and
    `est.embedding_lookup_sparse` take for no value: -1, NaN or b"". There k is a power of two, so that a few compiled
    programs serve all batches.

    >>> import estimator as est, numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "train.tfrecord")
    >>> with est.io.TFRecordWriter(path) as writer:
    ...     for x, y in ((0.5, 0), (1.5, 1), (2.5, 1)):
    ...         example = est.io.Example()
    ...         example.features.feature["x"].float_list.value.append(x)
    ...         example.features.feature["y"].int64_list.value.append(y)
    ...         writer.write(example.SerializeToString())
    >>> features = {"x": est.io.FixedLenFeature([], np.float32), "y": est.io.FixedLenFeature([], np.int64)}
    >>> input_fn = tfrecord_input_fn(path, features, batch_size=2, label_key="y", shuffle=False)
    >>> for batch in input_fn():
    ...     print(batch)
    ({'x': array([0.5, 1.5], dtype=float32)}, array([0, 1]))
    ({'x': array([2.5], dtype=float32)}, array([1]))

    Args:
      file_pattern: the path or URL of a file, or a pattern such as "data/train-*", or several of them. Of several
        processes each gives its own, of `context = est.input_context()`: `paths[context.index :: context.count]`.
      features: by key, what `est.io.parse_example` takes; `est.feature_column.make_parse_example_spec(columns)` makes
        them of feature columns.
      batch_size, num_epochs, seed, drop_remainder: as for `numpy_input_fn`.
      label_key: the feature that is the labels; if None, there are only features.
      shuffle: whether to draw the records of an epoch at random from a buffer, with the files in another order in each
        epoch; otherwise they come in the order of the files' names.
      compression: "GZIP" or "ZLIB"; None for files that are not compressed.
      shuffle_buffer_size: the number of records in the buffer, which is in memory.
      cycle_length: the number of files that are read in turns, where `shuffle` is True.
      columns, label_vocabulary: as for `pandas_input_fn`: they turn strings into integers.

    Returns:
      An input_fn. Each call returns a new iterator; it has `get_state()` and `set_state(state)`, so that a run that was
      killed resumes at its batch. It then reads again, without parsing it, what the epoch has read before.

    Raises:
      ValueError: there is no file, or no feature of the name of the label; or a number is out of its range. While it is
        read: a file is damaged, with the byte, or an example lacks a feature; the file and the byte are named.
      TypeError: a feature is neither of `est.io`'s three.
    """
    paths = _find(file_pattern)
    check_features(_CALLER, features, Config)
    if label_key is not None and label_key not in features:
        raise ValueError(f"{_CALLER} got label_key={label_key!r}, which is not among the features {[*features]}.")
    for name, value in (("shuffle_buffer_size", shuffle_buffer_size), ("cycle_length", cycle_length)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an int >= 1; got {value!r}.")
    order = Order(batch_size, num_epochs, shuffle, seed, drop_remainder)
    files = _Files(paths, check_compression(_CALLER, compression), shuffle_buffer_size, cycle_length)
    columns = None if columns is None else list(columns)

    def make_batch(parsed: Parsed) -> Any:
        batch: dict[str, Any] = {key: _dense(value) for key, value in parsed.items()}
        labels = None if label_key is None else batch.pop(label_key)
        if columns is not None:
            batch = encode(batch, columns)
        if label_vocabulary is not None:
            labels = encode_labels(labels, label_vocabulary)
        return batch if label_key is None else (batch, labels)

    return lambda: RecordBatches(files, order, lambda records: make_batch(_parse(records, features)))


class RecordBatches(Iterator[Any]):
    """Batches of records. The position is a dict of ints; another iterator can resume from it, with any batch size."""

    def __init__(self, files: _Files, order: Order, make_batch: Callable[[list[_Record]], Any]) -> None:
        self._files, self._order, self._make_batch = files, order, make_batch
        self._seed = secrets.randbits(63) if order.seed is None else int(order.seed)
        self._epoch = self._taken = 0  # of this epoch
        self._records: Iterator[_Record] | None = None  # the rest of this epoch

    def __next__(self) -> Any:
        batch: list[_Record] = []
        while len(batch) < self._order.batch_size and self._epoch != self._order.num_epochs:
            more = list(itertools.islice(self._open(), self._order.batch_size - len(batch)))
            batch += more
            self._taken += len(more)
            if not more:
                self._end_epoch()
        if not batch or (self._order.drop_remainder and len(batch) < self._order.batch_size):
            raise StopIteration
        return self._make_batch(batch)

    def get_state(self) -> dict[str, int]:
        """The position: the epoch, the record in it, the number of files, and the seed if it shuffles."""
        state = {"epoch": self._epoch, "offset": self._taken, "files": len(self._files.paths)}
        return {**state, "seed": self._seed} if self._order.shuffle else state

    def set_state(self, state: dict[str, int]) -> None:
        """Continues from a position of `get_state`, with the seed of that iterator."""
        own = self.get_state()
        if not isinstance(state, dict) or state.keys() != own.keys() or state["files"] != own["files"]:
            raise ValueError(
                f"The position {state!r} is not one of this input, whose position is now {own!r}. Resume with the same "
                "files and the same `shuffle`, or start the input from the beginning."
            )
        self._epoch, self._taken = int(state["epoch"]), int(state["offset"])
        self._seed = int(state.get("seed", self._seed))
        self.close()

    def close(self) -> None:
        """Closes the files that are open."""
        records, self._records = self._records, None
        if records is not None:
            records.close()  # type: ignore[attr-defined]

    def _open(self) -> Iterator[_Record]:
        if self._records is None:
            rng = np.random.default_rng([self._seed, self._epoch]) if self._order.shuffle else None
            self._records = self._files.read(rng)
            if sum(1 for _ in itertools.islice(self._records, self._taken)) < self._taken:
                raise ValueError(
                    f"The position of the input is after record {self._taken} of its epoch, but the files have fewer: "
                    f"{self._files.paths}. Resume with the same files, or start the input from the beginning."
                )
        return self._records

    def _end_epoch(self) -> None:
        if not self._taken:
            raise ValueError(f"{_CALLER} found no records in {self._files.paths}.")
        self._epoch, self._taken, self._records = self._epoch + 1, 0, None


class _Files(NamedTuple):
    paths: list[str]
    compression: str
    buffer_size: int
    cycle_length: int

    def read(self, rng: np.random.Generator | None) -> Iterator[_Record]:
        """The records of an epoch: in order, or drawn by a generator of random numbers."""
        if rng is None:
            return (record for path in self.paths for record in self._records_of(path))
        return self._draw(self._in_turns([self.paths[i] for i in rng.permutation(len(self.paths))]), rng)

    def _records_of(self, path: str) -> Iterator[_Record]:
        return (_Record(path, offset, data) for offset, data in read_records(path, self.compression))

    def _in_turns(self, paths: list[str]) -> Iterator[_Record]:
        waiting = iter(paths)
        turns = collections.deque(map(self._records_of, itertools.islice(waiting, self.cycle_length)))
        while turns:
            record = next(turns[0], None)
            if record is not None:
                yield record
                turns.rotate(-1)
                continue
            turns.popleft()
            turns.extend(map(self._records_of, itertools.islice(waiting, 1)))

    def _draw(self, records: Iterator[_Record], rng: np.random.Generator) -> Iterator[_Record]:
        buffer = list(itertools.islice(records, self.buffer_size))
        drawn: list[int] = []
        for record in records:
            drawn = drawn or rng.integers(len(buffer), size=_DRAWS).tolist()
            i = drawn.pop()
            yield buffer[i]
            buffer[i] = record
        for i in rng.permutation(len(buffer)):
            yield buffer[i]


def _parse(records: list[_Record], features: Mapping[str, Config]) -> Parsed:
    try:
        return parse_example([record.data for record in records], features)
    except ValueError:
        for record in records:  # to find the one
            try:
                parse_example([record.data], features)
            except ValueError as error:
                raise ValueError(f"{error} This is the record at byte {record.offset} of {record.path!r}.") from error
        raise


def _dense(value: np.ndarray | SparseTensorValue) -> np.ndarray:
    if not isinstance(value, SparseTensorValue):
        return value
    return value.to_dense(width=1 << (max(1, int(value.dense_shape[-1])) - 1).bit_length())


def _find(file_pattern: Any) -> list[str]:
    given = [file_pattern] if isinstance(file_pattern, str | os.PathLike) else list(file_pattern)
    paths = [path for pattern in given for path in _matching(os.fspath(pattern))]
    if not paths:
        raise ValueError(f"{_CALLER} found no files for {file_pattern!r}.")
    return paths


def _matching(pattern: str) -> list[str]:
    if not glob.has_magic(pattern):
        return [pattern]
    if not is_url(pattern):
        return sorted(glob.glob(pattern))
    store, inner = store_of(pattern)
    return sorted(store.unstrip_protocol(path) for path in store.glob(inner))
