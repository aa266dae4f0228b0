"""A study: one text with several experiments that name each other. Pure.

A part is a spec whose model or teacher may come from another part: `{best: teacher}` is that part's best run
by validation, `{run: teacher/seed}` its run of the same seed, the first if it repeats. Or a part compares the
arms of another, each at the best of its values that were tried, with fresh seeds: `{tuned: tuning, over:
[...], seeds: [...]}`.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

from pydantic import Field

from service.config.document import Problem, SpecError, shortened
from service.config.hardware import CATALOGUE, Hardware
from service.config.suggestions import nearest
from service.domain.access import DEFAULT_PROJECT, NAME_PATTERN
from service.domain.grid import REFERENCE_CELL, FieldValue
from service.specs.experiment import ExperimentSpec, validate
from service.specs.fields import canonical_json
from service.specs.models import RUN
from service.specs.wording import naming_problems
from trainers.config import Section

MOST_PARTS = 20
_OF_TUNED = ("tuned", "over", "seeds", "repeats", "description", "queue", "budget")
_KEPT_OF_SEARCH = ("seed", "metric", "reference_every", "stop_diverging")
"""Of the search that tuned, what a comparison of its best cells keeps."""
_SAME_SEED = "/seed"
_invalid = functools.partial(Problem, "invalid-value")


class _Written(Section):
    study: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,35}$")]
    description: str = ""
    project: Annotated[str, Field(pattern=NAME_PATTERN)] = DEFAULT_PROJECT
    parts: dict[str, dict[str, Any]] = Field(min_length=1, max_length=MOST_PARTS)


class _Tuned(Section):
    tuned: str
    over: list[str] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The part that a model comes from."""

    part: str
    by_seed: bool  # Each seed's own run; else the best of all
    path: str = field(default="", compare=False)  # Where it is named, in the spec of the part that does


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part before what it takes from others is known."""

    name: str
    document: Mapping[str, Any]  # Its spec; of a tuned part, what it sets in the spec of the other
    sources: tuple[ModelSource, ...] = ()
    tuned: str | None = None
    over: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        named = (source.part for source in self.sources)
        return tuple(dict.fromkeys((*named, *([self.tuned] if self.tuned else ()))))

    @property
    def seeds(self) -> list[int]:
        """As written; those of its spec are checked."""
        return list(self.document.get("seeds", [0]))

    def with_models(self, model_of: Callable[[ModelSource], str]) -> dict[str, Any]:
        """Returns its spec with the models of other parts written in."""
        return {
            name: _replaced(value, name, model_of) if name in _WITH_MODELS else value
            for name, value in self.document.items()
        }


@dataclass(frozen=True, slots=True)
class StudySpec:
    name: str
    project: str
    parts: Mapping[str, PartSpec]  # In the order of the text
    outlines: Mapping[str, tuple[dict[str, Any], ExperimentSpec]]
    """By part, its document and spec; numbers of runs, and values that are still to be chosen, stand for
    others."""


def is_study(document: Mapping[str, Any]) -> bool:
    return "study" in document


def parse_study(document: Mapping[str, Any], catalogue: Mapping[str, Hardware] = CATALOGUE) -> StudySpec:
    """Checks everything that is known before any part has run; `SpecError` has one problem per mistake."""
    problems = _unknown(document, _Written.model_fields)
    if problems:
        raise SpecError(problems)
    with naming_problems(document):
        written = _Written.model_validate_json(json.dumps(document), strict=True)
    parts = {}
    for name, fields in written.parts.items():
        try:
            parts[name] = _part(name, fields, written)
        except SpecError as error:
            problems += in_part(name, error)
    problems += _naming_problems(parts, written.parts)
    if problems:
        raise SpecError(problems)
    for name, part in parts.items():
        if part.tuned is not None:  # Fresh seeds have teachers of their own.
            parts[name] = replace(part, sources=parts[part.tuned].sources)
    outlines: dict[str, tuple[dict[str, Any], ExperimentSpec]] = {}
    numbers = {name: 2 * number for number, name in enumerate(parts, start=1)}
    for part in map(parts.__getitem__, _in_order(parts)):
        if not all(needed in outlines for needed in part.needs):
            continue  # What it needs is wrong itself.
        try:
            if part.tuned is None:
                outline = part.with_models(lambda source: f"{RUN}{numbers[source.part] + source.by_seed}")
            else:
                base, spec = outlines[part.tuned]
                arms = _arms_to_compare(part, spec, catalogue)
                outline = tuned_document(part, base, [cells[0] for cells in arms.values()])
            outlines[part.name] = outline, validate(outline, catalogue)
            problems += _seed_problems(part, {name: spec for name, (_, spec) in outlines.items()})
        except SpecError as error:
            problems += in_part(part.name, error)
    if problems:
        raise SpecError(problems)
    return StudySpec(written.study, written.project, parts, {name: outlines[name] for name in parts})


def arms(
    spec: ExperimentSpec, over: Sequence[str], catalogue: Mapping[str, Hardware] = CATALOGUE
) -> dict[str, list[dict[str, FieldValue]]]:
    """Returns the cells of each arm that can be trained, as values by field; an arm is all but `over`."""
    cells = {
        plan.cell: plan.point
        for plan in spec.runs(catalogue)
        if plan.refusal is None and plan.cell != REFERENCE_CELL
    }
    found: dict[str, list[dict[str, FieldValue]]] = {}
    for point in cells.values():
        fields = spec.search.settings(point)
        rest = {name: value for name, value in fields.items() if name not in over}
        found.setdefault(canonical_json(rest), []).append(fields)
    return found


def tuned_document(
    part: PartSpec, base: Mapping[str, Any], chosen: Sequence[Mapping[str, FieldValue]]
) -> dict[str, Any]:
    """Returns the spec that compares the chosen cells of another part's spec: their values are linked."""
    search = {name: value for name, value in base.get("search", {}).items() if name in _KEPT_OF_SEARCH}
    search["together"] = [{name: [fields[name] for fields in chosen] for name in chosen[0]}]
    return {**base, **part.document, "search": search}


