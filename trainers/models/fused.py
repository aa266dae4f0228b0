"""The encoder `fused`: layers of BERT's kind with their elementwise work in kernels of `cuda_ext.encoder`.

Modules keep their parameters and names and get another class. Attention is a kernel as well on the CPU, and
that of `packed` elsewhere. A seed is drawn from torch's CPU generator per kernel with dropout.

A layer whose parts are plain and have no hooks computes all that follows its attention as one operation
(`cuda_ext.encoder_layer`), which launches fewer kernels; else each part computes its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.bert import modeling_bert
from transformers.models.electra import modeling_electra
from transformers.models.roberta import modeling_roberta
from transformers.models.xlm_roberta import modeling_xlm_roberta

from cuda_ext import encoder, encoder_layer
from trainers.data.batches import Segments
from trainers.errors import BadSpecError
from trainers.models.packed_attention import PACKED_ATTENTION
from trainers.models.precision import HalfEmbedding


def _dropout(dropout: nn.Dropout) -> dict[str, Any]:
    if not (dropout.training and dropout.p):
        return {}
    return {"rate": dropout.p, "seed": encoder.fresh_seed()}


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _is_plain(kind: type[nn.Module], module: nn.Module) -> bool:
    """Whether a module has no arithmetic of its own, such as rounding, and no hook that reads its result."""
    return type(module) is kind and not _watched(module)


def _norm_after(part: Any) -> encoder_layer.NormAfter:
    norm = part.LayerNorm
    return encoder_layer.NormAfter(
        part.dense.weight, part.dense.bias, norm.weight, norm.bias, norm.eps, **_dropout(part.dropout)
    )


def _product(linear: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x W^T, and the bias to be added: 0 after a Linear of another class, such as one that rounds."""
    if type(linear) is nn.Linear:
        return functional.linear(x, linear.weight), linear.bias
    return linear(x), torch.zeros_like(linear.bias, requires_grad=False)


def _table(embedding: nn.Embedding) -> torch.Tensor:
    if isinstance(embedding, HalfEmbedding):
        return embedding.table()
    return embedding.weight if type(embedding) is nn.Embedding else embedding.weight.float()


