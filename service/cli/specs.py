"""Commands that take a spec or a study: validate, preview, submit, schema.

`--set key=value` and `--set @file` change fields: the result is a new document, and that text is what is
submitted and kept, with a comment that names the file and the changes. Without it a file is sent untouched,
comments and all, unless it is a study with `file:`, whose files are read in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import Client, Target, checked_settings
from service.cli.terminal import Answer, ExitCode, Failure, Json, note, option, print_json
from service.domain.states import RunState

if TYPE_CHECKING:
    from service.planner.preview import Preview
    from service.specs.experiment import ExperimentSpec

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A spec or study in YAML or JSON; - = standard input.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a field, such as batch.global_size=32; @FILE = the fields in a file. Repeatable.",
    ),
]

Reuse = Annotated[
    bool, typer.Option("--reuse", help="Reuse runs that succeeded with the same settings and data.")
]


def validate(file: File, assignments: Set = None) -> Answer:
    """Check every field, path and grid point of a spec, without a service."""
    from service.config.document import SpecError
    from service.scheduling.admission import checked_plans
    from service.specs.study import in_part, parse_study

    text = spec_text(file, assignments or [])
    if (document := study_document(text)) is not None:
        settings = checked_settings()
        catalogue = settings.catalogue()
        with spec_errors(str(file)):
            study = parse_study(document, catalogue)
            for name, (_, spec) in study.outlines.items():
                try:
                    checked_plans(spec, settings.roots, catalogue, find_run=None)
                except SpecError as error:
                    raise SpecError(in_part(name, error)) from None
        counts = {name: spec.run_count() for name, (_, spec) in study.outlines.items()}
        words = ", ".join(f"{name} with {count:,} runs" for name, count in counts.items())
        return Answer({"valid": True, "study": study.name, "run_counts": counts}, f"{file}: valid, {words}")
    spec = checked(str(file), text)
    found = {"valid": True, "name": spec.name, "sha256": spec.sha256(), "run_count": spec.run_count()}
    return Answer(found, f"{file}: valid, {spec.run_count():,} runs, sha256 {spec.sha256()[:12]}")


def checked(source: str, text: bytes) -> ExperimentSpec:
    """Returns a spec whose every field, path, row and grid point a submission would accept."""
    from service.scheduling.admission import checked_plans, read_spec

    settings = checked_settings()
    catalogue = settings.catalogue()
    with spec_errors(source):
        spec = read_spec(text, catalogue)
        checked_plans(spec, settings.roots, catalogue, find_run=None)
    return spec


def preview(
    client: Client,
    file: File,
    assignments: Set = None,
    reuse: Reuse = False,
    limit: int = option(50, "Show at most this many runs.", min=1),
) -> Answer:
    """Show the runs a spec would create, whether the cluster can run each, and a cost forecast."""
    from service.cli.tables import print_preview

    text = spec_text(file, _with_reuse(assignments, reuse))
    if (document := study_document(text)) is None:
        planned = client.preview(text, limit=limit)
        return Answer(planned, partial(print_preview, planned))
    from service.specs.study import parse_study, part_text

    with spec_errors(str(file)):
        study = parse_study(document, {entry.name: entry for entry in client.hardware()})
    parts: dict[str, Preview] = {}
    lines: list[str | Callable[[], object]] = []
    for name, part in study.parts.items():
        outline, _ = study.outlines[name]
        parts[name] = client.preview(
            part_text(study.name, name, outline), limit=limit, find_runs=not part.needs
        )
        after = f", after {', '.join(part.needs)}" if part.needs else ""
        lines += [f"part {name}{after}", partial(print_preview, parts[name])]
    return Answer(parts, *lines)


def submit(
    client: Client,
    file: File,
    assignments: Set = None,
    reuse: Reuse = False,
    wait: bool = option(False, "Wait until the experiment has ended."),
    follow: bool = option(False, "Show live progress to the end."),
    timeout_s: float | None = option(
        None, "With --wait: give up after this many seconds.", "--timeout", min=0.0
    ),
    idempotency_key: str | None = option(None, "Submitting again with this key returns the same experiment."),
    as_json: Json = False,
) -> None:
    """Submit an experiment, or a study with several."""
    from service.cli.progress import exit_code, follow_experiment, wait_for

    text = spec_text(file, _with_reuse(assignments, reuse))
    if study_document(text) is not None:
        from service.cli.progress import answer_of, follow_study

        study = client.submit_study(text, idempotency_key=idempotency_key)
        if wait or follow:
            note(f"submitted study {study.id}: {study.name}, {len(study.parts)} parts")
            study = follow_study(client, study, as_json=as_json, quiet=not follow, timeout_s=timeout_s)
        waited = wait or follow
        answer_of(study, submitted=not waited, ended=waited).print(as_json=as_json)
        return
    experiment = client.submit(text, idempotency_key=idempotency_key)
    submitted = f"submitted experiment {experiment.id}: {experiment.name}, {experiment.run_count:,} runs"
    if reused := experiment.run_states.get(RunState.succeeded, 0):
        submitted += f", {reused:,} reused"
    if follow:
        note(submitted)
        raise typer.Exit(exit_code(follow_experiment(client, experiment.id, as_json=as_json)))
    if wait:
        note(submitted)
        ended = wait_for(client, Target(experiment.id, is_run=False), timeout_s=timeout_s)
        answer = Answer(ended, f"experiment {ended.id} {ended.state}", code=exit_code(ended))
    else:
        answer = Answer(experiment, submitted, f"to watch it: stillhouse watch {experiment.id}")
    answer.print(as_json=as_json)


def _with_reuse(assignments: list[str] | None, reuse: bool) -> list[str]:
    return [*(assignments or []), *(["reuse=true"] if reuse else [])]


def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of a spec, for editors and other tools."""
    from service.specs.experiment import json_schema

    print_json(json_schema())


