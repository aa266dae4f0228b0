"""Following an experiment, run or study to its end: bars on a terminal, lines in a pipe, messages as JSON."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from service.cli.connection import Target
from service.cli.tables import axis_columns, score_text, state_text, step_text
from service.cli.terminal import (
    Answer,
    ExitCode,
    Failure,
    console,
    grid_table,
    json_text,
    note,
    print_rows,
    say,
)
from service.client import Client, Ended
from service.domain.formats import ago, clock, counts_text, duration, replicate_text, title
from service.domain.metrics import headline, score, shared_headline
from service.domain.records import Event, ExperimentStatus, LogLine, Run, RunProgress
from service.domain.states import (
    RUN_STATES_WITH_RESULT,
    TERMINAL_EXPERIMENT_STATES,
    TERMINAL_RUN_STATES,
    ExperimentState,
    RunState,
)
from service.domain.studies import PartState, StudyDetail, StudyPart

_LINE_EVERY_S = 5.0
_PICTURES_PER_S = 4
POLL_S = 0.5

_FORMS = ((True, 20), (True, 14), (True, 8), (True, 0), (False, 8), (False, 0))
"""With axes, and width of the bars: the first that fits is shown."""
_SHORTEST_NAME = 8
_ACTIVE = (RunState.running, RunState.starting)


@dataclass
class Board:
    """The state of a followed experiment."""

    experiment: ExperimentStatus
    runs: dict[int, Run] = field(default_factory=dict)  # By number, in grid order
    latest: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Last value of each metric, by run number and metric name."""
    said: dict[int, str] = field(default_factory=dict)
    """Last line of the log of each run that prepares, by run number."""
    shown_s: dict[int, float] = field(default_factory=dict)
    """When a line of each run was printed, by run number."""

    def take_runs(self, runs: Iterable[Run]) -> None:
        self.runs.update((run.id, run) for run in runs)

    def counts(self) -> dict[str, int]:
        return Counter(run.state.value for run in self.runs.values())

    def heading(self, width: int, now_s: float) -> Text:
        """Returns one line; a long name gives way to what changes."""
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
        """Returns the heading and a bar per run, active runs first when not all fit into the lines."""
        room = max(3, height - 5)
        shown = self._most_interesting(room)
        parts: list[RenderableType] = [self.heading(width, now_s), self._table(shown, width)]
        lines = [(run, text) for run in shown if (text := self.preparing(run)) is not None]
        for run, text in lines[: max(1, height - len(shown) - 6)]:
            line = Text(f"run:{run.id}  {text}", style="dim", no_wrap=True)
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
        # With axes and bars as wide as fits, without bars, or without both.
        measuring = Console(width=10_000)
        for with_axes, bar_width in _FORMS:
            table = self._table_with(runs, with_axes=with_axes, bar_width=bar_width)
            if Measurement.get(measuring, measuring.options, table).maximum <= width:
                break
        return table

    def _table_with(self, runs: list[Run], *, with_axes: bool, bar_width: int) -> Table:
        axes, axis_cells = axis_columns(runs)
        shared = shared_headline(runs)
        judged = title(shared) if shared else "score"
        seed = ["seed", *["repeat"] * any(run.repeat for run in runs)]
        losses = {run.id: self.latest.get(run.id, {}).get("loss", run.train_loss) for run in runs}
        rows = [
            (
                f"run:{run.id}",
                *(axis_cells(run) if with_axes else []),
                *(getattr(run, of) for of in seed),
                *([_bar(run, bar_width)] if bar_width else []),
                step_text(run),
                _phase(run),
                "-" if (loss := losses[run.id]) is None else f"{loss:.3f}",
                score_text(run, self.latest.get(run.id, {}), named=shared is None),
            )
            for run in runs
        ]
        bar = ["progress"] if bar_width else []
        headings = ("run", *(axes if with_axes else []), *seed, *bar, "step", "state", "loss", judged)
        return grid_table(headings, rows, right={*seed, "step", "loss", judged})

    def preparing(self, run: Run) -> str | None:
        """Returns what a run waits for, or its last line while it prepares its data; otherwise None."""
        if run.waits_for is not None:
            return f"waiting for {run.waits_for}"
        is_preparing = run.state in _ACTIVE and run.phase == "preparing"
        return self.said.get(run.id) if is_preparing else None

    def line(self, run: Run) -> str:
        latest = self.latest.get(run.id, {})
        parts = [f"run:{run.id}", replicate_text(run), str(run.state), step_text(run)]
        loss = latest.get("loss", run.train_loss)
        judged = score(run, latest)
        if loss is not None:
            parts.append(f"loss={loss:.4f}")
        if judged is not None:
            parts.append(f"{headline(run)}={judged:.3f}")
        if (text := self.preparing(run)) is not None:
            parts.append(f"({text})")
        return " ".join(part for part in parts if part and part != "-")

    def say_now_and_then(self, run: Run) -> None:
        now_s = time.monotonic()
        if now_s - self.shown_s.get(run.id, 0.0) >= _LINE_EVERY_S:
            self.shown_s[run.id] = now_s
            say(f"{clock(time.time())} {self.line(run)}")


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


