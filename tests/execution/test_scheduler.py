"""The scheduler against a real SQLite store and jobs in memory: who dies when, and what follows."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from service.config.settings import Settings
from service.domain.events import EventKind
from service.domain.process_metrics import Histogram, series_of
from service.domain.records import Experiment
from service.domain.states import INFRASTRUCTURE_LIMIT, ExperimentState
from service.scheduling import driver_settings
from service.scheduling.queue import Queue
from service.scheduling.ray_jobs import JobState, RayJob, RayUnavailable, RayUnreachable
from service.scheduling.scheduler import FIGURES_EVERY_S, Scheduler
from service.store import StaleAttempt, Store
from tests.execution.conftest import Clock, Submit
from tests.fake_ray_jobs import FakeRayJobs


@pytest.fixture
def jobs() -> FakeRayJobs:
    return FakeRayJobs()


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Each driver is a job of its own."""
    return settings.model_copy(update={"drivers_per_host": 1})


@pytest.fixture
def scheduler(store: Store, queue: Queue, jobs: FakeRayJobs, settings: Settings) -> Scheduler:
    return Scheduler(store, queue, jobs, settings, name="one", python="python")


@pytest.fixture
def successor(store: Store, queue: Queue, jobs: FakeRayJobs, settings: Settings) -> Scheduler:
    """Another scheduler, which knows nothing of the first."""
    return Scheduler(store, queue, jobs, settings, name="two", python="python")


class Died(Exception):
    """The scheduler's process was killed here."""


def die() -> None:
    raise Died


def test_claims_and_submits_under_the_stored_id(
    scheduler: Scheduler, jobs: FakeRayJobs, store: Store, submit: Submit
) -> None:
    experiment = submit()
    did = scheduler.run_once()
    assert did.claimed == did.submitted == (experiment.id,)
    assert jobs.submitted == [f"stillhouse-{experiment.id}-1"]
    assert store.experiments.get(experiment.id).state is ExperimentState.starting


def test_a_job_takes_its_settings_by_a_token_of_its_own(
    scheduler: Scheduler, jobs: FakeRayJobs, settings: Settings, submit: Submit
) -> None:
    for number in range(2):
        submit()
        scheduler.run_once()
        assert jobs.entrypoint(jobs.submitted[-1]).endswith(f"--settings token-{number}")
    assert [driver_settings.read(each).data_dir for each in jobs.handed_over.values()] == [
        settings.data_dir
    ] * 2


def test_a_mistake_in_a_declaration_ends_the_attempt_and_not_the_scheduler(
    scheduler: Scheduler, jobs: FakeRayJobs, settings: Settings, store: Store, submit: Submit
) -> None:
    experiment = submit()
    sites = settings.data_dir / "sites.yaml"
    sites.write_text("default: {pue: 0.1, pue_source: a guess}")
    assert scheduler.run_once().ended == (experiment.id,)
    assert f"{sites}: default.pue: 0.1" in (store.experiments.get(experiment.id).failure_message or "")
    assert not jobs.submitted


def test_the_dashboard_lists_the_job_by_the_experiments_name(
    scheduler: Scheduler, jobs: FakeRayJobs, submit: Submit
) -> None:
    submit(name="precision by batch")
    scheduler.run_once()
    job = jobs.status(jobs.submitted[0])
    assert job is not None
    assert job.metadata["job_name"] == "precision by batch"
    assert job.metadata["owner"] == "ada"


def test_runs_no_more_experiments_than_allowed(
    store: Store, queue: Queue, jobs: FakeRayJobs, settings: Settings, submit: Submit
) -> None:
    for _ in range(5):
        submit()
    limited = settings.model_copy(update={"max_concurrent_experiments": 2})
    scheduler = Scheduler(store, queue, jobs, limited)
    for _ in range(3):
        scheduler.run_once()
    assert len(jobs.submitted) == 2


