"""The generated texts."""

from __future__ import annotations

import json

from trainers.data.synthetic import write_corpus


def rows(folder, part):
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().split("\n")[:-1]]


def test_texts_are_balanced_and_distinct(tmp_path):
    write_corpus(tmp_path, train=200, test=100, seed=0)
    train, test = rows(tmp_path, "train"), rows(tmp_path, "test")
    assert (sum(row["label"] for row in train), sum(row["label"] for row in test)) == (100, 50)
    texts = [row["text"] for row in train + test]
    assert len(set(texts)) == len(texts)


def test_a_text_may_be_several_reviews_of_one_label(tmp_path):
    write_corpus(tmp_path, train=40, test=2, seed=0, reviews=8)
    texts = rows(tmp_path, "train")
    assert sum(row["label"] for row in texts) == 20
    assert all(len(row["text"].split()) > 8 * 15 for row in texts)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_corpus(tmp_path / name, train=20, test=10, seed=seed)
    first, again, other = ((tmp_path / name / "train.jsonl").read_bytes() for name in "abc")
    assert first == again != other
