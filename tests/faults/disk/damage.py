"""Ways to damage a file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

KINDS = ("flip", "zero", "garbage", "cut_out", "insert", "truncate")
LONGEST = 300
"""Bytes that are damaged at most, but for `truncate`."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damage of one file.

    Attributes:
        kind: one of `KINDS`.
        start, end: the bytes that are not as they were; an insertion is before `start`.
        seed: of the bytes that take their place.
    """

    kind: str
    start: int
    end: int
    seed: int

    @classmethod
    def choose(cls, chance: random.Random, size: int, kinds: tuple[str, ...] = KINDS) -> Damage:
        """Returns a damage of a file of a size."""
        kind = chance.choice(kinds)
        start = chance.randrange(size)
        length = {"flip": 1, "insert": 0, "truncate": size}.get(kind, chance.randint(1, LONGEST))
        return cls(kind, start, min(size, start + length), chance.getrandbits(32))

    def of(self, content: bytes) -> bytes:
        """Returns damaged content."""
        chance, before, after = random.Random(self.seed), content[: self.start], content[self.end :]
        if self.kind == "flip":
            return before + bytes([content[self.start] ^ 1 << chance.randrange(8)]) + after
        if self.kind == "zero":
            return before + bytes(self.end - self.start) + after
        if self.kind == "garbage":
            return before + chance.randbytes(self.end - self.start) + after
        if self.kind == "insert":
            return before + chance.randbytes(chance.randint(1, LONGEST)) + after
        return before + after

    def do(self, path: Path) -> None:
        """Damages a file."""
        path.write_bytes(self.of(path.read_bytes()))
