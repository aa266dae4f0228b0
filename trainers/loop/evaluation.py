"""Evaluation of a model on a part of the data, sharded over the workers."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from trainers.checkpoints import manifest, predictions
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.predictions import NoPredictions, Record
from trainers.checkpoints.store import MODEL_FILE, CheckpointStore
from trainers.data.batches import Batch, Prefetcher, collate, evaluation_rows
from trainers.data.cache import digest_of
from trainers.data.storage import Place
from trainers.device_kinds import kind_of
from trainers.errors import BadSpecError, CheckpointError
from trainers.loop.progress import Progress
from trainers.loop.run_worker import RunWorker
from trainers.metrics import on_test
from trainers.parallel.replica import Replica
from trainers.tasks import METRICS
from trainers.tasks.base import Judged, Prepared, Task
from trainers.tasks.info import DeclaredMetric
from trainers.telemetry.memory import weight_mib

PERCENTILES = (50, 95)  # Of the time per example, in `example_ms_p50` and `example_ms_p95`


@dataclass(frozen=True, slots=True)
class Observed:
    rows: npt.NDArray[np.float32]  # (N, K) inputs of the scoring for each example, in the order of the part
    loss: float  # Mean over examples
    spent_s: float  # Time of forward pass, loss and observation, summed over workers
    costs: Mapping[str, float]  # Time per example, and memory of the worker with the most, by name

    @property
    def lost(self) -> int:
        """Number of examples whose predictions are NaN."""
        return int(np.isnan(self.rows).any(1).sum())


@dataclass(slots=True)
class _Share:
    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    observed: list[npt.NDArray[np.float32]] = field(default_factory=list)  # (B, K) for each batch
    loss: float = 0.0
    spent_s: float = 0.0  # Includes batches whose logits are on another stage
    example_ms: list[float] = field(default_factory=list)  # Time per example of each batch that it observed
    weight_mib: float = 0.0
    peak_mib: float = 0.0


class Evaluator:
    """Scores one part on one worker, with the layout of its encoder and device."""

    def __init__(
        self,
        task: Task,
        prepared: Prepared,
        worker: RunWorker,
        part: Literal["validation", "test"] = "validation",
    ) -> None:
        self._task, self._part, self._warned = task, part, False
        self._workers, self._device, self._inference = worker.workers, worker.device, worker.inference
        self._peak_within, self._warn = worker.instruments.peak_within, worker.warn
        self._metrics = [METRICS[name] for name in worker.config.task.metrics]
        self._data, self._scoring = prepared.validation, prepared.scoring
        if part == "test":
            assert prepared.test is not None and prepared.test_scoring is not None
            self._data, self._scoring = prepared.test, prepared.test_scoring
        batch_size, workers = worker.config.evaluation.batch_size, worker.workers
        self._transform = worker.laid_out(prepared.transform, prepared, batch_size)
        self._pad_id, self._multiple = prepared.pad_id, worker.multiple
        self._batches = evaluation_rows(self._data.lengths, batch_size, workers.replica, workers.replicas)

    @property
    def units(self) -> int:
        return self._scoring.units

    @torch.no_grad()
    def warm_up(self, replica: Replica) -> None:
        """Runs the first batch, the widest, once: its allocation and compilation are not timed."""
        batch = self._prepare(0) if self._batches else None
        if batch is None:
            return
        with self._evaluating(replica):
            said = self._forward(replica, batch.to(self._device))
            if said is not None:
                self._read(*said)

    def observe(self, replica: Replica, abandon: Callable[[], bool]) -> Observed | None:
        """Returns the observations of the whole part, the same on every worker; None when abandoned.

        `abandon` is polled before each batch and returns the same on every worker. Draws no random numbers.
        """
        peak_mib = self._peak_within()
        with self._evaluating(replica):
            share = self._forward_all(replica, abandon)
            if share is None:
                return None
            share.weight_mib, share.peak_mib = weight_mib(replica.student), peak_mib()
        every: list[_Share] = self._workers.all_gather(share)
        rows = np.concatenate([rows for share in every for rows in share.rows])
        observed = np.concatenate([observed for share in every for observed in share.observed])
        return Observed(
            observed[np.argsort(rows, kind="stable")],
            sum(share.loss for share in every) / len(self._data),
            sum(share.spent_s for share in every),
            _costs(every),
        )

    @contextlib.contextmanager
    def _evaluating(self, replica: Replica) -> Iterator[None]:
        replica.student.eval()
        try:
            with self._inference.on(replica.student):
                yield
        finally:
            replica.student.train()

    def scores(self, observed: Observed, carried: Mapping[str, float] | None = None) -> dict[str, float]:
        """Returns the metrics and `validation_loss`.

        All metrics are NaN if a prediction or a carried threshold is: they would depend on how NaN compares.
        """
        rows = _numbers(observed.rows)
        found = self._scoring.score(rows, carried)
        if self._metrics:
            judged = self._scoring.judge(rows, carried or found)
            found |= {metric.name: computed(metric, judged) for metric in self._metrics}
        if self._undefined(observed, carried):
            found = dict.fromkeys(found, float("nan"))
        if observed.lost and not self._warned:
            self._warned = True
            self._warn(
                f"{self._part}: predictions of {observed.lost} of {len(observed.rows)} examples are NaN, so "
                "every score of the part is NaN; evaluate in fp32 (numerics.evaluation), or lower "
                "optimizer.learning_rate"
            )
        scores = {"validation_loss": observed.loss, **found}
        declared = {*self._task.info.scores, *(metric.name for metric in self._metrics)}
        if "sequence_ms" in declared:
            scores["sequence_ms"] = 1000.0 * observed.spent_s / len(self._data)
        assert scores.keys() <= declared, f"not in the TaskInfo: {scores.keys() - declared}"
        return scores

    def judge(self, observed: Observed, carried: Mapping[str, float]) -> Judged:
        """Returns the scores by unit; `carried` are scores of the validation part."""
        judged = self._scoring.judge(_numbers(observed.rows), carried)
        if self._undefined(observed, carried):
            units = len(judged.scores)
            judged = replace(
                judged,
                scores=np.full(units, np.nan),
                predictions=[None] * units,
                labels=None,
                probabilities=None,
            )
        return judged

    def _undefined(self, observed: Observed, carried: Mapping[str, float] | None) -> bool:
        tuned = (carried[name] for name, score in self._task.info.scores.items() if carried and score.tuned)
        return observed.lost > 0 or any(map(math.isnan, tuned))

    @torch.no_grad()
    def _forward_all(self, replica: Replica, abandon: Callable[[], bool]) -> _Share | None:
        share, backend = _Share(), kind_of(self._device).backend
        batches = Prefetcher(self._prepare, 0, len(self._batches))
        try:
            for rows in self._batches:
                if abandon():
                    return None
                batch = batches.next()
                if batch is None:
                    continue
                batch = batch.to(self._device)
                # The copy is not part of an example's time.
                began = backend.moment(self._device)
                said = self._forward(replica, batch)
                computed = backend.moment(self._device)
                found = None if said is None else self._read(*said)
                spent_s = backend.seconds(began, computed)
                share.spent_s += spent_s
                if found is None:
                    continue
                kept, batch_loss = found
                share.rows.append(rows)
                share.observed.append(kept[: len(rows)])
                share.loss += batch_loss
                share.example_ms.append(1000.0 * spent_s / len(rows))
        finally:
            batches.close()
        return share

    def _prepare(self, number: int) -> Batch | None:
        rows = self._batches[number]
        if not len(rows):
            return None
        batch = collate(self._data, rows, self._pad_id, self._multiple)
        if self._transform is not None:
            batch = self._transform(batch, seed=0, epoch=0)
        return batch.pinned(self._device)

    def _forward(self, replica: Replica, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        with self._inference.context():
            said = replica.infer(batch)
            if said is None:
                return None
            observed = self._scoring.observe(said.logits, batch)
            loss = self._task.loss(said.logits, batch)
        # What is observed may be a class, which NaN is not.
        lost = _lost(said.logits, batch)
        return observed.float().masked_fill(lost[:, None], torch.nan), loss.float()

    def _read(self, observed: torch.Tensor, loss: torch.Tensor) -> tuple[np.ndarray, float]:
        flat = torch.cat([observed.flatten(), loss.reshape(1)]).cpu().numpy()
        return flat[:-1].reshape(observed.shape), float(flat[-1])


def computed(metric: DeclaredMetric, judged: Judged) -> float:
    """Returns the value of another package's metric; `BadSpecError` if it fails."""
    try:
        return float(metric.compute(judged.predictions, judged.truths))
    except Exception as error:
        raise BadSpecError(
            f"task.metrics {metric.name} failed ({type(error).__name__}: {error}); correct its package, or "
            "remove it"
        ) from error


