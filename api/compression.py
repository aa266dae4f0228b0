"""Whether a client takes an answer compressed."""

from __future__ import annotations


def takes_gzip(accepted: str) -> bool:
    """Returns whether a value of Accept-Encoding includes gzip."""
    for part in accepted.split(","):
        name, _, weight = part.strip().partition(";")
        if name.strip().lower() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
