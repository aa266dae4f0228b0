"""What all plots share: colours, layout, names of axes; and the records that the API declares. Pure.

The first colours are Okabe and Ito's, which can be told apart with any common form of colour blindness; past
sixteen series, dashes distinguish repeated colours. Text, grid and background take the page's colours
when shown, so that one plot serves light, dark and print. Traces are of kinds that plotly draws as SVG:
WebGL and parallel coordinates need `eval`, which the page forbids.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from service.domain.formats import title
from service.domain.serialization import Serializable
from trainers.metrics import DECLARED, SCORES, Better

PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C", "#9467BD",
    "#A65628", "#66A61E", "#E7298A", "#17A2A8", "#B59B00", "#7A68FF", "#E06C75", "#4C7F5F",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")

Trace = dict[str, Any]
Layout = dict[str, Any]
MOST_CURVES = 400  # Most curves of one figure


@dataclass(frozen=True, slots=True)
class Plot(Serializable):
    """One plot: plain data for plotly, without colours of a theme."""

    id: str  # Word that names it in a page
    caption: str  # What it shows and how to read it, in a few sentences
    data: list[Trace]  # plotly traces
    layout: Layout  # plotly layout without theme
    note: str = ""  # What is left out or estimated; empty = nothing


@dataclass(frozen=True, slots=True)
class Line(Serializable):
    """One line of a chart: the mean of a configuration over its seeds, or a run."""

    name: str  # What the legend calls it
    colour: int  # Place of its colour in the palette, from 0; runs of a configuration may share one
    runs: list[int]  # Ids of its runs
    x: list[float]  # Places on the axis, in order
    y: list[float | None]  # Values there; null = not a number
    low: list[float | None]  # Lower ends of the band around it; empty = no band
    high: list[float | None]  # Upper ends of the band


@dataclass(frozen=True, slots=True)
class Chart(Serializable):
    """Lines of one metric, as they are measured."""

    metric: str  # Name of the metric
    title: str  # Its name as headings show it
    caption: str  # What it shows and how to read it
    x_title: str  # Title of the horizontal axis, with its unit
    y_title: str  # Title of the vertical axis, with its unit
    lines: list[Line]  # In grid order
    note: str = ""  # What is left out or averaged; empty = nothing


class Form(StrEnum):
    """What a kind of figure is made of."""

    lines = "lines"  # Lines, which `/curves` returns as numbers
    traces = "traces"  # Traces of plotly
    axes = "axes"  # Parallel axes, which the page draws itself


@dataclass(frozen=True, slots=True)
class PlotInfo(Serializable):
    """A kind of figure, as the API lists it."""

    id: str  # Word that names it in the address
    title: str  # Heading of the figure
    about: str  # What it answers, in one sentence
    reads: tuple[str, ...]  # Parameters that change it; it refuses others
    form: Form  # lines, traces or axes


@dataclass(frozen=True, slots=True)
class Drawable(Serializable):
    """A metric or figure of runs."""

    name: str  # Name with its unit
    title: str  # Name as headings show it
    unit: str  # Its unit in words
    better: Better | None  # Which direction wins; null = neither


@dataclass(frozen=True, slots=True)
class Choices(Serializable):
    """What can be drawn of some experiments."""

    figures: list[PlotInfo]  # Kinds of figures
    points: list[Drawable]  # Metrics that have curves
    metrics: list[Drawable]  # Figures that runs end with
    axes: list[str]  # Axes of the grids, by dotted name


def layout(x: str, y: str, *, height: int) -> Layout:
    """`x` and `y` are the titles of the axes; the height is in pixels."""
    return {
        "height": height,
        "margin": {"l": 70, "r": 16, "t": 12, "b": 52},
        "xaxis": {"title": {"text": x, "standoff": 8}, "automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": y, "standoff": 8}, "automargin": True, "zeroline": False},
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        "hovermode": "closest",
    }


def bar_layout(x: str, count: int, *, mode: str = "stack") -> Layout:
    """`x` is the title of the axis along which the bars go, one above the other."""
    shape = layout(x, "", height=150 + 26 * count)
    shape["barmode"] = mode
    shape["yaxis"]["autorange"] = "reversed"
    return shape


def bars(
    name: str,
    labels: Sequence[str],
    lengths: Iterable[float],
    marker: Mapping[str, Any],
    hover: str = "%{y}: %{x:.3g}",
) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "y": labels,
        "x": rounded(lengths),
        "name": name,
        "marker": marker,
        "hovertemplate": hover + "<extra>%{fullData.name}</extra>",
    }


def with_legend(layout: Layout, names: Sequence[str]) -> Layout:
    """Makes room for the legend above the plot and returns the layout; a line holds about 100 characters."""
    longest = max((len(name) for name in names), default=0) + 8
    lines = math.ceil(len(names) / max(1, 120 // longest))
    layout["height"] += 22 * max(0, lines - 1)
    return layout


def axis_title(name: str) -> str:
    return f"{title(name)} ({unit_of(name)})"


def capitalised(name: str) -> str:
    words = title(name)
    return words[0].upper() + words[1:]


def unit_of(name: str) -> str:
    """The unit as an axis title shows it."""
    unit = DECLARED[name].unit if name in DECLARED else "1"
    return "share, 0 to 1" if name in SCORES and SCORES[name].share is not None else unit


def word(name: str) -> str:
    return name.replace("_", "-")


def rounded(values: Iterable[float]) -> list[float]:
    """Five significant digits: what a pixel can show, at half the bytes."""
    return [float(f"{value:.5g}") for value in values]


def rounded_or_gap(values: Iterable[float | None]) -> list[float | None]:
    """The same where values may be missing: plotly leaves a gap there."""
    return [float(f"{value:.5g}") if value is not None and math.isfinite(value) else None for value in values]


def faded(colour: str, opacity: float = 0.18) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


class XAxis(StrEnum):
    """What a curve is drawn over."""

    step = "step"  # Optimizer updates
    time = "time"  # Time of the run's attempts, without waits between them
    tokens = "tokens"  # Tokens without padding
    cost = "cost"  # Price of the devices x time
    energy = "energy"  # Energy, at the run's mean power


class By(StrEnum):
    """What a line stands for."""

    cell = "cell"  # A configuration: the mean over its seeds, with a band
    run = "run"  # One run


class Band(StrEnum):
    """What a band around a mean shows."""

    sd = "sd"  # One standard deviation between seeds to each side
    range = "range"  # From the least to the greatest seed


@dataclass(frozen=True, slots=True)
class Options:
    """The chosen options; each kind of plot reads some of them."""

    metric: tuple[str, ...] = ()  # Figures that are drawn; none = those of the report
    over: tuple[str, ...] = ()  # Figures over which the frontier is found; none = those that are drawn
    x: XAxis = XAxis.step
    by: By | None = None  # What a line or a point stands for; None = the kind's own choice
    band: Band = Band.sd
    max_curves: int | None = None  # Most lines; None = the kind's own choice
    unfinished: bool = True  # Include runs that have not ended, or not well
    strategy: str | None = None  # Named weighting of scores
    weight: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """The user's own weights by metric."""
    run: int | None = None  # Run of which a step is drawn

    def given(self) -> list[str]:
        plain = Options()
        return [one.name for one in fields(self) if getattr(self, one.name) != getattr(plain, one.name)]
