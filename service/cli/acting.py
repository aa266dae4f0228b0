"""Commands that steer: cancel, pause, resume, retry, priority, delete."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from service.cli.connection import connected
from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, print_json, say
from service.cli.references import RunRef, experiment_reference, reference

Either = Annotated[
    str, typer.Argument(metavar="ID", help="An experiment, such as 17, or a run, such as run:42.")
]
Experiment = Annotated[str, typer.Argument(metavar="ID", help="An experiment, such as 17.")]


def cancel(target: Either, as_json: Json = False) -> None:
    """Stop an experiment or run at its next step boundary; finished runs are kept."""
    found = reference(target)
    with connected() as client:
        answer = client.cancel_run(found.id) if isinstance(found, RunRef) else client.cancel(found.id)
    _answer(str(found), answer, as_json, requested=answer.cancel_requested_s, word="cancel")


def pause(target: Experiment, as_json: Json = False) -> None:
    """Hold an experiment: runs stop at a step boundary with a checkpoint."""
    number = experiment_reference(target)
    with connected() as client:
        answer = client.pause(number)
    _answer(f"experiment {number}", answer, as_json, requested=answer.pause_requested_s, word="pause")


def resume(target: Experiment, as_json: Json = False) -> None:
    """Queue a paused experiment again; its runs continue from their checkpoints."""
    number = experiment_reference(target)
    with connected() as client:
        answer = client.resume(number)
    _answer(f"experiment {number}", answer, as_json)


def retry(
    target: Either,
    disturbed: Annotated[
        bool,
        typer.Option("--disturbed", help="Instead, remeasure the runs that neighbours disturbed."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Queue failed and cancelled runs again; with --disturbed, remeasure disturbed runs instead."""
    found = reference(target)
    if disturbed and isinstance(found, RunRef):
        raise Failure(
            f"--disturbed takes an experiment, but {found} is a run; give the experiment's number",
            ExitCode.usage,
        )
    with connected() as client:
        if isinstance(found, RunRef):
            answer: Any = client.retry_run(found.id)
        else:
            answer = client.retry(found.id, disturbed=disturbed)
    _answer(str(found), answer, as_json)


def priority(
    target: Experiment,
    value: Annotated[
        int, typer.Argument(metavar="PRIORITY", min=0, max=100, help="0 to 100; higher runs first.")
    ],
    as_json: Json = False,
) -> None:
    """Change the priority of an experiment in the queue."""
    number = experiment_reference(target)
    with connected() as client:
        answer = client.set_priority(number, value)
    if as_json:
        print_json(answer)
    else:
        say(f"experiment {number}: priority {answer.priority}")


def delete(
    target: Experiment,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a finished experiment with its runs and results."""
    number = experiment_reference(target)
    with connected() as client:
        experiment = client.experiment(number)
        if not yes and not typer.confirm(
            f"delete experiment {number} ({experiment.name}, {experiment.run_count} runs) "
            "with all its results?",
            err=True,
        ):
            raise typer.Abort
        client.delete(number)
    if as_json:
        print_json({"deleted": number})
    else:
        say(f"deleted experiment {number}")


def _answer(name: str, answer: Any, as_json: bool, *, requested: float | None = None, word: str = "") -> None:
    if as_json:
        print_json(answer)
    elif requested is not None and answer.ended_s is None and answer.state not in ("paused", "cancelled"):
        say(f"{name} is {answer.state}; {word} requested, takes effect at the next step boundary")
    else:
        say(f"{name} is {answer.state}")
