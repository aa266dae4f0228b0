"""The model that is trained: a BERT encoder of transformers with a classification head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

# The submodules, not the package's lazy names: `AutoModel` would import the model zoo's registry.
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForSequenceClassification

from trainers.data.batches import Batch
from trainers.errors import BadSpecError
from trainers.models.origin import WEIGHTS, Folder, Origin

ATTENTION = "sdpa"
"""torch's scaled dot product attention. On CPU its flash kernel serves evaluation; with dropout in
training it is computed from its parts, mask included: about one more pass over the scores."""


class Student(nn.Module):
    """Logits of a batch.

    Attributes:
        bert: transformers' model; its `state_dict` has the names that its folders have.
    """

    def __init__(self, bert: BertForSequenceClassification) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, batch: Batch) -> torch.Tensor:
        """(B, C) logits."""
        logits: torch.Tensor = self.bert(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask
        ).logits
        return logits

    @property
    def parameter_count(self) -> int:
        """Trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters under the names of a model folder."""
        weights: dict[str, torch.Tensor] = self.bert.state_dict()
        return weights

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Set all parameters.

        Raises:
            RuntimeError: names or shapes differ.
        """
        self.bert.load_state_dict(weights)

    def write_config(self, folder: Path) -> None:
        """Write `config.json`, so that the folder with the weights loads as a model."""
        fields = {**self.bert.config.to_dict(), "architectures": ["BertForSequenceClassification"]}
        (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")


def build(
    origin: Origin,
    *,
    vocabulary_size: int,
    classes: tuple[str, ...],
    dropout: float,
    max_length: int,
    pad_id: int,
) -> Student:
    """The student with its first weights, drawn from torch's seed where the origin has none.

    Args:
        origin: preset or folder.
        vocabulary_size: of the tokenizer.
        classes: names of the task's classes.
        dropout: of hidden states, attention and head.
        max_length: longest sequence that it will see, in tokens.
        pad_id: token id of padding.

    Raises:
        BadSpecError: the folder's model does not fit tokenizer, length or its own weights.
    """
    fields: dict[str, Any] = origin.config() if isinstance(origin, Folder) else origin.config(vocabulary_size)
    fields.update(
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        classifier_dropout=dropout,
        pad_token_id=pad_id,
        id2label=dict(enumerate(classes)),
        label2id={name: i for i, name in enumerate(classes)},
        is_decoder=False,
        problem_type="single_label_classification",
    )
    for bookkeeping in (
        "architectures",
        "transformers_version",
        "_name_or_path",
        "auto_map",
        "torch_dtype",
        "dtype",
    ):
        fields.pop(bookkeeping, None)
    try:
        config = BertConfig(**fields)
        config._attn_implementation = ATTENTION
        bert = BertForSequenceClassification(config).float()
    except (TypeError, ValueError) as error:
        raise BadSpecError(f"{origin}: the model's configuration is not usable ({error})") from None
    if config.vocab_size < vocabulary_size:
        raise BadSpecError(
            f"the tokenizer has {vocabulary_size} pieces, but the model {config.vocab_size}; "
            "use its own tokenizer"
        )
    if config.max_position_embeddings < max_length:
        raise BadSpecError(
            f"task.max_length {max_length} exceeds the model's "
            f"{config.max_position_embeddings} positions; lower it"
        )
    if isinstance(origin, Folder):
        _load_encoder(bert, origin.path / WEIGHTS)
    return Student(bert)


def _load_encoder(bert: BertForSequenceClassification, file: Path) -> None:
    """Copy what the file has; the head and the pooler may start anew, the encoder may not."""
    wanted = bert.state_dict()
    missing = set(wanted)
    try:
        with safe_open(str(file), framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (the handle is no mapping)
                target = _name_here(name)
                if target not in wanted:
                    continue
                tensor = stored.get_tensor(name)
                if tensor.shape != wanted[target].shape:
                    if target.startswith("classifier."):
                        continue  # a head of another task
                    raise BadSpecError(
                        f"{file}: {name} has shape {tuple(tensor.shape)}, "
                        f"config.json says {tuple(wanted[target].shape)}"
                    )
                wanted[target].copy_(tensor)
                missing.discard(target)
    except (SafetensorError, OSError) as error:
        raise BadSpecError(f"{file}: the weights cannot be read ({error})") from None
    needed = sorted(name for name in missing if not name.startswith(("classifier.", "bert.pooler.")))
    if needed:
        raise BadSpecError(f"{file}: {len(needed)} weights of the encoder are missing, first {needed[0]}")


def _name_here(name: str) -> str:
    """A stored name in this model: encoders are stored bare, old LayerNorms as gamma and beta."""
    if name.endswith("LayerNorm.gamma"):
        name = name.removesuffix("gamma") + "weight"
    elif name.endswith("LayerNorm.beta"):
        name = name.removesuffix("beta") + "bias"
    return name if name.startswith(("bert.", "classifier.")) else f"bert.{name}"
