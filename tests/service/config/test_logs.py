"""Lines of logs, as a process writes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from service.config import logs
from service.config.settings import LogFormat


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """Returns the lines on standard error; the root logger is as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []  # `set_up` would close those of pytest.
    yield lambda: capsys.readouterr().err.splitlines()
    root.handlers = handlers
    root.setLevel(level)


def test_a_record_is_one_json_object_with_what_it_is_about(written: Callable[[], list[str]]) -> None:
    logs.set_up("driver", LogFormat.json, experiment=7)
    with logs.about(request_id="r1", experiment=8):
        logging.getLogger("a.b").warning("two\nlines of %s", "it")
    logging.getLogger("a.b").info("later")
    first, second = (json.loads(line) for line in written())
    at = first.pop("at")
    assert at.endswith("Z")
    assert first == {
        "level": "warning", "logger": "a.b", "message": "two\nlines of it", "process": "driver",
        "experiment": 8, "request_id": "r1",
    }  # fmt: skip
    assert (second["experiment"], "request_id" in second) == (7, False)


def test_a_traceback_stays_in_its_record(written: Callable[[], list[str]]) -> None:
    logs.set_up("api", LogFormat.json)
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("a").exception("it failed")
    (line,) = written()
    assert json.loads(line)["exception"].endswith("ValueError: wrong")


def test_text_has_one_line_for_a_record_whatever_is_in_it(written: Callable[[], list[str]]) -> None:
    logs.set_up("api", LogFormat.text)
    with logs.about(request_id="r1"):
        logging.getLogger("a").info("name\n2026-01-01 ERROR forged")
    (line,) = written()
    assert line.endswith("INFO a: name\\n2026-01-01 ERROR forged [request_id=r1]")
