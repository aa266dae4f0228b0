"""Datasets on disk and on the hub: every layout, every named failure."""

from __future__ import annotations

import csv
import errno
import gzip
import itertools
import json
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import datasets
import openpyxl
import pyarrow
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from tests.trainers.corpora import write_task
from trainers.config import TaskConfig, Workspace
from trainers.data.sources import open_source, source_identity
from trainers.entrypoint import train
from trainers.errors import BadDataError, BadSpecError
from trainers.reporting import NeverStop, NullSink
from trainers.tasks import TASKS

ROWS = [("A fine cup.", "pos"), ("A dull\u0085cup.", "neg")]


@pytest.fixture
def open_at(tmp_path):
    root = tmp_path / "data"
    root.mkdir()

    def opened(
        path: str | None = "set",
        task: str = "imdb",
        test: str = "auto",
        columns: dict | None = None,
        parts: dict | None = None,
        **workspace,
    ):
        return open_source(
            TaskConfig(name=task, path=path, test=test, columns=columns or {}, parts=parts or {}),
            Workspace(
                checkpoints="unused", cache=str(tmp_path / "cache"), data_roots=(str(root),), **workspace
            ),
        )

    opened.folder = root / "set"
    return opened


@pytest.fixture
def forbid(monkeypatch):
    """Make a file or folder unreadable, for root too."""

    def forbidden(path: Path):
        for name in ("open", "iterdir"):
            allowed = getattr(Path, name)

            def refused(self, *args, allowed=allowed, **options):
                if self == path:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
                return allowed(self, *args, **options)

            monkeypatch.setattr(Path, name, refused)

    return forbidden


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def json_lines(rows) -> str:
    return "".join(
        json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n" for text, label in rows
    )


def rows_of(source, part="train"):
    return [(row.text("text"), row.label("label")) for row in source.rows(part)]


def test_json_lines_split_on_newline_only(open_at):
    write(open_at.folder / "train.jsonl", json_lines(ROWS))
    assert rows_of(open_at()) == ROWS


def test_each_part_is_what_its_file_says(open_at):
    for part, rows in (("train", ROWS), ("dev", ROWS[:1]), ("test", ROWS[1:])):
        write(open_at.folder / f"{part}.jsonl", json_lines(rows))
    source = open_at()
    assert list(source.parts) == ["train", "validation", "test"]
    assert rows_of(source, "validation") + rows_of(source, "test") == ROWS


@pytest.mark.parametrize("parts", [("dev", "test"), ("test",)], ids="+".join)
def test_without_a_test_part_the_first_of_dev_and_test_validates(open_at, parts):
    write(open_at.folder / "train.jsonl", json_lines(ROWS))
    for part in parts:
        write(open_at.folder / f"{part}.jsonl", json_lines(ROWS[:1] if part == parts[0] else ROWS[1:]))
    source = open_at(test="none")
    assert list(source.parts) == ["train", "validation"]
    assert rows_of(source, "validation") == ROWS[:1]


def test_single_file(open_at):
    write(open_at.folder.with_suffix(".jsonl"), json_lines(ROWS))
    source = open_at("set.jsonl")
    assert (list(source.parts), rows_of(source)) == (["train"], ROWS)


def test_csv_with_quoted_lines_and_columns_in_any_order(open_at):
    file = open_at.folder / "train.csv"
    file.parent.mkdir()
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerows([("label", "id", "text"), ("1", "x", 'Two\nlines, "quoted"'), ("0", "y", "Plain")])
    assert rows_of(open_at()) == [('Two\nlines, "quoted"', "1"), ("Plain", "0")]


def test_parquet(open_at):
    file = open_at.folder / "train.parquet"
    file.parent.mkdir()
    columns = {"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}
    parquet.write_table(pyarrow.table(columns), file)
    assert rows_of(open_at()) == ROWS


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("text", pyarrow.array([b"caf\xe9", b"x"]).view(pyarrow.binary()).cast(pyarrow.binary())),
        ("bought_at", pyarrow.array([2**62, 0], pyarrow.timestamp("us"))),
    ],
)
def test_parquet_cells_that_cannot_be_read_name_their_field(open_at, name, cells):
    if name == "text":  # bytes that are said to be a text
        cells = pyarrow.StringArray.from_buffers(2, *cells.buffers()[1:])
    file = open_at.folder / "train.parquet"
    file.parent.mkdir()
    columns = {"text": ["a", "b"], "label": ["pos", "neg"], name: cells}
    parquet.write_table(pyarrow.table(columns), file)
    with pytest.raises(BadDataError, match=rf"train\.parquet, field {name}: cannot be read"):
        rows_of(open_at())


def test_damaged_parquet_is_said(open_at):
    write(open_at.folder / "train.parquet", "PAR1 but no table")
    with pytest.raises(BadDataError, match=r"train\.parquet: not a Parquet file"):
        rows_of(open_at())


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.jsonl", BOM + json_lines(ROWS[:1]).encode()),
        ("train.jsonl.gz", gzip.compress(BOM + json_lines(ROWS[:1]).encode())),
        ("train.csv", BOM + b"text,label\nA fine cup.,pos\n"),
        ("train.tsv", BOM + b"text\tlabel\nA fine cup.\tpos\n"),
    ],
    ids=["jsonl", "jsonl.gz", "csv", "tsv"],
)
def test_a_byte_order_mark_is_no_text(open_at, name, content):
    write(open_at.folder / name, content)
    assert rows_of(open_at()) == ROWS[:1]


def test_a_byte_order_mark_of_a_corpus_file_is_no_text(open_at):
    write(open_at.folder / "train" / "pos" / "1.txt", BOM + b"A fine cup.")
    write(open_at.folder / "train" / "neg" / "1.txt", "Bad.")
    assert rows_of(open_at()) == [("Bad.", "neg"), ROWS[0]]


def test_a_long_text_is_a_field_of_csv(open_at):
    text = "word " * 40_000
    write(open_at.folder / "train.csv", f"text,label\n{text},1\n")
    assert rows_of(open_at()) == [(text, "1")]


