"""Where time and money went: parts of a run's time, when runs ran, one step, the charges. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.analysis.ranking import label_of
from service.domain.formats import figure as figure_text
from service.domain.formats import point_text, replicate_text, scale_for
from service.domain.ledger import OUTSIDE_ATTEMPTS, Ledger
from service.domain.records import Run
from service.output.ledger_words import PARTS
from service.output.plots.material import TIME_PARTS
from service.output.plots.plot import PALETTE, Plot, Trace, bar_layout, bars, layout, rounded, with_legend
from service.output.run_files import TracedStep

MOST_BARS = 100  # Configurations, or runs, that one figure has a bar for
_STATES = {
    "succeeded": PALETTE[2],
    "stopped": PALETTE[1],
    "failed": PALETTE[5],
    "cancelled": PALETTE[6],
}
_PHASES = {
    "forward": PALETTE[0],
    "backward": PALETTE[4],
    "optimizer": PALETTE[2],
    "communication": PALETTE[1],
    "bubble": PALETTE[5],
    "data_wait": PALETTE[3],
    "setup": PALETTE[7],
    "checkpoint": PALETTE[6],
    "validation": PALETTE[0],
    "test": PALETTE[4],
    "profiling": PALETTE[2],
}
"""Colours of a run's phases, those of a step first, in the order of a step's legend."""
_HATCHED = ("validation", "test", "profiling")  # That share their colour with another phase
_PAID: Mapping[str, tuple[str, dict[str, Any]]] = {
    "kept": ("work that counts", {"color": PALETTE[2]}),
    "lost": ("lost work", {"color": PALETTE[5], "pattern": {"shape": "/"}}),
    "overhead": ("overhead and waiting", {"color": PALETTE[1]}),
}
"""Parts of the money, with their names and marks."""
_MOST_TIMED = 500  # Runs that the time line shows one by one


def breakdown(seconds: Mapping[str, Mapping[str, float]], runs: Sequence[Run]) -> Plot:
    points = {label_of(run.point): run.point for run in runs}
    labels = list(seconds)[:MOST_BARS]
    largest = max(sum(parts.values()) for parts in seconds.values())
    scale = scale_for("total_time_s", [largest])
    names = [point_text(points[label]) or "all runs" for label in labels]
    data: list[Trace] = []
    for part in TIME_PARTS:
        if any(of.get(part) for of in seconds.values()):
            phase = part.removesuffix("_time_s")
            lengths = [seconds[label].get(part, 0.0) * scale.factor for label in labels]
            mark = {"color": _PHASES[phase], **({"pattern": {"shape": "/"}} if phase in _HATCHED else {})}
            data.append(bars(phase.replace("_", " "), names, lengths, mark, "%{y}: %{x:.3g} " + scale.unit))
    shape = bar_layout(f"time ({scale.unit}), mean over seeds", len(labels))
    left = len(seconds) - len(labels)
    return Plot(
        "breakdown",
        "Breakdown of the time of a run, mean over seeds.",
        data,
        shape,
        f"The first {len(labels)} of {len(seconds):,} configurations." if left else "",
    )


def timeline(runs: Sequence[Run], now_s: float) -> Plot:
    """Plots when each run ran; bars of unfinished runs end at `now_s`."""
    begun = (
        sorted(runs, key=lambda run: run.started_s or 0.0)[:_MOST_TIMED] if len(runs) > _MOST_TIMED else runs
    )
    origin = min(run.started_s for run in begun if run.started_s is not None)
    last = max(run.ended_s or now_s for run in begun) - origin
    scale = scale_for("total_time_s", [last])
    data: list[Trace] = []
    for state in dict.fromkeys(str(run.state) for run in begun):
        of = [run for run in begun if str(run.state) == state]
        start_s = [(run.started_s or 0.0) for run in of]
        lengths = [
            ((run.ended_s or now_s) - start) * scale.factor for run, start in zip(of, start_s, strict=True)
        ]
        marker = {"color": _STATES.get(state, PALETTE[4])}
        hover = "%{y} %{text}<br>from %{base:.4g} " + scale.unit
        base = [(start - origin) * scale.factor for start in start_s]
        texts = [replicate_text(run) for run in of]
        trace = bars(state, [f"run:{run.id}" for run in of], lengths, marker, hover)
        data.append(trace | _placed(base, texts))
    dense = len(begun) > 60
    shape = layout(
        f"time since the first run started ({scale.unit})",
        "run",
        height=min(1600, 140 + (8 if dense else 18) * len(begun)),
    )
    shape["yaxis"] |= {
        "autorange": "reversed",
        "categoryorder": "array",
        "categoryarray": [f"run:{run.id}" for run in begun],
        "showticklabels": not dense,
    }
    shape |= {"bargap": 0.15, "barmode": "overlay"}
    return Plot(
        "timeline",
        "When each run ran, from first start to end, including waits between attempts.",
        data,
        shape,
        f"The first {len(begun)} of {len(runs):,} runs." if len(begun) < len(runs) else "",
    )


def step(run: Run, traced: TracedStep) -> Plot:
    """Plots one step of a run: a row per worker, a bar per phase; waiting stands out."""
    data: list[Trace] = []
    for phase in dict.fromkeys([*_PHASES, *(bar.phase for bar in traced.bars)]):
        bars_of = [bar for bar in traced.bars if bar.phase == phase]
        if not bars_of:
            continue
        marker = {"color": _PHASES.get(phase, PALETTE[6]), "line": {"width": 1}}
        lengths = [bar.end_ms - bar.begin_ms for bar in bars_of]
        hover = "%{y} %{text}<br>%{x:.4g} ms from %{base:.4g} ms"
        micro_batches = [bar.micro_batch for bar in bars_of]
        texts = ["" if number is None else f"micro-batch {number + 1}" for number in micro_batches]
        trace = bars(phase.replace("_", " "), [bar.row for bar in bars_of], lengths, marker, hover)
        data.append(trace | _placed([bar.begin_ms for bar in bars_of], texts))
    shape = layout("time since the start of the step (ms)", "worker", height=170 + 34 * len(traced.rows))
    shape["yaxis"] |= {"autorange": "reversed", "categoryorder": "array", "categoryarray": [*traced.rows]}
    shape |= {"bargap": 0.2, "barmode": "overlay"}
    point = point_text(run.point)
    return Plot(
        f"step-{run.id}",
        f"Step {traced.step} of run:{run.id}{f' ({point})' if point else ''}, a step of median duration: "
        "each worker's timeline. `stillhouse trace` has all traced steps.",
        data,
        shape,
    )


def _placed(base: Sequence[float], texts: Sequence[str]) -> Trace:
    """What makes bars begin at `base`, with texts that are shown on hovering alone."""
    return {"base": rounded(base), "text": texts, "textposition": "none"}


def money(ledgers: Sequence[Ledger], runs: Sequence[Run]) -> Plot:
    of_run = {account.run_id: account.total for ledger in ledgers for account in ledger.runs}
    cells: dict[str, dict[str, float]] = {}
    for run in runs:
        if (total := of_run.get(run.id)) is not None:
            parts = cells.setdefault(point_text(run.point) or "all runs", dict.fromkeys(_PAID, 0.0))
            parts["lost"] += total.lost_usd
            parts["overhead"] += total.overhead_usd
            parts["kept"] += max(0.0, total.cost_usd - total.lost_usd - total.overhead_usd)
    rows = sorted(cells.items(), key=lambda cell: -sum(cell[1].values()))
    shown, rest = rows[:MOST_BARS], rows[MOST_BARS:]
    if rest:
        shown.append(
            (f"{len(rest):,} more configurations", {part: sum(of[part] for _, of in rest) for part in _PAID})
        )
    # What the sweep paid for outside of attempts belongs to no configuration.
    outside = {
        f"{PARTS.get(part.part, part.part)} (no configuration)": part.cost_usd
        for ledger in ledgers
        for part in ledger.overhead
        if part.part in OUTSIDE_ATTEMPTS and part.cost_usd
    }
    names = [*(name for name, _ in shown), *outside]
    scale = scale_for("cost_usd", [*(sum(of.values()) for _, of in shown), *outside.values()])
    data: list[Trace] = []
    for part, (name, mark) in _PAID.items():
        values = [of[part] for _, of in shown]
        values += list(outside.values()) if part == "overhead" else [0.0] * len(outside)
        if any(values):
            data.append(
                bars(name, names, [v * scale.factor for v in values], mark, "%{y}: %{x:.4g} " + scale.unit)
            )
    paid = sum(ledger.total.cost_usd for ledger in ledgers)
    shape = bar_layout(f"cost ({scale.unit}), sum over seeds", len(names))
    return Plot(
        "money",
        "What was paid for, summed over seeds and attempts: work that a result holds, work that was lost, "
        f"and overhead that no configuration caused. All together: {figure_text('cost_usd', paid)}.",
        data,
        with_legend(shape, [trace["name"] for trace in data]),
    )
