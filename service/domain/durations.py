from __future__ import annotations

import re

_SECONDS = {"h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def seconds_of(text: str) -> float:
    """Reads 12h, 90d, 8w."""
    found = re.fullmatch(r"([1-9]\d{0,4})([hdw])", text)
    if found is None:
        raise ValueError(
            f"{text[:40]!r} is not a length of time; write hours, days or weeks as 12h, 90d or 8w"
        )
    return int(found[1]) * _SECONDS[found[2]]
