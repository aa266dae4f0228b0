"""`stillhouse init`: from a folder with data to a commented spec, in three questions."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from service.cli.connection import connected, read_settings, writing
from service.cli.data import inspected
from service.cli.specs import checked
from service.cli.terminal import Answer, ExitCode, Failure, argument, note, option, say
from service.specs.first_draft import starting_spec

if TYPE_CHECKING:
    from trainers.tasks.inspection import DataContents, Proposal

T = TypeVar("T")
_NONE = ("", "none", "no")
_HOURS = {"m": 1 / 60, "min": 1 / 60, "": 1.0, "h": 1.0, "d": 24.0}
_COMMENTS = {
    "name": "Written by `stillhouse init`. Change what you like: `stillhouse schema` has every field.",
    "task": "What is learned, from which data: docs/tasks.md; `stillhouse inspect` shows the data.",
    "model": "tiny, mini, small, medium or base without pretraining; a folder; or hub:<id>: docs/models.md.",
    "optimizer": "docs/optimizer.md. To try several, an axis: optimizer.learning_rate: [1.0e-4, 3.0e-4].",
    "length": "Epochs or steps: how long each run trains.",
    "hardware": "A name of `stillhouse hardware`.",
    "search": "Every combination of these values is trained. Another axis: precision: [fp32, bf16].",
    "seeds": "Each combination is trained once per seed; without a second seed no difference can be claimed.",
    "budget": "When one is reached, the rest is stopped: USD, and hours of devices, summed over runs.",
}


def init(
    path: Path = argument(Path(), "A folder or file with data; unset = this folder.", metavar="[PATH]"),
    predict: str | None = option(
        None, "What is to be predicted: a column, a task, or TASK:COLUMN.", metavar="WHAT"
    ),
    budget: str | None = option(None, "Most money in USD, or none.", metavar="USD"),
    deadline: str | None = option(
        None, "When the answer is needed: 90m, 8h, 2d, a date, or none.", metavar="WHEN"
    ),
    output: Path = option(Path("first-run.yaml"), "File for the spec.", "--output", "-o"),
    yes: bool = option(False, "Ask nothing; what is not given is the likeliest target, and no limit."),
    submit: bool = option(False, "Submit the spec without asking."),
) -> Answer:
    """Ask what is to be predicted, for how much and until when; write a spec, preview it, offer to submit."""
    if output.exists():
        raise Failure(f"{output} exists; move it away, or give another file with -o")
    asks = not yes and sys.stdin.isatty()
    contents = inspected(path)
    if not contents.proposals:
        raise Failure(
            f"{path}: no task can read this; `stillhouse inspect {path}` says why", ExitCode.not_succeeded
        )
    if asks:
        _show(contents)
    likeliest = contents.proposals[0].task["name"]
    chosen = _answer(predict, asks, "What is to be predicted?", likeliest, partial(_target, contents))
    cost_usd = _answer(budget, asks, "How much may it cost, in USD?", "none", _usd)
    hours = _answer(deadline, asks, "When is the answer needed (90m, 8h, 2d, a date)?", "none", _hours)
    others = [one for one in contents.proposals if one.task["name"] != chosen.task["name"]]
    contents = dataclasses.replace(contents, proposals=[chosen, *others])
    spec = starting_spec(contents, read_settings().roots("data"))
    assert spec is not None
    spec["search"] = {"axes": {"batch.global_size": [16, spec.pop("batch")["global_size"]]}}
    spec["seeds"] = [0, 1]
    limits = {"cost_usd": cost_usd, "hours": hours}
    if given := {name: limit for name, limit in limits.items() if limit is not None}:
        spec["budget"] = given
    text = _commented(spec)
    with writing(output):
        output.write_text(text, encoding="utf-8")
    count = checked(str(output), text.encode()).run_count()
    note(f"{output}: written, {count} runs")
    return _previewed(output, text, spec, may_ask=asks, submits=submit)


def _previewed(output: Path, text: str, spec: dict[str, Any], *, may_ask: bool, submits: bool) -> Answer:
    """Shows what the service makes of the spec, and submits it on request; without a service, says how."""
    from service.cli.tables import print_preview

    document: dict[str, Any] = {"file": str(output), "spec": spec, "preview": None, "experiment": None}
    later = f"to submit it: stillhouse submit {output}"
    try:
        with connected() as client:
            planned = document["preview"] = client.preview(text, limit=20)
            if may_ask and not submits:
                print_preview(planned)
                submits = typer.confirm("Submit it now?", default=False)
            if not submits:
                return Answer(document, *([] if may_ask else [partial(print_preview, planned)]), later)
            experiment = document["experiment"] = client.submit(text)
    except Failure as failure:
        if failure.exit_code != ExitCode.unreachable or submits:
            raise
        note(f"not previewed: {failure.lines[0]}")
        return Answer(document, later)
    return Answer(
        document,
        f"submitted experiment {experiment.id}: {experiment.name}, {experiment.run_count:,} runs",
        f"to watch it: stillhouse watch {experiment.id}",
    )


def _show(contents: DataContents) -> None:
    from trainers.tasks import TASKS

    parts = ", ".join(
        f"{name} {part.rows:,}{'' if part.whole else '+'} rows" for name, part in contents.parts.items()
    )
    say(f"{contents.path}: {parts}")
    say(f"columns: {', '.join(f'{name} ({kind})' for name, kind in contents.columns.items())}")
    say("can be learned from it, the likeliest first; a column can be named too:")
    for proposal in contents.proposals:
        task = proposal.task["name"]
        label = f" of {column}" if (column := _label(proposal)) is not None else ""
        say(f"  {task}{label}: {TASKS[task].summary}")


def _label(proposal: Proposal) -> str | int | None:
    from trainers.tasks import TASKS

    if "label" not in TASKS[proposal.task["name"]].columns:
        return None
    return proposal.config.columns_of("train").get("label", "label")


def _answer(given: str | None, asks: bool, question: str, default: str, read: Callable[[str], T]) -> T:
    """Reads the option, or else what is typed until it can be read, or else the default."""
    while given is None and asks:
        try:
            return read(str(typer.prompt(question, default=default)).strip())
        except Failure as failure:
            note(failure.lines[0])
    return read(default if given is None else given)


def _target(contents: DataContents, answer: str) -> Proposal:
    """Returns the proposal that an answer names: a task, a column, or both as TASK:COLUMN."""
    from pydantic import ValidationError

    from trainers.config import TaskConfig
    from trainers.tasks.inspection import mistakes_in

    named = {one.task["name"]: one for one in reversed(contents.proposals)}
    task, _, column = answer.rpartition(":")
    if answer in named:
        return named[answer]
    columns = {str(name): name for name in contents.columns}
    candidates = [named[task]] if task in named else contents.proposals if not task else []
    reasons = []
    for proposal in candidates if column in columns else ():
        if (label := _label(proposal)) is None or str(label) == column:
            if label is not None:
                return proposal
            continue
        fields = {**proposal.task.get("columns", {}), "label": columns[column]}
        changed = {**proposal.task, "columns": fields}
        try:
            config = TaskConfig.model_validate({**changed, "path": str(proposal.path)})
        except ValidationError as error:
            reasons.append(error.errors()[0]["msg"])
            continue
        if not (mistakes := mistakes_in(proposal.path, config)):
            return dataclasses.replace(proposal, task=changed)
        reasons.append(mistakes[0])
    if reasons:
        raise Failure(f"'{answer}' cannot be predicted: {reasons[0]}")
    known = ", ".join([*named, *columns])
    raise Failure(f"'{answer}' is neither a task that fits nor a column; give one of {known}")


def _usd(answer: str) -> float | None:
    if answer.lower() in _NONE:
        return None
    try:
        usd = float(re.sub(r"^\$|usd$", "", answer.lower()).strip())
    except ValueError:
        usd = math.nan
    if not 0.0 < usd < math.inf:
        raise Failure(f"budget '{answer}' is not a positive number of USD; write 5, or none")
    return usd


def _hours(answer: str) -> float | None:
    """Reads a duration, or a date in local time as the hours until then."""
    if answer.lower() in _NONE:
        return None
    hours = math.nan
    if match := re.fullmatch(r"(\d+(?:\.\d+)?) ?(m|min|h|d|)", answer.lower()):
        hours = float(match[1]) * _HOURS[match[2]]
    else:
        with suppress(ValueError):
            hours = (datetime.fromisoformat(answer).timestamp() - time.time()) / 3600
    if not 0.0 < hours < math.inf:
        raise Failure(
            f"deadline '{answer}' is neither a duration nor a date to come; write 90m, 8h, 2d, "
            "2030-01-31T18:00, or none"
        )
    return round(hours, 2) or 0.01


def _commented(spec: Mapping[str, Any]) -> str:
    import yaml

    parts = []
    for name in sorted(spec, key=[*_COMMENTS, *spec].index):
        # Lists, and sections of plain values, are written on one line.
        style = None if isinstance(spec[name], dict | list) else False
        written = yaml.safe_dump(
            {name: spec[name]}, sort_keys=False, width=76, allow_unicode=True, default_flow_style=style
        )
        parts.append(f"# {_COMMENTS[name]}\n{written}" if name in _COMMENTS else written)
    return "\n".join(parts)
