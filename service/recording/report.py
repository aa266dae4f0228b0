"""What the workers of an experiment and its recorder exchange.

Reports can be sent again: every row has a key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from service.domain.records import LogLine, MeasurementRow
from service.store import AliveRow, CheckpointRow, PointBatch, ProgressRow, RecordBatch
from trainers.reporting import StopReason


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has begun; see `Store.run_started`."""

    total_steps: int
    resumed_from_step: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of one attempt, and a sign of life even without rows."""

    run_id: int
    attempt: int
    started: Started | None = None
    rows: RecordBatch = field(default_factory=RecordBatch)

    @property
    def empty(self) -> bool:
        return self.started is None and not self.rows.attempts()

    def to_bytes(self) -> bytes:
        """Returns JSON in which NaN and infinities keep their names, and what JSON lacks becomes a string."""
        return json.dumps(asdict(self), separators=(",", ":"), default=str, skipkeys=True).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Report:
        document = json.loads(text)
        rows, started = document["rows"], document["started"]
        return cls(
            document["run_id"],
            document["attempt"],
            Started(**started) if started else None,
            RecordBatch(
                points=[PointBatch(**row) for row in rows["points"]],
                logs=[LogLine(**row) for row in rows["logs"]],
                measurements=[MeasurementRow(**row) for row in rows["measurements"]],
                progress=[ProgressRow(**row) for row in rows["progress"]],
                checkpoints=[CheckpointRow(**row) for row in rows["checkpoints"]],
                alive=[AliveRow(**row) for row in rows["alive"]],
            ),
        )


STALE_EXIT_CODE = 70
"""Of a process that ends at once, because another attempt is current."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The rows of a report are committed or on the recorder's disk.

    Attributes:
        stop: why the run should end at its next step boundary; None = continue.
        stale: another attempt is current; end and write nothing.
    """

    stop: StopReason | None = None
    stale: bool = False


def merge(reports: list[Report]) -> RecordBatch:
    batch = RecordBatch()
    for report in reports:
        batch.points.extend(report.rows.points)
        batch.logs.extend(report.rows.logs)
        batch.measurements.extend(report.rows.measurements)
        batch.progress.extend(report.rows.progress)
        batch.checkpoints.extend(report.rows.checkpoints)
        batch.alive.extend(report.rows.alive)
    return batch
