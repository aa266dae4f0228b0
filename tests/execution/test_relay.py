"""The relay between workers and drivers, called as Ray calls it; no Ray is started."""

from __future__ import annotations

import asyncio

import pytest

from service.recording import relay as relay_module
from service.recording.mailbox import Grant
from service.recording.relay import Relay


@pytest.fixture(autouse=True)
def drains(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """Nodes that drain."""
    found: dict[str, float | None] = {}
    monkeypatch.setattr(relay_module, "drain_notices", lambda: dict(found))
    monkeypatch.setattr(relay_module, "_LOOK_S", 0.01)
    return found


def test_all_drivers_learn_of_a_draining_node_without_looking(drains: dict[str, float | None]) -> None:
    async def story() -> None:
        relay = Relay()
        waiting = [asyncio.create_task(relay.take(driver, {})) for driver in ("one", "other")]
        await asyncio.sleep(0.03)
        assert not any(each.done() for each in waiting)
        drains["node"] = 17.0
        assert await asyncio.gather(*waiting) == [({}, {"node": 17.0})] * 2
        assert await relay.take("late", {}) == ({}, {"node": 17.0})

    asyncio.run(story())


def test_reports_are_answered_each_with_its_own_answer_and_to_its_own_driver() -> None:
    async def story() -> None:
        relay = Relay()
        first = asyncio.create_task(relay.report("one", b"first"))
        second = asyncio.create_task(relay.report("one", b"second"))
        other = asyncio.create_task(relay.report("other", b"third"))
        await asyncio.sleep(0)
        taken, _ = await relay.take("one", {})
        assert sorted(taken.values()) == [b"first", b"second"]
        for key, report in reversed(taken.items()):
            await relay.answer("one", key, b"stored " + report)
        assert (await first, await second) == (b"stored first", b"stored second")
        assert not other.done()
        other.cancel()

    asyncio.run(story())


def test_an_answer_from_before_a_restart_acknowledges_nothing() -> None:
    async def story() -> None:
        before, after = Relay(), Relay()
        lost = asyncio.create_task(before.report("one", b"rows"))
        await asyncio.sleep(0)
        ((key,), _) = await before.take("one", {})
        again = asyncio.create_task(after.report("one", b"rows"))
        await after.answer("one", key, b"stored")
        await asyncio.sleep(0)
        assert not again.done()
        for report in (lost, again):
            report.cancel()

    asyncio.run(story())


def test_a_driver_that_leaves_is_let_go_and_the_others_keep_their_mail() -> None:
    async def story() -> None:
        relay = Relay()
        await relay.mail("other", "grant", {"run-1": Grant(None)})
        waiting = asyncio.create_task(relay.take("one", {}))
        await asyncio.sleep(0)
        await relay.leave("one")
        assert await waiting == ({}, {})
        assert await relay.mail("other", "granted", "run-1") == Grant(None)

    asyncio.run(story())
