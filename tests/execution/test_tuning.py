"""What Tune's searcher passes on, in which order; no cluster is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from service.driving import tuning
from service.driving.tuning import OnlyHere
from service.recording.assignment import Ending

TURN: Any = SimpleNamespace(name="run-1-1-1", run_id=1)
FAILED = Ending("failed")


class Recording:
    """A sweep and an actor in one: they note what is asked of them, in order."""

    def __init__(self, stored: Exception | str | None) -> None:
        self.stored = stored
        self.calls: list[str] = []

    def next_turn(self) -> Any:
        return TURN

    def wait_until_stored(self, timeout_s: float) -> str | None:
        self.calls.append("wait_until_stored")
        if isinstance(self.stored, Exception):
            raise self.stored
        return self.stored

    def ended(self, turn: Any, ending: Ending) -> None:
        self.calls.append("ended")


def calls_of_an_ending(stored: Exception | str | None) -> list[str]:
    recording: Any = Recording(stored)
    searcher = tuning._searcher(OnlyHere(recording), OnlyHere(recording), OnlyHere(recording))
    searcher.suggest("trial")
    searcher.on_trial_result("trial", {"ending": FAILED})
    return recording.calls


def test_a_run_ends_behind_its_points() -> None:
    assert calls_of_an_ending(None) == ["wait_until_stored", "ended"]


def test_a_run_ends_although_its_points_cannot_be_stored() -> None:
    # Ray reads how it authenticates when it is imported: not before the tests that start it.
    from ray.exceptions import RayActorError

    assert calls_of_an_ending("the disk is full") == ["wait_until_stored", "ended"]
    assert calls_of_an_ending(RayActorError()) == ["wait_until_stored", "ended"]


@pytest.mark.parametrize("keep", [True, False])
def test_tune_keeps_an_idle_process_only_if_another_run_may_start(keep: bool) -> None:
    """By the names of Tune's own cache, which has no public ones."""
    from ray.tune.utils.object_cache import _ObjectCache

    cache: Any = _ObjectCache(may_keep_one=True)
    cache.cache_object("shape", "process")
    tuning._keep_idle_process(SimpleNamespace(_tune_controller=SimpleNamespace(_actor_cache=cache)), keep)
    assert list(cache.flush_cached_objects()) == ([] if keep else ["process"])
    assert cache.num_cached_objects == keep
