"""The driver of one attempt at an experiment: the process of its Ray Job.

    python -m service.driving.driver --experiment 7 --attempt 1 --settings TOKEN --name NAME

It renews the lease, reads people's requests, and runs the sweep in its main thread, again if people ask for
more while it ends. It may die at any time: the next driver finds everything in the database.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil

from service.config import logs
from service.config.process import freeze_loaded
from service.config.settings import Settings
from service.domain.events import EventKind
from service.domain.shares import DeviceAllowance
from service.domain.states import ExperimentState, FailureCounts, decide_retry
from service.driving.pruning import EarlyStops
from service.driving.sweep import Sweep
from service.driving.sweep_context import SweepContext
from service.recording.outages import Repeated, wait_out
from service.recording.recorder import STALE_EXIT_CODE, Recorder
from service.recording.relay import RelayClient, RelayedReports
from service.recording.spool import spool_folder
from service.scheduling import driver_settings
from service.scheduling.scheduler import lost_attempts
from service.specs.experiment import read_stored
from service.specs.models import experiment_folder
from service.store import Conflict, Requests, StaleAttempt, Store
from service.workers.neighbour_watch import MARK, mark_of
from service.workers.ray_cluster import (
    PlacementWatch,
    look_at_cluster,
    look_at_placements,
    node_answers,
)
from trainers.errors import FailureClass
from trainers.reporting import StopReason

logger = logging.getLogger(__name__)

BEAT_S = 0.7  # How often people's requests are read
HEED_S = 0.5  # How often runs are stopped beyond the allowance, or on nodes that go
RENEWALS = 3  # How often the lease is renewed within its length
JUDGE_S = 1.0  # How often running runs are looked at by a search that ends some early
GRACE_S = 30.0  # How long runs may take to stop at a step boundary before their processes are ended
_CATCH_UP_S = 3600.0
"""How long the driver waits for points that its node's disk holds, once the database takes its own writes."""
_TELL_S = 60.0  # How long it waits before it writes an event about that


