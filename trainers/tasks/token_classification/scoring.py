from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainers.checkpoints.predictions import LabelCounts
from trainers.model_kinds.heads import IGNORED
from trainers.tasks.base import Judged
from trainers.tasks.token_classification.tags import OUTSIDE, EntityCounts, types_of

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch

Numbers = npt.NDArray[np.int64]


class EntityScoring:
    """The likeliest tag of each word is the prediction; `O` for a word that the model does not see.

    Args:
        tags: (W,) true tag of each word of all examples.
        counts: (N,) words of each example.
        seen: (W,) whether a piece of the word is in the example, which may have been cut.
        classes: Names of the tags, by number.
    """

    def __init__(
        self, tags: Numbers, counts: Numbers, seen: npt.NDArray[np.bool_], classes: Sequence[str]
    ) -> None:
        self._tags, self._counts, self._seen, self._classes = tags, counts, seen, classes
        ends = np.cumsum(counts)[:-1]
        self._width = max([int(part.sum()) for part in np.split(seen, ends)], default=0)

    @property
    def units(self) -> int:
        return len(self._counts)

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns (B, W) the likeliest tag of each word that is seen, in order; -1 beyond the last."""
        from torch.nn import functional

        words = batch.labels != IGNORED
        order = (~words).byte().argsort(dim=1, stable=True)  # Words first, in their order.
        found = logits.argmax(-1).gather(1, order).masked_fill(~words.gather(1, order), -1)
        missing = max(0, self._width - found.shape[1])
        return functional.pad(found, (0, missing), value=-1)[:, : self._width].float()

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        counts, right = EntityCounts(), 0
        for true, predicted in self._sentences(observed):
            counts.add(true, predicted)
            right += sum(ours == theirs for ours, theirs in zip(true, predicted, strict=True))
        return {**counts.scores(), "tag_accuracy": right / max(1, len(self._tags))}

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
        """Returns the tags, and what each text contributes to the F1.

        F1 is a ratio of sums; a text's share is its first-order effect on it (the delta method), so that the
        shares' mean is F1 and their spread is that of F1.
        """
        counts = EntityCounts()
        sentences = self._sentences(observed)
        found = np.array([counts.add(true, predicted) for true, predicted in sentences], dtype=np.float64)
        f1, total = counts.scores()["entity_f1"], max(1.0, float(found[:, 1].sum()))
        types = sorted(types_of(self._classes))
        return Judged(
            np.arange(len(sentences)),
            f1 + len(sentences) * (2.0 * found[:, 0] - f1 * found[:, 1]) / total,
            [predicted for _, predicted in sentences],
            [true for true, _ in sentences],
            LabelCounts(
                types,
                true=[counts.true[kind] for kind in types],
                predicted=[counts.predicted[kind] for kind in types],
                hits=[counts.hits[kind] for kind in types],
            ),
        )

    def _sentences(self, observed: npt.NDArray[np.float32]) -> list[tuple[list[str], list[str]]]:
        outside = self._classes.index(OUTSIDE)
        found: list[tuple[list[str], list[str]]] = []
        start = 0
        for row, count in zip(observed.astype(np.int64), self._counts.tolist(), strict=True):
            seen = self._seen[start : start + count]
            predicted = np.full(count, outside)
            predicted[seen] = row[: int(seen.sum())]
            true = self._tags[start : start + count]
            found.append(
                (
                    [self._classes[tag] for tag in true.tolist()],
                    [self._classes[tag] for tag in predicted.tolist()],
                )
            )
            start += count
        return found
