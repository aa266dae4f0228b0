"""One bit per element: tensors as packed signs, with one fp32 scale for each chunk of them. Pure.

A chunk's scale is the mean magnitude of its elements, the best approximation of a chunk by plus and
minus one number in the sense of least squares (Seide et al., Interspeech 2014).
"""

from __future__ import annotations

import torch

from trainers.parallel_kinds.compressions import SIGN_CHUNK, SIGN_MESSAGE_BYTES

CHUNK, MESSAGE_BYTES = SIGN_CHUNK, SIGN_MESSAGE_BYTES
_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1, read as one number: its highest byte is made of their lowest bits."""


def encode(values: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compresses chunks.

    Args:
        values: (C, CHUNK) fp32; elements beyond a chunk's count are 0.
        counts: (C,) fp32: elements that are real, the others are padding; at least 1.

    Returns:
        (C, MESSAGE_BYTES) uint8 message, and (C, CHUNK) fp32: the result of `decode`.
    """
    scales = torch.linalg.vector_norm(values, ord=1, dim=1) / counts
    positive = values >= 0
    signs = ((positive.view(torch.int64) * _GATHER) >> 56) & 0xFF
    message = torch.cat([signs.to(torch.uint8), scales.unsqueeze(1).view(torch.uint8)], dim=1)
    scales = scales.unsqueeze(1)
    return message, torch.where(positive, scales, -scales)


def decode(message: torch.Tensor) -> torch.Tensor:
    """Decompresses (C, MESSAGE_BYTES) uint8 to (C, CHUNK) fp32: signs times their chunk's scale."""
    signs, scales = message[:, : CHUNK // 8], message[:, CHUNK // 8 :]
    values = _signs_of_bytes(message.device)[signs.reshape(-1).int()].view(len(message), CHUNK)
    return values.mul_(scales.contiguous().view(torch.float32))


def _signs_of_bytes(device: torch.device) -> torch.Tensor:
    """(256, 8) fp32: the eight signs in each byte, the lowest bit first."""
    if device not in _TABLES:
        bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
        _TABLES[device] = (2 * bits - 1).to(device, torch.float32)
    return _TABLES[device]


_TABLES: dict[torch.device, torch.Tensor] = {}