def follow_experiment(client: Client, experiment_id: int, *, as_json: bool = False) -> ExperimentStatus:
    """Shows an experiment until it has ended, in the form that fits where the output goes."""
    if as_json:
        return _follow_as_json(client, experiment_id)
    experiment = client.experiment(experiment_id)
    if experiment.waiting is not None:
        note(f"waiting at position {experiment.waiting.position}: {experiment.waiting.reason}")
    board = Board(experiment)
    board.take_runs(client.all_runs(experiment_id=experiment_id))
    if sys.stdout.isatty():
        return _follow_live(client, board)
    return _follow_in_lines(client, board)


def _follow_as_json(client: Client, experiment_id: int) -> ExperimentStatus:
    for message in client.follow(experiment_id):
        say(json_text(_document(message)))
        if isinstance(message, Ended):
            return message.target
    raise Failure(f"the service closed the stream of experiment {experiment_id}", ExitCode.unreachable)


def _document(message: Any) -> dict[str, Any]:
    match message:
        case Event():
            return {"event": message}
        case RunProgress():
            return {"run": message.run, "latest": _latest(message), "line": message.line}
        case ExperimentStatus():
            return {"experiment": message}
        case LogLine():
            return {"log": message}
        case Ended():
            return {"ended": message.target}
    return {"points": message}


def _latest(progress: RunProgress) -> dict[str, float]:
    return {name: point.value for name, point in progress.latest.items()}


def _follow_live(client: Client, board: Board) -> ExperimentStatus:
    screen = console()

    def picture() -> RenderableType:
        return board.picture(screen.width, screen.height, time.time())

    # The picture is drawn by rich's own thread from the board; messages only change the board.
    with Live(console=screen, refresh_per_second=_PICTURES_PER_S, get_renderable=picture) as live:
        for _ in _take_messages(client, board):
            pass
        live.refresh()
    return board.experiment


def _follow_in_lines(client: Client, board: Board) -> ExperimentStatus:
    for message in _take_messages(client, board):
        if isinstance(message, Event):
            about = f"run:{message.run_id} " if message.run_id is not None else ""
            say(f"{clock(message.at_s)} {about}{message.message}")
        elif isinstance(message, RunProgress) and (
            message.run.state is RunState.running or board.preparing(message.run) is not None
        ):
            board.say_now_and_then(message.run)
    for run in board.runs.values():
        say(board.line(run))
    say(f"experiment {board.experiment.id} {board.experiment.state}: {counts_text(board.counts())}")
    return board.experiment


def _take_messages(client: Client, board: Board) -> Iterator[Any]:
    for message in client.follow(board.experiment.id):
        if isinstance(message, RunProgress):
            board.take_runs([message.run])
            board.latest[message.run.id] = _latest(message)
            if message.line is not None:
                board.said[message.run.id] = message.line.message
        elif isinstance(message, ExperimentStatus):
            board.experiment = message
        elif isinstance(message, Ended):
            board.experiment = message.target
            # The stream carries active runs; the list also has those that ended between two looks.
            board.take_runs(client.all_runs(experiment_id=board.experiment.id))
        yield message
        if isinstance(message, Ended):
            return


