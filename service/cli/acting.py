"""Commands that steer: cancel, pause, resume, retry, priority, delete, and keep order: tag, note, archive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import connected
from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, note, print_json, say
from service.cli.references import RunRef, experiment_reference, reference

if TYPE_CHECKING:
    from service.client import Client

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
    now: Annotated[
        bool,
        typer.Option("--now", help="Free its space at once; it cannot be restored. For administrators."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete a finished experiment with its runs and results; `restore` takes that back for some time."""
    number = experiment_reference(target)
    with connected() as client:
        if not yes and not typer.confirm(_delete_question(client, number, now), err=True):
            raise typer.Abort
        client.delete(number, now=now)
    if as_json:
        print_json({"deleted": number})
    else:
        say(f"deleted experiment {number}")
        if not now:
            note(f"to take it back: stillhouse restore {number}")


def _delete_question(client: Client, number: int, now: bool) -> str:
    if now:  # It may be deleted already, and then cannot be looked at.
        return f"remove experiment {number} with all its results, past restoring?"
    experiment = client.experiment(number)
    return (
        f"delete experiment {number} ({experiment.name}, {experiment.run_count} runs) with all its results?"
    )


def tag(
    target: Experiment,
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG...", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Tags to take away; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Add tags to an experiment, or take them away; without any, show them."""
    number = experiment_reference(target)
    with connected() as client:
        if tags or remove:
            answer = client.tag(number, add=tags or (), remove=remove or ())
        else:
            answer = client.experiment(number)
    if as_json:
        print_json(answer)
    else:
        say(f"experiment {number}: {', '.join(answer.tags) or 'no tags'}")


def annotate(
    target: Experiment,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The whole notes; '' removes them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Set the notes of an experiment; without a text, show them."""
    number = experiment_reference(target)
    with connected() as client:
        answer = client.experiment(number) if text is None else client.annotate(number, text)
    if as_json:
        print_json(answer)
    else:
        say(answer.notes or f"experiment {number} has no notes")


def archive(
    target: Experiment,
    undo: Annotated[bool, typer.Option("--undo", help="Take it back.")] = False,
    as_json: Json = False,
) -> None:
    """Archive an experiment: `list` leaves it out unless asked."""
    number = experiment_reference(target)
    with connected() as client:
        answer = client.archive(number, not undo)
    if as_json:
        print_json(answer)
    else:
        say(f"experiment {number} is {'not archived' if undo else 'archived'}")


def _answer(name: str, answer: Any, as_json: bool, *, requested: float | None = None, word: str = "") -> None:
    if as_json:
        print_json(answer)
    elif requested is not None and answer.ended_s is None and answer.state not in ("paused", "cancelled"):
        say(f"{name} is {answer.state}; {word} requested, takes effect at the next step boundary")
    else:
        say(f"{name} is {answer.state}")
