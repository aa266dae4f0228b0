"""Options of plots, shared by the report, the page and the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType

MOST_CURVES = 400
"""Most curves of one figure."""


class XAxis(StrEnum):
    """What a curve is drawn over."""

    step = "step"
    """Optimizer updates."""
    time = "time"
    """Time of the run's attempts, without waits between them."""
    tokens = "tokens"
    """Tokens without padding."""
    cost = "cost"
    """Price of the devices x time."""
    energy = "energy"
    """Energy, at the run's mean power."""


class By(StrEnum):
    """What a line stands for."""

    cell = "cell"
    """A configuration: the mean over its seeds, with a band."""
    run = "run"
    """One run."""


class Band(StrEnum):
    """What a band around a mean shows."""

    sd = "sd"
    """One standard deviation between seeds to each side."""
    range = "range"
    """From the least to the greatest seed."""


@dataclass(frozen=True, slots=True)
class Options:
    """The chosen options; each kind of plot reads some of them.

    Attributes:
        metric: Figures that are drawn; none = those of the report.
        over: Figures over which the frontier is found; none = those that are drawn.
        by: What a line or a point stands for; None = the kind's own choice.
        smooth: Weight of earlier values in the exponentially weighted mean; 0 = as measured.
        max_curves: Most lines; None = the kind's own choice.
        unfinished: Include runs that have not ended, or not well.
        strategy: Named weighting of scores.
        weight: The user's own weights by metric.
        run: Run of which a step is drawn.
    """

    metric: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    x: XAxis = XAxis.step
    by: By | None = None
    band: Band = Band.sd
    smooth: float = 0.0
    max_curves: int | None = None
    unfinished: bool = True
    strategy: str | None = None
    weight: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    run: int | None = None

    def given(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        plain = Options()
        return [one.name for one in fields(self) if getattr(self, one.name) != getattr(plain, one.name)]
