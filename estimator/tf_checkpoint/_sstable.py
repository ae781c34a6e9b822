"""Tables of sorted keys and values in a file, as LevelDB and TensorFlow write them: blocks, the last of which lists the
others."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import google_crc32c

_MAGIC = 0xDB4775248B80FB57
_FOOTER, _TRAILER = 48, 5  # bytes: at the end of the table; after each block, its compression and checksum

_MOST_KEYS = 100  # bytes of keys, each of which begins as the one before, for each byte of a block


def read_table(path: str) -> dict[bytes, bytes]:
    """The values of the table in a file, by key."""
    with open(path, "rb") as file:
        table = file.read()
    if len(table) < _FOOTER or struct.unpack("<Q", table[-8:])[0] != _MAGIC:
        raise ValueError(f"{path} has another format, or is not complete")
    _, at = _read_handle(table, len(table) - _FOOTER)
    handles = [_read_handle(value, 0)[0] for _, value in _block(path, table, *_read_handle(table, at)[0])]
    return {key: value for start, size in handles for key, value in _block(path, table, start, size)}


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads an integer of seven bits in each byte, the lowest ones first; returns it and its end."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
        if shift > 63:
            raise ValueError("an integer has no end")


def unmask_crc(crc: int) -> int:
    """The CRC of one that TensorFlow and LevelDB store."""
    # They mask it, since the CRC of data that contains CRCs would be weak.
    rotated = crc - 0xA282EAD8 & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def _read_handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Reads the place of a block, its start and size; returns it and the end of what was read."""
    start, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (start, size), at


def _block(path: str, table: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    block, trailer = table[start : start + size], table[start + size : start + size + _TRAILER]
    crc = google_crc32c.value(block + trailer[:1])
    if len(trailer) < _TRAILER or crc != unmask_crc(struct.unpack("<I", trailer[1:])[0]):
        raise ValueError(f"{path} is damaged. Copy it again")
    if trailer[0]:
        raise ValueError(f"{path} is compressed, which is not known here. Load and save it by TensorFlow")
    end = size - 4 - 4 * struct.unpack("<I", block[-4:])[0]
    at, key, length_of_keys = 0, b"", 0
    while at < end:  # a key begins as the one before
        shared, at = read_varint(block, at)
        own, at = read_varint(block, at)
        length, at = read_varint(block, at)
        key = key[:shared] + block[at : at + own]
        length_of_keys += len(key)
        if length_of_keys > _MOST_KEYS * size:
            raise ValueError(f"{path} has keys of {length_of_keys} bytes in a block of {size}")
        yield key, block[at + own : at + own + length]
        at += own + length
