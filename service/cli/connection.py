"""From the environment and the arguments to the service; and from its errors to exit codes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from service.cli.terminal import Answer, ExitCode, Failure, Json, option

if TYPE_CHECKING:
    from service.client import Client as Client
    from service.config.settings import Settings
else:
    Client = Any  # For signatures alone: the client takes long to import.

Command = TypeVar("Command", bound=Callable[..., Any])

_QUICK_ATTEMPTS = 3  # Someone is waiting at the terminal: about a second until "cannot reach"
_PATIENT_ATTEMPTS = 8  # Following outlives a restart of the API: about 30 s
_REFERENCE = re.compile(r"(?:(run|experiment):)?([1-9][0-9]{0,17})")
_CODES = {401: ExitCode.refused, 403: ExitCode.refused, 404: ExitCode.not_found, 409: ExitCode.conflict}


def read_settings(**options: str | None) -> Settings:
    """Reads the settings of this process; `options` are instead of the environment's unless None."""
    from pydantic import ValidationError

    from service.config.settings import Settings

    try:
        return Settings.model_validate({name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        lines = []
        for entry in error.errors(include_url=False):
            variable = f"STILLHOUSE_{'_'.join(str(part) for part in entry['loc']).upper()}"
            # A URL may hold a password.
            secret = "TOKEN" in variable or "SECRET" in variable or "@" in str(entry["input"])
            shown = "" if secret else f"={entry['input']}"
            message = entry["msg"].removeprefix("Value error, ")
            lines.append(f"{variable}{shown}: {message[0].lower()}{message[1:]}")
        raise Failure(lines) from None


def checked_settings(**options: str | None) -> Settings:
    """Reads the settings, and the files in `data_dir` that belong to them."""
    settings = read_settings(**options)
    try:
        settings.check_declared()
    except ValueError as error:
        raise Failure(str(error), ExitCode.usage) from None
    return settings


def shown_database(settings: Settings) -> str:
    from sqlalchemy.engine import make_url

    return make_url(settings.resolved_database_url()).render_as_string(hide_password=True)


@contextmanager
def connected(*, patient: bool = False) -> Iterator[Client]:
    """Yields a client of the service that the environment names; its errors become failures.

    A patient one outlasts a restart of the service, for commands that follow something.
    """
    from service.client import Client

    attempts = _PATIENT_ATTEMPTS if patient else _QUICK_ATTEMPTS
    with client_errors(), Client.from_settings(read_settings(), attempts=attempts) as client:
        yield client


@contextmanager
def client_errors() -> Iterator[None]:
    from service.client import ApiError, ClientError, LoginRefused, Unreachable, UnsafeCredentials

    try:
        yield
    except Unreachable as error:
        raise Failure(
            f"{error}; start the service with `stillhouse up`, or set STILLHOUSE_URL", ExitCode.unreachable
        ) from None
    except ApiError as error:
        lines = [str(problem) for problem in error.errors] or error.detail
        code = ExitCode.unreachable if error.status >= 500 else _CODES.get(error.status, ExitCode.usage)
        raise Failure(lines, ExitCode.conflict if error.type == "idempotency-mismatch" else code) from None
    except (LoginRefused, UnsafeCredentials) as error:
        raise Failure(str(error), ExitCode.refused) from None
    except ClientError as error:
        raise Failure(str(error), ExitCode.unreachable) from None


@contextmanager
def store_errors(code: ExitCode = ExitCode.not_succeeded) -> Iterator[None]:
    """Turns every error of the store into a `Failure` with its exit code, or else with this one."""
    from service.db.errors import Conflict, StoreError, StoreUnavailable

    codes = {StoreUnavailable: ExitCode.unreachable, Conflict: ExitCode.conflict}
    try:
        yield
    except StoreError as error:
        known = (its for kind, its in codes.items() if isinstance(error, kind))
        raise Failure(str(error), next(known, code)) from None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Options that choose among the runs of the experiments that a question is about."""

    filter: str | None = option(None, "Only matching runs, such as: task = 'imdb' and seed < 3")
    undisturbed: bool = option(False, "Leave out runs that neighbours disturbed.")
    with_overhead: bool = option(False, "Add each run's even share of the overhead to its time and cost.")


class CommandGroup(typer.Typer):
    """A group of commands; what is common to them is added here.

    A command that returns an `Answer` has the option `--json`, and its answer is printed. A command with a
    parameter `client` is given a connected one; the fields of a parameter `chosen` are options.
    """

    def command(self, *args: Any, **options: Any) -> Callable[[Command], Command]:
        register = super().command(*args, **options)

        def add(command: Command) -> Command:
            register(_completed(command))
            return command

        return add


def _completed(command: Callable[..., Any]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    parameters = dict(signature.parameters)
    connects = parameters.pop("client", None) is not None
    choice: Mapping[str, inspect.Parameter] = {}
    if parameters.pop("chosen", None) is not None:
        choice = inspect.signature(Chosen, eval_str=True).parameters
        parameters |= choice
    for name, parameter in parameters.items():
        if getattr(parameter.default, "default", None) is False:  # A flag has no `--no-` form.
            parameter.default.param_decls = parameter.default.param_decls or (f"--{name.replace('_', '-')}",)
    several = "targets" in parameters
    if several:
        parameters["targets"] = parameters["targets"].replace(default=None)
        asked = option(None, "Instead, the experiments of this study that are compared.", metavar="ID", min=1)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters["study"] = inspect.Parameter("study", kind, default=asked, annotation=int | None)
    answers = signature.return_annotation is Answer
    if answers:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters["as_json"] = inspect.Parameter("as_json", kind, default=False, annotation=Json)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        as_json = arguments.pop("as_json") if answers else False
        if choice:
            arguments["chosen"] = Chosen(**{name: arguments.pop(name) for name in choice})
        study = arguments.pop("study") if several else None
        if several and (study is None) == (not arguments["targets"]):
            raise Failure("give experiments, such as 17, or --study with its number")
        with connected() if connects else nullcontext() as client:
            if study is not None and client is not None:
                arguments["targets"] = client.study(study).compared
                if not arguments["targets"]:
                    raise Failure(f"study {study} has no experiment to compare", ExitCode.not_succeeded)
            answer = command(**arguments, **({"client": client} if connects else {}))
        if answers:
            answer.print(as_json=as_json)

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turns what the operating system says against writing a file into a `Failure`."""
    try:
        yield
    except OSError as error:
        raise Failure(f"{file}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Target:
    id: int
    is_run: bool

    def __str__(self) -> str:
        return f"run:{self.id}" if self.is_run else f"experiment {self.id}"


def is_reference(text: str) -> bool:
    """Returns whether a text names an experiment or a run, and not a file."""
    return _REFERENCE.fullmatch(text) is not None


def reference(text: str) -> Target:
    """Reads `17`, `experiment:17` or `run:42`."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise Failure(f"'{text}': give an experiment as 17 or a run as run:42")
    return Target(int(match[2]), match[1] == "run")


def experiment_id(text: str) -> int:
    target = reference(text)
    if target.is_run:
        raise Failure(f"'{text}' is a run; this command takes an experiment, such as 17")
    return target.id


def run_id(text: str) -> int:
    target = reference(text)
    if not target.is_run:
        raise Failure(f"'{text}' is an experiment; give a run, such as run:42")
    return target.id


if TYPE_CHECKING:
    Either = Target
    OneExperiment = int
    OneRun = int
    Experiments = list[int]
    OneOrNone = Target | None
else:  # Help names the type of what is written, `str`.
    _ONE = "An experiment, such as 17"
    Either = Annotated[
        str, typer.Argument(metavar="ID", parser=reference, help=f"{_ONE}, or a run, such as run:42.")
    ]
    OneOrNone = Annotated[
        str | None,
        typer.Argument(metavar="ID", parser=reference, help=f"{_ONE}, or a run, such as run:42."),
    ]
    OneExperiment = Annotated[str, typer.Argument(metavar="ID", parser=experiment_id, help=f"{_ONE}.")]
    OneRun = Annotated[str, typer.Argument(metavar="RUN", parser=run_id, help="A run, such as run:42.")]
    Experiments = Annotated[
        list[str],
        typer.Argument(metavar="ID...", parser=experiment_id, help="One or more experiments, such as 17."),
    ]
