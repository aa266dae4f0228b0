"""Mistakes in data, one line each, before a spec is accepted."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.scheduling.admission import checked_plans
from service.specs import data
from service.specs.data import data_problems
from service.specs.experiment import validate
from tests.drawing import scaled
from trainers.config import TaskConfig
from trainers.tasks import TASKS, inspection

CLASSIFICATION = {"name": "classification"}
ANSWERS = [{"text": "It", "answer_start": 0}]
SPAN = {"id": "1", "question": "Who?", "context": "Ada wrote it.", "answers": ANSWERS}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "data" / "mine").mkdir(parents=True)
    return Settings(data_dir=tmp_path / "service", data_roots=str(tmp_path / "data"))


def json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def labelled(*labels: Any, text: str = "text", words: str = "words") -> str:
    return json_lines([{text: f"{words} {n}", "label": label} for n, label in enumerate(labels)])


def problems(settings: Settings, files: Mapping[str, str | bytes], task: Mapping[str, Any]) -> list[str]:
    folder = settings.roots("data")[0] / "mine"
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    found = data_problems([TaskConfig.model_validate({**task, "path": "mine"})], settings.roots)
    assert all(problem.type == "bad-data" and problem.path == "task.path" for problem in found)
    assert not any("\n" in problem.message for problem in found)
    return [problem.message.replace(f"{folder}/", "") for problem in found]


MISTAKES = {
    "unknown column": (
        {"train.jsonl": labelled(0, 1, text="sentence")},
        CLASSIFICATION,
        "train.jsonl, line 1, field text: missing (found: sentence, label); set task.columns.text to one "
        "of these",
    ),
    "misnamed column": (
        {"train.jsonl": labelled(0, 1)},
        {**CLASSIFICATION, "columns": {"text": "sentence"}},
        "train.jsonl, line 1: no column 'sentence', which task.columns.text names (found: text, label); name "
        "one of these",
    ),
    "missing label": (
        {"train.jsonl": labelled(0, 1, None)},
        CLASSIFICATION,
        "train.jsonl, line 3, field label: missing (found: text, label); remove the row or fill it, or set "
        "task.skip: [unlabelled]",
    ),
    "label of validation alone": (
        {"train.jsonl": labelled(*"abab"), "validation.jsonl": labelled(*"abc", words="other")},
        CLASSIFICATION,
        "validation: label 'c' is not in the training part, so it cannot be learned; add training examples "
        "of it, or remove its rows",
    ),
    "label that the task does not have": (
        {"train.jsonl": labelled("neg", "pos", "neutral")},
        {"name": "imdb"},
        "train.jsonl, line 3, field label: unknown label 'neutral'; use one of neg, pos, negative, "
        "positive, 0, 1",
    ),
    "empty part": (
        {"train.csv": "text,label\na,0\nb,1\n", "test.csv": "text,label\n"},
        CLASSIFICATION,
        "mine: the test part has no rows; add rows, remove the file, or set task.test: none",
    ),
    "one class": (
        {"train.jsonl": labelled(*"aaaaaa")},
        CLASSIFICATION,
        "train: all examples (4) have label a, so there is nothing to learn; add examples of other labels",
    ),
    "several labels that are no list": (
        {"train.jsonl": labelled(["a", "b"], 3)},
        {**CLASSIFICATION, "multi_label": True},
        "train.jsonl, line 2, field label: '3' is not a list of labels; write a list, or a text with commas",
    ),
    "span outside its text": (
        {"train.jsonl": json_lines([SPAN])},
        {"name": "squad_v2"},
        "train.jsonl, line 1, question 1, field answers: 'It' is not at character 0 of the context (it does "
        "not occur)",
    ),
    "not UTF-8": (
        {"train.jsonl": labelled(0).encode() + b'{"text": "caf\xe9", "label": 1}\n'},
        CLASSIFICATION,
        "train.jsonl, line 2: byte 0xe9 is not UTF-8; convert the file to UTF-8, or set task.skip: "
        "[malformed]",
    ),
    "not JSON": (
        {"train.jsonl": labelled(0, 1) + '{"text": "cut off\n'},
        CLASSIFICATION,
        "train.jsonl, line 3: not a JSON object (Invalid control character at: line 1 column 18 (char 17)); "
        "write one object per line, or set task.skip: [malformed]",
    ),
    "no dataset": (
        {"readme.md": "nothing"},
        {"name": "wikiqa"},
        "no dataset found; expected train.jsonl, train.csv, train.tsv or train.parquet, or the task's own "
        "file layout (docs/tasks.md)",
    ),
    "no text": ({"train.txt": "\n\n"}, {"name": "mlm"}, "mine: the train part contains no text"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(settings: Settings, case: str) -> None:
    files, task, expected = MISTAKES[case]
    (message,) = problems(settings, files, task)
    assert message.endswith(expected)


def test_each_part_tells_its_first_mistake(settings: Settings) -> None:
    files = {"train.jsonl": labelled(0, None, None), "test.jsonl": "[]\n"}
    first, second = problems(settings, files, CLASSIFICATION)
    assert first.startswith("train.jsonl, line 2") and second.startswith("test.jsonl, line 1")


def test_sound_data_have_no_problem_and_are_remembered(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"train.jsonl": labelled(*"ab" * 10)}
    assert problems(settings, files, CLASSIFICATION) == []
    task = TaskConfig(name="classification", path="mine")
    assert data_problems([task], settings.roots, may_read=False) == []
    monkeypatch.setattr(inspection, "mistakes_in", lambda *_, **__: pytest.fail("looked again"))
    assert data_problems([task], settings.roots) == []


def test_a_file_that_is_fixed_is_looked_at_again(settings: Settings) -> None:
    assert problems(settings, {"train.jsonl": labelled(*"aaaaaa")}, CLASSIFICATION)
    assert problems(settings, {"train.jsonl": labelled(*"ab" * 10)}, CLASSIFICATION) == []


def test_a_fixed_file_of_many_is_looked_at_again(settings: Settings) -> None:
    folder = settings.roots("data")[0] / "mine"
    for part in ("train", "test"):
        for label in ("neg", "pos"):
            (folder / part / label).mkdir(parents=True)
            for number in range(6):
                (folder / part / label / f"{number}.txt").write_text(f"{part} {label} {number}")
    broken = folder / "train" / "pos" / "3.txt"
    broken.write_bytes(b"\xff")
    assert problems(settings, {}, {"name": "imdb"})[0].endswith("is not UTF-8; convert the file to UTF-8")
    broken.write_text("mended")
    assert problems(settings, {}, {"name": "imdb"}) == []


def test_no_link_leads_out_of_the_roots(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"password": "1234"}\n')
    (settings.roots("data")[0] / "mine" / "train.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert problems(settings, {}, CLASSIFICATION) == []


def test_a_link_within_the_roots_is_followed(settings: Settings) -> None:
    root = settings.roots("data")[0]
    (root / "blob").write_text(labelled("a", None))
    (root / "mine" / "train.jsonl").symlink_to(root / "blob")
    assert "line 2, field label: missing" in problems(settings, {}, CLASSIFICATION)[0]


@pytest.mark.parametrize("named", ["train.jsonl", "train/pos/a.txt"])
def test_a_pipe_is_not_waited_for(settings: Settings, named: str) -> None:
    folder = settings.roots("data")[0] / "mine"
    (folder / named).parent.mkdir(parents=True, exist_ok=True)
    (folder / "train" / "neg").mkdir(parents=True, exist_ok=True)
    (folder / "train" / "neg" / "a.txt").write_text("bad")
    os.mkfifo(folder / named)
    problems(settings, {}, {"name": "imdb"})  # Returns.


def test_only_the_beginning_is_read(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "LOOK_BYTES", 1000)
    late = labelled(*["a"] * 100) + "not JSON\n"
    assert problems(settings, {"train.jsonl": late}, CLASSIFICATION) == []
    early = "not JSON\n" + late
    assert problems(settings, {"train.jsonl": early}, CLASSIFICATION)


def test_a_line_without_end_is_not_decompressed(settings: Settings) -> None:
    bomb = gzip.compress(b'{"text": "' + b"a" * (inspection.LOOK_BYTES * 4))
    first = inspection.first_rows
    assert problems(settings, {"train.jsonl.gz": bomb}, CLASSIFICATION) == []
    rows = first(settings.roots("data")[0] / "mine", TaskConfig(name="classification", path="mine"))
    assert (rows.whole, rows.parts["train"]) == (False, [])


def test_a_file_that_is_read_whole_is_left_to_the_run_when_large(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"train-v2.0.json": '{"data": "wrong' + " " * 2000}
    assert problems(settings, content, {"name": "squad_v2"})
    monkeypatch.setattr(inspection, "LOOK_BYTES", 1000)
    data._FOUND.clear()
    assert problems(settings, content, {"name": "squad_v2"}) == []


def test_a_parquet_file_is_read_in_pieces(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(inspection, "LOOK_BYTES", 100_000)
    path = settings.roots("data")[0] / "mine" / "train.parquet"
    rows = {"text": ["a" * 50] * 20_000, "label": ["x"] * 20_000}
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    first = inspection.first_rows(path.parent, TaskConfig(name="classification", path="mine"))
    assert not first.whole
    assert 0 < len(first.parts["train"]) < 5_000


def test_data_of_the_hub_are_left_to_the_run(settings: Settings) -> None:
    assert data_problems([TaskConfig(name="imdb")], settings.roots) == []


def test_every_dataset_of_an_axis_is_looked_at(settings: Settings) -> None:
    problems(settings, {"good.jsonl": labelled(*"ab" * 10), "bad.jsonl": labelled("a", None)}, CLASSIFICATION)
    spec = validate(
        {
            "name": "x",
            "task": {"name": "classification", "path": "mine/good.jsonl"},
            "search": {
                "axes": {"task.path": ["mine/good.jsonl", "mine/bad.jsonl"], "precision": ["fp32", "bf16"]}
            },
        }
    )
    with pytest.raises(SpecError) as refused:
        checked_plans(spec, settings.roots, CATALOGUE, None)
    (problem,) = refused.value.problems
    assert "bad.jsonl, line 2" in problem.message


NAMES = (
    "train.jsonl",
    "train.jsonl.gz",
    "train.csv",
    "train.tsv",
    "train.parquet",
    "train.txt",
    "train.json",
    "train-v2.0.json",
    "WikiQA-train.tsv",
    "codes.csv",
    "codes.json",
)


@examples(max_examples=scaled(60))
@given(
    name=st.sampled_from(NAMES),
    content=st.binary(max_size=300) | st.text(max_size=100).map(str.encode),
    task=st.sampled_from(sorted(TASKS)),
)
def test_any_bytes_give_lines(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes, task: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / name).write_bytes(content)
    found = inspection.mistakes_in(folder, TaskConfig(name=task, path="any"))
    assert all(isinstance(line, str) for line in found)


def with_budget(settings: Settings, micro_tokens: int, words: int = 30, **task: Any) -> None:
    longest = " ".join(["word"] * (words - 1))
    texts = [f"{length} {number}" for number in range(6) for length in ("short", longest)]
    rows = [{"text": text, "label": "ab"[number % 3 == 0]} for number, text in enumerate(texts)]
    (settings.roots("data")[0] / "mine" / "train.jsonl").write_text(json_lines(rows))
    document = {
        "name": "x",
        "task": {"name": "classification", "path": "mine", "max_length": 64, **task},
        "model": {"name": "tiny"},
        "batch": {"micro_tokens": micro_tokens},
    }
    checked_plans(validate(document), settings.roots, CATALOGUE, None)


def test_a_token_budget_below_an_example_is_refused_with_its_fix(settings: Settings) -> None:
    with pytest.raises(SpecError) as refused:
        with_budget(settings, 31)
    (problem,) = refused.value.problems
    assert problem.path == "batch.micro_tokens"
    assert problem.message == (
        "31 is below the longest training example, which has at least 32 tokens; raise it to task.max_length "
        "64, or lower task.max_length"
    )


@pytest.mark.parametrize(
    ("micro_tokens", "words", "task"),
    [
        (32, 30, {}),
        (20, 30, {"max_length": 20}),  # what is longer is cut
        (20, 30, {"train_examples": 4}),  # the longest may not be among these
    ],
)
def test_a_token_budget_that_may_suffice_is_left_to_the_run(
    settings: Settings, micro_tokens: int, words: int, task: dict[str, Any]
) -> None:
    with_budget(settings, micro_tokens, words, **task)


def test_words_without_letters_may_be_no_tokens(settings: Settings) -> None:
    (settings.roots("data")[0] / "mine" / "train.jsonl").write_text(
        json_lines([{"text": "one \u200b \u0301 two", "label": label} for label in "ab"])
    )
    task = TaskConfig(name="classification", path="mine", max_length=64)
    assert inspection.longest_example(settings.roots("data")[0] / "mine", task) == 4
