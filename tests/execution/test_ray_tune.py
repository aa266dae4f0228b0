"""What Tune's searcher passes on, in which order; no cluster is started."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from service.driving.choosing import Wait
from service.recording.mailbox import Ending, Ready
from trainers.errors import FailureClass

FAILED = Ending("failed", failure=(FailureClass.infrastructure, "the worker exited"))
READY = Ready("placement", 0.0)
GOING = Ready("placement", 0.0, ("node",))


def turn(attempt: int = 1) -> Any:
    return SimpleNamespace(name=f"run-1-{attempt}-1", run_id=1, attempt=attempt)


class Recording:
    """A sweep, a recorder and a relay in one: they note what is asked of them, in order."""

    def __init__(self, stored: str | None, attempt: int = 1) -> None:
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

    def leaves(self, ready: Ready) -> bool:
        return ready == GOING

    def drop(self, turn: Any) -> None:
        self.calls.append("drop")

    def grant(self, grants: Any) -> None:
        pass

    def wait_until_stored(self, timeout_s: float) -> str | None:
        self.calls.append("wait_until_stored")
        return self.stored

    def ended(self, turn: Any, ending: Ending) -> None:
        self.calls.append("ended")


def ray_tune() -> Any:
    """Ray reads how it authenticates when it is imported: not before the tests that start it."""
    return importlib.import_module("service.driving.ray_tune")


def calls_of(result: dict[str, Any], stored: str | None = None, attempt: int = 1) -> list[str]:
    recording: Any = Recording(stored, attempt)
    trials = ray_tune().Trials(recording, recording, recording, recording, lambda: False)
    search = ray_tune().TuneSearch(trials)
    search.searcher.suggest("trial")
    search.on_trial_result("trial", result)
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
    ending = {"ending": Ending("completed")}
    assert calls_of(ending, "the disk is full") == ["wait_until_stored", "ended"]


def test_processes_that_are_sent_away_from_their_node_end_without_an_attempt() -> None:
    recording: Any = Recording(None)
    trials = ray_tune().Trials(recording, recording, recording, recording, lambda: False)
    search = ray_tune().TuneSearch(trials)
    search.searcher.suggest("trial")
    search.on_trial_result("trial", {"ready": GOING})
    failed: Any = SimpleNamespace(trial_id="trial", pickled_error_file=None)
    trials.on_trial_error(1, [failed], failed)
    assert recording.calls == ["open", "drop"]


class Controller:
    """Tune's controller as a scheduler sees it: the set of live trials is its own, and shrinks meanwhile."""

    def __init__(self, statuses: list[str]) -> None:
        self.trials = [
            SimpleNamespace(status=status, config={"turn": number}) for number, status in enumerate(statuses)
        ]
        self._live = {id(trial): trial for trial in self.trials}

    def get_live_trials(self) -> Any:
        return self._live.values()

    def get_trials(self) -> Any:
        return self.trials

    def stop_trial(self, trial: Any) -> None:
        trial.status = "TERMINATED"
        del self._live[id(trial)]


@pytest.mark.parametrize("waiting", [1, 3])
def test_runs_that_are_not_wanted_any_more_leave_those_that_train_alone(waiting: int) -> None:
    """After a pause, a cancellation or a preemption; trials that wait for a place are taken back."""
    controller = Controller(["RUNNING", *["PENDING"] * waiting, "RUNNING"])
    trials: Any = SimpleNamespace(sweep=SimpleNamespace(wanted=lambda turn: False))
    ray_tune().InOrder(trials).choose_trial_to_run(controller)
    assert [trial.status for trial in controller.trials] == [
        "RUNNING", *["TERMINATED"] * waiting, "RUNNING",
    ]  # fmt: skip


@pytest.mark.parametrize("keep", [True, False])
def test_tune_keeps_an_idle_process_only_if_another_run_may_start(keep: bool) -> None:
    """Tune ends idle processes when its search has finished, and asks in every step."""
    turns = [turn(), Wait.later, Wait.later]
    sweep: Any = SimpleNamespace(
        next_turn=lambda: turns.pop(0), may_start_more=keep, ended=lambda turn, ending: None
    )
    actor: Any = SimpleNamespace(wait_until_stored=lambda timeout_s: None, grant=lambda grants: None)
    from ray.tune.experiment import Experiment

    trials = ray_tune().Trials(sweep, actor, actor, actor, lambda: False)
    search = ray_tune().TuneSearch(trials)
    search.add_configurations(Experiment("sweep", lambda config: None, num_samples=9))
    search.searcher.suggest("trial")
    assert not search.is_finished()
    assert search.next_trial() is None
    assert search.is_finished() is not keep
    trials.on_step_begin(1, [])
    assert not search.is_finished(), "the next step asks for more"
    assert search.next_trial() is None
    search.on_trial_result("trial", {"ending": Ending("completed")})
    assert not search.is_finished(), "the sweep is not over when its last run has ended"
