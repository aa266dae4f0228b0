"""Small corpora in the official formats of tasks, with structure that a tiny model learns in seconds."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.data.synthetic import write_corpus
from trainers.tasks import TASKS

EACH_HEAD = tuple({info.head: name for name, info in reversed(TASKS.items())}.values())
"""A task of each kind of head."""

KINDS = {
    "colour": ("red", "blue", "green", "white", "black"),
    "animal": ("fox", "owl", "cat", "horse", "goose"),
    "city": ("oslo", "rome", "lima", "cairo", "delhi"),
}
"""What is asked for, and what may answer."""
FILLER = ("there", "was", "once", "seen", "near", "with", "and", "some", "later")


def write_squad(folder: Path, *, train: int, dev: int, seed: int) -> None:
    """Write `train-v2.0.json` and `dev-v2.0.json`: contexts that name some kinds, questions for all.

    Args:
        folder: made when missing.
        train, dev: contexts of each file; each has three questions, of which one has no answer.
        seed: the same seed gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("dev", dev)):
        rng = random.Random(f"{seed}/{part}")
        articles = [
            {"title": f"{part} {i}", "paragraphs": [_paragraph(rng, f"{part}-{i}")]} for i in range(count)
        ]
        text = json.dumps({"version": "v2.0", "data": articles})
        (folder / f"{part}-v2.0.json").write_text(text, encoding="utf-8")


def _paragraph(rng: random.Random, name: str) -> dict[str, Any]:
    missing = rng.choice(list(KINDS))
    said = [rng.choice(words) for kind, words in KINDS.items() if kind != missing]
    words = [*said, *(rng.choice(FILLER) for _ in range(6))]
    rng.shuffle(words)
    context = " ".join(words) + "."
    questions = []
    for kind, choices in KINDS.items():
        answers = [
            {"text": word, "answer_start": context.index(word)}
            for word in words
            if word in choices and kind != missing
        ]
        questions.append(
            {"id": f"{name}-{kind}", "question": f"Which {kind}?", "answers": answers}
            | {"is_impossible": not answers}
        )
    return {"context": context, "qas": questions}


def write_wikiqa(folder: Path, *, train: int, dev: int, seed: int) -> None:
    """Write `WikiQA-train.txt` and `WikiQA-dev.txt`: three sentences per question, at most one answers.

    Args:
        folder: made when missing.
        train, dev: questions of each file.
        seed: the same seed gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("dev", dev)):
        rng = random.Random(f"{seed}/{part}")
        lines: list[str] = []
        # Questions are told apart by their last words, which mean nothing.
        for several in rng.sample(list(itertools.permutations(FILLER, 4)), count):
            kind, told = rng.choice(list(KINDS)), " ".join(several)
            right = rng.randrange(4)  # 3 = no sentence answers
            for place in range(3):
                other = rng.choice([name for name in KINDS if name != kind])
                # Most wrong sentences name nothing, some the wrong thing.
                wrong = rng.choice((FILLER, FILLER, FILLER, KINDS[other]))
                word = rng.choice(KINDS[kind] if place == right else wrong)
                sentence = " ".join([*rng.sample(FILLER, 3), word])
                lines.append(f"which {kind} {told} ?\t{sentence}\t{int(place == right)}\n")
        (folder / f"WikiQA-{part}.txt").write_text("".join(lines), encoding="utf-8")


def write_task(folder: Path, task: str) -> None:
    """Write a corpus of any task, for runs of a few steps; the same bytes each time.

    Args:
        folder: made when missing.
        task: whose official format it is in, or a table of rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _WRITERS[task](folder)


def _write_tariff(folder: Path) -> None:
    rng = random.Random(0)
    phrases = [(f"{rng.choice(FILLER)} {word}", place) for place in range(2) for word in FILLER]
    lines = [f"{phrase},{(place + 1) * 101:04d}.10\n" for phrase, place in phrases * 2]
    (folder / "train.csv").write_text("text,code\n" + "".join(lines), encoding="utf-8")


def _write_mlm(folder: Path) -> None:
    rng = random.Random(0)
    lines = [" ".join(rng.choices(FILLER, k=rng.randint(5, 20))) + f" {i}\n" for i in range(200)]
    (folder / "train.txt").write_text("".join(lines), encoding="utf-8")


def _write_regression(folder: Path) -> None:
    rng = random.Random(0)
    rows = [
        {"text": " ".join(rng.choices(FILLER, k=6)) + " nice" * number, "label": 1 + number}
        for number in (rng.randrange(5) for _ in range(40))
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_token_classification(folder: Path) -> None:
    rng = random.Random(0)
    lines = []
    for _ in range(40):
        kind = rng.choice(list(KINDS))
        words = [(word, "O") for word in rng.choices(FILLER, k=4)]
        words[rng.randrange(4)] = (rng.choice(KINDS[kind]), f"B-{kind}")
        lines += [*(f"{word}\t{tag}" for word, tag in words), ""]
    (folder / "train.conll").write_text("\n".join(lines), encoding="utf-8")


_WRITERS: dict[str, Callable[[Path], None]] = {
    "classification": lambda folder: write_corpus(folder, train=32, test=8, seed=0),
    "regression": _write_regression,
    "token_classification": _write_token_classification,
    "imdb": lambda folder: write_corpus(folder, train=32, test=8, seed=0),
    "squad_v2": lambda folder: write_squad(folder, train=12, dev=4, seed=0),
    "wikiqa": lambda folder: write_wikiqa(folder, train=12, dev=4, seed=0),
    "tariff": _write_tariff,
    "mlm": _write_mlm,
}
"""Every task has a small corpus here."""
