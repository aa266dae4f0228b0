"""Logs of all processes: one line per record, as text or JSON, with its subject.

`about` binds the request, experiment or attempt of a piece of work; every record logged within it carries
them, whichever module logs it.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from service.config.settings import LogFormat

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_subject: ContextVar[dict[str, str | int]] = ContextVar("subject")


@contextmanager
def about(**subject: str | int) -> Iterator[None]:
    """Adds fields to all records of this thread or task meanwhile: `request_id`, `experiment`, `attempt`."""
    token = _subject.set({**current(), **subject})
    try:
        yield
    finally:
        _subject.reset(token)


def current() -> dict[str, str | int]:
    return _subject.get({})


class JsonFormatter(logging.Formatter):
    """One JSON object per record: `at`, `level`, `logger`, `message`, `process`, and its subject."""

    def __init__(self, process: str, always: dict[str, str | int]) -> None:
        super().__init__()
        self._process = process
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "at": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            **self._always,
            **current(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    def __init__(self, always: dict[str, str | int]) -> None:
        super().__init__(_TEXT)
        self._always = always

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line without a traceback; escapes line breaks, which would look like records."""
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        line = super().formatMessage(record)
        fields = {**self._always, **current()}
        return line + (f" [{' '.join(f'{k}={v}' for k, v in fields.items())}]" if fields else "")


def set_up(process: str, log_format: LogFormat, *, level: int = logging.INFO, **always: str | int) -> None:
    """Sends this process's logs to standard error, with `always` in every record; called once, first."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(process, always) if log_format is LogFormat.json else TextFormatter(always)
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
