"""Masked language modelling: reading, packing, subsets, scores, and runs that resume."""

from __future__ import annotations

import gzip
import json
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file

from trainers.data import tokenizers
from trainers.data.batches import Batch, collate
from trainers.entrypoint import train
from trainers.errors import BadDataError, BadSpecError
from trainers.loop import evaluation
from trainers.model_kinds.heads import IGNORED
from trainers.models.origin import Folder, Preset
from trainers.reporting import NeverStop, NullSink
from trainers.tasks import base
from trainers.tasks.mlm.task import GuessScoring

WORDS = [a + b for a in ("ka", "lo", "mi", "ne", "su") for b in ("ra", "ti", "vo", "xe")]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Lines that repeat a few words: the next word follows from the one before."""
    rng = random.Random(seed)
    lines = []
    for number in range(count):
        start = rng.randrange(len(WORDS))
        lines.append(
            " ".join(WORDS[(start + i) % len(WORDS)] for i in range(rng.randint(3, 40))) + f" {number}"
        )
    return lines


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data" / "texts"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def configured(configure, folder):
    """A configuration of the task on the test's folder."""

    def make(path="texts", **changes):
        return configure(
            task={"name": "mlm", "path": path, "max_length": 24, **changes.pop("task", {})},
            workspace__data_roots=(str(folder.parent),),
            workspace__cache=str(folder.parent.parent / "cache"),
            **changes,
        )

    return make


def prepare(config, origin=None):
    lines: list[str] = []
    return base.build("mlm").prepare(config, origin or Preset("tiny"), lines.append), lines


def decoded(data, part) -> list[str]:
    """The words of a part, in order, without special tokens."""
    tokenizer = tokenizers.load(data.tokenizer.parent)
    return tokenizer.decode(getattr(data, part).tokens.tolist()).split()


def words(lines) -> list[str]:
    return " ".join(lines).split()


LINES = sentences(60)


@pytest.mark.parametrize(
    "name",
    ["train.txt", "train.txt.gz", "train.jsonl", "train.jsonl.gz", "train.csv", "train.parquet"],
)
def test_every_format_holds_the_same_texts(configured, folder, name):
    rows = "".join(json.dumps({"text": line}) + "\n" for line in LINES)
    content = {"txt": "\n\n".join(LINES), "jsonl": rows, "csv": "text\n" + "\n".join(LINES)}
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.table({"text": LINES}), folder / name)
    else:
        raw = content[name.split(".")[1]].encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    (folder / "valid.txt").write_text("\n".join(LINES[:20]))
    data, _ = prepare(configured())
    assert decoded(data, "train") == words(LINES)
    assert decoded(data, "validation") == words(LINES[:20])
    assert (data.train.lengths[:-1] == 24).all()


def test_one_file_is_divided_by_text_and_nothing_is_lost(configured, folder):
    (folder / "all.txt").write_text("\n".join(LINES * 2))
    data, _ = prepare(configured("texts/all.txt", task={"validation_fraction": 0.3}))
    halves = decoded(data, "train"), decoded(data, "validation")
    assert sorted(halves[0] + halves[1]) == sorted(words(LINES * 2))
    numbers = [{word for word in half if word.isdigit()} for half in halves]
    assert not numbers[0] & numbers[1]
    assert 5 < len(numbers[1]) < 32


def test_the_penn_treebank_is_read_as_it_was_written(configured, folder):
    line = " the <unk> did n't say `` N days '' , he said \n"
    for part in ("train", "valid", "test"):
        (folder / f"ptb.{part}.txt").write_text(line * 20)
    (folder / "vocab.txt").write_text(
        "\n".join([*tokenizers.SPECIAL, "the", "did", "n", "'", "t", "say", '"', "days", ",", "he", "said"])
    )
    task = {"detokenise": "penn_treebank", "overlap": "allow"}
    data, _ = prepare(configured(task=task), Folder(folder))
    tokenizer = tokenizers.load(data.tokenizer.parent)
    one = [tokenizer.id_to_token(token) for token in data.train.tokens[1:16].tolist()]
    assert (
        one
        == """the [UNK] didn ' t say " [UNK] days " , he said [SEP] the""".replace("didn", "[UNK]").split()
    )
    batch = collate(data.train, np.arange(len(data.train)), data.pad_id, 1)
    guessed = data.transform(batch, seed=0, epoch=0)
    unknown = tokenizer.token_to_id("[UNK]")
    assert not (guessed.labels == unknown).any()
    plain, _ = prepare(configured(task={"overlap": "allow"}), Folder(folder))
    assert plain.identity["detokenise"] == "none"


def test_sizes_count_sequences_and_reading_ends_when_they_are_there(configured, folder, monkeypatch):
    monkeypatch.setattr("trainers.tasks.mlm.task._BATCH_CHARACTERS", 500)
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in LINES) + "broken\n"
    )
    (folder / "validation.txt").write_text("\n".join(LINES))
    (folder / "vocab.txt").write_text(
        "\n".join([*tokenizers.SPECIAL, *WORDS, *"0123456789", *(f"##{i}" for i in range(10))])
    )
    data, lines = prepare(configured(task={"train_examples": 8, "validation_examples": 3}), Folder(folder))
    assert (len(data.train), len(data.validation)) == (8, 3)
    assert "train: 8 sequences of 24 tokens, 192 tokens" in lines


