"""The pass over devices: its invariants over any situation, and its rules one by one."""

import dataclasses
import math
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.fairness.allowances import divide
from service.fairness.shares import HORIZON_H
from service.fairness.standings import Division
from service.fairness.state import (
    DEFAULT_POOL,
    DRAINED_AFTER_S,
    OVERDUE_AFTER_S,
    PATIENCE_S,
    PROMOTED_AFTER_S,
    PROMOTED_TO,
    ROUNDING,
    USEFUL_S,
    Capacity,
    Claimant,
    Demand,
    Lane,
    ProjectTerms,
    Situation,
    Usage,
    WaitingReason,
    may_yield,
)
from tests.drawing import scaled

KINDS = ("h100", "v100")
PRICES = {"h100": 3.0, "v100": 1.0}
NOW_S = 1_000_000.0
NO_TERMS = ProjectTerms()
FAST = settings(max_examples=scaled(60), deadline=None)


def lane(hardware: str) -> Lane:
    return Lane(DEFAULT_POOL, hardware)


def capacity(**devices: float) -> Capacity:
    return Capacity({lane(hardware): count for hardware, count in devices.items()}, PRICES)


def experiment(
    id: int, project: str = "nlp", *, running: int = 0, waiting: int = 0, devices: float = 1.0,
    hardware: str = "h100", user: str = "ann", priority: int = 50, queued_s: float = NOW_S - 60,
    preemptible: bool = True, served_s: float | None = None,
) -> Claimant:  # fmt: skip
    demand = Demand(hardware, devices, running, waiting)
    return Claimant(
        id, project, user, priority, queued_s, (demand,), preemptible=preemptible, served_s=served_s
    )


def runs_allowed(division: Division, claimant: Claimant) -> int:
    """Returns the runs that an experiment with one demand may have."""
    (demand,) = claimant.demands
    allowance = division.allowances.get(claimant.id, {})
    return round(allowance.get(demand.hardware, 0.0) / demand.devices)


def without_waiting(claimant: Claimant) -> Claimant:
    (demand,) = claimant.demands
    return dataclasses.replace(claimant, demands=(dataclasses.replace(demand, waiting=0),))


def applied(situation: Situation, division: Division) -> Situation:
    """Returns the situation once every run that yields has stopped, and every allowed one has started."""
    claimants = []
    for each in situation.claimants:
        (demand,) = each.demands
        runs = runs_allowed(division, each)
        total = demand.running + demand.waiting
        started = situation.now_s if runs > demand.running else each.served_s
        claimants.append(
            dataclasses.replace(
                each,
                demands=(dataclasses.replace(demand, running=runs, waiting=total - runs),),
                served_s=started,
            )
        )
    return dataclasses.replace(situation, claimants=claimants)


