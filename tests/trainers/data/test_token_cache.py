"""Data are read and tokenised once, whoever asks."""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import pytest

from trainers.config import TaskConfig
from trainers.data import tokenizers
from trainers.data.cache import cached_folder, fingerprint
from trainers.data.synthetic import write_corpus
from trainers.data.tokens import TokenSet
from trainers.errors import BadDataError, CacheError
from trainers.models.origin import Folder, Preset
from trainers.tasks import base

TASK = base.build("imdb")


@pytest.fixture
def private(configure, tmp_path):
    """A configuration with a corpus and a cache of its own."""
    write_corpus(tmp_path / "data" / "set", train=40, test=16, seed=0)
    return configure(
        task={"name": "imdb", "path": "set"},
        workspace__data_roots=(str(tmp_path / "data"),),
        workspace__cache=str(tmp_path / "cache"),
    )


def prepare(config, origin=None):
    lines: list[str] = []
    return TASK.prepare(config, origin or Preset("tiny"), lines.append), lines


def test_second_start_reads_no_text(private, monkeypatch):
    first, lines = prepare(private)
    assert lines == ["training a WordPiece vocabulary on 40 texts"]
    monkeypatch.setattr("trainers.data.layouts.READERS", {".jsonl": None})
    second, lines = prepare(private)
    assert lines == []
    assert second.identity == first.identity
    assert np.array_equal(second.train.tokens, first.train.tokens)


def test_tokens_are_memory_mapped(private):
    data, _ = prepare(private)
    assert isinstance(data.train.tokens, np.memmap)


def test_changed_text_is_another_entry(private, tmp_path):
    first, _ = prepare(private)
    with (tmp_path / "data" / "set" / "test.jsonl").open("a") as file:
        file.write(json.dumps({"text": "One more.", "label": 1}) + "\n")
    second, _ = prepare(private)
    assert len(second.validation) == len(first.validation) + 1
    assert second.identity["validation.sha256"] != first.identity["validation.sha256"]
    assert second.identity["train.sha256"] == first.identity["train.sha256"]


def test_length_is_another_entry(private, configure):
    short = private.model_copy(update={"task": private.task.model_copy(update={"max_length": 8})})
    data, _ = prepare(short)
    assert data.train.lengths.max() == 8
    assert prepare(private)[0].train.lengths.max() > 8


def test_examples_that_are_cut_are_said_at_every_start(private):
    def start(task=private.task, **changes):
        return prepare(private.model_copy(update={"task": task.model_copy(update=changes)}))

    for _ in range(2):
        data, lines = start(max_length=8)
        assert (
            "train: 40 of 40 examples (100.0 %) have more than 8 tokens and are truncated; "
            "raise task.max_length to avoid this" in lines
        )
        assert data.train.cut.all()
    whole, lines = start(max_length=512)
    assert not whole.train.cut.any()
    assert not any("cut" in line for line in lines)
    longest = int(whole.train.lengths.max())
    assert not start(max_length=longest)[0].train.cut.any()
    shorter = start(max_length=longest - 1)[0].train
    assert shorter.cut.tolist() == (whole.train.lengths == longest).tolist()


@pytest.mark.parametrize("cached", [False, True])
def test_texts_that_are_too_long_can_be_an_error(private, tmp_path, cached):
    text = {"text": "A very, very long cup. " * 40, "label": 1}
    with (tmp_path / "data" / "set" / "train.jsonl").open("a") as file:
        file.write(json.dumps(text) + "\n")
    task = private.task.model_copy(update={"max_length": 200})
    if cached:
        prepare(private.model_copy(update={"task": task}))
    strict = private.model_copy(update={"task": task.model_copy(update={"too_long": "error"})})
    with pytest.raises(
        BadDataError, match=r"train\.jsonl, line 41: more than 200 tokens; raise task\.max_length"
    ):
        prepare(strict)


def test_too_long_belongs_to_tasks_without_windows():
    with pytest.raises(ValueError, match=r"too_long belongs to task .*wikiqa, tariff, not squad_v2"):
        TaskConfig(name="squad_v2", too_long="error")


