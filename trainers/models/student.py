"""The model that is trained: an encoder of transformers with the head of its task."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional
from torch.nn.attention import current_flash_attention_impl
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

from trainers.data.batches import Batch
from trainers.errors import BadSpecError
from trainers.model_kinds.encoders import quantising
from trainers.model_kinds.families import EMBEDDINGS, QUANTISED, EncoderShape
from trainers.model_kinds.heads import ClassHead, Head, NumberHead, TokenHead
from trainers.models.architectures import Bert, architecture_of, tied_to
from trainers.models.origin import WEIGHTS, Folder, Origin

_NOT_KEPT = (
    "architectures", "transformers_version", "_name_or_path", "auto_map", "torch_dtype", "dtype",
    "return_dict", "output_attentions", "output_hidden_states", "torchscript",
    "add_cross_attention", "chunk_size_feed_forward", "is_decoder", "tie_word_embeddings",
    "num_labels", "id2label", "label2id", "problem_type",
)  # fmt: skip
"""Fields of a `config.json` that are not part of an encoder: bookkeeping, ways of calling it, its head."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_PROGRAMS = 64
"""Most programs that a function is compiled to before torch runs it uncompiled. A layer becomes two to six:
with and without padding or gradients, and parts of those with hooks."""


@dataclass(frozen=True, slots=True)
class Output:
    """Logits as in `model_kinds.heads`; hidden states (B, S, H) and relations are empty unless requested."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()
    relations: tuple[torch.Tensor, ...] = ()


class Student(nn.Module):
    """An encoder with its head; weights in `fresh` start at random, those in `absent` are on other stages."""

    def __init__(
        self, model: PreTrainedModel, architecture: Bert, head: Head, fresh: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.model, self.architecture, self.head, self.fresh = model, architecture, head, fresh
        self.absent: frozenset[str] = frozenset()
        self._tied = tied_to(model)

    def forward(self, batch: Batch, *, with_hidden: bool = False) -> Output:
        encoded = self.encode(batch, with_hidden=with_hidden)
        hidden = tuple(map(batch.unpacked, encoded.hidden_states)) if with_hidden else ()
        return Output(self.logits(encoded, batch), hidden)

    def encode(self, batch: Batch, *, with_hidden: bool) -> Any:
        return self.encoder(**self.architecture.inputs(batch, self.model), output_hidden_states=with_hidden)

    def logits(self, encoded: Any, batch: Batch) -> torch.Tensor:
        hidden: torch.Tensor = encoded.last_hidden_state
        reads = self.head.reads
        if reads == "text":
            # A pooler reads the first token of a row of its batch, and a packed one has many texts.
            pooled = getattr(encoded, "pooler_output", None) if batch.segments is None else None
            return self.architecture.text_logits(self.model, self._texts(hidden, batch), pooled)
        if reads == "guessed":
            # Only what is to be guessed: the vocabulary's product is most of a small model's work.
            guessed = batch.guessed if batch.segments is None else batch.segments.guessed
            assert guessed is not None
            tokens = hidden.flatten(0, 1).index_select(0, guessed)
            return self.architecture.logits(self.model, reads, tokens)
        return batch.unpacked(self.architecture.logits(self.model, reads, hidden))

    def _texts(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not self.architecture.averages(self.model.config):
            row = batch.segments
            return hidden[:, 0] if row is None else hidden.squeeze(0).index_select(0, row.first)
        hidden, mask = batch.unpacked(hidden), batch.attention_mask
        if mask is None:
            return hidden.mean(1)
        weights = mask.to(hidden.dtype)[:, :, None]
        return (hidden * weights).sum(1) / weights.sum(1)

    @property
    def shape(self) -> EncoderShape:
        return self.architecture.family.shape(self.model.config.to_dict())

    @property
    def encoder(self) -> Any:
        return self.model.base_model

    def freeze(self, parts: Sequence[int | str]) -> None:
        """Leaves parts of `model.frozen` out of training, with whatever shares their parameters."""
        places = {0 if part == EMBEDDINGS else 1 + int(part) for part in parts}
        for name, parameter in self.model.named_parameters():
            if self.architecture.place(self.model, name) in places:
                parameter.requires_grad_(False)

    def layers_above(self, name: str) -> int:
        """Number of layers above a parameter, the head counted as one; 0 = it is in the head."""
        last = 1 + len(self.architecture.layers(self.model))
        return last - self.architecture.place(self.model, name)

    def checkpoint_activations(self) -> None:
        """Saves only the input of each encoder layer; the backward pass computes the rest again, bitwise."""
        # The public way also hooks the embeddings, which matters where they are frozen.
        self.model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))

    def compile_layers(self) -> None:
        """Compiles the encoder's layers, which are one program; the whole encoder would take far longer."""
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.config.recompile_limit = _PROGRAMS
        for layer in self.architecture.layers(self.model):
            layer.compile(dynamic=True)

    @property
    def attention(self) -> str:
        """Implementation of attention in the encoder's layers, and of flash attention if not torch's."""
        name, flash = str(self.model.config._attn_implementation), current_flash_attention_impl()
        return name if flash is None else f"{name}, {flash}"

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def weights(self) -> dict[str, torch.Tensor]:
        """This worker's parameters under the names of a model folder, each once."""
        own = {name: tensor for name, tensor in self.model.state_dict().items() if name not in self._tied}
        scales = _output_scales(self.model)
        return {name: tensor * scales[name] if name in scales else tensor for name, tensor in own.items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Sets this worker's parameters from the whole model's; RuntimeError: names or shapes differ."""
        own = {name: tensor for name, tensor in weights.items() if name not in self.absent}
        own |= {name: own[name] / scale for name, scale in _output_scales(self.model).items() if name in own}
        names = self.model.state_dict()
        tied = {name: own[source] for name, source in self._tied.items() if name in names and source in own}
        self.model.load_state_dict({**own, **tied})

    def write_config(self, folder: Path) -> None:
        fields = {**self.model.config.to_dict(), "architectures": [type(self.model).__name__]}
        (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")


class NumberOutput(nn.Linear):
    """Output layer of a number: `scale (w x + b)` in fp32; files hold `scale w` and `scale b`.

    `scale`, near the labels' standard deviation, makes learning rates independent of their unit.
    """

    def __init__(self, features: int, head: NumberHead) -> None:
        super().__init__(features, 1)
        self.scale = head.scale
        with torch.no_grad():
            self.bias.fill_(head.mean / head.scale)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns (B, 1) in fp32, or in the parameters' format where that is wider."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            number = functional.linear(states.to(wide), self.weight.to(wide), self.bias.to(wide))
            return number * self.scale


def parameter_name(name: str) -> str:
    """Name of a parameter in a checkpoint, from its name in a student or in a wrapper of one."""
    return name.removeprefix("student.").removeprefix("model.")


def build(
    origin: Origin,
    *,
    head: Head,
    vocabulary_size: int,
    dropout: float,
    max_length: int,
    pad_id: int,
    layers: Sequence[int] | None = None,
    attention_dropout: float | None = None,
) -> Student:
    """Returns the model with its first weights, drawn from torch's seed where the origin has none.

    Takes some `layers` of a folder, in this order; None = all. `attention_dropout` None = `dropout`. Raises
    `BadSpecError` if the folder's model does not fit tokenizer, length or its own weights.
    """
    original = origin.config(vocabulary_size)
    family, architecture = origin.family, architecture_of(origin.family)
    shape, first_position = family.shape(original), family.first_position(original)
    of_attention = dropout if attention_dropout is None else attention_dropout
    fields = {
        **{name: value for name, value in original.items() if name not in _NOT_KEPT},
        family.layer_count: shape.layers if layers is None else _count(layers, origin, shape.layers),
        **dict.fromkeys(family.hidden_dropouts, dropout),
        **dict.fromkeys(family.attention_dropouts, of_attention),
        "pad_token_id": pad_id,
        **_fields_of(head),
    }
    try:
        model = _built(architecture, fields, head)
    except Exception as error:  # the library lets a field's value fail where it is used, in any way
        lines = [line.strip() for line in str(error).splitlines()]
        reason = " ".join((type(error).__name__, *lines[:2]))
        raise BadSpecError(f"{origin}: unusable model configuration ({reason})") from None
    if model.config.vocab_size < vocabulary_size:
        raise BadSpecError(
            f"the tokenizer's ids go up to {vocabulary_size - 1}, but {origin} has rows for 0 to "
            f"{model.config.vocab_size - 1}; use its own tokenizer"
        )
    if first_position and first_position != pad_id + 1:
        raise BadSpecError(
            f"the tokenizer pads with id {pad_id}, but {origin} was trained with {first_position - 1}; use "
            "its own tokenizer"
        )
    if shape.positions < max_length:
        raise BadSpecError(
            f"task.max_length {max_length} exceeds the model's {shape.positions} positions; lower it"
        )
    if not isinstance(origin, Folder):
        return Student(model, architecture, head, list(model.state_dict()))
    fresh = _load(model, architecture, origin.path / WEIGHTS, layers, shape.layers)
    for name, scale in _output_scales(model).items():
        if name not in fresh:
            model.get_parameter(name).data.div_(scale)
    return Student(model, architecture, head, fresh)


def _built(architecture: Bert, fields: dict[str, Any], head: Head) -> PreTrainedModel:
    model = architecture.build(fields, head)
    if isinstance(head, NumberHead):
        _install_number_output(model, architecture, head)
    quantised = quantising() if fields.get(QUANTISED) is not None else None
    if quantised is not None:  # Before its weights, among which are learned scales.
        quantised.install(model)
    return model


def _install_number_output(model: PreTrainedModel, architecture: Bert, head: NumberHead) -> None:
    of_head, module = architecture.head_modules(model)[-1]
    within, layer = [part for part in module.named_modules() if isinstance(part[1], nn.Linear)][-1]
    output = NumberOutput(layer.in_features, head)
    with torch.no_grad():
        output.weight.copy_(layer.weight)
    model.set_submodule(f"{of_head}.{within}" if within else of_head, output)


def _output_scales(model: nn.Module) -> dict[str, float]:
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, NumberOutput)]
    return {f"{name}.{own}": part.scale for name, part in parts for own in ("weight", "bias")}


def _fields_of(head: Head) -> dict[str, Any]:
    if isinstance(head, NumberHead):
        return {"num_labels": 1, "problem_type": "regression"}
    if not isinstance(head, ClassHead | TokenHead):
        return {}
    numbered = dict(enumerate(head.classes))
    names = {"id2label": numbered, "label2id": {name: i for i, name in numbered.items()}}
    if isinstance(head, TokenHead):
        return names
    kind = "multi_label_classification" if head.multi_label else "single_label_classification"
    return {**names, "problem_type": kind}


def head_of(kind: type[Head], fields: Mapping[str, Any]) -> Head:
    """Returns the head that a configuration with `_fields_of` it describes."""
    numbered = fields.get("id2label") or {}
    classes = tuple(str(numbered[str(number)]) for number in range(len(numbered)))
    if kind is ClassHead:
        return ClassHead(classes, fields.get("problem_type") == "multi_label_classification")
    return TokenHead(classes) if kind is TokenHead else kind()  # type: ignore[call-arg]


def _count(layers: Sequence[int], origin: Origin, available: int) -> int:
    if not isinstance(origin, Folder):
        raise BadSpecError(
            f"model.layers needs a student with weights, but {origin} is a preset; "
            "remove model.layers or set model.name to a folder"
        )
    beyond = [layer for layer in layers if layer >= available]
    if beyond:
        raise BadSpecError(
            f"model.layers has layer {beyond[0]}, but {origin} has {available}; use 0 to {available - 1}"
        )
    return len(layers)


def _load(
    model: PreTrainedModel, architecture: Bert, file: Path, layers: Sequence[int] | None, depth: int
) -> list[str]:
    """Copies the file's weights; returns the names of those that start at random, of head and pooler only."""
    wanted = model.state_dict()
    missing = set(wanted) - set(tied_to(model))
    encoder = architecture.encoder_prefix(model)
    numbered = architecture.layer_number(model)
    heads = tuple(f"{name}." for name, _ in architecture.head_modules(model))
    try:
        with safe_open(str(file), framework="pt") as stored:
            names = {name: _parameter_of(name, encoder, heads) for name in stored.keys()}  # noqa: SIM118  (no mapping)
            numbers = {int(layer[1]) for own in names.values() if (layer := numbered.match(own))}
            if len(numbers) > depth:
                raise BadSpecError(
                    f"{file}: the file has {len(numbers)} layers, but config.json says {depth}; correct "
                    "config.json, or use model.layers to keep some"
                )
            for name, own in names.items():
                for target in _targets(own, numbered.match(own), layers):
                    if target not in missing:
                        continue
                    tensor = stored.get_tensor(name)
                    _require_numbers(tensor, f"{file}: {name}")
                    if tensor.shape != wanted[target].shape:
                        if not target.startswith(encoder):
                            continue  # a head of another task
                        raise BadSpecError(
                            f"{file}: {name} has shape {tuple(tensor.shape)}, but config.json says "
                            f"{tuple(wanted[target].shape)}"
                        )
                    wanted[target].copy_(tensor)
                    missing.discard(target)
    except (SafetensorError, OSError) as error:
        raise BadSpecError(f"{file}: the weights cannot be read ({error})") from None
    needed = sorted(name for name in missing if not architecture.is_optional(model, name))
    if needed:
        raise BadSpecError(f"{file}: {len(needed)} encoder weights are missing, first {needed[0]}")
    return sorted(missing)


def _require_numbers(tensor: torch.Tensor, what: str) -> None:
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


def _parameter_of(name: str, encoder: str, heads: tuple[str, ...]) -> str:
    """The parameter of a stored name: encoders may lack their prefix, and old LayerNorms have gamma, beta."""
    for old, new in (("gamma", "weight"), ("beta", "bias")):
        if name.endswith(f"LayerNorm.{old}"):
            name = name.removesuffix(old) + new
    return name if name.startswith((encoder, *heads)) else f"{encoder}{name}"


def _targets(name: str, in_layer: re.Match[str] | None, layers: Sequence[int] | None) -> list[str]:
    """Parameters that a file's becomes: none without its layer, several if its layer is repeated."""
    if layers is None or in_layer is None:
        return [name]
    before, rest = name[: in_layer.start(1)], name[in_layer.end(1) :]
    return [f"{before}{new}{rest}" for new, old in enumerate(layers) if old == int(in_layer[1])]
