"""`stillhouse corpus build`: what it keeps, where it puts it, and the same bytes after it was killed."""

from __future__ import annotations

import gzip
import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from service.cli.app import app
from trainers.config import TaskConfig, Workspace
from trainers.data import corpus
from trainers.data.corpus import MANIFEST, CorpusPlan, CorpusSource, build
from trainers.data.sources import open_source
from trainers.errors import BadDataError

SHARES = {"train": 0.8, "test": 0.2}
WORDS = "tea cup fragrant bitter water leaf garden green black steep pour warm".split()  # noqa: SIM905


def document(number: int, rng: random.Random) -> str:
    sentences = [" ".join(rng.choices(WORDS, k=rng.randint(4, 9))).capitalize() + "." for _ in range(6)]
    return f"Document number {number}. " + " ".join(sentences)


def write_documents(path: Path, numbers: range) -> Path:
    rng = random.Random(numbers.start)
    rows = (orjson.dumps({"text": document(number, rng)}) + b"\n" for number in numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(rows))
    return path


@pytest.fixture
def plan(tmp_path: Path) -> CorpusPlan:
    one = write_documents(tmp_path / "in" / "one" / "a.jsonl", range(300))
    two = write_documents(tmp_path / "in" / "two.jsonl", range(1000, 1150))
    sources = [CorpusSource(str(one.parent)), CorpusSource(str(two), weight=0.5)]
    return CorpusPlan(sources, SHARES, shards=5, words=20, least_words=10)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def texts_of(folder: Path, part: str) -> list[str]:
    lines = b"".join(gzip.decompress(path.read_bytes()) for path in sorted(folder.glob(f"{part}-*")))
    return [orjson.loads(line)["text"] for line in lines.splitlines()]


def numbers_of(folder: Path, part: str) -> list[int]:
    return [
        int(text.split()[2].rstrip(".")) for text in texts_of(folder, part) if text.startswith("Document")
    ]


def change(plan: CorpusPlan, **fields: object) -> CorpusPlan:
    return CorpusPlan(**{**{name: getattr(plan, name) for name in plan.__slots__}, **fields})  # type: ignore[arg-type]


def test_the_task_reads_what_was_built(plan: CorpusPlan, tmp_path: Path) -> None:
    manifest = build(plan, tmp_path / "data" / "mine")
    source = open_source(
        TaskConfig(name="mlm", path="mine"),
        Workspace(checkpoints="", cache=str(tmp_path / "cache"), data_roots=(str(tmp_path / "data"),)),
    )
    assert {part: files.files for part, files in source.parts.items()} == {"train": 4, "test": 1}
    for part, counts in manifest["parts"].items():
        texts = [row.text("text") for row in source.rows(part)]
        assert len(texts) == counts["texts"]
        assert sum(len(text.split()) for text in texts) == counts["words"]
        assert max(len(text.split()) for text in texts) <= 20
    read = sorted(
        numbers_of(tmp_path / "data" / "mine", "train") + numbers_of(tmp_path / "data" / "mine", "test")
    )
    assert read == [*range(300), *range(1000, 1150)]
    assert 0.1 < manifest["parts"]["test"]["documents"] / 450 < 0.3
    assert json.loads((tmp_path / "data" / "mine" / MANIFEST).read_text()) == manifest


def test_parts_depend_on_the_documents_alone(plan: CorpusPlan, tmp_path: Path) -> None:
    build(plan, tmp_path / "a")
    first, second = plan.sources
    others = [CorpusSource(second.path, weight=3.0), first]
    build(change(plan, sources=others, seed=7, shards=9), tmp_path / "b")
    build(change(plan, shares={"train": 0.7, "validation": 0.1, "test": 0.2}), tmp_path / "c")
    tested = {name: set(numbers_of(tmp_path / name, "test")) for name in "abc"}
    assert tested["a"] == tested["b"] == tested["c"]
    assert not tested["a"] & set(numbers_of(tmp_path / "b", "train"))
    assert len(list((tmp_path / "c").glob("validation-*-of-00001.jsonl.gz"))) == 1


