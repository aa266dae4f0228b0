"""The client of the experiment's actor over a restart of it; no Ray is started."""

from __future__ import annotations

from typing import Any

import pytest

from service.recording import experiment_actor
from service.recording.experiment_actor import ExperimentActorClient


class DyingClient(ExperimentActorClient):
    """Its actor dies while it answers for the first time; the one that replaces it answers."""

    def __init__(self) -> None:
        super().__init__(None)
        self.calls: list[str] = []

    def _call(self, method: str, *arguments: Any) -> Any:
        # Ray reads how it authenticates when it is imported: not before the tests that start it.
        from ray.exceptions import RayActorError

        self.calls.append(method)
        if len(self.calls) == 1:
            raise RayActorError
        return None


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> DyingClient:
    monkeypatch.setattr(experiment_actor, "_UNAVAILABLE_S", 0.0)
    return DyingClient()


def test_an_actor_that_dies_while_spools_are_awaited_is_no_failure_of_the_driver(client: DyingClient) -> None:
    assert client.wait_until_stored(10.0) is None
    assert client.calls == ["trouble", "trouble"]


def test_an_actor_that_dies_while_it_closes_is_closed_again(client: DyingClient) -> None:
    client.close()
    assert client.calls == ["close", "close"]
