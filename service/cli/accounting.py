"""The command that accounts: what every attempt cost, what of it was lost, and what was overhead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.cli.connection import connected
from service.cli.output import Json, console, note, print_json, say
from service.cli.reading import Either
from service.cli.references import RunRef, reference

if TYPE_CHECKING:
    from service.domain.ledger import Account, Ledger

_MOST_LINES = 200


def ledger(target: Either, as_json: Json = False) -> None:
    """Show what every attempt took in time, money and energy, and how much was lost or overhead."""
    found = reference(target)
    with connected() as client:
        if isinstance(found, RunRef):
            answer: Account | Ledger = client.account(found.id)
        else:
            answer = client.ledger(found.id)
    if as_json:
        print_json(answer)
        return
    from service.cli.rendering import grid_table, print_fitting
    from service.domain.ledger import Account
    from service.output.ledger_words import FIGURES, HEADINGS, LEGEND, cells, sentences

    total, accounts = answer.total, [answer] if isinstance(answer, Account) else answer.runs
    if not total.attempts and not total.time_s:
        say(f"{found}: no attempts yet, so nothing has been charged")
        return
    lines = [
        [f"run:{of.run_id}", str(charge.attempt), *cells(charge)] for of in accounts for charge in of.charges
    ]
    headings = ("run", "try", *HEADINGS)
    table = grid_table(*headings, right=FIGURES)
    for line in lines[:_MOST_LINES]:
        table.add_row(*line)
    print_fitting(
        console(),
        table,
        [
            " ".join(line[:3])
            + ": "
            + ", ".join(f"{h} {c}" for h, c in zip(headings[3:], line[3:], strict=True))
            for line in lines[:_MOST_LINES]
        ],
    )
    if len(lines) > _MOST_LINES:
        note(f"{len(lines) - _MOST_LINES:,} more attempts: --json has all")
    for sentence in sentences(total, () if isinstance(answer, Account) else answer.overhead):
        say(sentence)
    note(LEGEND)
