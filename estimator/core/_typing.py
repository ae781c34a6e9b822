"""Types that have a name."""

from __future__ import annotations

from typing import Any

PyTree = Any
