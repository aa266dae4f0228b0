"""Commands that manage experiments: cancel, pause, resume, retry, priority, delete, tag, note, archive."""

from functools import partial
from typing import Any

import typer

from service.cli.connection import Client, Either, OneExperiment, OneOrNone
from service.cli.terminal import Answer, Failure, argument, note, option


def cancel(
    client: Client,
    target: OneOrNone = None,
    study: int | None = option(None, "Instead, all experiments of this study.", metavar="ID", min=1),
) -> Answer:
    """Stop an experiment, run or study at its next step boundary; finished runs are kept."""
    if target is None and study is not None:
        from service.cli.progress import print_study

        ended = client.cancel_study(study)
        return Answer(ended, partial(print_study, ended))
    if target is None or study is not None:
        raise Failure("give an experiment, such as 17, a run, or --study with its number")
    changed: Any = client.cancel_run(target.id) if target.is_run else client.cancel(target.id)
    return Answer(changed, _state(str(target), changed, changed.cancel_requested_s, "cancel"))


def pause(client: Client, number: OneExperiment) -> Answer:
    """Hold an experiment: runs stop at a step boundary with a checkpoint."""
    changed = client.pause(number)
    return Answer(changed, _state(f"experiment {number}", changed, changed.pause_requested_s, "pause"))


def _state(name: str, changed: Any, requested_s: float | None, word: str) -> str:
    if requested_s is not None and changed.ended_s is None and changed.state not in ("paused", "cancelled"):
        return f"{name} is {changed.state}; {word} requested, takes effect at the next step boundary"
    return f"{name} is {changed.state}"


def resume(client: Client, number: OneExperiment) -> Answer:
    """Queue a paused experiment again; its runs continue from their checkpoints."""
    changed = client.resume(number)
    return Answer(changed, f"experiment {number} is {changed.state}")


def retry(
    client: Client,
    target: Either,
    disturbed: bool = option(False, "Instead, remeasure the runs that neighbours disturbed."),
    failed: bool = option(False, "Only the runs that failed."),
) -> Answer:
    """Queue failed, cancelled and stopped runs again; with --disturbed, remeasure disturbed runs instead."""
    if (disturbed or failed) and target.is_run:
        raise Failure(
            f"--{'disturbed' if disturbed else 'failed'} takes an experiment, but {target} is a run; "
            "give the experiment's number"
        )
    changed: Any = (
        client.retry_run(target.id)
        if target.is_run
        else client.retry(target.id, disturbed=disturbed or None, failed=failed or None)
    )
    return Answer(changed, f"{target} is {changed.state}")


def priority(
    client: Client,
    number: OneExperiment,
    value: int = argument(..., "0 to 100; higher runs first.", metavar="PRIORITY", min=0, max=100),
) -> Answer:
    """Change the priority of an experiment in the queue."""
    changed = client.set_priority(number, value)
    return Answer(changed, f"experiment {number}: priority {changed.priority}")


def delete(
    client: Client,
    number: OneExperiment,
    yes: bool = option(False, "Skip the confirmation.", "--yes", "-y"),
    now: bool = option(False, "Free its space at once; it cannot be restored. For administrators."),
) -> Answer:
    """Delete a finished experiment with its runs and results; `restore` takes that back for some time."""
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
    how_to_undo = [] if now else [partial(note, f"to take it back: stillhouse restore {number}")]
    return Answer({"deleted": number}, f"deleted experiment {number}", *how_to_undo)


def tag(
    client: Client,
    number: OneExperiment,
    tags: list[str] | None = argument(None, "Tags to add.", metavar="TAG..."),
    remove: list[str] | None = option(None, "Tags to take away; repeatable."),
) -> Answer:
    """Add tags to an experiment, or take them away; without any, show them."""
    changes = tags or remove
    experiment = client.tag(number, add=tags, remove=remove) if changes else client.experiment(number)
    return Answer(experiment, f"experiment {number}: {', '.join(experiment.tags) or 'no tags'}")


def annotate(
    client: Client,
    number: OneExperiment,
    text: str | None = argument(None, "The whole notes; '' removes them.", metavar="TEXT"),
) -> Answer:
    """Set the notes of an experiment; without a text, show them."""
    experiment = client.experiment(number) if text is None else client.annotate(number, text)
    return Answer(experiment, experiment.notes or f"experiment {number} has no notes")


def archive(client: Client, number: OneExperiment, undo: bool = option(False, "Take it back.")) -> Answer:
    """Archive an experiment: `list` leaves it out unless asked."""
    experiment = client.archive(number, not undo)
    return Answer(experiment, f"experiment {number} is {'not archived' if undo else 'archived'}")
