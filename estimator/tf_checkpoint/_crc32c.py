"""The CRC-32C of bytes, which files of TensorFlow carry."""

from __future__ import annotations

import google_crc32c


def crc32c(data: bytes | memoryview) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return google_crc32c.value(bytes(data))


def unmasked(crc: int) -> int:
    """The CRC as TensorFlow and LevelDB store it: masked, since a CRC of data that contains a CRC is weak."""
    rotated = crc - 0xA282EAD8 & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF
