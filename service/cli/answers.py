"""Commands that decide: compare, recommend, frontier, effects, score, speedup, report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import connected, experiment_id
from service.cli.terminal import ExitCode, Failure, Json, answer, note, print_json, say

if TYPE_CHECKING:
    from service.analysis.answers import ComparisonAnswer
    from service.client import Client
    from service.domain.records import ExperimentStatus

Targets = Annotated[list[str], typer.Argument(metavar="ID...", help="One or more experiments, such as 17.")]
Metrics = Annotated[
    list[str] | None, typer.Option("--metric", metavar="NAME", help="Only this figure. Repeatable.")
]
Filter = Annotated[str | None, typer.Option(help="Only matching runs, such as: task = 'imdb' and seed < 3")]
Undisturbed = Annotated[bool, typer.Option("--undisturbed", help="Leave out runs that neighbours disturbed.")]
WithOverhead = Annotated[
    bool,
    typer.Option("--with-overhead", help="Add each run's even share of the overhead to its time and cost."),
]

FIRST_SEEDS = 2
"""Further seeds for a first claim: with the existing one three, the fewest that show a spread of their own
and a difference."""
MOST_SEEDS = 10
"""Limit of `--queue-seeds` unless another is given: beyond it, the number of seeds is shown first."""


def compare(
    targets: Targets,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="AXIS", help="Only this axis. Repeatable; unset = all axes."),
    ] = None,
    metrics: Metrics = None,
    claims: Annotated[bool, typer.Option("--claims", help="Test every pair of rows.")] = False,
    a: Annotated[
        str | None, typer.Option("--a", metavar="AXIS=VALUE", help="Test this side, such as precision=bf16.")
    ] = None,
    b: Annotated[str | None, typer.Option("--b", metavar="AXIS=VALUE", help="Against this side.")] = None,
    margin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=X", help="Treat differences up to X as equivalent; unset = accuracy=0.005."
        ),
    ] = None,
    queue_seeds: Annotated[
        bool, typer.Option("--queue-seeds", help="Submit the seeds that undecided claims need.")
    ] = False,
    most_seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="With --queue-seeds: submit at most this many.")
    ] = MOST_SEEDS,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Show the GPU kernels of each row's profiled runs.")
    ] = False,
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Compare runs by axis, mean ± sd over seeds; --claims tests which differences are significant."""
    numbers = _ids(targets)
    tests = claims or queue_seeds or a is not None or b is not None
    with connected() as client:
        comparison = _ask(
            client,
            "compare",
            numbers,
            by=by,
            metric=metrics,
            a=a,
            b=b,
            claims=tests and a is None and b is None,
            untested=queue_seeds,
            margin=_assigned(margin, "margin"),
            kernels=kernels,
            filter=filter,
            undisturbed=undisturbed,
            with_overhead=with_overhead,
        )
        submitted = (
            _submit_seeds(client, numbers, comparison, most_seeds, named=a is not None)
            if queue_seeds
            else None
        )
    if as_json:
        print_json({"comparison": comparison, "submitted": submitted} if queue_seeds else comparison)
        return
    from service.cli.answer_tables import print_claims, print_comparison, print_kernels

    print_comparison(comparison)
    if comparison.claims:
        print_claims(comparison.claims)
    print_kernels(comparison.kernels)
    if submitted is not None:
        say(f"submitted experiment {submitted.id}: {submitted.name}, {submitted.run_count:,} runs")
        together = " ".join(map(str, (*numbers, submitted.id)))
        say(f"once it has ended: stillhouse compare {together} --claims")


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
    _decide(
        "recommend",
        targets,
        as_json,
        filter,
        undisturbed,
        with_overhead,
        objective=objective,
        within=_assigned(within, "within"),
        at_most=_assigned(at_most, "at-most"),
        at_least=_assigned(at_least, "at-least"),
    )


