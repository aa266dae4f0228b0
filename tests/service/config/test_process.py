"""Processes of the service do not collect what they have loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from service.config.process import freeze_loaded
from service.config.settings import Settings
from service.scheduling import scheduler
from service.store import Store


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    """Lets the collector walk everything during a test, and what tests allocate after it."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_collections_pass_over_what_is_loaded() -> None:
    kept = [[number] for number in range(1_000)]
    before = len(gc.get_objects())
    freeze_loaded()
    assert gc.get_freeze_count() > len(kept)
    assert len(gc.get_objects()) < before - len(kept)


def test_the_scheduler_freezes_its_modules_before_its_first_pass(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(settings, migrate=True).close()
    frozen: list[int] = []
    monkeypatch.setattr(scheduler.signal, "signal", lambda *_: None)
    monkeypatch.setattr(scheduler.Scheduler, "run", lambda *_: frozen.append(gc.get_freeze_count()))
    scheduler.main(settings)
    assert frozen[0] > 10_000
