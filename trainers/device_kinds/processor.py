from __future__ import annotations

from functools import cache
from pathlib import Path

BF16_UNITS = frozenset({"amx_bf16", "bf16"})
"""Flags of processors whose bf16 products are faster than fp32: Intel's AMX, and Arm's BFMMLA.

AVX-512's own bf16 instructions are not: measured on a Xeon, oneDNN's bf16 products reach 0.55 to 0.62 of the
rate of MKL's in fp32, in every shape that the presets have.
"""


def has_bf16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bf16 products are faster than fp32's; False where the system does not list flags."""
    return bool(BF16_UNITS & _flags(cpuinfo))


@cache
def _flags(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    found = (words for name, _, words in named if name.strip() in ("flags", "Features"))
    return frozenset(next(found, "").split())
