"""One Ray Tune sweep over the runs of an experiment.

A custom searcher hands out runs from the store's queue, so that retries, delays, budgets, pauses and requeued
runs are all the same to it: the queue changed. Tune places trials, reuses their processes and reports their
end.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from service.driving.choosing import Wait
from service.driving.sweep import Sweep
from service.recording.experiment_actor import ExperimentActorClient
from service.recording.mailbox import Assignment, Ending, Grant, Ready, Turn
from service.scheduling.run_plan import Shape
from service.workers.ray_cluster import PlacementWatch, own_node_resource
from service.workers.trial import run_trial
from service.workers.worker_attempt import failure_of
from trainers.errors import FailureClass

if TYPE_CHECKING:
    from ray import tune

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_SYNCER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # The database is what an experiment is resumed from.
    "TUNE_MAX_PENDING_TRIALS_PG": "8",
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000",  # `Sweep` says it before.
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
REMIND_S = 1.0
"""How often grants are repeated, and how often it is stored what runs wait for."""
STORED_S = 60.0
"""Longest wait, at the end of an attempt and before another, for points that are on the recorder's disk."""
_SLOT = 0.0001
"""Share of a node's own resource that the trial of a worker group takes: Ray's smallest amount."""


Kept = TypeVar("Kept")


class OnlyHere(Generic[Kept]):
    """A reference that stays in this process.

    Tune saves copies of its arguments for a restart that never happens here; the copies hold None.
    """

    def __init__(self, value: Kept) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return OnlyHere, (None,)

    def __deepcopy__(self, memo: object) -> OnlyHere[Kept]:
        return self


def run_sweep(
    sweep: Sweep,
    actor: ExperimentActorClient,
    watch: PlacementWatch,
    *,
    folder: Path,
    name: str,
    reuse: bool,
    give_up: Callable[[], bool],
) -> None:
    """Runs until the sweep gives no more turns and every trial has ended.

    Args:
        folder: for Tune's and Train's own files.
        name: unique among all sweeps in the folder.
        reuse: whether runs of one shape may use the same process in turn.
        give_up: polled between steps; True ends all trials at once.
    """
    os.environ.update(_ENVIRONMENT)
    from ray import tune

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

    searcher = _searcher(OnlyHere(sweep), OnlyHere(actor), OnlyHere(watch))
    trainable = tune.with_parameters(
        run_trial, actor=actor, storage=str(folder / "train"), names=f"stillhouse-{name}"
    )
    tune.Tuner(
        tune.with_resources(trainable, resources),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=_in_order(OnlyHere(sweep)),
            num_samples=-1,
            reuse_actors=reuse,
            trial_name_creator=_name_of,
            trial_dirname_creator=_name_of,
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(folder / "tune"),
            verbose=0,
            stop=_stopper(OnlyHere(give_up)),
            callbacks=[searcher.steps],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    ).fit()


def _failure_of(trial: Any) -> tuple[FailureClass, str]:
    """Returns why a trial without an ending failed, from the error file that Tune keeps."""
    from ray import cloudpickle

    path = trial.pickled_error_file
    if path is None or not Path(path).exists():
        return FailureClass.infrastructure, "the worker exited without reporting an error"
    return failure_of(cloudpickle.loads(Path(path).read_bytes()))


def _name_of(trial: Any) -> str:
    turn: Turn = trial.config["turn"]
    return turn.name


def _stopper(give_up: OnlyHere[Callable[[], bool]]) -> Any:
    from ray.tune.stopper import Stopper

    class GiveUp(Stopper):  # type: ignore[misc, unused-ignore]
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return give_up.value()

    return GiveUp()


def _keep_idle_process(tune_controller: Any, keep: bool) -> None:
    """Sets whether Tune keeps one idle process, and its devices, for a trial that may follow.

    Tune has no public way to say so; a test holds its cache to these names.
    """
    tune_controller._tune_controller._actor_cache._may_keep_one = keep


def _in_order(sweep: OnlyHere[Sweep]) -> Any:
    from ray.tune.schedulers import FIFOScheduler

    class InOrder(FIFOScheduler):  # type: ignore[misc, unused-ignore]
        """Starts trials in the order of their turns, and stops those whose run is no longer wanted."""

        def choose_trial_to_run(self, tune_controller: Any) -> Any:
            _keep_idle_process(tune_controller, sweep.value.may_start_more)
            # A copy: Tune gives its own set, from which `stop_trial` discards.
            for trial in tuple(tune_controller.get_live_trials()):
                if trial.status == "PENDING" and not sweep.value.wanted(trial.config["turn"]):
                    tune_controller.stop_trial(trial)
            return super().choose_trial_to_run(tune_controller)

    return InOrder()


