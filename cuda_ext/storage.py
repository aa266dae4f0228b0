"""Number formats that Adan stores things in. Imports no torch, so that a spec is checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MASTERS: Mapping[str, tuple[str, ...]] = MappingProxyType({"fp32": ("fp16", "bf16"), "split": ("bf16",)})
"""Kinds of fp32 masters, and the 16-bit parameter formats that each can complete."""

MOMENTS = ("fp32", "bf16")
"""Formats of the moments m and v; n is always fp32."""

BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "fp16": 2, "bf16": 2})
"""Bytes of an element."""


def state_bytes(parameters: str, masters: str, moments: str) -> int:
    """Bytes of optimizer state per parameter: m, v, n, the previous gradient and what completes 16 bits.

    Args:
        parameters: format of parameters and gradients, out of `BYTES`.
        masters: out of `MASTERS`; fp32 parameters have none.
        moments: out of `MOMENTS`.
    """
    completing = 0
    if BYTES[parameters] == 2:
        completing = 2 if masters == "split" else 4
    return 2 * BYTES[moments] + BYTES["fp32"] + BYTES[parameters] + completing
