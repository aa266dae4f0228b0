"""Commands that start processes: up, api, scheduler, demo."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from service.cli.connection import (
    checked_settings,
    client_errors,
    read_settings,
    shown_database,
    store_errors,
)
from service.cli.terminal import Answer, ExitCode, Failure, Json, console, note, option, print_json, say

if TYPE_CHECKING:
    from service.config.settings import Settings

_POLL_S = 0.5
_DEMO_SPEC = "demo.yaml"

EndWithParent = Annotated[
    bool, typer.Option("--end-with-parent", hidden=True, help="Stop when standard input closes.")
]


def up(
    cpus: int | None = option(None, "CPUs for a local Ray; unset = all of the machine.", min=1),
    as_json: Json = False,
) -> None:
    """Start everything on this machine: database, Ray with dashboard, API, scheduler.

    Stays in the foreground; Ctrl-C or SIGTERM stops everything. If RAY_ADDRESS is set, that
    cluster is used instead of a local one.
    """
    from service.local.local_service import LocalService, ServiceStartError

    settings = checked_settings()
    service = LocalService(settings, num_cpus=cpus, report=note)
    with _StopRequests() as stop:
        try:
            addresses = service.start()
            stop.interrupts = False
        except ServiceStartError as error:
            raise Failure(str(error), ExitCode.not_succeeded) from None
        except KeyboardInterrupt:
            note("stopped during start-up")
            return
        try:
            if as_json:
                print_json(addresses)
            else:
                say(f"API        {addresses.api_url}  (reference: {addresses.api_url}/docs)")
                say(f"Ray        {addresses.ray_dashboard_url}")
                if addresses.ray_token:
                    say(f"           token, asked for once: {addresses.ray_token}")
                say(f"database   {shown_database(settings)}")
                say(f"logs       {addresses.logs}")
                if addresses.api_url != str(settings.url).rstrip("/"):
                    say(f"in another terminal: export STILLHOUSE_URL={addresses.api_url}")
                say("Ctrl-C stops everything; experiments continue at the next start")
            died = None
            while not stop.event.wait(_POLL_S) and died is None:
                died = service.died()
            note("stopping ...")
        finally:
            service.stop()
        if died is not None:
            raise Failure(died, ExitCode.not_succeeded)
        note("stopped")


def api(end_with_parent: EndWithParent = False) -> None:
    """Serve only the API; the database must be migrated (`stillhouse db upgrade`)."""
    checked_settings()
    # The API is a layer above this one: it is started, not imported.
    more = ["--end-with-parent"] if end_with_parent else []
    os.execv(sys.executable, [sys.executable, "-P", "-m", "api", *more])


def scheduler(
    end_with_parent: EndWithParent = False,
    check: bool = option(False, "Only check that one of this machine is alive; for health checks."),
    pool: str | None = option(
        None, "Pool whose experiments it claims; unset = STILLHOUSE_POOL, or `default`."
    ),
    ray_address: str | None = option(
        None, "Dashboard of the pool's Ray cluster; unset = STILLHOUSE_RAY_DASHBOARD_URL.", metavar="URL"
    ),
) -> None:
    """Run only a scheduler, of one pool; several of a pool share its work by leases."""
    # A mistake in a file that a living scheduler has already read does not make it unhealthy.
    read = read_settings if check else checked_settings
    settings = read(pool=pool, ray_dashboard_url=ray_address)
    if check:
        _check_scheduler(settings)
        return
    if end_with_parent:
        from service.local.local_service import watch_parent

        watch_parent()
    from service.planner.start_forecasts import StartForecasts
    from service.scheduling.scheduler import main as run_scheduler
    from service.studies import StudyParts, UndecidedEnds

    run_scheduler(
        settings,
        [
            lambda store: StartForecasts(store, settings.pool).run,
            lambda store: StudyParts(store, settings).run,
            lambda store: UndecidedEnds(store).run,
        ],
    )


def demo(
    texts: Path | None = option(None, "Only write the generated texts to this folder.", metavar="FOLDER"),
    as_json: Json = False,
) -> None:
    """Take eight small runs from nothing to a comparison, in a temporary folder."""
    if texts is not None:
        from service.config.examples import write_demo_texts

        write_demo_texts(texts)
        Answer({"texts": str(texts)}, f"texts written to {texts}").print(as_json=as_json)
        return
    with _StopRequests() as stop:
        succeeded = _run_demo(stop, as_json=as_json)
    if not succeeded:
        raise typer.Exit(ExitCode.not_succeeded)


def _check_scheduler(settings: Settings) -> None:
    from service.domain.access import DEFAULT_POOL
    from service.scheduling.queue import Queue
    from service.store import Store

    node = socket.gethostname()
    with store_errors(ExitCode.unreachable), closing(Store.open(settings)) as store:
        schedulers = Queue(store).schedulers_alive()
    alive = [each for each in schedulers if (each.node, each.pool) == (node, settings.pool)]
    if not alive:
        named = "" if settings.pool == DEFAULT_POOL else f" of pool '{settings.pool}'"
        raise Failure(f"no scheduler{named} on {node} has sent a heartbeat recently", ExitCode.not_succeeded)
    say(", ".join(each.name for each in alive))


class _StopRequests:
    """Ctrl-C, SIGTERM and a closed terminal, as an event or as an exception."""

    def __init__(self) -> None:
        self.event = threading.Event()
        """Set once a stop was requested."""
        self.interrupts = True
        """Raise KeyboardInterrupt at once, where work cannot poll the event; a second Ctrl-C always does."""

    def _handle(self, number: int, _: object) -> None:
        again = self.event.is_set() and number == signal.SIGINT
        self.event.set()
        if self.interrupts or again:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _run_demo(stop: _StopRequests, *, as_json: bool = False) -> bool:
    """Returns whether every run succeeded; the folder stays, so that the results can be looked at."""
    from service.config.examples import examples_folder
    from service.config.settings import Settings
    from service.local.local_service import LocalService, ServiceStartError

    started = time.monotonic()
    folder_of_examples = examples_folder()
    if folder_of_examples is None or not (spec := folder_of_examples / _DEMO_SPEC).is_file():
        raise Failure(f"examples/{_DEMO_SPEC}: not found; install the package again", ExitCode.not_found)
    folder = Path(tempfile.mkdtemp(prefix="stillhouse-demo-")).resolve()
    os.environ.pop("RAY_ADDRESS", None)  # A cluster elsewhere could not read the temporary folder.
    note(f"demo in {folder}")
    settings = Settings(
        data_dir=folder,
        database_url=f"sqlite:///{folder / 'stillhouse.db'}",
        data_roots=str(folder),
        model_roots=str(folder),
        host="127.0.0.1",
        port=0,
        token=None,
        offline=True,
    )
    service = LocalService(settings, report=note)
    try:
        addresses = service.start()
        note(f"service ready at {addresses.api_url}, Ray dashboard at {addresses.ray_dashboard_url}")
        succeeded, planned = _demo_experiment(addresses.api_url, spec, folder, as_json=as_json)
    except ServiceStartError as error:
        raise Failure(str(error), ExitCode.not_succeeded) from None
    finally:
        stop.interrupts = False  # From here on a first Ctrl-C does not break the stopping.
        note("stopping ...")
        service.stop()
    show = note if as_json else say
    show(f"demo: {succeeded} of {planned} runs succeeded in {time.monotonic() - started:.0f} s")
    return succeeded == planned


def _demo_experiment(url: str, spec: Path, folder: Path, *, as_json: bool) -> tuple[int, int]:
    from service.cli.answer_tables import print_comparison
    from service.cli.progress import follow_experiment
    from service.client import Client
    from service.domain.states import RunState

    with client_errors(), Client(url) as client:
        experiment = client.submit(spec.read_bytes())
        note(f"submitted experiment {experiment.id}: {experiment.name}, {experiment.run_count} runs")
        if as_json:
            client.wait(experiment.id)
        else:
            follow_experiment(client, experiment.id)
        runs = list(client.all_runs(experiment_id=experiment.id))
        comparison = client.compare([experiment.id])
    if as_json:
        print_json({"folder": folder, "comparison": comparison, "runs": runs})
    else:
        console().print()
        print_comparison(comparison)
        say("")
        say(f"results     {folder} (database, logs, checkpoints), kept until you delete it")
        say(f"inspect     STILLHOUSE_DATA_DIR={folder} stillhouse up")
    for run in runs:
        if run.failure_message:
            note(f"run:{run.id} {run.failure_class}: {run.failure_message}")
    return sum(run.state is RunState.succeeded for run in runs), len(runs)
