"""Stop requests reach the experiment's actor, whatever happens to a call or to the actor."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from service.driving.driver import REPEAT_S, StopRequests
from tests.execution.conftest import Clock
from trainers.reporting import StopReason

EARLY, CANCEL, PAUSE = StopReason.early_stop, StopReason.cancel, StopReason.pause


class Actor:
    """Knows what it was sent last, until it restarts."""

    def __init__(self) -> None:
        self.away = False
        self.calls = 0
        self.restart()

    def restart(self) -> None:
        self.everything: StopReason | None = None
        self.attempts: dict[tuple[int, int], StopReason] = {}

    def request_stops(
        self, everything: StopReason | None, attempts: Mapping[tuple[int, int], StopReason]
    ) -> None:
        self.calls += 1
        if self.away:
            raise ConnectionError("the actor restarts")
        self.everything, self.attempts = everything, dict(attempts)


@pytest.fixture
def actor() -> Actor:
    return Actor()


@pytest.fixture
def stops(actor: Actor, clock: Clock) -> StopRequests:
    return StopRequests(actor.request_stops, clock)


def test_early_stops_and_cancellations_are_sent_together(stops: StopRequests, actor: Actor) -> None:
    stops.stop_early({(1, 1), (2, 1)})
    stops.ask(None, {(2, 1), (3, 2)})
    stops.pass_on()
    assert (actor.everything, actor.attempts) == (None, {(1, 1): EARLY, (2, 1): CANCEL, (3, 2): CANCEL})


def test_an_early_stop_whose_call_failed_is_sent_again(
    stops: StopRequests, actor: Actor, clock: Clock
) -> None:
    stops.stop_early({(1, 1)})
    actor.away = True
    with pytest.raises(ConnectionError):
        stops.pass_on()
    actor.away = False
    stops.stop_early({(1, 1)})  # The next look finds the same.
    clock.forward(REPEAT_S)
    stops.pass_on()
    assert actor.attempts == {(1, 1): EARLY}


def test_an_actor_that_restarts_hears_of_everything_again(
    stops: StopRequests, actor: Actor, clock: Clock
) -> None:
    stops.stop_early({(1, 1)})
    stops.ask(PAUSE, set())
    stops.pass_on()
    actor.restart()
    clock.forward(REPEAT_S)
    stops.pass_on()
    assert (actor.everything, actor.attempts) == (PAUSE, {(1, 1): EARLY})


def test_a_change_is_sent_at_once_and_the_same_from_time_to_time(
    stops: StopRequests, actor: Actor, clock: Clock
) -> None:
    stops.pass_on()
    stops.pass_on()
    assert actor.calls == 1
    stops.ask(PAUSE, set())
    stops.pass_on()
    assert (actor.calls, actor.everything) == (2, PAUSE)
    stops.ask(None, set())
    stops.pass_on()
    assert (actor.calls, actor.everything) == (3, None)
    clock.forward(REPEAT_S)
    stops.pass_on()
    assert actor.calls == 4