def settled(situation: Situation, passes: int = 60) -> Situation:
    """Returns the situation after which passes change nothing; fails where they never stop."""
    for _ in range(passes):
        following = applied(situation, divide(situation))
        if following == situation:
            return situation
        situation = following
    raise AssertionError(f"still changing after {passes} passes")


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Up to 10 experiments of up to 4 projects; what runs fits into the capacity."""
    left = {hardware: float(draw(st.integers(0, 12))) for hardware in KINDS}
    total = dict(left)
    claimants = []
    for id in range(draw(st.integers(0, 10))):
        hardware = draw(st.sampled_from(KINDS))
        devices = draw(st.sampled_from([0.25, 1.0, 1.0, 2.0, 4.0]))
        running = draw(st.integers(0, 4))
        running = min(running, int(left[hardware] / devices))
        left[hardware] -= running * devices
        claimants.append(
            experiment(
                id,
                draw(st.sampled_from("abcd")),
                running=running,
                waiting=draw(st.integers(0, 6)),
                devices=devices,
                hardware=hardware,
                user=draw(st.sampled_from(["ann", "bob"])),
                priority=draw(st.sampled_from([25, 50, 50, 75])),
                queued_s=NOW_S - draw(st.sampled_from([0.0, 60.0, 7200.0, 200_000.0])),
                preemptible=draw(st.booleans()),
            )
        )
    terms = {
        name: ProjectTerms(
            weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
            guaranteed={"h100": float(draw(st.integers(0, 3)))},
            ceiling=draw(st.sampled_from([{}, {"h100": 4.0}])),
            concurrent_runs_per_user=draw(st.sampled_from([None, None, 3])),
            holds=draw(st.sampled_from([None, None, None, "budget of 100 USD spent"])),
        )
        for name in draw(st.sets(st.sampled_from("abcd")))
    }
    used = {
        (project, user, lane(hardware)): Usage(draw(st.sampled_from([0.0, 5.0, 500.0])), NOW_S - 3600)
        for project in "abcd"
        for user in ("ann", "bob")
        for hardware in KINDS
    }
    return Situation(NOW_S, capacity(**total), claimants, terms, used)


@given(situations())
@FAST
def test_what_is_held_and_allowed_never_exceeds_the_capacity(situation: Situation) -> None:
    division = divide(situation)
    taken: defaultdict[str, float] = defaultdict(float)
    for each in situation.claimants:
        (demand,) = each.demands
        taken[demand.hardware] += demand.devices * max(demand.running, runs_allowed(division, each))
    for hardware, devices in taken.items():
        assert devices <= situation.capacity.devices[lane(hardware)] + ROUNDING


def test_a_large_run_does_not_stop_what_would_start_again_in_its_place() -> None:
    situation = Situation(
        NOW_S,
        capacity(h100=10),
        [
            experiment(0, "other", running=3, devices=2, preemptible=False),
            experiment(1, user="bob", waiting=1, devices=4, queued_s=NOW_S - 2 * PATIENCE_S),
            experiment(2, user="ann", waiting=1, devices=0.25, queued_s=NOW_S),
        ],
    )
    at_rest = settled(situation, passes=3)
    assert [each.demands[0].running for each in at_rest.claimants] == [3, 0, 1]
    worked = {("nlp", "ann", lane("h100")): Usage(0.1, NOW_S)}
    at_rest = settled(dataclasses.replace(at_rest, usage=worked), passes=3)
    assert [each.demands[0].running for each in at_rest.claimants] == [3, 1, 0]


@given(situations())
@FAST
def test_no_project_starts_a_run_above_its_ceiling_its_users_caps_or_its_budget(situation: Situation) -> None:
    division = divide(situation)
    held: defaultdict[tuple[str, str], float] = defaultdict(float)
    runs: defaultdict[tuple[str, str], int] = defaultdict(int)
    for each in situation.claimants:
        (demand,) = each.demands
        held[each.project, demand.hardware] += runs_allowed(division, each) * demand.devices
        runs[each.project, each.user] += runs_allowed(division, each)
    for each in situation.claimants:
        terms, (demand,) = situation.terms.get(each.project, ProjectTerms()), each.demands
        if runs_allowed(division, each) <= demand.running:
            continue
        assert terms.holds is None
        assert held[each.project, demand.hardware] <= terms.ceiling.get(demand.hardware, math.inf) + ROUNDING
        assert runs[each.project, each.user] <= (terms.concurrent_runs_per_user or math.inf)


@given(situations(), st.randoms(use_true_random=False))
@FAST
def test_the_order_of_the_claimants_does_not_matter(situation: Situation, shuffle: random.Random) -> None:
    claimants = list(situation.claimants)
    shuffle.shuffle(claimants)
    first, second = divide(situation), divide(dataclasses.replace(situation, claimants=claimants))
    assert first.allowances == second.allowances
    assert first.preemptions == second.preemptions
    assert first.handovers() == second.handovers()
    assert list(first.waiting()) == list(second.waiting())


@given(situations())
@FAST
def test_free_devices_fit_no_run_that_may_start(situation: Situation) -> None:
    division = divide(situation)
    limited = {WaitingReason.budget, WaitingReason.user_cap, WaitingReason.ceiling}
    for waiting in division.waiting():
        if waiting.reason not in limited:
            state = division.lanes.states[lane(waiting.hardware)]
            assert waiting.devices > state.free or state.reserved_for is not None


@given(situations())
@FAST
def test_passes_settle(situation: Situation) -> None:
    settled(situation)


@given(situations())
@FAST
def test_only_preemptible_runs_yield_and_each_names_for_whom(situation: Situation) -> None:
    division = divide(situation)
    by_id = {each.id: each for each in situation.claimants}
    given_back: defaultdict[int, int] = defaultdict(int)
    for preemption in division.preemptions:
        assert by_id[preemption.experiment_id].preemptible
        assert preemption.for_experiment_id in by_id
        given_back[preemption.experiment_id] += preemption.runs
    for each in situation.claimants:
        assert runs_allowed(division, each) >= each.demands[0].running - given_back[each.id]


@given(
    guaranteed=st.integers(0, 8),
    demand=st.integers(1, 10),
    others=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
@FAST
def test_guarantees_are_honoured_when_demanded(guaranteed: int, demand: int, others: list[int]) -> None:
    lent = [experiment(n, f"other{n}", waiting=count, priority=100) for n, count in enumerate(others, 1)]
    terms = {"nlp": ProjectTerms(guaranteed={"h100": guaranteed})}
    before = settled(Situation(NOW_S, capacity(h100=8), lent, terms))
    mine = experiment(99, waiting=demand, priority=25)
    after = settled(dataclasses.replace(before, claimants=[*before.claimants, mine]))
    (held,) = (each.demands[0].running for each in after.claimants if each.id == 99)
    assert held >= min(guaranteed, demand)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(4, 30))
@FAST
def test_equal_projects_get_the_same_within_one_run(projects: int, devices: int, total: int) -> None:
    same = [experiment(n, f"p{n}", waiting=40, devices=float(devices)) for n in range(projects)]
    after = settled(Situation(NOW_S, capacity(h100=total), same))
    runs = [each.demands[0].running for each in after.claimants]
    assert max(runs) - min(runs) <= 1


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0]), min_size=2, max_size=4))
@FAST
def test_devices_are_divided_by_weight_within_one_run(weights: list[float]) -> None:
    terms = {f"p{n}": ProjectTerms(weight=weight) for n, weight in enumerate(weights)}
    same = [experiment(n, f"p{n}", waiting=100) for n in range(len(weights))]
    after = settled(Situation(NOW_S, capacity(h100=60), same, terms))
    held = [each.demands[0].running for each in after.claimants]
    for mine, weight in zip(held, weights, strict=True):
        for others, other_weight in zip(held, weights, strict=True):
            assert (mine - 1) / weight <= others / other_weight + ROUNDING


def test_a_newcomer_gets_its_share_at_the_next_checkpoint() -> None:
    grid, newcomer = experiment(1, running=2, waiting=98), experiment(2, "vision", waiting=1)
    division = divide(Situation(NOW_S, capacity(h100=2), [grid, newcomer]))
    (preemption,) = division.preemptions
    assert (preemption.experiment_id, preemption.for_experiment_id, preemption.runs) == (1, 2, 1)
    assert 2 not in division.allowances, "the devices are still held"


def test_a_run_is_not_preempted_for_an_equal() -> None:
    division = divide(
        Situation(NOW_S, capacity(h100=1), [experiment(1, running=1), experiment(2, "vision", waiting=1)])
    )
    assert not division.preemptions


def test_a_user_yields_to_another_user_of_the_project() -> None:
    claimants = [experiment(1, running=4), experiment(2, user="bob", waiting=4)]
    (preemption,) = divide(Situation(NOW_S, capacity(h100=4), claimants)).preemptions
    assert preemption.runs == 2


def test_higher_priority_preempts_lower_but_not_what_is_guaranteed() -> None:
    claimants = [experiment(1, running=4, priority=25), experiment(2, "vision", waiting=4, priority=100)]
    terms = {"nlp": ProjectTerms(guaranteed={"h100": 1})}
    (preemption,) = divide(Situation(NOW_S, capacity(h100=4), claimants, terms)).preemptions
    assert preemption.runs == 3


def handed_over(*claimants: Claimant, devices: float, **terms: ProjectTerms) -> dict[int, float]:
    """Returns within how many devices experiments may start runs, by id, where that is not all they hold."""
    situation = Situation(NOW_S, capacity(h100=devices), claimants, terms)
    return {each.experiment_id: each.devices for each in divide(situation).handovers()}


def just_started(claimant: Claimant) -> Claimant:
    """Returns it with runs that have not worked for a useful time."""
    (demand,) = claimant.demands
    return dataclasses.replace(claimant, demands=(dataclasses.replace(demand, yieldable=0),))


SWEEP = just_started(experiment(1, running=4, waiting=9, priority=25))


@pytest.mark.parametrize("preemptible", [True, False])
def test_an_owners_urgent_runs_come_first_as_runs_of_a_sweep_end(preemptible: bool) -> None:
    sweep = dataclasses.replace(SWEEP, preemptible=preemptible)
    urgent = experiment(2, waiting=3, priority=100)
    division = divide(Situation(NOW_S, capacity(h100=4), [sweep, urgent]))
    assert not division.preemptions
    (found,) = division.handovers()
    assert (found.experiment_id, found.devices, found.for_experiment_ids) == (1, 1.0, (2,))


def test_handovers_do_not_depend_on_the_order_of_the_claimants() -> None:
    sweeps = [just_started(experiment(id, running=2, waiting=9, priority=25)) for id in (2, 1)]
    urgent = experiment(3, waiting=3, priority=100)
    first, second = (
        divide(Situation(NOW_S, capacity(h100=4), claimants)).handovers()
        for claimants in ([*sweeps, urgent], [urgent, *reversed(sweeps)])
    )
    assert first == second
    assert [each.experiment_id for each in first] == [1, 2]


def test_runs_of_equal_or_lower_priority_take_nothing_over() -> None:
    for priority in (10, 25):
        assert handed_over(SWEEP, experiment(2, waiting=3, priority=priority), devices=4) == {}


def test_what_fits_on_free_devices_needs_no_handover() -> None:
    assert handed_over(SWEEP, experiment(2, waiting=3, priority=100), devices=7) == {}
    assert handed_over(SWEEP, experiment(2, waiting=3, priority=100), devices=5) == {1: 2}


def test_every_experiment_of_lower_priority_makes_room_whichever_run_ends_first() -> None:
    other = just_started(experiment(3, running=2, waiting=1, priority=50, user="bob"))
    assert handed_over(SWEEP, other, experiment(2, waiting=1, priority=100), devices=6) == {1: 2, 3: 1}


def test_an_experiment_whose_last_runs_are_running_has_nothing_to_hand_over() -> None:
    last = just_started(experiment(1, running=4, priority=25))
    assert handed_over(last, experiment(2, waiting=3, priority=100), devices=4) == {}


def test_a_run_that_needs_the_devices_of_several_is_passed_until_it_may_preempt() -> None:
    urgent = experiment(2, waiting=1, devices=2.0, priority=100)
    assert handed_over(SWEEP, urgent, devices=4) == {}
    worked = experiment(1, running=4, waiting=9, priority=25)
    (preemption,) = divide(Situation(NOW_S, capacity(h100=4), [worked, urgent])).preemptions
    assert preemption.runs == 2


def test_a_guarantee_is_not_handed_over_to_another_project() -> None:
    terms = ProjectTerms(guaranteed={"h100": 4})
    assert handed_over(SWEEP, experiment(2, "b", waiting=1, priority=100), devices=4, nlp=terms) == {}
    assert handed_over(SWEEP, experiment(2, waiting=1, priority=100), devices=4, nlp=terms) == {1: 3}


@pytest.mark.parametrize(
    ("terms", "of_own", "of_a_colleague"),
    [
        (ProjectTerms(concurrent_runs_per_user=4), {1: 3}, {}),  # A newcomer preempts instead.
        (ProjectTerms(ceiling={"h100": 4}), {1: 3}, {1: 3}),
        (ProjectTerms(holds="budget of 100 USD spent"), {}, {}),
    ],
)
def test_limits_hold_for_who_comes_next(
    terms: ProjectTerms, of_own: dict[int, float], of_a_colleague: dict[int, float]
) -> None:
    urgent = experiment(2, waiting=1, priority=100)
    assert handed_over(SWEEP, urgent, devices=4, nlp=terms) == of_own
    colleague = dataclasses.replace(urgent, user="bob")
    assert handed_over(SWEEP, colleague, devices=4, nlp=terms) == of_a_colleague


def test_who_has_as_many_runs_as_they_may_gets_none_of_others() -> None:
    full = just_started(experiment(3, running=4, priority=100, user="bob"))
    urgent = experiment(2, waiting=1, priority=100, user="bob")
    terms = ProjectTerms(concurrent_runs_per_user=4)
    assert handed_over(SWEEP, full, urgent, devices=8, nlp=terms) == {}


def test_a_limit_of_runs_is_handed_over_to_other_devices_that_are_free() -> None:
    sweep = just_started(experiment(1, running=3, waiting=1, priority=25))
    urgent = experiment(2, waiting=1, priority=50, hardware="v100")
    terms = {"nlp": ProjectTerms(concurrent_runs_per_user=3)}
    for free, left in ((1, {1: 2.0}), (0, {})):
        situation = Situation(NOW_S, capacity(h100=3, v100=free), [sweep, urgent], terms)
        assert {each.experiment_id: each.devices for each in divide(situation).handovers()} == left


def test_a_run_larger_than_the_guarantee_is_not_within_it() -> None:
    large = just_started(experiment(1, "vision", running=1, waiting=1, devices=2.0, priority=25, user="bob"))
    urgent = experiment(2, waiting=1, priority=50)
    assert handed_over(large, urgent, devices=2, vision=ProjectTerms(guaranteed={"h100": 1})) == {1: 1.0}
    assert handed_over(large, urgent, devices=2, vision=ProjectTerms(guaranteed={"h100": 2})) == {}


def test_a_promotion_takes_nothing_over() -> None:
    old = experiment(2, waiting=1, priority=25, queued_s=NOW_S - PROMOTED_AFTER_S)
    sweep = dataclasses.replace(SWEEP, priority=30)
    assert handed_over(sweep, old, devices=4) == {}


@given(situations())
@FAST
def test_where_nothing_is_handed_over_no_higher_priority_waits_for_the_end_of_a_run(
    situation: Situation,
) -> None:
    division = divide(situation)
    held_back = {each.experiment_id for each in division.handovers()}
    for claimant in situation.claimants:
        (demand,) = claimant.demands
        if claimant.id in held_back or division.preemptions or not (demand.running and demand.waiting):
            continue
        if runs_allowed(division, claimant) == demand.running + demand.waiting:
            continue  # It has no run left for the place of the one that ends.
        shorter = dataclasses.replace(demand, running=demand.running - 1)
        ended = [
            dataclasses.replace(each, demands=(shorter if each is claimant else each.demands[0],))
            for each in situation.claimants
        ]
        alone = [each if each.id == claimant.id else without_waiting(each) for each in ended]
        if runs_allowed(divide(dataclasses.replace(situation, claimants=alone)), claimant) < demand.running:
            continue  # A limit keeps it from the place.
        following = divide(dataclasses.replace(situation, claimants=ended))
        for other in situation.claimants:
            if other.priority > claimant.priority and other.demands[0].devices <= demand.devices:
                assert runs_allowed(following, other) <= runs_allowed(division, other)


def test_who_has_used_less_holds_more_until_that_is_evened_out() -> None:
    claimants = [experiment(1, waiting=8), experiment(2, "vision", waiting=8)]

    def held(used_usd: float) -> dict[int, float]:
        usage = {("nlp", "ann", lane("h100")): Usage(used_usd, NOW_S)}
        division = divide(Situation(NOW_S, capacity(h100=8), claimants, usage=usage))
        return {id: each["h100"] for id, each in division.allowances.items()}

    assert held(0.0) == {1: 4.0, 2: 4.0}
    more_usd = 4 * 3.0 * HORIZON_H  # As much as four devices cost until it is evened out.
    assert held(more_usd) == {1: 2.0, 2: 6.0}


def test_use_of_one_kind_does_not_count_for_another() -> None:
    claimants = [
        experiment(1, running=40, hardware="v100"),
        experiment(2, waiting=4),
        experiment(3, "vision", waiting=4),
    ]
    usage = {("nlp", "ann", lane("v100")): Usage(10_000.0, NOW_S)}
    division = divide(Situation(NOW_S, capacity(h100=4, v100=40), claimants, usage=usage))
    assert {id: each.get("h100", 0.0) for id, each in division.allowances.items()} == {
        1: 0.0, 2: 2.0, 3: 2.0,
    }  # fmt: skip


def test_a_large_run_that_has_waited_long_gets_what_becomes_free() -> None:
    large = experiment(1, devices=4.0, waiting=1, queued_s=NOW_S - DRAINED_AFTER_S)
    small = [experiment(2, "vision", running=3, preemptible=False), experiment(3, "vision", waiting=9)]
    division = divide(Situation(NOW_S, capacity(h100=4), [large, *small]))
    assert division.lanes.states[lane("h100")].reserved_for == 1
    assert 3 not in division.allowances
    fresh = dataclasses.replace(large, queued_s=NOW_S - 1)
    assert 3 in divide(Situation(NOW_S, capacity(h100=4), [fresh, *small])).allowances


def test_devices_are_not_kept_for_a_large_run_that_others_hold_up_until_it_is_old() -> None:
    large = experiment(1, devices=4.0, waiting=1, queued_s=NOW_S - DRAINED_AFTER_S + 1)
    stays = experiment(2, "vision", running=3, preemptible=False)
    division = divide(Situation(NOW_S, capacity(h100=4), [large, stays, experiment(3, "speech", waiting=9)]))
    assert division.lanes.states[lane("h100")].reserved_for is None
    assert 3 in division.allowances


def test_a_large_run_that_comes_first_takes_what_others_hold_above_it() -> None:
    large = experiment(1, devices=4.0, waiting=1, queued_s=NOW_S - PATIENCE_S)
    small = [experiment(n, f"p{n}", running=1, waiting=1) for n in range(2, 6)]
    division = divide(Situation(NOW_S, capacity(h100=4), [large, *small]))
    assert {(each.experiment_id, each.for_experiment_id) for each in division.preemptions} == {
        (2, 1), (3, 1), (4, 1), (5, 1),
    }  # fmt: skip
    fresh = dataclasses.replace(large, queued_s=NOW_S - PATIENCE_S + 1)
    assert not divide(Situation(NOW_S, capacity(h100=4), [fresh, *small])).preemptions


def test_a_large_run_of_low_priority_has_its_turn_as_well() -> None:
    old = NOW_S - PROMOTED_AFTER_S
    large = experiment(1, devices=4.0, waiting=1, queued_s=old, priority=PROMOTED_TO - 1)
    small = [experiment(n, f"p{n}", running=1, waiting=1) for n in range(2, 6)]
    division = divide(Situation(NOW_S, capacity(h100=4), [large, *small]))
    assert {each.for_experiment_id for each in division.preemptions} == {1}


def test_a_large_run_stops_smaller_ones_that_have_just_started_but_not_its_like() -> None:
    def new(devices: float) -> Claimant:
        demand = Demand("h100", devices, running=round(4 / devices), yieldable=0)
        return dataclasses.replace(experiment(2, "vision"), demands=(demand,))

    large = experiment(1, devices=4.0, waiting=1, queued_s=NOW_S - PATIENCE_S)
    (preemption,) = divide(Situation(NOW_S, capacity(h100=4), [large, new(2.0)])).preemptions
    assert preemption.runs == 2
    small = experiment(3, "speech", running=1, devices=0.5)
    assert not divide(Situation(NOW_S, capacity(h100=4.5), [large, new(4.0), small])).preemptions


def test_a_large_run_is_not_passed_by_its_own_project() -> None:
    large = experiment(1, devices=4.0, waiting=1, queued_s=NOW_S - PATIENCE_S)
    colleague = experiment(2, user="bob", waiting=4)
    others = [
        experiment(3, "vision", running=3, preemptible=False),
        experiment(4, "speech", running=1, waiting=1, devices=0.5),
    ]
    division = divide(Situation(NOW_S, capacity(h100=4), [large, colleague, *others]))
    assert 2 not in division.allowances, "its project would never come first"
    assert division.allowances[4] == {"h100": 1.0}
    alone = divide(Situation(NOW_S, capacity(h100=4), [large, colleague, others[0]]))
    assert alone.allowances[2] == {"h100": 1.0}, "nobody else has a use for it"


def test_a_large_run_is_not_passed_where_all_devices_have_just_become_free() -> None:
    large = experiment(1, devices=4.0, waiting=1, queued_s=NOW_S - PATIENCE_S)
    colleague = experiment(2, user="bob", devices=2.0, waiting=2)
    others = experiment(3, "vision", waiting=9)
    used = {
        ("nlp", "ann", lane("h100")): Usage(10.0, NOW_S),
        ("nlp", "bob", lane("h100")): Usage(90.0, NOW_S),
        ("vision", "ann", lane("h100")): Usage(80.0, NOW_S),
    }
    division = divide(Situation(NOW_S, capacity(h100=4), [large, colleague, others], usage=used))
    assert {id: allowed["h100"] for id, allowed in division.allowances.items()} == {3: 4.0}


@pytest.mark.parametrize(("waited_s", "small_runs"), [(60.0, 2), (PATIENCE_S, 0)])
def test_a_large_run_is_not_passed_within_its_projects_guarantee(waited_s: float, small_runs: int) -> None:
    """Else its project would always hold what it is guaranteed, and never come first for more."""
    large = experiment(1, waiting=1, devices=4.0, queued_s=NOW_S - waited_s)
    small = experiment(2, waiting=9, user="bob")
    others = just_started(experiment(3, "vision", running=8, waiting=9, preemptible=False))
    used = {
        ("nlp", "bob", lane("h100")): Usage(100.0, NOW_S),
        ("vision", "ann", lane("h100")): Usage(90.0, NOW_S),
    }
    terms = {"nlp": ProjectTerms(guaranteed={"h100": 2})}
    situation = Situation(NOW_S, capacity(h100=10), [large, small, others], terms, used)
    assert runs_allowed(divide(situation), small) == small_runs


def test_low_priority_does_not_wait_forever() -> None:
    old = experiment(1, waiting=1, priority=25, queued_s=NOW_S - PROMOTED_AFTER_S)
    others = [experiment(2, waiting=1, priority=PROMOTED_TO), experiment(3, "vision", running=1)]
    assert divide(Situation(NOW_S, capacity(h100=2), [old, *others])).allowances.keys() == {1, 3}
    newer = dataclasses.replace(old, queued_s=NOW_S - PROMOTED_AFTER_S + 1)
    assert divide(Situation(NOW_S, capacity(h100=2), [newer, *others])).allowances.keys() == {2, 3}


@pytest.mark.parametrize(
    ("waited_s", "held_s_ago", "is_first"),
    [
        (OVERDUE_AFTER_S, OVERDUE_AFTER_S, True),
        (OVERDUE_AFTER_S - 1, OVERDUE_AFTER_S, False),
        (OVERDUE_AFTER_S, OVERDUE_AFTER_S - 1, False),
    ],
)
def test_who_has_waited_for_two_days_without_a_device_comes_first_in_the_project(
    waited_s: float, held_s_ago: float, is_first: bool
) -> None:
    """Also after more use than the others'; who has just held something waits for their score."""
    used = {
        ("nlp", "ann", lane("h100")): Usage(200.0, NOW_S - held_s_ago),
        ("nlp", "bob", lane("h100")): Usage(10.0, NOW_S),
    }
    mine = experiment(1, user="ann", waiting=1, queued_s=NOW_S - waited_s)
    others = experiment(2, user="bob", waiting=9, queued_s=NOW_S - 60)
    division = divide(Situation(NOW_S, capacity(h100=1), [mine, others], usage=used))
    assert list(division.allowances) == [1 if is_first else 2]


