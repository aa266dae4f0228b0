"""`stillhouse inspect` on folders of each kind, and on anything."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from typer.testing import CliRunner

from service.cli.app import app
from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.scheduling.admission import checked_plans, read_spec
from tests.drawing import scaled
from tests.trainers.corpora import write_task
from trainers.tasks import TASKS
from trainers.tasks.inspection import estimated_tokens

WORDS = sorted({"tea", "was", "fragrant", "and", "the", "second", "cup", "bitter", "but", "we", "stayed"})


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(4, 12)))


@pytest.fixture
def inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Inspect `mine`, and return what is printed."""
    monkeypatch.setenv("STILLHOUSE_DATA_ROOTS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["inspect", str(tmp_path / "mine"), *arguments])
        assert result.exit_code == code, result.output
        return json.loads(result.output) if "--json" in arguments else result.output

    (tmp_path / "mine").mkdir()
    return run


def write(folder: Path, name: str, row: Callable[[random.Random], str], rows: int = 60) -> None:
    rng = random.Random(name)
    (folder / name).write_text("".join(row(rng) + "\n" for _ in range(rows)), encoding="utf-8")


def valid(spec: Mapping[str, Any], root: Path) -> None:
    settings = Settings(data_dir=root / "service", data_roots=str(root))
    checked_plans(read_spec(yaml.safe_dump(spec).encode(), CATALOGUE), settings.roots, CATALOGUE, None)


def row(**fields: Callable[[random.Random], Any]) -> Callable[[random.Random], str]:
    return lambda rng: json.dumps({name: value(rng) for name, value in fields.items()})


def choice(*values: Any) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(values)


KINDS: Mapping[str, tuple[str, Callable[[random.Random], str], Mapping[str, Any]]] = {
    "other names": (
        "train.jsonl",
        row(sentence=sentence, polarity=choice(0, 1)),
        {"name": "classification", "columns": {"text": "sentence", "label": "polarity"}},
    ),
    "pairs": (
        "train.jsonl",
        row(first=sentence, second=sentence, label=choice("yes", "no", "maybe")),
        {"name": "classification", "columns": {"text": "first", "text_pair": "second"}},
    ),
    "several labels": (
        "train.jsonl",
        row(text=sentence, label=choice(["a"], ["a", "b"], [])),
        {"name": "classification", "multi_label": True},
    ),
    "no header": (
        "train.tsv",
        lambda rng: f"{rng.randrange(3)}\t{sentence(rng)}",
        {"name": "classification", "columns": {"text": 1, "label": 0}},
    ),
    "reviews": ("train.jsonl", row(text=sentence, label=choice("neg", "pos")), {"name": "imdb"}),
    "numbers": ("train.jsonl", row(text=sentence, label=choice(1.5, 2.25, 4.0)), {"name": "regression"}),
    "codes": ("train.jsonl", row(text=sentence, code=choice("0101.21", "0901.11")), {"name": "tariff"}),
    "plain text": ("train.txt", sentence, {"name": "mlm"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_to_start_from_is_valid(kind: str, inspect: Callable[..., Any], tmp_path: Path) -> None:
    name, line, task = KINDS[kind]
    write(tmp_path / "mine", name, line)
    spec = inspect("--json")["spec"]
    assert {
        field: value for field, value in spec["task"].items() if field not in ("path", "max_length")
    } == task
    assert spec["task"]["path"] == "mine"
    valid(spec, tmp_path)


@pytest.mark.parametrize(
    "task", ["classification", "squad_v2", "wikiqa", "tariff", "mlm", "token_classification"]
)
def test_a_task_is_found_in_a_corpus_of_its_own(
    task: str, inspect: Callable[..., Any], tmp_path: Path
) -> None:
    write_task(tmp_path / "mine", task)
    found = inspect("--json")
    assert found["spec"]["task"]["name"] == task
    valid(found["spec"], tmp_path)


def test_shards_of_a_part_are_counted_and_the_form_of_the_text_is_found(
    inspect: Callable[..., Any], tmp_path: Path
) -> None:
    for number in range(4):
        write(
            tmp_path / "mine", f"train-{number}-of-4.txt", lambda rng: f"{sentence(rng)} <unk> did n't see N"
        )
    found = inspect("--json")
    assert found["parts"]["train"]["file_count"] == 4
    assert found["parts"]["train"]["files"][:2] == ["train-0-of-4.txt", "train-1-of-4.txt"]
    assert found["spec"]["task"]["detokenise"] == "penn_treebank"
    valid(found["spec"], tmp_path)
    assert re.search(r"^files +4$", inspect(), re.MULTILINE)


def test_labels_lengths_duplicates_and_empty_texts_are_counted(
    inspect: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [{"text": f"good tea number {n}", "label": "pos"} for n in range(20)]
    rows += [{"text": f"bad tea number {n} " + "word " * 100, "label": "neg"} for n in range(19)]
    write_rows = lambda name, these: (tmp_path / "mine" / name).write_text(  # noqa: E731
        "".join(json.dumps(row) + "\n" for row in these)
    )
    write_rows("train.jsonl", [*rows, rows[0], {"text": " ", "label": "pos"}])
    write_rows("test.jsonl", [rows[1], {"text": "other tea", "label": "neg"}])
    answer = inspect("--json")
    train = answer["parts"]["train"]
    assert (train["rows"], train["usable"], train["empty_texts"], train["duplicates"]) == (41, 40, 1, 1)
    assert train["labels"] == {"label": {"pos": 21, "neg": 19}}
    assert answer["shared"] == {"train and test": 1}
    assert train["lengths"]["cut"]["64"] == pytest.approx(19 / 40)
    assert train["lengths"]["words"]["100"] == 104
    assert answer["spec"]["task"]["max_length"] == 128
    assert "line 41, field text: empty" in train["mistakes"][0]


def test_a_tokenizer_counts_exactly(inspect: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "mine", "train.jsonl", row(text=sentence, label=choice("neg", "pos")))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    lengths = inspect("--json", "--tokenizer", str(folder))["parts"]["train"]["lengths"]
    assert lengths["tokens"]["100"] == lengths["words"]["100"] + 2
    assert "a fast estimate" in inspect()
    assert f"the tokenizer of {folder}" in " ".join(inspect("--tokenizer", str(folder)).split())


def test_a_folder_without_train_part_suggests_a_file(inspect: Callable[..., Any], tmp_path: Path) -> None:
    write(
        tmp_path / "mine",
        "test.csv",
        lambda rng: f'{rng.randrange(1, 5)},"{sentence(rng)}","{sentence(rng)}"',
    )
    (tmp_path / "mine" / "classes.txt").write_text("World\nSports\nBusiness\nSci/Tech\n")
    spec = inspect("--json")["spec"]
    assert spec["task"]["path"] == "mine/test.csv"
    assert spec["task"]["columns"] == {"label": 0, "text": 1, "text_pair": 2}
    valid(spec, tmp_path)


def test_a_list_of_names_next_to_the_data_names_the_classes(
    inspect: Callable[..., Any], tmp_path: Path
) -> None:
    write(tmp_path / "mine", "train.tsv", lambda rng: f"{sentence(rng)}\t{rng.choice(['0', '1', '0,2'])}\tid")
    (tmp_path / "mine" / "labels.txt").write_text("joy\nfear\nlove\n")
    task = inspect("--json")["spec"]["task"]
    assert (task["labels"], task["multi_label"]) == (["joy", "fear", "love"], True)


def test_what_no_task_can_read_is_said_once_and_fails(inspect: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "mine" / "vocab.txt").write_text("[PAD]\n[UNK]\ntea\n")
    printed = inspect(code=1)
    assert "no task can read this:" in printed
    assert " ".join(printed.split()).count("no dataset found") == 1
    assert not any(name in printed for name in TASKS if name != "mlm")
    assert set(inspect("--json", code=1)["refused"]) == set(TASKS)
    assert inspect("--json", code=1)["spec"] is None


def test_tasks_that_differ_in_what_they_miss_are_named_with_it(
    inspect: Callable[..., Any], tmp_path: Path
) -> None:
    write(tmp_path / "mine", "train.jsonl", row(when=lambda rng: rng.random()))
    words = " ".join(inspect(code=1).split())
    assert "classification, regression: no columns for text, text_pair, label" in words
    listed = re.findall(r"(\w+)(?=(?:, \w+)*: no columns)", words)
    assert sorted(listed) == sorted(TASKS)


@pytest.mark.parametrize("width", ["40", "80"])
def test_tables_fit_into_the_terminal(
    inspect: Callable[..., Any], tmp_path: Path, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("train", "validation", "test"):
        write(tmp_path / "mine", f"{part}.jsonl", row(text=sentence, label=choice("neg", "pos")))
    monkeypatch.setenv("COLUMNS", width)
    table = inspect().partition("rows ")[2].partition("tokens are counted")[0]
    assert max(map(len, table.splitlines())) <= int(width)


def test_a_missing_path_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"error: {tmp_path / 'nowhere'}: cannot be read (No such file or directory)"
    ]


def test_estimates_are_near_the_truth_for_english() -> None:
    text = "This film, which I expected to dislike, turned out to be surprisingly wonderful."
    assert estimated_tokens([text]) == [pytest.approx(16, abs=3)]


NAMES = (
    "train.jsonl train.csv train.tsv train.parquet train.txt train.json train-v2.0.json train.conll data.gz "
    "labels.txt codes.csv"
)


ROWS = st.lists(
    st.dictionaries(st.sampled_from(["text", "label", "tokens", "tags"]), st.text() | st.none()), max_size=5
)


@examples(max_examples=scaled(40))
@given(
    name=st.sampled_from(NAMES.split()),
    content=st.binary(max_size=400)
    | st.text(max_size=200).map(str.encode)
    | ROWS.map(lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode()),
)
def test_any_bytes_end_in_an_answer(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / name).write_bytes(content)
    for arguments in ([], ["--json"]):
        result = CliRunner().invoke(app, ["inspect", str(folder), *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert result.exit_code in (0, 1, 2), result.output
