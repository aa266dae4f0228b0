"""How the models of each family are built and called; `Bert` is the base, and follows transformers' BERT."""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

# The submodules, not the package's lazy names: `AutoModel` would import the model zoo's registry.
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_sliding_window_mask
from transformers.modeling_utils import PreTrainedModel

from trainers.data.batches import Batch, Segments
from trainers.model_kinds.families import FamilyInfo
from trainers.model_kinds.heads import ClassHead, Head, Reads
from trainers.models.dropout import TORCH_ATTENTION
from trainers.models.origin import VOCABULARY_SIZE, Origin
from trainers.registry import imported
from trainers.telemetry.flops import ModelShape, flop_count

_SHAPE_HEAD = ClassHead(("0", "1"))
Outputs = Mapping[Reads, tuple[str, ...]]
"""Modules that hidden states go through to become logits, by what the head reads; not of texts."""
PLAIN_ATTENTION = "eager"  # transformers' own attention, of single operations


def attend_plainly(model: PreTrainedModel) -> None:
    model.config._attn_implementation = PLAIN_ATTENTION


class Bert:
    """Calls models of a family; holds no model."""

    implementation = TORCH_ATTENTION
    """Attention that models are built with; training with dropout on the CPU then installs its own."""
    outputs: ClassVar[Outputs] = {
        "tokens": ("dropout", "classifier"), "span": ("qa_outputs",), "guessed": ("cls",)
    }  # fmt: skip
    after_layers: tuple[str, ...] = ("pooler",)  # Modules of the encoder that follow its layers

    def __init__(self, family: FamilyInfo) -> None:
        self.family = family

    def build(self, fields: Mapping[str, Any], head: Head) -> PreTrainedModel:
        """Returns a model with random weights in fp32; `fields` are those of its configuration."""
        config: PreTrainedConfig = imported(self.family.config)(**fields)
        config._attn_implementation = self.implementation
        model: PreTrainedModel = imported(self.family.models + head.suffix)(config).float()
        return model

    def inputs(self, batch: Batch, model: PreTrainedModel) -> dict[str, Any]:
        """Arguments of the encoder; a packed batch is its row, with its segments."""
        tokens = self.tokens(batch, model.config)
        if batch.segments is not None:
            return {**tokens, "segments": batch.segments}
        return {**tokens, "attention_mask": self.mask(batch, model.config, model.dtype)}

    def layer_arguments(self, hidden: torch.Tensor, batch: Batch, config: PreTrainedConfig) -> dict[str, Any]:
        """Arguments of a single layer besides its hidden states, (B, S, H) or (1, T, H)."""
        if batch.segments is not None:
            return {"segments": batch.segments}
        return {"attention_mask": self.mask(batch, config, hidden.dtype)}

    def mask(self, batch: Batch, config: PreTrainedConfig, dtype: torch.dtype) -> torch.Tensor | None:
        """(B, 1, 1, S): bool, or what plain attention adds. transformers would make the host wait for it."""
        if batch.attention_mask is None:
            return None
        mask = batch.attention_mask[:, None, None, :]
        if config._attn_implementation != PLAIN_ATTENTION:
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    def tokens(self, batch: Batch, config: PreTrainedConfig) -> dict[str, Any]:
        row = batch.segments
        if row is None:
            return {"input_ids": batch.input_ids, **self.token_types(batch, config)}
        positions = row.position_ids
        if self.family.offset_by_padding:
            positions = row.counted(config.pad_token_id) + config.pad_token_id
        return {"input_ids": row.input_ids, "position_ids": positions, **self.token_types(row, config)}

    def token_types(self, batch: Batch | Segments, config: PreTrainedConfig) -> dict[str, Any]:
        if self.family.token_types and config.type_vocab_size > 1:
            return {"token_type_ids": batch.token_type_ids}
        return {}

    # Heads

    def averages(self, config: PreTrainedConfig) -> bool:
        """Whether a text is the mean of its tokens, rather than its first token."""
        return False

    def text_logits(self, model: Any, text: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        """(B, C) logits of (B, H) texts; `pooled` is the result of the encoder's own pooler."""
        if pooled is None:
            pooled = through(model, ("base_model.pooler",), text[:, None])
        return through(model, ("dropout", "classifier"), pooled)

    def logits(self, model: Any, reads: Reads, hidden: torch.Tensor) -> torch.Tensor:
        """(..., C) logits of hidden states (..., H): of all tokens, or of the guessed ones."""
        return through(model, self.outputs[reads], hidden)

    # Parts, for pipelines, taps and profiles

    def layers(self, model: PreTrainedModel) -> nn.ModuleList:
        layers = model.base_model.get_submodule(self.family.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def embeddings(self, model: Any) -> dict[str, nn.Module]:
        """Modules between token ids and the first layer, by their names in the encoder."""
        return {"embeddings": model.base_model.embeddings}

    def embed(self, model: Any, batch: Batch) -> torch.Tensor:
        embedded: torch.Tensor = model.base_model.embeddings(**self.tokens(batch, model.config))
        return embedded

    def head_modules(self, model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
        """Modules of the head that have parameters, with names; the last gives the logits."""
        return [
            (name, part)
            for name, part in model.named_children()
            if part is not model.base_model and any(True for _ in part.parameters())
        ]

    def pooler(self, model: PreTrainedModel) -> nn.Module | None:
        pooler = getattr(model.base_model, "pooler", None)
        return pooler if isinstance(pooler, nn.Module) else None

    # Weights

    def place(self, model: PreTrainedModel, name: str) -> int:
        """Where a weight is: 0 = below the L layers, 1 to L = in a layer, L + 1 = above them."""
        if layer := self.layer_number(model).match(name):
            return 1 + int(layer[1])
        prefix = self.encoder_prefix(model)
        above = tuple(f"{prefix}{module}." for module in self.after_layers)
        return 0 if name.startswith(prefix) and not name.startswith(above) else 1 + len(self.layers(model))

    def layer_number(self, model: PreTrainedModel) -> re.Pattern[str]:
        """Matches the names of a layer's weights and captures its number."""
        return re.compile(re.escape(f"{self.encoder_prefix(model)}{self.family.layers}.") + r"(\d+)\.")

    @staticmethod
    def encoder_prefix(model: PreTrainedModel) -> str:
        return f"{model.base_model_prefix}."

    def is_optional(self, model: PreTrainedModel, name: str) -> bool:
        """Whether a weight may start at random next to a loaded encoder: heads and poolers may."""
        prefix = self.encoder_prefix(model)
        return not name.startswith(prefix) or name.startswith(f"{prefix}pooler.")


class DistilBert(Bert):
    outputs: ClassVar[Outputs] = {
        **Bert.outputs,
        "span": ("dropout", "qa_outputs"),
        "guessed": ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
    }

    def text_logits(self, model: Any, text: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return through(model, ("dropout", "classifier"), torch.relu(model.pre_classifier(text)))


class Roberta(Bert):
    """RoBERTa and XLM-R: the classifier has its own pooling."""

    outputs: ClassVar[Outputs] = {**Bert.outputs, "guessed": ("lm_head",)}

    def text_logits(self, model: Any, text: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return through(model, ("classifier",), text[:, None])


class Electra(Roberta):
    outputs: ClassVar[Outputs] = {**Bert.outputs, "guessed": ("generator_predictions", "generator_lm_head")}

    def embeddings(self, model: Any) -> dict[str, nn.Module]:
        project = getattr(model.base_model, "embeddings_project", None)
        return {**super().embeddings(model), **({} if project is None else {"embeddings_project": project})}

    def embed(self, model: Any, batch: Batch) -> torch.Tensor:
        _, *projections = (f"base_model.{name}" for name in self.embeddings(model))
        return through(model, projections, super().embed(model, batch))


class ModernBert(Bert):
    """ModernBERT: rotary positions, windows, one map for queries, keys and values."""

    outputs: ClassVar[Outputs] = dict.fromkeys(Bert.outputs, ("head", "drop", "classifier")) | {
        "guessed": ("head", "decoder")
    }
    after_layers = ("final_norm",)

    def inputs(self, batch: Batch, model: PreTrainedModel) -> dict[str, Any]:
        """Layers with a window have a mask of their own, (B, 1, S, S)."""
        dtype, mask = model.dtype, batch.attention_mask
        if mask is None:
            return {"input_ids": batch.input_ids}
        shaped = batch.input_ids.new_empty((*batch.input_ids.shape, 0), dtype=dtype)
        windows = create_bidirectional_sliding_window_mask(
            model.config, shaped, mask, allow_is_bidirectional_skip=False
        )
        masks = {"full_attention": self.mask(batch, model.config, dtype), "sliding_attention": windows}
        return {"input_ids": batch.input_ids, "attention_mask": masks}

    def averages(self, config: PreTrainedConfig) -> bool:
        return bool(config.classifier_pooling == "mean")

    def text_logits(self, model: Any, text: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return self.logits(model, "tokens", text)


class DebertaV2(Bert):
    """DeBERTa-v2 and v3: disentangled attention in the model's own code."""

    implementation = PLAIN_ATTENTION

    def build(self, fields: Mapping[str, Any], head: Head) -> PreTrainedModel:
        """Positions are computed on the tokens' device."""
        model = super().build(fields, head)
        encoder = model.base_model.encoder
        encoder.get_rel_pos = partial(relative_positions, encoder)
        return model

    def inputs(self, batch: Batch, model: PreTrainedModel) -> dict[str, Any]:
        """Always with a mask: the model computes with it, and would otherwise search for padding itself."""
        mask = batch.attention_mask
        return {
            "input_ids": batch.input_ids,
            "attention_mask": torch.ones_like(batch.input_ids) if mask is None else mask.long(),
            **self.token_types(batch, model.config),
        }

    def text_logits(self, model: Any, text: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return through(model, ("pooler", "dropout", "classifier"), text[:, None])

    def logits(self, model: Any, reads: Reads, hidden: torch.Tensor) -> torch.Tensor:
        if reads != "guessed" or model.legacy:
            return super().logits(model, reads, hidden)
        logits: torch.Tensor = model.lm_predictions(hidden, model.get_input_embeddings())
        return logits


def through(model: PreTrainedModel, names: Iterable[str], states: torch.Tensor) -> torch.Tensor:
    """Returns the result of some of a model's modules, one after the other."""
    for name in names:
        states = model.get_submodule(name)(states)
    return states


def relative_positions(encoder: Any, hidden: torch.Tensor, *_: Any) -> torch.Tensor | None:
    """(1, S, S) buckets of the distances between tokens, for DeBERTa; transformers makes the host wait."""
    if not encoder.relative_attention:
        return None
    places = torch.arange(hidden.shape[-2], device=hidden.device)
    distances = places[:, None] - places
    middle, largest = encoder.position_buckets // 2, encoder.max_relative_positions
    if middle > 0 and largest > 0:
        sizes = distances.abs().clamp_min(middle - 1)
        octaves = torch.log(sizes / middle) / torch.log(torch.tensor((largest - 1) / middle))
        beyond = (torch.ceil(octaves * (middle - 1)) + middle) * distances.sign()
        distances = torch.where(sizes <= middle, distances, beyond).long()
    return distances[None]


def architecture_of(family: FamilyInfo) -> Bert:
    made: Bert = imported(family.architecture)(family)
    return made


def tied_to(model: PreTrainedModel) -> dict[str, str]:
    """Parameters that are others under a second name, mapped to the name used in files."""
    return dict(model.all_tied_weights_keys)


def shape_of(origin: Origin) -> ModelShape:
    """Returns the size of a model with a head of two classes; presets have the published vocabulary."""
    fields = origin.config(VOCABULARY_SIZE)
    architecture = architecture_of(origin.family)
    with torch.device("meta"):
        model = architecture.build(fields, _SHAPE_HEAD)
    number = architecture.layer_number(model)
    layers: list[list[tuple[int, ...]]] = [[] for _ in architecture.layers(model)]
    embeddings: list[tuple[int, ...]] = []
    head: list[tuple[int, ...]] = []
    for name, parameter in reversed(list(model.named_parameters())):
        if layer := number.match(name):
            where = layers[int(layer[1])]
        elif architecture.is_optional(model, name):
            where = head
        else:
            where = embeddings
        where.append(tuple(parameter.shape))
    return ModelShape(
        flop_count(origin.family, fields, _SHAPE_HEAD),
        tuple(embeddings),
        tuple(map(tuple, layers)),
        tuple(head),
    )
