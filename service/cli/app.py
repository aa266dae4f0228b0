"""All commands, assembled; and how an error leaves the process: one line, one exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from service.cli import (
    accounting,
    acting,
    comparing,
    deciding,
    exporting,
    inspecting,
    logging_in,
    notifying,
    people,
    profiling,
    reading,
    reporting,
    serving,
    submitting,
    upkeep,
)
from service.cli.exits import ExitCode, Failure
from service.cli.output import note


class Commands(TyperGroup):
    """The command group, with errors as single lines on standard error."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its code; see `ExitCode`."""
        code: object
        try:
            code = super().main(
                args=args,
                prog_name=prog_name,
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except Failure as failure:
            for line in failure.lines:
                note(f"error: {line}")
            code = failure.exit_code
        except typer.TyperException as error:
            code = _usage_error(error)
        except (typer.Abort, KeyboardInterrupt):
            code = ExitCode.interrupted
        number = code if isinstance(code, int) else int(ExitCode.ok)
        if standalone_mode:
            sys.exit(number)
        return number


def _usage_error(error: typer.TyperException) -> int:
    message = " ".join(error.format_message().split())
    if not message:  # No arguments at all: typer has printed the help already.
        return error.exit_code
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "stillhouse"
    end = "" if message.endswith((".", "?")) else "."
    print(f"error: {message}{end} See `{command} --help`.", file=sys.stderr)
    return error.exit_code


app = typer.Typer(
    cls=Commands,
    name="stillhouse",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the cheapest way to train a BERT without losing accuracy. "
    "17 is an experiment, run:42 a run. Exit codes and environment variables: docs/operations.md.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"stillhouse {version('stillhouse')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


_START, _SUBMIT, _LOOK, _DECIDE, _STEER = "Start", "Submit", "Inspect", "Decide", "Steer"
_TEAM = "Team"

app.command(rich_help_panel=_START)(serving.up)
app.command(rich_help_panel=_START)(serving.api)
app.command(rich_help_panel=_START)(serving.scheduler)
app.command(rich_help_panel=_START)(serving.demo)
app.command(rich_help_panel=_START)(upkeep.doctor)
app.command(rich_help_panel=_START)(upkeep.backup)
app.command(rich_help_panel=_START)(upkeep.restore)
app.add_typer(upkeep.database, name="db", rich_help_panel=_START)

app.command(rich_help_panel=_START)(logging_in.login)
app.command(rich_help_panel=_START)(logging_in.logout)
app.command(rich_help_panel=_START)(logging_in.whoami)

app.command(rich_help_panel=_SUBMIT)(inspecting.inspect)
app.command(rich_help_panel=_SUBMIT)(submitting.validate)
app.command(rich_help_panel=_SUBMIT)(submitting.preview)
app.command(rich_help_panel=_SUBMIT)(profiling.profile)
app.command(rich_help_panel=_SUBMIT)(submitting.submit)
app.command(rich_help_panel=_SUBMIT)(submitting.schema)

app.command("list", rich_help_panel=_LOOK)(reading.list_experiments)
app.command(rich_help_panel=_LOOK)(reading.runs)
app.command(rich_help_panel=_LOOK)(reading.show)
app.command(rich_help_panel=_LOOK)(reading.watch)
app.command(rich_help_panel=_LOOK)(reading.logs)
app.command(rich_help_panel=_LOOK)(reading.wait)
app.command(rich_help_panel=_LOOK)(accounting.ledger)
app.command(rich_help_panel=_LOOK)(reading.queue)
app.command(rich_help_panel=_LOOK)(reading.cluster)
app.command(rich_help_panel=_LOOK)(reading.shares)
app.command(rich_help_panel=_LOOK)(reading.hardware)
app.command(rich_help_panel=_LOOK)(reporting.verify)
app.command(rich_help_panel=_LOOK)(reading.export)
app.command("export-model", rich_help_panel=_LOOK)(exporting.export_model)
app.command(rich_help_panel=_LOOK)(exporting.trace)
app.command(rich_help_panel=_LOOK)(exporting.predictions)
app.add_typer(notifying.notify, name="notify", rich_help_panel=_LOOK)

app.command(rich_help_panel=_DECIDE)(comparing.compare)
app.command(rich_help_panel=_DECIDE)(deciding.recommend)
app.command(rich_help_panel=_DECIDE)(deciding.frontier)
app.command(rich_help_panel=_DECIDE)(deciding.effects)
app.command(rich_help_panel=_DECIDE)(deciding.score)
app.command(rich_help_panel=_DECIDE)(deciding.speedup)
app.command(rich_help_panel=_DECIDE)(reporting.report)

app.command(rich_help_panel=_STEER)(acting.cancel)
app.command(rich_help_panel=_STEER)(acting.pause)
app.command(rich_help_panel=_STEER)(acting.resume)
app.command(rich_help_panel=_STEER)(acting.retry)
app.command(rich_help_panel=_STEER)(acting.priority)
app.command(rich_help_panel=_STEER)(acting.delete)
app.command(rich_help_panel=_STEER)(acting.tag)
app.command("note", rich_help_panel=_STEER)(acting.annotate)
app.command(rich_help_panel=_STEER)(acting.archive)

app.add_typer(people.user, name="user", rich_help_panel=_TEAM)
app.add_typer(people.token, name="token", rich_help_panel=_TEAM)
app.add_typer(people.project, name="project", rich_help_panel=_TEAM)
app.command(rich_help_panel=_TEAM)(people.audit)
