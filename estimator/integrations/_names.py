"""Names of what is reported, as files and services take them."""

from __future__ import annotations

import re


def as_path(tag: str) -> str:
    """A tag as a path that stays within its folder, whatever is in the tag.

    >>> as_path("layer/weights"), as_path("/../a//b")
    ('layer/weights', '_/_/a/_/b')
    """
    parts = re.sub(r"[\x00-\x1f\x7f\\]", "_", tag).split("/")
    return "/".join("_" if part in ("", ".", "..") else part[:200] for part in parts)
