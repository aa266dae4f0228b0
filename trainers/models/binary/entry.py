"""Entry of binary models, all that other packages know of them; the package may be deleted. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.model_kinds.families import BERT_BLOCK, QUANTISED
from trainers.models.binary.settings import TERNARY_BITS, WEIGHTS, Binary
from trainers.registry import Section

if TYPE_CHECKING:
    import torch
    from transformers.modeling_utils import PreTrainedModel

    from trainers.model_kinds.encoders import EncoderInfo
    from trainers.models.latent import Latent
    from trainers.models.precision import Arithmetic, Inference
    from trainers.models.student import Student


def entries() -> tuple[EncoderInfo, ...]:
    from trainers.model_kinds.encoders import EncoderInfo

    return (
        EncoderInfo(
            name="binary",
            summary="weights, and as an option inputs, of one or a few bits (`model.binary`), from fp32 "
            "masters",
            install=_install,
            devices=("cpu", "cuda"),
            precisions=("fp32", "tf32"),
            compiles=False,
            blocks=(BERT_BLOCK,),
            pipelines=False,
            quantisation=BinaryModels(),
            evaluations=("same", "packed"),
        ),
    )


def _install(model: PreTrainedModel) -> None:
    from trainers.models.binary import install

    install.install(model)


class BinaryModels:
    """Implements `trainers.model_kinds.encoders.Quantisation`."""

    settings = Binary

    def misfits(self, section: Section, model: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        weights = WEIGHTS.get(str((fields.get(QUANTISED) or {}).get("weights")))
        if self._of(section).split and (weights is None or weights.bits != TERNARY_BITS):
            yield (
                "model.binary.split",
                f"model.binary.split needs a student with ternary weights, which '{model}' does not have; "
                "train it with model.binary.weights: ternary first, or set split: false",
            )

    def prepared(self, student: Student, section: Section) -> Student:
        from trainers.models.binary.install import split

        settings = self._of(section)
        if settings.split:
            return split(student, settings)
        setattr(student.model.config, QUANTISED, settings.model_dump(mode="json"))
        return student

    def awaits_data(self, student: Student) -> bool:
        from trainers.models.binary import install

        return install.awaits_data(student)

    def calibrating(self, student: Student) -> AbstractContextManager[None]:
        from trainers.models.binary import install

        return install.calibrating(student)

    def latent_of(self, student: Student) -> Latent:
        from trainers.models.binary.course import latent_of

        return latent_of(student)

    def inference(self, training: Arithmetic, device: torch.device) -> Inference:
        from trainers.models.binary.packed import PackedInference

        return PackedInference(training, device)

    def write_packed(self, source: Path, target: Path) -> dict[str, Any]:
        from trainers.models.binary.packed_folder import write

        return write(source, target)

    @staticmethod
    def _of(section: Section) -> Binary:
        assert isinstance(section, Binary)
        return section
