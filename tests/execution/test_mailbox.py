"""The mailbox: an order reaches every rank once, and its ending comes back, over restarts too."""

from __future__ import annotations

import time

import pytest

from service.recording.mailbox import Ending, Mailbox, WorkerAddress, WorkOrder
from service.workers import worker_group
from service.workers.worker_group import arriving

ENDING = Ending("completed")
WORKER = WorkerAddress(0, None, "host", 1, "10.0.0.1", 7)


def test_an_order_reaches_each_worker_once() -> None:
    mailbox = Mailbox()
    assert mailbox.serve("g", WORKER, None, 0) is None
    order = WorkOrder(1, None)
    assert mailbox.ask("g", order) is None
    assert mailbox.serve("g", WORKER, None, 0) == order
    assert mailbox.serve("g", WORKER, None, 0) == order  # Another rank.
    assert mailbox.serve("g", WORKER, None, 1) is None


def test_the_ending_comes_back_for_its_order_alone() -> None:
    mailbox = Mailbox()
    mailbox.ask("g", WorkOrder(1, None))
    mailbox.serve("g", WORKER, ENDING, 1)
    assert mailbox.ask("g", WorkOrder(1, None)) == ENDING
    assert mailbox.ask("g", WorkOrder(2, None)) is None
    assert mailbox.serve("g", WORKER, ENDING, 1) == WorkOrder(2, None)
    assert mailbox.ask("g", WorkOrder(2, None)) is None


def test_an_emptied_mailbox_fills_itself_again() -> None:
    before = Mailbox()
    before.ask("g", WorkOrder(3, None))
    after = Mailbox()  # The actor was killed while order 3 was carried out.
    assert after.serve("g", WORKER, ENDING, 3) is None
    assert after.ask("g", WorkOrder(3, None)) == ENDING


def test_groups_do_not_see_each_other() -> None:
    mailbox = Mailbox()
    mailbox.ask("a", WorkOrder(1, None))
    assert mailbox.serve("b", WORKER, None, 0) is None
    mailbox.forget("a")
    assert mailbox.serve("a", WORKER, None, 0) is None


def test_workers_that_met_before_the_actor_restarted_are_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_ARRIVE_AGAIN_S", 0.01)
    actor = Actor()
    late = WorkerAddress(1, None, "host", 2, "10.0.0.1", 8)
    with arriving(actor, "g", WORKER):  # type: ignore[arg-type]
        actor.arrive("g", late)
        assert actor.arrive("g", WORKER) == (WORKER, late)  # It has met all, and asks no more.
        actor.mailbox = Mailbox()
        deadline = time.monotonic() + 10
        while actor.arrive("g", late) != (WORKER, late):
            assert time.monotonic() < deadline
            time.sleep(0.01)


class Actor:
    """Answers from a mailbox that a test replaces."""

    def __init__(self) -> None:
        self.mailbox = Mailbox()

    def arrive(self, group: str, worker: WorkerAddress) -> tuple[WorkerAddress, ...]:
        return self.mailbox.arrive(group, worker)
