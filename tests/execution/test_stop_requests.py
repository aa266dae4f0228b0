"""Stop requests of people, the search and the scheduler, as the recorder gets them."""

from __future__ import annotations

from collections.abc import Mapping

from service.driving.driver import StopRequests
from trainers.reporting import StopReason

EARLY, CANCEL, PAUSE = StopReason.early_stop, StopReason.cancel, StopReason.pause


def test_requests_of_one_source_replace_only_its_own_and_cancelling_comes_first() -> None:
    sent: list[tuple[StopReason | None, Mapping[tuple[int, int], StopReason]]] = []
    stops = StopRequests(lambda everything, attempts: sent.append((everything, attempts)))
    stops.stop_early({(1, 1), (2, 1)})
    stops.preempt({(1, 1), (4, 1)})
    stops.ask(PAUSE, {(2, 1), (3, 2)})
    assert sent[-1] == (
        PAUSE,
        {(1, 1): EARLY, (2, 1): CANCEL, (3, 2): CANCEL, (4, 1): StopReason.preempted},
    )
    stops.ask(None, set())
    assert sent[-1] == (None, {(1, 1): EARLY, (2, 1): EARLY, (4, 1): StopReason.preempted})
    stops.stop_early(set())
    assert sent[-1] == (None, {(1, 1): StopReason.preempted, (4, 1): StopReason.preempted})
