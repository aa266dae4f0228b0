"""Commands that bring a spec in: validate, preview, submit, schema."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, console, note, print_json, say
from service.domain.states import RunState

File = Annotated[Path, typer.Argument(metavar="FILE", help="A spec in YAML or JSON; - = standard input.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a field, such as batch.global_size=32. Repeatable."
    ),
]

Reuse = Annotated[
    bool,
    typer.Option("--reuse", help="Reuse runs that succeeded with the same settings and data."),
]


def validate(file: File, assignments: Set = None, as_json: Json = False) -> None:
    """Check every field, path and grid point of a spec, without a service."""
    from service.cli.connection import read_settings
    from service.cli.overrides import spec_text
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
    if as_json:
        print_json({"valid": True, "name": spec.name, "sha256": spec.sha256(), "run_count": spec.run_count()})
    else:
        say(f"{file}: valid, {spec.run_count():,} runs, sha256 {spec.sha256()[:12]}")


def preview(
    file: File,
    assignments: Set = None,
    reuse: Reuse = False,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many runs.")] = 50,
    as_json: Json = False,
) -> None:
    """Show the runs a spec would create, whether the cluster can run each, and a cost forecast."""
    from service.cli.connection import connected
    from service.cli.overrides import spec_text
    from service.cli.rendering import exclusive_lines, forecast_lines, preview_table

    text = spec_text(file, _with_reuse(assignments, reuse))
    with connected() as client:
        answer = client.preview(text, limit=limit)
    if as_json:
        print_json(answer)
        return
    screen = console()
    screen.print(preview_table(answer.items))
    left = answer.run_count - len(answer.items)
    reused = f", {answer.reused_count:,} reused" if answer.reused_count else ""
    say(f"{answer.run_count:,} runs in total{reused}" + (f", {left:,} not shown (--limit)" if left else ""))
    for line in exclusive_lines(answer.items):
        say(line)
    for reason in dict.fromkeys(run.not_reused for run in answer.items if run.not_reused):
        note(f"not reused: {reason}")
    if answer.forecast is not None:
        for line in forecast_lines(answer.forecast):
            say(line)
        for warning in answer.forecast.warnings:
            note(f"warning: {warning}")
    if answer.start is not None:
        say(f"{answer.start.hardware}: {answer.start.words}")
    for line in answer.notes:
        note(f"note: {line}")
    if answer.cluster_age_s is None:
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
    from service.cli.connection import connected
    from service.cli.following import exit_for, follow_experiment, wait_for_experiment
    from service.cli.overrides import spec_text

    text = spec_text(file, _with_reuse(assignments, reuse))
    with connected() as client:
        experiment = client.submit(text, idempotency_key=idempotency_key)
        submitted = f"submitted experiment {experiment.id}: {experiment.name}, {experiment.run_count:,} runs"
        if reused := experiment.run_states.get(RunState.succeeded, 0):
            submitted += f", {reused:,} reused"
        if follow:
            note(submitted)
            ended = follow_experiment(client, experiment.id, as_json=as_json)
        elif wait:
            note(submitted)
            ended = wait_for_experiment(client, experiment.id, timeout_s=timeout_s)
            if as_json:
                print_json(ended)
            else:
                say(f"experiment {ended.id} {ended.state}")
        else:
            if as_json:
                print_json(experiment)
            else:
                say(submitted)
                say(f"to watch it: stillhouse watch {experiment.id}")
            return
    exit_for(ended)


def _with_reuse(assignments: list[str] | None, reuse: bool) -> list[str]:
    return [*(assignments or []), *(["reuse=true"] if reuse else [])]


def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of a spec, for editors and other tools."""
    del as_json  # It is JSON either way.
    from service.specs.experiment import json_schema

    print_json(json_schema())