def spec_text(file: Path, assignments: Sequence[str]) -> bytes:
    """Returns the bytes to submit: the file's own, or those of the file with `--set` applied."""
    text = text_of(file)
    study = study_document(text)
    whole = None if study is None else _with_files(file, study)
    if not assignments and whole is study:
        return text
    document = whole or _parsed(str(file), text)
    for assignment in assignments:
        if assignment.startswith("@"):
            changes_file = Path(assignment[1:])
            changes = _parsed(str(changes_file), text_of(changes_file))
            document = _merged(document, changes)
        else:
            changes = _assign(document, assignment)
        for axis in _replace_axes(document, changes):
            note(f"--set {assignment} replaces the axis {axis}; to vary it: --set search.axes.{axis}=[...]")
    heading = " ".join([f"# {file}", *(f"--set {assignment}" for assignment in assignments)])
    return f"{heading}\n{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode()


def study_document(text: bytes) -> dict[str, Any] | None:
    """Returns the document of a study; None of a spec, and of what cannot be read, which its reader names."""
    from service.config.document import SpecError, parse
    from service.specs.study import is_study

    if b"study" not in text:  # Parsing a large spec takes long.
        return None
    try:
        document = parse(text)
    except SpecError:
        return None
    return document if is_study(document) else None


def _with_files(file: Path, study: dict[str, Any]) -> dict[str, Any]:
    """Returns a study whose parts have the fields of the files that they name, under their own."""
    parts = study.get("parts")
    if not isinstance(parts, dict):
        return study
    read = {}
    for name, part in parts.items():
        if isinstance(part, dict) and isinstance(part.get("file"), str):
            source = file.parent / part["file"]
            own = {key: value for key, value in part.items() if key != "file"}
            read[name] = _merged(_parsed(str(source), text_of(source)), own)
    return {**study, "parts": {**parts, **read}} if read else study


