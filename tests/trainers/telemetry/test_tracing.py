"""The timeline of traced steps: valid, without gaps, on one clock, and the phases' own seconds."""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.conftest import Configure, Launch, Recorder
from trainers.data.storage import Place
from trainers.entrypoint import train
from trainers.reporting import NeverStop
from trainers.telemetry import tracing
from trainers.telemetry.timeline import TRAINING, Phase, Timeline
from trainers.telemetry.tracing import StepTracer, TraceSpan, WorkerTrace, aligned, chrome_trace, tracer_for
from trainers.workers import Workers

NS = 1e-3
"""A nanosecond in a trace's unit."""


def slices(document: dict[str, Any], kind: str, worker: int = 0) -> list[dict[str, Any]]:
    found = [event for event in document["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if event["cat"] == kind and event["pid"] == worker]


def assert_phases_tile_the_steps(document: dict[str, Any], worker: int, steps: Sequence[int]) -> None:
    """Spans of a worker follow each other, inside steps that follow each other."""
    whole = slices(document, "step", worker)
    assert [event["args"]["step"] for event in whole] == list(steps)
    for earlier, later in itertools.pairwise(whole):
        assert earlier["ts"] + earlier["dur"] <= later["ts"] + NS
    for event in whole:
        parts = [s for s in slices(document, "phase", worker) if s["args"]["step"] == event["args"]["step"]]
        at = event["ts"]
        for part in parts:
            assert part["dur"] >= 0
            assert part["ts"] == pytest.approx(at, abs=NS)
            at = part["ts"] + part["dur"]
        assert at == pytest.approx(event["ts"] + event["dur"], abs=NS)


def trace_of(checkpoints: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((checkpoints / "attempt-000001" / "trace.json").read_text())
    return document


def test_a_run_keeps_the_phases_of_its_last_steps(configure: Configure, recorder: Recorder) -> None:
    config = configure(telemetry__trace_steps=3, batch__micro_size=4)
    train(config, recorder, NeverStop())
    document = trace_of(Path(config.workspace.checkpoints))
    assert_phases_tile_the_steps(document, 0, [4, 5, 6])
    first = [s for s in slices(document, "phase") if s["args"]["step"] == 4]
    assert [(s["name"], s["args"].get("micro_batch")) for s in first] == [
        ("data_wait", None),
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("optimizer", None),
        ("communication", None),
        ("optimizer", None),
        ("communication", None),
    ]
    assert document["otherData"]["micro_batches"] == 2
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert names == ["worker 0"]
    told = {m.scope: m.value for m in recorder.measurements if m.name == "phase_ms_per_step"}
    for phase in ("forward", "backward"):
        spans = [s["dur"] for s in slices(document, "phase") if s["name"] == phase]
        assert told[f"worker:0:{phase}"] == pytest.approx(sum(spans) / 3 / 1e3, rel=1e-6)


def test_without_trace_steps_nothing_is_kept(configure: Configure, recorder: Recorder) -> None:
    config = configure(length__steps=2)
    train(config, recorder, NeverStop())
    assert not list(Path(config.workspace.checkpoints).rglob("trace.json"))


def test_workers_stand_in_one_trace_on_one_clock(
    config_in: Configure, launch: Launch, tmp_path: Path
) -> None:
    config = config_in(
        tmp_path, telemetry__trace_steps=2, parallel={"strategy": "ddp", "workers": 2}, length__steps=4
    )
    assert launch([config]).codes == [0, 0]
    document = trace_of(tmp_path)
    for worker in (0, 1):
        assert_phases_tile_the_steps(document, worker, [3, 4])
    # No worker ends a step's exchange before both have come to it; after it points are handed over.
    for step in (3, 4):
        both = [
            [
                s
                for s in slices(document, "phase", w)
                if s["args"]["step"] == step and s["name"] == "communication"
            ]
            for w in (0, 1)
        ]
        slack_us = max(document["otherData"]["clock_uncertainty_us"]) + NS
        for ours, theirs in (both, both[::-1]):
            assert ours[-2]["ts"] + ours[-2]["dur"] >= theirs[-2]["ts"] - slack_us


def test_spans_sum_to_the_seconds_of_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timeline = Timeline(now[0])
    tracer = StepTracer(1, 2, timeline)
    before: dict[str, float] = {}
    for step in range(3):
        if step == 1:
            before = timeline.spent_s()
        with tracer.around(step):
            for seconds, phase in enumerate((*TRAINING, Phase.forward, Phase.communication), start=1):
                timeline.enter(phase)
                now[0] += seconds
                timeline.spent_s()  # reading the time cuts no span
                now[0] += 0.5
    after = timeline.spent_s()
    spans = tracer.take()
    assert spans is not None
    assert tracer.take() is None
    assert len(spans) == 2 * (len(TRAINING) + 2)
    assert [span.micro_batch for span in spans if span.phase == "forward"] == [0, 1, 0, 1]
    seconds_of: dict[str, float] = defaultdict(float)
    for span in spans:
        seconds_of[span.phase] += span.end_s - span.begin_s
    for phase in TRAINING:
        assert seconds_of[phase] == pytest.approx(after[phase] - before[phase])


@pytest.mark.parametrize(
    ("left", "profiled", "skipped", "kept"),
    [(100, 0, 10, 5), (100, 20, 30, 5), (7, 0, 2, 5), (3, 0, 0, 3), (0, 0, 0, 0)],
)
def test_the_window_comes_after_the_first_steps_or_last(
    left: int, profiled: int, skipped: int, kept: int
) -> None:
    timeline = Timeline(time.perf_counter())
    tracer = tracer_for(5, profiled_steps=profiled, steps_left=left, timeline=timeline)
    for step in range(left):
        with tracer.around(step):
            timeline.enter(Phase.forward)
    spans = tracer.take()
    assert sorted({span.step for span in spans or ()}) == list(range(skipped + 1, skipped + kept + 1))


def worker(epoch_s: float, exchanges: Sequence[tuple[float, float]]) -> WorkerTrace:
    return WorkerTrace("w", (TraceSpan("forward", 1, 0, 1.0, 2.0),), epoch_s, tuple(exchanges))


def test_clocks_that_agree_are_not_moved() -> None:
    both = [worker(1000.0, [(1.0, 1.2)]), worker(1000.0, [(1.1, 1.21)])]
    assert [shift.seconds for shift in aligned(both)] == [0.0, 0.0]


def test_a_clock_that_exchanges_contradict_is_moved_between_their_bounds() -> None:
    # The second worker's clock is 50 s behind, and its Unix time is wrong by 3 s.
    first = worker(1000.0, [(51.0, 51.3), (52.0, 52.1)])
    second = worker(1053.0, [(1.1, 1.31), (2.05, 2.12)])
    shift = aligned([first, second])[1]
    assert shift.seconds == pytest.approx(52.1 - 2.05)
    assert shift.uncertainty_s == pytest.approx((52.1 - 2.05) - (52.0 - 2.12))
    moved = slices(chrome_trace([first, second], {}), "step", 1)[0]
    assert moved["ts"] == pytest.approx((52.1 - 2.05) * 1e6)


def test_a_full_disk_ends_no_run(
    configure: Configure, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Place, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracing, "put", full)
    outcome = train(configure(telemetry__trace_steps=1, length__steps=2), recorder, NeverStop())
    assert outcome.status == "completed"
    assert any("the trace was not saved" in line for line in recorder.logs)


def test_one_worker_gathers_alone() -> None:
    spans = (TraceSpan("forward", 1, 0, 0.0, 1.0),)
    (alone,) = tracing.gather(spans, "worker 0", Workers(), torch.device("cpu"))
    assert alone.spans == spans
    assert aligned([alone])[0].seconds == 0.0
