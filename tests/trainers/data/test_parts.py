"""Which examples are trained on, chosen by and tested on, and what may not be in two parts."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.trainers.corpora import write_squad, write_wikiqa
from trainers.data.sources import open_source, source_identity
from trainers.errors import BadDataError
from trainers.models.origin import Preset
from trainers.tasks import base

ROWS = [(f"text {i} is {'fine' if i % 3 else 'dull'}", int(bool(i % 3))) for i in range(60)]
SHARED = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture
def prepared(configure, tmp_path):
    """Prepare the dataset in `prepared.folder`; the lines of its log are in `prepared.lines`."""
    folder = tmp_path / "data" / "set"
    folder.mkdir(parents=True)
    lines: list[str] = []

    def prepare(name: str = "imdb", path: str = "set", root: Path = tmp_path / "data", **task):
        config = configure(
            task={"name": name, "path": path, "max_length": 32, "test": "auto", **task},
            workspace__data_roots=(str(root),),
            workspace__cache=str(tmp_path / "cache"),
        )
        lines.clear()
        return base.build(name).prepare(config, Preset("tiny"), lines.append)

    prepare.folder, prepare.lines = folder, lines
    return prepare


def write_rows(file: Path, rows) -> None:
    text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    file.write_text(text, encoding="utf-8")


def examples_of(tokens) -> list[tuple[int, ...]]:
    """Each example as its tokens."""
    return [
        tuple(tokens.tokens[begin:end].tolist())
        for begin, end in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
    ]


def names_in(data) -> list[str]:
    return json.loads(data.test_units.read_text())


def test_data_with_train_and_test_holds_validation_out_of_train_with_its_share_of_labels(prepared):
    write_rows(prepared.folder / "train.jsonl", ROWS)
    write_rows(prepared.folder / "test.jsonl", [("another text", 0), ("one more", 1)])
    data = prepared()
    assert (len(data.train), len(data.validation), len(data.test)) == (54, 6, 2)
    assert data.validation.labels.tolist().count(0) == 2
    assert data.test.labels.tolist() == [0, 1]
    assert not {*examples_of(data.train)} & {*examples_of(data.validation)}


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "folders"])
def test_every_layout_has_the_same_parts(prepared, form):
    for part, rows in (("train", ROWS), ("test", [("another text", 0), ("one more", 1)])):
        if form == "jsonl":
            write_rows(prepared.folder / f"{part}.jsonl", rows)
        elif form == "csv":
            lines = "".join(f"{text},{label}\n" for text, label in rows)
            (prepared.folder / f"{part}.csv").write_text("text,label\n" + lines)
        elif form == "parquet":
            table = pyarrow.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})
            parquet.write_table(table, prepared.folder / f"{part}.parquet")
        else:
            for i, (text, label) in enumerate(rows):
                file = prepared.folder / part / ("neg", "pos")[label] / f"{i}.txt"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    data = prepared()
    assert (len(data.train), len(data.validation), len(data.test)) == (54, 6, 2)


def test_a_validation_part_alone_is_halved_the_same_way_in_any_order_and_with_any_seed(prepared):
    write_rows(prepared.folder / "train.jsonl", [("a text", 0), ("and a fine one", 1)])
    write_rows(prepared.folder / "dev.jsonl", ROWS)
    first = prepared()
    assert (len(first.train), len(first.validation), len(first.test)) == (2, 30, 30)
    assert first.test.labels.tolist().count(0) == 10
    write_rows(prepared.folder / "dev.jsonl", random.Random(1).sample(ROWS, len(ROWS)))
    second = prepared(split_seed=3)
    assert {*names_in(first)} == {*names_in(second)}
    assert {*examples_of(first.test)} == {*examples_of(second.test)}


def test_skipped_rows_are_counted_and_listed(prepared):
    write_rows(prepared.folder / "train.jsonl", [*ROWS, ("no label", None), ("blank", " ")])
    with (prepared.folder / "train.jsonl").open("a") as stream:
        stream.write("no JSON\n")
    with pytest.raises(
        BadDataError, match=r"line 61, field label: missing .*, or set task.skip: .unlabelled"
    ):
        prepared("classification")
    with pytest.raises(BadDataError, match=r"line 63: not a JSON object .*, or set task.skip: .malformed"):
        prepared("classification", skip=["unlabelled"])
    data = prepared("classification", skip=["unlabelled", "malformed"])
    assert len(data.train) + len(data.validation) + len(data.test) == 60
    counts, *skipped = [line for line in prepared.lines if "skipped" in line]
    assert counts == "train: rows skipped (task.skip): 2 unlabelled and 1 malformed"
    assert [re.search(r"line \d+", line)[0] for line in skipped] == ["line 61", "line 62", "line 63"]
    assert data.identity["skip"] == "malformed, unlabelled"


def test_a_part_of_which_nothing_is_left_is_refused(prepared):
    write_rows(prepared.folder / "train.jsonl", [(text, None) for text, _ in ROWS])
    with pytest.raises(BadDataError, match=r"no row of the train part is left by task\.skip; .*line 1"):
        prepared("classification", skip=["unlabelled"])


def test_labels_that_look_like_several_are_remarked(prepared):
    write_rows(
        prepared.folder / "train.jsonl",
        [(text, ("price", "quality", "price|quality")[number % 3]) for number, (text, _) in enumerate(ROWS)],
    )
    remark = "train: 'price|quality' is one class; if it is several labels, set task.multi_label: true"
    prepared("classification")
    assert remark in prepared.lines
    data = prepared("classification", multi_label=True)
    assert (remark in prepared.lines, data.head.classes) == (False, ("price", "quality"))


def test_plain_texts_skip_broken_rows(prepared):
    rows = [(f"line {i} of some words {i * 7 % 13}", 0) for i in range(400)]
    write_rows(prepared.folder / "train.jsonl", rows)
    with (prepared.folder / "train.jsonl").open("ab") as stream:
        stream.write(b'{"text": "caf\xe9"}\n')
    prepared("mlm", max_length=8, skip=["malformed"])
    assert "train: rows skipped (task.skip): 1 malformed" in prepared.lines


@pytest.mark.parametrize("tested", [True, False])
def test_a_class_in_the_first_row_of_each_part_alone_is_a_header(prepared, tested):
    # Its name is too long for `positions skip a header`.
    for part in ("train", "test")[: 1 + tested]:
        lines = [f"{'label of the text ' * 2}\tthe text", *(f"{label}\t{text}" for text, label in ROWS)]
        (prepared.folder / f"{part}.tsv").write_text("\n".join(lines))
    with pytest.raises(BadDataError, match=r"occurs once in each part, in its first row, as a header does"):
        prepared("classification", columns={"label": 0, "text": 1}, overlap="allow")


def test_one_file_gives_all_three_parts_and_the_test_part_is_fixed(prepared):
    write_rows(prepared.folder / "train.jsonl", ROWS)
    data = prepared()
    assert (len(data.train), len(data.validation), len(data.test)) == (48, 6, 6)
    assert names_in(prepared(split_seed=5)) == names_in(data)


def test_without_a_test_part_its_file_validates_and_nothing_is_dropped(prepared):
    write_rows(prepared.folder / "train.jsonl", ROWS)
    write_rows(prepared.folder / "test.jsonl", ROWS[:4])
    data = prepared(test="none")
    assert (len(data.train), len(data.validation), data.test, data.test_scoring) == (60, 4, None, None)


def test_squad_is_divided_by_article_whatever_the_order(prepared):
    write_squad(prepared.folder, train=6, dev=8, seed=0)
    first = prepared("squad_v2")
    file = prepared.folder / "dev-v2.0.json"
    tree = json.loads(file.read_text())
    tree["data"].reverse()
    file.write_text(json.dumps(tree))
    second = prepared("squad_v2")
    assert (first.scoring.units, first.test_scoring.units) == (12, 12)
    assert {*names_in(first)} == {*names_in(second)}
    by_article = {name.rpartition("-")[0] for name in names_in(first)}
    assert len(by_article) == 4  # of each article, all three questions


def test_wikiqa_halves_questions_with_their_share_of_answers(prepared):
    write_wikiqa(prepared.folder, train=12, dev=24, seed=0)
    data = prepared("wikiqa")
    assert len({*data.test.columns["question"].tolist()}) == 12
    assert abs(data.scoring.units - data.test_scoring.units) <= 1
    assert len(names_in(data)) == 12


def test_tariff_trains_on_every_code_that_it_tests(prepared):
    rows = [{"text": f"good {i} of {i % 4}", "code": f"0{i % 4 + 1}01.10"} for i in range(80)]
    (prepared.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepared("tariff")
    assert {*data.test.labels.tolist()} == {0, 1, 2, 3}
    assert (len(data.test), len(data.validation)) == (8, 7)


def test_mlm_parts_share_no_text(prepared):
    lines = [f"line {i} of some words {i * 7 % 13}" for i in range(400)]
    (prepared.folder / "train.txt").write_text("\n".join(lines + lines[:50]))
    data = prepared("mlm", max_length=8)
    sizes = [len(part) for part in (data.train, data.validation, data.test)]
    assert sizes[0] > sizes[1] > 1 and sizes[2] > 1
    assert data.test_scoring.units == len(data.test) == len(names_in(data))


def test_mlm_drops_texts_of_the_test_file_from_training(prepared):
    lines = [f"line {i} of some words" for i in range(40)]
    (prepared.folder / "train.txt").write_text("\n".join(lines))
    (prepared.folder / "valid.txt").write_text("another line\n")
    (prepared.folder / "test.txt").write_text("LINE 3 of  some words\n")
    prepared("mlm", max_length=8)
    assert "train: 1 texts dropped because they are also in a later part (task.overlap)" in prepared.lines
    with pytest.raises(BadDataError, match=r"the same text is in the train and the test part: 'line 3 of"):
        prepared("mlm", max_length=8, overlap="error")


def test_an_example_in_two_parts_is_dropped_from_the_training_part(prepared):
    write_rows(prepared.folder / "train.jsonl", ROWS)
    write_rows(prepared.folder / "dev.jsonl", [("my own", 0), (ROWS[1][0].upper(), 1)])
    write_rows(prepared.folder / "test.jsonl", [("  " + ROWS[2][0], 1), ("my  OWN", 0)])
    data = prepared()
    assert (len(data.train), len(data.validation), len(data.test)) == (58, 1, 2)
    assert (
        "train: 2 of 60 examples dropped because they are also in the validation or test part (task.overlap)"
        in prepared.lines
    )
    assert len(prepared(overlap="allow").train) == 60
    with pytest.raises(
        BadDataError,
        match=r"dev\.jsonl, line 1: the same example is in the validation and the test part \(1 ",
    ):
        prepared(overlap="error")


def test_a_pair_is_the_same_only_with_both_its_texts(prepared):
    for part, rows in (
        ("train", [("q", "a", 1), ("q", "b", 0), ("r", "a", 1)]),
        ("dev", [("s", "a", 1), ("s", "c", 0)]),
        ("test", [("q", "a", 1), ("t", "b", 0)]),
    ):
        lines = "".join("\t".join(map(str, row)) + "\n" for row in rows)
        (prepared.folder / f"WikiQA-{part}.txt").write_text(lines)
    assert len(prepared("wikiqa").train) == 2


def test_an_empty_test_part_is_one_line(prepared):
    write_rows(prepared.folder / "train.jsonl", ROWS)
    (prepared.folder / "test.csv").write_text("text,label\n")
    with pytest.raises(
        BadDataError, match=r"the test part has no rows; add rows, remove the file, or set task"
    ):
        prepared()


def test_a_test_part_of_other_labels_is_one_line(prepared):
    write_rows(prepared.folder / "train.jsonl", ROWS)
    write_rows(prepared.folder / "test.jsonl", [("new", 4)])
    with pytest.raises(
        BadDataError, match=r"test\.jsonl, line 1, field label: unknown label 4; use one of neg,"
    ):
        prepared()


def test_a_test_part_without_one_code_of_the_training_part_is_one_line(prepared):
    rows = {"train": [("a", "0101"), ("b", "0202")], "dev": [("c", "0101")], "test": [("d", "0303")]}
    for part, goods in rows.items():
        lines = "".join(f"{text},{code}\n" for text, code in goods)
        (prepared.folder / f"{part}.csv").write_text("text,code\n" + lines)
    with pytest.raises(BadDataError, match=r"test: no code of 1 examples is in the training part"):
        prepared("tariff", level=4)


def test_the_rule_of_the_split_is_part_of_the_data_s_identity(prepared, configure, tmp_path):
    write_rows(prepared.folder / "train.jsonl", ROWS)
    rules = set()
    for test in ("auto", "none"):
        config = configure(
            task={"name": "imdb", "path": "set", "test": test},
            workspace__data_roots=(str(tmp_path / "data"),),
            workspace__cache=str(tmp_path / "cache"),
        )
        source = open_source(config.task, config.workspace)
        rule = source_identity(source, config.task)["test.rule"]
        assert prepared(test=test).identity["test.rule"] == rule
        rules.add(rule)
    assert len(rules) == 2


@pytest.mark.skipif(not SHARED.exists(), reason=f"needs the published data in {SHARED}")
def test_the_dev_part_of_squad_halves_by_title(prepared):
    tree = json.loads((SHARED / "squad_v2" / "dev-v2.0.json").read_text())
    folder = prepared.folder
    (folder / "dev-v2.0.json").write_text(json.dumps(tree))
    write_squad(folder.parent / "small", train=6, dev=2, seed=0)
    (folder.parent / "small" / "train-v2.0.json").rename(folder / "train-v2.0.json")
    data = prepared("squad_v2", max_length=256)
    titles = {q["id"]: a["title"] for a in tree["data"] for p in a["paragraphs"] for q in p["qas"]}
    tested = {titles[name] for name in names_in(data)}
    assert data.scoring.units + data.test_scoring.units == 11_873
    assert data.test_scoring.units == sum(title in tested for title in titles.values()) == 6_187
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
    documented = page.split("17 test (6,187 questions")[1].split("- **Sizes**")[0]
    assert tested == set(re.findall(r"`([^`]+)`", documented))


def test_training_on_all_adds_the_validation_part_and_keeps_the_test_part(prepared):
    write_rows(prepared.folder / "train.jsonl", ROWS)
    write_rows(prepared.folder / "test.jsonl", [("another text", 0), ("one more", 1)])
    apart, together = prepared(), prepared(train_on="all")
    both = [*examples_of(apart.train), *examples_of(apart.validation)]
    assert sorted(examples_of(together.train)) == sorted(both)
    assert names_in(together) == names_in(apart)
    assert (apart.identity["train_on"], together.identity["train_on"]) == ("train", "all")
