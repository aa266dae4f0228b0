"""A run in stages: each starts from the best checkpoint of the one before, which is also its teacher.

Every stage is a training of its own, with a folder of checkpoints: `stages/1`, `stages/2` ... in the run's
folder, and for the last stage that folder itself. A completed stage leaves `stage.json` next to its
checkpoints; an attempt skips stages that have one, and resumes the first without from its newest
checkpoint. Step numbers continue and usage is carried over, so that the run ends with figures of the whole.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from trainers.config import RunConfig
from trainers.data.storage import Place, place, put
from trainers.errors import CheckpointError
from trainers.reporting import Fence, Level, Measurement, OnlyAttempt, Point, Sink, Stream, TrainingOutcome

RECORD = "stage.json"  # What a stage that has ended leaves in its folder
_FOLDER = "stages"
_SUMMED = (
    "samples", "tokens", "padded_tokens", "timed_samples", "timed_tokens", "skipped_steps",
    "checkpoint_write_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndedStage:
    checkpoint: str  # Folder of its best checkpoint
    steps: int  # Its optimizer updates
    total_steps: int  # Optimizer updates of the run
    counters: Mapping[str, Any]  # Counters of `trainers.loop.progress.Progress` that the whole run sums up
    usage: Mapping[str, Any]  # Its own and that of the stages before, see `trainers.telemetry.usage.RunUsage`
    spent_s: Mapping[str, float]  # Likewise, time by phase
    ended_s: float  # Unix time; work before it is kept

    def write(self, folder: Place, fence: Fence) -> None:
        """Writes the record durably; raises CheckpointError, also if a later attempt has begun."""
        final = folder / RECORD

        def confirm() -> None:
            if not fence.holds():
                raise CheckpointError(f"{final} was not kept: a later attempt has begun")

        try:
            put(final, json.dumps(asdict(self)).encode(), confirm)
        except OSError as error:
            raise CheckpointError(f"{final} cannot be written ({error}); free space") from error

    @classmethod
    def read(cls, folder: Place) -> Self | None:
        """Returns the record in a stage's folder; None = the stage has not ended. Raises CheckpointError."""
        file = folder / RECORD
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read ({error})") from error


TrainOne = Callable[[RunConfig, Sink, EndedStage | None, bool], tuple[TrainingOutcome, Any]]
"""Trains one stage, after the one before; the last argument tells whether it is the last."""


def train(config: RunConfig, sink: Sink, fence: Fence | None, train_one: TrainOne) -> TrainingOutcome:
    assert config.stages is not None
    count = len(config.stages)
    root = place(config.workspace.checkpoints)
    folders = [*(root / _FOLDER / str(number) for number in range(1, count)), root]
    before: EndedStage | None = None
    done = 0
    counted = StageSink(sink, config)
    for number, folder in enumerate(folders, start=1):
        last = number == count
        ended = None if last else EndedStage.read(folder)
        if ended is None:
            counted.enter(number, done)
            stage = stage_config(config, number, folder, None if before is None else before.checkpoint)
            outcome, trainer = train_one(stage, counted, before, last)
            if last or outcome.status != "completed":
                return _whole(outcome, done, counted.total_steps)
            _leave(trainer, outcome, folder, fence or OnlyAttempt(), counted.total_steps)
            del trainer  # Its model makes room for the next one.
            ended = EndedStage.read(folder)
            assert ended is not None
        done += ended.steps
        before = ended
    raise AssertionError("the last stage returns")


def stage_config(config: RunConfig, number: int, folder: Place, start: str | None) -> RunConfig:
    """Returns a stage, from 1, as a run; `start` is the checkpoint it learns from, None = the run's own."""
    sections = config.stage_sections(number)
    if start is not None:
        sections["model"] = {**sections["model"], "name": start, "teacher": start, "layers": None}
        # The stage before has evaluated these weights, and its last point is at the same step.
        sections["evaluation"] = {**sections["evaluation"], "at_start": False}
    workspace = config.workspace
    own = workspace.model_copy(
        update={"checkpoints": str(folder), "model_roots": (*workspace.model_roots, workspace.checkpoints)}
    )
    return RunConfig.model_validate(
        {**sections, "seed": config.seed, "rates": config.rates.model_dump(), "workspace": own.model_dump()}
    )


def _leave(trainer: Any, outcome: TrainingOutcome, folder: Place, fence: Fence, total_steps: int) -> None:
    ended = EndedStage(
        checkpoint=str(outcome.summary["best_checkpoint"]),
        steps=outcome.step,
        total_steps=total_steps,
        counters={name: getattr(trainer.progress, name) for name in _SUMMED},
        usage=asdict(trainer.progress.usage),
        spent_s=trainer.telemetry.figures.spent_s,
        ended_s=trainer.telemetry.figures.taken_s,
    )
    trainer.workers.on_first(lambda: ended.write(folder, fence))


def _whole(outcome: TrainingOutcome, done: int, total_steps: int) -> TrainingOutcome:
    summary = dict(outcome.summary)
    for name in ("steps", "best_step"):
        value = summary.get(name)
        if isinstance(value, int):
            summary[name] = value + done
    return replace(outcome, step=outcome.step + done, total_steps=total_steps, summary=summary)


class StageSink(Sink):
    """Reports stages as one run: step numbers continue, and points name their stage."""

    def __init__(self, sink: Sink, config: RunConfig) -> None:
        self._sink, self._config = sink, config
        self._number, self._done, self._started = 1, 0, False
        self.total_steps = 0

    def enter(self, number: int, done: int) -> None:
        self._number, self._done = number, done

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Mapping[str, object]) -> None:
        examples = facts.get("train_examples")
        assert isinstance(examples, int)
        self.total_steps = self._config.steps_of(examples)
        if self._started:
            return
        self._started = True
        self._sink.started(
            total_steps=self.total_steps,
            resumed_from_step=self._done + resumed_from_step,
            facts={**facts, "stage": self._number, "stages": len(self._config.stages or ())},
        )

    def points(self, points: Sequence[Point]) -> None:
        moved = [replace(point, step=point.step + self._done) for point in points]
        of_step = [point for point in moved if point.name == "loss"]
        self._sink.points(
            [*moved, *(replace(point, name="stage", value=float(self._number)) for point in of_step)]
        )

    def progress(self, *, step: int, total_steps: int, phase: str) -> None:
        self._sink.progress(step=self._done + step, total_steps=self.total_steps or total_steps, phase=phase)

    def measurement(self, measurement: Measurement) -> None:
        if self._number < len(self._config.stages or ()) and not measurement.name.startswith("window_"):
            measurement = replace(measurement, scope=f"stage:{self._number}, {measurement.scope}")
        self._sink.measurement(measurement)

    def log(self, level: Level, message: str, stream: Stream = "log") -> None:
        self._sink.log(level, message, stream)

    def checkpoint(self, *, step: int, path: str, verified: bool) -> None:
        self._sink.checkpoint(step=self._done + step, path=path, verified=verified)

    def flush(self, timeout_s: float) -> bool:
        return self._sink.flush(timeout_s)
