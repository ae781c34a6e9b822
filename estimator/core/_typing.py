"""Types that have a name."""

from __future__ import annotations

from typing import Any

PyTree = Any
Variables = dict[str, PyTree]  # by full name
Slots = dict[str, PyTree]  # by the name of an optimizer, its optax state
