"""A simulated sweep in a store, and its report."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.simulated import Clock, open_store, sweep
from service.config.settings import Settings
from service.domain.records import Experiment
from service.output.report import ReportContents
from service.store import Store


@dataclass
class Sweep:
    """An experiment that has ended, where it is stored."""

    store: Store
    clock: Clock
    experiment: Experiment

    def contents(self, *more: int) -> ReportContents:
        """What its report says."""
        return ReportContents(self.store, [self.experiment.id, *more])


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[Sweep]:
    """The standard sweep: 12 configurations of 3 seeds, two of which do not fit."""
    folder = tmp_path_factory.mktemp("simulated")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    (folder / "texts").mkdir()
    (folder / "texts" / "train.jsonl").write_text('{"text": "good", "label": 1}\n', encoding="utf-8")
    store, clock = open_store(Settings(data_dir=folder, data_roots=str(folder)))
    yield Sweep(store, clock, sweep(store, clock))
    store.close()
