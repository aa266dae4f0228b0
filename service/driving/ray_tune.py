"""The runs of an experiment as trials of one Ray Tune sweep. Imports Ray.

A custom searcher hands out runs from the store's queue, so that retries, delays, budgets, pauses and requeued
runs are all the same to it. Tune places trials, reuses their processes and reports their end.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.exceptions import RayError
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher, SearchGenerator
from ray.tune.stopper import Stopper

from service.driving.choosing import Wait
from service.driving.sweep import Sweep
from service.recording.mailbox import Ending, Grant, Ready, Turn
from service.recording.recorder import Recorder
from service.recording.relay import RelayClient
from service.scheduling.run_plan import Shape
from service.workers.ray_cluster import PlacementWatch, own_node_resource
from service.workers.trial import run_trial
from service.workers.worker_attempt import failure_of
from trainers.errors import FailureClass

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_SYNCER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # The database is what an experiment is resumed from.
    "TUNE_MAX_PENDING_TRIALS_PG": "8",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000",  # `Sweep` reports it first.
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
REMIND_S = 1.0  # How often grants are repeated, and how often it is stored what runs wait for
SLOW_START_S = 20.0  # From placed to ready, after which it is explained
STORED_S = 60.0  # Longest wait, at an attempt's end and before another, for points on the recorder's disk
_SLOT = 0.0001  # Share of a node's own resource that the trial of a worker group takes: Ray's smallest amount


def run_sweep(
    sweep: Sweep,
    recorder: Recorder,
    relay: RelayClient,
    watch: PlacementWatch,
    *,
    folder: Path,  # For Tune's and Train's own files
    name: str,  # Unique among all sweeps in the folder
    reuse: bool,  # Whether runs of one shape may use the same process in turn
    give_up: Callable[[], bool],
) -> None:
    """Runs until the sweep gives no more turns and every trial has ended, or `give_up` returns True."""
    os.environ.update(_ENVIRONMENT)
    node_resource = own_node_resource()
    slots: dict[Shape, int] = {}

    def resources(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        shape: Shape = config["turn"].shape
        if shape.workers == 1:
            selector = {"bundle_label_selector": [dict(shape.labels)]} if shape.labels else {}
            return tune.PlacementGroupFactory([dict(shape.resources)], **selector)
        # The workers reserve what they use. The trial itself takes nothing that counts: 2 workers
        # on 2 CPUs leave not even 0.01 of one. Each shape takes its own amount, because Tune
        # reuses a process for equal amounts: the open group in it then has the right shape, and
        # Tune ends it when a trial of another shape needs its place.
        slot = slots.setdefault(shape, len(slots) + 1)
        return tune.PlacementGroupFactory([{node_resource: _SLOT * slot}])

    trials = Trials(sweep, recorder, relay, watch, give_up)
    trainable = tune.with_parameters(
        run_trial, relay=relay, storage=str(folder / "train"), names=f"stillhouse-{name}"
    )
    tune.Tuner(
        tune.with_resources(trainable, resources),
        tune_config=tune.TuneConfig(
            search_alg=TuneSearch(trials),
            scheduler=InOrder(trials),
            num_samples=-1,
            reuse_actors=reuse,
            trial_name_creator=_name_of,
            trial_dirname_creator=_name_of,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(folder / "tune"),
            verbose=0,
            stop=trials,
            callbacks=[trials],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    ).fit()


def _name_of(trial: Any) -> str:
    turn: Turn = trial.config["turn"]
    return turn.name


class Trials(tune.Callback, Stopper):  # type: ignore[misc, unused-ignore]
    """The turns that Tune has as trials, and the answers to those that are ready.

    Tune's copies, saved for a restart that never happens here, hold nothing.
    """

    def __init__(
        self,
        sweep: Sweep,
        recorder: Recorder,
        relay: RelayClient,
        watch: PlacementWatch,
        give_up: Callable[[], bool],
    ) -> None:
        self.sweep, self._recorder, self._relay = sweep, recorder, relay
        self._watch, self._give_up = watch, give_up
        self._turns: dict[str, Turn] = {}
        self._grants: dict[str, Grant] = {}
        self._reminded_s = 0.0
        self.blocked = False
        """Whether no further run can start; set when Tune asks, reset in each step."""

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()

    def __deepcopy__(self, memo: object) -> Trials:
        return self

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._give_up()

    @property
    def idle(self) -> bool:
        """Whether processes without a run have to end while others train, and free their node."""
        return self.blocked and bool(self._turns)

    def next(self, trial_id: str) -> Turn | Wait:
        following = self.sweep.next_turn()
        if not isinstance(following, Wait):
            self._turns[trial_id] = following
        elif following is Wait.later:
            self.blocked = not self.sweep.may_start_more
        return following

    def reported(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Opens the attempt of a trial that reports ready, and writes the ending that another reports."""
        turn = self._turns.get(trial_id)
        if turn is None:
            return
        if isinstance(ready := result.get("ready"), Ready) and turn.name not in self._grants:
            self._watch.ready(ready)
            if turn.attempt > 1:
                self._wait_for_points(turn, "starts again")
            assignment = self.sweep.open(turn, ready)
            self._grants[turn.name] = Grant(assignment, assignment is None and self.sweep.leaves(ready))
            self._remind()
        if isinstance(ending := result.get("ending"), Ending):
            self._end(trial_id, ending)

    def completed(self, trial_id: str) -> None:
        """Takes back the turn of a trial that has ended without an attempt."""
        turn = self._forget(trial_id)
        if turn is not None:
            self.sweep.drop(turn)

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self.blocked = False

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ends a run by the error file that Tune keeps, if its trial has not reported an ending."""
        turn = self._turns.get(trial.trial_id)
        grant = None if turn is None else self._grants.get(turn.name)
        if grant is not None and grant.leaves:
            self.completed(trial.trial_id)
        elif turn is not None:
            path = trial.pickled_error_file
            failure = FailureClass.infrastructure, "the worker exited without reporting an error"
            if path is not None and Path(path).exists():
                failure = failure_of(cloudpickle.loads(Path(path).read_bytes()))
            self._end(trial.trial_id, Ending("failed", failure=failure))

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Ends trials that Tune gave up silently, as it does if it cannot reuse a process; repeats grants."""
        missing = len(self._turns)
        for trial in reversed(trials):
            if not missing:
                break
            if trial.trial_id in self._turns:
                missing -= 1
                if trial.status == "ERROR":
                    self.on_trial_error(iteration, trials, trial)
        if time.monotonic() - self._reminded_s >= REMIND_S:
            self._remind()
            self.sweep.tell_waiting(self._watch.starting())
            if self._watch.starting(time.time() - SLOW_START_S):
                self.sweep.tell_slow_start()

    def _remind(self) -> None:
        """Repeats all grants: a restarted relay has none."""
        self._reminded_s = time.monotonic()
        try:
            self._relay.grant(self._grants)
        except RayError as error:
            logger.warning("the relay does not respond; resending grants: %s", error)

    def _end(self, trial_id: str, ending: Ending) -> None:
        turn = self._forget(trial_id)
        assert turn is not None
        # The processes of an attempt that failed may live on for a moment, and report.
        self._wait_for_points(turn, "ends", shut_out=ending.failure is not None)
        self.sweep.ended(turn, ending)

    def _forget(self, trial_id: str) -> Turn | None:
        turn = self._turns.pop(trial_id, None)
        if turn is not None:
            self._grants.pop(turn.name, None)
        return turn

    def _wait_for_points(self, turn: Turn, then: str, *, shut_out: bool = False) -> None:
        """Waits until acknowledged points are stored: the run's next attempt would keep out spooled ones."""
        if shut_out:
            self._recorder.shut_out(turn.run_id, turn.attempt)
        waiting = self._recorder.wait_until_stored(STORED_S)
        if waiting is not None:
            logger.warning("run %d %s before all its points are stored: %s", turn.run_id, then, waiting)


