"""The CRC-32C of bytes, which files of TensorFlow carry; for large ones by numpy, at some 200 MB in a second."""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
_CHUNK = 1024  # bytes that numpy takes one after the other, of all chunks side by side


def crc32c(data: bytes | memoryview) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    table, shift = _table(), _shift()
    values = np.frombuffer(data, np.uint8)
    crc, chunks = 0xFFFFFFFF, len(values) // _CHUNK
    if chunks >= 64:
        for own in _from_zero(values[: chunks * _CHUNK].reshape(chunks, _CHUNK)).tolist():
            crc = own ^ shift[0][crc & 255] ^ shift[1][crc >> 8 & 255] ^ shift[2][crc >> 16 & 255] ^ shift[3][crc >> 24]
        values = values[chunks * _CHUNK :]
    steps = table.tolist()
    for byte in values.tolist():
        crc = steps[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def unmasked(crc: int) -> int:
    """The CRC as TensorFlow and LevelDB store it: masked, since a CRC of data that contains a CRC is weak."""
    rotated = crc - 0xA282EAD8 & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


@functools.cache
def _table() -> np.ndarray:
    table: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> 1 ^ (table & 1) * np.uint32(_POLYNOMIAL)
    return table


@functools.cache
def _shift() -> list[list[int]]:
    """By number and value of each byte of a CRC, what it becomes after a chunk of zeros."""
    starts = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    return _from_zero(np.zeros((1024, _CHUNK), np.uint8), starts.ravel()).reshape(4, 256).tolist()


def _from_zero(chunks: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """The CRCs of the rows, without the inversions at the beginning and the end."""
    table = _table()
    crc = np.zeros(len(chunks), np.uint32) if start is None else start
    for column in np.ascontiguousarray(chunks.T):
        crc = table[(crc ^ column) & 255] ^ crc >> 8
    return crc
