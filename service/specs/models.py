"""Models that earlier runs leave behind: `run:12` in a spec, and where its checkpoints are.

`run:0=12,1=13` names one for each seed.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from service.config.document import MAX_PROBLEMS, Problem
from service.config.settings import Settings
from service.domain.records import Run
from service.domain.states import TERMINAL_RUN_STATES, RunState
from service.specs.experiment import ExperimentSpec, RunPlan
from trainers.checkpoints import manifest
from trainers.config import Workspace
from trainers.data.storage import Place
from trainers.errors import FailureClass

RUN = "run:"
FIELDS = ("model.name", "model.teacher")  # Where a spec may name one
Which = Literal["best", "last"]

EXPERIMENTS = "experiments"

_REFERENCE = re.compile(r"run:([1-9][0-9]{0,17})")
_BY_SEED = re.compile(r"run:[0-9]{1,10}=[1-9][0-9]{0,17}(,[0-9]{1,10}=[1-9][0-9]{0,17})*")

FindRun = Callable[[int], Run | None]


@dataclass(frozen=True, slots=True)
class Reference:
    """A run that an experiment starts from; `state` is None when it has been deleted."""

    run_id: int
    state: RunState | None
    failure_class: FailureClass | None
    failure_message: str | None

    @property
    def pending(self) -> bool:
        return self.state is not None and self.state not in TERMINAL_RUN_STATES

    @property
    def hopeless(self) -> str | None:
        """Why it will leave no model, in words; None when it has one or may have one."""
        if self.pending or self.state is RunState.succeeded:
            return None
        if self.state is None:
            return f"run {self.run_id} no longer exists"
        if self.state is RunState.failed:
            why = self.failure_message or "unknown cause"
            return f"run {self.run_id} failed: {self.failure_class or FailureClass.lost}: {why}"
        if self.state is RunState.stopped:
            return f"run {self.run_id} was stopped before its end"
        return f"run {self.run_id} was cancelled"


class NoModel(Exception):
    """A run has no checkpoint that can be used; the message is one line."""


class ModelOutOfReach(NoModel):
    """Whether there is one is not known: its folder cannot be read now."""


@functools.lru_cache(maxsize=1024)
def references(text: str | None) -> Mapping[int | None, int]:
    """Returns the run by seed, under None if it is one for all; `ValueError` for `run:` without a number."""
    if text is None or not text.startswith(RUN):
        return {}
    if match := _REFERENCE.fullmatch(text):
        return {None: int(match[1])}
    if not _BY_SEED.fullmatch(text):
        raise ValueError(
            f"'{text}' is not a run; write run: and its number, such as run:12, or one for each seed, as in "
            "run:0=12,1=13"
        )
    pairs = [pair.split("=") for pair in text.removeprefix(RUN).split(",")]
    by_seed: dict[int | None, int] = {int(seed): int(number) for seed, number in pairs}
    if len(by_seed) < len(pairs):
        raise ValueError(f"'{text}' lists a seed twice; give one run for each")
    return by_seed


def by_seed(runs: Mapping[int, int]) -> str:
    return RUN + ",".join(f"{seed}={number}" for seed, number in runs.items())


def reference(text: str | None, seed: int) -> int | None:
    """Returns the run that a run of this seed starts from; None for other text, or no run for the seed."""
    named = references(text)
    return named.get(seed, named.get(None))


def referenced_runs(spec: ExperimentSpec) -> set[int]:
    return {*references(spec.model.name).values(), *references(spec.model.teacher).values()}


def reference_problems(plans: Sequence[RunPlan], find: FindRun) -> list[Problem]:
    seen = dict.fromkeys(
        (field, text, plan.spec.task.name)
        for plan in plans
        for field, text in zip(FIELDS, (plan.spec.model.name, plan.spec.model.teacher), strict=True)
        if text is not None and text.startswith(RUN)
    )
    runs: dict[int, Run | None] = {}
    problems: list[Problem] = []
    seeds = sorted({plan.seed for plan in plans})
    for field, text, task in seen:
        named = references(text)  # Malformed ones are refused with the paths.
        missing = [str(seed) for seed in seeds if None not in named and seed not in named]
        if missing:
            problems.append(
                Problem("invalid-value", field, f"'{text}' has no run for seed {', '.join(missing)}; add one")
            )
        for number in named.values():
            if number not in runs:
                runs[number] = find(number)
            problem = _problem(field, f"{RUN}{number}", str(task), runs[number])
            if problem is not None and problem not in problems:
                problems.append(problem)
        if len(problems) > MAX_PROBLEMS:
            break
    return problems


def _problem(field: str, text: str, task: str, run: Run | None) -> Problem | None:
    if run is None:
        return Problem("unknown-run", field, f"'{text}': no such run; `stillhouse runs` lists them")
    hopeless = Reference(run.id, run.state, run.failure_class, run.failure_message).hopeless
    if hopeless is not None:
        return Problem(
            "run-without-result", field, f"'{text}': {hopeless}; use a run that succeeded, or retry it first"
        )
    if field == "model.teacher" and run.task != task:
        return Problem(
            "teacher-of-another-task",
            field,
            f"'{text}' was trained on {run.task}, but task.name is {task}; use a run of the same task",
        )
    return None


def waits_for(references: Iterable[Reference]) -> str | None:
    pending = [str(run.run_id) for run in references if run.pending]
    if not pending:
        return None
    runs = f"run {pending[0]}" if len(pending) == 1 else f"runs {', '.join(pending[:-1])} and {pending[-1]}"
    return f"waiting for {runs} to finish"


def hopeless(references: Iterable[Reference]) -> str | None:
    reasons = [reason for run in references if (reason := run.hopeless) is not None]
    return f"{'; '.join(reasons)}; runs that start from it will fail with bad_spec" if reasons else None


def experiments_folder(settings: Settings) -> Path:
    return settings.data_dir.resolve() / EXPERIMENTS


def experiment_folder(settings: Settings, experiment_id: int) -> Path:
    return experiments_folder(settings) / str(experiment_id)


def stored_experiment(settings: Settings, experiment_id: int) -> Place:
    return settings.resolved_storage() / EXPERIMENTS / str(experiment_id)


def checkpoints_folder(settings: Settings, experiment_id: int, run_id: int, first_attempt: int = 1) -> Place:
    """Returns where a run's checkpoints are; the same for all attempts of one measurement.

    `first_attempt` is the measurement's: a repeated one does not resume from what the earlier one left.
    """
    name = "checkpoints" if first_attempt == 1 else f"checkpoints-{first_attempt}"
    return stored_experiment(settings, experiment_id) / "runs" / str(run_id) / name


def checkpoints_of(settings: Settings, run: Run) -> Place:
    return checkpoints_folder(settings, run.experiment_id, run.id, run.first_attempt)


def workspace_of(settings: Settings, *, checkpoints: str = "", models: Iterable[Place] = ()) -> Workspace:
    """Returns where runs read and write; without `checkpoints` nothing is trained."""
    return Workspace(
        checkpoints=checkpoints,
        cache=str(settings.resolved_cache_dir()),
        cache_max_bytes=settings.cache_max_bytes,
        prepared=str(settings.prepared() or ""),
        data_roots=tuple(map(str, settings.roots("data"))),
        model_roots=tuple(map(str, (*settings.roots("model"), *models))),
        offline=settings.offline,
    )


def checkpoint_of(settings: Settings, run: Run, which: Which) -> Place:
    """Returns the folder of a complete checkpoint, judged by manifest and file sizes, or raises `NoModel`."""
    folder = checkpoints_of(settings, run)
    try:
        if which == "best":
            best = manifest.read_best(folder)
            path = None if best is None else best.path
        else:
            path = _newest(folder)
        if path is None:
            raise NoModel(_why_none(run, which, folder))
        problem = manifest.verify(path, every_byte=False)
    except OSError as error:
        raise out_of_reach(run.id, folder, error) from None
    if problem is not None:
        raise NoModel(f"run {run.id}: its {which} checkpoint {path} is incomplete ({problem})")
    return path


def out_of_reach(run_id: int, folder: Place, error: OSError) -> ModelOutOfReach:
    return ModelOutOfReach(f"run {run_id}: {folder} cannot be read ({error.strerror or error})")


def _newest(folder: Place) -> Place | None:
    paths = (checkpoint.path(folder) for checkpoint in manifest.checkpoints_in(folder))
    return next((path for path in paths if manifest.verify(path, every_byte=False) is None), None)


def _why_none(run: Run, which: Which, folder: Place) -> str:
    if run.total_steps == 0 and run.checkpoint is None:
        return f"run {run.id} only evaluated and wrote no model; use its model.name"
    if not folder.is_dir():
        if run.checkpoint is None:
            return f"run {run.id} is {run.state} and has saved no checkpoint yet"
        return (
            f"run {run.id}: {folder} does not exist; the service needs access to the folder the "
            "workers write to"
        )
    if which == "best":
        return f"run {run.id} is {run.state} and has no evaluated checkpoint; try its last one"
    return f"run {run.id} is {run.state} and has no complete checkpoint"
