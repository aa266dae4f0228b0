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

MASTER_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "split": 2})
"""Bytes per parameter of each kind of masters."""