def part_text(study: str, part: str, document: Mapping[str, Any]) -> str:
    """Returns the text that is kept as the spec of a part."""
    return f"# Part {part} of study {study}\n{json.dumps(document, indent=2, ensure_ascii=False)}\n"


def _part(name: str, fields: Mapping[str, Any], study: _Written) -> PartSpec:
    if not re.fullmatch(NAME_PATTERN, name):
        message = f"'{shortened(name)}' is not a name; use up to 63 lower-case letters, digits and . _ -"
        raise SpecError([_invalid("", message)])
    document = {"name": f"{study.study}-{name}", "project": study.project, **fields}
    if document["project"] != study.project:
        shown = shortened(repr(document["project"]))
        message = f"{shown} is not the study's, {study.project}; set project once, in the study"
        raise SpecError([_invalid("project", message)])
    if "tuned" in fields:
        if unknown := _unknown(fields, _OF_TUNED):
            raise SpecError(unknown)
        own = {key: fields[key] for key in _Tuned.model_fields if key in fields}
        with naming_problems(own):
            tuned = _Tuned.model_validate_json(json.dumps(own), strict=True)
        kept = {key: value for key, value in document.items() if key not in ("tuned", "over")}
        return PartSpec(name, kept, tuned=tuned.tuned, over=tuple(tuned.over))
    sources: dict[ModelSource, str] = {}
    part = PartSpec(name, document)
    part.with_models(lambda source: sources.setdefault(source, ""))
    return replace(part, sources=tuple(sources))


_WITH_MODELS = ("model", "search")  # Sections that may name the model of another part


