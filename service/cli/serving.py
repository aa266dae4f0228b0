"""Commands that serve: up, api, scheduler, demo."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, note, print_json, say
from service.cli.stop_requests import stop_requests

if TYPE_CHECKING:
    from service.config.settings import Settings

_LOOK_EVERY_S = 0.5

EndWithParent = Annotated[
    bool, typer.Option("--end-with-parent", hidden=True, help="Stop when standard input closes.")
]


def up(
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs for a local Ray; unset = all of the machine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start everything on this machine: database, Ray with dashboard, API, scheduler.

    Stays in the foreground; Ctrl-C or SIGTERM stops everything. If RAY_ADDRESS is set, that
    cluster is used instead of a local one.
    """
    from service.cli.connection import read_settings
    from service.local.local_service import LocalService, ServiceStartError

    settings = read_settings()
    service = LocalService(settings, num_cpus=cpus, report=note)
    with stop_requests() as stop:
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
                say(f"database   {shown_database(settings.resolved_database_url())}")
                say(f"logs       {addresses.logs}")
                if addresses.api_url != str(settings.url).rstrip("/"):
                    say(f"in another terminal: export STILLHOUSE_URL={addresses.api_url}")
                say("Ctrl-C stops everything; experiments continue at the next start")
            died = None
            while not stop.asked.wait(_LOOK_EVERY_S) and died is None:
                died = service.died()
            note("stopping ...")
        finally:
            service.stop()
        if died is not None:
            raise Failure(died, ExitCode.not_succeeded)
        note("stopped")


def api(end_with_parent: EndWithParent = False) -> None:
    """Serve only the API; the database must be migrated (`stillhouse db upgrade`)."""
    import importlib

    from service.cli.connection import read_settings

    settings = read_settings()
    if end_with_parent:
        _end_when_stdin_closes()
    # Imports go api -> service; this is the one place where the command line starts the layer above.
    from service.config import logs
    from service.db.errors import StoreError

    logs.set_up("api", settings.log_format)
    try:
        importlib.import_module("api.server").serve(settings)
    except (StoreError, ValueError) as error:  # A database or address that cannot be used.
        raise Failure(str(error), ExitCode.not_succeeded) from None


def scheduler(
    end_with_parent: EndWithParent = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check that one of this machine is alive; for health checks.")
    ] = False,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool", help="Pool whose experiments it claims; unset = STILLHOUSE_POOL, or `default`."
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="URL",
            help="Dashboard of the pool's Ray cluster; unset = STILLHOUSE_RAY_DASHBOARD_URL.",
        ),
    ] = None,
) -> None:
    """Run only a scheduler, of one pool; several of a pool share its work by leases."""
    from service.cli.connection import read_settings

    settings = read_settings(pool=pool, ray_dashboard_url=ray_address)
    if check:
        _check_scheduler(settings)
        return
    if end_with_parent:
        _end_when_stdin_closes()
    from service.planner.foresight import Foresight
    from service.scheduling.scheduler import main as run_scheduler

    run_scheduler(settings, [lambda store: Foresight(store, settings.pool)])


def demo(
    texts: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Only write the generated texts to this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Take eight small runs from nothing to a comparison, in a temporary folder."""
    from service.cli import demonstration

    if texts is not None:
        demonstration.write_texts(texts)
        if as_json:
            print_json({"texts": str(texts)})
        else:
            say(f"texts written to {texts}")
        return
    with stop_requests() as stop:
        succeeded = demonstration.run(stop, as_json=as_json)
    if not succeeded:
        raise typer.Exit(ExitCode.not_succeeded)


def shown_database(url: str) -> str:
    """A database URL without its password."""
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True)


def _check_scheduler(settings: Settings) -> None:
    import socket
    from contextlib import closing

    from service.db.errors import StoreError
    from service.domain.access import DEFAULT_POOL
    from service.scheduling.queue import Queue
    from service.store import Store

    node = socket.gethostname()
    try:
        with closing(Store.open(settings)) as store:
            alive = [
                each
                for each in Queue(store).schedulers_alive()
                if (each.node, each.pool) == (node, settings.pool)
            ]
    except StoreError as error:
        raise Failure(str(error), ExitCode.unreachable) from None
    if not alive:
        named = "" if settings.pool == DEFAULT_POOL else f" of pool '{settings.pool}'"
        raise Failure(
            f"no scheduler{named} on {node} has given a sign of life lately", ExitCode.not_succeeded
        )
    say(", ".join(each.name for each in alive))


def _end_when_stdin_closes() -> None:
    import os

    from service.local.local_service import end_with_parent

    end_with_parent(sys.stdin.buffer, lambda: os.kill(os.getpid(), signal.SIGTERM))