def _searcher(
    sweep: OnlyHere[Sweep], actor: OnlyHere[ExperimentActorClient], watch: OnlyHere[PlacementWatch]
) -> Any:
    """Built here, because its base classes come with Ray."""
    from ray.exceptions import RayError
    from ray.tune import Callback
    from ray.tune.search import Searcher

    def wait_for_points(turn: Turn, then: str, *, shut_out: bool = False) -> None:
        """Waits until acknowledged points are stored: the run's next attempt would keep out spooled ones."""
        try:
            if shut_out:
                actor.value.shut_out(turn.run_id, turn.attempt)
            waiting = actor.value.wait_until_stored(STORED_S)
        except RayError as error:
            waiting = f"the experiment's actor does not respond: {error}"
        if waiting is not None:
            logger.warning("run %d %s before all its points are stored: %s", turn.run_id, then, waiting)

    def end(turn: Turn, ending: Ending) -> None:
        # The processes of an attempt that failed may live on for a moment, and report.
        wait_for_points(turn, "ends", shut_out=ending.failure is not None)
        sweep.value.ended(turn, ending)

    def opened(turn: Turn, ready: Ready) -> Assignment | None:
        if turn.attempt > 1:
            wait_for_points(turn, "starts again")
        return sweep.value.open(turn, ready)

    class Steps(Callback):  # type: ignore[misc, unused-ignore]
        """Ends failed trials that could not report an ending, and repeats grants, between Tune's steps.

        Args:
            given: turns that have not ended, by trial.
            grants: answers to trials that are ready, by name.
        """

        def __init__(self, given: dict[str, Turn], grants: dict[str, Grant]) -> None:
            self.given, self.grants = given, grants
            self.reminded_s = 0.0

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            turn = self.given.pop(trial.trial_id, None)
            if turn is not None:
                self.grants.pop(turn.name, None)
                end(turn, Ending("failed", failure=_failure_of(trial)))

        def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
            """Ends trials that Tune gave up without telling the searcher: their process was not reusable."""
            missing = len(self.given)
            for trial in reversed(trials):
                if not missing:
                    break
                if trial.trial_id in self.given:
                    missing -= 1
                    if trial.status == "ERROR":
                        self.on_trial_error(iteration, trials, trial)
            if time.monotonic() - self.reminded_s >= REMIND_S:
                self.remind()
                sweep.value.tell_waiting(watch.value.starting())

        def remind(self) -> None:
            """Repeats all grants: a restarted actor has none."""
            self.reminded_s = time.monotonic()
            try:
                actor.value.grant(self.grants)
            except RayError as error:
                logger.warning("the experiment's actor does not respond; resending grants: %s", error)

    class QueuedRuns(Searcher):  # type: ignore[misc, unused-ignore]
        """Suggests the run whose turn is next, and opens its attempt when its workers are ready."""

        def __init__(self) -> None:
            super().__init__(metric="training_iteration", mode="max")
            self.given: dict[str, Turn] = {}
            self.grants: dict[str, Grant] = {}
            self.steps = Steps(self.given, self.grants)

        def suggest(self, trial_id: str) -> Any:
            following = sweep.value.next_turn()
            if following is Wait.over:
                return Searcher.FINISHED
            if isinstance(following, Wait):
                return None
            self.given[trial_id] = following
            return {"turn": following}

        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            turn = self.given.get(trial_id)
            if turn is None:
                return
            if isinstance(ready := result.get("ready"), Ready) and turn.name not in self.grants:
                watch.value.ready(ready)
                self.grants[turn.name] = Grant(opened(turn, ready))
                self.steps.remind()
            if isinstance(ending := result.get("ending"), Ending):
                self.forget(trial_id)
                end(turn, ending)

        def on_trial_complete(
            self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
        ) -> None:
            if result is not None:
                self.on_trial_result(trial_id, result)
            if not error and (turn := self.forget(trial_id)) is not None:
                sweep.value.drop(turn)
            # After an error without an ending, `Steps` finds out why next.

        def forget(self, trial_id: str) -> Turn | None:
            turn = self.given.pop(trial_id, None)
            if turn is not None:
                self.grants.pop(turn.name, None)
            return turn

        def save(self, checkpoint_path: str) -> None:
            """Nothing: the database is the searcher's state."""

        def restore(self, checkpoint_path: str) -> None:
            """Nothing: the database is the searcher's state."""

    return QueuedRuns()
