"""Finds finished runs that need not be trained again: `reuse: true`.

A run is reused when it has succeeded, its resolved settings are the same, and the files that it read have the
same content now. Settings are compared by a hash that is stored with every run; files by the fingerprints in
the run's record, against those that the service takes at submission. A fingerprint is remembered under names,
sizes and times of the files, so that unchanged data is not read again.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.config.hardware import Hardware
from service.config.settings import Settings
from service.domain.grid import REFERENCE_CELL
from service.specs.experiment import ExperimentSpec, RunPlan
from service.specs.fields import canonical_json
from service.specs.models import workspace_of
from trainers.config import DevicePricing, TrainingSections, Workspace
from trainers.data.paths import HUB
from trainers.entrypoint import input_identity
from trainers.errors import TrainingError

_WITHOUT_EFFECT = frozenset(
    {"name", "description", "project", "pool", "search", "seeds", "repeats", "reuse", "budget",
    "queue", "max_restarts"}
)  # fmt: skip
"""Fields of a run's spec that change nothing of what it trains and measures."""
_PARTS = {
    "train": "the training data",
    "validation": "the validation data",
    "test": "the test data",
    "student": "model.name",
    "teacher": "model.teacher",
}


def config_sha256(spec: ExperimentSpec, pricing: DevicePricing) -> str:
    """Returns the hash of what decides a run's figures, prices included, except seed and files."""
    settings = spec.model_dump(mode="json", exclude=set(_WITHOUT_EFFECT))
    return hashlib.sha256(
        canonical_json({**settings, "rates": pricing.model_dump(mode="json")}).encode()
    ).hexdigest()


@dataclass(frozen=True, slots=True)
class Equal:
    """A succeeded run with certain settings; `facts` is its record, None = there is none."""

    run_id: int
    config_sha256: str
    seed: int
    facts: Mapping[str, Any] | None


FindEqual = Callable[[Collection[str]], Sequence[Equal]]  # Succeeded runs with any of these, newest first


@dataclass(frozen=True, slots=True)
class Reuse:
    """By position in the grid: runs that are reused, and why others with equal settings are not."""

    runs: Mapping[int, int] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)


def reusable(
    plans: Sequence[RunPlan], settings: Settings, catalogue: Mapping[str, Hardware], find: FindEqual
) -> Reuse:
    hashes: dict[str, str] = {}
    for plan in plans:
        if plan.refusal is None and plan.cell not in hashes:
            hashes[plan.cell] = config_sha256(plan.spec, plan.spec.pricing(catalogue))
    equal: dict[tuple[str, int], list[Equal]] = {}
    for run in find(set(hashes.values())):
        equal.setdefault((run.config_sha256, run.seed), []).append(run)
    workspace = workspace_of(settings)
    inputs: dict[str, _Inputs] = {}
    runs: dict[int, int] = {}
    refused: dict[int, str] = {}
    for plan in plans:
        if plan.cell == REFERENCE_CELL or plan.refusal is not None or plan.repeat > 0:
            continue  # One measures the machine during this sweep, one is not trained, one is to run again.
        spec = plan.spec
        for run in equal.get((hashes[plan.cell], plan.seed), ()):
            key = canonical_json([spec.task.model_dump(mode="json"), spec.model.name, spec.model.teacher])
            if key not in inputs:
                inputs[key] = _inputs_now(spec, workspace)
            reason = _difference(inputs[key], run)
            if reason is None:
                runs[plan.index] = run.run_id
                refused.pop(plan.index, None)
                break
            refused.setdefault(plan.index, f"run {run.run_id} has the same settings, but {reason}")
    return Reuse(runs, refused)


_Inputs = Mapping[str, str | int | float] | str  # Fingerprints of files, or why there are none


def _inputs_now(spec: ExperimentSpec, workspace: Workspace) -> _Inputs:
    if on_hub := next(_on_hub(spec), None):
        return f"{on_hub} is on the hub, where it may change unnoticed; use a local copy"
    try:
        return input_identity(spec, workspace)
    except TrainingError as error:
        return f"its files cannot be compared: {error}"
    except OSError as error:
        return f"its files cannot be compared: {error.filename}: {error.strerror}"


def _difference(now: _Inputs, run: Equal) -> str | None:
    """Returns why the files are not known to be those that the run read; None = they are."""
    if isinstance(now, str):
        return now
    facts = run.facts or {}
    then = {**(facts.get("data") or {}), "student.sha256": facts.get("student_sha256")}
    changed = [
        words
        for part, words in _PARTS.items()
        if (part in ("train", "validation", "test") or f"{part}.sha256" in now)
        and now.get(f"{part}.sha256") != then.get(f"{part}.sha256")
    ]
    if now.get("test.rule") != then.get("test.rule"):
        changed.append("the rule for the test part")
    return f"{' and '.join(changed)} changed since" if changed else None


def _on_hub(sections: TrainingSections) -> Iterator[str]:
    if sections.task.path is None or sections.task.path.startswith(HUB):
        yield f"the data of task {sections.task.name}"
    for name, text in (("name", sections.model.name), ("teacher", sections.model.teacher)):
        if text is not None and text.startswith(HUB):
            yield f"model.{name}"
