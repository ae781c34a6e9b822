"""The values that a run saves beside the arrays of a checkpoint: position of the input, times, states of hooks."""

from __future__ import annotations

from typing import Any

_LATEST = 2.0**37  # seconds since 1970: after the year 6000


def check_host(host: dict[str, Any]) -> None:
    """Checks the form of what a run saves beside arrays; what users save there is theirs."""
    hooks, restored_from = host.get("hooks", {}), host.get("restored_from")
    if not isinstance(hooks, dict) or not isinstance(restored_from, int | None):
        raise ValueError(f"the states of hooks are {hooks!r:.100}, and its values are of step {restored_from!r:.100}")
    match host.get("input") or {"batches": 0, "positions": [None]}:
        case {"batches": int(batches), "positions": [_, *_]} if batches >= 0:
            pass
        case saved:
            raise ValueError(f"the position of the input is {saved!r:.100}")
    match host.get("time", {"start": 0.0, "now": 0.0, "seconds": [{"host": 0.0, "device": 0.0}]}):
        case {"start": start, "now": now, "seconds": [{"host": _, "device": _} as first, *_] as rows}:
            numbers = [start, now, *(seconds for row in rows for seconds in row.values())]
            if all(row.keys() == first.keys() for row in rows) and all(0 <= x < _LATEST for x in numbers):
                return
    raise ValueError(f"the times of the run are {host['time']!r:.100}")
