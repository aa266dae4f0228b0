"""`model.encoder: binary`: encoder layers whose weights, and as an option inputs, have one or a few bits.

`settings` is the section of the spec, `quantisers` the arithmetic, `layers` a Linear that computes with it
from latent fp32 weights, `install` puts it into a model, or splits a ternary one of half the width. `course`
follows the latent weights through training. `packed` computes from the bits of a trained layer and
stores them. Other packages know `entries` alone, and work without this one. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainers.model_kinds.families import BERT_BLOCK, QUANTISED
from trainers.models.binary.settings import TERNARY_BITS, WEIGHTS, Binary
from trainers.registry import Deferred, Section

if TYPE_CHECKING:
    from trainers.model_kinds.encoders import EncoderInfo
    from trainers.models.binary.packed import load_packed

__all__ = ["load_packed"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute {name!r}")
    return getattr(import_module("trainers.models.binary.packed"), name)


def entries() -> tuple[EncoderInfo, ...]:
    from trainers.model_kinds.encoders import EncoderInfo, Quantisation

    quantisation = Quantisation(
        settings=Binary,
        misfits=_misfits,
        prepared=Deferred(f"{__name__}.install:prepared"),
        awaits_data=Deferred(f"{__name__}.install:awaits_data"),
        calibrating=Deferred(f"{__name__}.install:calibrating"),
        latent_of=Deferred(f"{__name__}.course:latent_of"),
        inference=Deferred(f"{__name__}.packed:PackedInference"),
        write_packed=Deferred(f"{__name__}.packed:write"),
    )
    return (
        EncoderInfo(
            name="binary",
            summary="weights, and as an option inputs, of one or a few bits (`model.binary`), from fp32 "
            "masters",
            install=Deferred(f"{__name__}.install:install"),
            devices=("cpu", "cuda"),
            precisions=("fp32", "tf32"),
            compiles=False,
            blocks=(BERT_BLOCK,),
            pipelines=False,
            quantisation=quantisation,
            evaluations=("same", "packed"),
        ),
    )


def _misfits(section: Section, model: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    assert isinstance(section, Binary)
    weights = WEIGHTS.get(str((fields.get(QUANTISED) or {}).get("weights")))
    if section.split and (weights is None or weights.bits != TERNARY_BITS):
        yield (
            "model.binary.split",
            f"model.binary.split needs a student with ternary weights, which '{model}' does not have; "
            "train it with model.binary.weights: ternary first, or set split: false",
        )