TABLE = {"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}


def write_sheets(path: Path, **sheets: int) -> None:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, count in sheets.items():
        sheet = book.create_sheet(name)
        for row in [("text", "label"), *ROWS][:count]:
            sheet.append(row)
    book.save(path)


def write_database(path: Path, *tables: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        for table in tables:
            quoted = table.replace('"', '""')
            database.execute(f'CREATE TABLE "{quoted}" (text TEXT, label TEXT)')
            database.executemany(f'INSERT INTO "{quoted}" VALUES (?, ?)', ROWS)
        database.commit()


def write_saved(path: Path, *splits: str) -> None:
    each = {split: datasets.Dataset.from_dict(TABLE) for split in splits}
    (datasets.DatasetDict(each) if splits[1:] else each[splits[0]]).save_to_disk(path)


def write_arrow(path: Path, form) -> None:
    table = pyarrow.table(TABLE)
    with pyarrow.OSFile(str(path), "wb") as stream, form(stream, table.schema) as writer:
        writer.write_table(table)


def test_arrow_as_stream_and_as_file(open_at):
    open_at.folder.mkdir()
    write_arrow(open_at.folder / "train.arrow", pyarrow.ipc.new_stream)
    write_arrow(open_at.folder / "test.feather", pyarrow.ipc.new_file)
    assert rows_of(open_at()) == rows_of(open_at(), "test") == ROWS


@pytest.mark.parametrize(
    ("name", "prepare"),
    [
        ("set.xlsx", lambda path: write_sheets(path, Tabelle1=3, Tabelle2=0)),
        ("set.sqlite", lambda path: write_database(path, "reviews")),
        ("set", lambda path: write_saved(path, "train")),
    ],
)
def test_one_table_of_a_workbook_or_database_is_the_training_part(open_at, name, prepare):
    prepare(open_at.folder.parent / name)
    source = open_at(name)
    assert (list(source.parts), rows_of(source)) == (["train"], ROWS)


@pytest.mark.parametrize(
    ("name", "prepare"),
    [
        ("set.xlsx", lambda path: write_sheets(path, train=3, dev=3, notes=3)),
        ("set.db", lambda path: write_database(path, "train", "dev", "notes")),
        ("set", lambda path: write_saved(path, "train", "validation")),
    ],
)
def test_tables_are_parts_by_their_names(open_at, name, prepare):
    prepare(open_at.folder.parent / name)
    source = open_at(name)
    assert list(source.parts) == ["train", "validation"]
    assert rows_of(source, "validation") == ROWS


def test_tables_are_chosen_by_the_spec(open_at):
    path = open_at.folder.parent / "set.sqlite"
    write_database(path, "old", 'the "new"')
    with pytest.raises(BadDataError, match=r"has nothing called train \(found: old, .*; set task\.parts"):
        open_at("set.sqlite")
    assert rows_of(open_at("set.sqlite", parts={"train": 'the "new"'})) == ROWS
    with pytest.raises(BadDataError, match=r"has no 'older', which task\.parts names \(found: old, "):
        open_at("set.sqlite", parts={"train": "older"})


def test_a_sheet_among_other_parts_may_have_no_header(open_at):
    open_at.folder.mkdir()
    book = openpyxl.Workbook()
    for row in ROWS * 3:
        book.active.append(row)
    book.save(open_at.folder / "train.xlsx")
    source = open_at(columns={"text": 0, "label": 1})
    assert rows_of(source) == ROWS * 3
    assert next(source.rows("train")).where.endswith("train.xlsx, sheet Sheet, row 1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("set.xlsx", "not an Excel workbook"),
        ("set.sqlite", "not a SQLite database"),
        ("set.arrow", "not an Arrow file"),
        ("set/state.json", "set: not a saved dataset"),
    ],
)
def test_damaged_files_of_each_kind_are_named(open_at, name, message):
    write(open_at.folder.parent / name, "{}" if name.endswith("json") else "no such file at all " * 100)
    with pytest.raises(BadDataError, match=message):
        rows_of(open_at(name.removesuffix("/state.json")))


def test_a_saved_dataset_names_no_file_of_another_folder(open_at):
    write_saved(open_at.folder, "train")
    state = open_at.folder / "state.json"
    state.write_text(state.read_text().replace('"data-', '"../data-'))
    with pytest.raises(BadDataError, match="names a file of another folder"):
        open_at()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "text;label\nfine, and hot;1\n"),
        ("train.csv", "text\tlabel\nfine, and hot\t1\n"),
        ("train.CSV", 'text,label\n"fine, and hot",1\n'),
    ],
)
def test_the_mark_between_columns_is_that_of_the_first_line(open_at, name, content):
    write(open_at.folder / name, content)
    assert rows_of(open_at()) == [("fine, and hot", "1")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "text,label\nfine,1\n".encode("utf-16"),
            r"line 1: UTF-16, not UTF-8; .*iconv -f UTF-16",
        ),
        ("text,label\nfine,1\n".encode("utf-16-le"), r"train\.csv, line 1: UTF-16"),
        (b"text,label\rfine,1\r", r"train\.csv, line 1: lines end in a carriage return alone; .* tr "),
    ],
)
def test_unusual_text_names_its_conversion(open_at, content, message):
    write(open_at.folder / "train.csv", content)
    with pytest.raises(BadDataError, match=message):
        rows_of(open_at())


LABELLED = "fine cup\tpos\ndull cup\tneg\n" * 4


@pytest.mark.parametrize("header", ["", "sentence\tlabel\n", "\tlabel\n", "id\tname of it\n"])
def test_positions_skip_a_header(open_at, header):
    write(open_at.folder / "train.tsv", header + LABELLED)
    rows = rows_of(open_at(columns={"text": 0, "label": 1}))
    assert rows == [("fine cup", "pos"), ("dull cup", "neg")] * 4


def test_columns_by_part(open_at):
    for part, name in (("train", "sentence"), ("dev", "content"), ("test", "text")):
        write(open_at.folder / f"{part}.tsv", f"{name}\tlabel\n{LABELLED}")
    source = open_at(columns={"text": {"train": "sentence", "validation": "content"}})
    assert rows_of(source) == rows_of(source, "validation") == rows_of(source, "test")


def test_parts_are_files_patterns_and_folders(open_at):
    for name in ("one.jsonl", "two-a.jsonl", "two-b.jsonl", "three/x.jsonl", "three/y.jsonl", "train.jsonl"):
        write(open_at.folder / name, json_lines(ROWS))
    parts = {"train": "two-*.jsonl", "validation": "one.jsonl", "test": "three"}
    source = open_at(parts=parts)
    assert {part: files.files for part, files in source.parts.items()} == {
        "train": 2,
        "validation": 1,
        "test": 2,
    }
    assert rows_of(source) == rows_of(source, "test") == ROWS * 2
    assert source_identity(source, TaskConfig(name="imdb", parts=parts))["parts"] == json.dumps(
        parts, sort_keys=True
    )
    with pytest.raises(BadDataError, match=r"no file four\.jsonl, which task\.parts names"):
        open_at(parts={"train": "four.jsonl"})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"test": "a.tsv"}, "parts names no file for train"),
        ({"train": "../a.tsv"}, r"parts\.train '\.\./a\.tsv' leads out of task\.path"),
        ({"train": "/etc/passwd"}, "leads out"),
        ({"training": "a.tsv"}, "parts"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts, message):
    with pytest.raises(ValidationError, match=message):
        TaskConfig(name="imdb", path="set", parts=parts)


