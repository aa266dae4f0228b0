"""Timelines of traced steps and kernel traces of profiled ones, next to a run's checkpoints. No torch."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.config.settings import Settings
from service.domain.records import Run
from service.domain.states import TERMINAL_RUN_STATES
from service.specs.models import checkpoints_of
from service.store import Store
from trainers.checkpoints.manifest import TRACE, kernel_traces, newest_file


class NoTrace(Exception):
    """A run has no timeline that can be read; the message is one line."""


def read_trace(store: Store, settings: Settings, run_id: int) -> bytes:
    """Returns a run's timeline as stored: a document in Chrome's trace-event format.

    Raises:
        NotFound: the run does not exist.
        NoTrace: it keeps none, or not yet, or its files are not on this machine.
    """
    run = store.run(run_id)
    folder = checkpoints_of(settings, run)
    try:
        if (path := newest_file(folder, TRACE)) is not None:
            return path.read_bytes()
    except OSError as error:
        raise NoTrace(f"run {run_id}: {error.filename} cannot be read ({error.strerror or error})") from None
    steps = json.loads(store.run_config(run_id))["telemetry"]["trace_steps"]
    if not steps:
        raise NoTrace(f"run {run_id} traces no steps; submit it with telemetry.trace_steps, such as 5")
    if run.state in TERMINAL_RUN_STATES:
        raise NoTrace(f"run {run_id} is {run.state} and left no {TRACE} in {folder}")
    raise NoTrace(f"run {run_id} is {run.state} and has not reached its {steps} traced steps yet")


def read_kernel_trace(store: Store, settings: Settings, run_id: int, rank: int) -> bytes:
    """Returns the profiler's trace of a worker's profiled steps, a document in Chrome's trace-event format.

    Raises:
        NotFound: the run does not exist.
        NoTrace: it keeps none of this worker, or not yet, or its files are not on this machine.
    """
    run = store.run(run_id)
    folder = checkpoints_of(settings, run)
    try:
        traces = kernel_traces(folder)
        if rank in traces:
            return gzip.decompress(traces[rank].read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise NoTrace(
            f"run {run_id}: the kernel trace of worker {rank} in {folder} cannot be read ({error})"
        ) from None
    if traces:
        raise NoTrace(
            f"run {run_id} has no kernel trace of worker {rank}; it has those of "
            f"{', '.join(map(str, traces))}"
        )
    steps = json.loads(store.run_config(run_id))["telemetry"]["profile_steps"]
    if not steps:
        raise NoTrace(f"run {run_id} profiles no steps; submit it with telemetry.profile_steps, such as 5")
    if run.state in TERMINAL_RUN_STATES:
        raise NoTrace(f"run {run_id} is {run.state} and left no kernel trace in {folder}")
    raise NoTrace(f"run {run_id} is {run.state} and has not reached its {steps} profiled steps yet")


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of a step on one worker's row, in milliseconds from the beginning of the step.

    `micro_batch` is 0-based; None where there is none.
    """

    row: str
    phase: str
    begin_ms: float
    end_ms: float
    micro_batch: int | None


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step (1-based) of a run on all its workers; rows are by rank."""

    step: int
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]


def typical_step(document: Mapping[str, Any]) -> TracedStep:
    """Returns the step of a trace that takes the median time.

    Raises:
        ValueError: the document is not a trace of this service.
    """
    try:
        events = document["traceEvents"]
        rows = {e["pid"]: str(e["args"]["name"]) for e in events if e["name"] == "process_name"}
        spans = [e for e in events if e["ph"] == "X" and e["cat"] == "phase"]
        times: dict[int, tuple[float, float]] = {}
        for event in spans:
            begin, end = times.get(event["args"]["step"], (float("inf"), 0.0))
            times[event["args"]["step"]] = (
                min(begin, event["ts"]),
                max(end, event["ts"] + event["dur"]),
            )
        order = sorted(times, key=lambda step: times[step][1] - times[step][0])
        chosen = order[(len(order) - 1) // 2]
        begin_us = times[chosen][0]
        bars = tuple(
            Bar(
                rows[e["pid"]],
                str(e["name"]),
                (e["ts"] - begin_us) / 1e3,
                (e["ts"] + e["dur"] - begin_us) / 1e3,
                e["args"].get("micro_batch"),
            )
            for e in spans
            if e["args"]["step"] == chosen
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a trace from this service ({type(error).__name__}: {error})") from None
    return TracedStep(int(chosen), tuple(rows[pid] for pid in sorted(rows)), bars)


def traced_step(settings: Settings, run: Run) -> TracedStep | None:
    """Returns a typical step; None where the run keeps no trace that can be read here."""
    try:
        path = newest_file(checkpoints_of(settings, run), TRACE)
        return None if path is None else typical_step(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None
