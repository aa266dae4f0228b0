"""Answers over REST: the numbers of the analysis, and a problem for every bad question."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from api.routes import analysis
from benchmarks.simulated import FACTS, open_store, sweep
from service.analysis import AnalysisError
from service.analysis.guidelines import read_guide
from service.analysis.question import Question
from service.analysis.ranking import STRATEGIES
from service.analysis.run_table import read_curves, read_run_table
from service.config.settings import Settings
from service.domain.access import Visibility
from service.domain.records import MeasurementRow
from service.store import RecordBatch, Store
from tests.api.conftest import BASE_URL

SIDES = {"a": "precision=bf16", "b": "precision=fp32"}


@pytest.fixture(scope="module")
def house(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Store]]:
    """The API over: 1 a whole sweep, 2 one seed, 3 other data, 4 more seeds of 1, 5 queued, 6 two tasks."""
    folder = tmp_path_factory.mktemp("answers")
    shutil.copy(migrated, folder / "stillhouse.db")
    (folder / "texts").mkdir()
    rows = "".join(f'{{"text": "number {i}", "label": {i % 2}}}\n' for i in range(20))
    (folder / "texts" / "train.jsonl").write_text(rows, encoding="utf-8")
    settings = Settings(data_dir=folder, data_roots=str(folder))
    store, clock = open_store(settings)
    sweep(store, clock)
    sweep(store, clock, axes={"precision": ["fp32", "bf16"]}, seeds=1)
    kept = FACTS["data"]
    FACTS["data"] = {**kept, "train.sha256": "c" * 64}  # type: ignore[dict-item]
    sweep(store, clock, axes={"precision": ["fp32", "bf16"]})
    FACTS["data"] = kept
    sweep(store, clock, first_seed=3, seeds=2, random_seed=1)
    app = create_app(settings)
    with TestClient(app, base_url=BASE_URL) as client:
        spec = "name: waits\ntask: {name: imdb, path: texts}\nmodel: {name: tiny}\n"
        client.post("/api/v1/experiments", content=spec).raise_for_status()
        over_tasks = {"task.name": ["imdb", "squad_v2"], "precision": ["fp32", "bf16"]}
        sweep(store, clock, axes=over_tasks, random_seed=2)
        yield client, store
    store.close()


def test_kernels_of_profiled_runs_stand_beside_each_row(house: tuple[TestClient, Store]) -> None:
    client, store = house
    assert "no run was profiled on a GPU" in " ".join(get(client, "compare", 2, kernels=True)["notes"])
    fp32, bf16 = (
        [run for run in store.runs.all_of(2) if run.precision == precision] for precision in ("fp32", "bf16")
    )
    measured = [
        MeasurementRow(run.id, 1, name, value * factor, "1", "counter", f"kernel:{kernel}", 0.0, 1.0)
        for runs, factor in ((fp32, 1.0), (bf16, 0.5))
        for run in runs
        for kernel, figures in (
            ("norm", {"kernel_ms_per_step": 2.0, "launches_per_step": 25.0}),
            ("gemm", {"kernel_ms_per_step": 8.0, "sm_throughput_pct": 70.0}),
        )
        for name, value in figures.items()
    ]
    store.recording.record(RecordBatch(measurements=measured))
    answer = get(client, "compare", 2, kernels=True)
    assert [(row["label"], row["kernel"], row["runs"], row["figures"]) for row in answer["kernels"]] == [
        ("precision=fp32", "gemm", 1, {"kernel_ms_per_step": 8.0, "sm_throughput_pct": 70.0}),
        ("precision=fp32", "norm", 1, {"kernel_ms_per_step": 2.0, "launches_per_step": 25.0}),
        ("precision=bf16", "gemm", 1, {"kernel_ms_per_step": 4.0, "sm_throughput_pct": 35.0}),
        ("precision=bf16", "norm", 1, {"kernel_ms_per_step": 1.0, "launches_per_step": 12.5}),
    ]
    assert get(client, "compare", 2)["kernels"] == []
    report = client.get("/api/v1/experiments/2/report", params={"format": "md"}).text
    assert "## Kernels" in report
    assert "| precision=fp32 | gemm | 8 | - | 70 |" in report


@pytest.fixture
def client(house: tuple[TestClient, Store]) -> TestClient:
    """The API."""
    return house[0]


def get(client: TestClient, question: str, experiment: int = 1, **params: Any) -> Any:
    answer = client.get(f"/api/v1/experiments/{experiment}/{question}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_rest_says_the_numbers_of_the_analysis(house: tuple[TestClient, Store]) -> None:
    client, store = house
    run_table = read_run_table(store, [1])
    question = Question(run_table)
    recommended = get(client, "recommend")
    assert recommended["text"] == question.recommend().text
    claimed = get(client, "compare", **SIDES)["claims"]
    assert [pair["text"] for pair in claimed] == [pair.text for pair in question.compare(**SIDES).claims]
    assert get(client, "score")["ranking"][0]["score"] == question.score().ranking[0].score
    assert get(client, "score")["definitions"] == "stillhouse"
    published = get(client, "score", as_published="true")
    assert (published["definitions"], published["criteria"][0]["metric"]) == ("published", "train_time_s")
    effects = get(client, "effects", metric="cost_usd")["items"][0]
    assert effects["sentences"] == list(question.effects(metrics=["cost_usd"]).items[0].sentences)
    front = get(client, "frontier")
    assert {m["label"] for m in front["members"]} == {m.label for m in question.frontier().members}
    curves = {run: of["accuracy"] for run, of in read_curves(store, run_table.finished, ["accuracy"]).items()}
    speedup = question.speedup(curves=curves)
    assert speedup.time_to is not None
    over_rest = get(client, "speedup")["time_to"]
    assert over_rest["target"] == speedup.time_to.target
    assert [row["mean_s"] for row in over_rest["rows"]] == [row.mean_s for row in speedup.time_to.rows]


def test_a_guide_quotes_the_comparisons_of_what_its_reader_sees(house: tuple[TestClient, Store]) -> None:
    client, store = house
    answer = client.get("/api/v1/guide", params={"by": "precision", "metric": "cost_usd"}).json()
    assert [each["task"] for each in answer["guidelines"]] == ["imdb", "squad_v2"]
    imdb = answer["guidelines"][0]
    assert [of["experiment_id"] for of in imdb["evidence"]] == [1, 2, 3, 4, 6]
    assert imdb["counts"] == {"B is better": 4, "untested": 1}
    compared = get(client, "compare", 1, by="precision", metric="cost_usd", claims=True)["claims"]
    assert [imdb["evidence"][0]["pair"]] == compared
    newest = client.get("/api/v1/guide", params={"limit": 1}).json()
    assert [of["id"] for of in newest["sources"]] == [6]
    assert "only the newest 1 finished experiments were read" in " ".join(newest["notes"])
    wrong = client.get("/api/v1/guide", params={"by": "lambda"})
    assert (wrong.status_code, wrong.json()["type"].rsplit("/", 1)[-1]) == (422, "invalid-parameter")
    nothing = client.get("/api/v1/guide", params={"project": "vision"})
    assert (nothing.status_code, nothing.json()["type"].rsplit("/", 1)[-1]) == (409, "no-answer")
    assert len(read_guide(store, visible=Visibility(frozenset({"default"})), limit=1).sources) == 1
    with pytest.raises(AnalysisError, match="no finished experiment varies an axis"):
        read_guide(store, visible=Visibility(frozenset({"vision"})))


def test_several_tasks_are_ranked_together(client: TestClient) -> None:
    answer = get(client, "tasks", 6)
    assert [(of["task"], of["metric"]["name"]) for of in answer["tasks"]] == [
        ("imdb", "accuracy"), ("squad_v2", "f1"),
    ]  # fmt: skip
    assert {of["label"] for of in answer["standings"]} == {"precision=fp32", "precision=bf16"}
    [pair] = answer["improvements"]
    assert 0.0 <= pair["low"] <= pair["probability"] <= pair["high"] <= 1.0
    means = get(client, "compare", 6, filter="task = 'imdb'", metric="accuracy")["rows"]
    assert {row["point"]["precision"]: row["figures"]["accuracy"]["mean"] for row in means} == pytest.approx(
        {of["point"]["precision"]: of["means"]["imdb"] for of in answer["standings"]}
    )


def test_configurations_are_compared_at_their_best_and_next_to_print(client: TestClient) -> None:
    study = """{source: {title: A}, conditions: {task: imdb, hardware: v100, versions: {torch: 1.13}}, rows: [
        {at: {precision: fp32, optimizer: adamw}, figures: {total_time_s: 100}},
        {at: {precision: int8}, figures: {total_time_s: 50}}]}"""
    answer = get(client, "compare", best_over="batch", published=study)
    assert answer["axes"] == ["precision", "optimizer.name"]
    assert {of["tried"] for of in answer["tuning"]["best"]} == {3}
    [of] = answer["published"]["figures"]
    row = next(row for row in answer["rows"] if row["point"] == of["point"])
    assert of["mean"] == pytest.approx(row["figures"]["total_time_s"]["mean"])
    assert of["ratio"] == pytest.approx(of["mean"] / 100)
    assert answer["published"]["missing"] == {"precision=int8": "no run has precision=int8"}
    assert [each["name"] for each in answer["published"]["conditions"]] == [
        "task", "hardware", "versions.torch",
    ]  # fmt: skip
    assert answer["published"]["conditions"][0]["differs"] is False


def test_comparing_without_claims_tests_nothing(client: TestClient) -> None:
    answer = get(client, "compare", by="precision")
    assert [row["label"] for row in answer["rows"]] == ["precision=fp32", "precision=bf16"]
    assert answer["claims"] == []
    assert get(client, "compare", by="precision", claims=True)["claims"]


def test_several_experiments_are_answered_from_together(client: TestClient) -> None:
    alone = get(client, "compare", metric="accuracy", **SIDES)["claims"][0]["claim"]
    together = get(client, "compare", metric="accuracy", also=4, **SIDES)["claims"][0]["claim"]
    assert (alone["pairs"], together["pairs"]) == (3, 5)
    rows = get(client, "compare", also=4)["rows"]
    assert {row["planned"] for row in rows} == {5}


def test_a_report_is_a_page_that_may_load_nothing(client: TestClient) -> None:
    page = client.get("/api/v1/experiments/1/report")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    text = client.get("/api/v1/experiments/1/report", params={"format": "md"})
    assert text.headers["content-type"].startswith("text/markdown")
    assert text.text.startswith("# precision by batch by optimizer\n")


@pytest.mark.parametrize(
    ("experiment", "question", "status", "type", "says"),
    [
        (99, "compare", 404, "not-found", "no experiment has the id 99"),
        (1, "compare?also=99", 404, "not-found", "no experiment has the id 99"),
        (1, "compare?by=colour", 422, "invalid-parameter", "unknown axis 'colour'"),
        (1, "compare?a=precision=bf16", 422, "invalid-parameter", "give both a and b"),
        (1, "compare?margin=accuracy", 422, "invalid-parameter", "is not NAME=NUMBER"),
        (1, "compare?claims=1&margin=accuracy=nan", 422, "invalid-parameter", "is not a positive number"),
        (1, "compare?alpha=2", 422, "invalid-parameter", "less than 1"),
        (1, "compare?filter=accuracy >", 400, "invalid-filter", ""),
        (2, "compare?claims=1", 409, "no-answer", "a claim needs at least two"),
        (2, "effects", 409, "no-answer", "a claim needs at least two"),
        (1, "compare?by=precision&claims=1&filter=precision='bf16'", 409, "no-answer", "only one value"),
        (1, "compare?filter=precision='tf32'", 409, "no-answer", "has no runs"),
        (
            1,
            "compare?also=3",
            409,
            "not-comparable",
            "train.sha256 is aaaaaaaaaaaa in run:1 and cccccccccccc",
        ),
        (1, "report?also=3", 409, "not-comparable", "train.sha256"),
        (5, "recommend", 409, "no-answer", "no run has accuracy"),
        (5, "score", 409, "no-answer", "no configuration has"),
        (5, "frontier", 409, "no-answer", "no configuration has"),
        (5, "speedup", 409, "no-answer", "has no result"),
        (1, "score?strategy=cheap", 422, "invalid-parameter", "balance"),
        (1, "score?weight=cost_usd=0", 422, "invalid-parameter", "all weights are 0"),
        (1, "score?weight=cost_usd=-1", 422, "invalid-parameter", "is not a number of 0 or more"),
        (1, "score?weight=cost_usd=1&weight=cost_usd=2", 422, "invalid-parameter", "given twice"),
        (1, "frontier?metric=price", 422, "invalid-parameter", "unknown metric 'price'"),
        (1, "recommend?objective=price", 422, "invalid-parameter", "unknown metric 'price'"),
        (1, "recommend?at_least=accuracy=0.99", 409, "no-answer", "no configuration meets every constraint"),
        (1, "speedup?baseline=precision=fp32", 422, "invalid-parameter", "names 6 configurations"),
        (1, "speedup?target=accuracy=0.8&target=f1=0.8", 422, "invalid-parameter", "give one"),
        (1, "report?format=pdf", 422, "invalid-parameter", "html"),
        (1, "recommend?per=device", 422, "invalid-parameter", "unknown axis 'device'"),
        (2, "compare?best_over=precision", 422, "invalid-parameter", "needs an axis besides"),
        (1, "compare?best_over=warmup", 422, "invalid-parameter", "unknown axis 'warmup'"),
        (1, "compare?published=[", 422, "invalid-parameter", "cannot be read"),
        (1, "compare?published=x", 422, "invalid-parameter", "write source, conditions, and rows"),
        (1, "tasks", 409, "no-answer", "the runs are of one task (imdb)"),
        (6, "tasks?metric=price", 422, "invalid-parameter", "unknown metric 'price'"),
        (6, "compare", 409, "not-comparable", "or rank over tasks with: stillhouse tasks"),
    ],
)
def test_a_bad_question_is_a_problem_that_says_what_to_do(
    client: TestClient, experiment: int, question: str, status: int, type: str, says: str
) -> None:
    answer = client.get(f"/api/v1/experiments/{experiment}/{question}")
    assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{type}")
    assert says in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


def test_every_strategy_can_be_named() -> None:
    hints = get_type_hints(analysis.score_experiment, include_extras=False)
    literal = next(of for of in get_args(hints["strategy"]) if get_args(of))
    assert set(get_args(literal)) == set(STRATEGIES)
