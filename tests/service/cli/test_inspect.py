"""`stillhouse inspect` on folders of each kind, and on anything."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openpyxl
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
from service.scheduling.run_plan import run_config
from tests.drawing import scaled
from tests.trainers.corpora import write_task
from trainers.reporting import NeverStop, NullSink
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


def test_a_folder_without_parts_suggests_a_file(inspect: Callable[..., Any], tmp_path: Path) -> None:
    write(
        tmp_path / "mine",
        "news.csv",
        lambda rng: f'{rng.randrange(1, 5)},"{sentence(rng)}","{sentence(rng)}"',
    )
    (tmp_path / "mine" / "classes.txt").write_text("World\nSports\nBusiness\nSci/Tech\n")
    spec = inspect("--json")["spec"]
    assert spec["task"]["path"] == "mine/news.csv"
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


# -- Data as published -----------------------------------------------------------------------------


def parts_of(folder: Path, files: Mapping[str, Callable[[random.Random], str]], header: str = "") -> None:
    for name, line in files.items():
        write(folder, name, line)
        if header:
            (folder / name).write_text(f"{header}\n{(folder / name).read_text()}")


def review(rng: random.Random) -> str:
    return f"{sentence(rng)}\t{rng.choice('01')}"


def test_columns_may_differ_between_parts(inspect: Callable[..., Any], tmp_path: Path) -> None:
    for name, header in (("train", "sentence"), ("dev", "content"), ("test", "content")):
        parts_of(tmp_path / "mine", {f"{name}.tsv": review}, f"{header}\tlabel")
    found = inspect("--json")
    assert found["spec"]["task"]["columns"] == {
        "text": {"train": "sentence", "validation": "content", "test": "content"}
    }
    assert [part["usable"] for part in found["parts"].values()] == [60, 60, 60]
    valid(found["spec"], tmp_path)


def test_a_part_with_a_header_and_one_without_are_read_by_position(
    inspect: Callable[..., Any], tmp_path: Path
) -> None:
    parts_of(tmp_path / "mine", {"train.tsv": review}, "sentence\tlabel")
    parts_of(tmp_path / "mine", {"test.tsv": review})
    found = inspect("--json")
    assert found["spec"]["task"]["columns"] == {"text": 0, "label": 1}
    assert [part["usable"] for part in found["parts"].values()] == [60, 60]
    valid(found["spec"], tmp_path)


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("msr-para-train.tsv", "msr-para-val.tsv", "msr-para-test.tsv"),
        ("train.tsv", "msr-para-val.tsv", "test.tsv"),
        ("train.tsv", "dev.tsv", "eval.tsv"),
        ("train.tsv", "eval.tsv", "test.tsv"),
        ("training.tsv", "development.tsv", "testing.tsv"),
        ("eng.train", "eng.testa", "eng.testb"),
    ],
)
def test_usual_names_of_parts_are_known(
    inspect: Callable[..., Any], tmp_path: Path, train: str, validation: str, test: str
) -> None:
    if train == "eng.train":
        words = lambda rng: f"{sentence(rng).replace(' ', ' O{0}')} B-PER{{0}}".format("\n") + "\n"  # noqa: E731
        parts_of(tmp_path / "mine", dict.fromkeys((train, validation, test), words))
    else:
        parts_of(tmp_path / "mine", dict.fromkeys((train, validation, test), review), "text\tlabel")
    (tmp_path / "mine" / "README.md").write_text("About it.\n")
    found = inspect("--json")
    assert {name: part["files"] for name, part in found["parts"].items()} == {
        "train": [train],
        "validation": [validation],
        "test": [test],
    }
    assert found["unused"] == {"README.md": "not a format of data"}
    assert "parts" not in found["spec"]["task"]
    valid(found["spec"], tmp_path)


def test_of_two_files_for_a_part_one_is_chosen_and_the_other_named(
    inspect: Callable[..., Any], tmp_path: Path
) -> None:
    names = ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv", "notes.tsv")
    parts_of(tmp_path / "mine", dict.fromkeys(names, review), "text\tlabel")
    found = inspect("--json")
    assert found["spec"]["task"]["parts"] == {"train": "train.tsv", "validation": "dev_matched.tsv"}
    assert "could be the validation part" in found["unused"]["dev_mismatched.tsv"]
    assert "task.parts" in found["unused"]["notes.tsv"]
    valid(found["spec"], tmp_path)


def test_an_unlabelled_test_part_is_left_out_with_its_reason(
    inspect: Callable[..., Any], tmp_path: Path
) -> None:
    parts_of(tmp_path / "mine", dict.fromkeys(("train.tsv", "dev.tsv"), review), "sentence\tlabel")
    parts_of(
        tmp_path / "mine", {"test.tsv": lambda rng: f"{rng.random()}\t{sentence(rng)}"}, "index\tsentence"
    )
    found = inspect("--json")
    assert found["spec"]["task"]["parts"] == {"train": "train.tsv", "validation": "dev.tsv"}
    assert "no column for label" in found["unused"]["test.tsv"]
    valid(found["spec"], tmp_path)


@pytest.mark.parametrize("mark", ["|", ";", ", "])
def test_labels_between_any_usual_marks_are_several(
    inspect: Callable[..., Any], tmp_path: Path, mark: str
) -> None:
    labels = choice("price", f"price{mark}quality", f"customer service{mark}price", "")
    write(tmp_path / "mine", "train.jsonl", row(text=sentence, label=labels))
    found = inspect("--json")
    assert found["spec"]["task"]["multi_label"] is True
    counts = found["parts"]["train"]["labels"]["label"]
    assert set(counts) == {"price", "quality", "customer service", "(none)"}
    assert found["parts"]["train"]["empty_texts"] == 0
    valid(found["spec"], tmp_path)


def score(rng: random.Random) -> str:
    return rng.choice(["1.000", "2.500", "4.750"])


def test_pairs_are_proposed_where_sentences_recur(inspect: Callable[..., Any], tmp_path: Path) -> None:
    first = [sentence(random.Random(number)) for number in range(20)]
    parts_of(
        tmp_path / "mine",
        {"train.tsv": lambda rng: f"captions\t{score(rng)}\t{rng.choice(first)}\t{sentence(rng)}"},
        "genre\tscore\tsentence1\tsentence2",
    )
    task = inspect("--json")["spec"]["task"]
    assert task["name"] == "regression"
    assert task["columns"] == {"text": "sentence1", "text_pair": "sentence2", "label": "score"}


@pytest.mark.parametrize("labelled", [59, 20])
def test_a_first_row_without_score_is_no_header(
    inspect: Callable[..., Any], tmp_path: Path, labelled: int
) -> None:
    numbers = iter(["", *(["2.5", "4.0"] * 30)[:labelled], *[""] * (59 - labelled)])
    parts_of(
        tmp_path / "mine", {"train.tsv": lambda rng: f"{next(numbers)}\t{sentence(rng)}\t{sentence(rng)}"}
    )
    found = inspect("--json")
    assert found["spec"]["task"]["columns"] == {"text": 1, "text_pair": 2, "label": 0}
    assert (found["spec"]["task"]["name"], found["spec"]["task"]["skip"]) == ("regression", ["unlabelled"])
    assert found["parts"]["train"]["skipped"] == {"unlabelled": 60 - labelled}
    valid(found["spec"], tmp_path)


def test_texts_without_labels_are_read_by_position_too(inspect: Callable[..., Any], tmp_path: Path) -> None:
    parts_of(tmp_path / "mine", {"train.tsv": lambda rng: f"\t{sentence(rng)} and more of it"})
    found = inspect("--json")
    assert found["spec"]["task"]["columns"] == {"text": 1}
    assert found["parts"]["train"]["usable"] == 60
    valid(found["spec"], tmp_path)


def test_broken_rows_are_counted_listed_and_skipped(inspect: Callable[..., Any], tmp_path: Path) -> None:
    parts_of(
        tmp_path / "mine", {"train.csv": lambda rng: f"{sentence(rng)},{rng.choice('ab')}"}, "text,label"
    )
    with (tmp_path / "mine" / "train.csv").open("ab") as stream:
        stream.write(b"three,a,b\ncaf\xe9 is closed,a\nno label here,\n")
    found = inspect("--json")
    assert found["spec"]["task"]["skip"] == ["unlabelled", "malformed"]
    train = found["parts"]["train"]
    assert (train["usable"], train["skipped"]) == (60, {"malformed": 2, "unlabelled": 1})
    assert [line.partition("train.csv, ")[2].partition(":")[0] for line in train["mistakes"]] == [
        "line 62",
        "line 63",
        "line 64, field label",
    ]
    valid(found["spec"], tmp_path)


def test_a_test_part_alone_is_never_trained_on(inspect: Callable[..., Any], tmp_path: Path) -> None:
    parts_of(tmp_path / "mine", dict.fromkeys(("test.tsv", "dev.tsv"), review), "text\tlabel")
    printed = " ".join(inspect(code=1).split())
    assert "no training part, only validation (dev.tsv) and test (test.tsv)" in printed
    assert "task.parts" in printed
    assert inspect("--json", code=1)["spec"] is None


def test_damaged_texts_and_contradictions_are_remarked_with_row_and_fix(
    inspect: Callable[..., Any], tmp_path: Path
) -> None:
    parts_of(tmp_path / "mine", {"train.tsv": review}, "text\tlabel")
    with (tmp_path / "mine" / "train.tsv").open("a", encoding="utf-8") as stream:
        stream.write("It doesnâ€™t leak\t0\nA cafÃ© in town\t1\nthe same tea\t0\nThe same  tea\t1\n")
    remarks = inspect("--json")["parts"]["train"]["remarks"]
    assert any(
        "2 rows look decoded with the wrong" in line and "train.tsv, line 62" in line for line in remarks
    )
    assert any("1 text has two labels" in line and "train.tsv, line 65" in line for line in remarks)
    assert any(line.startswith("train: 2 rows") for line in inspect().splitlines())


def test_a_spec_that_is_not_valid_ends_with_1(
    inspect: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts_of(tmp_path / "mine", {"train.tsv": review}, "text\tlabel")
    parts_of(
        tmp_path / "mine", {"test.tsv": lambda rng: f"{sentence(rng)}\t{rng.choice('012')}"}, "text\tlabel"
    )
    found = inspect("--json", code=1)
    assert found["spec"] is not None
    assert "label '2' is not in the training part" in found["problems"][0]
    assert "fix first:" in inspect(code=1)
    (tmp_path / "mine" / "test.tsv").unlink()
    assert inspect("--json")["problems"] == []
    monkeypatch.setenv("STILLHOUSE_DATA_ROOTS", str(tmp_path / "mine" / "other"))
    (problem,) = inspect("--json", code=1)["problems"]
    assert "outside the allowed folders" in problem


def write_sst(folder: Path) -> None:
    for name, header in (("train", "sentence"), ("dev", "content"), ("test", "content")):
        parts_of(folder, {f"{name}.tsv": review}, f"{header}\tlabel")


def write_paraphrases(folder: Path) -> None:
    line = lambda rng: f"{rng.choice('01')}\t{rng.random()}\t{sentence(rng)}\t{sentence(rng)}"  # noqa: E731
    names = (f"msr-para-{part}.tsv" for part in ("train", "val", "test"))
    parts_of(folder, dict.fromkeys(names, line), "Quality\t#1 ID\t#1 String\t#2 String")


def write_entities(folder: Path) -> None:
    def tagged(rng: random.Random) -> str:
        return "".join(f"{word} NN {rng.choice(['O', 'B-PER'])}\n" for word in sentence(rng).split())

    parts_of(folder, {f"eng.{part}": tagged for part in ("train", "testa", "testb")})


def write_aspects(folder: Path) -> None:
    labels = choice("price", "price|quality", "service|price")
    write(folder, "reviews.jsonl", row(text=sentence, aspects=labels))


def write_scores(folder: Path) -> None:
    line = lambda rng: f"{rng.choice(['', '1.5', '4.0'])}\t{sentence(rng)}\t{sentence(rng)}"  # noqa: E731
    write(folder, "sts-train.csv", line)
    (folder / "sts-train.csv").write_text(f"\tA small dog\tA dog\n{(folder / 'sts-train.csv').read_text()}")


def write_workbook(folder: Path) -> None:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for part in ("train", "test"):
        sheet, rng = book.create_sheet(part), random.Random(part)
        sheet.append(["text", "label"])
        for _ in range(60):
            sheet.append([sentence(rng), rng.choice(["good", "bad"])])
    book.save(folder / "reviews.xlsx")


SHAPES = (write_sst, write_paraphrases, write_entities, write_aspects, write_scores, write_workbook)


def printed_spec(inspect: Callable[..., Any], tmp_path: Path, write_shape: Callable[[Path], None]) -> Path:
    write_shape(tmp_path / "mine")
    spec = tmp_path / "first.yaml"
    spec.write_text(inspect().partition("a spec to start from:\n\n")[2])
    return spec


@pytest.mark.parametrize("write_shape", SHAPES)
def test_a_printed_spec_is_valid_as_it_is(
    write_shape: Callable[[Path], None], inspect: Callable[..., Any], tmp_path: Path
) -> None:
    spec = printed_spec(inspect, tmp_path, write_shape)
    result = CliRunner().invoke(app, ["validate", str(spec)])
    assert result.exit_code == 0, result.output


SHARED = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "unused"),
    [
        ("goemotions", "classification", []),
        ("sick", "classification", ["README.md"]),
        ("wnut17", "token_classification", ["README.md"]),
    ],
)
def test_published_data_are_read_as_they_are(
    name: str, task: str, unused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"no published data at {SHARED / name}")
    monkeypatch.setenv("STILLHOUSE_DATA_ROOTS", str(SHARED))
    result = CliRunner().invoke(app, ["inspect", str(SHARED / name), "--json"])
    found = json.loads(result.output)
    assert (result.exit_code, found["spec"]["task"]["name"]) == (0, task)
    assert list(found["parts"]) == ["train", "validation", "test"]
    assert list(found["unused"]) == unused


@pytest.mark.slow
@pytest.mark.parametrize("write_shape", SHAPES)
def test_a_printed_spec_trains_as_it_is(
    write_shape: Callable[[Path], None], inspect: Callable[..., Any], tmp_path: Path
) -> None:
    from trainers.entrypoint import train  # It imports torch, which the other tests do without.

    spec = read_spec(printed_spec(inspect, tmp_path, write_shape).read_bytes(), CATALOGUE)
    settings = Settings(data_dir=tmp_path / "service", data_roots=str(tmp_path))
    config = run_config(
        spec, experiment_id=1, run_id=1, seed=0, workers=1, settings=settings, catalogue=CATALOGUE
    )
    outcome = train(config, NullSink(), NeverStop())
    assert outcome.step == outcome.total_steps > 0
    assert outcome.summary["test_loss"] > 0