def frontier(
    targets: Targets,
    metrics: Metrics = None,
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Show the configurations that no other dominates, and which of them dominate the rest."""
    _decide("frontier", targets, as_json, filter, undisturbed, with_overhead, metric=metrics)


def effects(
    targets: Targets,
    metrics: Metrics = None,
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Estimate the effect of each axis on each figure, such as "bf16 against fp32: time -50%"."""
    _decide("effects", targets, as_json, filter, undisturbed, with_overhead, metric=metrics)


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
    _decide(
        "score",
        targets,
        as_json,
        filter,
        undisturbed,
        with_overhead,
        strategy=strategy,
        weight=_assigned(weight, "weight"),
        as_published=as_published or None,
    )


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
    _decide(
        "speedup",
        targets,
        as_json,
        filter,
        undisturbed,
        with_overhead,
        baseline=baseline,
        metric=metrics,
        target=_assigned([target] if target else None, "target"),
    )


def report(
    targets: Targets,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Output file; .html or .md sets the format.")
    ] = Path("report.html"),
    filter: Filter = None,
    undisturbed: Undisturbed = False,
    with_overhead: WithOverhead = False,
    as_json: Json = False,
) -> None:
    """Write one file with question, answer, plots, verdicts, caveats and reproduction steps."""
    form = {".html": "html", ".htm": "html", ".md": "md"}.get(output.suffix.lower())
    if form is None:
        raise Failure(f"{output}: the name of a report ends in .html or .md", ExitCode.usage)
    runs = {"filter": filter, "undisturbed": undisturbed, "with_overhead": with_overhead}
    with connected() as client:
        content = _ask(client, "report", _ids(targets), format=form, **runs)
    try:
        output.write_bytes(content)
    except OSError as error:
        raise Failure(f"{output}: {error.strerror or error}", ExitCode.usage) from None
    written = {"path": str(output), "format": form, "bytes": len(content)}
    answer(written, as_json, f"{output}: {len(content):,} bytes")


def _decide(
    question: str,
    targets: Sequence[str],
    as_json: bool,
    filter: str | None,
    undisturbed: bool,
    with_overhead: bool,
    **parameters: Any,
) -> None:
    runs = {"filter": filter, "undisturbed": undisturbed, "with_overhead": with_overhead}
    with connected() as client:
        decision = _ask(client, question, _ids(targets), **runs, **parameters)
    if as_json:
        print_json(decision)
        return
    from service.cli.answer_tables import PRINTERS

    PRINTERS[question](decision)
    for line in decision.notes:
        note(line)


def _ask(client: Client, question: str, ids: Sequence[int], **parameters: Any) -> Any:
    """Asks the service; a question that the runs cannot answer ends with `ExitCode.not_succeeded`."""
    from service.client import ApiError

    try:
        return getattr(client, question)(ids, **parameters)
    except ApiError as error:
        if error.type == "invalid-parameter" and error.errors:
            raise Failure([problem.message for problem in error.errors], ExitCode.usage) from None
        if error.type in ("no-answer", "not-comparable"):
            raise Failure(error.detail, ExitCode.not_succeeded) from None
        raise


def _ids(targets: Sequence[str]) -> list[int]:
    return list(dict.fromkeys(experiment_id(target) for target in targets))


def _assigned(texts: Sequence[str] | None, option: str) -> dict[str, float] | None:
    """Reads NAME=NUMBER options."""
    from service.analysis.answers import BadQuestion
    from service.analysis.words import assignments

    try:
        return assignments(texts, option) or None
    except BadQuestion as error:
        raise Failure(f"--{option}: {error}", ExitCode.usage) from None


def _submit_seeds(
    client: Client, numbers: Sequence[int], comparison: ComparisonAnswer, most: int, *, named: bool
) -> ExperimentStatus | None:
    """Submits the first experiment's spec with further seeds; None when every claim is decided."""
    from service.analysis.more_seeds import further_spec, next_seeds

    undecided = [pair for pair in comparison.claims if pair.claim and pair.claim.verdict == "undecided"]
    needs = [pair.claim.more_seeds for pair in undecided if pair.claim and pair.claim.more_seeds]
    finished = {row.label: row.finished for row in comparison.rows}
    # Where a side has no result at all, further seeds would end as the first did.
    untested = [
        pair
        for pair in comparison.claims
        if pair.claim is None and finished.get(pair.a, 0) and finished.get(pair.b, 0)
    ]
    hopeless = [pair for pair in comparison.claims if pair.claim is None and pair not in untested]
    for text in dict.fromkeys(pair.text for pair in hopeless):
        note(f"{text}; no seeds queued")
    if hopeless and not undecided and not untested:
        raise Failure(
            "one side has no finished run; see why with `stillhouse show`, then retry it",
            ExitCode.not_succeeded,
        )
    if not undecided and not untested:
        note("every claim is decided; no seeds queued")
        return None
    if not needs and not untested:
        raise Failure(
            "up to 1000 more seeds would not decide these claims; no seeds queued", ExitCode.not_succeeded
        )
    wanted = max([*needs, FIRST_SEEDS if untested else 1])
    if untested and not needs:
        note(f"no claim can be made yet; queued {FIRST_SEEDS} more seeds, the minimum for a first claim")
    if wanted > most:
        note(f"about {wanted} more seeds are needed; queued {most} (--most-seeds)")
    used = {run.seed for number in numbers for run in client.all_runs(experiment_id=number)}
    points = [point for pair in comparison.claims for point in (pair.a_point, pair.b_point)] if named else []
    spec = json.loads(client.spec(numbers[0], "canonical"))
    document = further_spec(spec, next_seeds(used, min(wanted, most)), points)
    return client.submit(json.dumps(document))
