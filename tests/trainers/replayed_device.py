"""A device that plays back a recorded trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainers.device_kinds.counters import Device, DeviceSample


class ReplayedDevice(Device):
    """Plays back a trace, one sample at each call; the last one stays.

    A trace is JSON lines. The first is an object with `trace` (the format's number, 1), `made`
    (how the trace came to be) and `identity`. Each other line holds a `DeviceSample`'s fields and,
    where the device has the counter, `energy_j`.

    Args:
        path: of the trace.
    """

    def __init__(self, path: Path) -> None:
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        if head.get("trace") != 1 or not lines:
            raise ValueError(f"{path}: not a trace of format 1 with samples")
        self.identity, self.made = str(head["identity"]), str(head["made"])
        self._energy_j = [line.pop("energy_j", None) for line in lines]
        self._samples = [_sample(line) for line in lines]
        self._next = 0

    def energy_j(self) -> float | None:
        """The counter at the sample that was played last; at the beginning, at the first."""
        joules: float | None = self._energy_j[max(0, self._next - 1)]
        return joules

    def sample(self) -> DeviceSample | None:
        """The next sample."""
        place = min(self._next, len(self._samples) - 1)
        self._next = place + 1
        return self._samples[place]

    def facts(self) -> dict[str, object]:
        return {"gpu_uuid": self.identity, "gpu_trace": self.made}


def write_trace(path: Path, identity: str, made: str, samples: Iterable[DeviceSample]) -> None:
    """Writes samples as a trace that `ReplayedDevice` plays.

    Args:
        path: of the new file.
        identity: of the device.
        made: how the samples came to be.
        samples: in order of time.
    """
    head = {"trace": 1, "made": made, "identity": identity}
    lines: list[Mapping[str, Any]] = [
        head,
        *({name: value for name, value in asdict(sample).items() if value is not None} for sample in samples),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _sample(fields: dict[str, Any]) -> DeviceSample:
    return DeviceSample(**{**fields, "throttled": tuple(fields.get("throttled", ()))})
