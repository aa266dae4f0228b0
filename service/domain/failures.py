"""Decides what follows a failed attempt; failures of machines count apart from the run's own. Pure."""

from dataclasses import dataclass

from trainers.errors import FAILURES_OF_MACHINES, FailureClass

INFRASTRUCTURE_LIMIT = 20  # Attempts that a run may lose to machines before it fails; bounds a crash loop

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0

_COUNTED = frozenset({FailureClass.bug, FailureClass.not_finite})


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Failures so far, the present one included."""

    own: int  # Failures of the run itself
    infrastructure: int  # Failures of machines, processes or networks under it


@dataclass(frozen=True, slots=True)
class RetryDecision:
    retry: bool
    delay_s: float
    reason: str


def decide_retry(
    failure: FailureClass, counts: FailureCounts, *, max_restarts: int, progressed: bool
) -> RetryDecision:
    """`progressed`: the attempt got further than the one before, so a machine failure delays it least."""
    if failure is FailureClass.preempted:
        return RetryDecision(True, 0.0, "preempted: the run resumes when resources are back")
    if failure in FAILURES_OF_MACHINES:
        if counts.infrastructure > INFRASTRUCTURE_LIMIT:
            return RetryDecision(
                False,
                0.0,
                f"lost {counts.infrastructure} times to machine failures; the limit is "
                f"{INFRASTRUCTURE_LIMIT}",
            )
        delay = FIRST_DELAY_S if progressed else backoff_s(counts.infrastructure)
        return RetryDecision(True, delay, f"{failure}: retrying, not counted against max_restarts")
    if failure in _COUNTED:
        if counts.own <= max_restarts:
            return RetryDecision(
                True, backoff_s(counts.own), f"{failure}: restart {counts.own} of {max_restarts}"
            )
        return RetryDecision(False, 0.0, f"{failure}: all {max_restarts} of max_restarts are used")
    return RetryDecision(False, 0.0, f"{failure}: not retried, would fail the same way again")


def backoff_s(failures: int) -> float:
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 30))