def follow_run(client: Client, run_id: int, *, as_json: bool = False) -> Run:
    board = Board(client.experiment(client.run(run_id).experiment_id))
    for message in client.follow_run(run_id):
        if as_json:
            document = _document(message)
            document.pop("line", None)
            say(json_text(document))
        elif isinstance(message, LogLine):
            say(f"{clock(message.at_s)} {message.message}")
        elif isinstance(message, RunProgress):
            board.latest[run_id] = _latest(message)
            board.say_now_and_then(message.run)
        if isinstance(message, Ended):
            if not as_json:
                say(board.line(message.target))
            return message.target
    raise Failure(f"the service closed the stream of run:{run_id}", ExitCode.unreachable)


def look(client: Client, ref: Target) -> tuple[ExperimentStatus | Run, bool]:
    """Returns an experiment or run as it is now, and whether it has ended."""
    target: ExperimentStatus | Run = client.run(ref.id) if ref.is_run else client.experiment(ref.id)
    return target, target.state in TERMINAL_EXPERIMENT_STATES or target.state in TERMINAL_RUN_STATES


def wait_for(client: Client, ref: Target, *, timeout_s: float | None) -> ExperimentStatus | Run:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        target, ended = look(client, ref)
        if ended:
            return target
        if deadline is not None and time.monotonic() >= deadline:
            raise Failure(f"{ref} has not ended after {timeout_s:g} s and continues", ExitCode.timeout)
        time.sleep(POLL_S)


def exit_code(ended: ExperimentStatus | Run) -> ExitCode:
    well = ended.state is ExperimentState.succeeded or ended.state in RUN_STATES_WITH_RESULT
    return ExitCode.ok if well else ExitCode.not_succeeded


def answer_of(one: StudyDetail, *, submitted: bool = False, ended: bool = False) -> Answer:
    code = ExitCode.not_succeeded if ended and one.state is not ExperimentState.succeeded else ExitCode.ok
    if submitted:
        return Answer(
            one,
            f"submitted study {one.id}: {one.name}, {len(one.parts)} parts",
            f"to watch it: stillhouse study {one.id} --watch",
        )
    return Answer(one, partial(print_study, one), code=code)


def print_study(one: StudyDetail) -> None:
    say(f"study {one.id}: {one.name}  {one.state}")
    print_rows(("part", "experiment", "state", "runs", ""), [_row(part) for part in one.parts], lead=0)
    if one.ended and one.compared:
        say(f"to compare: stillhouse compare --study {one.id} --claims")


def _row(part: StudyPart) -> tuple[object, ...]:
    experiment = part.experiment
    known = part.reason or part.chosen or ""
    if part.state is PartState.waiting:
        known = f"waits for {', '.join(part.needs)}"
    if experiment is None:
        return part.name, "-", state_text(part.state), "-", known
    state, runs = state_text(experiment.state), counts_text(experiment.run_states)
    return part.name, experiment.id, state, runs, known


def print_studies(found: list[StudyDetail]) -> None:
    if not found:
        say("no studies; submit a file with the key study")
        return
    rows = [
        (one.id, one.name, one.owner, state_text(one.state), len(one.parts), ago(one.created_s))
        for one in found
    ]
    print_rows(("id", "name", "owner", "state", "parts", "submitted"), rows, right={"id", "parts"}, lead=1)


def follow_study(
    client: Client,
    one: StudyDetail,
    *,
    as_json: bool = False,
    quiet: bool = False,
    timeout_s: float | None = None,
) -> StudyDetail:
    """Shows each change of a part until the study has ended."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    shown: dict[str, str] = {}
    while True:
        for part in one.parts:
            name, _, state, runs, known = map(str, _row(part))
            line = " ".join(filter(lambda word: word not in ("", "-"), (f"{name}:", state, runs, known)))
            if shown.get(part.name) != line and not quiet:
                shown[part.name] = line
                say(json_text({"part": part}) if as_json else f"{clock(time.time())} {line}")
        if one.ended:
            return one
        if deadline is not None and time.monotonic() >= deadline:
            raise Failure(
                f"study {one.id} has not ended after {timeout_s:g} s and continues", ExitCode.timeout
            )
        time.sleep(POLL_S)
        one = client.study(one.id)