def test_only_files_of_the_same_format_are_parts_by_resemblance(open_at):
    write(open_at.folder / "train.jsonl", json_lines(ROWS))
    write(open_at.folder / "my-val.jsonl", json_lines(ROWS))
    write(open_at.folder / "test_results.csv", "a,b\n1,2\n")
    assert list(open_at().parts) == ["train", "validation"]


def test_a_test_part_alone_is_refused(open_at):
    write(open_at.folder / "test.jsonl", json_lines(ROWS))
    with pytest.raises(BadDataError, match=r"no training part, only test \(test\.jsonl\)"):
        open_at()


def test_tab_separated_quotes_have_no_meaning(open_at):
    write(open_at.folder / "train.tsv", 'text\tlabel\nSaid "yes\t1\n')
    assert rows_of(open_at()) == [('Said "yes', "1")]


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"),
        ("train-1-of-2.jsonl.gz", "train-2-of-2.jsonl"),
        ("train-9.jsonl.gz", "train-10.jsonl.gz"),
        ("train-00000-of-00002-a09b74b3.parquet", "train-00001-of-00002-0f3e.parquet"),
        ("train/a.jsonl", "train/b.jsonl.gz"),
        ("my_train_0.csv", "my_train_1.csv"),
    ],
    ids=lambda names: names[0],
)
def test_shards_are_one_part(open_at, names):
    for name, row in zip(names, ROWS, strict=True):
        file = open_at.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("parquet"):
            parquet.write_table(pyarrow.table({"text": [row[0]], "label": [row[1]]}), file)
            continue
        content = json_lines([row]) if "jsonl" in name else f"text,label\n{','.join(row)}\n"
        write(file, gzip.compress(content.encode()) if name.endswith("gz") else content)
    write(open_at.folder / "train" / "_SUCCESS" if "/" in names[0] else open_at.folder / "notes.md", "x")
    write(open_at.folder / "test-00000-of-00001.jsonl", json_lines(ROWS[:1]))
    source = open_at(task="classification")
    assert rows_of(source) == ROWS
    assert (source.parts["train"].files, source.parts["test"].files) == (2, 1)
    with (open_at.folder / names[1]).open("ab") as stream:
        stream.write(b"\n")
    assert open_at(task="classification").parts["train"] != source.parts["train"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"),
            r"2 shards .* number 1 is missing; copy",
        ),
        (
            ("train-00000-of-00001.jsonl", "train-00001-of-00002.jsonl"),
            r"2 shards .* is one of 2; copy all shards",
        ),
        (("train-0.jsonl", "train-00.jsonl.gz"), r"train-0.jsonl and train-00.jsonl.gz are both shard 00?"),
        (("train-0.jsonl", "train-1.csv"), r"train-0.jsonl and train-1.csv could both be of the train part"),
        (("train/0.jsonl", "train/1.csv"), r"train: 0.jsonl and 1.csv could both be of the train part"),
        (
            ("wnut16train.csv", "wnut17train.csv"),
            r"wnut16train.csv and wnut17train.csv could both be the train",
        ),
    ],
)
def test_shards_that_are_no_whole_are_refused(open_at, names, message):
    for name in names:
        write(open_at.folder / name, b"" if name.endswith("gz") else json_lines(ROWS))
    with pytest.raises(BadDataError, match=message):
        open_at(task="classification")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_reads_shards(open_at, task):
    write_task(open_at.folder.parent / "whole", task)
    rows = [dict(row.fields) for row in open_at("whole", task=task).rows("train")]
    for number in range(2):
        lines = "".join(json.dumps(row) + "\n" for row in rows[number::2])
        write(open_at.folder / f"train-{number:05d}-of-00002.jsonl.gz", gzip.compress(lines.encode()))
    found = [dict(row.fields) for row in open_at(task=task).rows("train")]
    assert found == [*rows[::2], *rows[1::2]]


