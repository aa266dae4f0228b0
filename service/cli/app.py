"""All commands, assembled; and how an error ends the process: one line, one exit code."""

import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from service.cli import (
    answers,
    control,
    data,
    experiments,
    files,
    first_spec,
    installation,
    models,
    notifications,
    people,
    pools,
    profile,
    projects,
    specs,
    start,
)
from service.cli.connection import CommandGroup
from service.cli.terminal import ExitCode, Failure, note, option


class Commands(TyperGroup):
    """The command group, with errors as single lines on standard error."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs a command and exits with its code; see `ExitCode`."""
        code: object
        exits = options.get("standalone_mode", True)
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except Failure as failure:
            for line in failure.lines:
                note(f"error: {line}")
            code = failure.exit_code
        except typer.TyperException as error:
            code = _usage_error(error)
        except (typer.Abort, KeyboardInterrupt):
            code = ExitCode.interrupted
        number = code if isinstance(code, int) else int(ExitCode.ok)
        if exits:
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


app = CommandGroup(
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
    version: bool = option(False, "Print the version.", "--version", callback=_print_version, is_eager=True),
) -> None:
    pass


_COMMANDS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Start": (start.up, start.api, start.scheduler, start.demo, installation.doctor, installation.manifests,
              installation.backup, installation.restore, people.login, people.logout, people.whoami),
    "Submit": (first_spec.init, data.inspect, specs.validate, specs.preview, profile.profile, specs.submit,
               models.continue_run, models.retrain, specs.schema),
    "Inspect": (experiments.list_experiments, experiments.runs, experiments.show, experiments.study,
                experiments.watch, experiments.logs, experiments.wait, experiments.ledger, experiments.queue,
                installation.cluster, installation.shares, installation.hardware, files.verify, files.export,
                files.export_model, files.trace, files.predictions, models.predict, models.evaluate),
    "Decide": (answers.compare, answers.recommend, answers.frontier, answers.effects, answers.score,
               answers.speedup, answers.tasks, answers.guide, answers.report),
    "Manage": (control.cancel, control.pause, control.resume, control.retry, control.priority, control.delete,
               control.tag, control.annotate, control.archive),
    "Team": (people.audit,),
}  # fmt: skip
_NAMES = {experiments.list_experiments: "list", control.annotate: "note", models.continue_run: "continue"}

for _panel, _functions in _COMMANDS.items():
    for _function in _functions:
        app.command(_NAMES.get(_function), rich_help_panel=_panel)(_function)
app.add_typer(installation.database, name="db", rich_help_panel="Start")
app.add_typer(pools.pool, name="pool", rich_help_panel="Start")
app.add_typer(data.corpus, name="corpus", rich_help_panel="Submit")
app.add_typer(notifications.notify, name="notify", rich_help_panel="Inspect")
app.add_typer(people.user, name="user", rich_help_panel="Team")
app.add_typer(people.token, name="token", rich_help_panel="Team")
app.add_typer(projects.project, name="project", rich_help_panel="Team")
