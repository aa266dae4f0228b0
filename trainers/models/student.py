"""The model that is trained: a BERT encoder of transformers with the head of its task."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint

# The submodules, not the package's lazy names: `AutoModel` would import the model zoo's registry.
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertPreTrainedModel,
)

from trainers.data.batches import Batch
from trainers.errors import BadSpecError
from trainers.models.heads import ClassHead, Head, SpanHead, VocabularyHead
from trainers.models.origin import WEIGHTS, Folder, Origin

ATTENTION = "sdpa"
"""torch's scaled dot product attention; training with dropout on the CPU has its own
(`trainers.models.dropout`), where torch would leave its flash kernel."""

_MODELS: dict[type[Head], type[BertPreTrainedModel]] = {
    ClassHead: BertForSequenceClassification,
    SpanHead: BertForQuestionAnswering,
    VocabularyHead: BertForMaskedLM,
}
HEADS = ("classifier", "qa_outputs", "cls")
"""Names of the modules that heads are; a model has one of them."""
_OF_HEADS = tuple(f"{name}." for name in HEADS)
_TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Parameters that are others under a second name, which a file holds once."""
_NOT_KEPT = (
    "architectures", "transformers_version", "_name_or_path", "auto_map", "torch_dtype", "dtype",
    "return_dict", "output_attentions", "output_hidden_states", "torchscript",
    "add_cross_attention", "chunk_size_feed_forward", "tie_word_embeddings",
    "num_labels", "id2label", "label2id", "problem_type",
)  # fmt: skip
"""Fields of a `config.json` that are no part of an encoder: bookkeeping, ways of calling it, its head."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LAYER = re.compile(r"^bert\.encoder\.layer\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward pass gives.

    Attributes:
        logits: Logits of the head, shaped as in `trainers.models.heads`.
        hidden: (B, S, H) the embeddings' output, then each layer's; empty unless asked for.
        relations: (B, S, H) queries, keys and values of one layer; empty unless asked for.
    """

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    relations: tuple[torch.Tensor, ...] = ()


