"""Numbers, times and names as short text. Pure."""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from service.domain.grid import LINK, fields_of
from service.domain.metrics import Spread
from service.domain.records import Run
from trainers.metrics import SCORES

_UNITS: Mapping[str, Sequence[tuple[float, str]]] = {
    # Largest first; a column takes the first unit in which its largest value is at least 1.
    "_s": ((3600 * 10, "h"), (600, "min"), (1.0, "s"), (1e-3, "ms")),
    "_usd": ((0.1, "USD"), (0.0, "¢")),
    "_kwh": ((1.0, "kWh"), (1e-3, "Wh"), (1e-6, "mWh")),
    "_kg": ((1.0, "kg"), (1e-3, "g"), (0.0, "mg")),
    "_mib": ((10240.0, "GiB"), (1.0, "MiB")),
}
_SIZES = {
    "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "USD": 1.0, "¢": 0.01,
    "kWh": 1.0, "Wh": 1e-3, "mWh": 1e-6, "kg": 1.0, "g": 1e-3, "mg": 1e-6, "GiB": 1024.0, "MiB": 1.0,
}  # fmt: skip
_TITLES = {
    "total_time_s": "time", "train_time_s": "train time", "cost_usd": "cost", "co2_kg": "CO2",
    "energy_kwh": "energy",
    "samples_per_s": "samples/s", "tokens_per_s": "tokens/s",
    "train_loss": "train loss", "validation_loss": "val. loss",
    "peak_memory_mib": "memory", "weight_memory_mib": "weights", "evaluation_memory_mib": "eval. memory",
    "example_ms_p50": "ms/example p50", "example_ms_p95": "ms/example p95",
}  # fmt: skip
_SHORT = {
    "batch.global_size": "batch", "model.name": "model", "optimizer.name": "optimizer", "task.name": "task",
}  # fmt: skip
_SECONDS = {"h": 3600.0, "d": 86_400.0, "w": 604_800.0}


@dataclass(frozen=True, slots=True)
class Scale:
    """How a column of figures is written: the unit in the heading, the same decimals for all."""

    unit: str
    factor: float
    decimals: int

    def text(self, value: float) -> str:
        return f"{value * self.factor:,.{self.decimals}f}"

    def spread(self, spread: Spread | None) -> str:
        if spread is None:
            return "-"
        if spread.sd is None:
            return self.text(spread.mean)
        return f"{self.text(spread.mean)} ±{self.text(spread.sd)}"


def scale_for(name: str, values: Iterable[float]) -> Scale:
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if name in SCORES and SCORES[name].share is not None:
        return Scale("", 1.0, 3)
    unit, factor = "", 1.0
    for suffix, units in _UNITS.items():
        if name.endswith(suffix) and not name.endswith("_per_s"):
            unit = next((word for threshold, word in units if largest >= threshold), units[-1][1])
            if largest == 0.0:
                # Nothing to go by: the unit that the name has.
                unit = next(word for _, word in units if _SIZES[word] == 1.0)
            factor = 1.0 / _SIZES[unit]
    return Scale(unit, factor, _decimals(largest * factor, most=8 if unit == "¢" else 4))


def _decimals(largest: float, most: int) -> int:
    """Three significant digits."""
    if largest <= 0.0:
        return 1
    return min(most, max(0, 2 - math.floor(math.log10(largest))))


def figure(name: str, value: float | int | str | None) -> str:
    """`12.3 s`; of money, as the page has it, `$0.00018`."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not name.endswith(tuple(_UNITS)):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if name.endswith("_usd"):
        whole, _, cents = f"{abs(value):,.{max(2, _decimals(abs(value), most=12))}f}".partition(".")
        return f"{'-' * (value < 0)}${whole}.{cents[:2]}{cents[2:].rstrip('0')}"
    scale = scale_for(name, [value])
    if not scale.unit and 0.0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{scale.text(value)} {scale.unit}".rstrip()


def three_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def title(name: str) -> str:
    if name in _TITLES:
        return _TITLES[name]
    unit = next((suffix for suffix in _UNITS if name.endswith(suffix) and not name.endswith("_per_s")), "")
    return name.removesuffix(unit).replace("_", " ")


def duration(seconds: float | None) -> str:
    """`7.2 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def ago(at_s: float | None, now_s: float | None = None) -> str:
    """`12 s ago`."""
    if at_s is None:
        return "-"
    return f"{duration(max(0.0, (time.time() if now_s is None else now_s) - at_s))} ago"


def clock(at_s: float) -> str:
    """Local time of day; with the date when it is not today."""
    local = time.localtime(at_s)
    today = time.localtime()
    form = "%H:%M:%S" if local[:3] == today[:3] else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, local)


def utc(at_s: float) -> str:
    """`2026-11-21 14:05 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))


def short_names(axes: Sequence[str]) -> dict[str, str]:
    """Returns the last part of each dotted name, unless two axes would then share it."""
    last = [short_name(axis) for axis in axes]
    return {axis: short if last.count(short) == 1 else axis for axis, short in zip(axes, last, strict=True)}


def short_name(axis: str) -> str:
    return LINK.join(_SHORT.get(field, field.rsplit(".", 1)[-1]) for field in fields_of(axis))


def axis_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def point_text(point: Mapping[str, Any]) -> str:
    """`precision=fp32 batch=16`; empty without axes."""
    names = short_names(list(point))
    return " ".join(f"{names[axis]}={axis_value(value)}" for axis, value in point.items())


def replicate_text(run: Run) -> str:
    """`precision=fp32 seed=0`, and `repeat=1` from the second run of a seed on."""
    return f"{point_text(run.point)} seed={run.seed}".strip() + (
        f" repeat={run.repeat}" if run.repeat else ""
    )


def counts_text(counts: Mapping[Any, int]) -> str:
    """`3 succeeded, 2 running, 3 queued`, in the order of a run's life."""
    order = ("succeeded", "stopped", "failed", "cancelled", "running", "starting", "paused", "queued")
    by_name = {str(getattr(name, "value", name)): count for name, count in counts.items()}
    return ", ".join(f"{by_name[name]} {name}" for name in order if by_name.get(name))


class TableFormat(StrEnum):
    """File format of an exported table of runs."""

    csv = "csv"  # Comma-separated, a header line, UTF-8; cells that a spreadsheet would run begin with '
    parquet = "parquet"  # Apache Parquet, typed columns, zstd
    jsonl = "jsonl"  # One JSON object per line


def seconds_of(text: str) -> float:
    """Reads 12h, 90d, 8w."""
    match = re.fullmatch(r"([1-9]\d{0,4})([hdw])", text)
    if match is None:
        raise ValueError(
            f"{text[:40]!r} is not a length of time; write hours, days or weeks as 12h, 90d or 8w"
        )
    return int(match[1]) * _SECONDS[match[2]]
