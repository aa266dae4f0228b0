"""What Tune's searcher passes on, in which order; no cluster is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from service.driving import tuning
from service.driving.tuning import OnlyHere
from service.recording.assignment import Ending, Ready
from trainers.errors import FailureClass

FAILED = Ending("failed", failure=(FailureClass.infrastructure, "the worker exited"))
READY = Ready("placement", 0.0)


def turn(attempt: int = 1) -> Any:
    return SimpleNamespace(name=f"run-1-{attempt}-1", run_id=1, attempt=attempt)


class Recording:
    """A sweep and an actor in one: they note what is asked of them, in order."""

    def __init__(self, stored: Exception | str | None, attempt: int = 1) -> None:
        self.stored = stored
        self.attempt = attempt
        self.calls: list[str] = []

    def next_turn(self) -> Any:
        return turn(self.attempt)

    def shut_out(self, run_id: int, attempt: int) -> None:
        self.calls.append("shut_out")

    def ready(self, ready: Ready) -> None:
        pass

    def open(self, turn: Any, ready: Ready) -> None:
        self.calls.append("open")

    def grant(self, grants: Any) -> None:
        pass

    def wait_until_stored(self, timeout_s: float) -> str | None:
        self.calls.append("wait_until_stored")
        if isinstance(self.stored, Exception):
            raise self.stored
        return self.stored

    def ended(self, turn: Any, ending: Ending) -> None:
        self.calls.append("ended")


def calls_of(result: dict[str, Any], stored: Exception | str | None = None, attempt: int = 1) -> list[str]:
    recording: Any = Recording(stored, attempt)
    searcher = tuning._searcher(OnlyHere(recording), OnlyHere(recording), OnlyHere(recording))
    searcher.suggest("trial")
    searcher.on_trial_result("trial", result)
    return recording.calls


def test_a_run_ends_behind_its_points() -> None:
    assert calls_of({"ending": Ending("completed")}) == ["wait_until_stored", "ended"]


def test_an_attempt_that_failed_is_shut_out_first() -> None:
    """Its processes may live on and report while its end waits for the database."""
    assert calls_of({"ending": FAILED}) == ["shut_out", "wait_until_stored", "ended"]


def test_an_attempt_after_another_opens_behind_the_points_of_that() -> None:
    assert calls_of({"ready": READY}) == ["open"]
    assert calls_of({"ready": READY}, attempt=2) == ["wait_until_stored", "open"]


def test_a_run_ends_although_its_points_cannot_be_stored() -> None:
    # Ray reads how it authenticates when it is imported: not before the tests that start it.
    from ray.exceptions import RayActorError

    ending = {"ending": Ending("completed")}
    assert calls_of(ending, "the disk is full") == ["wait_until_stored", "ended"]
    assert calls_of(ending, RayActorError()) == ["wait_until_stored", "ended"]


@pytest.mark.parametrize("keep", [True, False])
def test_tune_keeps_an_idle_process_only_if_another_run_may_start(keep: bool) -> None:
    """By the names of Tune's own cache, which has no public ones."""
    from ray.tune.utils.object_cache import _ObjectCache

    cache: Any = _ObjectCache(may_keep_one=True)
    cache.cache_object("shape", "process")
    tuning._keep_idle_process(SimpleNamespace(_tune_controller=SimpleNamespace(_actor_cache=cache)), keep)
    assert list(cache.flush_cached_objects()) == ([] if keep else ["process"])
    assert cache.num_cached_objects == keep
