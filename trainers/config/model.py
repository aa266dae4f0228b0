from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainers.model_kinds.encoders import ENCODERS, HUGGINGFACE, EncoderInfo, quantising
from trainers.model_kinds.families import EMBEDDINGS
from trainers.registry import Identifier, NameIn, Section, described

LAYERS: Mapping[str, int] = {"tiny": 2, "mini": 4, "small": 4, "medium": 8, "base": 12}
"""Encoder layers of the presets."""


if TYPE_CHECKING:
    Quantised = Section
else:
    Quantised = encoder.quantisation.settings if (encoder := quantising()) is not None else Section


class Model(Section):
    """The model that is trained."""

    name: Identifier | Annotated[str, Field(max_length=4096)] = "mini"
    """A preset (tiny mini small medium base), or of a family in docs/models.md a folder under a model root,
    `hub:<id>`, or `run:<id>`."""
    layers: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = Field(default=None, min_length=1)
    """Of a student with weights, the layers that are kept, 0-based and in this order; unset = all."""
    frozen: tuple[int | str, ...] = Field(default=(), max_length=257)
    """Parts that are not trained: `embeddings`, and layers, 0-based; empty = all parts are trained."""
    teacher: str | None = Field(default=None, max_length=4096)
    """Frozen source model for distillation: a folder, `hub:<id>` or `run:<id>`, or one run
    for each seed, `run:0=12,1=13`; unset = no distillation."""
    encoder: Annotated[str, NameIn(ENCODERS), described(ENCODERS, EncoderInfo.families)] = HUGGINGFACE.name
    """Implementation of the encoder layers."""
    binary: Quantised = Quantised()
    """What an encoder with few bits quantises, and how."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability of hidden states and, unless it has its own, attention, dimensionless; 0 = off."""
    attention_dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Dropout probability of attention, dimensionless; unset = `dropout`, 0 = off."""
    compile: bool = False
    """Compile the encoder's layers with torch.compile; the first steps take longer."""
    cuda_graphs: bool = False
    """Record forward and backward once for each of a few shapes as CUDA graphs, and replay them: one launch
    each in place of hundreds. Rows of encoder packed or fused are padded to these shapes."""

    @property
    def drops_attention(self) -> bool:
        return (self.dropout if self.attention_dropout is None else self.attention_dropout) > 0.0

    @field_validator("frozen")
    @classmethod
    def _parts(cls, parts: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for part in parts:
            if part != EMBEDDINGS and not (isinstance(part, int) and 0 <= part <= 255):
                raise ValueError(
                    f"{part!r} is not a part of a model; list {EMBEDDINGS} and numbers of layers, such as "
                    f"[{EMBEDDINGS}, 0, 1]"
                )
            if parts.count(part) > 1:
                raise ValueError(f"{part} is listed twice; list each part once")
        return parts

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.cuda_graphs and not ENCODERS[self.encoder].packs:
            packing = " or ".join(info.name for info in ENCODERS.values() if info.packs)
            raise ValueError(
                f"cuda_graphs replays rows of a few lengths, which encoder {self.encoder} does not read; set "
                f"model.encoder to {packing}, or model.cuda_graphs: false"
            )
        if self.cuda_graphs and self.teacher is not None:
            raise ValueError(
                "cuda_graphs records no teacher; set model.cuda_graphs: false, or remove model.teacher"
            )
        if self.compile and not ENCODERS[self.encoder].compiles:
            raise ValueError(
                f"compile does not work with encoder {self.encoder}; set model.compile: false, "
                "or another model.encoder"
            )
        return self


class LayerWeights(Section):
    """Factors of the distillation losses inside the model, one for each layer and kind.

    A list has a factor for each of the student's layers, the first first; a single one is for all of them.
    """

    embedding: float = Field(default=1.0, ge=0.0, le=1e4)
    """Factor of `embedding_weight`."""
    hidden: tuple[Annotated[float, Field(ge=0.0, le=1e4)], ...] = Field(default=(1.0,), min_length=1)
    """Factors of `hidden_weight`, by layer."""
    relation: tuple[Annotated[float, Field(ge=0.0, le=1e4)], ...] = Field(default=(1.0,), min_length=1)
    """Factors of `relation_weight`, by layer."""
    logits: float = Field(default=1.0, ge=0.0, le=1e4)
    """Factor of the divergence of the logits, besides `soft_weight`, which also sets the task's share."""

    def of_layers(self, kind: Literal["hidden", "relation"], layers: int) -> tuple[float, ...]:
        """Returns the factor of each of the student's layers; ValueError if they are not as many."""
        factors: tuple[float, ...] = getattr(self, kind)
        if len(factors) == 1:
            return factors * layers
        if len(factors) != layers:
            raise ValueError(
                f"distillation.layer_weights.{kind} has {len(factors)} factors, but the student has {layers} "
                "layers; give one factor, or one for each layer"
            )
        return factors


class Distillation(Section):
    """What the student learns from its teacher; used when `model.teacher` is set.

    The loss of an example is `(1 - soft_weight)` x the task's loss, plus each weight x its part.
    """

    temperature: float = Field(default=2.0, gt=0.0, le=100.0)
    """Softens the distributions of teacher and student, dimensionless; 1 = as they are."""
    soft_weight: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of the divergence from the teacher's distribution; the task's own loss has the rest of 1."""
    hidden_weight: float = Field(default=0.0, ge=0.0, le=1e4)
    """Weight of the squared distance of mapped hidden states; 0 = off."""
    embedding_weight: float = Field(default=0.0, ge=0.0, le=1e4)
    """Weight of the squared distance of the embeddings' output; 0 = off."""
    relation_weight: float = Field(default=0.0, ge=0.0, le=1e4)
    """Weight of the divergence of the last mapped layer's query, key and value relations; 0 = off."""
    cosine_weight: float = Field(default=0.0, ge=0.0, le=1e4)
    """Weight of 1 - cosine of the last mapped layer's hidden states; 0 = off."""
    layer_weights: LayerWeights | None = None
    """A weight for each layer and kind; relations are then those of all layers with a factor. Unset = all
    layers alike, and relations of the last mapped layer."""
    layer_map: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = Field(default=None, min_length=1)
    """The teacher's layer for each of the student's, 0-based; unset = evenly spread, the last to the last."""
    schedule: Literal["constant", "linear"] = "constant"
    """Weights over the run: constant, or falling linearly to 0 while the task's loss rises to 1."""
    hidden_first_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Two stages: share of the steps that first learn all but logits and task; 0 = one stage."""
    teacher_precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Number format of the teacher; auto = the fastest half precision that the device has, else fp32."""
    cache_logits: bool = True
    """Keep the teacher's logits on disk and compute each once, where the task's input never changes."""

    @property
    def inside_weights(self) -> tuple[float, float, float, float]:
        """Weights of the losses inside the model: hidden, embedding, relation, cosine."""
        return self.hidden_weight, self.embedding_weight, self.relation_weight, self.cosine_weight

    @property
    def looks_inside(self) -> bool:
        """Whether the run needs more of the teacher than its logits at any step."""
        return any(self.inside_weights)

    @model_validator(mode="after")
    def _stages(self) -> Self:
        if self.hidden_first_fraction and not self.looks_inside:
            raise ValueError(
                f"hidden_first_fraction {self.hidden_first_fraction} has no loss to train first; set one of "
                "hidden_weight, embedding_weight, relation_weight and cosine_weight, or remove it"
            )
        factors = self.layer_weights
        if factors is not None and self.relation_weight and not any(factors.relation):
            raise ValueError(
                "layer_weights.relation is 0 for all layers; set relation_weight: 0, or raise a factor"
            )
        return self


def require_layer_map(layer_map: Sequence[int], student_layers: int) -> None:
    """Raises ValueError for a layer map that is not as long as the student is deep."""
    if len(layer_map) != student_layers:
        raise ValueError(
            f"distillation.layer_map has {len(layer_map)} layers, but the student has {student_layers}; "
            "give one teacher layer for each student layer, or remove it"
        )
