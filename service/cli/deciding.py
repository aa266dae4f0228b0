"""The commands that decide: recommend, frontier, effects, score, speed-up."""

from __future__ import annotations

from typing import Annotated

import typer

from service.analysis.answers import Selection
from service.cli.asking import (
    Filter,
    Metrics,
    Targets,
    Undisturbed,
    WithOverhead,
    asking,
    assigned,
    experiments,
)
from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, console, note, print_json, say


def recommend(
    targets: Targets,
    objective: Annotated[str, typer.Option(metavar="NAME", help="Figure to optimise.")] = "cost_usd",
    within: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=X",
            help="At most X worse than the best mean of those within the limits; unset = 0.005 of the task's "
            "headline. Repeatable.",
        ),
    ] = None,
    at_most: Annotated[
        list[str] | None,
        typer.Option(
            "--at-most", "--limit", metavar="NAME=X", help="At most X, such as cost_usd=2. Repeatable."
        ),
    ] = None,
    at_least: Annotated[
        list[str] | None, typer.Option(metavar="NAME=X", help="At least X, such as accuracy=0.9. Repeatable.")
    ] = None,
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Recommend the cheapest configuration that loses no accuracy, with the confidence in it."""
    selection = Selection(filter, undisturbed, with_overhead)
    with asking() as client:
        answer = client.recommend(
            experiments(targets),
            objective=objective,
            within=assigned(within, "within"),
            at_most=assigned(at_most, "at-most"),
            at_least=assigned(at_least, "at-least"),
            selection=selection,
        )
    if as_json:
        print_json(answer)
        return
    say(answer.text)
    for label, reason in answer.excluded.items():
        say(f"  excluded {label}: {reason}")
    _notes(answer.notes)


def frontier(
    targets: Targets,
    metrics: Metrics = None,
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Show the configurations that no other dominates, and which of them dominate the rest."""
    selection = Selection(filter, undisturbed, with_overhead)
    with asking() as client:
        answer = client.frontier(
            experiments(targets),
            metric=metrics,
            selection=selection,
        )
    if as_json:
        print_json(answer)
        return
    from service.cli.answer_rendering import print_frontier

    print_frontier(answer, console())
    _notes(answer.notes)


def effects(
    targets: Targets,
    metrics: Metrics = None,
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Estimate the effect of each axis on each figure, such as "bf16 against fp32: time -50%"."""
    selection = Selection(filter, undisturbed, with_overhead)
    with asking() as client:
        answer = client.effects(
            experiments(targets),
            metric=metrics,
            selection=selection,
        )
    if as_json:
        print_json(answer)
        return
    from service.cli.answer_rendering import print_effects

    print_effects(answer, console())
    _notes(answer.notes)


def score(
    targets: Targets,
    strategy: Annotated[
        str | None,
        typer.Option(help="balance, or a priority order such as cost_time_energy; unset = balance."),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=W", help="Your own weight, such as cost_usd=0.5. Repeatable."),
    ] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Use the published study's time and occupancy.")
    ] = False,
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Rank by a weighted sum of max-normalised figures, and show where the winner changes."""
    if strategy is not None and weight:
        raise Failure("give --strategy or --weight, not both", ExitCode.usage)
    if as_published and weight:
        raise Failure("--as-published applies to strategies; remove it or --weight", ExitCode.usage)
    selection = Selection(filter, undisturbed, with_overhead)
    with asking() as client:
        answer = client.score(
            experiments(targets),
            strategy=strategy,
            weight=assigned(weight, "weight"),
            as_published=as_published,
            selection=selection,
        )
    if as_json:
        print_json(answer)
        return
    from service.cli.answer_rendering import print_score

    print_score(answer, console())
    _notes(answer.notes)


def speedup(
    targets: Targets,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=VALUE,...",
            help="All axis values of one configuration; unset = the first of the grid.",
        ),
    ] = None,
    metrics: Metrics = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=X", help="Target for the time to accuracy; unset = the best headline less 0.005."
        ),
    ] = None,
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Show how much faster and cheaper each is than a baseline, and how soon it reaches a target."""
    selection = Selection(filter, undisturbed, with_overhead)
    with asking() as client:
        answer = client.speedup(
            experiments(targets),
            baseline=baseline,
            metric=metrics,
            target=assigned([target] if target else None, "target"),
            selection=selection,
        )
    if as_json:
        print_json(answer)
        return
    from service.cli.answer_rendering import print_speedup

    print_speedup(answer, console())
    _notes(answer.notes)


def _notes(notes: tuple[str, ...]) -> None:
    for line in notes:
        note(line)