def test_more_sequences_than_there_are_is_said(configured, folder):
    (folder / "train.txt").write_text("\n".join(LINES))
    with pytest.raises(BadDataError, match=r"train_examples is 5000, but the train part packs into \d+ seq"):
        prepare(configured(task={"train_examples": 5000}))


def test_second_start_reads_no_text(configured, folder, monkeypatch):
    (folder / "train.txt").write_text("\n".join(LINES))
    first, _ = prepare(configured())
    monkeypatch.setattr("trainers.tasks.mlm.read_plain", None)
    second, lines = prepare(configured())
    assert lines == []
    assert second.identity == first.identity
    assert isinstance(second.train.tokens, np.memmap)


def test_masks_are_no_part_of_the_cache_but_of_the_identity(configured, folder):
    (folder / "train.txt").write_text("\n".join(LINES))
    first, _ = prepare(configured())
    second, lines = prepare(configured(task={"masked_fraction": 0.3, "whole_word": True}))
    assert lines == []
    changed = {name for name in first.identity if first.identity[name] != second.identity[name]}
    assert changed == {"masked_fraction", "whole_word"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", b'{"text": "a"}\n{"text": }\n', r"train\.jsonl, line 2: not a JSON object"),
        ("train.jsonl", b'{"words": "a"}\n', r"train\.jsonl, line 1, field text: missing \(found: words\)"),
        ("train.jsonl", b'{"text": 7}\n', r"train\.jsonl, line 1, field text: a int, not a string"),
        ("train.txt", b"fine\ncaf\xe9\n", r"train\.txt, line 2: byte 0xe9 is not UTF-8"),
        ("train.txt", b"\n \n\n", r"texts: the train part contains no text"),
        ("train.jsonl", b'{"text": ""}\n', r"texts: the train part contains no text"),
        ("train.txt.gz", b"no gzip", r"train\.txt\.gz, line 1: the gzip file is damaged \(Not a gz"),
        (
            "train.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n', mtime=0)[:-9],
            r"train\.jsonl\.gz, line \d+: the gzip",
        ),
        ("train.txt", b"only one line\n", r"too few texts to hold out a validation part"),
        ("corpus.txt", b"text\n", "no dataset found"),
    ],
)  # fmt: skip
def test_malformed_files_are_named(configured, folder, recorder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(BadDataError, match=message):
        train(configured(), recorder, NeverStop())


def test_an_empty_validation_part_is_named(configured, folder):
    (folder / "train.txt").write_text("\n".join(LINES))
    (folder / "valid.txt").write_text("\n\n")
    with pytest.raises(BadDataError, match="the validation part contains no text"):
        prepare(configured())


def test_a_vocabulary_without_mask_is_refused(configured, folder):
    (folder / "train.txt").write_text("\n".join(LINES))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"]))
    with pytest.raises(BadSpecError, match=r"has no mask_token"):
        prepare(configured(task={"validation_fraction": 0.4}), Folder(folder))


def guesses(labels, logits):
    labels = torch.tensor(labels)
    rows, guessed = torch.arange(len(labels)), (labels != IGNORED).flatten().nonzero()[:, 0]
    tokens = labels.numel()
    batch = Batch(labels, None, None, labels, rows, len(rows), tokens, tokens, guessed=guessed)
    return torch.tensor(logits), batch


def test_rank_is_among_the_whole_vocabulary_and_ties_share_theirs():
    logits, batch = guesses(
        [[IGNORED, 2, 0], [1, IGNORED, IGNORED]],
        [[0.0, 1.0, 2.0, -1.0], [0.0, 1.0, 2.0, 0.0], [1.0, 3.0, 2.0, 2.0]],
    )
    observed = GuessScoring(1).observe(logits, batch)
    assert observed[:, :3].tolist() == [[2.0, 1.0, pytest.approx(1 + 1 / 3.5)], [1.0, 1.0, 1.0]]
    scores = GuessScoring(1).score(observed.numpy())
    assert scores == pytest.approx({"accuracy": 2 / 3, "mrr": (2 + 1 / 3.5) / 3})


def test_a_model_that_tells_nothing_apart_is_never_right():
    logits, batch = guesses([[1, 2]], [[0.0] * 9] * 2)
    scores = GuessScoring(1).score(GuessScoring(1).observe(logits, batch).numpy())
    assert scores == pytest.approx({"accuracy": 0.0, "mrr": 1 / 5})
    logits, batch = guesses([[1, 2]], [[float("nan")] * 9] * 2)
    assert GuessScoring(1).score(GuessScoring(1).observe(logits, batch).numpy())["mrr"] < 1 / 9


def test_ranks_of_many_guesses_are_those_of_a_plain_count():
    rng = np.random.default_rng(0)
    labels = np.where(rng.random((40, 60)) < 0.5, rng.integers(0, 50, (40, 60)), IGNORED)
    labels[7] = IGNORED
    right = labels[labels != IGNORED]
    assert len(right) > GuessScoring._TOKENS
    logits = rng.normal(size=(len(right), 50)).astype(np.float32)
    tensor, batch = guesses(labels.tolist(), logits.tolist())
    ranks = np.array([1 + int((row > row[own]).sum()) for row, own in zip(logits, right, strict=True)])
    scores = GuessScoring(1).score(GuessScoring(1).observe(tensor, batch).numpy())
    assert scores == pytest.approx({"accuracy": (ranks == 1).mean(), "mrr": (1 / ranks).mean()}, rel=1e-5)


def test_loss_is_the_mean_of_each_sequence_and_the_sum_of_all():
    logits, batch = guesses(
        [[IGNORED, 0, 1], [2, IGNORED, IGNORED], [IGNORED] * 3],
        [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 2.0, 1.0]],
    )
    own = -torch.log_softmax(logits, 1)[range(3), [0, 1, 2]]
    assert float(base.build("mlm").loss(logits, batch)) == pytest.approx(float(own[:2].mean() + own[2]))


