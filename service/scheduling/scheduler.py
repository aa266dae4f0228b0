"""The scheduler: claims experiments from the queue and keeps the Ray Jobs alive that carry their drivers.

All that a scheduler must remember is in the database: the claim commits the attempt and the job's submission
id before anything is submitted, so whichever scheduler comes next finds the same job. How long a driver has
been silent is in the experiment's row, by the database's clock, so that all schedulers agree on it. In memory
is only when to look at Ray again. docs/states.md has what a pass does in each case.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.config import logs
from service.config.logs import about
from service.config.process import freeze_loaded
from service.config.settings import Settings
from service.domain.events import EventKind
from service.domain.process_metrics import MetricBuffer
from service.domain.records import Experiment
from service.domain.states import ExperimentState, FailureCounts, decide_retry
from service.notifications.courier import Courier
from service.scheduling import driver_settings
from service.scheduling.cluster import ClusterSnapshot
from service.scheduling.fair_pass import FairPass
from service.scheduling.node_groups import NodeStarts
from service.scheduling.queue import Lease, Queue
from service.scheduling.ray_jobs import DashboardRayJobs, JobRefused, RayJob, RayUnavailable, RayUnreachable
from service.scheduling.upkeep import Upkeep
from service.store import Conflict, StaleAttempt, Store, StoreError, StoreOutage
from trainers.errors import FailureClass

logger = logging.getLogger(__name__)

PASS_EVERY_S = 0.5  # Pause between passes while all is well
LONGEST_PAUSE_S = 5.0  # Pause between passes while Ray or the database is unavailable; reached by doubling
LONGEST_WAIT_S = 15.0  # Longest pause before Ray, unavailable for one experiment, is asked about it again
CLUSTER_EVERY_S = 5.0  # How often the cluster is looked at; in each pass while Ray is unavailable
START_PATIENCE_S = 600.0  # How long Ray may take from a job's submission to its driver's first word
FIGURES_EVERY_S = 5.0  # How often figures for `/metrics` are stored
HOSTS = "stillhouse-drivers-"  # Begins the names of Ray jobs that carry the drivers of several experiments
LOOK_EVERY_S = 2.0  # How often the job of an experiment with a valid lease is looked at


@dataclass(slots=True)
class Pass:
    """What one pass did, as ids of experiments."""

    claimed: tuple[int, ...] = ()
    submitted: tuple[int, ...] = ()
    adopted: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()  # Whose attempt ended: they are queued again, or failed
    ray_away: bool = False  # Ray did not answer, or was unavailable


class Scheduler:
    """One scheduler of one pool; several may share a database and a pool.

    `name` is unique among living schedulers; `python` runs the driver on the cluster.
    """

    def __init__(
        self,
        store: Store,
        queue: Queue,
        jobs: DashboardRayJobs,
        settings: Settings,
        *,
        name: str | None = None,
        python: str = sys.executable,
    ) -> None:
        self._store = store
        self._queue = queue
        self._jobs = jobs
        self._settings = settings
        self._python = python
        self._node = socket.gethostname()
        self.name = name or f"scheduler@{self._node}:{os.getpid()}"
        self._monotonic = store.monotonic
        self._looks: dict[tuple[int, int], _NextLook] = {}
        self._hosts: dict[str, int] = {}  # Drivers by host, of those that this scheduler has started
        self._hung: set[str] = set()  # Hosts that did not start a driver
        self._fair_pass = FairPass(store, queue.pool)
        self._cluster_s = float("-inf")
        self._cluster: ClusterSnapshot | None = None
        groups = settings.node_groups().get(queue.pool, {})
        self._starts = NodeStarts(groups, settings.catalogue(), queue.cluster(), store.monotonic)
        self._heartbeat_s = float("-inf")
        self._figures_s = float("-inf")
        self.figures = MetricBuffer()  # What this scheduler measures, until it is stored
        store.database.observe_write = functools.partial(
            self.figures.observe, "stillhouse_commit_seconds", process="scheduler"
        )

    def run(self, stop: threading.Event) -> None:
        """Makes passes until `stop` is set, less often while Ray or the database is unavailable."""
        failures = 0
        logger.info("%s started for pool %s", self.name, self._queue.pool)
        while not stop.is_set():
            away = False
            try:
                away = self.run_once().ray_away
            except StoreOutage as error:
                away = True
                logger.warning("the database is unavailable: %s", error)
            failures = failures + 1 if away else 0
            stop.wait(min(LONGEST_PAUSE_S, PASS_EVERY_S * 2.0 ** min(failures, 10)))
        try:
            self._store_figures()
            self._store.process_metrics.drop_gauges(self.name)
            self._queue.leave(self.name)
        except StoreOutage as error:
            logger.warning("could not sign off; the lease will expire instead: %s", error)
        logger.info("%s stopped; running experiments continue, and the next scheduler adopts them", self.name)

    def run_once(self) -> Pass:
        """Makes one pass and returns what it did; after a `StoreOutage` nothing is lost, call again."""
        started_s, now = time.perf_counter(), self._monotonic()
        if now - self._heartbeat_s >= self._settings.lease_s / 6:
            self._queue.heartbeat(self.name, node=self._node, pid=os.getpid())
            self._heartbeat_s = now
        if self._cluster is None or now - self._cluster_s >= CLUSTER_EVERY_S:
            snapshot = self._starts.look(self._jobs.cluster(self._store.clock()))
            self._queue.put_cluster(snapshot)
            self._cluster_s, self._cluster = now, snapshot if snapshot.reachable else None
            self.figures.gauge("stillhouse_ray_up", float(snapshot.reachable), pool=self._queue.pool)
        did = Pass()
        leases = self._queue.leases()
        current = {_key(lease.experiment) for lease in leases}
        self._looks = {key: look for key, look in self._looks.items() if key in current}
        drivers = Counter(lease.submission_id for lease in leases if lease.submission_id.startswith(HOSTS))
        self._hosts = {name: drivers[name] for name in self._hosts}
        try:
            self._look_at_jobs(leases, now, did)
            if self._cluster is None:
                raise RayUnreachable("Ray is unreachable; nothing is claimed until it is back")
            active = [lease.experiment for lease in leases if lease.experiment.id not in did.ended]
            places = self._settings.max_concurrent_experiments - len(active)
            chosen = self._fair_pass.divide(self._cluster, active, places)
            self._starts.want(self._fair_pass.lacking)
            self._claim(chosen, now, did)
        except RayUnreachable as error:
            logger.warning("%s", error)
            did.ray_away = True
        for (project, unit), left in self._fair_pass.budgets_left.items():
            self.figures.gauge("stillhouse_budget_left_ratio", left, project=project, unit=unit)
        self.figures.observe("stillhouse_scheduler_pass_seconds", time.perf_counter() - started_s)
        if now - self._figures_s >= FIGURES_EVERY_S:
            for project, ratio in self._fair_pass.share_errors().items():
                self.figures.gauge("stillhouse_share_error_ratio", ratio, project=project)
            self._store_figures()
            self._figures_s = now
        return did

    def _store_figures(self) -> None:
        rows = self.figures.taken()
        try:
            self._store.process_metrics.add(rows, source=self.name)
        except StoreError:
            self.figures.put_back(rows)
            raise

    def _look_at_jobs(self, leases: Sequence[Lease], now: float, did: Pass) -> None:
        due = [lease for lease in leases if self._is_due(lease, now)]
        try:
            # After the leases were read: a job of theirs that is missing now was never submitted, or is lost.
            jobs = self._jobs.known(list({lease.submission_id for lease in due if not lease.withdrawn}))
        except RayUnavailable as error:
            for lease in due:
                self._wait(lease.experiment, error, now, did)
            return
        # At the same times for all, so that one call is for all.
        following = _NextLook((now // LOOK_EVERY_S + 1.0) * LOOK_EVERY_S)
        for lease in due:
            try:
                with about(experiment=lease.experiment.id, experiment_attempt=lease.experiment.attempt):
                    self._look_after(lease, jobs.get(lease.submission_id), did)
                self._looks[_key(lease.experiment)] = following
            except RayUnavailable as error:
                self._wait(lease.experiment, error, now, did)

    def _is_due(self, lease: Lease, now: float) -> bool:
        following = self._looks.get(_key(lease.experiment), _NextLook(now))
        return now >= following.at_s or (not following.pause_s and (lease.lapsed or lease.withdrawn))

    def _wait(self, experiment: Experiment, error: RayUnavailable, now: float, did: Pass) -> None:
        """Asks Ray again later, for this experiment alone: what it cannot do for one it may do for others."""
        did.ray_away = True
        key = _key(experiment)
        before_s = self._looks[key].pause_s if key in self._looks else 0.0
        pause_s = min(LONGEST_WAIT_S, 2 * before_s) or PASS_EVERY_S
        self._looks[key] = _NextLook(now + pause_s, pause_s)
        logger.warning("%s: %s; asking again in %g s", experiment.submission_id, error, pause_s)
        if not before_s:
            try:
                self._store.drivers.note(
                    experiment.id, experiment.attempt, f"Ray is unavailable, trying again: {error}"
                )
            except StaleAttempt:
                return  # The driver ended it in order.

    def _claim(self, chosen: list[int], now: float, did: Pass) -> None:
        limit = self._settings.max_concurrent_experiments
        while chosen:
            # One at a time: what is claimed is submitted before the next is taken, so that a
            # cluster that goes away holds up one experiment and not all.
            started_s = time.perf_counter()
            host = self._host()
            claimed = self._queue.claim(
                self.name, lease_s=self._settings.lease_s, limit=1, max_active=limit, job=host, among=chosen
            )
            if not claimed:
                return
            (experiment,) = claimed
            if host is not None:
                self._hosts[host] = self._hosts.get(host, 0) + 1
            self.figures.observe("stillhouse_claim_seconds", time.perf_counter() - started_s)
            waited_s = max(0.0, self._store.clock() - max(experiment.queued_s, experiment.not_before_s))
            self.figures.observe("stillhouse_queue_wait_seconds", waited_s, project=experiment.project)
            did.claimed += (experiment.id,)
            chosen = chosen[chosen.index(experiment.id) + 1 :]
            try:
                with about(experiment=experiment.id, experiment_attempt=experiment.attempt):
                    self._submit(experiment, did)
            except RayUnavailable as error:
                self._wait(experiment, error, now, did)
                return

    def _submit(self, experiment: Experiment, did: Pass) -> None:
        job = experiment.submission_id
        assert job is not None
        if job.startswith(HOSTS):
            command = ["-m", "service.driving.host", "--name", job]
            metadata = {"job_name": "drivers"}
        else:
            ids = ("--experiment", str(experiment.id), "--attempt", str(experiment.attempt))
            command = ["-m", "service.driving.driver", *ids, "--name", experiment.name]
            metadata = {
                "job_name": experiment.name,
                "owner": experiment.owner,
                "experiment": str(experiment.id),
                "attempt": str(experiment.attempt),
            }
        try:
            if self._jobs.status(job) is None:  # A host's is known from its first driver on.
                token = self._jobs.hand_over(driver_settings.document(self._settings))
                entrypoint = shlex.join([self._python, *command, "--settings", token])
                self._jobs.submit(job, entrypoint, metadata=metadata)
        except JobRefused as error:
            self._end(experiment, f"Ray refused the job: {error}", did)
            return
        except ValueError as error:  # What the data folder declares was changed, and is wrong now.
            self._end(experiment, str(error), did)
            return
        did.submitted += (experiment.id,)
        logger.info("submitted experiment %d (%s) to %s", experiment.id, experiment.name, job)

    def _host(self) -> str | None:
        """Returns the Ray job whose process forks the next driver; None = the driver gets a job of its own.

        Full hosts come first, so that the others have a chance to end. Those of other schedulers get no more:
        they may have been started by another release, or with other settings.
        """
        most = self._settings.drivers_per_host
        if most == 1:
            return None
        for name in sorted(self._hosts.keys() - self._hung, key=self._hosts.__getitem__, reverse=True):
            if self._hosts[name] < most:
                job = self._jobs.status(name)
                if job is not None and not job.state.ended:
                    return name
                del self._hosts[name]
        return f"{HOSTS}{uuid.uuid4().hex[:8]}"

    def _look_after(self, lease: Lease, job: RayJob | None, did: Pass) -> None:
        experiment, lapsed = lease.experiment, lease.lapsed
        if lease.withdrawn:
            self._stop(experiment, did)  # Its scheduler died, or Ray was away.
        elif job is None and experiment.state is ExperimentState.starting:
            # Claimed, and never submitted: the scheduler that claimed it died, or Ray was away.
            if not lapsed and experiment.lease_owner != self.name:
                return  # Its scheduler is about to do so.
            if not lapsed or self._adopt(experiment, did, driver_is_silent=False):
                self._submit(experiment, did)
        elif job is None:
            self._end(experiment, "Ray no longer knows this job: its head was restarted", did)
        elif job.state.ended:
            said = f": {job.message}" if job.message else ""
            self._end(experiment, f"the driver ended without a result (job {job.state}{said})", did)
        elif lapsed:
            self._silent(lease, did)

    def _silent(self, lease: Lease, did: Pass) -> None:
        """Handles a job whose driver does not renew the lease: it hangs, or is only slow."""
        experiment = lease.experiment
        # Where no driver has ever spoken, Ray waits for a node, or the node is slow to start it.
        patience_s = START_PATIENCE_S if experiment.state is ExperimentState.starting else 0.0
        if lease.silent_s is None:
            self.figures.count("stillhouse_lease_lapses_total")
        if lease.silent_s is None or lease.silent_s < patience_s:
            self._adopt(experiment, did, driver_is_silent=True)
        elif self._queue.withdraw(experiment.id, experiment.attempt):
            # From here on it cannot renew its lease, so that no healthy driver is stopped.
            logger.warning("%s: no heartbeat for two leases; stopping it", experiment.submission_id)
            self._stop(experiment, did)

    def _stop(self, experiment: Experiment, did: Pass) -> None:
        """Ends the job of an experiment whose lease was withdrawn, then its attempt.

        A host ends the driver itself, once the attempt has ended: its other drivers are well.
        """
        job = experiment.submission_id
        assert job is not None
        if not job.startswith(HOSTS):
            self._jobs.stop(job)
        elif experiment.state is ExperimentState.starting:
            self._hung.add(job)
        did.stopped += (experiment.id,)
        self.figures.count("stillhouse_silent_drivers_stopped_total")
        self._end(experiment, "the driver sent no heartbeat for two leases and was stopped", did)

    def _adopt(self, experiment: Experiment, did: Pass, *, driver_is_silent: bool) -> bool:
        adopted = self._queue.adopt(
            experiment.id,
            experiment.attempt,
            self.name,
            self._settings.lease_s,
            driver_is_silent=driver_is_silent,
        )
        if adopted:
            did.adopted += (experiment.id,)
            self.figures.count("stillhouse_adoptions_total")
            logger.info("adopted %s", experiment.submission_id)
        return adopted

    def _end(self, experiment: Experiment, why: str, did: Pass) -> None:
        """Ends an attempt: the experiment is queued again, or fails when it was tried too often."""
        if end_lost_attempt(self._store, experiment, why):
            did.ended += (experiment.id,)


def end_lost_attempt(store: Store, experiment: Experiment, why: str) -> bool:
    """Queues an experiment again or fails it; False = its driver has ended it in order."""
    decision = decide_retry(
        FailureClass.infrastructure,
        FailureCounts(own=0, infrastructure=1 + lost_attempts(store, experiment.id)),
        max_restarts=0,
        progressed=False,
    )
    failure = (FailureClass.infrastructure, why)
    try:
        if decision.retry:
            store.drivers.release_experiment(
                experiment.id, experiment.attempt, delay_s=decision.delay_s, failure=failure
            )
        else:
            failure = FailureClass.infrastructure, f"{why}; {decision.reason}"
            store.drivers.finish_experiment(
                experiment.id, experiment.attempt, ExperimentState.failed, failure=failure
            )
    except (StaleAttempt, Conflict):
        return False
    logger.warning("experiment %d, attempt %d: %s", experiment.id, experiment.attempt, why)
    return True


def lost_attempts(store: Store, experiment_id: int) -> int:
    """Returns the attempts at an experiment that were lost since people last started it."""
    lost = after = 0
    while events := store.experiments.events(experiment_id, after=after):
        for event in events:
            if event.kind in (EventKind.experiment_retried, EventKind.experiment_resumed):
                lost = 0
            elif event.kind == EventKind.experiment_released:
                lost += 1
        after = events[-1].number
    return lost


def _key(experiment: Experiment) -> tuple[int, int]:
    return experiment.id, experiment.attempt


@dataclass(frozen=True, slots=True)
class _NextLook:
    """When Ray is asked about an experiment again, unless its lease lapses before."""

    at_s: float  # Monotonic
    pause_s: float = 0.0  # Ray was unavailable for it, and is left alone so long; 0 = it was not


def main(
    settings: Settings, beside: Sequence[Callable[[Store], Callable[[threading.Event], None]]] = ()
) -> None:
    """Runs a scheduler until SIGTERM or SIGINT; the process' first function after reading settings.

    `beside` makes what else runs in this process, each in a thread of its own. Raises `UnusableDatabase`.
    """
    logs.set_up("scheduler", settings.log_format)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    store = Store.open(settings)
    freeze_loaded()
    queue = Queue(store, settings.pool)
    scheduler = Scheduler(store, queue, DashboardRayJobs(settings.ray_dashboard_url), settings)
    threads = [
        threading.Thread(target=run, args=(stop,), name=name)
        for name, run in (
            ("upkeep", Upkeep(store, settings).run),
            # Of its own: receivers that answer slowly must not hold up what is removed.
            ("courier", Courier(store, settings, scheduler.figures).run),
            *((f"beside-{number}", make(store)) for number, make in enumerate(beside)),
        )
    ]
    for thread in threads:
        thread.start()
    try:
        scheduler.run(stop)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        store.close()
