"""Scores over all lanes, errors of shares, and who waits in which order, in numbers worked by hand."""

from __future__ import annotations

import pytest

from service.fairness.allowances import divide
from service.fairness.shares import HORIZON_H
from service.fairness.standings import Division
from service.fairness.state import (
    MOST_AHEAD,
    Capacity,
    Claimant,
    Lane,
    ProjectTerms,
    Situation,
    Usage,
    UsageByUser,
    WaitingReason,
)
from tests.service.fairness.test_allowances import NOW_S, PRICES, capacity, experiment, lane

H100, V100 = lane("h100"), lane("v100")
NOTHING: UsageByUser = {}


def used(**usd: float) -> UsageByUser:
    """Uses of `project_user_hardware`."""
    amounts: dict[tuple[str, str, Lane], Usage] = {}
    for name, amount in usd.items():
        project, user, hardware = name.split("_")
        amounts[project, user, lane(hardware)] = Usage(amount, NOW_S)
    return amounts


def division(
    claimants: list[Claimant], there: Capacity, usage: UsageByUser = NOTHING, **terms: ProjectTerms
) -> Division:
    return divide(Situation(NOW_S, there, claimants, terms, usage))


@pytest.fixture
def two_lanes() -> Division:
    """Projects nlp (twice the weight) and vision share 4 h100 (12 USD/h) and 6 v100 (6 USD/h)."""
    claimants = [
        experiment(1, "nlp", running=3, hardware="h100", user="ann"),
        experiment(2, "nlp", running=2, hardware="v100", user="bob"),
        experiment(3, "vision", running=1, hardware="h100", user="cyd"),
        experiment(4, "vision", running=3, hardware="v100", user="cyd"),
    ]
    usage = used(nlp_ann_h100=30.0, nlp_bob_v100=6.0, vision_cyd_h100=10.0, vision_cyd_v100=2.0)
    return division(claimants, capacity(h100=4.0, v100=6.0), usage, nlp=ProjectTerms(weight=2.0))


def test_the_score_of_a_project_in_one_lane_has_its_parts(two_lanes: Division) -> None:
    score = two_lanes.project_score("nlp", H100)
    excess = 30.0 - 40.0 * 2 / 3
    assert (score.weight, score.held_usd_per_hour, score.used_usd) == (2.0, 9.0, 30.0)
    assert score.entitled_usd_per_hour == pytest.approx(8.0)
    assert (score.entitled_part, score.used_part) == (pytest.approx(2 / 3), pytest.approx(0.75))
    assert score.excess_usd == pytest.approx(excess)
    assert score.score == pytest.approx((9.0 + excess / HORIZON_H) / 2)


def test_the_score_of_a_user_is_among_the_users_of_the_project(two_lanes: Division) -> None:
    score = two_lanes.user_score("nlp", "ann", H100)
    assert (score.weight, score.held_usd_per_hour, score.used_usd, score.used_part) == (1.0, 9.0, 30.0, 1.0)
    assert score.entitled_usd_per_hour == pytest.approx(8.0)  # All that the project is entitled to.


def test_users_of_a_project_share_alike_what_it_is_entitled_to() -> None:
    claimants = [experiment(1, running=2, user="ann"), experiment(2, running=1, user="bob")]
    found = division(claimants, capacity(h100=4.0), used(nlp_ann_h100=9.0, nlp_bob_h100=3.0))
    score = found.user_score("nlp", "bob", H100)
    assert (score.held_usd_per_hour, score.used_usd, score.used_part) == (3.0, 3.0, 0.25)
    assert (score.entitled_usd_per_hour, score.entitled_part) == (pytest.approx(6.0), 0.5)
    assert score.excess_usd == pytest.approx(-3.0)


def test_a_score_without_any_use_has_no_part_of_it() -> None:
    found = division([experiment(1, running=1)], capacity(h100=2.0))
    assert found.project_score("nlp", H100).used_part == 0.0
    assert found.project_score("nlp", H100).entitled_part == 1.0


@pytest.mark.parametrize("call", ["project", "user"])
def test_who_is_not_active_has_no_score(two_lanes: Division, call: str) -> None:
    with pytest.raises(KeyError, match="absent"):
        if call == "project":
            two_lanes.project_score("absent", H100)
        else:
            two_lanes.user_score("nlp", "absent", H100)


def test_the_error_of_a_share_is_the_part_used_minus_the_part_entitled_to(two_lanes: Division) -> None:
    # Of the 48 USD used by both, nlp was entitled to two thirds.
    assert two_lanes.share_errors() == {
        "nlp": pytest.approx(4.0 / 48),
        "vision": pytest.approx(-4.0 / 48),
    }


