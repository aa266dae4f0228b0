"""One line for each reason."""

import math
from dataclasses import replace

import pytest

from service.domain.metrics import Span
from service.fairness.allowances import divide
from service.fairness.eta import duration_in_words, reason_in_words, start_in_words
from service.fairness.state import (
    DEFAULT_POOL,
    Capacity,
    Claimant,
    Demand,
    Lane,
    ProjectTerms,
    Situation,
    Waiting,
    WaitingReason,
)

CAPACITY = Capacity({Lane(DEFAULT_POOL, "h100"): 4.0}, {"h100": 3.0})


def experiment(
    id: int, project: str, *, running: int = 0, waiting: int = 0, devices: float = 1.0
) -> Claimant:
    demand = Demand("h100", devices, running, waiting)
    return Claimant(id, project, "ann", 50, float(id), (demand,), served_s=0.0 if running else None)


def waiting_of(claimants: list[Claimant], id: int, terms: ProjectTerms | None = None) -> Waiting:
    settings = {} if terms is None else {"nlp": terms}
    division = divide(Situation(60.0, CAPACITY, claimants, settings))
    (waiting,) = [each for each in division.waiting() if each.experiment_id == id]
    return waiting


def test_a_project_over_its_share() -> None:
    claimants = [
        experiment(1, "nlp", running=3, waiting=2),
        experiment(2, "vision", running=1),
        experiment(3, "nlp", waiting=1),
    ]
    waiting = waiting_of(claimants, 3)
    assert reason_in_words(waiting, "nlp") == (
        "waits for 1 h100: project nlp is over its share (devices of 9.00 USD/h, entitled to 6.00; 0% of "
        "recent use, entitled to 50%)"
    )
    assert (waiting.position, waiting.ahead) == (2, (1,))
    assert start_in_words(Span(1200.0, 3600.0, 10_800.0)) == "starts in 20 min to 3 h"


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (
            ProjectTerms(holds="budget of 100 USD spent"),
            "project nlp starts nothing more: budget of 100 USD spent",
        ),
        (ProjectTerms(ceiling={"h100": 2.0}), "project nlp's ceiling is reached (2 of 2 devices of h100)"),
        (ProjectTerms(concurrent_runs_per_user=2), "the user's limit is reached (2 of 2 runs at a time)"),
    ],
)
def test_limits_are_named_with_their_numbers(terms: ProjectTerms, words: str) -> None:
    found = waiting_of([experiment(1, "nlp", running=2), experiment(2, "nlp", waiting=1)], 2, terms)
    assert reason_in_words(found, "nlp") == f"waits for 1 h100: {words}"
    assert (found.position, found.ahead) == (1, ())


def test_more_devices_than_there_are() -> None:
    found = waiting_of([experiment(1, "nlp", waiting=1, devices=8.0)], 1)
    assert "fewer devices of this kind" in reason_in_words(found, "nlp")


def test_every_reason_has_words() -> None:
    found = waiting_of([experiment(1, "nlp", waiting=1, devices=8.0)], 1)
    words = {reason: reason_in_words(replace(found, reason=reason), "nlp") for reason in WaitingReason}
    assert len(set(words.values())) == len(WaitingReason)
    before = "waits for 8 h100: "
    assert words[WaitingReason.reclaiming] == f"{before}others stop for it at their next checkpoint"


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (Span(math.inf, math.inf, math.inf), "no start in sight"),
        (Span(90.0, 90.0, math.inf), "starts in 90 s at the earliest"),
        (Span(600.0, 600.0, 610.0), "starts in about 10 min"),
        (Span(0.0, 60.0, 172_800.0), "starts in 0 s to 2 d"),
    ],
)
def test_starts_are_told_in_large_units(start: Span, words: str) -> None:
    assert start_in_words(start) == words


def test_durations_use_the_largest_unit_of_which_there_are_two() -> None:
    assert [duration_in_words(s) for s in (119, 120, 7199, 7200, 172_800)] == [
        "119 s", "2 min", "120 min", "2 h", "2 d",
    ]  # fmt: skip
