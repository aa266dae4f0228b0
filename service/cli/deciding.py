"""The command that decides: which configuration to use, by how much it wins, and how sure that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.cli.connection import connected
from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, print_json, say
from service.cli.references import experiment_reference

if TYPE_CHECKING:
    from service.analysis.recommend import Constraint


def recommend(
    targets: Annotated[
        list[str], typer.Argument(metavar="ID...", help="One or more experiments, such as 17.")
    ],
    objective: Annotated[str, typer.Option(metavar="NAME", help="The figure to be best on.")] = "cost_usd",
    within: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=X", help="At most X worse than the best mean; unset = accuracy=0.005. Repeatable."
        ),
    ] = None,
    at_most: Annotated[
        list[str] | None, typer.Option(metavar="NAME=X", help="At most X, such as cost_usd=2. Repeatable.")
    ] = None,
    at_least: Annotated[
        list[str] | None, typer.Option(metavar="NAME=X", help="At least X, such as accuracy=0.9. Repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which configuration to use: the cheapest that loses no accuracy, and how sure that is."""
    from service.analysis import AnalysisError
    from service.analysis.cells import configurations
    from service.analysis.recommend import recommend as recommended

    constraints = [
        *(_constraint(text, "within_of_best") for text in (within or ["accuracy=0.005"])),
        *(_constraint(text, "at_most") for text in at_most or ()),
        *(_constraint(text, "at_least") for text in at_least or ()),
    ]
    names = dict.fromkeys([objective, *(constraint.metric for constraint in constraints)])
    better = {name: _better(name) for name in names}
    with connected() as client:
        runs = [
            run for target in targets for run in client.all_runs(experiment_id=experiment_reference(target))
        ]
    try:
        answer = recommended(
            configurations(runs, list(names)),
            objective=objective,
            better=better[objective],
            constraints=constraints,
        )
    except AnalysisError as error:
        raise Failure(str(error), ExitCode.not_succeeded) from None
    if as_json:
        print_json(answer)
        return
    say(answer.text)
    for label, reason in answer.excluded.items():
        say(f"  excluded {label}: {reason}")


def _constraint(text: str, kind: Literal["at_most", "at_least", "within_of_best"]) -> Constraint:
    from service.analysis.recommend import Constraint

    name, separator, value = text.partition("=")
    try:
        if not separator:
            raise ValueError
        bound = float(value)
    except ValueError:
        raise Failure(f"'{text}' is not NAME=NUMBER, such as accuracy=0.005", ExitCode.usage) from None
    return Constraint(name, kind, bound, _better(name))


def _better(name: str) -> Literal["lower", "higher"]:
    from service.comparison import METRICS

    for metric in METRICS:
        if metric.name == name:
            return metric.better
    known = ", ".join(metric.name for metric in METRICS)
    raise Failure(f"no metric is called '{name}'; metrics: {known}", ExitCode.usage)
