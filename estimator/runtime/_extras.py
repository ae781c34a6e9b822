"""The packages that only some functions need: each is in an extra of this one."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(caller: str, module: str, extra: str, otherwise: str = "") -> Any:
    """Returns a module, or raises an error with the extra that brings it; `otherwise` says what works without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed = f"`{caller}` needs the package {module.partition('.')[0]}"
        raise ImportError(f"{needed}. {install(extra)}.{otherwise} ({error})") from error


def install(extra: str) -> str:
    """What to do for an extra. No index of packages has this one, and a stranger could take its name there."""
    return f"Install it in your clone: pip install -e '.[{extra}]'"
