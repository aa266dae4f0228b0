"""The command that compares: means by axis, tested claims, and the seeds that a claim still needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from service.analysis.answers import ComparisonAnswer
    from service.client import Client
    from service.domain.records import ExperimentStatus

FIRST_SEEDS = 2
"""Further seeds for a first claim: with the one that is there three, the fewest that tell of a spread of
their own and of a difference."""
MOST_SEEDS = 10
"""Seeds that `--queue-seeds` submits at most unless told otherwise: what they cost is shown first then."""


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
        bool,
        typer.Option("--queue-seeds", help="Submit the seeds that undecided claims need."),
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
    numbers = experiments(targets)
    tests = claims or queue_seeds or a is not None or b is not None
    submitted = None
    with asking() as client:
        answer = client.compare(
            numbers,
            by=by,
            metric=metrics,
            a=a,
            b=b,
            claims=tests and a is None and b is None,
            untested=queue_seeds,
            margin=assigned(margin, "margin"),
            kernels=kernels,
            selection=Selection(filter, undisturbed, with_overhead),
        )
        if queue_seeds:
            submitted = _submit_seeds(client, numbers, answer, most_seeds, named=a is not None)
    if as_json:
        print_json({"comparison": answer, "submitted": submitted} if queue_seeds else answer)
        return
    from service.cli.answer_rendering import print_claims, print_kernels
    from service.cli.rendering import print_comparison

    screen = console()
    print_comparison(answer, screen)
    if answer.claims:
        print_claims(answer.claims, screen)
    print_kernels(answer.kernels, screen)
    if submitted is not None:
        say(f"submitted experiment {submitted.id}: {submitted.name}, {submitted.run_count:,} runs")
        together = " ".join(map(str, (*numbers, submitted.id)))
        say(f"once it has ended: stillhouse compare {together} --claims")


def _submit_seeds(
    client: Client, numbers: Sequence[int], answer: ComparisonAnswer, most: int, *, named: bool
) -> ExperimentStatus | None:
    """Submit the first experiment's spec with further seeds; None when every claim is decided."""
    from service.analysis.more_seeds import further_spec, next_seeds

    undecided = [pair for pair in answer.claims if pair.claim and pair.claim.verdict == "undecided"]
    asked = [pair.claim.more_seeds for pair in undecided if pair.claim and pair.claim.more_seeds]
    finished = {row.label: row.finished for row in answer.rows}
    # Where a side has no result at all, further seeds would end as the first did.
    untested = [
        pair
        for pair in answer.claims
        if pair.claim is None and finished.get(pair.a, 0) and finished.get(pair.b, 0)
    ]
    hopeless = [pair for pair in answer.claims if pair.claim is None and pair not in untested]
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
    if not asked and not untested:
        raise Failure(
            "up to 1000 more seeds would not decide these claims; no seeds queued", ExitCode.not_succeeded
        )
    wanted = max([*asked, FIRST_SEEDS if untested else 1])
    if untested and not asked:
        note(f"no claim can be made yet; queued {FIRST_SEEDS} more seeds, the minimum for a first claim")
    if wanted > most:
        note(f"about {wanted} more seeds are needed; queued {most} (--most-seeds)")
    used = {run.seed for number in numbers for run in client.all_runs(experiment_id=number)}
    points = [point for pair in answer.claims for point in (pair.a_point, pair.b_point)] if named else []
    spec = json.loads(client.spec(numbers[0], "canonical"))
    document = further_spec(spec, next_seeds(used, min(wanted, most)), points)
    return client.submit(json.dumps(document))
