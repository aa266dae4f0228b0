"""The door to training: everything outside `trainers` calls `train` and nothing behind it.

Importing this module imports no torch; `train` and `make_ready` do.
"""

from __future__ import annotations

import errno
import gc
import importlib
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainers.config import RunConfig, TrainingSections, Workspace
from trainers.data.cache import in_use
from trainers.device_kinds import DEVICE_KINDS
from trainers.errors import FailureClass, OutOfMemoryError, TrainingError, out_of_memory
from trainers.profiling import Profile
from trainers.registry import Deferred, imported
from trainers.reporting import Fence, NullSink, RunHistory, Sink, Stop, TrainingOutcome
from trainers.tasks import TASKS
from trainers.telemetry.flops import ModelShape
from trainers.telemetry.instruments import Instruments

if TYPE_CHECKING:
    from trainers.loop.stages import EndedStage
    from trainers.loop.trainer import Trainer

predict = Deferred("trainers.loop.prediction:predict")
write_onnx = Deferred("trainers.models.onnx:write")

_MESSAGE_LIMIT = 1000
_CONNECTION = ("connection closed by peer", "connection reset", "timed out", "gloo", "nccl", "broken pipe")
_GONE = (ConnectionError, TimeoutError, EOFError, KeyboardInterrupt, SystemExit)
# A disk is full or fails, or may not be written.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM)


def train(
    config: RunConfig,
    sink: Sink,
    stop: Stop,
    *,
    history: RunHistory | None = None,
    fence: Fence | None = None,
) -> TrainingOutcome:
    """Trains one run from its newest checkpoint to its end, or until stopped.

    With several workers each calls this, in an existing process group. The returned figures count on rank 0.

    Args:
        sink: Used on rank 0 alone.
        stop: Polled at each step boundary; one worker's answer stops all.
        history: None = submitted and opened now, without a checkpoint on record. The run's own time begins
            here, and not before the process is ready.
        fence: None = there is only one attempt at a time.

    Raises:
        TrainingError: Everything foreseen, with its failure class.
    """
    train_one = partial(_train_one, stop=stop, history=history or RunHistory(), fence=fence)
    if config.stages is not None:
        from trainers.loop import stages

        return stages.train(config, sink, fence, train_one)
    return train_one(config, sink, None, True)[0]


def _train_one(
    config: RunConfig,
    sink: Sink,
    before: EndedStage | None,
    last: bool,
    *,
    stop: Stop,
    history: RunHistory,
    fence: Fence | None,
) -> tuple[TrainingOutcome, Trainer]:
    began_s = time.perf_counter()
    with Instruments(config, began_s) as instruments, ExitStack() as stack, in_use(config.workspace):
        make_ready(config.rates.device)
        from trainers.loop.assembly import assemble
        from trainers.parallel import workers_of
        from trainers.process import environment_restored, output_logged, reset_process

        stack.enter_context(environment_restored())
        stack.enter_context(output_logged(sink if workers_of(config).rank == 0 else NullSink()))
        reset_process(config)
        trainer: Trainer | None = None
        try:
            trainer = assemble(
                config,
                sink,
                stop,
                history=history,
                began_s=began_s,
                instruments=instruments,
                fence=fence,
                before=before,
                last=last,
            )
            return trainer.train(), trainer
        except TrainingError:
            raise
        except Exception as error:
            if classify(error)[0] is FailureClass.out_of_memory:
                raise _out_of_memory(config, trainer) from error
            raise


def _out_of_memory(config: RunConfig, trainer: Trainer | None) -> OutOfMemoryError:
    """Returns what did not fit, and what to lower; a step that did not fit forgets its micro-batch size."""
    from trainers.telemetry.timeline import Phase

    length = config.task.max_length
    if trainer is None:
        return OutOfMemoryError(
            f"the preparation of the first step does not fit in memory at length {length}; lower "
            "task.max_length, or use another model or hardware"
        )
    if trainer.timeline.entered[0] in (Phase.validation, Phase.test):
        return OutOfMemoryError(
            f"an evaluation does not fit in memory at batch {config.evaluation.batch_size} and length "
            f"{length}; lower evaluation.batch_size or task.max_length"
        )
    if trainer.timeline.entered[0] is Phase.checkpoint:
        return OutOfMemoryError(
            "the copy of a checkpoint does not fit in the worker's host memory; give workers more memory, or "
            "use a smaller model"
        )
    trainer.forget_micro_size()
    tokens = trainer.config.batch.micro_tokens
    size, field = (trainer.config.micro_size, "micro_size") if tokens is None else (tokens, "micro_tokens")
    return OutOfMemoryError(
        f"a step does not fit in memory at micro-batch {size} and length {length}; lower batch.{field} or "
        "task.max_length"
    )


