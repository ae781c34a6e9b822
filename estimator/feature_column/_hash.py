"""Hashes of strings and of integers, the same in every process and on every device."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Crc32:
    """An integer for a string: 31 bits of the CRC-32 of its UTF-8 bytes."""

    def code(self, text: str) -> int:
        # 31 bits, so that it is not negative as an int32: -1 stands for the absence of a class.
        return zlib.crc32(text.encode()) & 0x7FFFFFFF


def bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint32)


def mix(bits: jax.Array) -> jax.Array:
    """Mixes bits by the finalizer of MurmurHash3, a permutation of uint32."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def bucket(bits: jax.Array, size: int) -> jax.Array:
    return (bits % np.uint32(size)).astype(jnp.int32)
