"""What a configuration did not cause stands apart: its time, its energy, its cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainers.conftest import Configure, Recorder
from trainers.data import cache
from trainers.data.cache import counted_by, preparing
from trainers.dry_runs import micro_batch
from trainers.dry_runs.micro_batch import DryRun
from trainers.entrypoint import make_ready, train
from trainers.reporting import NeverStop, RunHistory
from trainers.telemetry.instruments import OVERHEAD_TIME
from trainers.telemetry.timeline import OVERHEAD, OWN, Phase, Timeline
from trainers.workers import Workers


class Hand:
    """A clock that is moved by hand, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def on(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    return Hand(monkeypatch)


def spent(timeline: Timeline) -> dict[str, float]:
    return {phase: seconds for phase, seconds in timeline.spent_s().items() if seconds}


def test_every_phase_is_the_runs_own_or_overhead() -> None:
    assert {*OWN, *OVERHEAD} == set(Phase)
    assert len(OWN) + len(OVERHEAD) == len(Phase)


def test_both_sides_of_a_boundary_are_told_whole(hand: Hand) -> None:
    timeline, told = Timeline(hand.now_s), []
    timeline.boundary = lambda *side: told.append(side)
    hand.on(1.0)
    timeline.enter(Phase.setup)
    hand.on(2.0)
    with timeline.within(Phase.preparation):
        hand.on(4.0)
        with timeline.within(Phase.preparation):
            hand.on(8.0)
    for phase in (Phase.data_wait, Phase.forward):
        hand.on(16.0)
        timeline.spent_s()  # reading cuts nothing
        timeline.enter(phase)
    with timeline.within(Phase.warm_up):
        hand.on(32.0)
    assert told == [
        (Phase.warm_up, 100.0, 101.0),
        (Phase.setup, 101.0, 103.0),
        (Phase.preparation, 103.0, 115.0),
        (Phase.forward, 115.0, 147.0),
        (Phase.warm_up, 147.0, 179.0),
    ]
    assert spent(timeline) == {
        "warm_up": 33.0, "setup": 18.0, "preparation": 12.0, "data_wait": 16.0,
    }  # fmt: skip


def attempt(hand: Hand, steps: int, *, carried: dict[str, float] | None = None) -> Timeline:
    """A process that takes 7 s to get ready, 3 s of set-up and 1 s per step."""
    timeline = Timeline(hand.now_s)
    hand.on(7.0)
    timeline.enter(Phase.setup)
    if carried is not None:
        timeline.resume()
    hand.on(3.0)
    timeline.carry_over(carried or {})
    for _ in range(steps):
        timeline.enter(Phase.forward)
        hand.on(1.0)
    timeline.enter(Phase.checkpoint)
    return timeline


def test_a_killed_and_resumed_run_has_the_time_of_an_undisturbed_one(hand: Hand) -> None:
    whole = attempt(hand, 10).spent_s()
    kept = attempt(hand, 6).spent_s()
    hand.on(50.0)  # it goes on, and is killed
    resumed = attempt(hand, 4, carried=kept)
    resumed.carry_over({Phase.lost_since_checkpoint: 50.0})
    found = resumed.spent_s()
    assert {phase: found[phase] for phase in OWN} == {phase: whole[phase] for phase in OWN}
    assert {phase: found[phase] for phase in OVERHEAD if found[phase]} == {
        Phase.warm_up: 14.0, Phase.restart: 3.0, Phase.lost_since_checkpoint: 50.0,
    }  # fmt: skip


def test_filling_a_cache_is_preparation_and_finding_it_filled_is_not(tmp_path: Path) -> None:
    entered = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        entered.append("preparation")
        yield

    def build(folder: Path) -> None:
        (folder / "file").write_text("content")

    with counted_by(around):
        cache.cached_folder(tmp_path, "key", build)
        assert entered == ["preparation"]
        cache.cached_folder(tmp_path, "key", build)
        assert entered == ["preparation"]
    with preparing():  # outside of a run nobody counts
        assert entered == ["preparation"]


def test_a_process_is_ready_once() -> None:
    make_ready("cpu")
    assert make_ready("cpu") == {"imports": 0.0, "kernels": 0.0, "first_step": 0.0}


@pytest.mark.slow
def test_first_and_later_runs_have_the_same_parts_of_their_own(config_in: Configure, tmp_path: Path) -> None:
    """The first run fills the caches; what that took is apart, in time as in money."""
    summaries, told = [], []
    for seed in (0, 1):
        recorder = Recorder()
        config = config_in(
            tmp_path / str(seed),
            seed=seed,
            length__steps=30,
            workspace__cache=str(tmp_path / "cache"),
            rates__price_usd_per_hour=3600.0,
        )
        began_s = time.time()
        summaries.append(
            train(config, recorder, NeverStop(), history=RunHistory(opened_s=began_s - 60.0)).summary
        )
        stretches = [m for m in recorder.measurements if m.name == OVERHEAD_TIME and m.scope != "run"]
        assert all(began_s - 1e-3 <= m.start_s <= m.end_s <= time.time() for m in stretches)
        assert sum(m.value for m in stretches) == pytest.approx(summaries[-1]["overhead_time_s"])
        told.append({m.scope for m in stretches if m.value})
        wall_s = time.time() - began_s
        whole_s = summaries[-1]["total_time_s"] + summaries[-1]["overhead_time_s"]
        assert 0.9 * wall_s < whole_s < 1.01 * wall_s  # the minute before the call is in no phase
    first, later = summaries
    assert told[0] >= {"preparation", "warm_up"}
    assert first["preparation_time_s"] > 5 * later["preparation_time_s"]
    for summary in summaries:
        assert summary["cost_usd"] == pytest.approx(summary["total_time_s"])
    parts = [{phase for phase in OWN if summary[f"{phase}_time_s"]} for summary in summaries]
    assert parts[0] == parts[1]


def test_the_set_up_of_a_resumed_attempt_is_a_restart(configure: Configure, recorder: Recorder) -> None:
    recorder.stop_after = 3
    stopped = train(configure(), recorder, recorder).summary
    resumed = train(configure(), Recorder(), NeverStop()).summary
    assert stopped["restart_time_s"] == 0.0 < resumed["restart_time_s"]
    assert resumed["setup_time_s"] == pytest.approx(stopped["setup_time_s"])


@pytest.mark.slow
def test_a_process_warms_up_once_per_shape_and_results_stay_as_they_are(
    config_in: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch, "_done", set())
    passes, rehearse = [], DryRun.rehearse

    def counted(self: DryRun, size: int) -> None:
        rehearse(self, size)
        passes.append(size)
        assert all(p.grad is None for p in self._module.parameters())

    monkeypatch.setattr(DryRun, "rehearse", counted)
    losses = []
    for name in ("cold", "warm"):
        recorder = Recorder()
        summary = train(config_in(tmp_path / name, deterministic=True), recorder, NeverStop()).summary
        losses.append((recorder.series("loss"), summary["validation_loss"]))
    assert passes == [8]
    train(config_in(tmp_path / "other", batch={"global_size": 4}), Recorder(), NeverStop())
    assert passes == [8, 4]
    monkeypatch.setattr(micro_batch, "warm_up_once", lambda *args: None)
    recorder = Recorder()
    summary = train(config_in(tmp_path / "without", deterministic=True), recorder, NeverStop()).summary
    assert losses == [(recorder.series("loss"), summary["validation_loss"])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{"name": "adan"}, {"name": "adan", "implementation": "multi_unfused"}])
def test_every_optimizer_is_warmed_up(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, optimizer: dict[str, str]
) -> None:
    monkeypatch.setattr(micro_batch, "_done", set())
    assert train(configure(optimizer=optimizer), Recorder(), NeverStop()).status == "completed"
    assert len(micro_batch._done) == 1


def test_a_rehearsal_that_does_not_fit_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "_done", set())
    timeline, told = Timeline(time.perf_counter()), []

    def too_large() -> None:
        told.append("tried")
        raise torch.OutOfMemoryError("no room")

    for _ in range(2):
        micro_batch.warm_up_once("key", Workers(), timeline, too_large)
    assert told == ["tried"]