def test_a_grid_does_not_hold_up_its_users_later_experiments() -> None:
    grid = experiment(1, running=7, waiting=900, queued_s=NOW_S - 9000, served_s=NOW_S - 60)
    later = experiment(2, waiting=1, queued_s=NOW_S - 120)
    assert divide(Situation(NOW_S, capacity(h100=8), [grid, later])).allowances.keys() == {1, 2}


def test_a_run_works_for_a_while_between_preemptions() -> None:
    assert not may_yield(NOW_S, NOW_S - USEFUL_S + 1, restart_s=1.0)
    assert may_yield(NOW_S, NOW_S - USEFUL_S, restart_s=1.0)
    assert not may_yield(NOW_S, NOW_S - USEFUL_S, restart_s=USEFUL_S)


def test_runs_that_may_not_yield_yet_stop_for_a_newcomer_alone() -> None:
    demand = Demand("h100", 1.0, running=7, yieldable=0)
    grid = dataclasses.replace(experiment(1), demands=(demand,))
    newcomer = experiment(2, "vision", waiting=4)
    (preemption,) = divide(Situation(NOW_S, capacity(h100=7), [grid, newcomer])).preemptions
    assert preemption.runs == 1, "its next runs wait until others have worked for a useful time"
    holds = experiment(2, "vision", running=1, waiting=4)
    assert not divide(Situation(NOW_S, capacity(h100=8), [grid, holds])).preemptions


