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
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainers.config import RunConfig, TrainingSections, Workspace
from trainers.device_kinds import DEVICE_KINDS
from trainers.errors import FailureClass, OutOfMemoryError, TrainingError, out_of_memory
from trainers.profiling.profile import Profile
from trainers.reporting import Clock, Fence, Sink, Stop, TrainingOutcome
from trainers.tasks import TASKS
from trainers.telemetry.flops import ModelShape
from trainers.telemetry.instruments import Instruments

if TYPE_CHECKING:
    from trainers.loop.stages import Ended
    from trainers.loop.trainer import Trainer

_MESSAGE_LIMIT = 1000
_CONNECTION = ("connection closed by peer", "connection reset", "timed out", "gloo", "nccl", "broken pipe")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


def train(
    config: RunConfig, sink: Sink, stop: Stop, *, clock: Clock | None = None, fence: Fence | None = None
) -> TrainingOutcome:
    """Trains one run from its newest checkpoint to its end, or until stopped.

    With several workers each calls this, in an existing process group. The returned figures count on rank 0.

    Args:
        sink: Used on rank 0 alone.
        stop: Polled at each step boundary; one worker's answer stops all.
        clock: When the run was submitted and this attempt opened; None = now. The run's own time begins
            here, and not before the process is ready.
        fence: None = there is only one attempt at a time.

    Raises:
        TrainingError: Everything foreseen, with its failure class.
    """
    clock = clock or Clock()
    if config.stages is not None:
        from trainers.loop import stages

        return stages.train(config, sink, stop, clock=clock, fence=fence, train_one=_train_one)
    return _train_one(config, sink, stop, clock=clock, fence=fence)[0]


def _train_one(
    config: RunConfig,
    sink: Sink,
    stop: Stop,
    *,
    clock: Clock,
    fence: Fence | None,
    before: Ended | None = None,
    last: bool = True,
) -> tuple[TrainingOutcome, Trainer]:
    began_s = time.perf_counter()
    with Instruments(config, began_s) as instruments, ExitStack() as stack:
        make_ready(config.rates.device)
        from trainers.loop.assembly import assemble
        from trainers.process import environment_restored, reset_process

        stack.enter_context(environment_restored())
        reset_process(config)
        trainer: Trainer | None = None
        try:
            trainer = assemble(
                config,
                sink,
                stop,
                clock=clock,
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
    never change and have none. Imports no torch; reads files that no run has read before.

    Args:
        sections: Of a run without axes; nothing in them refers to the hub.

    Raises:
        TrainingError: Files are missing or have no known layout.
        OSError: A file cannot be read.
    """
    from trainers.data.sources import open_source, source_identity
    from trainers.models import origin

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
    """Does a fresh process's one-off work, so that no run's figures include it.

    `train` calls this too; a worker that calls it before its first run is ready when the run is opened.

    Returns:
        Seconds by part: `imports`, `kernels`, `first_step`; all 0 if the process was ready.
    """
    if device in _ready:
        return dict.fromkeys(_ready[device], 0.0)
    marks = [time.perf_counter()]
    preload()
    marks.append(time.perf_counter())
    from trainers.loop import readiness

    kind = DEVICE_KINDS[device]
    readiness.load_kernels(kind)
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
        base = importlib.import_module("trainers.tasks.base")
        for info in TASKS.values():
            base.task_class(info)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def profile(config: RunConfig, *, workers: int, steps: int, warm_up: int, check: bool) -> Profile:
    """Measures a step of a run on this machine: its layers, the cost of an exchange, a data-parallel step.

    Args:
        config: Of any strategy; nothing is written to its folder of checkpoints.
        workers: Processes that compute at once, on CPU; 1 = this one, on the run's device.
        check: With several workers, also trains a data-parallel run of them.

    Raises:
        TrainingError: Everything foreseen.
        GroupError: A worker failed.
    """
    from trainers.profiling.step_costs import measure

    return measure(config, workers=workers, steps=steps, warm_up=warm_up, check=check)


def profile_in_group(config: RunConfig, *, shared: Path, steps: int, warm_up: int, check: bool) -> Profile:
    """Measures a step of a run on the workers of an open process group; each of them calls this.

    Args:
        shared: Folder that all workers see, for the run of the check.
        check: Also trains a data-parallel run and times its steps.
    """
    from trainers.profiling.step_costs import Group, measure_group

    return measure_group(Group(), config, steps=steps, warm_up=warm_up, check=check, shared=shared)


def model_shape(config: RunConfig) -> ModelShape:
    """Returns the size of a run's student, without weights or data; raises BadSpecError.

    Presets have the vocabulary of the published models.
    """
    from trainers.models import origin
    from trainers.models.architectures import shape_of

    shape = shape_of(origin.locate(config.model.name, config.workspace))
    chosen = config.model.layers
    return shape if chosen is None else shape.with_layers(chosen)


def classify(error: BaseException) -> tuple[FailureClass, str]:
    """Returns the failure class of any exception, and one line for people."""
    return _failure_class(error), _line(error)


def _failure_class(error: BaseException) -> FailureClass:
    if isinstance(error, TrainingError):
        return error.failure_class
    text = str(error).lower()
    torch = sys.modules.get("torch")
    if out_of_memory(error) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return FailureClass.out_of_memory
    if torch is not None and isinstance(error, torch.distributed.DistError):
        return FailureClass.infrastructure
    if isinstance(error, RuntimeError) and any(words in text for words in _CONNECTION):
        return FailureClass.infrastructure
    if isinstance(error, ConnectionError | TimeoutError | EOFError):
        return FailureClass.infrastructure
    if isinstance(error, OSError):
        return (
            FailureClass.infrastructure
            if error.errno in (*_FULL, errno.EIO, *_NOT_ALLOWED)
            else FailureClass.bug
        )
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return FailureClass.infrastructure
    return FailureClass.bug


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    named = text if isinstance(error, TrainingError) else f"{type(error).__name__}: {text}".rstrip(": ")
    return named if len(named) <= _MESSAGE_LIMIT else named[: _MESSAGE_LIMIT - 1] + "…"