@pytest.mark.parametrize(("task", "name"), [("squad_v2", "train-v2.0.json"), ("tariff", "codes.csv")])
def test_official_files_may_be_compressed(open_at, task, name):
    if task == "squad_v2":
        write_task(open_at.folder, task)
    else:
        write(open_at.folder / name, "HTS Number,Indent,Description\n0101.21,0,Horses\n")
    before = [dict(row.fields) for row in open_at(task=task).rows("train")]
    content = (open_at.folder / name).read_bytes()
    (open_at.folder / name).unlink()
    write(open_at.folder / f"{name}.gz", gzip.compress(content))
    assert [dict(row.fields) for row in open_at(task=task).rows("train")] == before


def test_a_damaged_official_file_is_named(open_at):
    write(open_at.folder / "train-v2.0.json.gz", gzip.compress(b'{"data": []}')[:-9])
    with pytest.raises(BadDataError, match=r"train-v2\.0\.json\.gz: the gzip file is damaged"):
        list(open_at(task="squad_v2").rows("train"))


def test_corpus_layout(open_at):
    for part in ("train", "test"):
        write(open_at.folder / part / "pos" / "0_9.txt", "Good.")
        write(open_at.folder / part / "neg" / "0_2.txt", "Bad.")
    source = open_at()
    assert rows_of(source) == rows_of(source, "test") == [("Bad.", "neg"), ("Good.", "pos")]


@pytest.mark.parametrize("other", ["", "negative/0_2.txt", "neg/0_2.html"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_corpus_without_texts_of_a_class_is_refused(open_at, part, other):
    for name in ("train/pos", "train/neg", "test/pos", "test/neg"):
        if name != f"{part}/neg":
            write(open_at.folder / name / "0_9.txt", "A cup.")
    if other:
        write(open_at.folder / part / other, "Bad.")
    with pytest.raises(BadDataError, match=rf"{part}/neg: no texts; both pos"):
        open_at()


def test_corpus_with_an_unreadable_class_is_refused(open_at, forbid):
    for name in ("train/pos", "train/neg"):
        write(open_at.folder / name / "0_9.txt", "A cup.")
    forbid(open_at.folder / "train" / "neg")
    with pytest.raises(BadDataError, match=r"train/neg: cannot be read \(Permission denied\)"):
        open_at()


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("imdb", "set/train.jsonl"),
        ("squad_v2", "set/train.json"),
        ("wikiqa", "set/WikiQA-train.txt"),
        ("tariff", "set/codes.csv"),
        ("tariff", "set/codes.json"),
        ("mlm", "set/train.txt"),
        ("tariff", "set"),
        ("imdb", "set"),
    ],
)
def test_unreadable_files_are_named(open_at, forbid, task, name):
    file = open_at.folder / ("notes.md" if name == "set" else name.removeprefix("set/"))
    write(file, "text")
    forbid(open_at.folder.parent / name)
    with pytest.raises(BadDataError, match=rf"{name}: cannot be read \(Permission denied\)"):
        open_at(task=task)


def test_a_pipe_among_the_texts_of_a_corpus_is_refused(open_at):
    for part, label in itertools.product(("train", "test"), ("pos", "neg")):
        write(open_at.folder / part / label / "0_9.txt", "A fine cup.")
    pipe = open_at.folder / "train" / "neg" / "1_2.txt"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.open("wb").close())  # So that no reader waits for ever.
    writer.start()
    with pytest.raises(BadDataError, match=r"neg/1_2\.txt: not a file but a folder, device or pipe"):
        open_at()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer.join()
    os.close(reader)


