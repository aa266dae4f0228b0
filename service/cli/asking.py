"""What the deciding commands share: their arguments, and how a refused question reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import connected
from service.cli.exits import ExitCode, Failure
from service.cli.references import experiment_reference

if TYPE_CHECKING:
    from service.client import Client

Targets = Annotated[list[str], typer.Argument(metavar="ID...", help="One or more experiments, such as 17.")]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="NAME", help="Only this figure. Repeatable."),
]
Filter = Annotated[str | None, typer.Option(help="Only matching runs, such as: task = 'imdb' and seed < 3")]

Undisturbed = Annotated[bool, typer.Option("--undisturbed", help="Leave out runs that neighbours disturbed.")]
WithOverhead = Annotated[
    bool,
    typer.Option("--with-overhead", help="Add each run's even share of the overhead to its time and cost."),
]


@contextmanager
def asking() -> Iterator[Client]:
    """A client whose refused questions read as the command line puts them.

    Raises:
        Failure: `usage` for a wrong question, `not_succeeded` for one that the runs cannot answer.
    """
    from service.client import ApiError

    with connected() as client:
        try:
            yield client
        except ApiError as error:
            if error.type == "invalid-parameter" and error.errors:
                raise Failure([problem.message for problem in error.errors], ExitCode.usage) from None
            if error.type in ("no-answer", "not-comparable"):
                raise Failure(error.detail, ExitCode.not_succeeded) from None
            raise


def experiments(targets: Sequence[str]) -> list[int]:
    """Numbers of the experiments, each once."""
    return list(dict.fromkeys(experiment_reference(target) for target in targets))


def assigned(texts: Sequence[str] | None, option: str) -> dict[str, float]:
    """Read NAME=NUMBER options.

    Raises:
        Failure: for anything else.
    """
    from service.analysis.answers import BadQuestion
    from service.analysis.words import assignments

    try:
        return assignments(texts, option)
    except BadQuestion as error:
        raise Failure(f"--{option}: {error}", ExitCode.usage) from None
