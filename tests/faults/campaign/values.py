"""What the simulated trainer reports: a value names the call of `train` that reported it."""

from __future__ import annotations

WRITER = "writer"
"""Metric that has such values."""
DIVERGING_SEED = 1000
"""Runs with this seed or a higher one report a loss that rises, for searches that stop such runs early."""
SLOW_SEED = 500
"""The run with this seed takes its time for a step: it stops long after the others."""
_SPAN = 1000


def value_of(writer: int, step: int) -> float:
    """The value that a call of `train` reports at a step."""
    return float(writer * _SPAN + step)


def writer_of(value: float) -> int:
    """The call of `train` that reported a value."""
    return int(value) // _SPAN
