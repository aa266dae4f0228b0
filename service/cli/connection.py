"""From the environment to a client, and from the client's errors to exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from service.cli.exits import ExitCode, Failure

if TYPE_CHECKING:
    from service.client import ApiError, Client
    from service.config.settings import Settings

_QUICK_ATTEMPTS = 3
"""Someone is waiting at the terminal: about a second until "does not answer"."""
_PATIENT_ATTEMPTS = 8
"""Following outlives a restart of the API: about 30 s."""


def read_settings(**options: str | None) -> Settings:
    """The settings of this process.

    Args:
        options: settings that the command line gives instead; None = as the environment has them.

    Raises:
        Failure: one line per variable that is not valid.
    """
    from pydantic import ValidationError

    from service.config.settings import Settings

    try:
        return Settings.model_validate({name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        lines = []
        for entry in error.errors(include_url=False):
            variable = f"STILLHOUSE_{'_'.join(str(part) for part in entry['loc']).upper()}"
            shown = "" if "TOKEN" in variable or "SECRET" in variable else f"={entry['input']}"
            lines.append(f"{variable}{shown}: {entry['msg'][0].lower()}{entry['msg'][1:]}")
        raise Failure(lines, ExitCode.usage) from None


@contextmanager
def connected(*, patient: bool = False) -> Iterator[Client]:
    """A client of the service that the environment names.

    Args:
        patient: go on through a restart of the service, for commands that follow something.

    Raises:
        Failure: for every error of the client inside the block, with its exit code.
    """
    from service.client import Client

    attempts = _PATIENT_ATTEMPTS if patient else _QUICK_ATTEMPTS
    with client_errors(), Client.from_settings(read_settings(), attempts=attempts) as client:
        yield client


@contextmanager
def client_errors() -> Iterator[None]:
    """Turn every error of a client into a `Failure` with its exit code."""
    from service.client import ApiError, ClientError, LoginRefused, Unreachable, UnsafeCredentials

    try:
        yield
    except Unreachable as error:
        raise Failure(
            f"{error}; start the service with `stillhouse up`, or set STILLHOUSE_URL", ExitCode.unreachable
        ) from None
    except ApiError as error:
        raise failure_of(error) from None
    except (LoginRefused, UnsafeCredentials) as error:
        raise Failure(str(error), ExitCode.refused) from None
    except ClientError as error:
        raise Failure(str(error), ExitCode.unreachable) from None


def failure_of(error: ApiError) -> Failure:
    """What the server refused, as lines and an exit code."""
    code = _CODES.get(error.type) or _CODES_BY_STATUS.get(error.status)
    if code is None:
        code = ExitCode.unreachable if error.status >= 500 else ExitCode.usage
    return Failure([str(problem) for problem in error.errors] or error.detail, code)


_CODES = {"idempotency-mismatch": ExitCode.conflict}
_CODES_BY_STATUS = {
    401: ExitCode.refused,
    403: ExitCode.refused,
    404: ExitCode.not_found,
    409: ExitCode.conflict,
}
