"""A script of an installation's writes, of every kind, step by step through the store.

The clock stands still during a step, and ids follow from the order of the steps: two runs leave the same
rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.config.settings import Settings
from service.db.backup import back_up
from service.domain.access import Actor, Role, Scope
from service.domain.events import Topic
from service.domain.process_metrics import MetricRow
from service.domain.records import LogLine, MeasurementRow, Placement
from service.domain.states import ExperimentState, RunState
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.specs.project_limits import ProjectLimits
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from service.store.recording import AliveRow, CheckpointRow, ProgressRow
from service.store.sessions import Approval
from trainers.errors import FailureClass

BEGAN_S = 1_790_000_000.0
STEP_S = 100.0
"""Time between two steps."""
_LEASE_S = 1e6


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the product.

    Attributes:
        name: kind of the write.
        act: the call.
        in_parts: it takes several transactions: what it refuses may be done in part.
    """

    name: str
    act: Callable[[ScriptRun], object]
    in_parts: bool = False


@dataclass(slots=True)
class ScriptRun:
    """A store in which the script runs.

    Attributes:
        settings: of its installation.
        store: open.
        backup: file for a backup, on the same disk.
        now_s: the store's clock.
    """

    settings: Settings
    store: Store
    backup: Path
    now_s: float = BEGAN_S

    @property
    def queue(self) -> Queue:
        """The queue of the store."""
        return Queue(self.store)


def _words(characters: int) -> str:
    """Text that does not compress."""
    chance = random.Random(characters)
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=characters))


def _spec(name: str, runs: int = 1) -> dict[str, Any]:
    spec = validate({"name": name, "task": {"name": "imdb"}, "seeds": list(range(runs))})
    return {"spec": spec, "plans": list(spec.runs()), "spec_text": _words(20_000)}


def _submit(running: ScriptRun) -> object:
    return running.store.submissions.submit(
        NewExperiment(**_spec("first", 2), owner="ada", idempotency_key="first")
    )


def _submit_many(running: ScriptRun) -> None:
    names = ["second", "third", "fourth"]
    found = running.store.submissions.submit_many(
        [NewExperiment(**_spec(name), owner="bob", idempotency_key=name) for name in names]
    )
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer


def _points(first: int, count: int) -> Callable[[ScriptRun], object]:
    def act(running: ScriptRun) -> object:
        steps = list(range(first, first + count))
        values = [float(step) for step in steps]
        batch = PointBatch(1, 1, "loss", steps, values, [running.now_s] * count)
        return running.store.recording.record(RecordBatch(points=[batch]))

    return act


def _logs(running: ScriptRun) -> object:
    lines = [LogLine(1, 1, number, running.now_s, "info", _words(300 + number)) for number in range(100)]
    return running.store.recording.record(RecordBatch(logs=lines))


def _progress(running: ScriptRun) -> object:
    now = running.now_s
    measured = MeasurementRow(1, 1, "gpu_energy_j", 5.0, "J", "counter", "run", now - 10.0, now)
    return running.store.recording.record(
        RecordBatch(
            measurements=[measured],
            progress=[ProgressRow(1, 1, 10, 100, "training")],
            checkpoints=[CheckpointRow(1, 1, 10, "checkpoints/10")],
            alive=[AliveRow(1, 1, now)],
        )
    )


def _placement(running: ScriptRun) -> object:
    held = Placement(
        id="group", hardware="cpu", workers=1, devices=1, price_usd_per_hour=0.1, power_w=10.0,
        placed_s=running.now_s, ready_s=None, released_s=None, seen_s=running.now_s,
    )  # fmt: skip
    return running.store.drivers.record_placements(1, 1, [held])


def _cluster(running: ScriptRun) -> object:
    node = ClusterNode("node", _words(500), True, {"CPU": 2.0}, {"CPU": 2.0})
    return running.queue.put_cluster(ClusterSnapshot(running.now_s, True, None, (node,)))


def _session(running: ScriptRun) -> object:
    return running.store.sessions.begin(
        "s" * 64, "ada", csrf="csrf", lasting_s=1e6, idle_s=1e6, token_sha256=None, agent="browser",
        replaces=None, actor=Actor("ada"),
    )  # fmt: skip


def _deliver(running: ScriptRun) -> None:
    for outgoing in running.store.notifications.take_deliveries(10, 60.0):
        running.store.notifications.delivered(outgoing, "200")


def _remove(running: ScriptRun) -> None:
    for experiment_id in running.store.removal.deleted_experiments():
        for _ in running.store.removal.removing(experiment_id):
            pass


def _prune(running: ScriptRun) -> None:
    store = running.store
    for experiment_id, ended_s in store.removal.experiments_to_prune(
        ended_before_s=running.now_s, keep_every=100
    ):
        for _ in store.removal.pruning(experiment_id, ended_s, 100):
            pass


def _back_up(running: ScriptRun) -> object:
    return back_up(running.settings, running.backup, checkpoints=False)