def test_corpus_layout_below_its_archive_folder(open_at):
    write(open_at.folder / "aclImdb" / "train" / "pos" / "1_8.txt", "Good.")
    write(open_at.folder / "aclImdb" / "train" / "neg" / "1_1.txt", "Bad.")
    assert len(rows_of(open_at())) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x", "label": }', r"train\.jsonl, line 2: not a JSON object"),
        ("[1, 2]", r"train\.jsonl, line 2: a JSON list, not an object"),
        ("[" * 100_000, r"train\.jsonl, line 2: not a JSON object"),
        ('{"label": 1}', r"train\.jsonl, line 2, field text: missing"),
        ('{"text": "x"}', r"train\.jsonl, line 2, field label: missing"),
        ('{"text": 7, "label": 1}', r"train\.jsonl, line 2, field text: a int, not a string"),
        ('{"text": "  ", "label": 1}', r"train\.jsonl, line 2, field text: empty"),
        (
            '{"text": "\\ud800", "label": 1}',
            r"train\.jsonl, line 2, field text: contains half of a surrogate",
        ),
        ('{"text": "x", "label": [1]}', r"train\.jsonl, line 2, field label: \[1\] is neither"),
    ],
)
def test_malformed_json_row_names_file_line_and_field(open_at, line, message):
    write(open_at.folder / "train.jsonl", json_lines(ROWS[:1]) + line + "\n")
    with pytest.raises(BadDataError, match=message):
        rows_of(open_at())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,score\na,1\n", r"train\.csv, line 2, field label: missing \(found: text, score\)"),
        ("text,label\na\n", r"train\.csv, line 2: 1 fields, but the header has 2"),
        ('text,label\nfine,1\n"never closed,1\n', r"train\.csv, line \d: not a row"),
        ("text,label\n,1\n", r"train\.csv, line 2, field text: empty"),
    ],
)
def test_malformed_csv_names_file_line_and_field(open_at, content, message):
    write(open_at.folder / "train.csv", content)
    with pytest.raises(BadDataError, match=message):
        rows_of(open_at())


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train/neg/0_1.txt"])
def test_bad_utf8_names_file_and_line(open_at, name):
    good = b"text,label\n" if name.endswith("csv") else b'{"text": "a", "label": 1}\n'
    write(open_at.folder / name, good + b"caf\xe9,1\n")
    if name.endswith(".txt"):
        write(open_at.folder / "train" / "pos" / "0_1.txt", "Good.")
    with pytest.raises(BadDataError, match=r", line 2: byte 0xe9 is not UTF-8"):
        rows_of(open_at())


@pytest.mark.parametrize("text", ["../outside", "/etc/passwd", "set/../../outside"])
def test_path_outside_the_roots_is_refused(open_at, text):
    (open_at.folder.parent.parent / "outside").mkdir()
    with pytest.raises(BadDataError, match="is outside the allowed folders"):
        open_at(text)


def test_link_out_of_the_roots_is_refused(open_at, tmp_path):
    write(tmp_path / "outside" / "train.jsonl", json_lines(ROWS))
    open_at.folder.symlink_to(tmp_path / "outside")
    with pytest.raises(BadDataError, match="is outside the allowed folders"):
        open_at()


@pytest.mark.parametrize(
    "identifier",
    [
        "/etc",
        "../data/set",
        "team/../set",
        "a/b/c",
        "./set",
        "json",
        "",
        "team/texts:../x",
        "~/texts",
        "a/b\n",
    ],
)
def test_hub_ids_are_no_paths(open_at, identifier):
    with pytest.raises(
        BadDataError, match=r"is not a dataset id of the hub: an id is owner/name .* leave out 'hub:'"
    ):
        open_at(f"hub:{identifier}")


def test_a_folder_is_not_taken_for_a_hub_dataset(open_at, tmp_path, monkeypatch):
    write(tmp_path / "team" / "texts" / "train.jsonl", json_lines(ROWS))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BadDataError, match=r"'team/texts' has the same name as a path in the working directory"
    ):
        list(open_at("hub:team/texts", offline=True).parts)


def test_missing_path_is_said(open_at):
    with pytest.raises(BadDataError, match="'nowhere' does not exist under"):
        open_at("nowhere")


def test_path_with_a_nul_is_said(open_at):
    with pytest.raises(BadDataError, match="holds a NUL character"):
        open_at("a\0b")


def test_empty_folder_is_said(open_at):
    open_at.folder.mkdir()
    with pytest.raises(BadDataError, match="the dataset folder is empty"):
        open_at()


def test_folder_without_a_dataset_is_said(open_at):
    write(open_at.folder / "notes.md", "hello")
    with pytest.raises(BadDataError, match=r"no dataset found; expected train\.jsonl, train\.csv"):
        open_at()


def test_empty_file_is_said(open_at):
    write(open_at.folder / "train.jsonl", "")
    with pytest.raises(BadDataError, match=r"train\.jsonl: the dataset is empty"):
        open_at()


