"""One Ray Tune sweep over the runs of an experiment: Tune asks, `Sweep` answers.

A custom searcher hands out runs from the store's queue, so that retries, delays, budgets, pause
and the runs that people queue again are all one thing: the queue changed. Tune places trials,
reuses their processes and tells when one ends.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from service.cluster import ClusterNode, ClusterSnapshot
from service.execution.assignment import Assignment, Ending
from service.execution.exchange import ExchangeClient
from service.execution.run_plan import Shape
from service.execution.sweep import Sweep, Wait
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
_SLOT = 0.0001
"""Share of a node's own resource that the trial of a worker group takes: Ray's smallest amount."""


Kept = TypeVar("Kept")


class OnlyHere(Generic[Kept]):
    """A reference that stays in this process: Tune saves copies of what it is given, for a restart
    that never happens here, and those hold nothing.

    Args:
        value: what is kept.
    """

    def __init__(self, value: Kept) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return OnlyHere, (None,)

    def __deepcopy__(self, memo: object) -> OnlyHere[Kept]:
        return self


def run_sweep(
    sweep: Sweep,
    exchange: ExchangeClient,
    *,
    folder: Path,
    name: str,
    reuse: bool,
    give_up: Callable[[], bool],
) -> None:
    """Run until the sweep hands out nothing more and every trial has ended.

    Args:
        sweep: what to run.
        exchange: the experiment's exchange.
        folder: for Tune's and Train's own files.
        name: unique among all sweeps in the folder.
        reuse: whether runs of one shape may use the same process in turn.
        give_up: asked between steps; True ends all trials at once.
    """
    os.environ.update(_ENVIRONMENT)
    from ray import tune

    node_resource = _own_node_resource()
    slots: dict[Shape, int] = {}

    def resources(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        shape: Shape = config["assignment"].shape
        if shape.workers == 1:
            selector = {"bundle_label_selector": [dict(shape.labels)]} if shape.labels else {}
            return tune.PlacementGroupFactory([dict(shape.resources)], **selector)
        # The workers reserve what they use. The trial itself takes nothing that counts: 2 workers
        # on 2 CPUs leave not even 0.01 of one. Each shape takes its own amount, because Tune
        # reuses a process for equal amounts: the open group in it then has the right shape, and
        # Tune ends it when a trial of another shape needs its place.
        slot = slots.setdefault(shape, len(slots) + 1)
        return tune.PlacementGroupFactory([{node_resource: _SLOT * slot}])

    searcher = _searcher(OnlyHere(sweep))
    trainable = tune.with_parameters(
        _trial(), exchange=exchange, storage=str(folder / "train"), names=f"stillhouse-{name}"
    )
    tune.Tuner(
        tune.with_resources(trainable, resources),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
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
            callbacks=[searcher.errors],
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    ).fit()


def look_at_cluster() -> ClusterSnapshot:
    """The nodes of the cluster that this process is connected to."""
    import ray

    nodes = tuple(
        ClusterNode(
            id=node["NodeID"],
            name=node["NodeManagerHostname"],
            alive=node["Alive"],
            resources=dict(node["Resources"]),
            available={},
            labels=dict(node["Labels"]),
        )
        for node in ray.nodes()
    )
    return ClusterSnapshot(time.time(), True, None, nodes)


def _own_node_resource() -> str:
    import ray

    own = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == own:
            for name in node["Resources"]:
                if name.startswith("node:") and not name.startswith("node:__"):
                    return str(name)
    raise RuntimeError("the driver's own node has no resource named after it")


def _trial() -> Callable[..., None]:
    from service.execution.trial import trial

    return trial


def _failure_of(trial: Any) -> tuple[FailureClass, str]:
    """Why a trial ended that has reported no ending, from the error that Tune has kept in a file."""
    from ray import cloudpickle

    from service.execution.training import failure_of

    path = trial.pickled_error_file
    if path is None or not Path(path).exists():
        return FailureClass.infrastructure, "the worker process ended without a word"
    return failure_of(cloudpickle.loads(Path(path).read_bytes()))


def _name_of(trial: Any) -> str:
    assignment: Assignment = trial.config["assignment"]
    return f"run-{assignment.run_id}-{assignment.attempt}"


def _stopper(give_up: OnlyHere[Callable[[], bool]]) -> Any:
    from ray.tune.stopper import Stopper

    class GiveUp(Stopper):  # type: ignore[misc, unused-ignore]
        """Ends the whole sweep when it is told to."""

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return give_up.value()

    return GiveUp()


def _searcher(sweep: OnlyHere[Sweep]) -> Any:
    """Built here, because its base classes come with Ray."""
    from ray.tune import Callback
    from ray.tune.search import Searcher

    class Errors(Callback):  # type: ignore[misc, unused-ignore]
        """Hears of trials that ended and could not say how."""

        def __init__(self, given: dict[str, Assignment]) -> None:
            self.given = given

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            assignment = self.given.pop(trial.trial_id, None)
            if assignment is not None:
                sweep.value.ended(assignment, Ending("failed", failure=_failure_of(trial)))

        def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
            """Tune gives up a trial whose process it cannot reuse without telling the searcher."""
            missing = len(self.given)
            for trial in reversed(trials):
                if not missing:
                    return
                if trial.trial_id in self.given:
                    missing -= 1
                    if trial.status == "ERROR":
                        self.on_trial_error(iteration, trials, trial)

    class QueuedRuns(Searcher):  # type: ignore[misc, unused-ignore]
        """Suggests the next queued run."""

        def __init__(self) -> None:
            super().__init__(metric="training_iteration", mode="max")
            self.given: dict[str, Assignment] = {}
            self.errors = Errors(self.given)

        def suggest(self, trial_id: str) -> Any:
            following = sweep.value.next_assignment()
            if following is Wait.over:
                return Searcher.FINISHED
            if isinstance(following, Wait):
                return None
            self.given[trial_id] = following
            return {"assignment": following}

        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            ending = result.get("ending")
            if isinstance(ending, Ending) and trial_id in self.given:
                sweep.value.ended(self.given.pop(trial_id), ending)

        def on_trial_complete(
            self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
        ) -> None:
            if result is not None:
                self.on_trial_result(trial_id, result)
            # Without an ending, `Errors` hears next why.

        def save(self, checkpoint_path: str) -> None:
            """Nothing: the database is the searcher's state."""

        def restore(self, checkpoint_path: str) -> None:
            """Nothing: the database is the searcher's state."""

    return QueuedRuns()
