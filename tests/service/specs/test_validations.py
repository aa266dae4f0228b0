"""A run's settings are validated twice on their way to the worker: at submission, and from what is stored."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.driving.sweep import Sweep
from service.driving.sweep_context import SweepContext
from service.recording.mailbox import Turn
from service.scheduling.admission import admit, read_spec
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.specs.experiment import read_stored
from service.store import NewExperiment, Store
from trainers.config import TrainingSections

TWO_CELLS = b"""
name: counted
task: {name: imdb}
search: {axes: {hardware: [cpu], precision: [fp32, bf16]}}
seeds: [0, 1]
"""
RULE: CodeType = TrainingSections._half_parameters.__code__
"""A rule over `precision`, which every validation of a run's settings checks once."""


class Count:
    """How many times settings were validated."""

    times = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Counts a call of the rule."""
        self.times += event == "call" and frame.f_code is RULE


@contextmanager
def counted() -> Iterator[Count]:
    """Counts validations in the block."""
    count = Count()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield count
    finally:
        sys.setprofile(before)


def test_settings_are_validated_once_at_submission_and_once_from_what_is_stored(
    store: Store, queue: Queue, settings: Settings
) -> None:
    with counted() as submission:
        spec = read_spec(TWO_CELLS, CATALOGUE)
        plans, _ = admit(spec, settings, CATALOGUE, None, now_s=0.0)
    assert len(plans) == 4
    assert submission.times == 1 + 2  # The spec, and each cell.

    experiment, _ = store.submissions.submit(
        NewExperiment(spec, plans, spec_text=TWO_CELLS.decode(), owner="ada")
    )
    queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, 1, "node", 1)
    cluster = ClusterSnapshot(0.0, True, None, (ClusterNode("a", "a", True, {"CPU": 4.0}, {}),))
    read_stored.cache_clear()
    with counted() as driver:
        spec = read_stored(store.experiments.spec(experiment.id)[1])
        sweep = Sweep(SweepContext(store, settings, experiment.id, 1, spec, CATALOGUE), lambda: cluster)
        turns = [sweep.next_turn() for _ in range(4)]
    assert all(isinstance(turn, Turn) for turn in turns)
    assert driver.times == 1 + 2
