"""Implementations of the encoder layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.model_kinds.families import BERT_BLOCK, FAMILIES, Attention, FamilyInfo
from trainers.registry import Deferred, Section, by_name, entries_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers.modeling_utils import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """Models whose layers compute with quantised copies of their weights."""

    settings: type[Section]  # Section of the spec, with a default for each field
    # Fields of a section that do not fit a model, by its name and configuration, with problem and fix.
    misfits: Callable[[Section, str, Mapping[str, Any]], Iterator[tuple[str, str]]]
    prepared: Callable[[Any, Section], Any]  # A student as a section describes it, before `install`
    awaits_data: Callable[[Any], bool]  # Whether a learned scale of a student has no value yet
    # Forward passes of a student within it set such scales from their inputs.
    calibrating: Callable[[Any], AbstractContextManager[None]]
    latent_of: Callable[[Any], Any]  # See `trainers.models.latent`
    inference: Callable[[Any, torch.device], Any]  # Evaluation from packed weights, by training's arithmetic
    write_packed: Callable[[Path, Path], dict[str, Any]]  # Packs a model folder; returns its manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    """An implementation of the encoder layers, a value of `model.encoder`; None = no restriction.

    With one that packs, workers have equally many tokens, and a run compares a first batch with `huggingface`
    (`trainers.models.parity`).
    """

    name: str
    summary: str
    install: Callable[[PreTrainedModel], None]  # Replaces layers, on the CPU; names and shapes stay
    devices: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    compiles: bool = True
    packs: bool = False  # Reads a micro-batch as one row without padding, see `Batch.segments`
    host_dropout: bool = True  # Uses the dropout of its device kind, see `DeviceKind.host_dropout`
    attention: tuple[Attention, ...] | None = None
    blocks: tuple[str, ...] | None = None  # Supported layouts of encoder layers, see `FamilyInfo.block`
    pipelines: bool = True
    quantisation: Quantisation | None = None
    evaluations: tuple[str, ...] = ("same", "fp32", "half", "fp16", "bf16")
    # (N,) losses of (N, C) logits and (N,) labels, 0 where a label has the value given last.
    cross_entropy: Callable[[Tensor, Tensor, int], Tensor] | None = None

    @property
    def quantises(self) -> bool:
        return self.quantisation is not None

    def supports(self, family: FamilyInfo) -> bool:
        return (self.attention is None or family.attention in self.attention) and (
            self.blocks is None or family.block in self.blocks
        )

    def families(self) -> str:
        """Names of the supported families, for a description; empty where it supports all."""
        supported = [family.name for family in FAMILIES.values() if self.supports(family)]
        return "" if len(supported) == len(FAMILIES) else f" (of {', '.join(supported)})"

    def require_precision(self, precision: str) -> None:
        if self.precisions is not None and precision not in self.precisions:
            raise ValueError(
                f"model.encoder {self.name} computes in {', '.join(self.precisions)}, not {precision}; "
                f"set precision: {self.precisions[0]}, or another model.encoder"
            )

    def require_evaluation(self, evaluation: str) -> None:
        if evaluation not in self.evaluations:
            raise ValueError(
                f"model.encoder {self.name} does not evaluate in {evaluation}; set numerics.evaluation to "
                f"{' or '.join(self.evaluations)}, or use another model.encoder"
            )

    def require_device(self, device: str, hardware: str) -> None:
        if self.devices is not None and device not in self.devices:
            raise ValueError(
                f"model.encoder {self.name} runs on {', '.join(self.devices)}, but hardware {hardware} is "
                f"{device}; change hardware, or set another model.encoder"
            )


def _as_built(model: PreTrainedModel) -> None: ...


EAGER = EncoderInfo(
    name="eager",
    summary="transformers' plain attention, padded, nothing fused: the baseline of published comparisons",
    install=Deferred("trainers.models.architectures:attend_plainly"),
    host_dropout=False,
)
HUGGINGFACE = EncoderInfo(
    name="huggingface",
    summary="the layers of transformers with scaled dot product attention, padded",
    install=_as_built,
)
PACKED = EncoderInfo(
    name="packed",
    summary="the same layers over one row of tokens without padding",
    install=Deferred("trainers.models.packed_attention:install"),
    compiles=False,
    packs=True,
    attention=(Attention.full,),
)
FUSED = EncoderInfo(
    name="fused",
    summary="packed, with the elementwise work in fused kernels and one product for queries, keys and values",
    install=Deferred("trainers.models.fused:install"),
    compiles=False,
    packs=True,
    attention=(Attention.full,),
    blocks=(BERT_BLOCK,),
    cross_entropy=Deferred("trainers.models.fused:cross_entropy"),
)

ENCODERS: dict[str, EncoderInfo] = by_name(
    EAGER, HUGGINGFACE, PACKED, FUSED, *entries_of("trainers.models.binary")
)
"""All values of `model.encoder`."""


def quantising() -> EncoderInfo | None:
    return next((encoder for encoder in ENCODERS.values() if encoder.quantises), None)
