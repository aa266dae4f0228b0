"""A preview over the wire: the runs of a grid, and the forecast of it."""

from __future__ import annotations

from api.shapes import Number, PlannedRunShape, Shape


class SpanShape(Shape):
    """An estimate with the ends of its interval."""

    low: Number
    """Lower end."""
    middle: Number
    """The estimate."""
    high: Number
    """Upper end."""


class ForecastShape(Shape):
    """What a whole grid will take; 90% intervals."""

    runs: int
    """Runs that are forecast."""
    cost_usd: SpanShape
    """Money, in USD."""
    energy_kwh: SpanShape
    """Energy, in kWh."""
    device_hours: SpanShape
    """Device time, in hours summed over runs."""
    basis: tuple[str, ...]
    """What it rests on, in words, each with its number of runs."""
    unknown: tuple[str, ...]
    """Why other runs are not forecast, in words."""
    warnings: tuple[str, ...]
    """What does not fit into the budget, in words."""


class PreviewPage(Shape):
    """One page of the runs that a spec would make."""

    run_count: int
    """Runs of the whole grid."""
    reused_count: int
    """Runs of the whole grid that are reused; 0 unless the spec says `reuse: true`."""
    cluster_age_s: float | None
    """How old the view of the cluster is; null when there is none, and then capacity is not judged."""
    items: list[PlannedRunShape]
    next_page_token: str | None
    forecast: ForecastShape | None
    """What the whole grid will take; with the first page only."""