SCRIPT = (
    Step("submit", _submit),
    Step("submit", _submit_many),
    Step("scheduler", lambda t: t.queue.heartbeat("scheduler", node="node", pid=1)),
    Step("cluster", _cluster),
    Step("claim", lambda t: t.queue.claim("scheduler", lease_s=_LEASE_S, among=[1])),
    Step("start", lambda t: t.store.drivers.started(1, 1, "node", 1)),
    Step("lease", lambda t: t.store.drivers.renew_lease(1, 1, _LEASE_S)),
    Step("attempt", lambda t: t.store.attempts.open(1, 1, number=1)),
    Step(
        "start",
        lambda t: t.store.attempts.run_started(
            1, 1, total_steps=9_000, resumed_from_step=0, facts={"note": _words(4_000)}
        ),
    ),
    Step("points", _points(1, 100), in_parts=True),
    Step("points", _points(101, 4_000)),
    Step("logs", _logs),
    Step("progress", _progress),
    Step("placement", _placement),
    Step("note", lambda t: t.store.drivers.note(1, 1, _words(2_000))),
    Step("waiting", lambda t: t.store.drivers.set_waiting(1, 1, {2: _words(200)})),
    Step("pause", lambda t: t.store.requests.pause(1)),
    Step("resume", lambda t: t.store.requests.resume(1)),
    Step(
        "run end",
        lambda t: t.store.attempts.finish_run(
            1, 1, RunState.failed, failure=(FailureClass.infrastructure, _words(300)), retry_delay_s=0.0
        ),
    ),
    Step("attempt", lambda t: t.store.attempts.open(1, 1, number=2)),
    Step(
        "start",
        lambda t: t.store.attempts.run_started(1, 2, total_steps=9_000, resumed_from_step=4_000, facts={}),
    ),
    Step(
        "run end", lambda t: t.store.attempts.finish_run(1, 2, RunState.succeeded, summary={"accuracy": 0.5})
    ),
    Step("cancel", lambda t: t.store.requests.cancel_run(2)),
    Step("experiment end", lambda t: t.store.drivers.finish_experiment(1, 1, ExperimentState.succeeded)),
    Step("retry", lambda t: t.store.requests.retry_run(2)),
    Step("cancel", lambda t: t.store.requests.cancel(1)),
    Step("claim", lambda t: t.queue.claim("scheduler", lease_s=_LEASE_S, among=[2])),
    Step("release", lambda t: t.store.drivers.release_experiment(2, 1, delay_s=0.0)),
    Step("cancel", lambda t: t.store.requests.cancel(3)),
    Step("retry", lambda t: t.store.requests.retry(3)),
    Step("priority", lambda t: t.store.requests.set_priority(4, 70)),
    Step("tags", lambda t: t.store.requests.tag(4, add=["baseline", "november"])),
    Step("notes", lambda t: t.store.requests.annotate(4, _words(4_000))),
    Step("archive", lambda t: t.store.requests.archive(4)),
    Step("project", lambda t: t.store.projects.create("nlp", notes=_words(4_000))),
    Step("project", lambda t: t.store.projects.set("nlp", title=_words(100))),
    Step("limits", lambda t: t.store.projects.set_limits("nlp", ProjectLimits(weight=2.0))),
    Step("user", lambda t: t.store.people.add_user("ada", email="ada@example.org")),
    Step("user", lambda t: t.store.people.set_user("ada", administrator=True)),
    Step("member", lambda t: t.store.projects.set_member("nlp", "ada", Role.maintainer)),
    Step("token", lambda t: t.store.people.create_token("ada", name="laptop", scope=Scope.admin)),
    Step("token", lambda t: t.store.people.revoke_token(1)),
    Step("member", lambda t: t.store.projects.remove_member("nlp", "ada")),
    Step(
        "subscription",
        lambda t: t.store.notifications.subscribe(
            "ada", "webhook", "https://example.org/hook", [Topic.end, Topic.budget], project="nlp"
        ),
    ),
    Step(
        "notice", lambda t: t.store.notifications.notice("key", "budget", "nlp", _words(200), {"spent": 0.9})
    ),
    Step("notice", lambda t: t.store.notifications.address()),
    Step("delivery", _deliver, in_parts=True),
    Step("subscription", lambda t: t.store.notifications.unsubscribe(1)),
    Step("view", lambda t: t.store.views.save("ada", "mine", "state=running", shared=False)),
    Step("view", lambda t: t.store.views.delete(1)),
    Step("session", _session),
    Step("session", lambda t: t.store.sessions.end("s" * 64, Actor("ada"))),
    Step(
        "login",
        lambda t: t.store.sessions.begin_device_login("d" * 64, "ABCDEFGH", "laptop", Scope.read, None),
    ),
    Step(
        "login",
        lambda t: t.store.sessions.decide_device_login(
            "ABCDEFGH", Approval("ada", Scope.read, None, t.now_s + 1e6), Actor("ada")
        ),
    ),
    Step(
        "figures",
        lambda t: t.store.process_metrics.add([MetricRow("writes", "{}", 1.0, True)], source="script"),
    ),
    Step("audit", lambda t: t.store.projects.archive("nlp")),
    Step("delete", lambda t: t.store.removal.delete(1)),
    Step("restore", lambda t: t.store.removal.restore(1)),
    Step("usage", lambda t: t.store.accounting.recount(1)),
    Step("pruning", _prune, in_parts=True),
    Step("cancel", lambda t: t.store.requests.cancel(3)),
    Step("delete", lambda t: t.store.removal.delete(3, at_once=True)),
    Step("removal", _remove, in_parts=True),
    Step("backup", _back_up),
)
