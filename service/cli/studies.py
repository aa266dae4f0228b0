"""What has become of the parts of a study, and following them to the end."""

from __future__ import annotations

import time
from functools import partial

from service.cli.progress import POLL_S
from service.cli.tables import state_text
from service.cli.terminal import Answer, ExitCode, Failure, json_text, print_rows, say
from service.client import Client
from service.domain.formats import ago, clock, counts_text
from service.domain.states import ExperimentState
from service.domain.studies import PartState, StudyDetail, StudyPart


def answer_of(one: StudyDetail, *, submitted: bool = False, ended: bool = False) -> Answer:
    code = ExitCode.not_succeeded if ended and one.state is not ExperimentState.succeeded else ExitCode.ok
    if submitted:
        return Answer(
            one,
            f"submitted study {one.id}: {one.name}, {len(one.parts)} parts",
            f"to watch it: stillhouse study {one.id} --watch",
        )
    return Answer(one, partial(print_study, one), code=code)


def print_study(one: StudyDetail) -> None:
    say(f"study {one.id}: {one.name}  {one.state}")
    print_rows(("part", "experiment", "state", "runs", ""), [_row(part) for part in one.parts], lead=0)
    if one.ended and one.compared:
        say(f"to compare: stillhouse compare --study {one.id} --claims")


def _row(part: StudyPart) -> tuple[object, ...]:
    experiment = part.experiment
    known = part.reason or part.chosen or ""
    if part.state is PartState.waiting:
        known = f"waits for {', '.join(part.needs)}"
    if experiment is None:
        return part.name, "-", state_text(part.state), "-", known
    state, runs = state_text(experiment.state), counts_text(experiment.run_states)
    return part.name, experiment.id, state, runs, known


def print_studies(found: list[StudyDetail]) -> None:
    if not found:
        say("no studies; submit a file with the key study")
        return
    rows = [
        (one.id, one.name, one.owner, state_text(one.state), len(one.parts), ago(one.created_s))
        for one in found
    ]
    print_rows(("id", "name", "owner", "state", "parts", "submitted"), rows, right={"id", "parts"}, lead=1)


def follow_study(
    client: Client,
    one: StudyDetail,
    *,
    as_json: bool = False,
    quiet: bool = False,
    timeout_s: float | None = None,
) -> StudyDetail:
    """Shows each change of a part until the study has ended."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    shown: dict[str, str] = {}
    while True:
        for part in one.parts:
            name, _, state, runs, known = map(str, _row(part))
            line = " ".join(filter(lambda word: word not in ("", "-"), (f"{name}:", state, runs, known)))
            if shown.get(part.name) != line and not quiet:
                shown[part.name] = line
                say(json_text({"part": part}) if as_json else f"{clock(time.time())} {line}")
        if one.ended:
            return one
        if deadline is not None and time.monotonic() >= deadline:
            raise Failure(
                f"study {one.id} has not ended after {timeout_s:g} s and continues", ExitCode.timeout
            )
        time.sleep(POLL_S)
        one = client.study(one.id)
