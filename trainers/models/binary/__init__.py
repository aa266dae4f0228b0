"""`model.encoder: binary`: encoder layers whose weights, and as an option inputs, have one or a few bits.

`settings` is the section of the spec, `quantisers` the arithmetic, `layers` a Linear that computes with it
from latent fp32 weights, `install` puts it into a model, or splits a ternary one of half the width. `course`
follows the latent weights through training. `packed` computes from the bits of a trained layer and
stores them. Other packages know `entry` alone, and work without it. Imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainers.models.binary.packed import load_packed

__all__ = ["load_packed"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'trainers.models.binary' has no attribute {name!r}")
    return getattr(import_module("trainers.models.binary.packed"), name)
