"""Live progress of an experiment: bars on a terminal, lines in a pipe, messages as JSON.

`Board` holds what is known of the runs and takes the messages of the live stream; it does no
I/O, so that what it shows can be tested at any width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from service.cli.rendering import grid_table, score_text, state_text, step_text
from service.domain.formats import axis_value, counts_text, duration, point_text, short_names, title
from service.domain.metrics import headline, score, shared_headline
from service.domain.states import TERMINAL_RUN_STATES, RunState

if TYPE_CHECKING:
    from service.domain.records import ExperimentStatus, Run

_FORMS = ((True, 20), (True, 14), (True, 8), (True, 0), (False, 8), (False, 0))
"""With axes, and width of the bars: the first that fits is shown."""
_SHORTEST_NAME = 8
_ACTIVE = (RunState.running, RunState.starting)


@dataclass
class Board:
    """What is known of an experiment while it is followed.

    Attributes:
        experiment: Latest state of the experiment.
        runs: by number, in grid order.
        latest: last value of each metric, by run number and metric name.
    """

    experiment: ExperimentStatus
    runs: dict[int, Run] = field(default_factory=dict)
    latest: dict[int, Mapping[str, float]] = field(default_factory=dict)
    said: dict[int, str] = field(default_factory=dict)
    """Last line of the log of each run that prepares."""

    def take_runs(self, runs: Iterable[Run]) -> None:
        """Replace what is known of these runs."""
        for run in runs:
            self.runs[run.id] = run

    def counts(self) -> dict[str, int]:
        """Runs by state."""
        counts: dict[str, int] = {}
        for run in self.runs.values():
            counts[run.state.value] = counts.get(run.state.value, 0) + 1
        return counts

    def heading(self, width: int, now_s: float) -> Text:
        """One line over everything; a long name gives way to what changes."""
        experiment = self.experiment
        known = Text.assemble("  ", state_text(experiment.state))
        counts = counts_text(self.counts())
        if counts:
            known.append(f"  {counts}")
        if experiment.started_s is not None:
            known.append(f"  {duration((experiment.ended_s or now_s) - experiment.started_s)}", style="dim")
        number, name = Text(f"experiment {experiment.id}  ", style="bold"), Text(experiment.name)
        room = width - number.cell_len - known.cell_len
        name.truncate(max(_SHORTEST_NAME, room), overflow="ellipsis")
        return Text.assemble(number, name, known, no_wrap=True, overflow="ellipsis")

    def picture(self, width: int, height: int, now_s: float) -> RenderableType:
        """Heading, then a bar per run: what is active first when not all of them fit.

        Args:
            width, height: room, in characters and lines.
            now_s: Current time, for the elapsed time.
        """
        room = max(3, height - 5)
        shown = self._most_interesting(room)
        parts: list[RenderableType] = [self.heading(width, now_s), self._table(shown, width)]
        lines = [(run, said) for run in shown if (said := self.preparing(run)) is not None]
        for run, said in lines[: max(1, height - len(shown) - 6)]:
            line = Text(f"run:{run.id}  {said}", style="dim", no_wrap=True)
            line.truncate(width, overflow="ellipsis")
            parts.append(line)
        hidden = len(self.runs) - len(shown)
        if hidden:
            parts.append(Text(f"and {hidden} more runs", style="dim"))
        return Group(*parts)

    def _most_interesting(self, room: int) -> list[Run]:
        runs = list(self.runs.values())
        if len(runs) <= room:
            return runs

        def rank(run: Run) -> tuple[int, float]:
            if run.state in _ACTIVE:
                return (0, run.index)
            if run.state in TERMINAL_RUN_STATES:
                return (1, -(run.ended_s or 0.0))
            return (2, run.index)

        chosen = sorted(runs, key=rank)[:room]
        return sorted(chosen, key=lambda run: run.index)

    def _table(self, runs: list[Run], width: int) -> Table:
        """The table with axes and bars as wide as fits, without bars, or without both."""
        measuring = Console(width=10_000)
        for with_axes, bar_width in _FORMS:
            table = self._table_with(runs, with_axes=with_axes, bar_width=bar_width)
            if Measurement.get(measuring, measuring.options, table).maximum <= width:
                break
        return table

    def _table_with(self, runs: list[Run], *, with_axes: bool, bar_width: int) -> Table:
        names = short_names(list(dict.fromkeys(axis for run in runs for axis in run.point)))
        shared = shared_headline(runs)
        judged = title(shared) if shared else "score"
        table = grid_table(
            "run",
            *(names.values() if with_axes else ()),
            "seed",
            *(["progress"] if bar_width else []),
            "step",
            "state",
            "loss",
            judged,
            right={"seed", "step", "loss", judged},
        )
        for run in runs:
            latest = self.latest.get(run.id, {})
            table.add_row(
                f"run:{run.id}",
                *(axis_value(run.point[axis]) if axis in run.point else "" for axis in names if with_axes),
                str(run.seed),
                *([_bar(run, bar_width)] if bar_width else []),
                step_text(run),
                _phase(run),
                _number(latest.get("loss", run.train_loss)),
                score_text(run, latest, named=shared is None),
            )
        return table

    def preparing(self, run: Run) -> str | None:
        """What a run waits for, or what it said last while it prepares its data; None for every other run."""
        if run.waits_for is not None:
            return f"waiting for {run.waits_for}"
        is_preparing = run.state in _ACTIVE and run.phase == "preparing"
        return self.said.get(run.id) if is_preparing else None

    def line(self, run: Run) -> str:
        """One run in one line, for output that is no terminal."""
        latest = self.latest.get(run.id, {})
        parts = [f"run:{run.id}", point_text(run.point), f"seed={run.seed}", str(run.state), step_text(run)]
        loss = latest.get("loss", run.train_loss)
        judged = score(run, latest)
        if loss is not None:
            parts.append(f"loss={loss:.4f}")
        if judged is not None:
            parts.append(f"{headline(run)}={judged:.3f}")
        if (said := self.preparing(run)) is not None:
            parts.append(f"({said})")
        return " ".join(part for part in parts if part and part != "-")


def _bar(run: Run, width: int) -> Text:
    total = run.total_steps or 1
    share = 1.0 if run.state is RunState.succeeded else min(run.step, total) / total
    done = round(share * width)
    style = "green" if run.state is RunState.succeeded else "cyan"
    # Two characters, so that it reads without colours too.
    return Text.assemble(("█" * done, style), ("░" * (width - done), "dim"))


def _phase(run: Run) -> Text:
    if run.state in _ACTIVE and run.phase:
        return Text(run.phase, style="cyan")
    if run.state is RunState.queued and run.attempt > 0:
        return Text("retrying", style="yellow")
    if run.state is RunState.failed and run.failure_class is not None:
        return Text(str(run.failure_class), style="red")
    return state_text(run.state)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
