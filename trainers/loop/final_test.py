"""Scoring the test part: once, when a run has trained its whole length."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from trainers.checkpoints import manifest, predictions, store
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.predictions import NoPredictions, Record
from trainers.checkpoints.store import MODEL_FILE
from trainers.data.cache import digest_of
from trainers.errors import CheckpointError
from trainers.loop.evaluation import Evaluator
from trainers.loop.progress import Progress
from trainers.metrics import on_test
from trainers.parallel.replica import Replica
from trainers.workers import Workers


class FinalTest:
    """The test part of a run, and the record of its figures.

    It is scored with the weights of the best checkpoint and the thresholds of that checkpoint's evaluation,
    after every choice has been made.

    Args:
        units: File with the names of its units.
        folder: Checkpoint folder of the run.
        own_folder: Checkpoint folder of this attempt.
        identity: Identity of the run's data.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        units: Path,
        folder: Path,
        own_folder: Path,
        identity: Mapping[str, str | int | float],
        headline: str,
        workers: Workers,
    ) -> None:
        self._evaluator, self._units = evaluator, units
        self._folder, self._own_folder = folder, own_folder
        self._data, self._headline, self._workers = digest_of(dict(identity)), headline, workers

    @property
    def examples(self) -> int:
        """Units of the test part."""
        return self._evaluator.units

    def score(
        self, replica: Replica, progress: Progress, abandon: Callable[[], bool]
    ) -> Mapping[str, float] | None:
        """Returns the figures on the test part by name, the same on every worker; None when abandoned.

        They come from the record if an earlier attempt scored the same weights on the same data. Otherwise
        the model has the weights of the best checkpoint afterwards.

        Raises:
            CheckpointError: On every worker; the best checkpoint cannot be read, or the record not written.
        """
        best = CheckpointId(progress.best_attempt, progress.best_step).path(self._folder)
        weights_sha256 = self._digest(best)
        figures: Mapping[str, float] | None = self._workers.broadcast(self._recorded(weights_sha256))
        if figures is not None:
            return figures
        if progress.best_step != progress.step:
            replica.student.load_weights(dict(store.load(best, only=(MODEL_FILE,)).tensors[MODEL_FILE]))
        observed = self._evaluator.observe(replica, abandon)
        if observed is None:
            return None
        carried = progress.best_scores
        found = self._evaluator.scores(observed, carried)
        figures = {name: value for score, value in found.items() if (name := on_test(score)) is not None}
        problem: str | None = None
        if self._workers.rank == 0:
            judged = self._evaluator.judge(observed, carried)
            record = Record(
                weights_sha256,
                self._data,
                self._headline,
                progress.best_step,
                carried,
                figures,
                judged.labels,
            )
            names = json.loads(self._units.read_text(encoding="utf-8"))
            try:
                predictions.write(
                    self._own_folder,
                    record,
                    [names[number] for number in judged.numbers],
                    judged.scores.tolist(),
                    judged.predictions,
                    judged.truths,
                )
            except OSError as error:
                problem = (
                    f"the predictions for the test part cannot be written to {self._own_folder} "
                    f"({error.strerror or error}); free space or make the folder writable"
                )
        problem = self._workers.broadcast(problem)
        if problem is not None:
            raise CheckpointError(problem)
        return figures

    def _digest(self, best: Path) -> str:
        found: str | None = None
        if self._workers.rank == 0:
            try:
                found = str(manifest.sealed_files(best)[f"{MODEL_FILE}.safetensors"]["sha256"])
            except (OSError, ValueError, KeyError, TypeError):
                found = None
        found = self._workers.broadcast(found)
        if found is None:
            raise CheckpointError(
                f"the best checkpoint {best} cannot be read, so the test part is not scored"
            )
        return found

    def _recorded(self, weights_sha256: str) -> Mapping[str, float] | None:
        if self._workers.rank:
            return None
        try:
            file = manifest.newest_file(self._folder, predictions.PREDICTIONS)
            if file is None:
                return None
            record = predictions.read_record(file)
        except (NoPredictions, OSError):
            return None
        same = (record.weights_sha256, record.data) == (weights_sha256, self._data)
        return record.figures if same else None