def text_of(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except FileNotFoundError:
        raise Failure(f"{file}: no such file", ExitCode.not_found) from None
    except OSError as error:
        raise Failure(f"{file}: {error.strerror or error}", ExitCode.not_found) from None


def _merged(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document with the fields that `changes` has, section by section; lists are replaced."""
    inner = {
        name: _merged(document[name], value)
        for name, value in changes.items()
        if isinstance(value, dict) and isinstance(document.get(name), dict)
    }
    return {**document, **changes, **inner}


def _parsed(source: str, text: bytes) -> dict[str, Any]:
    from service.config.document import parse

    with spec_errors(source):
        return parse(text)


@contextmanager
def spec_errors(source: str) -> Iterator[None]:
    """Turns the problems of a spec into a `Failure`, each as a line that begins with its source."""
    from service.config.document import SpecError

    try:
        yield
    except SpecError as error:
        raise Failure([f"{source}: {line}" for line in error.lines()]) from None


def _replace_axes(document: dict[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Removes axes over fields that the changes set, unless they give the axis too; returns their names."""
    search, given = document.get("search"), changes.get("search", {})
    if not isinstance(search, dict) or not isinstance(given, dict):
        return []
    groups = [group for group in search.get("together") or () if isinstance(group, dict)]
    axes, when = search.get("axes") or {}, search.get("when") or {}
    if not isinstance(axes, dict) or not isinstance(when, dict):
        return []  # Validation says what is wrong with them.
    kept = {*(given.get("axes") or ()), *(name for group in given.get("together") or () for name in group)}
    replaced = [
        name
        for name in (*axes, *(name for group in groups for name in group))
        if name not in kept and _has(changes, name)
    ]
    for name in replaced:
        axes.pop(name, None)
        when.pop(name, None)
        (search.get("otherwise") or {}).pop(name, None)
        for group in groups:
            if group.pop(name, None) is not None and len(group) == 1:
                search["axes"] = axes = {**axes, **group}  # It is linked to nothing any more.
                group.clear()
    if groups:
        search["together"] = [group for group in groups if group]
    _settle_conditions(document, axes, when, search.get("otherwise") or {}, replaced)
    return replaced


def _settle_conditions(
    document: Mapping[str, Any],
    axes: dict[str, Any],
    when: dict[str, Any],
    otherwise: dict[str, Any],
    replaced: Sequence[str],
) -> None:
    """An axis whose condition names a replaced one varies always, or never, by the value that is set."""
    absent = list(replaced)
    for name in absent:
        for axis, needs in list(when.items()):
            if name not in needs:
                continue
            if name in replaced and _value(document, name) in needs[name]:
                del needs[name]
                if not needs:
                    del when[axis]
                    otherwise.pop(axis, None)
                continue
            del when[axis], axes[axis]
            if axis not in otherwise:
                absent.append(axis)
                continue
            values = otherwise.pop(axis)
            axes[axis] = values if isinstance(values, list) else [values]


def _value(document: Mapping[str, Any], name: str) -> Any:
    for part in name.split("."):
        document = document[part]
    return document


def _has(changes: Mapping[str, Any], name: str) -> bool:
    try:
        _value(changes, name)
    except (KeyError, TypeError):
        return False
    return True


def _assign(document: dict[str, Any], assignment: str) -> dict[str, Any]:
    """Writes a change into the document, and returns it alone."""
    key, equals, value = assignment.partition("=")
    if not key or not equals:
        raise Failure(f"--set {assignment}: write key=value, such as precision=bf16")
    if "\n" in value:
        raise Failure(f"--set {key}: the value has more than one line; edit the file instead")
    parsed = _parsed(f"--set {key}", f"value: {value}".encode())
    # An axis is one key with dots in it: search.axes.batch.global_size=[8, 16].
    axis = key.removeprefix("search.axes.")
    path = key.split(".") if axis == key else ["search", "axes", axis]
    change = {path[-1]: parsed["value"]}
    for name in reversed(path[:-1]):
        change = {name: change}
    section: dict[str, Any] = document
    for depth, name in enumerate(path[:-1]):
        inner = section.setdefault(name, {})
        if not isinstance(inner, dict):
            raise Failure(
                f"--set {key}: '{'.'.join(path[: depth + 1])}' is {json.dumps(inner)}, not a section"
            )
        section = inner
    section[path[-1]] = parsed["value"]
    return change