@pytest.mark.slow
def test_tiny_learns_that_a_line_says_one_word(configured, folder, recorder):
    rng = random.Random(0)
    lines = [" ".join([rng.choice(WORDS)] * rng.randint(5, 21)) + f" {i}" for i in range(400)]
    (folder / "train.txt").write_text("\n".join(lines))
    config = configured(
        task={"whole_word": True},
        model={"name": "tiny", "dropout": 0.0},
        length={"epochs": 20},
        batch={"global_size": 16},
        optimizer={"learning_rate": 2e-3},
        evaluation={"every_epochs": 4.0, "batch_size": 32},
    )
    summary = train(config, recorder, NeverStop()).summary
    losses = list(recorder.series("validation_loss").values())
    assert losses[-1] < 0.6 * losses[0]
    assert summary["accuracy"] > 0.3  # one of twenty words would be 0.05
    assert summary["accuracy"] < summary["mrr"] < 1.0
    assert summary["sequence_ms"] > 0.0
    assert summary["padding_pct"] < 1.0


@pytest.mark.slow
def test_time_of_a_sequence_holds_no_making_of_batches(configured, folder, monkeypatch):
    (folder / "train.txt").write_text("\n".join(LINES))
    made_by = []

    def slow(*arguments):
        made_by.append(threading.current_thread().name)
        time.sleep(1.0)
        return collate(*arguments)

    monkeypatch.setattr(evaluation, "collate", slow)
    config = configured(length={"steps": 1}, task={"validation_examples": 4})
    summary = train(config, NullSink(), NeverStop()).summary
    # The warm-up has a batch of its own, outside any time.
    in_thread = [name for name in made_by if name.startswith("stillhouse-batches")]
    assert len(in_thread) == len(made_by) - 1
    assert 0.0 < 4 * summary["sequence_ms"] < 1000.0


def weights(checkpoint):
    return load_file(f"{checkpoint}/model.safetensors")


@pytest.mark.slow
def test_stopped_run_resumes_bitwise(config_in, configured, folder, tmp_path, recorder):
    (folder / "train.txt").write_text("\n".join(LINES))
    config = configured(length={"epochs": 2.5}, deterministic=True, batch={"global_size": 8, "micro_size": 4})
    parts = config.model_copy(
        update={"workspace": config.workspace.model_copy(update={"checkpoints": str(tmp_path / "parts")})}
    )
    whole = train(config, recorder, NeverStop())
    losses, resumed = recorder.series("loss"), {}
    assert len(losses) > 7
    for stop_after in (3, 6, None):
        part = type(recorder)(stop_after=stop_after)
        outcome = train(parts, part, part)
        resumed |= part.series("loss")
    assert resumed == losses
    expected, found = weights(whole.checkpoint), weights(outcome.checkpoint)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert outcome.summary["accuracy"] == whole.summary["accuracy"]


@pytest.mark.slow
def test_two_workers_compute_one_workers_losses(launch, configured, folder, tmp_path):
    (folder / "train.txt").write_text("\n".join(LINES))
    runs = {}
    for count, strategy in ((1, "single"), (2, "ddp")):
        config = configured(
            length={"steps": 4},
            model={"name": "tiny", "dropout": 0.0},
            parallel={"strategy": strategy, "workers": count},
        )
        workspace = config.workspace.model_copy(update={"checkpoints": str(tmp_path / strategy)})
        ended = launch([config.model_copy(update={"workspace": workspace})])
        runs[count] = ended.results[0]["runs"][0]
    assert runs[2]["losses"] == pytest.approx(runs[1]["losses"], rel=1e-4)
    assert runs[2]["summary"]["mrr"] == pytest.approx(runs[1]["summary"]["mrr"], rel=1e-3)


def test_every_score_is_defined():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Scores of mlm\n")[1].split("\n## ")[0]
    names = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert set(names) == {"validation_loss", "accuracy", "mrr", "sequence_ms"}