def test_the_error_of_a_share_counts_the_lanes_in_which_a_project_is_active() -> None:
    claimants = [
        experiment(1, "nlp", running=1, hardware="h100"), experiment(2, "vision", running=1, hardware="h100"),
        experiment(3, "vision", running=1, hardware="v100"),
    ]  # fmt: skip
    usage = used(nlp_ann_h100=30.0, vision_ann_h100=10.0, vision_ann_v100=60.0)
    assert division(claimants, capacity(h100=4.0, v100=4.0), usage).share_errors() == {
        "nlp": pytest.approx(10.0 / 40.0), "vision": pytest.approx(-10.0 / 100.0),
    }  # fmt: skip
    assert division(claimants, capacity(h100=4.0, v100=4.0)).share_errors() == {
        "nlp": 0.0,
        "vision": 0.0,
    }


def test_lanes_take_turns_in_the_list_of_who_waits() -> None:
    claimants = [
        experiment(id, running=id == 1, waiting=2, hardware=hardware, queued_s=NOW_S - 60 - id)
        for id, hardware in enumerate(["h100", "h100", "v100", "h100", "v100"], start=1)
    ]
    there = Capacity({H100: 1.0, V100: 0.0}, PRICES)
    waiting = list(division(claimants, there).waiting())
    assert [(one.position, one.hardware) for one in waiting] == [
        (1, "h100"), (1, "v100"), (2, "h100"), (2, "v100"), (3, "h100"),
    ]  # fmt: skip
    assert [one.experiment_id for one in waiting if one.hardware == "h100"] == [4, 2, 1]
    assert [one.ahead for one in waiting if one.hardware == "h100"] == [(), (4,), (4, 2)]
    assert [one.experiment_id for one in division(claimants, there).waiting()][:2] == [4, 5]


def test_no_more_than_a_few_are_named_ahead() -> None:
    claimants = [experiment(id, waiting=1, queued_s=NOW_S - id) for id in range(1, 10)]
    last = list(division(claimants, capacity(h100=0.0)).waiting())[-1]
    assert (last.experiment_id, last.position, last.ahead) == (1, 9, (9, 8, 7, 6, 5))
    assert len(last.ahead) == MOST_AHEAD


def test_who_waits_is_told_their_scores(two_lanes: Division) -> None:
    claimants = [
        experiment(1, "nlp", running=3, user="ann"), experiment(2, "nlp", waiting=1, devices=4.0, user="bob"),
        experiment(3, "vision", running=1, hardware="v100", user="cyd"),
    ]  # fmt: skip
    found = division(claimants, capacity(h100=4.0, v100=2.0), used(nlp_ann_h100=9.0))
    (waits,) = found.waiting()
    assert (waits.experiment_id, waits.devices) == (2, 4.0)
    assert waits.project_score == found.project_score("nlp", H100)
    assert waits.user_score == found.user_score("nlp", "bob", H100)
    assert waits.user_score.used_usd == 0.0


@pytest.mark.parametrize(
    ("terms", "claimant", "reason", "detail"),
    [
        (ProjectTerms(holds="budget spent"), experiment(1, waiting=1), WaitingReason.budget, "budget spent"),
        (
            ProjectTerms(concurrent_runs_per_user=2), experiment(1, running=2, waiting=1),
            WaitingReason.user_cap, "2 of 2 runs",
        ),
        (
            ProjectTerms(ceiling={"h100": 2.5}), experiment(1, running=2, waiting=1), WaitingReason.ceiling,
            "2 of 2.5 devices",
        ),
        (ProjectTerms(), experiment(1, waiting=1, devices=9.0), WaitingReason.no_capacity, None),
        (ProjectTerms(), experiment(1, running=8, waiting=1), WaitingReason.busy, None),
    ],
    ids=["budget", "user_cap", "ceiling", "no_capacity", "busy"],
)  # fmt: skip
def test_who_waits_is_told_the_first_reason_that_applies(
    terms: ProjectTerms, claimant: Claimant, reason: WaitingReason, detail: str | None
) -> None:
    (waits,) = division([claimant], capacity(h100=8.0), nlp=terms).waiting()
    assert (waits.reason, waits.detail) == (reason, detail)


def test_a_lane_is_a_pool_and_a_kind() -> None:
    assert Lane("p", "h100") != Lane("q", "h100")


def test_a_project_whose_budget_is_spent_leaves_its_share_to_the_others() -> None:
    claimants = [
        experiment(1, "nlp", running=1, waiting=3, user="ann"),
        experiment(2, "vision", running=2, waiting=1, user="bob"),
    ]
    usage = used(nlp_ann_h100=90.0, vision_bob_h100=10.0)
    spent = ProjectTerms(weight=3.0, holds="project nlp has used its budget")
    found = division(claimants, capacity(h100=4.0), usage, nlp=spent)
    nlp, vision = found.project_score("nlp", H100), found.project_score("vision", H100)
    assert (nlp.entitled_part, vision.entitled_part) == (0.0, 1.0)
    assert vision.excess_usd == 0.0
    assert found.share_errors() == {"vision": 0.0}
    reasons = {each.experiment_id: each.reason for each in found.waiting()}
    assert reasons == {1: WaitingReason.budget}