def test_unknown_format_is_said(open_at):
    write(open_at.folder.with_suffix(".docx"), "x")
    with pytest.raises(BadDataError, match=r"unknown format '\.docx'; use one of \.jsonl"):
        open_at("set.docx")


def test_unknown_label_names_line_and_choices(configure, tmp_path):
    write(tmp_path / "d" / "set" / "train.jsonl", json_lines([*ROWS, ("Odd.", "neutral")]))
    config = configure(task__path="set", workspace__data_roots=(str(tmp_path / "d"),))
    with pytest.raises(
        BadDataError, match=r"line 3, field label: unknown label 'neutral'; use one of neg, pos"
    ):
        train(config, NullSink(), NeverStop())


def test_unknown_hub_dataset_offline_is_said(open_at):
    with pytest.raises(BadDataError, match=r"hub dataset 'nobody/nothing' cannot be loaded .*offline"):
        list(open_at("hub:nobody/nothing", offline=True).parts)


@pytest.mark.parametrize(("label", "shown"), [("pos", "positive"), ("neg", "negative")])
def test_training_examples_of_one_label_are_refused(configure, tmp_path, label, shown):
    write(tmp_path / "d" / "set" / "train.jsonl", json_lines([(f"Cup {i}.", label) for i in range(9)]))
    config = configure(task__path="set", workspace__data_roots=(str(tmp_path / "d"),))
    with pytest.raises(
        BadDataError, match=rf"train: all examples \(8\) have label {shown}, .* add examples of"
    ):
        train(config, NullSink(), NeverStop())


def test_more_examples_than_there_are_is_said(configure):
    config = configure(task__train_examples=91)
    with pytest.raises(BadDataError, match="train_examples is 91, but the train part has 90"):
        train(config, NullSink(), NeverStop())


def test_model_folder_without_weights_is_said(configure, tmp_path):
    write(tmp_path / "models" / "bare" / "config.json", '{"model_type": "bert"}')
    config = configure(model__name="bare", workspace__model_roots=(str(tmp_path / "models"),))
    with pytest.raises(
        BadSpecError, match=r"bare: the model folder has no weights: model\.safetensors is missing"
    ):
        train(config, NullSink(), NeverStop())


def test_model_outside_the_roots_is_said(configure, tmp_path):
    config = configure(model__name="/etc", workspace__model_roots=(str(tmp_path),))
    with pytest.raises(BadSpecError, match=r"'/etc' is not a preset .* is outside the allowed folders"):
        train(config, NullSink(), NeverStop())


def test_model_that_is_no_bert_is_said(configure, tmp_path):
    folder = tmp_path / "models" / "other"
    write(folder / "config.json", '{"model_type": "gpt2"}')
    write(folder / "model.safetensors", "x")
    write(folder / "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    config = configure(model__name="other", workspace__model_roots=(str(tmp_path / "models"),))
    with pytest.raises(BadSpecError, match="model_type is 'gpt2'; models that can be trained are bert, "):
        train(config, NullSink(), NeverStop())


def test_damaged_weights_are_said(configure, tmp_path):
    folder = tmp_path / "models" / "torn"
    write(
        folder / "config.json",
        '{"model_type": "bert", "vocab_size": 6, "hidden_size": 12, "num_hidden_layers": 1, '
        '"intermediate_size": 24, "num_attention_heads": 12, "max_position_embeddings": 512}',
    )
    write(folder / "model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00garbage")
    write(folder / "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    config = configure(model__name="torn", workspace__model_roots=(str(tmp_path / "models"),))
    with pytest.raises(BadSpecError, match=r"torn/model\.safetensors: the weights cannot be read"):
        train(config, NullSink(), NeverStop())


def test_unknown_hub_model_offline_is_said(configure):
    config = configure(model__name="hub:nobody/nothing", workspace__offline=True)
    with pytest.raises(BadSpecError, match=r"hub model 'nobody/nothing' cannot be loaded .*offline"):
        train(config, NullSink(), NeverStop())


def test_real_reviews_have_both_labels(real_data, tmp_path):
    source = open_source(
        TaskConfig(name="imdb", path="imdb"),
        Workspace(checkpoints="unused", cache=str(tmp_path), data_roots=(str(real_data),)),
    )
    labels = [row.label("label") for row in source.rows("train")]
    assert (labels.count("neg"), labels.count("pos")) == (12_500, 12_500)