class Student(nn.Module):
    """A BERT with the head of its task.

    Attributes:
        bert: transformers' model; its `state_dict` has the names that its folders have.
        head: Head of the model.
        fresh: names of weights that no file gave, in order; they start at random.
        absent: names of weights that other stages of a pipeline have.
    """

    def __init__(self, bert: BertPreTrainedModel, head: Head, fresh: Sequence[str] = ()) -> None:
        super().__init__()
        self.bert, self.head, self.fresh = bert, head, fresh
        self.absent: frozenset[str] = frozenset()

    def forward(self, batch: Batch, *, with_hidden: bool = False) -> Output:
        """Logits of a batch, and the hidden states when asked for."""
        encoded = self.encode(batch, with_hidden=with_hidden)
        return Output(self.logits(encoded, batch), tuple(encoded.hidden_states) if with_hidden else ())

    def encode(self, batch: Batch, *, with_hidden: bool) -> Any:
        """Returns what transformers' encoder gives, before the head."""
        mask = batch.attention_mask
        return self.bert.bert(
            input_ids=batch.input_ids,
            # (B, 1, 1, S): broadcast where it is used, instead of made once per pair of tokens.
            attention_mask=None if mask is None else mask[:, None, None, :],
            token_type_ids=batch.token_type_ids,
            output_hidden_states=with_hidden,
        )

    def logits(self, encoded: Any, batch: Batch) -> torch.Tensor:
        """Returns what the head says of an encoded batch."""
        logits: torch.Tensor
        if isinstance(self.head, ClassHead):
            logits = self.bert.classifier(self.bert.dropout(encoded.pooler_output))
        elif isinstance(self.head, SpanHead):
            logits = self.bert.qa_outputs(encoded.last_hidden_state)
        else:
            # Only what is to be guessed: the vocabulary's product is most of a small model's work.
            tokens = encoded.last_hidden_state.flatten(0, 1)
            logits = self.bert.cls(tokens.index_select(0, batch.guessed))
        return logits

    def checkpoint_activations(self) -> None:
        """Keeps only the input of each encoder layer for the backward pass, which computes the rest again.

        It draws the same random numbers, so that results stay what they are. Evaluation is not touched.
        """
        # The public way also hooks the embeddings, which matters where they are frozen.
        self.bert._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))

    def compile_encoder(self) -> None:
        """Compiles the encoder for any batch and length; the names of its parameters stay."""
        self.bert.bert.compile(dynamic=True)

    @property
    def attention(self) -> str:
        """The implementation of attention in the encoder's layers."""
        return str(self.bert.config._attn_implementation)

    @property
    def parameter_count(self) -> int:
        """Trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def weights(self) -> dict[str, torch.Tensor]:
        """This worker's parameters under the names of a model folder, each once."""
        return {name: tensor for name, tensor in self.bert.state_dict().items() if name not in _TIED}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Sets all parameters that this worker has.

        Args:
            weights: Weights of the whole model.

        Raises:
            RuntimeError: names or shapes differ.
        """
        own = {name: tensor for name, tensor in weights.items() if name not in self.absent}
        names = self.bert.state_dict()
        tied = {name: own[source] for name, source in _TIED.items() if name in names and source in own}
        self.bert.load_state_dict({**own, **tied})

    def write_config(self, folder: Path) -> None:
        """Writes `config.json`, so that the folder with the weights loads as a model."""
        fields = {**self.bert.config.to_dict(), "architectures": [type(self.bert).__name__]}
        (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")


def parameter_name(name: str) -> str:
    """The name of a trained parameter in a checkpoint, of its name in a student or in what is around one."""
    return name.removeprefix("student.").removeprefix("bert.")


def build(
    origin: Origin,
    *,
    head: Head,
    vocabulary_size: int,
    dropout: float,
    max_length: int,
    pad_id: int,
    layers: Sequence[int] | None = None,
) -> Student:
    """Returns the model with its first weights, drawn from torch's seed where the origin has none.

    Args:
        origin: preset or folder.
        head: Head of the model.
        vocabulary_size: one more than the tokenizer's largest id.
        dropout: Dropout of hidden states, attention and head.
        max_length: longest sequence that it will see, in tokens.
        pad_id: token id of padding.
        layers: Layers taken from the folder, in this order; None = all.

    Raises:
        BadSpecError: the folder's model does not fit tokenizer, length or its own weights.
    """
    fields: dict[str, Any] = origin.config() if isinstance(origin, Folder) else origin.config(vocabulary_size)
    for name in _NOT_KEPT:
        fields.pop(name, None)
    depth = fields["num_hidden_layers"]
    if layers is not None:
        fields["num_hidden_layers"] = _kept(layers, origin, depth)
    fields.update(
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        classifier_dropout=dropout,
        pad_token_id=pad_id,
        is_decoder=False,
    )
    if isinstance(head, ClassHead):
        fields.update(
            id2label=dict(enumerate(head.classes)),
            label2id={name: i for i, name in enumerate(head.classes)},
            problem_type="multi_label_classification" if head.multi_label else "single_label_classification",
        )
    try:
        config = BertConfig(**fields)
        config._attn_implementation = ATTENTION
        bert = _MODELS[type(head)](config).float()
    except Exception as error:  # the library lets a field's value fail where it is used, in any way
        lines = [line.strip() for line in str(error).splitlines()]
        reason = " ".join((type(error).__name__, *lines[:2]))
        raise BadSpecError(f"{origin}: unusable model configuration ({reason})") from None
    if config.vocab_size < vocabulary_size:
        raise BadSpecError(
            f"the tokenizer's ids go up to {vocabulary_size - 1}, but {origin} has rows for 0 to "
            f"{config.vocab_size - 1}; use its own tokenizer"
        )
    if config.max_position_embeddings < max_length:
        raise BadSpecError(
            f"task.max_length {max_length} exceeds the model's "
            f"{config.max_position_embeddings} positions; lower it"
        )
    if isinstance(origin, Folder):
        return Student(bert, head, _load(bert, origin.path / WEIGHTS, layers, depth))
    return Student(bert, head, list(bert.state_dict()))


def _kept(layers: Sequence[int], origin: Origin, available: int) -> int:
    """Returns how many layers are kept, all of which the origin must have weights for."""
    if not isinstance(origin, Folder):
        raise BadSpecError(
            f"model.layers needs a student with weights, but {origin} is a preset; "
            "remove model.layers or set model.student to a folder"
        )
    beyond = [layer for layer in layers if layer >= available]
    if beyond:
        raise BadSpecError(
            f"model.layers has layer {beyond[0]}, but {origin} has {available}; use 0 to {available - 1}"
        )
    return len(layers)


def _load(bert: BertPreTrainedModel, file: Path, layers: Sequence[int] | None, depth: int) -> list[str]:
    """Copies what the file has; the head and the pooler may start again, the encoder may not.

    Args:
        bert: Model to fill.
        file: with weights.
        layers: Layers taken from the file; None = all.
        depth: Number of layers according to `config.json`.

    Returns:
        The names of the weights that start again.
    """
    wanted = bert.state_dict()
    missing = set(wanted) - set(_TIED)
    try:
        with safe_open(str(file), framework="pt") as stored:
            names = {name: _parameter_of(name) for name in stored.keys()}  # noqa: SIM118  (no mapping)
            numbers = {int(found[1]) for own in names.values() if (found := _LAYER.match(own))}
            if len(numbers) > depth:
                raise BadSpecError(
                    f"{file}: the file has {len(numbers)} layers, but config.json says {depth}; correct "
                    "config.json, or use model.layers to keep some"
                )
            for name, own in names.items():
                for target in _targets(own, layers):
                    if target not in missing:
                        continue
                    tensor = stored.get_tensor(name)
                    _require_numbers(tensor, f"{file}: {name}")
                    if tensor.shape != wanted[target].shape:
                        if target.startswith(_OF_HEADS):
                            continue  # a head of another task
                        raise BadSpecError(
                            f"{file}: {name} has shape {tuple(tensor.shape)}, but config.json says "
                            f"{tuple(wanted[target].shape)}"
                        )
                    wanted[target].copy_(tensor)
                    missing.discard(target)
    except (SafetensorError, OSError) as error:
        raise BadSpecError(f"{file}: the weights cannot be read ({error})") from None
    needed = sorted(name for name in missing if not name.startswith((*_OF_HEADS, "bert.pooler.")))
    if needed:
        raise BadSpecError(f"{file}: {len(needed)} encoder weights are missing, first {needed[0]}")
    return sorted(missing)


def _require_numbers(tensor: torch.Tensor, what: str) -> None:
    """Refuses a tensor that says nothing without further ones, or nothing at all.

    Raises:
        BadSpecError: it is quantised, or not finite.
    """
    if tensor.dtype not in _FLOATS:
        raise BadSpecError(
            f"{what} is {str(tensor.dtype).removeprefix('torch.')}: quantised weights are not supported; "
            "save the model in fp32, fp16 or bf16"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise BadSpecError(
            f"{what} has non-finite values: the weights are damaged; use another copy of the model, or a "
            "checkpoint from before it diverged"
        )


def _parameter_of(name: str) -> str:
    """The parameter that a stored name is of: encoders are stored bare, old LayerNorms as gamma and beta."""
    if name.endswith("LayerNorm.gamma"):
        name = name.removesuffix("gamma") + "weight"
    elif name.endswith("LayerNorm.beta"):
        name = name.removesuffix("beta") + "bias"
    return name if name.startswith(("bert.", *_OF_HEADS)) else f"bert.{name}"


def _targets(name: str, layers: Sequence[int] | None) -> list[str]:
    """What a file's parameter becomes in the model: nothing without its layer, several with more of it."""
    found = _LAYER.match(name)
    if layers is None or found is None:
        return [name]
    rest = name[found.end() :]
    return [f"bert.encoder.layer.{new}.{rest}" for new, old in enumerate(layers) if old == int(found[1])]