def input_identity(sections: TrainingSections, workspace: Workspace) -> dict[str, str | int | float]:
    """Returns hashes and sizes of the files that a run would read, named as in its record under `data`.

    Besides `teacher.sha256` there is `student.sha256`, the record's `student_sha256`. Presets and runs
    never change and have none. The sections have no axes and refer to nothing on the hub. Imports no torch;
    reads files that no run has read before, and raises TrainingError or OSError.
    """
    from trainers.data.sources import open_source, source_identity
    from trainers.models import origin

    with in_use(workspace):
        found = source_identity(open_source(sections.task, workspace), sections.task)
        model = sections.model
        for role, field, text in (("student", "name", model.name), ("teacher", "teacher", model.teacher)):
            if text is None or text.startswith("run:"):
                continue
            place = origin.locate(text, workspace, f"model.{field}")
            if isinstance(place, origin.Folder):
                found[f"{role}.sha256"] = origin.digest(place, workspace, tokenizer=role == "student")
    return found


_ready: dict[str, Mapping[str, float]] = {}  # By device, what `make_ready` took the first time


def make_ready(device: str) -> Mapping[str, float]:
    """Does a fresh process's one-off work, so that no run's figures include it; returns seconds by part.

    `train` calls this too; a worker that calls it before its first run is ready when the run is opened.
    """
    if device in _ready:
        return dict.fromkeys(_ready[device], 0.0)
    marks = [time.perf_counter()]
    preload()
    marks.append(time.perf_counter())
    from cuda_ext import native
    from trainers.loop import readiness

    kind = DEVICE_KINDS[device]
    if kind.kernels is not None:
        native.why_unavailable(kind.kernels)  # loads them, compiled unless cached
    marks.append(time.perf_counter())
    if kind.backend.available():  # without a device `train` says what is missing
        readiness.first_step(kind)
    marks.append(time.perf_counter())
    spent_s = (end - begin for begin, end in pairwise(marks))
    _ready[device] = MappingProxyType(dict(zip(("imports", "kernels", "first_step"), spent_s, strict=True)))
    return _ready[device]


def preload() -> None:
    """Imports everything that `train` imports.

    The garbage collector is paused meanwhile and later skips the imported objects: a fifth of the time, and
    pauses later.
    """
    if "trainers.loop.assembly" in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("trainers.loop.assembly")
        for info in TASKS.values():
            imported(info.implementation)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def profile(config: RunConfig, *, workers: int, steps: int, warm_up: int, check: bool) -> Profile:
    """Measures a step of a run on this machine: its layers, the cost of an exchange, a data-parallel step.

    Several workers are processes that compute at once, on CPU; `check` also trains a data-parallel run of
    them. Nothing is written to the run's folder of checkpoints. Raises TrainingError and GroupError.
    """
    from trainers.profiling.step_costs import measure

    with in_use(config.workspace):
        return measure(config, workers=workers, steps=steps, warm_up=warm_up, check=check)


def profile_in_group(config: RunConfig, *, shared: Path, steps: int, warm_up: int, check: bool) -> Profile:
    """The same on the workers of an open process group, which all call this and see the folder `shared`."""
    from trainers.profiling.step_costs import Group, measure_group

    with in_use(config.workspace):
        return measure_group(Group(), config, steps=steps, warm_up=warm_up, check=check, shared=shared)


def model_shape(config: RunConfig) -> ModelShape:
    """Returns the size of a run's student, without weights or data; raises BadSpecError.

    Presets have the vocabulary of the published models.
    """
    from trainers.models import origin
    from trainers.models.architectures import shape_of

    with in_use(config.workspace):
        shape = shape_of(origin.locate(config.model.name, config.workspace))
    chosen = config.model.layers
    return shape if chosen is None else shape.with_layers(chosen)


def classify(error: BaseException) -> tuple[FailureClass, str]:
    """Returns the failure class of any exception, and one line for people."""
    text = " ".join(str(error).split())
    line = text if isinstance(error, TrainingError) else f"{type(error).__name__}: {text}".rstrip(": ")
    return _failure_class(error), line if len(line) <= _MESSAGE_LIMIT else line[: _MESSAGE_LIMIT - 1] + "…"


def _failure_class(error: BaseException) -> FailureClass:
    if isinstance(error, TrainingError):
        return error.failure_class
    text = str(error).lower()
    torch = sys.modules.get("torch")
    if out_of_memory(error) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return FailureClass.out_of_memory
    gone = isinstance(error, _GONE) or (torch is not None and isinstance(error, torch.distributed.DistError))
    unconnected = isinstance(error, RuntimeError) and any(words in text for words in _CONNECTION)
    if isinstance(error, OSError) and error.errno in _OF_DISKS:
        return FailureClass.storage
    return FailureClass.infrastructure if gone or unconnected else FailureClass.bug
