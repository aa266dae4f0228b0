"""Model families: what is known before their code is loaded. Imports neither torch nor transformers.

A family is the models of one `model_type`; `trainers.models.architectures` has its code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypedDict

from trainers.registry import by_name

MODEL_TYPE = "model_type"  # Field of `config.json` that names the family

EMBEDDINGS = "embeddings"  # In `model.frozen`: everything below the first layer

QUANTISED = "binary"
"""Field of `config.json` that describes a quantised model: the settings of its encoder that quantises."""


class Attention(StrEnum):
    full = "full"  # Every token to all of its text, through transformers' attention interface
    windowed = "windowed"  # Some layers to a window only, through the same interface
    own = "own"  # By the model's own code, which no other implementation can replace


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    layers: int
    hidden: int
    attention_heads: int
    positions: int


Fields = Mapping[str, Any]  # Fields of a `config.json`, or of transformers' own configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyInfo:
    """A model family; names of sizes and dropout rates are those of its configuration."""

    name: str  # The `model_type` of its `config.json`
    summary: str
    config: str  # Configuration class, as `module:Class`
    models: str  # Model classes, as `module:Stem`; a head appends its own suffix to the stem
    architecture: str  # How its models are called, as `module:Class`; see `trainers.models.architectures`
    heads: Mapping[str, tuple[str, ...]]  # Prefixes of a head's weights in its folders, by the head's suffix
    layer_count: str = "num_hidden_layers"
    hidden_size: str = "hidden_size"
    attention_heads: str = "num_attention_heads"
    positions: str = "max_position_embeddings"
    feed_forward: str = "intermediate_size"
    hidden_dropouts: tuple[str, ...] = ("hidden_dropout_prob", "classifier_dropout")  # Of heads too
    attention_dropouts: tuple[str, ...] = ("attention_probs_dropout_prob",)
    layers: str = "encoder.layer"  # Path of the list of layers in the encoder
    # Maps of a layer that give queries, keys and values, or all three; empty = relations cannot be distilled.
    relations: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    attention: Attention = Attention.full
    block: str | None = None  # Layout of its layers, for encoders with their own code for one; None = unique
    token_types: bool = True
    offset_by_padding: bool = False  # Position ids begin after the token id of padding, not at 0
    pipelines: bool = True
    selects_layers: bool = True  # Whether `model.layers` works: layers do not depend on their position
    # Values of `FlopCount` that differ from BERT's, by the fields of a configuration.
    own_arithmetic: Callable[[Fields], dict[str, Any]] = lambda fields: {}

    @property
    def sizes(self) -> tuple[str, ...]:
        return (self.layer_count, self.hidden_size, self.attention_heads, self.positions, self.feed_forward)

    def shape(self, fields: Fields) -> EncoderShape:
        """`fields` are those of a `config.json`, with `sizes` checked."""
        return EncoderShape(
            layers=fields[self.layer_count],
            hidden=fields[self.hidden_size],
            attention_heads=fields[self.attention_heads],
            positions=fields[self.positions] - self.first_position(fields),
        )

    def arithmetic(self, fields: Fields) -> dict[str, Any]:
        """Arguments of `FlopCount`; a field that `fields` lacks has the published default."""
        return {
            "layers": fields[self.layer_count],
            "hidden": fields[self.hidden_size],
            "feed_forward": fields[self.feed_forward],
            "vocabulary": fields.get("vocab_size", 0),
            **self.own_arithmetic(fields),
        }

    def first_position(self, fields: Fields) -> int:
        padding = fields.get("pad_token_id")
        if not self.offset_by_padding:
            return 0
        return padding + 1 if type(padding) is int else 2  # transformers' default is 1


class Published(TypedDict):
    config: str
    models: str


def published(package: str, stem: str) -> Published:
    folder = f"transformers.models.{package}"
    return Published(
        config=f"{folder}.configuration_{package}:{stem}Config", models=f"{folder}.modeling_{package}:{stem}"
    )


BERT_BLOCK = "bert"
"""Attention, then two Linears with GELU; after each dropout, residual and LayerNorm; named as in BERT."""

_CODE = "trainers.models.architectures"


def _electra(fields: Fields) -> dict[str, Any]:
    """Embeddings may be narrower than the layers, and are then projected."""
    narrow = fields.get("embedding_size", 128)
    return {"embedding": None if narrow == fields["hidden_size"] else narrow}


def _modernbert(fields: Fields) -> dict[str, Any]:
    """A gated feed-forward, and windows in all layers but every n-th."""
    every, layers = fields.get("global_attn_every_n_layers", 3), fields["num_hidden_layers"]
    windowed = sum(number % every != 0 for number in range(layers))
    if kinds := fields.get("layer_types"):
        windowed = kinds.count("sliding_attention")
    return {
        "gated": True,
        "windowed_layers": windowed,
        "window": fields.get("local_attention", 128) // 2,
        "dense_tokens": True,
    }


def _deberta(fields: Fields) -> dict[str, Any]:
    """Disentangled attention: each token is compared with a table of relative positions, too."""
    if not fields.get("relative_attention"):
        return {}
    reaches = (fields.get(name, -1) for name in ("position_buckets", "max_relative_positions"))
    reach = next((one for one in reaches if one >= 1), fields["max_position_embeddings"])
    terms = fields.get("pos_att_type") or ()
    return {"relative_positions": 2 * reach, "relative_terms": sum(term in terms for term in ("c2p", "p2c"))}


BERT = FamilyInfo(
    name="bert",
    summary="BERT",
    **published("bert", "Bert"),
    architecture=f"{_CODE}:Bert",
    heads={
        "ForSequenceClassification": ("classifier.",),
        "ForTokenClassification": ("classifier.",),
        "ForQuestionAnswering": ("qa_outputs.",),
        "ForMaskedLM": ("cls.predictions.",),
    },
    block=BERT_BLOCK,
)
DISTILBERT = replace(
    BERT,
    name="distilbert",
    summary="DistilBERT",
    **published("distilbert", "DistilBert"),
    architecture=f"{_CODE}:DistilBert",
    heads={**BERT.heads, "ForMaskedLM": ("vocab_",)},
    layer_count="n_layers",
    hidden_size="dim",
    attention_heads="n_heads",
    feed_forward="hidden_dim",
    hidden_dropouts=("dropout", "seq_classif_dropout", "qa_dropout"),
    attention_dropouts=("attention_dropout",),
    layers="transformer.layer",
    block=None,
    relations=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    token_types=False,
)
ROBERTA = replace(
    BERT,
    name="roberta",
    summary="RoBERTa",
    **published("roberta", "Roberta"),
    architecture=f"{_CODE}:Roberta",
    heads={**BERT.heads, "ForMaskedLM": ("lm_head.",)},
    offset_by_padding=True,
)
XLM_ROBERTA = replace(ROBERTA, name="xlm-roberta", summary="XLM-R", **published("xlm_roberta", "XLMRoberta"))
ELECTRA = replace(
    BERT,
    name="electra",
    summary="ELECTRA",
    **published("electra", "Electra"),
    architecture=f"{_CODE}:Electra",
    heads={**BERT.heads, "ForMaskedLM": ("generator_",)},
    own_arithmetic=_electra,
)
MODERNBERT = replace(
    BERT,
    name="modernbert",
    summary="ModernBERT",
    **published("modernbert", "ModernBert"),
    architecture=f"{_CODE}:ModernBert",
    heads={**dict.fromkeys(BERT.heads, ("classifier.",)), "ForMaskedLM": ("decoder.",)},
    hidden_dropouts=("embedding_dropout", "mlp_dropout", "classifier_dropout"),
    attention_dropouts=("attention_dropout",),
    layers="layers",
    relations=("attn.Wqkv",),
    attention=Attention.windowed,
    block=None,
    token_types=False,
    pipelines=False,
    selects_layers=False,
    own_arithmetic=_modernbert,
)
DEBERTA_V2 = replace(
    BERT,
    name="deberta-v2",
    summary="DeBERTa-v2 and v3",
    **published("deberta_v2", "DebertaV2"),
    architecture=f"{_CODE}:DebertaV2",
    heads={**BERT.heads, "ForMaskedLM": ("cls.predictions.", "lm_predictions.")},
    hidden_dropouts=("hidden_dropout_prob", "pooler_dropout", "cls_dropout"),
    relations=(),
    attention=Attention.own,
    block=None,
    pipelines=False,
    own_arithmetic=_deberta,
)

FAMILIES: dict[str, FamilyInfo] = by_name(
    BERT, DISTILBERT, ROBERTA, XLM_ROBERTA, ELECTRA, MODERNBERT, DEBERTA_V2
)
"""All families, by `model_type`."""


def family_of(fields: Fields) -> FamilyInfo | None:
    """None when it is not supported."""
    name = fields.get(MODEL_TYPE)
    return FAMILIES.get(name) if isinstance(name, str) else None
