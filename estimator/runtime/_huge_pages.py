"""Advice on huge pages for large arrays on CPU devices, which glibc asks for only if it is set to."""

from __future__ import annotations

import functools
import math
import os
import platform
import re
import sys
from collections.abc import Collection, Iterable

import jax
from absl import logging

_LARGE = 100e6  # bytes
_SETTING = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
_ENABLED = "/sys/kernel/mm/transparent_hugepage/enabled"


def advise_huge_pages(arrays: Iterable[jax.Array]) -> None:
    """Logs, once in a process, that steps of large variables on CPU devices would be faster with huge pages.

    XLA takes the memory of temporary and of summed arrays from glibc at each step, which takes it from Linux, which
    clears it page by page.
    """
    # Only a message: `mallopt` within the process does not affect large arrays of threads, except with a single arena,
    # with which a process takes twice the memory.
    if sum(map(_count_cpu_bytes, arrays)) >= _LARGE and _huge_pages_wait_for_malloc():
        _log_once()


@functools.cache
def _log_once() -> None:
    logging.info(
        "The variables on CPU devices take more than 100 MB. Set %s in the environment before Python starts: Linux "
        "then clears their memory in huge pages, and a step takes up to a third less time.",
        _SETTING,
    )


def _count_cpu_bytes(array: jax.Array) -> int:
    """The bytes that an array holds on CPU devices of this process, in all its copies or parts."""
    sharding = array.sharding
    devices: Collection[jax.Device] = sharding.addressable_devices
    on_cpu = sum(device.platform == "cpu" for device in devices)
    return math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize * on_cpu


def _huge_pages_wait_for_malloc() -> bool:
    """Returns whether Linux gives huge pages to those who ask, and glibc could ask for them, but is not set to."""
    if sys.platform != "linux" or _read_glibc_version() < (2, 35):
        return False
    if "glibc.malloc.hugetlb" in os.environ.get("GLIBC_TUNABLES", "") or "LD_PRELOAD" in os.environ:
        return False
    try:
        with open(_ENABLED) as file:
            return "[madvise]" in file.read()
    except OSError:  # a kernel without huge pages
        return False


def _read_glibc_version() -> tuple[int, ...]:
    name, version = platform.libc_ver()
    return tuple(map(int, re.findall(r"\d+", version))) if name == "glibc" else (0,)
