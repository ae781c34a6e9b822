"""Devices by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax

_NAME = re.compile(r"/?(?:device:)?(gpu|cpu|tpu)(?::(\d+))?", re.IGNORECASE)


def find_devices(devices: Sequence[jax.Device | str] | None) -> tuple[jax.Device, ...]:
    """The devices of the towers.

    >>> [str(device) for device in find_devices(["/cpu:0", "/device:CPU:1"])]
    ['cpu:0', 'cpu:1']

    Args:
      devices: `jax.Device`s, or names such as "/gpu:0", "/device:GPU:0", "cpu:1". None means all local GPUs or TPU
        cores, or, where there are none, all local CPU devices.

    Raises:
      ValueError: there are no such devices, one comes twice, or they are of several kinds.
    """
    if devices is None:
        return tuple(jax.local_devices())
    if isinstance(devices, str | jax.Device):
        raise TypeError(f"devices must be a list; write devices=[{devices!r}].")
    found = tuple(_find(device) for device in devices)
    if not found:
        raise ValueError("devices must name at least one device; got none. Leave it out for all of them.")
    if len(set(found)) < len(found):
        raise ValueError(f"Each device may come once in devices; got {list(devices)}.")
    if len({device.platform for device in found}) > 1:
        raise ValueError(f"The devices of the towers must be of one kind; got {list(devices)}.")
    return found


def _find(device: jax.Device | str) -> jax.Device:
    if isinstance(device, jax.Device):
        return device
    match = _NAME.fullmatch(device) if isinstance(device, str) else None
    if match:
        candidates = _local_devices(match[1].lower())
        index = int(match[2] or 0)
        if index < len(candidates):
            return candidates[index]
    there = [f"/{kind}:{i}" for kind in ("gpu", "tpu", "cpu") for i in range(len(_local_devices(kind)))]
    raise ValueError(f"There is no device {device!r}. The devices of this process are {', '.join(there)}.")


def _local_devices(platform: str) -> list[jax.Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # jax's answer where the platform is not there
        return []
