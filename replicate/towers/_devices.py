"""Devices by name."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any

import jax

# With TensorFlow's "/job:localhost/replica:0/task:0", which is this process, or without.
_NAME = re.compile(
    r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?/?(?:device:)?(gpu|cpu|tpu)(?::(\d+))?", re.IGNORECASE
)


def find_devices(devices: Sequence[jax.Device | str] | None, repeated: bool = False) -> tuple[jax.Device, ...]:
    """The devices of the towers.

    >>> [str(device) for device in find_devices(["/cpu:0", "/device:CPU:1"])]
    ['cpu:0', 'cpu:1']

    Args:
      devices: `jax.Device`s, or names such as "/gpu:0", "/device:GPU:0", "cpu:1", which count the devices of this
        process, as TensorFlow's "/job:localhost/replica:0/task:0/device:GPU:0" does; or what jax calls a device,
        `str(device)`: "cuda:0", or "cpu:2048" in the second of several processes. None means all GPUs or TPU cores,
        or, where there are none, all CPU devices: of all processes, if there are several.
      repeated: whether a single device may be named several times, for as many towers.
    """
    if devices is None:
        # The towers of a process are next to each other, like its rows in the global batch.
        return tuple(sorted(jax.devices(), key=lambda device: device.process_index))
    if isinstance(devices, str | jax.Device):
        raise TypeError(f"devices must be a list; write devices=[{devices!r}].")
    chosen = tuple(_find(device) for device in devices)
    if not chosen:
        raise ValueError("devices must name at least one device; got none. Leave it out for all of them.")
    if len({device.platform for device in chosen}) > 1:
        raise ValueError(
            f"The devices of the towers must be of one kind, since all towers run in one program; got {list(devices)}."
        )
    if len(set(chosen)) < len(chosen) and not (repeated and len(set(chosen)) == 1):
        also = ", unless they are all the same one, on which the towers then run together" if repeated else ""
        raise ValueError(f"Each device may come once in devices{also}; got {list(devices)}.")
    return chosen


def of_this_process(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """The devices that this process can put data on."""
    by_process = collections.Counter(device.process_index for device in devices)
    if len(by_process) > 1 and (len(by_process) < jax.process_count() or len(set(by_process.values())) > 1):
        counts = [by_process[i] for i in range(jax.process_count())]
        raise ValueError(
            f"Towers on several processes need as many devices of each; got {counts} of the processes 0, 1, ... "
            "Leave out `devices`, and start every process with as many as the others."
        )
    return tuple(device for device in devices if len(by_process) == 1 or device.process_index == jax.process_index())


def in_towers_of(size: int, devices: tuple[jax.Device, ...]) -> tuple[Any, ...]:
    """Towers of `size` neighbours each; for a size of 1 the devices themselves.

    >>> in_towers_of(2, find_devices(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]))
    ((CpuDevice(id=0), CpuDevice(id=1)), (CpuDevice(id=2), CpuDevice(id=3)))
    """
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"devices_per_tower must be an integer; got {size!r}.")
    if size < 1 or len(devices) % size:
        raise ValueError(
            f"devices_per_tower={size} does not divide the {len(devices)} devices into towers. Choose a divisor of "
            f"{len(devices)}, or name as many `devices` as the towers are to have."
        )
    if size == 1:
        return devices
    if len(set(devices)) < len(devices):
        raise ValueError(
            f"devices_per_tower={size} was given with one device named {len(devices)} times. A tower of several "
            "devices needs as many; leave out devices_per_tower."
        )
    if len({device.process_index for device in devices}) > 1:
        raise ValueError(
            f"devices_per_tower={size} was given with devices of several processes. Towers of several devices run in "
            "one process; name `devices` of this one, or leave it out."
        )
    return tuple(devices[begin : begin + size] for begin in range(0, len(devices), size))


def _find(device: jax.Device | str) -> jax.Device:
    if isinstance(device, jax.Device):
        return device
    # A name in TensorFlow's form counts the devices of this process; the names that jax prints, below, count those of
    # all processes.
    match = _NAME.fullmatch(device) if isinstance(device, str) else None
    if match:
        candidates = _local_devices(match[1].lower())
        index = int(match[2] or 0)
        if index < len(candidates):
            return candidates[index]
    for candidate in (*jax.devices(), *_local_devices("cpu")):
        if device in _names(candidate):
            return candidate
    there = [f"/{kind}:{i}" for kind in ("gpu", "tpu", "cpu") for i in range(len(_local_devices(kind)))]
    raise ValueError(f"There is no device {device!r}. The devices of this process are {', '.join(there)}.")


def _names(device: jax.Device) -> tuple[str, ...]:
    """The names that jax has for a device, now and in earlier versions."""
    return str(device), repr(device), f"TFRT_{device.platform.upper()}_{device.id}"


def _local_devices(platform: str) -> list[jax.Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # jax's answer where the platform is not there
        return []
