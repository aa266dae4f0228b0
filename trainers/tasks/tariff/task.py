import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainers.checkpoints.predictions import LabelCounts
from trainers.config import TaskConfig
from trainers.data.formats import Row
from trainers.data.layouts import TRAIN
from trainers.data.selection import Indices, held_out_by_text, normal, numbers_of
from trainers.data.tokens import TokenSet
from trainers.errors import BadDataError
from trainers.model_kinds.heads import IGNORED, ClassHead
from trainers.tasks.base import Carried, Facts, Judged, Observed, Parts, Scoring
from trainers.tasks.classification import LabelFields
from trainers.tasks.classification.task import UNSEEN, Classification, Labelled
from trainers.tasks.dataset import Tokenising, drawn, same_answer
from trainers.tasks.scores import Batch, Tensor, class_loss, classification, likeliest, named_probabilities
from trainers.tasks.tariff import CodeFields

_TOP = 5
_CODE = re.compile(r"(\d\d){1,5}")
_FIELDS = LabelFields()
Codes = npt.NDArray[np.int64]


class Tariff(Classification):
    """One class per code of `task.level` digits that the training part has."""

    left_out = "the code has fewer digits than task.level"

    def fields(self, task: TaskConfig) -> LabelFields:
        return _FIELDS

    def settings(self, task: TaskConfig) -> Facts:
        return {"level": _level(task)}

    def example(self, row: Row, task: TaskConfig) -> Labelled | None:
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
        code = digits[:level]
        return Labelled((text,), int(code), (code,)) if len(digits) >= level else None

    def hold_out(self, whole: Sequence[Labelled], task: TaskConfig) -> tuple[Indices, Indices]:
        """Holds out texts with all their codes."""
        return held_out_by_text(
            numbers_of([normal(one.texts[0]) for one in whole]),
            np.array([one.stratum for one in whole]),
            task.validation_fraction,
            task.split_seed,
            advice="lower task.level or add examples" if _level(task) > 2 else "add examples",
        )

    def draw(self, parts: Parts[Labelled], task: TaskConfig) -> dict[str, list[Labelled]]:
        return drawn(parts, lambda one: one.stratum, task)

    def head(self, parts: Parts[Labelled], chosen: Parts[Labelled], task: TaskConfig) -> ClassHead:
        return ClassHead(tuple(sorted({one.labels[0] for one in chosen[TRAIN]})))

    def review(self, parts: Parts[Labelled], head: ClassHead, task: TaskConfig) -> Iterator[str]:
        level = _level(task)
        yield from same_answer(
            parts,
            lambda one: f"code {one.labels[0]} at level {level}",
            "raise task.level or add rows of other codes",
        )
        known = set(head.classes)
        for part, phrases in parts.items():
            if not any(one.labels[0] in known for one in phrases):
                raise BadDataError(
                    f"{part}: no code of {len(phrases)} examples is in the training part, so none can be "
                    f"predicted; put the same codes into both parts, or leave out the {part} part"
                )

    def number(self, label: str, numbers: Mapping[str, int]) -> int:
        return numbers.get(label, UNSEEN)

    def tokenise(self, examples: Sequence[Labelled], head: ClassHead, by: Tokenising) -> TokenSet:
        tokens = super().tokenise(examples, head, by)
        codes = np.array([one.stratum for one in examples])
        return replace(tokens, columns={**tokens.columns, "code": codes})

    def scoring(self, tokens: TokenSet, head: ClassHead, task: TaskConfig, gold: Path) -> Scoring:
        codes = [int(code) for code in head.classes]
        return CodeScoring(tokens.columns["code"], codes, _level(task))

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """An unseen code has no logit: it costs the logarithm of the number of classes."""
        unseen = batch.labels == UNSEEN
        seen = class_loss(logits, batch, batch.labels.masked_fill(unseen, IGNORED), self.cross_entropy)
        return seen + unseen.sum() * math.log(logits.shape[1])


class CodeScoring:
    """How often the right code, and the right beginning of the code, is the likeliest; all (N,) are numbers.

    A code without training examples counts as wrong, and as a class of its own in the macro figures.
    """

    def __init__(self, right: Codes, codes: Sequence[int], level: int) -> None:
        self._right, self._codes, self._level = np.asarray(right), np.array(codes), level
        self.units = len(right)

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns (B, 10) the likeliest classes, best first, and their probabilities, or fewer of both."""
        return likeliest(logits, _TOP)

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        best = self._best(observed)
        every, predicted, right = self._classes(best)
        return Judged(
            np.arange(len(best)),
            (best[:, 0] == self._right).astype(np.float64),
            [[self._name(code) for code in several] for several in best],
            [self._name(code) for code in self._right],
            LabelCounts.of_classes(predicted, right, [self._name(code) for code in every]),
            named_probabilities(observed, [self._name(code) for code in self._codes]),
        )

    def _best(self, observed: Observed) -> Codes:
        best: Codes = self._codes[np.split(observed, 2, axis=1)[0].astype(np.int64)]
        return best

    def _name(self, code: int) -> str:
        return f"{code:0{self._level}d}"

    def _classes(self, best: Codes) -> tuple[Codes, Codes, Codes]:
        """Returns all codes, and the places among them of the likeliest and the right ones."""
        every = np.union1d(self._codes, self._right)
        return every, np.searchsorted(every, best[:, 0]), np.searchsorted(every, self._right)

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        best = self._best(observed)
        every, predicted, right = self._classes(best)
        scores = classification(predicted, right, len(every))
        scores["top5_accuracy"] = float((best == self._right[:, None]).any(1).mean())
        for level in range(2, self._level, 2):
            rest = 10 ** (self._level - level)
            same = best[:, 0] // rest == self._right // rest
            scores[f"accuracy_level_{level}"] = float(same.mean())
        scores["unseen_pct"] = 100.0 * float(np.mean(~np.isin(self._right, self._codes)))
        return scores


def _level(task: TaskConfig) -> int:
    return task.own(CodeFields).level
