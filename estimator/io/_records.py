"""TFRecord files: records of bytes, each between its length and checksums."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

import google_crc32c

from estimator.storage._files import is_url, store_of

_LENGTH = struct.Struct("<QI")  # and its checksum
_SUM = struct.Struct("<I")
_PIECE = 1 << 24  # bytes; a length that is damaged, or hostile, takes no more memory than the file has
_BUFFER = 1 << 20
_OPTIONS = ("", "GZIP", "ZLIB")


def tf_record_iterator(path: str | os.PathLike[str], options: str | None = None) -> Iterator[bytes]:
    """Iterates over the records of a file.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "words.tfrecord")
    >>> with TFRecordWriter(path) as writer:
    ...     writer.write(b"one")
    ...     writer.write(b"two")
    >>> list(tf_record_iterator(path))
    [b'one', b'two']

    Args:
      path: a local path, or a URL.
      options: the compression of the file: "GZIP", "ZLIB", or, if None, none.

    Raises:
      ValueError: the file is damaged, with its path and the byte; or the compression is unknown.
      OSError: the file cannot be opened.
    """
    for _, record in read_records(os.fspath(path), check_compression("tf_record_iterator", options)):
        yield record


def read_records(path: str, compression: str) -> Iterator[tuple[int, bytes]]:
    """Yields the records of a file, each with the byte of the (uncompressed) file at which it begins."""
    offset = 0
    with _open(path, compression) as file:
        try:
            while header := file.read(_LENGTH.size):
                if len(header) < _LENGTH.size:
                    raise ValueError("the length of a record is not complete")
                length, check = _LENGTH.unpack(header)
                if _masked_sum(header[:8]) != check:
                    raise ValueError("the checksum of a record's length is another one")
                data = _read(file, length + _SUM.size)
                if len(data) < length + _SUM.size:
                    raise ValueError("the file ends within a record")
                record = data[:length]
                if _masked_sum(record) != _SUM.unpack_from(data, length)[0]:
                    raise ValueError("the checksum of a record is another one")
                yield offset, record
                offset += _LENGTH.size + length + _SUM.size
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            unpacked = f" of what is unpacked by {compression}" if compression else ""
            raise ValueError(
                f"The TFRecord file {path!r} is damaged at byte {offset}{unpacked}: {error}. Copy it again, or give "
                "the compression that it was written with."
            ) from error


class TFRecordWriter:
    """Writes a file of records; a context manager.

    Args:
      path: a local path, or a URL; an existing file is replaced.
      options: the compression: "GZIP", "ZLIB", or, if None, none.

    Raises:
      ValueError: the compression is unknown.
      OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], options: str | None = None) -> None:
        compression = check_compression("TFRecordWriter", options)
        self._raw = _open_raw(os.fspath(path), "wb")
        self._file: Any = gzip.GzipFile(fileobj=self._raw, mode="wb") if compression == "GZIP" else self._raw
        self._compressor = zlib.compressobj() if compression == "ZLIB" else None

    def write(self, record: bytes) -> None:
        """Appends a record, such as `example.SerializeToString()`."""
        self._append(frame_record(record))

    def flush(self) -> None:
        """Hands to the system what was written."""
        if self._compressor is not None:
            self._raw.write(self._compressor.flush(zlib.Z_SYNC_FLUSH))
        self._file.flush()
        self._raw.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._raw.closed:
            return
        if self._compressor is not None:
            self._raw.write(self._compressor.flush())
        self._file.close()
        self._raw.close()

    def _append(self, data: bytes) -> None:
        self._file.write(data if self._compressor is None else self._compressor.compress(data))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def frame_record(record: bytes) -> bytes:
    """A record as it is in a file, between its length and checksums; event files are made of such, too."""
    length = struct.pack("<Q", len(record))
    return length + _SUM.pack(_masked_sum(length)) + record + _SUM.pack(_masked_sum(record))


def check_compression(caller: str, given: Any) -> str:
    """The compression of a file, "" for none; also where it is in an object, as TensorFlow's `TFRecordOptions`."""
    compression = "" if given is None else given
    if compression not in _OPTIONS:
        raise ValueError(f'`{caller}` knows the compressions "GZIP" and "ZLIB", or None; got {given!r}.')
    return str(compression)


@contextlib.contextmanager
def _open(path: str, compression: str) -> Iterator[BinaryIO]:
    with _open_raw(path, "rb") as raw:
        if compression == "GZIP":
            with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked, io.BufferedReader(unpacked, _BUFFER) as file:
                yield file
        elif compression == "ZLIB":
            with io.BufferedReader(_Inflated(raw), _BUFFER) as file:
                yield file
        else:
            yield raw


def _open_raw(path: str, mode: str) -> Any:
    if is_url(path):
        store, inner = store_of(path)
        return store.open(inner, mode)
    return open(path, mode, buffering=_BUFFER)


class _Inflated(io.RawIOBase):
    """A file that zlib has compressed."""

    def __init__(self, packed: Any) -> None:
        self._packed = packed
        self._inflate = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data and not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._packed.read(_BUFFER)
            data = self._inflate.decompress(packed, len(buffer))
            if not packed and not data:
                raise EOFError("the compressed file is not complete")
        buffer[: len(data)] = data
        return len(data)


def _read(file: BinaryIO, size: int) -> bytes:
    if size <= _PIECE:
        return file.read(size)
    pieces = []
    while size and (piece := file.read(min(size, _PIECE))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _masked_sum(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
