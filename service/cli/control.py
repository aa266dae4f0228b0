"""Commands that steer: cancel, pause, resume, retry, priority, delete, and keep order: tag, note, archive."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from service.cli.connection import Either, OneExperiment, connected, experiment_id, reference
from service.cli.terminal import ExitCode, Failure, Json, answer, note


def cancel(target: Either, as_json: Json = False) -> None:
    """Stop an experiment or run at its next step boundary; finished runs are kept."""
    ref = reference(target)
    with connected() as client:
        changed: Any = client.cancel_run(ref.id) if ref.is_run else client.cancel(ref.id)
    answer(changed, as_json, _state(str(ref), changed, changed.cancel_requested_s, "cancel"))


def pause(target: OneExperiment, as_json: Json = False) -> None:
    """Hold an experiment: runs stop at a step boundary with a checkpoint."""
    number = experiment_id(target)
    with connected() as client:
        changed = client.pause(number)
    answer(changed, as_json, _state(f"experiment {number}", changed, changed.pause_requested_s, "pause"))


def resume(target: OneExperiment, as_json: Json = False) -> None:
    """Queue a paused experiment again; its runs continue from their checkpoints."""
    number = experiment_id(target)
    with connected() as client:
        changed = client.resume(number)
    answer(changed, as_json, f"experiment {number} is {changed.state}")


def retry(
    target: Either,
    disturbed: Annotated[
        bool, typer.Option("--disturbed", help="Instead, remeasure the runs that neighbours disturbed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Queue failed and cancelled runs again; with --disturbed, remeasure disturbed runs instead."""
    ref = reference(target)
    if disturbed and ref.is_run:
        raise Failure(
            f"--disturbed takes an experiment, but {ref} is a run; give the experiment's number",
            ExitCode.usage,
        )
    with connected() as client:
        changed: Any = (
            client.retry_run(ref.id) if ref.is_run else client.retry(ref.id, disturbed=disturbed or None)
        )
    answer(changed, as_json, f"{ref} is {changed.state}")


def priority(
    target: OneExperiment,
    value: Annotated[
        int, typer.Argument(metavar="PRIORITY", min=0, max=100, help="0 to 100; higher runs first.")
    ],
    as_json: Json = False,
) -> None:
    """Change the priority of an experiment in the queue."""
    number = experiment_id(target)
    with connected() as client:
        changed = client.set_priority(number, value)
    answer(changed, as_json, f"experiment {number}: priority {changed.priority}")


def delete(
    target: OneExperiment,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Free its space at once; it cannot be restored. For administrators.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete a finished experiment with its runs and results; `restore` takes that back for some time."""
    number = experiment_id(target)
    with connected() as client:
        if not yes:
            if now:  # It may be deleted already, and then cannot be looked at.
                question = f"remove experiment {number} with all its results, past restoring?"
            else:
                experiment = client.experiment(number)
                size = f"{experiment.name}, {experiment.run_count} runs"
                question = f"delete experiment {number} ({size}) with all its results?"
            if not typer.confirm(question, err=True):
                raise typer.Abort
        client.delete(number, now=now or None)
    answer({"deleted": number}, as_json, f"deleted experiment {number}")
    if not as_json and not now:
        note(f"to take it back: stillhouse restore {number}")


def tag(
    target: OneExperiment,
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG...", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Tags to take away; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Add tags to an experiment, or take them away; without any, show them."""
    number = experiment_id(target)
    with connected() as client:
        changes = tags or remove
        experiment = client.tag(number, add=tags, remove=remove) if changes else client.experiment(number)
    answer(experiment, as_json, f"experiment {number}: {', '.join(experiment.tags) or 'no tags'}")


def annotate(
    target: OneExperiment,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The whole notes; '' removes them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Set the notes of an experiment; without a text, show them."""
    number = experiment_id(target)
    with connected() as client:
        experiment = client.experiment(number) if text is None else client.annotate(number, text)
    answer(experiment, as_json, experiment.notes or f"experiment {number} has no notes")


def archive(
    target: OneExperiment,
    undo: Annotated[bool, typer.Option("--undo", help="Take it back.")] = False,
    as_json: Json = False,
) -> None:
    """Archive an experiment: `list` leaves it out unless asked."""
    number = experiment_id(target)
    with connected() as client:
        experiment = client.archive(number, not undo)
    answer(experiment, as_json, f"experiment {number} is {'not archived' if undo else 'archived'}")


def _state(name: str, changed: Any, requested_s: float | None, word: str) -> str:
    if requested_s is not None and changed.ended_s is None and changed.state not in ("paused", "cancelled"):
        return f"{name} is {changed.state}; {word} requested, takes effect at the next step boundary"
    return f"{name} is {changed.state}"
