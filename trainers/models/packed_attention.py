"""Attention within each segment of a row, for encoders that compute no padding.

On the CPU it is the grouped attention of `trainers.models.dropout`; `fused` has its own there. On a GPU it is
flash attention in half precision, and else torch's memory-efficient kernel, whose backward pass drops other
elements than its forward pass (pytorch issue 115590): with dropout it gets a padded batch instead. The
segments' edges are on the GPU and the longest segment is a number on the host: no layer makes the host wait.
"""

from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from trainers.data.batches import Segments
from trainers.models import dropout as host

PACKED_ATTENTION = "stillhouse_packed"  # The name that this attention has among transformers' implementations

_FLASH_FROM = (8, 0)
_FLASH_DEPTHS = range(8, 257, 8)
_NO_MASK = 0  # `custom_mask_type` of the memory-efficient kernel


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' form, (1, heads, T, D) in, (1, T, heads, D) out; padded without segments."""
    if segments is None:
        return host.attention(module, query, key, value, attention_mask, dropout, scaling)
    if query.is_cpu:
        mixed = host.segment_attention(query, key, value, segments.lengths, dropout=dropout, scaling=scaling)
        return mixed.transpose(1, 2), None
    if has_flash(query.dtype, query.shape[-1], _capability(query.device)):
        kernel = flash
    else:
        kernel = padded if dropout else efficient
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return kernel(q, k, v, segments, dropout, scaling), None


AttentionInterface.register(PACKED_ATTENTION, attention)


def install(model: PreTrainedModel) -> None:
    model.config._attn_implementation = PACKED_ATTENTION


def has_flash(dtype: torch.dtype, depth: int, capability: tuple[int, int]) -> bool:
    halves = (torch.float16, torch.bfloat16)
    return dtype in halves and depth in _FLASH_DEPTHS and capability >= _FLASH_FROM


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """By edges; (1, T, heads, D) of queries, keys and values of that shape."""
    edges, longest = segments.cu_seqlens, segments.longest
    # Not [0]: the gradient of a selection is zeros and a copy, that of a view is a view.
    q, k, v = (tensor.squeeze(0) for tensor in (query, key, value))
    mixed: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, edges, edges, longest, longest, dropout, False, False, scale=scaling
    )[0]
    return mixed.unsqueeze(0)


def efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """The same by the memory-efficient kernel, which supports every format and every GPU, but no dropout."""
    if dropout:
        raise ValueError("the memory-efficient kernel has wrong gradients with edges and dropout: use padded")
    edges, longest = segments.cu_seqlens, segments.longest
    if scaling == query.shape[-1] ** -0.5:
        scaling = None  # the default; of any other, torch 2.13 cannot trace the backward pass
    differentiated = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    mixed: torch.Tensor = torch.ops.aten._efficient_attention_forward(
        query, key, value, None, edges, edges, longest, longest, 0.0, _NO_MASK, differentiated, scale=scaling
    )[0]
    return mixed


def padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """The same by torch's dense attention over a segment per row, in every format and on every GPU.

    Its shapes depend on those of the row and its `Segments` alone: one recording replays all rows of a shape.
    """
    edges, longest, tokens = segments.cu_seqlens, segments.longest, query.shape[1]
    places = torch.arange(tokens, dtype=edges.dtype, device=edges.device)
    owners = torch.searchsorted(edges, places, right=True) - 1
    slots = owners * longest + places - edges.index_select(0, owners)
    lengths = edges.diff()

    def by_segment(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.new_zeros((len(lengths) * longest, *tensor.shape[2:]))
        filled = flat.index_copy(0, slots, tensor.squeeze(0))
        return torch.unflatten(filled, 0, (-1, longest)).transpose(1, 2)

    q, k, v = (by_segment(tensor) for tensor in (query, key, value))
    real = (places[:longest] < lengths[:, None])[:, None, None]
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=real, dropout_p=dropout, scale=scaling)
    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, slots).unsqueeze(0)


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; of a device that is only traced, the least that has all kernels."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else _FLASH_FROM