def test_damaged_entry_is_built_again(private, tmp_path):
    first, _ = prepare(private)
    file = next((tmp_path / "cache" / "tokens").glob("*/train.tokens.npy"))
    expected = np.array(first.train.tokens)
    file.write_bytes(file.read_bytes()[:-10])
    assert np.array_equal(prepare(private)[0].train.tokens, expected)


def test_examples_are_framed_and_labels_kept(private):
    data, _ = prepare(private)
    tokenizer = tokenizers.load(data.tokenizer.parent)
    first = data.train.tokens[data.train.offsets[0] : data.train.offsets[1]]
    assert (tokenizer.id_to_token(int(first[0])), tokenizer.id_to_token(int(first[-1]))) == ("[CLS]", "[SEP]")
    assert sorted(set(data.train.labels.tolist())) == [0, 1]
    assert data.pad_id == 0


def test_vocabulary_training_is_repeatable(private, tmp_path):
    lines = (tmp_path / "data/set/train.jsonl").read_text().split("\n")[:-1]
    texts = [json.loads(line)["text"] for line in lines]
    first, second = (tokenizers.train_wordpiece(texts, 500) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() > 200
    assert first.encode("the tea was qqq").tokens[:4] == ["[CLS]", "the", "tea", "was"]


def test_vocabulary_file_makes_the_same_ids_as_the_fast_tokenizer(minilm, tmp_path):
    (tmp_path / "vocab.txt").write_bytes((minilm / "vocab.txt").read_bytes())
    text = "Un-believably good: a café's naïve 東京 tea!"
    built, stored = tokenizers.load(tmp_path), tokenizers.load(minilm)
    stored.no_padding()
    assert built.encode(text).ids == stored.encode(text).ids


def test_model_folder_brings_its_tokenizer(private, minilm):
    data, lines = prepare(private, Folder(minilm))
    assert (data.vocabulary_size, lines) == (30522, [])


def test_concurrent_builders_build_once(tmp_path):
    built = []

    def build(folder):
        built.append(1)
        time.sleep(0.05)
        (folder / "x").write_text("y")

    threads = [threading.Thread(target=cached_folder, args=(tmp_path, "key", build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_failed_build_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CacheError, match=r"the cache cannot be written .*No space"):
        cached_folder(tmp_path, "key", fail)
    assert not (tmp_path / "key").exists()
    assert cached_folder(tmp_path, "key", lambda folder: None).is_dir()


def test_a_cache_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"file/tokens: the cache cannot be written \(Not a directory\)"):
        cached_folder(tmp_path / "file" / "tokens", "key", lambda folder: None)


def test_a_fingerprint_needs_no_memory(tmp_path):
    file = tmp_path / "file"
    file.touch()
    os.utime(file, (1, 1))
    assert (
        fingerprint(tmp_path, [file], file / "memory").sha256
        == fingerprint(tmp_path, [file], tmp_path).sha256
    )


def test_fingerprint_is_remembered_only_when_old_enough(tmp_path):
    file, memory = tmp_path / "a.txt", tmp_path / "memory"
    file.write_text("one")
    first = fingerprint(tmp_path, [file], memory)
    assert not memory.exists()  # a second change could come in the same clock tick
    file.write_text("two")
    assert fingerprint(tmp_path, [file], memory).sha256 != first.sha256


def test_fingerprint_covers_names(tmp_path):
    one, other = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_text("same")
    os.link(one, other)
    memory = tmp_path / "memory"
    assert fingerprint(tmp_path, [one], memory).sha256 != fingerprint(tmp_path, [other], memory).sha256


def test_token_set_survives_the_disk(tmp_path):
    tokens = TokenSet(np.arange(5, dtype=np.uint16), np.array([0, 2, 5]), np.array([1, 0]))
    tokens.save(tmp_path, "train")
    loaded = TokenSet.open(tmp_path, "train")
    assert loaded.lengths.tolist() == [2, 3]
    assert loaded.labels.tolist() == [1, 0]