def test_two_schedulers_claim_each_experiment_once(
    scheduler: Scheduler, successor: Scheduler, jobs: FakeRayJobs, submit: Submit
) -> None:
    for _ in range(4):
        submit()
    threads = [threading.Thread(target=each.run_once) for each in (scheduler, successor)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(jobs.submitted) == len(set(jobs.submitted)) == 4


def test_killed_before_the_submit_the_next_scheduler_submits(
    store: Store, queue: Queue, successor: Scheduler, jobs: FakeRayJobs, clock: Clock, submit: Submit
) -> None:
    experiment = submit()
    queue.claim("one", lease_s=30.0)  # Here its process is killed.
    successor.run_once()
    assert jobs.submitted == []  # The lease is valid: the other may be about to do it.
    clock.forward(31)
    did = successor.run_once()
    assert did.adopted == did.submitted == (experiment.id,)
    assert jobs.submitted == [f"stillhouse-{experiment.id}-1"]


def test_killed_after_the_submit_the_next_scheduler_adopts(
    scheduler: Scheduler, successor: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    jobs.after_submit = die
    with pytest.raises(Died):
        scheduler.run_once()
    jobs.after_submit = lambda: None
    clock.forward(31)
    did = successor.run_once()
    assert did.adopted == (experiment.id,)
    assert did.submitted == ()
    assert jobs.submitted == [f"stillhouse-{experiment.id}-1"]
    assert store.experiments.get(experiment.id).lease_owner == "two"


def test_a_restarted_scheduler_leaves_a_running_experiment_alone(
    scheduler: Scheduler, successor: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    for _ in range(20):
        clock.forward(10)
        store.drivers.renew_lease(experiment.id, 1, 30.0)
        did = successor.run_once()
        assert (did.adopted, did.ended, did.submitted) == ((), (), ())
    assert len(jobs.submitted) == 1


def test_ten_minutes_without_ray_relaunch_nothing(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    jobs.status(f"stillhouse-{experiment.id}-1")
    jobs.unreachable = True
    for _ in range(120):
        clock.forward(5)
        assert scheduler.run_once().ray_away
    assert store.experiments.get(experiment.id).state is ExperimentState.running
    jobs.unreachable = False
    clock.forward(1)
    assert scheduler.run_once().adopted == (experiment.id,)
    store.drivers.renew_lease(experiment.id, 1, 30.0)
    clock.forward(5)
    assert scheduler.run_once().ended == ()
    assert jobs.submitted == [f"stillhouse-{experiment.id}-1"]


def test_nothing_is_claimed_while_ray_is_away(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    jobs.unreachable = True
    for _ in range(10):
        clock.forward(5)
        scheduler.run_once()
    assert store.experiments.get(experiment.id).state is ExperimentState.queued
    jobs.unreachable = False
    clock.forward(6)
    assert scheduler.run_once().submitted == (experiment.id,)


def test_a_submit_that_met_no_ray_is_made_again_under_the_same_id(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()

    def away() -> None:
        jobs.after_submit = lambda: None
        raise RayUnreachable("the answer was lost")

    jobs.after_submit = away
    assert scheduler.run_once().ray_away
    clock.forward(6)
    scheduler.run_once()
    assert jobs.submitted == [f"stillhouse-{experiment.id}-1"]
    assert store.experiments.get(experiment.id).attempt == 1


def test_a_driver_that_died_gets_a_new_attempt(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    jobs.end(f"stillhouse-{experiment.id}-1", code=-9)
    clock.forward(3)
    assert scheduler.run_once().ended == (experiment.id,)
    queued = store.experiments.get(experiment.id)
    assert queued.state is ExperimentState.queued
    assert queued.failure_class == "infrastructure"
    clock.forward(3)
    scheduler.run_once()
    assert jobs.submitted[-1] == f"stillhouse-{experiment.id}-2"


def test_a_new_head_that_knows_no_job_leads_to_a_new_attempt(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    jobs.forget()
    clock.forward(3)
    assert scheduler.run_once().ended == (experiment.id,)
    clock.forward(3)
    scheduler.run_once()
    assert jobs.submitted[-1] == f"stillhouse-{experiment.id}-2"


def test_a_stopped_driver_is_given_a_lease_of_patience_and_then_replaced(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    clock.forward(31)  # The driver got SIGSTOP: Ray still says RUNNING.
    assert scheduler.run_once().adopted == (experiment.id,)
    clock.forward(29)
    assert scheduler.run_once().stopped == ()
    clock.forward(2)
    did = scheduler.run_once()
    assert did.stopped == did.ended == (experiment.id,)
    clock.forward(3)
    scheduler.run_once()
    assert jobs.submitted[-1] == f"stillhouse-{experiment.id}-2"


def test_a_job_that_ray_is_slow_to_start_is_waited_for(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    for _ in range(15):
        clock.forward(31)
        did = scheduler.run_once()
        assert (did.stopped, did.ended) == ((), ())
    store.drivers.started(experiment.id, 1, "node", 1)
    assert jobs.submitted == [f"stillhouse-{experiment.id}-1"]


def test_a_job_whose_driver_never_speaks_is_replaced(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    stopped: list[int] = []
    while not stopped:
        clock.forward(31)
        stopped += scheduler.run_once().stopped
    assert clock.now < 1_000_000 + 800
    clock.forward(3)
    scheduler.run_once()
    assert jobs.submitted[-1] == f"stillhouse-{experiment.id}-2"


def test_a_driver_that_was_only_slow_keeps_its_attempt(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    for _ in range(5):
        clock.forward(31)
        assert scheduler.run_once().adopted == (experiment.id,)
        clock.forward(20)
        store.drivers.renew_lease(experiment.id, 1, 30.0)
        assert scheduler.run_once().stopped == ()
    assert len(jobs.submitted) == 1


def test_schedulers_that_take_turns_stop_a_hung_driver(
    scheduler: Scheduler, successor: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    """Each in turn finds the lease that the other took over, as if the driver had renewed it."""
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    stopped: list[tuple[int, int]] = []
    for turn in range(8):
        clock.forward(31)
        for each in (scheduler, successor) if turn % 2 == 0 else (successor, scheduler):
            stopped += [(turn, id) for id in each.run_once().stopped]
    assert stopped == [(1, experiment.id)]


def test_restarted_schedulers_remember_how_long_a_driver_is_silent(
    jobs: FakeRayJobs, queue: Queue, settings: Settings, clock: Clock, store: Store, submit: Submit
) -> None:
    def restarted() -> Scheduler:
        return Scheduler(store, queue, jobs, settings, name="restarted")

    experiment = submit()
    restarted().run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    clock.forward(31)
    assert restarted().run_once().adopted == (experiment.id,)
    clock.forward(31)
    assert restarted().run_once().stopped == (experiment.id,)


def test_a_clock_set_back_hides_no_dead_driver(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    clock.forward(-3600)
    assert scheduler.run_once().adopted == (experiment.id,)
    clock.forward(31)
    assert scheduler.run_once().stopped == (experiment.id,)


def test_a_clock_set_back_stops_no_healthy_driver(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    clock.forward(-3600)
    for _ in range(10):
        scheduler.run_once()
        clock.forward(10)
        store.drivers.renew_lease(experiment.id, 1, 30.0)
    assert store.experiments.get(experiment.id).attempt == 1
    assert jobs.submitted == [f"stillhouse-{experiment.id}-1"]


def test_a_driver_that_speaks_while_it_is_looked_at_is_not_stopped(
    scheduler: Scheduler,
    jobs: FakeRayJobs,
    clock: Clock,
    store: Store,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    clock.forward(31)
    scheduler.run_once()
    clock.forward(31)
    look = jobs.status

    def speak(submission_id: str) -> RayJob | None:
        store.drivers.renew_lease(experiment.id, 1, 30.0)
        return look(submission_id)

    monkeypatch.setattr(jobs, "status", speak)
    assert scheduler.run_once().stopped == ()
    job = look(f"stillhouse-{experiment.id}-1")
    assert job is not None
    assert job.state is JobState.running
    assert store.experiments.get(experiment.id).state is ExperimentState.running


def test_a_driver_cannot_renew_a_lease_that_was_withdrawn(
    scheduler: Scheduler, queue: Queue, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    assert not queue.withdraw(experiment.id, 1)  # It is valid.
    clock.forward(31)
    assert not queue.withdraw(experiment.id, 1)  # It was adopted by no one yet.
    scheduler.run_once()
    clock.forward(31)
    assert queue.withdraw(experiment.id, 1)
    for call in (
        lambda: store.drivers.renew_lease(experiment.id, 1, 30.0),
        lambda: store.drivers.requests(experiment.id, 1),
        lambda: store.drivers.started(experiment.id, 1, "node", 1),
    ):
        with pytest.raises(StaleAttempt):
            call()


def test_a_stop_that_met_no_ray_is_repeated_by_the_next_scheduler(
    scheduler: Scheduler,
    successor: Scheduler,
    jobs: FakeRayJobs,
    clock: Clock,
    store: Store,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    clock.forward(31)
    scheduler.run_once()
    clock.forward(31)

    def away(submission_id: str) -> None:
        raise RayUnreachable("Ray is unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "stop", away)
        assert scheduler.run_once().ray_away
    assert store.experiments.get(experiment.id).state is ExperimentState.running
    assert successor.run_once().stopped == (experiment.id,)
    job = jobs.status(f"stillhouse-{experiment.id}-1")
    assert job is not None
    assert job.state is JobState.stopped
    assert store.experiments.get(experiment.id).state is ExperimentState.queued


def test_half_an_hour_without_an_agent_uses_up_no_attempt(
    scheduler: Scheduler,
    jobs: FakeRayJobs,
    clock: Clock,
    store: Store,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = submit()
    asked: list[float] = []

    def no_agent(*args: object, **kwargs: object) -> None:
        asked.append(clock.now)
        raise RayUnavailable("No available agent to submit job, please try again later.")

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "submit", no_agent)
        for _ in range(300):
            assert scheduler.run_once().ended == ()
            clock.forward(6)
    assert INFRASTRUCTURE_LIMIT < 90 < len(asked) < 110  # Every 18 s, after the first few.
    waiting = store.experiments.get(experiment.id)
    assert (waiting.state, waiting.attempt) == (ExperimentState.starting, 1)
    notes = [
        event for event in store.experiments.events(experiment.id) if event.kind == EventKind.experiment_note
    ]
    assert [note.message.partition(":")[0] for note in notes] == ["Ray is unavailable, trying again"]
    clock.forward(60)
    scheduler.run_once()
    assert jobs.submitted == [f"stillhouse-{experiment.id}-1"]


def test_what_ray_cannot_do_for_one_experiment_holds_up_no_other(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = submit(), submit()
    really = jobs.submit

    def one_fails(submission_id: str, entrypoint: str, *, metadata: dict[str, str]) -> None:
        if submission_id == f"stillhouse-{first.id}-1":
            raise RayUnavailable("Ray answered 500: odd")
        really(submission_id, entrypoint, metadata=metadata)

    monkeypatch.setattr(jobs, "submit", one_fails)
    assert scheduler.run_once().ray_away
    clock.forward(1)
    scheduler.run_once()
    assert jobs.submitted == [f"stillhouse-{second.id}-1"]


def test_a_crash_loop_ends_as_failed_with_the_reason(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    for attempt in range(1, INFRASTRUCTURE_LIMIT + 2):
        scheduler.run_once()
        jobs.end(f"stillhouse-{experiment.id}-{attempt}", code=1)
        clock.forward(3)
        scheduler.run_once()
        clock.forward(301)
    failed = store.experiments.get(experiment.id)
    assert failed.state is ExperimentState.failed
    assert "the limit is 20" in (failed.failure_message or "")


def test_a_job_that_ended_in_order_is_not_ended_again(
    scheduler: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    jobs.end(f"stillhouse-{experiment.id}-1")
    clock.forward(3)
    assert scheduler.run_once().ended == ()
    assert store.experiments.get(experiment.id).state is ExperimentState.succeeded


def test_writes_heartbeat_and_cluster(scheduler: Scheduler, jobs: FakeRayJobs, queue: Queue) -> None:
    scheduler.run_once()
    assert [alive.name for alive in queue.schedulers_alive()] == ["one"]
    cluster = queue.cluster()
    assert cluster is not None
    assert cluster.reachable


def test_run_ends_when_asked_and_signs_off(scheduler: Scheduler, queue: Queue) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=scheduler.run, args=(stop,))
    thread.start()
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert queue.schedulers_alive() == []


def test_a_refused_job_is_tried_again_later(
    scheduler: Scheduler, jobs: FakeRayJobs, store: Store, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.scheduling.ray_jobs import JobRefused

    experiment = submit()

    def refuse(*args: object, **kwargs: object) -> None:
        raise JobRefused("no")

    monkeypatch.setattr(jobs, "submit", refuse)
    assert scheduler.run_once().ended == (experiment.id,)
    assert "Ray refused the job: no" in (store.experiments.get(experiment.id).failure_message or "")


def test_pass_is_a_value(scheduler: Scheduler) -> None:
    did = scheduler.run_once()
    assert replace(did, ray_away=True) != did


def test_what_a_pass_measures_is_stored_for_metrics(
    scheduler: Scheduler, store: Store, submit: Submit, clock: Clock
) -> None:
    submit()
    scheduler.run_once()
    clock.forward(FIGURES_EVERY_S)
    scheduler.run_once()
    found = {each.info.name: each for each in series_of(store.process_metrics.figures())}
    assert found["stillhouse_ray_up"].value == 1.0
    waited = found["stillhouse_queue_wait_seconds"]
    assert waited.labels == {"project": "default"}
    assert isinstance(waited.value, Histogram)
    assert waited.value.buckets[-1] == ("+Inf", 1.0)
    assert {"stillhouse_claim_seconds", "stillhouse_commit_seconds"} <= found.keys()


def test_lapses_and_adoptions_are_counted(
    scheduler: Scheduler, successor: Scheduler, store: Store, submit: Submit, clock: Clock, settings: Settings
) -> None:
    experiment = submit()
    scheduler.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    clock.forward(settings.lease_s + 1)
    assert successor.run_once().adopted == (experiment.id,)
    clock.forward(settings.lease_s + 1)
    assert successor.run_once().stopped == (experiment.id,)
    clock.forward(FIGURES_EVERY_S)
    successor.run_once()
    counts = {each.info.name: each.value for each in series_of(store.process_metrics.figures())}
    assert counts["stillhouse_lease_lapses_total"] == 1
    assert counts["stillhouse_adoptions_total"] == 1
    assert counts["stillhouse_silent_drivers_stopped_total"] == 1


@pytest.fixture
def sharing(store: Store, queue: Queue, jobs: FakeRayJobs, settings: Settings) -> Scheduler:
    """Two drivers share a job."""
    shared = settings.model_copy(update={"drivers_per_host": 2})
    return Scheduler(store, queue, jobs, shared, name="one", python="python")


def jobs_of(store: Store, experiments: list[Experiment]) -> list[str | None]:
    return [store.experiments.get(each.id).submission_id for each in experiments]


def test_drivers_share_a_job_until_it_is_full_or_has_ended(
    sharing: Scheduler, jobs: FakeRayJobs, store: Store, submit: Submit
) -> None:
    experiments = [submit() for _ in range(3)]
    sharing.run_once()
    first, second, third = jobs_of(store, experiments)
    assert first == second != third
    assert jobs.submitted == [first, third]
    assert "service.driving.host --name" in jobs._jobs[jobs.submitted[0]].entrypoint
    jobs.end(jobs.submitted[1])
    experiments.append(submit())
    sharing.run_once()
    assert jobs_of(store, experiments)[-1] == jobs.submitted[2] not in (first, third)


def test_an_idle_job_gets_the_next_driver(
    sharing: Scheduler, jobs: FakeRayJobs, store: Store, submit: Submit
) -> None:
    for _ in range(2):
        experiment = submit()
        sharing.run_once()
        store.drivers.started(experiment.id, 1, "node", 1)
        store.drivers.finish_experiment(experiment.id, 1, ExperimentState.cancelled)
    assert len(jobs.submitted) == 1


def test_all_drivers_of_a_job_that_died_are_followed_by_others(
    sharing: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    experiments = [submit(), submit()]
    sharing.run_once()
    for each in experiments:
        store.drivers.started(each.id, 1, "node", 1)
    jobs.end(jobs.submitted[0], code=-9)
    clock.forward(3)
    assert set(sharing.run_once().ended) == {each.id for each in experiments}
    clock.forward(60)
    sharing.run_once()
    assert len(jobs.submitted) == 2
    assert jobs_of(store, experiments) == [jobs.submitted[1]] * 2


def test_a_silent_driver_leaves_the_others_of_its_job_alone_and_a_job_that_starts_none_gets_no_more(
    sharing: Scheduler, jobs: FakeRayJobs, clock: Clock, store: Store, submit: Submit
) -> None:
    silent = submit()
    sharing.run_once()
    (hung,) = jobs.submitted
    for _ in range(30):
        clock.forward(31)
        if sharing.run_once().stopped:
            break
    job = jobs.status(hung)
    assert job is not None
    assert job.state is JobState.running
    clock.forward(60)
    sharing.run_once()
    assert store.experiments.get(silent.id).attempt == 2
    assert jobs_of(store, [silent]) != [hung]
