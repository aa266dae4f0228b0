"""Commands that take a spec: validate, preview, submit, schema.

`--set key=value` changes fields: the result is a new document, and that text is what is submitted and kept,
with a comment that names the file and the changes. Without it a file is sent untouched, comments and all.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import Target, connected, read_settings
from service.cli.terminal import ExitCode, Failure, Json, answer, console, note, print_json, say
from service.domain.states import RunState

if TYPE_CHECKING:
    from service.domain.records import ExperimentStatus, Run

File = Annotated[Path, typer.Argument(metavar="FILE", help="A spec in YAML or JSON; - = standard input.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a field, such as batch.global_size=32. Repeatable."
    ),
]

Reuse = Annotated[
    bool, typer.Option("--reuse", help="Reuse runs that succeeded with the same settings and data.")
]


def validate(file: File, assignments: Set = None, as_json: Json = False) -> None:
    """Check every field, path and grid point of a spec, without a service."""
    from service.config.document import SpecError
    from service.scheduling.admission import admit

    text = spec_text(file, assignments or [])
    settings = read_settings()
    try:
        catalogue = settings.catalogue()
    except ValueError as error:
        raise Failure(" ".join(str(error).split()), ExitCode.usage) from None
    try:
        spec = admit(text, settings, catalogue, None, now_s=time.time()).spec
    except SpecError as error:
        raise Failure([f"{file}: {line}" for line in error.lines()], ExitCode.usage) from None
    checked = {"valid": True, "name": spec.name, "sha256": spec.sha256(), "run_count": spec.run_count()}
    answer(checked, as_json, f"{file}: valid, {spec.run_count():,} runs, sha256 {spec.sha256()[:12]}")


def preview(
    file: File,
    assignments: Set = None,
    reuse: Reuse = False,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many runs.")] = 50,
    as_json: Json = False,
) -> None:
    """Show the runs a spec would create, whether the cluster can run each, and a cost forecast."""
    from service.cli.tables import exclusive_lines, forecast_lines, preview_table

    text = spec_text(file, _with_reuse(assignments, reuse))
    with connected() as client:
        planned = client.preview(text, limit=limit)
    if as_json:
        print_json(planned)
        return
    screen = console()
    screen.print(preview_table(planned.items))
    left = planned.run_count - len(planned.items)
    reused = f", {planned.reused_count:,} reused" if planned.reused_count else ""
    say(f"{planned.run_count:,} runs in total{reused}" + (f", {left:,} not shown (--limit)" if left else ""))
    for line in exclusive_lines(planned.items):
        say(line)
    for reason in dict.fromkeys(run.not_reused for run in planned.items if run.not_reused):
        note(f"not reused: {reason}")
    if planned.forecast is not None:
        for line in forecast_lines(planned.forecast):
            say(line)
        for warning in planned.forecast.warnings:
            note(f"warning: {warning}")
    if planned.start is not None:
        say(f"{planned.start.hardware}: {planned.start.words}")
    for line in planned.notes:
        note(f"note: {line}")
    if planned.cluster_age_s is None:
        note("no scheduler has reported the cluster yet: capacity was not checked")


def submit(
    file: File,
    assignments: Set = None,
    reuse: Reuse = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the experiment has ended.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show live progress to the end.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="With --wait: give up after this many seconds.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Submitting again with this key returns the same experiment.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Submit an experiment."""
    from service.cli.progress import exit_for, follow_experiment, wait_for

    text = spec_text(file, _with_reuse(assignments, reuse))
    with connected() as client:
        experiment = client.submit(text, idempotency_key=idempotency_key)
        submitted = f"submitted experiment {experiment.id}: {experiment.name}, {experiment.run_count:,} runs"
        if reused := experiment.run_states.get(RunState.succeeded, 0):
            submitted += f", {reused:,} reused"
        if follow:
            note(submitted)
            ended: ExperimentStatus | Run = follow_experiment(client, experiment.id, as_json=as_json)
        elif wait:
            note(submitted)
            ended = wait_for(client, Target(experiment.id, is_run=False), timeout_s=timeout_s)
            answer(ended, as_json, f"experiment {ended.id} {ended.state}")
        else:
            answer(experiment, as_json, submitted, f"to watch it: stillhouse watch {experiment.id}")
            return
    exit_for(ended)


def _with_reuse(assignments: list[str] | None, reuse: bool) -> list[str]:
    return [*(assignments or []), *(["reuse=true"] if reuse else [])]


def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of a spec, for editors and other tools."""
    del as_json  # It is JSON either way.
    from service.specs.experiment import json_schema

    print_json(json_schema())


def spec_text(file: Path, assignments: Sequence[str]) -> bytes:
    """Returns the bytes to submit: the file's own, or those of the file with `--set` applied.

    Raises:
        Failure: the file cannot be read or is not a mapping, or an assignment is not valid.
    """
    try:
        text = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except FileNotFoundError:
        raise Failure(f"{file}: no such file", ExitCode.not_found) from None
    except OSError as error:
        raise Failure(f"{file}: {error.strerror or error}", ExitCode.not_found) from None
    if not assignments:
        return text
    document = _parsed(str(file), text)
    for assignment in assignments:
        _assign(document, assignment)
    changes = " ".join(f"--set {assignment}" for assignment in assignments)
    return f"# {file} {changes}\n{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode()


def _parsed(source: str, text: bytes) -> dict[str, Any]:
    from service.config.document import SpecError, parse

    try:
        return parse(text)
    except SpecError as error:
        raise Failure([f"{source}: {line}" for line in error.lines()], ExitCode.usage) from None


def _assign(document: dict[str, Any], assignment: str) -> None:
    key, equals, value = assignment.partition("=")
    if not key or not equals:
        raise Failure(f"--set {assignment}: write key=value, such as precision=bf16", ExitCode.usage)
    if "\n" in value:
        raise Failure(f"--set {key}: the value has more than one line; edit the file instead", ExitCode.usage)
    parsed = _parsed(f"--set {key}", f"value: {value}".encode())
    # An axis is one key with dots in it: search.axes.batch.global_size=[8, 16].
    axis = key.removeprefix("search.axes.")
    path = key.split(".") if axis == key else ["search", "axes", axis]
    section: dict[str, Any] = document
    for depth, name in enumerate(path[:-1]):
        inner = section.setdefault(name, {})
        if not isinstance(inner, dict):
            raise Failure(
                f"--set {key}: '{'.'.join(path[: depth + 1])}' is {json.dumps(inner)}, not a section",
                ExitCode.usage,
            )
        section = inner
    section[path[-1]] = parsed["value"]
