"""Parts of answers that the command line and the report write alike. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.analysis.answers import ComparisonAnswer, KernelRow, Ratio, ScalingRow, ScoreAnswer, TimeTo
from service.domain.formats import Scale, duration, point_text, scale_for, three_digits, title
from trainers.telemetry.kernels import KERNEL_FIGURES


def configuration(point: Mapping[str, Any]) -> str:
    return point_text(point) or "all runs"


def scales_of(answer: ComparisonAnswer) -> dict[str, Scale]:
    """By metric, so that a column has one unit."""
    means = {
        metric.name: [spread.mean for row in answer.rows if (spread := row.figures[metric.name]) is not None]
        for metric in answer.metrics
    }
    return {name: scale_for(name, values) for name, values in means.items()}


def kernel_cells(kernels: Sequence[KernelRow]) -> tuple[list[str], list[list[str]]]:
    """Returns headings and a row per kernel; counters only where some kernel has them."""
    names = [name for name in KERNEL_FIGURES if any(name in kernel.figures for kernel in kernels)]
    rows = [[three_digits(kernel.figures.get(name)) for name in names] for kernel in kernels]
    return [KERNEL_FIGURES[name].heading for name in names], rows


def weights(answer: ScoreAnswer) -> str:
    return ", ".join(f"{title(each.metric)} {each.weight:g}" for each in answer.criteria)


def ratio(of: Ratio | None, to: str, form: str = ".2f", unit: str = "x") -> str:
    """`1.52x (1.40-1.60)`, with `to` between the ends of the interval."""
    if of is None:
        return "-"
    if of.low is None or of.high is None:
        return f"{of.ratio:{form}}{unit}"
    return f"{of.ratio:{form}}{unit} ({of.low:{form}}{to}{of.high:{form}})"


def scaling_rows(rows: Sequence[ScalingRow], to: str) -> tuple[list[str], list[list[str]]]:
    """Returns headings and a row per configuration and kind, with `to` between the ends of an interval."""
    names = list(dict.fromkeys(name for row in rows for name in row.efficiencies))
    headings = ["configuration", "scaling", "workers", *(f"{title(name)} efficiency" for name in names)]
    return headings, [
        [
            configuration(row.point),
            row.kind,
            f"{row.baseline_workers} to {row.workers}",
            *(ratio(row.efficiencies.get(name), to, ".0%", "") for name in names),
        ]
        for row in rows
    ]


def time_to_rows(time_to: TimeTo, points: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Configuration, runs that reached the target, mean time, speed-up; `points` are by label."""
    return [
        [
            configuration(points.get(row.label, {})),
            f"{row.reached}/{row.of}",
            duration(row.mean_s),
            f"{row.speedup:.2f}x" if row.speedup else "-",
        ]
        for row in time_to.rows
    ]