@pytest.mark.parametrize(
    ("terms", "mine", "reason"),
    [
        (ProjectTerms(holds="budget spent"), experiment(1, waiting=1), WaitingReason.budget),
        (ProjectTerms(ceiling={"h100": 0.0}), experiment(1, waiting=1), WaitingReason.ceiling),
        (ProjectTerms(concurrent_runs_per_user=0), experiment(1, waiting=1), WaitingReason.user_cap),
        (ProjectTerms(), experiment(1, waiting=1, devices=9.0), WaitingReason.no_capacity),
        (ProjectTerms(), experiment(1, waiting=1, hardware="v100"), WaitingReason.no_capacity),
    ],
)
def test_every_waiting_run_has_its_reason(terms: ProjectTerms, mine: Claimant, reason: WaitingReason) -> None:
    division = divide(Situation(NOW_S, capacity(h100=4), [mine], {"nlp": terms}))
    (waiting,) = division.waiting()
    assert (waiting.reason, waiting.position, waiting.ahead) == (reason, 1, ())


def test_positions_follow_shares_and_age() -> None:
    claimants = [
        experiment(1, running=1, waiting=1),
        experiment(2, "vision", waiting=1, queued_s=NOW_S - 10),
        experiment(3, "vision", waiting=1, queued_s=NOW_S - 20),
    ]
    division = divide(Situation(NOW_S, capacity(h100=1), claimants))
    assert [each.experiment_id for each in division.waiting()] == [3, 1, 2]
    assert [each.ahead for each in division.waiting()][:2] == [(), (3,)]