class _Embeddings:
    """dropout(LayerNorm(word + type + position))."""

    def forward(
        self: Any,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        positions = position_ids
        if positions is None and hasattr(self, "padding_idx"):  # a family whose positions follow padding
            positions = self.create_position_ids_from_input_ids(input_ids, self.padding_idx)
        elif positions is None:
            positions = self.position_ids[:, : input_ids.shape[1]]
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        device = input_ids.device.type
        encoder.require(device)
        norm = self.LayerNorm
        tables = (self.word_embeddings, self.position_embeddings, self.token_type_embeddings)
        words, places, kinds = map(_table, tables)
        embedded = encoder.embed_norm(
            input_ids,
            types.expand_as(input_ids),
            positions.expand_as(input_ids),
            words,
            places,
            kinds,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            padding=tuple(table.padding_idx for table in tables),
            **_dropout(self.dropout),
        )
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return embedded.to(torch.get_autocast_dtype(device))
        return embedded


class _Layer:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        attention, inner, outer = self.attention, self.intermediate, self.output
        mix = attention.output
        skipped = (attention, attention.self, mix, mix.dropout, inner, outer, outer.dropout)
        if not (
            all(_is_plain(nn.Linear, part.dense) for part in (mix, inner, outer))
            and all(_is_plain(nn.LayerNorm, part.LayerNorm) for part in (mix, outer))
            and not any(map(_watched, skipped))
        ):
            unfused: torch.Tensor = super().forward(hidden_states, attention_mask, *rest, **options)  # type: ignore[misc]
            return unfused
        mixed, residual = attention.self.mix(hidden_states, attention_mask, **options)
        return encoder_layer.after_attention(
            mixed, residual, _norm_after(mix), (inner.dense.weight, inner.dense.bias), _norm_after(outer)
        )


class _SelfAttention:
    """One product for queries, keys and values, and attention by its registered name."""

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        return self.mix(hidden_states, attention_mask, **options)[0], None

    def mix(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention's result, and the hidden states to use as the residual."""
        parts = (self.query, self.key, self.value)
        if all(_is_plain(nn.Linear, part) for part in parts):
            *projected, residual = encoder_layer.projections(
                hidden_states, [part.weight for part in parts], [part.bias for part in parts]
            )
        else:
            projected, residual = [part(hidden_states) for part in parts], hidden_states
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        segments: Segments | None = options.get("segments")
        if segments is not None and hidden_states.is_cpu:
            query, key, value = (part.view(shape)[0] for part in projected)
            mixed = encoder.segment_attention(
                query, key, value, segments.cu_seqlens, scale=self.scaling, **_dropout(self.dropout)
            )
            return mixed.view(hidden_states.shape), residual
        query, key, value = (part.view(shape).transpose(1, 2) for part in projected)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        rate = self.dropout.p if self.training else 0.0
        mixed, _ = attend(
            self, query, key, value, attention_mask, dropout=rate, scaling=self.scaling, **options
        )
        return mixed.reshape(*hidden_states.shape[:-1], -1), residual

    def _apply(self: Any, function: Any, recurse: bool = True) -> Any:
        """Keeps parameters adjacent after they move to a device or a dtype."""
        applied = super()._apply(function, recurse)  # type: ignore[misc]
        self.adjoin()
        return applied

    def adjoin(self: Any) -> None:
        parts = (self.query, self.key, self.value)
        encoder_layer.adjoin([part.weight for part in parts])
        encoder_layer.adjoin([part.bias for part in parts])


class _Intermediate:
    """gelu(x W^T + b)."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return encoder.bias_gelu(*_product(self.dense, hidden_states))


class _Output:
    """LayerNorm(residual + dropout(x W^T + b))."""

    def forward(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        product, bias = _product(self.dense, hidden_states)
        norm, residual = self.LayerNorm, input_tensor.to(product.dtype)
        return encoder.dropout_add_norm(
            product, bias, residual, norm.weight, norm.bias, eps=norm.eps, **_dropout(self.dropout)
        )


def _fused(original: type[nn.Module], forward: type) -> tuple[type[nn.Module], type[nn.Module]]:
    return original, type(f"Fused{original.__name__}", (forward, original), {"__doc__": forward.__doc__})


_CLASSES: Mapping[type[nn.Module], type[nn.Module]] = dict(
    _fused(getattr(module, f"{prefix}{suffix}"), forward)
    for module, prefix in (
        (modeling_bert, "Bert"),
        (modeling_electra, "Electra"),
        (modeling_roberta, "Roberta"),
        (modeling_xlm_roberta, "XLMRoberta"),
    )
    for suffix, forward in (
        ("Embeddings", _Embeddings),
        ("Layer", _Layer),
        ("SelfAttention", _SelfAttention),
        ("Intermediate", _Intermediate),
        ("SelfOutput", _Output),
        ("Output", _Output),
    )
)
"""Classes of transformers' modules, and what takes their place."""

_ACTIVATION = "gelu"  # `hidden_act` of a model that the kernels compute: GELU with erf


def install(model: PreTrainedModel) -> None:
    """Raises `BadSpecError` for layers or activations without kernels, or where there are no kernels."""
    modules = [module for module in model.modules() if type(module) in _CLASSES]
    if not modules:
        raise BadSpecError(
            f"model.encoder fused has no kernels for the layers of {type(model).__name__}; "
            "set model.encoder to packed"
        )
    if (activation := model.config.hidden_act) != _ACTIVATION:
        raise BadSpecError(
            f"model.encoder fused computes GELU with erf, but the model's hidden_act is {activation!r}; "
            "set model.encoder to packed"
        )
    if reason := encoder.why_unavailable("cuda" if torch.cuda.is_available() else "cpu"):
        raise BadSpecError(f"model.encoder fused: {reason}")
    for module in modules:
        module.__class__ = _CLASSES[type(module)]
        if isinstance(module, _SelfAttention):
            module.adjoin()
    model.config._attn_implementation = PACKED_ATTENTION


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    encoder.require(logits.device.type)
    return encoder.cross_entropy(logits, labels, ignore_index=ignored)
