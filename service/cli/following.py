"""Following an experiment or run to its end: live, in lines, as JSON, or in silence."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from service.cli.exits import ExitCode, Failure
from service.cli.output import console, json_text, note, say
from service.cli.progress import Board
from service.domain.formats import clock, counts_text
from service.domain.states import (
    RUN_STATES_WITH_RESULT,
    TERMINAL_EXPERIMENT_STATES,
    TERMINAL_RUN_STATES,
    RunState,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from service.client import Client
    from service.domain.records import ExperimentStatus, Run

T = TypeVar("T")

_LINE_EVERY_S = 5.0
_PICTURES_PER_S = 4
_POLL_S = 0.5


def follow_experiment(client: Client, experiment_id: int, *, as_json: bool = False) -> ExperimentStatus:
    """Show an experiment until it has ended, in the form that fits where the output goes."""
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
    from service.client import Ended, ExperimentChanged, Happened, RunChanged

    for message in client.follow(experiment_id):
        if isinstance(message, Happened):
            say(json_text({"event": message.event}))
        elif isinstance(message, RunChanged):
            say(json_text({"run": message.run, "latest": message.latest, "line": message.line}))
        elif isinstance(message, ExperimentChanged):
            say(json_text({"experiment": message.experiment}))
        elif isinstance(message, Ended):
            say(json_text({"ended": message.experiment}))
            return message.experiment
    raise Failure(f"the service closed the stream of experiment {experiment_id}", ExitCode.unreachable)


def _follow_live(client: Client, board: Board) -> ExperimentStatus:
    from rich.live import Live

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
    from service.client import Happened, RunChanged

    said_s: dict[int, float] = {}
    for message in _take_messages(client, board):
        if isinstance(message, Happened):
            event = message.event
            about = f"run:{event.run_id} " if event.run_id is not None else ""
            say(f"{clock(event.at_s)} {about}{event.message}")
        elif isinstance(message, RunChanged):
            run, now_s = message.run, time.monotonic()
            telling = run.state is RunState.running or board.preparing(run) is not None
            if telling and now_s - said_s.get(run.id, 0.0) >= _LINE_EVERY_S:
                said_s[run.id] = now_s
                say(f"{clock(time.time())} {board.line(run)}")
    for run in board.runs.values():
        say(board.line(run))
    say(f"experiment {board.experiment.id} {board.experiment.state}: {counts_text(board.counts())}")
    return board.experiment


def _take_messages(client: Client, board: Board) -> Iterator[Any]:
    """The messages of the live stream, each taken by the board first; ends with the experiment."""
    from service.client import Ended, ExperimentChanged, RunChanged

    for message in client.follow(board.experiment.id):
        if isinstance(message, RunChanged):
            board.take_runs([message.run])
            board.latest[message.run.id] = message.latest
            if message.line is not None:
                board.said[message.run.id] = message.line.message
        elif isinstance(message, ExperimentChanged | Ended):
            board.experiment = message.experiment
        if isinstance(message, Ended):
            # The stream carries active runs; the list also has those that ended between two looks.
            board.take_runs(client.all_runs(experiment_id=board.experiment.id))
        yield message
        if isinstance(message, Ended):
            return


def follow_run(client: Client, run_id: int, *, as_json: bool = False) -> Run:
    """Show one run with its points until it has ended."""
    from service.client import NewLine, NewPoints, RunChanged, RunEnded

    said_s = 0.0
    run = client.run(run_id)
    board = Board(client.experiment(run.experiment_id))
    for message in client.follow_run(run_id):
        if as_json:
            say(json_text(_run_message(message)))
        elif isinstance(message, NewLine):
            say(f"{clock(message.line.at_s)} {message.line.message}")
        elif isinstance(message, RunChanged):
            board.latest[run_id] = message.latest
            if time.monotonic() - said_s >= _LINE_EVERY_S:
                said_s = time.monotonic()
                say(f"{clock(time.time())} {board.line(message.run)}")
        elif not isinstance(message, NewPoints | RunEnded):
            continue
        if isinstance(message, RunEnded):
            if not as_json:
                say(board.line(message.run))
            return message.run
    raise Failure(f"the service closed the stream of run:{run_id}", ExitCode.unreachable)


def _run_message(message: Any) -> dict[str, Any]:
    from service.client import NewLine, NewPoints, RunChanged

    if isinstance(message, NewLine):
        return {"log": message.line}
    if isinstance(message, NewPoints):
        return {"points": message.series}
    if isinstance(message, RunChanged):
        return {"run": message.run, "latest": message.latest}
    return {"ended": message.run}


def wait_for_experiment(client: Client, experiment_id: int, *, timeout_s: float | None) -> ExperimentStatus:
    """Wait in silence until an experiment has ended.

    Raises:
        Failure: with the timeout code.
    """

    def ended() -> ExperimentStatus | None:
        experiment = client.experiment(experiment_id)
        return experiment if experiment.state in TERMINAL_EXPERIMENT_STATES else None

    return _until(ended, f"experiment {experiment_id}", timeout_s)


def wait_for_run(client: Client, run_id: int, *, timeout_s: float | None) -> Run:
    """Wait in silence until a run has ended.

    Raises:
        Failure: with the timeout code.
    """

    def ended() -> Run | None:
        run = client.run(run_id)
        return run if run.state in TERMINAL_RUN_STATES else None

    return _until(ended, f"run:{run_id}", timeout_s)


def _until(look: Callable[[], T | None], name: str, timeout_s: float | None) -> T:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        found = look()
        if found is not None:
            return found
        if deadline is not None and time.monotonic() >= deadline:
            raise Failure(f"{name} has not ended after {timeout_s:g} s and continues", ExitCode.timeout)
        time.sleep(_POLL_S)


def exit_for(ended: ExperimentStatus | Run) -> None:
    """Leave with code 1 when what has ended did not succeed.

    Raises:
        typer.Exit: when it did not.
    """
    if str(ended.state) != "succeeded" and ended.state not in RUN_STATES_WITH_RESULT:
        raise typer.Exit(ExitCode.not_succeeded)