class TuneSearch(SearchGenerator):  # type: ignore[misc, unused-ignore]
    """Makes trials of the turns, and lets Tune end idle processes when no further run may start.

    Tune keeps one idle process, and its devices, until its search has finished. It asks for that again in
    every step, and ends the sweep only if no trial is left; so a search may finish for a while.
    """

    def __init__(self, trials: Trials) -> None:
        super().__init__(Turns(trials))
        self._trials = trials

    def is_finished(self) -> bool:
        return self._trials.idle or bool(super().is_finished())


class Turns(Searcher):  # type: ignore[misc, unused-ignore]
    def __init__(self, trials: Trials) -> None:
        super().__init__(metric="training_iteration", mode="max")
        self._trials = trials

    def suggest(self, trial_id: str) -> Any:
        following = self._trials.next(trial_id)
        if following is Wait.over:
            return Searcher.FINISHED
        return None if following is Wait.later else {"turn": following}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        self._trials.reported(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        if result is not None:
            self._trials.reported(trial_id, result)
        if not error:  # Else `on_trial_error` finds out why next, if the trial has not reported an ending.
            self._trials.completed(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the database is the searcher's state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the database is the searcher's state."""


class InOrder(FIFOScheduler):  # type: ignore[misc, unused-ignore]
    """Starts trials in the order of their turns, and stops those whose run is no longer wanted."""

    def __init__(self, trials: Trials) -> None:
        super().__init__()
        self._trials = trials

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        # A copy: Tune gives its own set, from which `stop_trial` discards.
        for trial in tuple(tune_controller.get_live_trials()):
            if trial.status == "PENDING" and not self._trials.sweep.wanted(trial.config["turn"]):
                tune_controller.stop_trial(trial)
        return super().choose_trial_to_run(tune_controller)