class StopRequests:
    """Current requests of people, the search and the scheduler to stop runs; thread-safe.

    `send` takes a reason to stop all runs, and reasons by (run, attempt number).
    """

    def __init__(
        self, send: Callable[[StopReason | None, Mapping[tuple[int, int], StopReason]], None]
    ) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._everything: StopReason | None = None
        self._attempts: dict[StopReason, frozenset[tuple[int, int]]] = {}

    def ask(self, everything: StopReason | None, cancelled: Iterable[tuple[int, int]]) -> None:
        """Replaces people's requests: a reason to stop all runs, and attempts to cancel."""
        with self._lock:
            self._everything = everything
            self._replace(StopReason.cancel, cancelled)

    def stop_early(self, attempts: Iterable[tuple[int, int]]) -> None:
        with self._lock:
            self._replace(StopReason.early_stop, attempts)

    def preempt(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Replaces the attempts that give their devices back and continue later."""
        with self._lock:
            self._replace(StopReason.preempted, attempts)

    def _replace(self, reason: StopReason, attempts: Iterable[tuple[int, int]]) -> None:
        self._attempts[reason] = frozenset(attempts)
        weakest_first = StopReason.preempted, StopReason.early_stop, StopReason.cancel
        self._send(
            self._everything,
            {attempt: why for why in weakest_first for attempt in self._attempts.get(why, ())},
        )


def lease_renewal(
    renew: Callable[[], Requests],
    read: Callable[[], Requests],
    every_s: float,
    heard: Callable[[Requests], None],
    lost: Callable[[], None],
) -> Repeated:
    """Returns a thread that renews the lease, and passes on people's requests at every beat."""
    renewed_s = float("-inf")

    def beat() -> None:
        nonlocal renewed_s
        now = time.monotonic()
        if now - renewed_s >= every_s:
            requests = renew()
            renewed_s = now
        else:
            requests = read()
        heard(requests)

    # Training continues through an outage; whether the lease held is seen when the database is back.
    return Repeated(beat, BEAT_S, "lease renewal", on_stale=lost)


class Driver:
    def __init__(self, store: Store, settings: Settings, experiment_id: int, attempt: int) -> None:
        self._store = store
        self._settings = settings
        self._id = experiment_id
        self._attempt = attempt
        self._folder = experiment_folder(settings, experiment_id)
        self._recorder: Recorder
        self._reports: RelayedReports
        self._stops: StopRequests | None = None
        self._sweep: Sweep | None = None
        self._stopping_since_s: float | None = None
        self._allowances: Mapping[str, DeviceAllowance] = {}
        self._seen: tuple[object, object] | None = None

    def run(self) -> None:
        """Carries the attempt through to its end; after `StaleAttempt` nothing was written."""
        wait_out(
            lambda: self._store.drivers.started(self._id, self._attempt, socket.gethostname(), os.getpid()),
            "the start of the driver",
        )
        spools = spool_folder(self._settings, self._id)
        self._recorder = Recorder(self._store, spools, self._id, self._attempt)
        with self._renewal():
            relay, sweep = self._begin()
        stops = EarlyStops(self._store, self._id, sweep.spec, self._note)
        self._reports = RelayedReports(relay, self._recorder)
        with self._reports:
            for number in itertools.count(1):
                with self._renewal():
                    self._hear(wait_out(self._renew, "the sweep"))
                    self._heed()
                    sweep.recover()
                    self._carry_out(relay, sweep, stops, number)
                state = wait_out(sweep.conclude, "the end of the experiment")
                if state is not None:
                    break
            logger.info("experiment %d: %s", self._id, state)
            self._recorder.close()
        shutil.rmtree(self._folder / "ray", ignore_errors=True)

    def _begin(self) -> tuple[RelayClient, Sweep]:
        import ray

        # Ray Train's own actors look for the cluster by themselves, and give up on cleaning after
        # a group when the machine has two. The job's address says which is meant.
        address = os.environ.get("RAY_ADDRESS")
        variables = {MARK: mark_of(address or "", self._id)} | ({"RAY_ADDRESS": address} if address else {})
        ray.init(logging_level="warning", log_to_driver=True, runtime_env={"env_vars": variables})
        psutil.process_iter.cache_clear()  # Ray has looked at all processes of the head.
        _, canonical = wait_out(lambda: self._store.experiments.spec(self._id), "the sweep")
        relay = RelayClient.start()
        # Imports Ray Tune, which takes about as long as the relay does to start.
        importlib.import_module("service.driving.ray_tune")
        # What an earlier attempt has acknowledged must arrive before its runs get new attempts.
        self._wait_until_stored()
        wait_out(
            lambda: self._store.attempts.reset_runs_of_dead_attempt(self._id, self._attempt), "the sweep"
        )
        self._stops = StopRequests(self._recorder.request_stops)
        context = SweepContext(
            self._store,
            self._settings,
            self._id,
            self._attempt,
            read_stored(canonical),
            self._settings.catalogue(),
            self._note,
        )
        self._sweep = wait_out(lambda: Sweep(context, look_at_cluster, node_answers), "the sweep")
        return relay, self._sweep

    def _carry_out(self, relay: RelayClient, sweep: Sweep, early: EarlyStops, number: int) -> None:
        from service.driving.ray_tune import run_sweep

        assert self._stops is not None
        stops = self._stops
        watch = PlacementWatch(
            look_at_placements,
            lambda: sweep.pricing,
            lambda changed: self._store.drivers.record_placements(self._id, self._attempt, changed),
        )
        judging = Repeated(
            lambda: stops.stop_early(early.look({one.run_id: one.attempt for one in sweep.live})),
            JUDGE_S,
            "early stops",
        )
        # Apart from the lease, which must not wait for Ray.
        heeding = Repeated(self._heed, HEED_S, "nodes and allowances")
        with watch, heeding, judging if early.wanted else contextlib.nullcontext():
            run_sweep(
                sweep,
                self._recorder,
                relay,
                watch,
                folder=self._folder / "ray",
                name=f"{self._id}-{self._attempt}-{number}",
                reuse=sweep.spec.isolation == "shared",
                give_up=self._give_up,
            )
        # Points still on this disk when the experiment has ended would never be stored.
        self._wait_until_stored()

    def _renewal(self) -> Repeated:
        return lease_renewal(
            self._renew,
            lambda: self._store.drivers.requests(self._id, self._attempt),
            self._settings.lease_s / RENEWALS,
            self._hear,
            self._lost,
        )

    def _renew(self) -> Requests:
        return self._store.drivers.renew_lease(self._id, self._attempt, self._settings.lease_s)

    def _wait_until_stored(self) -> None:
        """Waits for this node's points; fails if the database accepts the driver's writes, but not these."""
        waiting = self._recorder.wait_until_stored(_TELL_S)
        if waiting is not None:
            self._note(f"points on the disk of {socket.gethostname()} are not stored yet: {waiting}")
            waiting = self._recorder.wait_until_stored(_CATCH_UP_S)
        if waiting is not None:
            raise TimeoutError(f"points could not be stored in the database: {waiting}")

    def _hear(self, requests: Requests) -> None:
        if self._stops is None or self._sweep is None:
            return  # The next beat brings them again.
        paused = StopReason.pause if requests.pause else None
        everything = StopReason.cancel if requests.cancel else paused
        self._sweep.stopping = everything
        if everything is None:
            self._stopping_since_s = None
        elif self._stopping_since_s is None:
            self._stopping_since_s = time.monotonic()
        self._allowances = requests.allowances
        self._stops.ask(everything, requests.cancel_attempts)

    def _heed(self) -> None:
        """Stops runs beyond the allowance, and those on nodes that are about to go.

        Nodes come after the allowances: where these fell because a node is gone, that is known by then.
        """
        assert self._stops is not None and self._sweep is not None
        seen = allowances, _ = self._allowances, self._reports.drains
        if seen != self._seen:
            self._sweep.see_nodes()
            self._seen = seen
        self._sweep.allow(allowances)
        self._stops.preempt(self._sweep.preempted)

    def _give_up(self) -> bool:
        """Whether runs are still active long after they were asked to stop."""
        return self._stopping_since_s is not None and time.monotonic() - self._stopping_since_s > GRACE_S

    def _lost(self) -> None:
        # Another attempt is current. Nothing of this one may write any more; its workers end with it.
        logger.error("attempt %d at experiment %d has ended; exiting", self._attempt, self._id)
        logging.shutdown()
        os._exit(STALE_EXIT_CODE)

    def _note(self, message: str, kind: EventKind = EventKind.experiment_note) -> None:
        logger.warning("%s", message)
        wait_out(lambda: self._store.drivers.note(self._id, self._attempt, message, kind=kind), "a note")


def end_failed_attempt(store: Store, experiment_id: int, attempt: int, error: Exception) -> None:
    """Queues the experiment again after an unforeseen error, or fails it."""
    message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    failure = (FailureClass.bug, message)
    spec = read_stored(store.experiments.spec(experiment_id)[1])
    decision = decide_retry(
        FailureClass.bug,
        FailureCounts(own=1 + lost_attempts(store, experiment_id), infrastructure=0),
        max_restarts=spec.max_restarts,
        progressed=False,
    )
    if decision.retry:
        store.drivers.release_experiment(experiment_id, attempt, delay_s=decision.delay_s, failure=failure)
    else:
        store.drivers.finish_experiment(experiment_id, attempt, ExperimentState.failed, failure=failure)


def main(arguments: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Returns 0 if the experiment was brought to an end, or belongs to another attempt.

    A host gives the settings, and has loaded all that a driver needs.
    """
    hosted = settings is not None
    parser = argparse.ArgumentParser(prog="python -m service.driving.driver", description=__doc__)
    parser.add_argument("--experiment", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--settings", metavar="TOKEN", help="to take them by; default: the environment's")
    parser.add_argument("--name", default="", help="of the experiment, visible in process listings")
    options = parser.parse_args(arguments)
    if settings is None:
        settings = driver_settings.take(options.settings) if options.settings else Settings()
    logs.set_up(
        "driver", settings.log_format, experiment=options.experiment, experiment_attempt=options.attempt
    )
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    store = wait_out(lambda: Store.open(settings, pool_size=1), "the driver")
    if not hosted:
        freeze_loaded()
    try:
        Driver(store, settings, options.experiment, options.attempt).run()
    except StaleAttempt as error:
        logger.error("%s", error)
    except Exception as error:
        logger.exception("the driver failed")
        failed = error
        try:
            wait_out(
                lambda: end_failed_attempt(store, options.experiment, options.attempt, failed),
                "the driver's failure",
            )
        except (StaleAttempt, Conflict) as ended:
            logger.error("%s", ended)
        return 1
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
