"""The retry decision: the class of the failure decides."""

from __future__ import annotations

import pytest

from service.domain.states import (
    INFRASTRUCTURE_LIMIT,
    LONGEST_DELAY_S,
    FailureCounts,
    backoff_s,
    decide_retry,
)
from tests.generated_docs import retry_rule
from trainers.errors import FailureClass


@pytest.mark.parametrize(
    ("failure", "own", "of_machines", "progressed", "decision"),
    [
        ("preempted", 9, 99, False, (True, 0.0, "preempted: the run resumes when resources are back")),
        ("lost", 9, 3, False, (True, 4.0, "lost: retrying, not counted against max_restarts")),
        ("lost", 9, 20, True, (True, 1.0, "lost: retrying, not counted against max_restarts")),
        ("lost", 0, 21, True, (False, 0.0, "lost 21 times to machine failures; the limit is 20")),
        ("bug", 2, 9, True, (True, 2.0, "bug: restart 2 of 2")),
        ("bug", 3, 0, True, (False, 0.0, "bug: all 2 of max_restarts are used")),
        ("bad_spec", 0, 0, True, (False, 0.0, "bad_spec: not retried, would fail the same way again")),
    ],
)
def test_a_decision_has_its_delay_and_its_reason_in_words(
    failure: str, own: int, of_machines: int, progressed: bool, decision: tuple[bool, float, str]
) -> None:
    counts = FailureCounts(own, of_machines)
    found = decide_retry(FailureClass(failure), counts, max_restarts=2, progressed=progressed)
    assert (found.retry, found.delay_s, found.reason) == decision


def test_the_rule_of_each_class_in_words() -> None:
    of_machines = "yes, up to 20 times, counted separately from the run's own failures"
    assert {failure: retry_rule(failure) for failure in FailureClass} == {
        FailureClass.infrastructure: of_machines,
        FailureClass.storage: of_machines,
        FailureClass.lost: of_machines,
        FailureClass.preempted: "yes, not counted",
        FailureClass.bug: "up to `max_restarts` times",
        FailureClass.not_finite: "up to `max_restarts` times",
        FailureClass.out_of_memory: "no",
        FailureClass.bad_data: "no",
        FailureClass.bad_spec: "no",
    }


@pytest.mark.parametrize(
    "failure", [FailureClass.out_of_memory, FailureClass.bad_data, FailureClass.bad_spec]
)
def test_what_would_fail_again_unchanged_is_not_retried(failure: FailureClass) -> None:
    decision = decide_retry(failure, FailureCounts(own=1, infrastructure=0), max_restarts=5, progressed=True)
    assert not decision.retry
    assert "fail the same way again" in decision.reason


@pytest.mark.parametrize("failure", [FailureClass.bug, FailureClass.not_finite])
def test_the_runs_own_failures_are_retried_max_restarts_times(failure: FailureClass) -> None:
    retried = [
        decide_retry(failure, FailureCounts(own=n, infrastructure=0), max_restarts=2, progressed=False).retry
        for n in (1, 2, 3)
    ]
    assert retried == [True, True, False]


@pytest.mark.parametrize("failure", [FailureClass.infrastructure, FailureClass.lost])
def test_failures_of_machines_are_not_counted_against_max_restarts(failure: FailureClass) -> None:
    decision = decide_retry(failure, FailureCounts(own=0, infrastructure=9), max_restarts=0, progressed=False)
    assert decision.retry


def test_a_crash_loop_of_machines_ends() -> None:
    counts = FailureCounts(own=0, infrastructure=INFRASTRUCTURE_LIMIT + 1)
    assert not decide_retry(FailureClass.infrastructure, counts, max_restarts=0, progressed=False).retry


def test_a_run_that_moves_on_between_machine_failures_is_not_delayed_further() -> None:
    counts = FailureCounts(own=0, infrastructure=8)
    slow = decide_retry(FailureClass.infrastructure, counts, max_restarts=0, progressed=False)
    fast = decide_retry(FailureClass.infrastructure, counts, max_restarts=0, progressed=True)
    assert fast.delay_s < slow.delay_s


def test_preemption_is_retried_at_once_however_often() -> None:
    counts = FailureCounts(own=99, infrastructure=99)
    decision = decide_retry(FailureClass.preempted, counts, max_restarts=0, progressed=False)
    assert (decision.retry, decision.delay_s) == (True, 0.0)


def test_every_class_gets_a_decision_with_a_reason() -> None:
    for failure in FailureClass:
        assert decide_retry(failure, FailureCounts(1, 1), max_restarts=1, progressed=False).reason


def test_backoff_doubles_up_to_its_limit() -> None:
    assert [backoff_s(n) for n in (1, 2, 3, 9, 10)] == [1.0, 2.0, 4.0, 256.0, 300.0]
    assert backoff_s(50) == backoff_s(10**6) == LONGEST_DELAY_S