def test_a_seed_draws_the_shards_and_gives_the_same_bytes_again(plan: CorpusPlan, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build(change(plan, seed=seed), tmp_path / name)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    assert sorted(texts_of(tmp_path / "a", "train")) == sorted(texts_of(tmp_path / "c", "train"))
    assert texts_of(tmp_path / "a", "train") != texts_of(tmp_path / "c", "train")
    assert build(plan, tmp_path / "a") == json.loads((tmp_path / "b" / MANIFEST).read_text())


def test_sources_are_read_by_weight(plan: CorpusPlan, tmp_path: Path) -> None:
    manifest = build(change(plan, stop="first"), tmp_path / "a")
    one, two = manifest["sources"]
    assert one["documents"] == 300
    assert two["characters"] / one["characters"] == pytest.approx(0.5, rel=0.02)


def test_copies_and_short_documents_are_left_out(tmp_path: Path) -> None:
    text = "The cup of green tea was warm and fragrant, and we drank it slowly."
    rows = [text, f"  {text.upper()} ", "Too short.", f"{text} Twice."]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    sources = [CorpusSource(str(tmp_path / "in.jsonl"), column="body")]
    source = build(CorpusPlan(sources, {"train": 1.0}, 2, 50, 5), tmp_path / "out")["sources"][0]
    assert (source["documents"], source["kept"], source["too_short"], source["duplicates"]) == (4, 2, 1, 1)


KINDS: Mapping[str, tuple[str, list[str]]] = {
    "title": (
        " = Tea = \n\n A cup . \n = = Kinds = = \n Green . \n = Oolong = \n Blue .",
        ["A cup . Green .", "Blue ."],
    ),
    "doc": (
        '<doc id="1" title="Tea">\nA cup.\n\nGreen.\n</doc>\n<doc id="2">\nBlue.\n</doc>\n',
        ["A cup. Green.", "Blue."],
    ),
    "file": ("A cup.\n\nGreen.\n", ["A cup. Green."]),
    "paragraph": ("A cup.\nGreen.\n\nBlue.\n", ["A cup. Green.", "Blue."]),
    "line": ("A cup.\nGreen.\n", ["A cup.", "Green."]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", ["given", "auto"])
def test_documents_of_plain_text(
    kind: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, expected = KINDS[kind]
    (tmp_path / "in.txt").write_text(content)
    if setting == "auto" and kind in ("paragraph", "line"):
        monkeypatch.setattr(corpus, "LONGEST", 10)  # A longer file is not one document.
    source = CorpusSource(str(tmp_path / "in.txt"), documents=kind if setting == "given" else "auto")
    found = [" ".join(corpus.paragraphs(text)) for text in corpus._LocalDocuments(source, {})]
    assert [text for text in found if text] == expected


def test_a_long_document_is_continued_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LONGEST", 1000)
    (tmp_path / "book.txt").write_text("\n".join(f"Line {n} of tea." for n in range(500)))
    texts = list(corpus._LocalDocuments(CorpusSource(str(tmp_path / "book.txt"), documents="file"), {}))
    assert max(map(len, texts)) < 1100
    assert "\n".join(texts) == (tmp_path / "book.txt").read_text()
    monkeypatch.setattr(corpus, "_LONGEST_LINE", 100)
    (tmp_path / "line.txt").write_text("tea " * 100)
    manifest = CorpusPlan([CorpusSource(str(tmp_path / "line.txt"))], SHARES, 2)
    with pytest.raises(BadDataError, match=r"line\.txt, behind document 0: a line or row of more than"):
        build(manifest, tmp_path / "out")


class Killed(BaseException):
    pass


def test_a_build_that_ends_anywhere_continues_to_the_same_bytes(
    plan: CorpusPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_BATCH_DOCUMENTS", 120)
    build(plan, tmp_path / "whole")
    steps = 0
    real = {name: getattr(corpus, name) for name in ("sync", "digest_of")}

    def ending_at(step: int) -> None:
        """Ends the build at one of its writes: before and after shards, state and manifest."""
        done = iter(range(step))

        def wrapped(name: str) -> object:
            def call(*arguments: object) -> object:
                if next(done, None) is None:
                    raise Killed
                return real[name](*arguments)

            return call

        for name in real:
            monkeypatch.setattr(corpus, name, wrapped(name))

    for steps in range(1, 60, 4):
        ending_at(steps)
        try:
            build(plan, tmp_path / "cut")
            break
        except Killed:
            continue
    assert steps > 9  # Not killed before anything was stored
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_a_killed_process_continues_to_the_same_bytes(
    plan: CorpusPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_BATCH_DOCUMENTS", 60)
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from trainers.data import corpus\n"
        "from trainers.data.corpus import *\n"
        "corpus._BATCH_DOCUMENTS, corpus._REPORTED = 60, 1\n"
        "build(eval(sys.argv[2]), Path(sys.argv[1]), lambda progress: time.sleep(0.02))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "cut"), repr(plan)])
    try:
        until = time.monotonic() + 300
        while _stored(tmp_path / "cut") < 120:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.3)  # Into the middle of a batch
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not list((tmp_path / "cut").glob("train-*.gz"))
    for name in ("cut", "whole"):
        build(plan, tmp_path / name)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def _stored(folder: Path) -> int:
    """Documents of the batches that a build has stored."""
    try:
        with closing(sqlite3.connect(f"file:{folder / 'unfinished.sqlite'}?mode=ro", uri=True)) as database:
            row = database.execute("SELECT content FROM state").fetchone()
    except sqlite3.Error:
        return 0
    return 0 if row is None else sum(one["documents"] for one in json.loads(row[0])["sources"])


def test_what_cannot_be_built_is_said(
    plan: CorpusPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(plan, tmp_path / "a")
    with pytest.raises(
        BadDataError, match=r"a corpus with other settings: seed was 0 and is 1; give another"
    ):
        build(change(plan, seed=1), tmp_path / "a")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").write_text("Mine.")
    with pytest.raises(BadDataError, match=r"holds notes\.md, which is not of a corpus"):
        build(plan, tmp_path / "mine")
    for path, message in ((tmp_path / "no", "does not exist"), (tmp_path / "mine", "no text in it")):
        with pytest.raises(BadDataError, match=message):
            build(change(plan, sources=[CorpusSource(str(path))]), tmp_path / "b")
    monkeypatch.setattr(corpus, "_BATCH_DOCUMENTS", 1)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(BadDataError, match=r"broken\.jsonl, line 2, field text: missing \(found: body\)"):
        build(change(plan, sources=[CorpusSource(str(tmp_path / "broken.jsonl"))]), tmp_path / "b")
    with pytest.raises(BadDataError, match=r"an unfinished build with other settings: sources was"):
        build(plan, tmp_path / "b")
    with pytest.raises(
        BadDataError, match=r"0 of 300 documents kept, none for train; add documents, or lower"
    ):
        build(change(plan, sources=plan.sources[:1], least_words=10_000), tmp_path / "c")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["corpus", "build", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_builds_and_says_what_came_of_it(plan: CorpusPlan, tmp_path: Path) -> None:
    one, two = (source.path for source in plan.sources)
    settings = ("--source", one, "--source", f"{two},weight=2", "--split", "60/20/20", "--shards", "5")
    output = run(str(tmp_path / "out"), *settings)
    assert "too short" in output and "duplicates" in output
    assert "task: {name: mlm, path:" in output
    manifest = json.loads(run(str(tmp_path / "out"), *settings, "--json"))
    assert [one["kept"] for one in manifest["sources"]] == [300, 150]
    assert list(manifest["parts"]) == ["train", "validation", "test"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "x,weight=0"], "weight is not a positive number; write weight=2"),
        (["--source", "x,documents=page"], "documents 'page' is unknown; use auto, line, paragraph, file,"),
        (["--source", "x,wight=2"], "'wight=2' is not NAME=VALUE with one of weight, column, documents,"),
        (["--source", "x", "--split", "80/30"], "'80/30' is not two or three percentages that add up to 100"),
        (["--source", "x", "--shards", "2", "--split", "80/10/10"], "--shards 2 is fewer than the 3 parts"),
        (["--source", "x", "--stop", "never"], "--stop 'never' is neither first nor last"),
        (["--source", "hub:x"], "'hub:x' is not a dataset id of the hub"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    output = run(str(tmp_path / "out"), *arguments, code=2)
    assert message in output
    assert len(output.strip().splitlines()) == 1
