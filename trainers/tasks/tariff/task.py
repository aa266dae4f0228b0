"""Descriptions of goods as a classification by the beginning of their code."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from typing_extensions import override

from trainers import config as configuration
from trainers.data.batches import Batch
from trainers.data.rows import Row
from trainers.data.selection import Indices, held_out_by_text, normal
from trainers.data.tokens import TokenSet, tokenise
from trainers.errors import BadDataError
from trainers.models.heads import ClassHead, Head
from trainers.tasks.base import Judged, Scoring
from trainers.tasks.dataset import DatasetTask, same_answer
from trainers.tasks.scores import classification
from trainers.tasks.tariff import CodeFields

UNSEEN = -1
"""Class of a validation example whose code no training example has."""
_TOP = 5
_CODES = "codes.json"
_CODE = re.compile(r"(\d\d){1,5}")


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words for a good.

    Attributes:
        text: description, synonym or colloquial term.
        code: its customs code, cut to the digits that are learned.
        number: class of the code; `UNSEEN` when the training part lacks it.
    """

    text: str
    code: str
    number: int = UNSEEN


class Tariff(DatasetTask[Phrase]):
    """One class per code of `task.level` digits that the training part has."""

    left_out = "the code has fewer digits than task.level"

    def settings(self, task: configuration.Task) -> dict[str, str | int | float]:
        """Returns the level."""
        return {"level": _level(task)}

    @override
    def example(self, row: Row, task: configuration.Task) -> Phrase | None:
        """Returns the example of a row with fields `text` and `code`; None when the code is too short."""
        text = row.text("text")
        written = row.label("code")
        if not isinstance(written, str):
            raise row.refusal(
                "code", f"{written!r} is a number; write it as a string, because leading zeros count"
            )
        digits = re.sub(r"[.\s]", "", written)
        if not (digits.isascii() and _CODE.fullmatch(digits)):
            raise row.refusal(
                "code",
                f"{written!r} is not a customs code; write 2, 4, 6, 8 or 10 digits with leading zeros, "
                "such as 0101.21",
            )
        level = _level(task)
        return Phrase(text, digits[:level]) if len(digits) >= level else None

    def stratum(self, example: Phrase) -> int:
        """Returns the code."""
        return int(example.code)

    def texts(self, example: Phrase) -> Iterable[str]:
        """Returns the text."""
        return (example.text,)

    @override
    def hold_out(self, whole: Sequence[Phrase], task: configuration.Task) -> tuple[Indices, Indices]:
        """Holds out texts with all their codes."""
        spellings: dict[str, int] = {}
        texts = [spellings.setdefault(normal(one.text), len(spellings)) for one in whole]
        return held_out_by_text(
            np.array(texts),
            np.array([self.stratum(one) for one in whole]),
            task.validation_fraction,
            task.split_seed,
            advice="lower task.level or add examples" if _level(task) > 2 else "add examples",
        )

    @override
    def draw(
        self, parts: Mapping[str, Sequence[Phrase]], task: configuration.Task
    ) -> dict[str, list[Phrase]]:
        """Draws examples, with classes numbered."""
        chosen = super().draw(parts, task)
        numbers = {code: i for i, code in enumerate(sorted({one.code for one in chosen["train"]}))}
        return {
            part: [replace(one, number=numbers.get(one.code, UNSEEN)) for one in phrases]
            for part, phrases in chosen.items()
        }

    @override
    def review(self, parts: Mapping[str, Sequence[Phrase]], task: configuration.Task) -> Iterator[str]:
        level = _level(task)
        yield from same_answer(
            parts,
            lambda one: f"code {one.code} at level {level}",
            "raise task.level or add rows of other codes",
        )
        for part, phrases in parts.items():
            if all(one.number == UNSEEN for one in phrases):
                raise BadDataError(
                    f"{part}: no code of {len(phrases)} examples is in the training part, so none can be "
                    f"predicted; put the same codes into both parts, or leave out the {part} part"
                )

    @override
    def tokenise(
        self,
        examples: Sequence[Phrase],
        tokenizer: Tokenizer,
        task: configuration.Task,
        told: Callable[[int], None],
    ) -> TokenSet:
        """Returns labels (N,), the classes, and column `code` (N,), the code as a number."""
        labels = np.array([one.number for one in examples], dtype=np.int64)
        tokens = tokenise([one.text for one in examples], labels, tokenizer, task.max_length, told)
        codes = np.array([int(one.code) for one in examples])
        return replace(tokens, columns={**tokens.columns, "code": codes})

    def describe(self, folder: Path, parts: Mapping[str, Sequence[Phrase]], task: configuration.Task) -> None:
        """Writes the codes of the classes, by number."""
        codes = sorted({one.code for one in parts["train"]})
        (folder / _CODES).write_text(json.dumps(codes), encoding="utf-8")

    @override
    def head(self, folder: Path) -> Head:
        return ClassHead(_codes_in(folder))

    @override
    def scoring(self, folder: Path, part: str, tokens: TokenSet, task: configuration.Task) -> Scoring:
        codes = [int(code) for code in _codes_in(folder)]
        return CodeScoring(tokens.columns["code"], codes, _level(task))

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the cross-entropy, summed over the batch.

        An unseen code has no logit: it counts what knowing nothing costs, the logarithm of the
        number of classes.
        """
        seen = functional.cross_entropy(logits.float(), batch.labels, ignore_index=UNSEEN, reduction="sum")
        return seen + (batch.labels == UNSEEN).sum() * math.log(logits.shape[1])


class CodeScoring:
    """How often the right code, and the right beginning of the code, is the likeliest.

    A code that no training example has cannot be found: it counts as wrong, and as a class of its
    own in the macro figures; `unseen_pct` says how many there are. Its beginning may still be right.

    Args:
        right: (N,) true codes, as numbers.
        codes: Codes of the classes, as numbers.
        level: digits of all these.
    """

    def __init__(self, right: npt.NDArray[np.int64], codes: Sequence[int], level: int) -> None:
        self._right, self._codes, self._level = np.asarray(right), np.array(codes), level

    @property
    def units(self) -> int:
        """Texts."""
        return len(self._right)

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns (B, 5) the likeliest classes, best first; fewer when there are fewer."""
        return logits.topk(min(_TOP, logits.shape[1]), dim=1).indices.float()

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
        """Returns the likeliest codes, best first, and the right one."""
        likeliest = self._codes[observed.astype(np.int64)]
        return Judged(
            np.arange(len(likeliest)),
            (likeliest[:, 0] == self._right).astype(np.float64),
            [[f"{code:0{self._level}d}" for code in several] for several in likeliest],
            [f"{code:0{self._level}d}" for code in self._right],
        )

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Returns the metrics; nothing is carried over."""
        likeliest = self._codes[observed.astype(np.int64)]
        every = np.union1d(self._codes, self._right)
        scores = classification(
            np.searchsorted(every, likeliest[:, 0]), np.searchsorted(every, self._right), len(every)
        )
        scores["top5_accuracy"] = float((likeliest == self._right[:, None]).any(1).mean())
        for level in range(2, self._level, 2):
            rest = 10 ** (self._level - level)
            same = likeliest[:, 0] // rest == self._right // rest
            scores[f"accuracy_level_{level}"] = float(same.mean())
        scores["unseen_pct"] = 100.0 * float(np.mean(~np.isin(self._right, self._codes)))
        return scores


def _level(task: configuration.Task) -> int:
    return task.own(CodeFields).level


def _codes_in(folder: Path) -> tuple[str, ...]:
    """Returns the codes of the classes, by number."""
    return tuple(json.loads((folder / _CODES).read_text(encoding="utf-8")))
