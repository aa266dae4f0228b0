"""Lists: filters mean the same on every database, pages are stable, orders put no value last."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from service.db import filters, listing
from service.db.errors import BadPageToken, FilterError
from service.db.filters import parse_filter
from service.db.listing import RUN_NAMES
from service.domain.access import Visibility
from service.domain.records import Experiment, Page, Run
from service.domain.states import ExperimentState, RunState
from service.store import Store
from tests.conformance.building import Submit, started
from trainers.errors import FailureClass

AXES = {"precision": ["fp32", "bf16"], "batch.global_size": [8, 16], "deterministic": [True, False]}
TOO_BIG = (FailureClass.out_of_memory, "50% of 1_000")


@pytest.fixture(scope="module")
def filled(lasting_store: Store) -> list[Run]:
    """24 runs in all kinds of ends, some without figures, in the store of this file."""
    attempts = lasting_store.attempts
    experiment, runs = started(lasting_store, 3, search={"axes": AXES})
    chance = random.Random(0)
    for run in runs:
        if chance.random() < 0.3:
            continue
        attempt = attempts.open(run.id, 1)
        attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts={})
        if chance.random() < 0.3:
            attempts.finish_run(
                run.id, attempt, RunState.failed, failure=(FailureClass.out_of_memory, "50% of 1_000")
            )
        else:
            figures = {"accuracy": round(chance.random(), 1), "cost_usd": chance.choice([None, 0.5, 2.0])}
            attempts.finish_run(run.id, attempt, RunState.succeeded, summary=figures)
    return lasting_store.runs.page(experiment_id=experiment.id).items


def every(read: Callable[..., Page[Any]], **arguments: Any) -> Iterator[Any]:
    """All items of a list, page by page."""
    token = None
    while True:
        page = read(**arguments, page_token=token)
        yield from page.items
        token = page.next_page_token
        if token is None:
            return


def holds(condition: filters.Condition, run: Run) -> bool | None:
    """What a condition means, in Python; None = not known, as in SQL."""
    match condition:
        case filters.All(parts):
            answers = [holds(part, run) for part in parts]
            return False if False in answers else None if None in answers else True
        case filters.Any(parts):
            answers = [holds(part, run) for part in parts]
            return True if True in answers else None if None in answers else False
        case filters.Not(inner):
            answer = holds(inner, run)
            return None if answer is None else not answer
        case filters.IsNull(name):
            return value_of(name, run) is None
    value = value_of(condition.name, run)
    if value is None:
        return None
    match condition:
        case filters.Match(_, pattern, ignore_case):
            text = str(value)
            return like(text.lower(), pattern.lower()) if ignore_case else like(text, pattern)
        case filters.OneOf(_, values):
            return value in values
        case filters.Relation(_, operator, other):
            return {
                "=": value == other, "!=": value != other,
                "<": operator in "<=" and value < other, "<=": operator in "<=" and value <= other,
                ">": operator in ">=" and value > other, ">=": operator in ">=" and value >= other,
            }[operator]  # fmt: skip


def value_of(name: filters.Name, run: Run) -> Any:
    return run.point.get(name.name) if name.kind is filters.Kind.axis else getattr(run, name.name)


def like(text: str, pattern: str) -> bool:
    if not pattern:
        return not text
    if pattern[0] == "%":
        return any(like(text[start:], pattern[1:]) for start in range(len(text) + 1))
    return bool(text) and pattern[0] in ("_", text[0]) and like(text[1:], pattern[1:])


@pytest.mark.parametrize(
    "text",
    [
        "accuracy > 0.5",
        "precision = 'fp32' and accuracy >= 0.3",
        "not (accuracy <= 0.5 or cost_usd = 2)",
        "state = 'succeeded'",
        "state in ('failed', \"queued\") and index < 12",
        "state != 'succeeded' and not precision in ('bf16')",
        "accuracy is null",
        "accuracy is not null and cost_usd is null",
        "cost_usd in (0.5, 3)",
        "not cost_usd in (0.5, 3)",
        "failure_message like '50%1_000'",
        "failure_message like '50% OF%'",
        "failure_message ilike '50% OF%'",
        "failure_message not like '%[x]*?%'",
        "task like 'im__' and student ilike 'MINI'",
        "failure_class = 'out_of_memory'",
        "axis.batch.global_size = 8",
        "axis.\"batch.global_size\" > 8 and axis.precision = 'bf16'",
        "axis.batch.global_size in (8, 9)",
        "axis.nothing is null",
        "axis.nothing = 'x'",
        "not axis.precision like 'fp%'",
        "precision = 'it''s'",
        "precision = 'x'' or 1=1 --'",
        "seed >= 1 and seed <= 1e0 and workers = +1",
        "accuracy > -1e300 and index < 9223372036854775807",
        "index < 1e30 and attempt < 9223372036854775807",
        "",
        "   ",
    ],
)
def test_a_filter_means_what_it_says(lasting_store: Store, filled: list[Run], text: str) -> None:
    condition = parse_filter(text, RUN_NAMES)
    expected = {run.id for run in filled if condition is None or holds(condition, run)}
    assert {run.id for run in lasting_store.runs.page(filter=text).items} == expected


def test_figures_and_fields_filter_by_the_name_that_specs_and_tables_have(
    store: Store, running: Callable[..., tuple[Experiment, list[Run]]]
) -> None:
    rates = {"optimizer.learning_rate": [1e-5, 1e-4], "optimizer.betas": [[0.9, 0.98], [0.9, 0.99]]}
    _, runs = running(1, search={"axes": rates}, batch={"global_size": 8}, optimizer={"eps": 1e-6})
    for run, value in zip(runs[:3], (0.7, 0.8, float("nan")), strict=True):
        attempt = store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts={})
        summary = {"accuracy": 0.9, "test_accuracy": value}
        store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=summary)
    for text, found in {
        "test_accuracy > 0.75": [1],
        "test_accuracy in (0.7, 0.8)": [0, 1],
        "test_accuracy is null": [3],
        "batch.global_size = 8": [0, 1, 2, 3],
        "batch.global_size > 8": [],
        "optimizer.name = 'adamw' and optimizer.eps = 1e-6": [0, 1, 2, 3],
        "optimizer.learning_rate < 5e-5": [0, 1],
        "optimizer.betas = '0.9,0.98'": [0, 2],
        "deterministic = 'true'": [],
        "model.teacher is null and distillation.layer_map is null": [0, 1, 2, 3],
        "task.max_length >= 1 and model.name like 'm%'": [0, 1, 2, 3],
        "batch = 8 and learning_rate < 5e-5": [0, 1],
        "optimizer = adamw": [0, 1, 2, 3],
        "succeeded": [0, 1, 2],
        "adamw and not succeeded": [3],
        "'0.9,0.98'": [0, 2],
    }.items():
        assert [run.index for run in store.runs.page(filter=text, order_by="index").items] == found, text
    assert store.runs.figure_names(None) == ["test_accuracy"]
    by_batch = store.runs.page(order_by="batch.global_size desc, index").items
    assert [run.index for run in by_batch] == [0, 1, 2, 3]
    for order, found in {
        "axis.optimizer.betas desc, learning_rate desc": [3, 1, 2, 0],
        "optimizer.learning_rate desc, seed": [3, 2, 1, 0],
        "test_accuracy desc": [1, 0],  # Then those without a number.
    }.items():
        paged = every(store.runs.page, order_by=order, page_size=3)
        assert [run.index for run in paged][: len(found)] == found, order


@pytest.mark.parametrize("order_by", [None, "accuracy", "precision desc, seed", "axis.precision, seed"])
def test_a_page_in_the_middle_is_that_of_the_whole_list(
    lasting_store: Store, filled: list[Run], order_by: str | None
) -> None:
    whole = [run.id for run in lasting_store.runs.page(order_by=order_by).items]
    for offset in (0, 1, len(whole) - 2, len(whole), len(whole) + 9):
        page = lasting_store.runs.page(order_by=order_by, page_size=3, offset=offset)
        assert [run.id for run in page.items] == whole[offset : offset + 3]
        assert page.total == len(whole)
        if page.next_page_token is not None:
            after = lasting_store.runs.page(order_by=order_by, page_size=3, page_token=page.next_page_token)
            assert [run.id for run in after.items] == whole[offset + 3 : offset + 6]
            assert after.total is None


def test_booleans_of_axes_compare_as_words(lasting_store: Store, filled: list[Run]) -> None:
    assert len(lasting_store.runs.page(filter="axis.deterministic = 'true'").items) == len(filled) // 2


@pytest.mark.parametrize("column", ["accuracy", "cost_usd", "index", "precision", "failure_class", "id"])
@pytest.mark.parametrize("direction", ["asc", "desc"])
def test_orders_are_total_and_put_no_value_last(
    lasting_store: Store, filled: list[Run], column: str, direction: str
) -> None:
    runs = list(every(lasting_store.runs.page, order_by=f"{column} {direction}", page_size=5))
    assert sorted(run.id for run in runs) == sorted(run.id for run in filled)
    values = [getattr(run, column) for run in runs]
    known = [value for value in values if value is not None]
    assert values == known + [None] * (len(values) - len(known))
    assert known == sorted(known, reverse=direction == "desc")


@pytest.mark.parametrize("page_size", [1, 7, 24, 25])
def test_pages_cover_a_list_once(lasting_store: Store, filled: list[Run], page_size: int) -> None:
    text = "accuracy > 0.2 or accuracy is null"
    pages = list(every(lasting_store.runs.page, filter=text, order_by="accuracy", page_size=page_size))
    assert len(pages) == len({run.id for run in pages})
    assert {run.id for run in pages} == {run.id for run in lasting_store.runs.page(filter=text).items}


def test_pages_are_stable_when_rows_arrive(store: Store, submit: Submit) -> None:
    first = [submit().id for _ in range(10)]
    page = store.experiments.page(page_size=4)
    seen = [experiment.id for experiment in page.items]
    while page.next_page_token:
        submit()
        page = store.experiments.page(page_size=4, page_token=page.next_page_token)
        seen += [experiment.id for experiment in page.items]
    assert seen == first[::-1]


def test_default_orders(store: Store, submit: Submit) -> None:
    ids = [submit(3).id for _ in range(2)]
    assert [experiment.id for experiment in store.experiments.page().items] == ids[::-1]
    assert [run.index for run in store.runs.page(experiment_id=ids[0]).items] == [0, 1, 2]
    everything = store.runs.page().items
    assert [run.id for run in everything] == sorted((run.id for run in everything), reverse=True)


def test_experiments_are_filtered_by_their_fields(store: Store, submit: Submit) -> None:
    mine, other = submit(owner="ada"), submit(owner="bob")
    store.requests.cancel(other.id)
    assert [e.id for e in store.experiments.page(filter="owner = 'ada' and state = 'queued'").items] == [
        mine.id
    ]
    (cancelled,) = store.experiments.page(filter="cancel_requested_s > 0", order_by="ended_s desc").items
    assert (cancelled.id, cancelled.state) == (other.id, ExperimentState.cancelled)
    with pytest.raises(FilterError, match="owner"):
        store.experiments.page(filter="ownr = 'ada'")


@pytest.mark.parametrize(
    "token",
    ["", "x", "!!!", "AAAA", "é", base64.urlsafe_b64encode(b"[1,2,3]").decode(),
     base64.urlsafe_b64encode(b"{}").decode(), "W10", "bnVsbA",
     base64.urlsafe_b64encode(b"[" * 2000).decode()],
)  # fmt: skip
def test_a_token_that_is_none_is_refused(lasting_store: Store, filled: list[Run], token: str) -> None:
    with pytest.raises(BadPageToken):
        lasting_store.experiments.page(page_token=token)


def test_a_token_of_another_list_or_a_forged_one_is_refused(store: Store, submit: Submit) -> None:
    submit(5)
    token = store.runs.page(page_size=2, order_by="precision").next_page_token
    assert token is not None
    for other in ({"order_by": "seed"}, {"order_by": "precision desc"}, {"filter": "seed > 0"}, {}):
        with pytest.raises(BadPageToken):
            store.runs.page(page_token=token, **other)  # type: ignore[arg-type]
    with pytest.raises(BadPageToken):
        store.experiments.page(page_token=token)
    fingerprint, values, id = content(token)
    for forged in ([fingerprint, [7], id], [fingerprint, values, "1"], [fingerprint, values, 10**30],
                   [fingerprint, values, id, 1], [fingerprint, [*values, 1], id], [fingerprint, values, True],
                   [fingerprint, [None], id], [fingerprint, [{"a": 1}], 1], [fingerprint, "x", 1],
                   [fingerprint, ["\0"], id], [fingerprint, ["\ud800"], id]):  # fmt: skip
        with pytest.raises(BadPageToken):
            store.runs.page(order_by="precision", page_token=encoded(forged))


@pytest.mark.parametrize("value", [True, 10**400, float("nan"), float("inf"), 1.5, 2**31, "1"])
def test_a_token_with_a_number_that_the_column_cannot_hold_is_refused(
    lasting_store: Store, filled: list[Run], value: object
) -> None:
    token = lasting_store.runs.page(page_size=1, order_by="attempt").next_page_token
    assert token is not None
    fingerprint, _, id = content(token)
    with pytest.raises(BadPageToken):
        lasting_store.runs.page(order_by="attempt", page_token=encoded([fingerprint, [value], id]))


def content(token: str) -> list[Any]:
    """What a page token holds."""
    decoded: list[Any] = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    return decoded


def encoded(content: object) -> str:
    """A page token that holds something."""
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


def test_orders_by_several_columns_page_like_one(lasting_store: Store, filled: list[Run]) -> None:
    def rank(run: Run) -> tuple[object, ...]:
        accuracy, cost_usd = run.accuracy, run.cost_usd
        return (
            cost_usd is None, cost_usd or 0.0, accuracy is None, -(accuracy or 0.0), run.precision, run.id,
        )  # fmt: skip

    order_by = "cost_usd, accuracy desc, precision asc"
    for page_size in (1, 5, 100):
        paged = list(every(lasting_store.runs.page, order_by=order_by, page_size=page_size))
        assert [run.id for run in paged] == [run.id for run in sorted(paged, key=rank)]
        assert len(paged) == len(filled)


@pytest.mark.parametrize(
    "order_by", ["nothing", "accuracy up", "accuracy, point", "point", "id; drop table runs"]
)
def test_an_order_that_is_none_is_refused(lasting_store: Store, order_by: str) -> None:
    with pytest.raises(FilterError):
        lasting_store.runs.page(order_by=order_by)


def test_page_sizes_are_clamped(store: Store, submit: Submit) -> None:
    submit(3)
    assert len(store.runs.page(page_size=0).items) == 1
    assert len(store.runs.page(page_size=10**9).items) == 3


def test_figures_of_every_task_are_columns_to_filter_and_order_by(
    store: Store, running: Callable[..., tuple[Experiment, list[Run]]]
) -> None:
    _, runs = running(3)
    for run, score in zip(runs, (0.25, float("nan"), 0.75), strict=True):
        attempt = store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts={})
        figures = {
            "map": score, "mrr": score, "exact_match": score, "top5_accuracy": score, "mfu_pct": score,
            "headline": "map", "score": score, "test_score": score, "test_examples": 63,
            "best_score": 0.9, "best_step": 4, "best_checkpoint": "/c/4",
        }  # fmt: skip
        store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=figures)
    low, unknown, high = runs
    wanted = "headline = 'map' and score > 0.5 and map > 0.5 and mrr > 0.5 and exact_match > 0.5"
    wanted += " and top5_accuracy > 0.5 and mfu_pct > 0.5 and best_step = 4 and best_checkpoint like '/c/%'"
    wanted += " and test_score > 0.5 and test_examples = 63"
    assert [run.id for run in store.runs.page(filter=wanted).items] == [high.id]
    for column in ("score", "test_score"):
        ordered = store.runs.page(order_by=f"{column} desc").items
        assert [run.id for run in ordered] == [high.id, low.id, unknown.id]
    assert store.runs.page(filter="teacher is null and score is null").items[0].id == unknown.id
    found = store.runs.get(high.id)
    assert (found.best_score, found.best_step, found.best_checkpoint) == (0.9, 4, "/c/4")


def test_a_run_that_is_tried_again_has_no_best_of_the_try_before(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    _, run, attempt = training()
    figures = {"headline": "map", "score": 0.5, "best_score": 0.5, "best_step": 4, "best_checkpoint": "/c/4"}
    store.attempts.finish_run(run.id, attempt, RunState.stopped, summary=figures)
    assert store.runs.get(run.id).best_step == 4
    again = store.requests.retry_run(run.id)
    assert (again.score, again.best_step, again.best_checkpoint) == (None, None, None)


@pytest.mark.parametrize("few", [0, 200])
def test_lists_show_the_projects_that_their_reader_sees(
    store: Store, submit: Submit, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(listing, "FEW", few)
    projects = ("nlp", "vision", "default", "nlp")
    for name in ("nlp", "vision"):
        store.projects.create(name)
    ids = {submit(2, project=project).id: project for project in projects}
    for seen in (frozenset(), frozenset({"nlp"}), frozenset({"nlp", "vision"}), None):
        visible = Visibility(seen)
        expected = [id for id, project in ids.items() if visible.includes(project)]
        assert [
            found.id for found in every(store.experiments.page, visible=visible, order_by="id", page_size=1)
        ] == expected
        for order_by in ("id", "id desc", "accuracy", "seed, id"):
            runs = every(store.runs.page, visible=visible, order_by=order_by, page_size=3)
            assert sorted(run.experiment_id for run in runs) == sorted(2 * expected)