def _lost(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    lost = logits.isnan().any(-1)
    count, width = batch.input_ids.shape
    if batch.guessed is not None:
        found = lost.new_zeros(count, dtype=torch.int32)
        return found.index_add_(0, batch.guessed // width, lost.int()) > 0
    if lost.dim() == 1:
        return lost
    return (lost if batch.attention_mask is None else lost & batch.attention_mask).any(1)


def _numbers(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.where(np.isnan(rows), np.float32(0.0), rows)


def _costs(every: Sequence[_Share]) -> dict[str, float]:
    batches = [
        (ms, len(rows)) for share in every for ms, rows in zip(share.example_ms, share.rows, strict=True)
    ]
    times = np.repeat([ms for ms, _ in batches], [count for _, count in batches])
    return {
        **{f"example_ms_p{share}": float(np.percentile(times, share)) for share in PERCENTILES},
        "weight_memory_mib": max(share.weight_mib for share in every),
        "evaluation_memory_mib": max(share.peak_mib for share in every),
    }


class FinalTest(Evaluator):
    """The test part of a run, and the record of its figures.

    It is scored with the weights of the best checkpoint and the thresholds of that checkpoint's evaluation,
    after every choice has been made.
    """

    def __init__(
        self,
        task: Task,
        prepared: Prepared,
        worker: RunWorker,
        checkpoints: CheckpointStore,
        identity: Mapping[str, str | int | float],
    ) -> None:
        super().__init__(task, prepared, worker, "test")
        assert prepared.test_units is not None
        self._names, self._checkpoints = prepared.test_units, checkpoints
        self._identity = digest_of(dict(identity))

    def score(
        self, replica: Replica, progress: Progress, abandon: Callable[[], bool]
    ) -> Mapping[str, float] | None:
        """Returns the figures on the test part by name, the same on every worker; None when abandoned.

        They come from the record if an earlier attempt scored the same weights on the same data. Otherwise
        the model has the weights of the best checkpoint afterwards. CheckpointErrors are on all workers.
        """
        best = CheckpointId(progress.best_attempt, progress.best_step).path(self._checkpoints.folder)
        weights_sha256 = self._workers.on_first(lambda: self._digest(best))
        figures: Mapping[str, float] | None = self._workers.broadcast(self._recorded(weights_sha256))
        if figures is not None:
            return figures
        if progress.best_step != progress.step:
            replica.student.load_weights(
                dict(self._checkpoints.load(best, only=(MODEL_FILE,)).tensors[MODEL_FILE])
            )
        observed = self.observe(replica, abandon)
        if observed is None:
            return None
        found = self.scores(observed, progress.best_scores)
        figures = {name: value for score, value in found.items() if (name := on_test(score)) is not None}
        self._workers.on_first(lambda: self._write(observed, progress, weights_sha256, figures))
        return figures

    def _write(
        self, observed: Observed, progress: Progress, weights_sha256: str, figures: Mapping[str, float]
    ) -> None:
        carried, step = progress.best_scores, progress.best_step
        judged = self.judge(observed, carried)
        record = Record(
            weights_sha256,
            self._identity,
            self._task.info.headline,
            step,
            carried,
            figures,
            judged.labels,
        )
        names = json.loads(self._names.read_text(encoding="utf-8"))
        file = self._names.with_name(predictions.SOURCES)  # None where units are not rows
        places = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        try:
            predictions.write(self._checkpoints.own_folder, record, judged.rows(names, places))
        except OSError as error:
            raise CheckpointError(
                f"the predictions for the test part cannot be written to {self._checkpoints.own_folder} "
                f"({error.strerror or error}); free space or make the folder writable"
            ) from error

    def _digest(self, best: Place) -> str:
        try:
            return str(manifest.sealed_files(best)[f"{MODEL_FILE}.safetensors"]["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"the best checkpoint {best} cannot be read, so the test part is not scored"
            ) from None

    def _recorded(self, weights_sha256: str) -> Mapping[str, float] | None:
        if self._workers.rank:
            return None
        try:
            file = manifest.newest_file(self._checkpoints.folder, predictions.PREDICTIONS)
            if file is None:
                return None
            record = predictions.read_record(file)
        except (NoPredictions, OSError):
            return None
        same = (record.weights_sha256, record.data) == (weights_sha256, self._identity)
        return record.figures if same else None
