"""Commands that decide: compare, recommend, frontier, effects, score, speedup, tasks, guide, report."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import Chosen, Client, Experiments, writing
from service.cli.terminal import Answer, ExitCode, Failure, note, option

if TYPE_CHECKING:
    from service.analysis.answers import ComparisonAnswer
    from service.domain.records import ExperimentStatus

Metrics = Annotated[
    list[str] | None, typer.Option("--metric", metavar="NAME", help="Only this figure. Repeatable.")
]
FIRST_SEEDS = 2
"""Further seeds for a first claim: with the existing one three, the fewest that show a spread of their own
and a difference."""
MOST_SEEDS = 10
"""Limit of `--queue-seeds` unless another is given: beyond it, the number of seeds is shown first."""


def compare(
    client: Client,
    targets: Experiments,
    chosen: Chosen,
    by: list[str] | None = option(None, "Only this axis. Repeatable; unset = all axes.", metavar="AXIS"),
    metrics: Metrics = None,
    claims: bool = option(False, "Test every pair of rows."),
    a: str | None = option(None, "Test this side, such as precision=bf16.", metavar="AXIS=VALUE"),
    b: str | None = option(None, "Against this side.", metavar="AXIS=VALUE"),
    margin: list[str] | None = option(
        None, "Treat differences up to X as equivalent; unset = accuracy=0.005.", metavar="NAME=X"
    ),
    queue_seeds: bool = option(False, "Submit the seeds that undecided claims need."),
    most_seeds: int = option(MOST_SEEDS, "With --queue-seeds: submit at most this many.", min=1, max=1000),
    kernels: bool = option(False, "Show the GPU kernels of each row's profiled runs."),
    best_over: list[str] | None = option(
        None, "Each at its best value of this axis, by validation. Repeatable.", metavar="AXIS"
    ),
    published: Path | None = option(None, "Printed figures of a study, YAML or JSON.", metavar="FILE"),
) -> Answer:
    """Compare runs by axis, mean ± sd over seeds; --claims tests which differences are significant."""
    if best_over and queue_seeds:
        raise Failure("--queue-seeds does not go with --best-over; submit the chosen values with fresh seeds")
    tests = claims or queue_seeds or a is not None or b is not None
    comparison = _ask(
        client,
        "compare",
        targets,
        chosen,
        by=by,
        metric=metrics,
        a=a,
        b=b,
        claims=tests and a is None and b is None,
        untested=queue_seeds,
        margin=_assigned(margin, "margin"),
        kernels=kernels,
        best_over=best_over,
        published=None if published is None else _printed(published),
    )
    if not queue_seeds:
        return Answer(comparison, partial(_print_compared, comparison))
    submitted = _submit_seeds(client, dict.fromkeys(targets), comparison, most_seeds, named=a is not None)
    lines = []
    if submitted is not None:
        together = " ".join(map(str, (*dict.fromkeys(targets), submitted.id)))
        lines = [
            f"submitted experiment {submitted.id}: {submitted.name}, {submitted.run_count:,} runs",
            f"once it has ended: stillhouse compare {together} --claims",
        ]
    document = {"comparison": comparison, "submitted": submitted}
    return Answer(document, partial(_print_compared, comparison), *lines)


def _printed(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Failure(f"cannot read {file}: {reason}") from None


def _print_compared(comparison: ComparisonAnswer) -> None:
    from service.cli import answer_tables as tables

    tables.print_comparison(comparison)
    if comparison.tuning is not None:
        tables.print_tuning(comparison.tuning)
    if comparison.published is not None:
        tables.print_published(comparison.published)
    if comparison.claims:
        tables.print_claims(comparison.claims)
    tables.print_kernels(comparison.kernels)


def _decide(
    client: Client, question: str, targets: Sequence[int] | None, chosen: Chosen, **asked: Any
) -> Answer:
    from service.cli.answer_tables import PRINTERS

    answer = _ask(client, question, targets, chosen, **asked)
    notes = [partial(note, line) for line in answer.notes]
    return Answer(answer, partial(PRINTERS[question], answer), *notes)


def recommend(
    client: Client,
    targets: Experiments,
    chosen: Chosen,
    objective: str = option("cost_usd", "Figure to optimise.", metavar="NAME"),
    within: list[str] | None = option(
        None,
        "At most X worse than the best mean of those within the limits; unset = 0.005 of the task's "
        "headline. Repeatable.",
        metavar="NAME=X",
    ),
    at_most: list[str] | None = option(
        None, "At most X, such as cost_usd=2. Repeatable.", "--at-most", "--limit", metavar="NAME=X"
    ),
    at_least: list[str] | None = option(
        None, "At least X, such as accuracy=0.9. Repeatable.", metavar="NAME=X"
    ),
    per: str | None = option(None, "Also for each value of this axis, such as hardware.", metavar="AXIS"),
) -> Answer:
    """Recommend the cheapest configuration that loses no accuracy, with the confidence in it."""
    return _decide(
        client,
        "recommend",
        targets,
        chosen,
        objective=objective,
        within=_assigned(within, "within"),
        at_most=_assigned(at_most, "at-most"),
        at_least=_assigned(at_least, "at-least"),
        per=per,
    )


def frontier(client: Client, targets: Experiments, chosen: Chosen, metrics: Metrics = None) -> Answer:
    """Show the configurations that no other dominates, and which of them dominate the rest."""
    return _decide(client, "frontier", targets, chosen, metric=metrics)


def effects(client: Client, targets: Experiments, chosen: Chosen, metrics: Metrics = None) -> Answer:
    """Estimate the effect of each axis on each figure, such as "bf16 against fp32: time -50%"."""
    return _decide(client, "effects", targets, chosen, metric=metrics)


def score(
    client: Client,
    targets: Experiments,
    chosen: Chosen,
    strategy: str | None = option(
        None, "balance, or a priority order such as cost_time_energy; unset = balance."
    ),
    weight: list[str] | None = option(
        None, "Your own weight, such as cost_usd=0.5. Repeatable.", metavar="NAME=W"
    ),
    as_published: bool = option(False, "Use figures as Chen and Sköld (2023) define them."),
) -> Answer:
    """Rank by a weighted sum of max-normalised figures, and show where the winner changes."""
    if strategy is not None and weight:
        raise Failure("give --strategy or --weight, not both")
    if as_published and weight:
        raise Failure("--as-published applies to strategies; remove it or --weight")
    weights = _assigned(weight, "weight")
    published = as_published or None
    return _decide(
        client, "score", targets, chosen, strategy=strategy, weight=weights, as_published=published
    )


def speedup(
    client: Client,
    targets: Experiments,
    chosen: Chosen,
    baseline: str | None = option(
        None, "All axis values of one configuration; unset = the first of the grid.", metavar="AXIS=VALUE,..."
    ),
    metrics: Metrics = None,
    target: str | None = option(
        None, "Target for the time to accuracy; unset = the best headline less 0.005.", metavar="NAME=X"
    ),
) -> Answer:
    """Show how much faster and cheaper each is than a baseline, and how soon it reaches a target."""
    aim = _assigned([target] if target else None, "target")
    return _decide(client, "speedup", targets, chosen, baseline=baseline, metric=metrics, target=aim)


def tasks(
    client: Client,
    targets: Experiments,
    chosen: Chosen,
    metric: str | None = option(None, "The figure; unset = the headline of each task.", metavar="NAME"),
) -> Answer:
    """Rank configurations over several tasks: mean rank, wins, probability of improvement."""
    return _decide(client, "tasks", targets, chosen, metric=metric)


def guide(
    client: Client,
    chosen: Chosen,
    by: list[str] | None = option(None, "Only this axis. Repeatable; unset = all axes.", metavar="AXIS"),
    metrics: Metrics = None,
    project: str | None = option(None, "Only experiments of this project.", metavar="NAME"),
    limit: int = option(100, "Most experiments, the newest first.", min=1, max=500),
) -> Answer:
    """Collect what finished experiments claim about each axis, with dates and limits."""
    return _decide(client, "guide", None, chosen, by=by, metric=metrics, project=project, limit=limit)


def report(
    client: Client,
    targets: Experiments,
    chosen: Chosen,
    output: Path = option(
        Path("report.html"), "Output file; .html or .md sets the format.", "--output", "-o"
    ),
) -> Answer:
    """Write one file with question, answer, plots, verdicts, caveats and reproduction steps."""
    form = {".html": "html", ".htm": "html", ".md": "md"}.get(output.suffix.lower())
    if form is None:
        raise Failure(f"{output}: the name of a report ends in .html or .md")
    content = _ask(client, "report", targets, chosen, format=form)
    with writing(output):
        size = output.write_bytes(content)
    return Answer({"path": str(output), "format": form, "bytes": size}, f"{output}: {size:,} bytes")


def _ask(client: Client, question: str, targets: Sequence[int] | None, chosen: Chosen, **asked: Any) -> Any:
    """Asks about some experiments, or None = all; `ExitCode.not_succeeded` where runs cannot answer."""
    from service.client import ApiError

    about = () if targets is None else (dict.fromkeys(targets),)
    try:
        return getattr(client, question)(*about, **asked, **asdict(chosen))
    except ApiError as error:
        if error.type == "invalid-parameter" and error.errors:
            raise Failure([problem.message for problem in error.errors]) from None
        if error.type in ("no-answer", "not-comparable"):
            raise Failure(error.detail, ExitCode.not_succeeded) from None
        raise


def _assigned(texts: Sequence[str] | None, option: str) -> dict[str, float] | None:
    """Reads NAME=NUMBER options."""
    from service.analysis.answers import BadQuestion
    from service.analysis.words import assignments

    try:
        return assignments(texts, option) or None
    except BadQuestion as error:
        raise Failure(f"--{option}: {error}") from None


def _submit_seeds(
    client: Client, numbers: Collection[int], comparison: ComparisonAnswer, most: int, *, named: bool
) -> ExperimentStatus | None:
    """Submits the first experiment's spec with further seeds; None when every claim is decided."""
    from service.specs.derived import further_spec, next_seeds

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
    spec = json.loads(client.spec(next(iter(numbers)), "canonical"))
    document = further_spec(spec, next_seeds(used, min(wanted, most)), points)
    return client.submit(json.dumps(document))
