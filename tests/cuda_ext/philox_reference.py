"""Dropout's bits by the definition of Philox4x32-10, in plain integers."""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def philox(seed: int, counter: int, offset: int) -> list[int]:
    """The eight half-words of a counter, least significant first."""
    c0, c1, c2, c3 = counter & _LOW, counter >> 32, offset & _LOW, offset >> 32
    k0, k1 = seed & _LOW, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _LOW, (a >> 32) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return [half for word in (c0, c1, c2, c3) for half in (word & 0xFFFF, word >> 16)]


def kept(seed: int, offset: int, rows: int, width: int, rate: float) -> torch.Tensor:
    """(rows, width) factors of dropout: 0, or the scale of what is kept."""
    below, blocks = round(rate * 65536), -(-width // 8)
    bits = [
        [half for block in range(blocks) for half in philox(seed, row * blocks + block, offset)][:width]
        for row in range(rows)
    ]
    return (torch.tensor(bits) >= below).double() * (65536 / (65536 - below))