def _replaced(value: Any, path: str, model_of: Callable[[ModelSource], str]) -> Any:
    """Returns the value with `model_of` each {best: PART} and {run: PART/seed} in their place."""
    if isinstance(value, list):
        return [_replaced(of, f"{path}.{number}", model_of) for number, of in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((key, text),) = value.items()
        if key == "best" and isinstance(text, str):
            return model_of(ModelSource(text, False, path))
        if key == "run" and isinstance(text, str):
            if text.endswith(_SAME_SEED):
                return model_of(ModelSource(text.removesuffix(_SAME_SEED), True, path))
            shown = shortened(text)
            message = f"'{shown}' has no seed; write PART/seed for its run of the same seed, or use best"
            raise SpecError([_invalid(f"{path}.run", message)])
    return {key: _replaced(of, f"{path}.{key}", model_of) for key, of in value.items()}


def _naming_problems(parts: Mapping[str, PartSpec], written: Mapping[str, Any]) -> Iterator[Problem]:
    known = True
    for part in parts.values():
        paths = {source.part: source.path for source in part.sources} | {part.tuned: "tuned"}
        for needed in part.needs:
            if needed not in written:
                known = False
                others = [name for name in written if name != part.name]
                fix = nearest(needed, others) if others else "it has no other; add it"
                message = f"'{shortened(needed)}' is not a part of the study; {fix}"
                yield _invalid(f"parts.{part.name}.{paths[needed]}", message)
        base = parts.get(part.tuned or "")
        if base is not None and (first := base.tuned) is not None:
            message = f"part {part.tuned} is tuned itself; name the part that tuned it, {shortened(first)}"
            yield _invalid(f"parts.{part.name}.tuned", message)
    if known and len(parts) == len(written):
        try:
            _in_order(parts)
        except CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            message = f"parts wait for each other: {circle}; take a model from elsewhere in one of them"
            yield _invalid("parts", message)


def _in_order(parts: Mapping[str, PartSpec]) -> list[str]:
    return list(TopologicalSorter({name: part.needs for name, part in parts.items()}).static_order())


def _arms_to_compare(
    part: PartSpec, spec: ExperimentSpec, catalogue: Mapping[str, Hardware]
) -> dict[str, list[dict[str, FieldValue]]]:
    """Returns the cells of each arm; `SpecError` where no fair comparison of their best can follow."""
    search, problems = spec.search, []
    if search.info.suggests or search.info.ends_runs_early or search.samples is not None:
        message = (
            f"part {part.tuned} has search.name: {search.name}, which gives arms different budgets; use grid"
        )
        raise SpecError([_invalid("tuned", message)])
    for name in part.over:
        values = search.fields.get(name)
        if values is None:
            message = (
                f"'{shortened(name)}' is not an axis of part {part.tuned}; {nearest(name, search.fields)}"
            )
            problems.append(Problem("unknown-axis", "over", message))
        elif isinstance(values, list) and len(values) < 2:
            message = f"part {part.tuned} has only one value of {name}; add others, or leave it out"
            problems.append(_invalid("over", message))
    if problems:
        raise SpecError(problems)
    found = arms(spec, part.over, catalogue)
    if len(found) < 2:
        message = f"part {part.tuned} has no axis besides these; its values would be the arms to compare"
        raise SpecError([_invalid("over", message)])
    counts = {arm: len(cells) for arm, cells in found.items()}
    if len(set(counts.values())) > 1:
        budgets = ", ".join(f"{count} for {arm}" for arm, count in counts.items())
        message = (
            f"the arms of part {part.tuned} have different budgets ({shortened(budgets, 300)} cells); try "
            "equally many values for each"
        )
        raise SpecError([_invalid("tuned", message)])
    return found


def _seed_problems(part: PartSpec, specs: Mapping[str, ExperimentSpec]) -> Iterator[Problem]:
    own = specs[part.name].seeds
    if part.tuned is not None and (used := sorted(set(own) & set(specs[part.tuned].seeds))):
        yield _invalid(
            f"parts.{part.name}.seeds",
            f"part {part.tuned} chooses by seed {_listed(used)} too, which flatters the chosen; use others",
        )
    for source in part.sources:
        spec, path = specs[source.part], f"parts.{part.name}"
        if not source.by_seed:
            continue
        if (cells := spec.grid_count() // spec.runs_per_cell) > 1:
            yield _invalid(
                path,
                f"run: {source.part}/seed is ambiguous: part {source.part} has {cells} cells; use best: "
                f"{source.part}, or a part with one cell",
            )
        elif missing := sorted(set(own) - set(spec.seeds)):
            yield _invalid(
                f"{path}.seeds",
                f"part {source.part} has no seed {_listed(missing)}, for run: {source.part}/seed; list the "
                "same seeds in both",
            )


def _listed(seeds: Iterable[int]) -> str:
    return shortened(", ".join(map(str, seeds)))


def _unknown(document: Mapping[str, Any], known: Collection[str]) -> list[Problem]:
    unknown = (key for key in document if key not in known)
    return [Problem("unknown-key", key, f"unknown key; {nearest(key, known)}") for key in unknown]


def in_part(part: str, error: SpecError) -> list[Problem]:
    """Returns the problems of a part's spec as those of the study."""
    return [replace(one, path=f"parts.{part}.{one.path}".removesuffix(".")) for one in error.problems]
