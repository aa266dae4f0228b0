"""Entry of binary models, all that other packages know of them; the package may be deleted. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainers.model_kinds.families import BERT_BLOCK, QUANTISED
from trainers.models.binary.settings import TERNARY_BITS, WEIGHTS, Binary
from trainers.registry import Deferred, Section

if TYPE_CHECKING:
    from trainers.model_kinds.encoders import EncoderInfo


def entries() -> tuple[EncoderInfo, ...]:
    from trainers.model_kinds.encoders import EncoderInfo, Quantisation

    package = "trainers.models.binary"
    quantisation = Quantisation(
        settings=Binary,
        misfits=_misfits,
        prepared=Deferred(f"{package}.install:prepared"),
        awaits_data=Deferred(f"{package}.install:awaits_data"),
        calibrating=Deferred(f"{package}.install:calibrating"),
        latent_of=Deferred(f"{package}.course:latent_of"),
        inference=Deferred(f"{package}.packed:PackedInference"),
        write_packed=Deferred(f"{package}.packed:write"),
    )
    return (
        EncoderInfo(
            name="binary",
            summary="weights, and as an option inputs, of one or a few bits (`model.binary`), from fp32 "
            "masters",
            install=Deferred(f"{package}.install:install"),
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
