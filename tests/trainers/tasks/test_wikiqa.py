"""Sentences that answer questions: formats, subsets, scores, and a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from tests.trainers.corpora import write_wikiqa
from trainers.data import tokenizers
from trainers.entrypoint import train
from trainers.errors import BadDataError
from trainers.models.origin import Preset
from trainers.reporting import NeverStop
from trainers.tasks import base

ROWS = [
    ("how does tea grow ?", "it likes rain .", 1),
    ("how does tea grow ?", "it is a drink .", 0),
    ("who drinks it ?", "many do .", 0),
]
COLUMNS = ("QuestionID", "Question", "DocumentID", "DocumentTitle", "SentenceID", "Sentence", "Label")
SCORES = {"map", "mrr", "precision", "recall", "f1", "accuracy", "threshold"}


@pytest.fixture
def wikiqa(configure, tmp_path):
    """Prepare a dataset in a folder; `wikiqa.folder` is where its files go."""
    folder = tmp_path / "data" / "set"
    folder.mkdir(parents=True)

    def prepare(path="set", **task):
        config = configure(
            task={"name": "wikiqa", "path": path, "max_length": 32, **task},
            workspace__data_roots=(str(tmp_path / "data"),),
            workspace__cache=str(tmp_path / "cache"),
        )
        return base.build("wikiqa").prepare(config, Preset("tiny"), lambda line: None)

    prepare.folder = folder
    return prepare


def seven_columns(rows):
    lines = ["\t".join(COLUMNS)]
    numbers = {question: i for i, question in enumerate(dict.fromkeys(question for question, _, _ in rows))}
    for i, (question, sentence, label) in enumerate(rows):
        number = numbers[question]
        lines.append(f'Q{number}\t{question}\tD{number}\t"Tea\tD{number}-{i}\t{sentence}\t{label}')
    return "\n".join(lines) + "\n"


def three_columns(rows):
    return "".join(f"{question}\t{sentence}\t{label}\n" for question, sentence, label in rows)


def write_both(folder, name, text):
    for part in ("train", "dev"):
        (folder / name.format(part)).write_text(text, encoding="utf-8")


def texts_of(prepared, part="validation"):
    """Question, sentence and label of each example, as the tokens say them."""
    data, tokenizer = getattr(prepared, part), tokenizers.load(prepared.tokenizer.parent)
    found = []
    for i, label in enumerate(data.labels):
        tokens = data.tokens[data.offsets[i] : data.offsets[i + 1]]
        first, second = tokens[1 : data.second_at[i] - 1], tokens[data.second_at[i] : -1]
        pieces = [" ".join(tokenizer.id_to_token(int(token)) for token in text) for text in (first, second)]
        found.append((*(text.replace(" ##", "") for text in pieces), int(label)))
    return found


def as_text(folder):
    write_both(folder, "WikiQA-{}.txt", three_columns(ROWS))


def as_official_table(folder):
    write_both(folder, "WikiQA-{}.tsv", seven_columns(ROWS))


def as_json_lines(folder):
    rows = [{"question": q, "sentence": s, "label": label} for q, s, label in ROWS]
    write_both(folder, "{}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def as_csv(folder):
    rows = ["label,answer,question", *(f"{label},{s},{q}" for q, s, label in ROWS)]
    write_both(folder, "{}.csv", "\n".join(rows))


def as_the_hubs_parquet(folder):
    rows = [
        {"question_id": f"Q{q}", "question": q, "document_title": "Tea", "answer": s, "label": label}
        for q, s, label in ROWS
    ]
    for part in ("train", "validation"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{part}.parquet")


@pytest.mark.parametrize("write", [as_text, as_official_table, as_json_lines, as_csv, as_the_hubs_parquet])
def test_every_format_gives_the_same_pairs(wikiqa, write):
    write(wikiqa.folder)
    prepared = wikiqa()
    assert texts_of(prepared) == texts_of(prepared, "train") == ROWS
    assert prepared.validation.columns["question"].tolist() == [0, 0, 1]


def test_the_original_text_is_preferred_when_both_forms_are_whole(wikiqa):
    write_both(wikiqa.folder, "WikiQA-{}.txt", three_columns(ROWS))
    (wikiqa.folder / "WikiQA-dev.tsv").write_text(seven_columns(ROWS[:1]), encoding="utf-8")
    assert len(wikiqa().validation) == 3  # the table has no training part
    (wikiqa.folder / "WikiQA-train.tsv").write_text(seven_columns(ROWS), encoding="utf-8")
    assert len(wikiqa().validation) == 1


def test_questions_are_held_out_whole(wikiqa):
    write_wikiqa(wikiqa.folder, train=40, dev=1, seed=0)
    (wikiqa.folder / "WikiQA-dev.txt").unlink()
    prepared = wikiqa(path="set/WikiQA-train.txt", validation_fraction=0.25)
    train_questions, held = ({q for q, _, _ in texts_of(prepared, part)} for part in ("train", "validation"))
    assert not train_questions & held
    assert (len(train_questions) + len(held), len(held)) == (40, 10)


def test_sizes_count_questions_and_none_is_split(wikiqa):
    write_wikiqa(wikiqa.folder, train=60, dev=40, seed=0)
    prepared = wikiqa(train_examples=10, validation_examples=6)
    labels, questions = prepared.validation.labels, prepared.validation.columns["question"]
    assert np.bincount(questions).tolist() == [3] * 6
    assert len(prepared.train) == 30
    # Half of them have an answer.
    assert (labels.sum(), prepared.train.labels.sum()) == (3, 5)


def test_sentences_of_a_question_need_not_stand_together(wikiqa):
    write_both(wikiqa.folder, "WikiQA-{}.txt", three_columns([ROWS[0], ROWS[2], ROWS[1]]))
    assert texts_of(wikiqa()) == ROWS


def test_equal_questions_with_ids_of_their_own_are_two(wikiqa):
    rows = [{"question_id": i, "question": "what ?", "answer": "Tea .", "label": int(i == 1)} for i in (1, 2)]
    write_both(wikiqa.folder, "{}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert wikiqa().validation.columns["question"].tolist() == [0, 1]


def test_long_pairs_are_cut_the_longer_text_first(wikiqa):
    rows = [("how ?", "very " * 40 + "long .", 1), ("how ?", "short .", 0)]
    write_both(wikiqa.folder, "WikiQA-{}.txt", three_columns(rows))
    prepared = wikiqa(max_length=16)
    assert prepared.validation.lengths.max() == 16
    assert texts_of(prepared)[0][0] == "how ?"


def test_a_byte_order_mark_makes_no_question_of_its_own(wikiqa):
    write_both(wikiqa.folder, "WikiQA-{}.txt", "\ufeff" + three_columns(ROWS))
    assert wikiqa().validation.columns["question"].tolist() == [0, 0, 1]


def test_training_sentences_of_one_label_are_refused(wikiqa):
    (wikiqa.folder / "WikiQA-dev.txt").write_text(three_columns(ROWS))
    (wikiqa.folder / "WikiQA-train.txt").write_text(three_columns(ROWS[1:]))
    with pytest.raises(
        BadDataError, match=r"train: all examples \(2\) have label 0, .* add sentences of the"
    ):
        wikiqa()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("WikiQA-{}.txt", "what ?\tthis\n", "WikiQA-train.txt, line 1: 2 fields, but a line has 3"),
        ("WikiQA-{}.txt", "a\tb\t1\nc\td\te\t0\n", "WikiQA-train.txt, line 2: 4 fields"),
        ("WikiQA-{}.txt", "a\tb\t1\nwhat ?\tthis\t2\n", "line 2, field label: unknown label '2'; use"),
        ("WikiQA-{}.txt", "what ?\t \t1\n", "line 1, field sentence: empty"),
        ("WikiQA-{}.txt", "\tthis\t1\n", "line 1, field question: empty"),
        ("WikiQA-{}.tsv", "Question\tLabel\nwhat ?\t1\n", "line 2, field sentence: missing (found: Question"),
        ("WikiQA-{}.tsv", seven_columns(ROWS) + "Q9\tx\n", "line 5: 2 fields, but the header has 7"),
        ("{}.jsonl", '{"question": "a"\n', "train.jsonl, line 1: not a JSON object"),
        ("{}.jsonl", '{"question": "a", "answer": "b"}\n', "line 1, field label: missing"),
        ("{}.jsonl", '{"question": "a", "answer": "b", "label": true}\n', "unknown label True"),
        ("{}.jsonl", '{"question": "a", "answer": "b", "label": 0.5}\n', "0.5 is neither a name nor"),
        ("WikiQA-{}.txt", three_columns(ROWS[1:]), "validation part has no question with a sentence that"),
    ],
)  # fmt: skip
def test_bad_files_are_named(wikiqa, name, text, message):
    write_both(wikiqa.folder, name, text)
    with pytest.raises(BadDataError) as caught:
        wikiqa()
    assert message in str(caught.value)


def test_order_and_threshold_come_from_the_difference_of_the_logits(wikiqa):
    as_text(wikiqa.folder)
    scoring = wikiqa().scoring
    logits = torch.tensor([[1.0, 3.0], [5.0, 4.0], [0.0, 1.0]])
    observed = scoring.observe(logits, None)
    assert observed.tolist() == [[2.0], [-1.0], [1.0]]
    scores = scoring.score(observed.numpy())
    assert scores.pop("threshold") == pytest.approx(1 / (1 + np.exp(-1.5)))
    assert scores == dict.fromkeys(SCORES - {"threshold"}, 1.0)


@pytest.fixture(scope="module")
def run(config_in, tmp_path_factory):
    """Make the configuration of a run on a small corpus that all runs of this module share."""
    folder = tmp_path_factory.mktemp("wikiqa")
    write_wikiqa(folder / "data" / "set", train=300, dev=60, seed=0)

    def make(checkpoints, **changes):
        return config_in(
            checkpoints,
            task={"name": "wikiqa", "path": "set", "max_length": 24},
            workspace__data_roots=(str(folder / "data"),),
            **changes,
        )

    return make


@pytest.mark.slow
def test_tiny_learns_which_sentence_answers(run, tmp_path, recorder):
    config = run(
        tmp_path,
        length={"epochs": 4},
        batch={"global_size": 16},
        evaluation__every_epochs=2,
        model__dropout=0.0,
    )
    outcome = train(config, recorder, NeverStop())
    assert set(recorder.series("map")) == {114, 228}
    assert set(outcome.summary) >= SCORES | {"train_loss", "validation_loss"}
    assert outcome.summary["train_loss"] < 0.7 * recorder.series("loss")[1]
    assert outcome.summary["map"] > 0.75  # 0.61 by chance


def test_every_score_is_defined():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Scores of wikiqa\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.split("\n") if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == SCORES | {"validation_loss"}


def test_two_workers_score_as_one(run, launch, tmp_path, recorder):
    few = {"length": {"steps": 2}, "model__dropout": 0.0, "optimizer": {"learning_rate": 1e-9}}
    ended = launch([run(tmp_path / "two", parallel={"strategy": "ddp", "workers": 2}, **few)])
    together = ended.results[0]["runs"][0]["summary"]
    alone = train(run(tmp_path / "one", **few), recorder, NeverStop()).summary
    names = (*SCORES, "validation_loss")
    assert [together[name] for name in names] == pytest.approx([alone[name] for name in names], rel=1e-3)
