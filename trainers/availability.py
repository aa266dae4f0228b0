"""What this version can run, of all the words that a spec may use.

The vocabulary of a spec is the design's; a part that is not built yet is refused when the
spec is validated, never in a worker. Building a part means adding its word here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cuda_ext import storage

AVAILABLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model.encoder": ("huggingface",),
        "optimizer.implementation[adamw]": ("auto", "single_unfused", "multi_unfused", "multi_fused"),
        "optimizer.implementation[adan]": (
            "auto",
            "single_unfused",
            "multi_unfused",
            "single_fused",
            "multi_fused",
        ),
        "optimizer.masters[adamw]": ("fp32",),
        "optimizer.masters[adan]": tuple(storage.MASTERS),
        "optimizer.moments[adamw]": ("fp32",),
        "optimizer.moments[adan]": storage.MOMENTS,
    }
)
