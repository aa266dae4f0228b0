"""Questions about texts: formats, windows, spans, answers, and a run."""

from __future__ import annotations

import csv
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tests.trainers.corpora import write_squad
from trainers.config import TaskConfig
from trainers.data import tokenizers
from trainers.data.batches import collate
from trainers.data.formats import Row
from trainers.data.tokens import TokenSet
from trainers.entrypoint import train
from trainers.errors import BadDataError
from trainers.models.origin import Folder, Preset
from trainers.reporting import NeverStop
from trainers.tasks import base
from trainers.tasks.squad_v2.scoring import N_BEST, answers, best_spans, merge_windows
from trainers.tasks.squad_v2.task import windows

CONTEXT = "Tea grows in Assam. Café Müller opened in 1978 in Wuppertal."
ROWS = [
    ("q1", "Where does tea grow?", [("Assam", 13)]),
    ("q2", "What opened?", [("Café Müller", 20), ("Müller", 25)]),
    ("q3", "Who closed it?", []),
]
SCORES = {
    "exact_match", "f1", "exact_match_has_answer", "f1_has_answer", "f1_best_span", "exact_match_no_answer",
    "null_threshold",
}  # fmt: skip


def hub_rows(rows=ROWS, context=CONTEXT, **more):
    return [
        {
            "id": number,
            "question": question,
            "context": context,
            "answers": {
                "text": [text for text, _ in found],
                "answer_start": [start for _, start in found],
            },
            **more,
        }
        for number, question, found in rows
    ]


def official_tree(rows=ROWS, context=CONTEXT):
    questions = [
        {
            "id": number,
            "question": question,
            "answers": [{"text": text, "answer_start": start} for text, start in found],
            "is_impossible": not found,
        }
        for number, question, found in rows
    ]
    return {
        "version": "v2.0",
        "data": [{"title": "Tea", "paragraphs": [{"context": context, "qas": questions}]}],
    }


def lines_of(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.fixture
def squad(configure, tmp_path):
    """Prepare a dataset in a folder; `squad.folder` is where its files go."""
    folder = tmp_path / "data" / "set"
    folder.mkdir(parents=True)

    def prepare(origin=None, path="set", report=lambda line: None, **task):
        config = configure(
            task={"name": "squad_v2", "path": path, "max_length": 48, **task},
            workspace__data_roots=(str(tmp_path / "data"),),
            workspace__cache=str(tmp_path / "cache"),
        )
        return base.build("squad_v2").prepare(config, origin or Preset("tiny"), report)

    prepare.folder = folder
    return prepare


def write_both(folder, name, text):
    for part in ("train", "dev"):
        (folder / name.format(part)).write_text(text, encoding="utf-8")


def gold_answers(prepared):
    """The characters that the labels of the validation part's windows stand for."""
    data, contexts = prepared.validation, prepared.scoring._questions.contexts
    found = {}
    for i, (first, last) in enumerate(data.labels):
        if first:
            at, chars = data.columns["chars_at"][i], data.columns["chars"]
            question = int(data.columns["question"][i])
            found[question] = contexts[question][chars[at + first, 0] : chars[at + last, 1]]
    return found


# Formats


def as_official(folder):
    write_both(folder, "{}-v2.0.json", json.dumps(official_tree()))


def as_official_under_plain_names(folder):
    write_both(folder, "{}.json", json.dumps(official_tree(), indent=1))


def as_json_lines(folder):
    write_both(folder, "{}.jsonl", lines_of(hub_rows()))


def as_csv(folder):
    for part in ("train", "dev"):
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, ["id", "question", "context", "answers"])
            writer.writeheader()
            writer.writerows({**row, "answers": json.dumps(row["answers"])} for row in hub_rows())


def as_parquet(folder):
    for part in ("train", "validation"):
        parquet.write_table(pyarrow.Table.from_pylist(hub_rows(title="Tea")), folder / f"{part}.parquet")


@pytest.mark.parametrize(
    "write", [as_official, as_official_under_plain_names, as_json_lines, as_csv, as_parquet]
)
def test_every_format_gives_the_same_answers(squad, write):
    write(squad.folder)
    prepared = squad()
    assert gold_answers(prepared) == {0: "Assam", 1: "Café Müller"}
    assert [gold.has_answer for gold in prepared.scoring._questions.golds] == [True, True, False]


def test_one_official_file_holds_out_whole_articles(squad, tmp_path):
    trees = [official_tree([(f"{i}-{n}", q, a) for n, q, a in ROWS], CONTEXT + f" {i}") for i in range(5)]
    for i, tree in enumerate(trees):
        tree["data"][0]["title"] = f"Tea {i // 2}"
    articles = [article for tree in trees for article in tree["data"]]
    (squad.folder / "mine-v1.json").write_text(json.dumps({"data": articles}), encoding="utf-8")
    prepared = squad(path="set/mine-v1.json", validation_fraction=0.3)
    held = set(prepared.scoring._questions.contexts)
    assert held in ({CONTEXT + " 4"}, {CONTEXT + " 0", CONTEXT + " 1"}, {CONTEXT + " 2", CONTEXT + " 3"})
    assert len(prepared.train) == 15 - 3 * len(held)


def test_contexts_are_held_out_whole_where_articles_have_no_names(squad):
    rows = [
        row for i in range(6) for row in hub_rows([(f"{i}-{n}", q, a) for n, q, a in ROWS], CONTEXT + f" {i}")
    ]
    (squad.folder / "train.jsonl").write_text(lines_of(rows), encoding="utf-8")
    prepared = squad(validation_fraction=0.4)
    contexts = prepared.scoring._questions.contexts
    assert (len(set(contexts)), len(contexts)) == (2, 6)


def test_a_context_that_two_articles_share_keeps_them_together(squad):
    shared = [hub_rows([(f"{title}", "Where?", [])], title=title)[0] for title in ("A", "B")]
    other = [
        hub_rows([(f"C{i}", "Where?", [])], context=f"{title} is here.", title=title)[0]
        for i, title in enumerate(("A", "B", "C"))
    ]
    (squad.folder / "train.jsonl").write_text(lines_of(shared + other), encoding="utf-8")
    prepared = squad()
    assert prepared.scoring._questions.contexts == ["C is here."]


def test_sizes_count_questions_and_balance_answers(squad):
    write_squad(squad.folder, train=20, dev=20, seed=0)
    prepared = squad(train_examples=20, validation_examples=10, max_length=16, stride=3)
    has_answer = [gold.has_answer for gold in prepared.scoring._questions.golds]
    assert (sum(has_answer), len(has_answer)) == (5, 10)
    questions = prepared.train.columns["question"]
    assert len(prepared.train) > 20
    assert np.array_equal(np.unique(questions), np.arange(20))


def test_a_vocabulary_is_trained_on_questions_and_contexts(squad):
    as_official(squad.folder)
    tokenizer = tokenizers.load(squad().tokenizer.parent)
    tokens = tokenizer.encode("Tea in Wuppertal").tokens
    assert "tea" in tokens
    assert "[UNK]" not in tokens


def test_second_start_reads_nothing(squad, monkeypatch):
    as_official(squad.folder)
    first = squad()
    monkeypatch.setattr("trainers.tasks.squad_v2.read_squad", lambda path: pytest.fail(f"reads {path}"))
    second = squad()
    assert second.identity == first.identity
    assert isinstance(second.validation.columns["chars"], np.memmap)
    assert squad.folder.is_dir()


def test_stride_is_part_of_the_identity(squad):
    as_official(squad.folder)
    plain, narrow = squad(), squad(stride=4)
    assert (plain.identity["stride"], narrow.identity["stride"]) == (16, 4)


# Bad input


def refusal(squad, **task):
    with pytest.raises(BadDataError) as caught:
        squad(**task)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": None}, "line 2, field id: missing (found: id, question, context, answers)"),
        ({"id": " "}, "line 2, field id: empty; give every question a unique id"),
        ({"id": "q1"}, "line 2, question q1, field id: already used"),
        ({"question": ""}, "line 2, question q2, field question: empty"),
        ({"question": 7}, "line 2, question q2, field question: a int, not a string"),
        ({"context": " "}, "line 2, question q2, field context: empty"),
        ({"answers": None}, "line 2, question q2, field answers: missing or malformed"),
        ({"answers": "{text"}, "line 2, question q2, field answers: not JSON"),
        ({"answers": "[" * 100_000}, "line 2, question q2, field answers: not JSON (maximum recursion"),
        ({"answers": ["Assam"]}, "line 2, question q2, field answers: missing or malformed"),
        (
            {"answers": {"text": ["Assam"], "answer_start": []}},
            "line 2, question q2, field answers: text and answer_start are not two lists of the same length",
        ),
        (
            {"answers": {"text": ["Assam"], "answer_start": ["13"]}},
            "line 2, question q2, field answers: answer_start '13' of 'Assam' is not a whole number",
        ),
        ({"answers": {"text": [""], "answer_start": [0]}}, "field answers: '' is not the text of an answer"),
        (
            {"answers": {"text": ["Assam"], "answer_start": [12]}},
            "question q2, field answers: 'Assam' is not at character 12 of the context "
            "(it occurs at 13)",
        ),
        (
            {"answers": {"text": ["Assam"], "answer_start": [-5]}},
            "question q2, field answers: 'Assam' is not at character -5",
        ),
        (
            {"answers": {"text": ["Ceylon"], "answer_start": [13]}},
            "question q2, field answers: 'Ceylon' is not at character 13 of the context "
            "(it does not occur)",
        ),
        ({"is_impossible": True}, "question q2, field is_impossible: true, but the question has 2 answers"),
        (
            {"is_impossible": False, "answers": {"text": [], "answer_start": []}},
            "question q2, field is_impossible: false, but the question has 0 answers",
        ),
        (
            {"question": "why " * 60},
            "line 2, question q2, field question: 60 tokens leave no room for the context in 48",
        ),
        ({"context": "\u200b\u0301", "answers": {"text": [], "answer_start": []}}, "context: no tokens"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(squad, change, message):
    rows = hub_rows()
    rows[1] = {**rows[1], **change}
    write_both(squad.folder, "{}.jsonl", lines_of(rows))
    assert message in refusal(squad)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": "v2.0",\n "data": [}', "train-v2.0.json, line 2, column 11: not JSON"),
        ('{"data": 3}', "train-v2.0.json, field data: not a list; expected the official SQuAD format"),
        ('{"data": [3]}', "train-v2.0.json, data[0]: a JSON int, not an object"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "data[0].paragraphs[0], field qas: not a list"),
        (
            '{"data": [{"paragraphs": [{"context": "x", "qas": [{"question": "y"}]}]}]}',
            "data[0].paragraphs[0].qas[0], field id: missing",
        ),
        (
            '{"data": [{"paragraphs": [{"qas": [{"id": "7", "question": "y"}]}]}]}',
            "data[0].paragraphs[0].qas[0], question 7, field context: missing",
        ),
        ('{"data": []}', "set: the train part has no rows"),
        ("[" * 100_000, "train-v2.0.json: nested too deeply"),
        (f'{{"data": {"9" * 5000}}}', "train-v2.0.json: cannot be read (Exceeds the limit"),
    ],
)
def test_bad_official_files_are_named(squad, text, message):
    (squad.folder / "train-v2.0.json").write_text(text, encoding="utf-8")
    assert message in refusal(squad)


def test_bytes_that_are_not_utf8_are_named(squad):
    text = json.dumps(official_tree(), ensure_ascii=False, indent=0)
    (squad.folder / "train-v2.0.json").write_bytes(text.encode("latin-1"))
    assert "byte 0xe9 is not UTF-8" in refusal(squad)


@pytest.mark.parametrize("name", ["{}-v2.0.json", "{}.json"])
def test_a_byte_order_mark_is_skipped(squad, name):
    write_both(squad.folder, name, "\ufeff" + json.dumps(official_tree()))
    assert gold_answers(squad()) == {0: "Assam", 1: "Café Müller"}


def test_questions_without_any_answer_are_said(squad):
    rows = [{**row, "answers": {"text": [], "answer_start": []}} for row in hub_rows()]
    (squad.folder / "train.jsonl").write_text(lines_of(rows))
    (squad.folder / "validation.jsonl").write_text(lines_of(hub_rows()))
    lines = []
    squad(report=lines.append)
    assert f"train: of {len(rows)} questions none has an answer" in lines
    assert not any(line.startswith("validation") for line in lines)


def test_two_files_for_one_part_are_refused(squad):
    write_both(squad.folder, "{}-v2.0.json", json.dumps(official_tree()))
    write_both(squad.folder, "{}-v1.1.json", json.dumps(official_tree()))
    assert "train-v1.1.json, train-v2.0.json could each be the train part" in refusal(squad)


def test_a_stride_of_more_than_half_a_window_is_refused():
    with pytest.raises(ValueError, match=r"stride 65 is more than half of max_length 128; lower"):
        TaskConfig(name="squad_v2", max_length=128, stride=65)


# Windows


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_windows_cover_everything_and_share_what_was_asked_for(length, room, data):
    overlap = data.draw(st.integers(0, room // 2))
    found = list(windows(length, room, overlap))
    assert found[0][0] == 0
    assert found[-1][1] == length
    assert all(end - start <= room for start, end in found)
    assert all(before[1] - after[0] == overlap for before, after in itertools.pairwise(found))


def test_windows_are_the_librarys(squad, minilm):
    as_official(squad.folder)
    prepared = squad(Folder(minilm), max_length=16, stride=3)
    data = prepared.validation
    tokenizer = tokenizers.load(minilm)
    tokenizer.no_padding()
    tokenizer.enable_truncation(16, stride=3, strategy="only_second")
    place = 0
    for _, question, _ in ROWS:
        encoded = tokenizer.encode(question, CONTEXT)
        for one in (encoded, *encoded.overflowing):
            start, end = data.offsets[place : place + 2]
            assert data.tokens[start:end].tolist() == one.ids
            assert data.second_at[place] == one.type_ids.index(1)
            place += 1
    assert place == len(data)


def test_an_answer_is_labelled_only_where_it_is_whole(squad, minilm):
    as_official(squad.folder)
    data = squad(Folder(minilm), max_length=16, stride=3).validation
    tokenizer = tokenizers.load(minilm)
    windows_of = {}
    for i, (first, last) in enumerate(data.labels):
        tokens = data.tokens[data.offsets[i] : data.offsets[i + 1]]
        text = tokenizer.decode([int(token) for token in tokens[first : last + 1]]) if first else ""
        windows_of.setdefault(int(data.columns["question"][i]), []).append(text)
    assert all(set(found) <= {"", ["assam", "cafe muller", ""][q]} for q, found in windows_of.items())
    assert [max(found) for found in windows_of.values()] == ["assam", "cafe muller", ""]
    assert "" in windows_of[0]


def test_an_answer_inside_a_word_is_the_whole_word():
    row = Row(hub_rows([("q", "When?", [("97", 43)])])[0], "here")
    question = base.build("squad_v2").example(row, TaskConfig(name="squad_v2"))
    assert (question.answers[0].text, question.where) == ("97", "here, question q")


@pytest.mark.slow
def test_real_answers_are_found_in_their_windows(squad, minilm, real_data, configure):
    config = configure(
        task={"name": "squad_v2", "path": "squad_v2", "max_length": 192}
        | {"train_examples": 10, "validation_examples": 400},
        workspace__data_roots=(str(real_data),),
    )
    prepared = base.build("squad_v2").prepare(config, Folder(minilm), lambda line: None)
    golds, found = prepared.scoring._questions.golds, gold_answers(prepared)
    exact = [golds[question].exact(text) for question, text in found.items()]
    assert len(exact) == sum(gold.has_answer for gold in golds) == 200
    assert sum(exact) >= 198  # an answer may begin inside a word


# Spans


def batch_of(lengths, second_at):
    data = TokenSet(
        np.ones(sum(lengths), dtype=np.int64),
        np.concatenate(([0], np.cumsum(lengths))),
        np.zeros((len(lengths), 2), dtype=np.int64),
        np.array(second_at),
    )
    return collate(data, np.arange(len(lengths)), 0, 1)


def naive_spans(logits, length, second_at, max_tokens):
    """All spans of the context, best first."""
    found = [
        (float(logits[start, 0] + logits[end, 1]), start, end)
        for start in range(second_at, length - 1)
        for end in range(start, min(start + max_tokens, length - 1))
    ]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("max_tokens", [1, 3, 30])
def test_best_spans_are_those_of_trying_all(max_tokens):
    lengths, second_at = [12, 9, 20, 5], [4, 3, 7, 3]
    batch = batch_of(lengths, second_at)
    logits = torch.randn(4, 20, 2, generator=torch.Generator().manual_seed(0))
    found = best_spans(logits, batch, max_tokens)
    assert found.shape == (4, 1 + 3 * N_BEST)
    assert torch.equal(found[:, 0], logits[:, 0].sum(-1))
    for row, length, second, window in zip(found, lengths, second_at, logits, strict=True):
        scores, starts, ends = row[1:].split(N_BEST)
        expected = naive_spans(window, length, second, max_tokens)[:N_BEST]
        assert scores[: len(expected)].tolist() == pytest.approx([score for score, _, _ in expected])
        assert [(int(s), int(e)) for s, e in zip(starts, ends, strict=True)][: len(expected)] == [
            (start, end) for _, start, end in expected
        ]
        assert torch.isneginf(scores[len(expected) :]).all()


def test_loss_is_the_mean_of_both_ends_and_padding_cannot_win():
    batch = batch_of([6, 4], [2, 2])
    batch.labels[:] = torch.tensor([[3, 4], [0, 0]])
    logits = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = base.build("squad_v2").loss(logits, batch)
    expected = sum(
        -torch.log_softmax(logits[i, :length, end], 0)[batch.labels[i, end]] / 2
        for i, length in enumerate((6, 4))
        for end in (0, 1)
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(logits.grad[1, 4:], torch.zeros(2, 2))


def test_loss_is_torchs_over_positions():
    batch = batch_of([4, 6], [2, 3])
    logits = torch.randn(2, batch.input_ids.shape[1], 2)
    masked = logits.masked_fill(~batch.attention_mask[:, :, None], -torch.inf)
    expected = torch.nn.functional.cross_entropy(masked, batch.labels, reduction="sum") / 2
    torch.testing.assert_close(base.build("squad_v2").loss(logits, batch), expected)


# Answers


def observed(rows):
    """(N, K) from a null score and some spans per window."""
    found = np.full((len(rows), 1 + 3 * N_BEST), -np.inf, dtype=np.float32)
    for row, (null, spans) in zip(found, rows, strict=True):
        row[0] = null
        row[1 + N_BEST :] = 0.0
        for i, (score, start, end) in enumerate(spans):
            row[[1 + i, 1 + N_BEST + i, 1 + 2 * N_BEST + i]] = score, start, end
    return found


def part_of(of_question, chars_at, words):
    chars, at = [], 0
    for word in words:
        chars.append((at, at + len(word)))
        at += len(word) + 1
    columns = {
        "question": np.array(of_question),
        "chars_at": np.array(chars_at),
        "chars": np.array(chars, dtype=np.int32),
    }
    none = np.zeros(len(of_question) + 1, dtype=np.int64)
    return TokenSet(none[:0], none, np.zeros((len(of_question), 2)), None, columns)


def test_windows_of_a_question_compete_and_the_lowest_null_score_counts():
    words = ["the", "red", "fox", "ran"]
    # Context tokens stand at 3 in each window; the second window begins at the third word.
    data = part_of([0, 0, 1], [-3, -1, -3], words)
    merged = merge_windows(
        observed([(4.0, [(2.0, 4, 4), (1.0, 4, 5)]), (3.0, [(5.0, 3, 4)]), (-9.0, [(0.5, 3, 5)])]), data
    )
    context = " ".join(words)
    ranked = [context[b:e] for b, e in zip(merged.begin[:3], merged.end[:3], strict=True)]
    assert ranked == ["fox ran", "red", "red fox"]
    texts, nulls = answers(merged, [context, context])
    assert texts == ["fox ran", "the red fox"]
    assert nulls == pytest.approx(1 / (1 + np.exp([2.0, 9.5])))


def test_articles_alone_do_not_answer():
    data = part_of([0], [-3], ["the", "fox"])
    texts, nulls = answers(merge_windows(observed([(0.0, [(5.0, 3, 3), (1.0, 4, 4)])]), data), ["the fox"])
    assert (texts, nulls.tolist()) == (["fox"], [pytest.approx(1 / (1 + np.e))])


def test_numbers_that_are_not_finite_answer_nothing():
    data = part_of([0], [-3], ["fox"])
    rows = observed([(np.nan, [(np.nan, 3, 3)])])
    assert answers(merge_windows(rows, data), ["fox"]) == ([""], [1.0])


def test_perfect_spans_have_perfect_scores(squad):
    write_squad(squad.folder, train=20, dev=12, seed=0)
    prepared = squad(max_length=16, stride=4)
    assert len(prepared.validation) > 36
    rows = [
        (0.0, [(9.0, int(first), int(last))]) if first else (5.0, [(1.0, 5, 5)])
        for first, last in prepared.validation.labels
    ]
    scores = prepared.scoring.score(observed(rows))
    assert scores.pop("null_threshold") < 0.5
    assert scores == dict.fromkeys(scores, 1.0)


def test_spans_are_scored_apart_from_whether_there_is_an_answer(squad):
    write_squad(squad.folder, train=20, dev=12, seed=0)
    prepared = squad(max_length=16, stride=4)
    # Right spans for the questions of every other window, and no way to tell where there is an answer:
    # it is best to answer nothing then.
    rows = [
        (9.0, [(1.0, int(first), int(last)) if first and i % 2 else (1.0, 5, 5)])
        for i, (first, last) in enumerate(prepared.validation.labels)
    ]
    scores = prepared.scoring.score(observed(rows))
    assert scores["f1_has_answer"] == 0.0
    assert scores["f1_best_span"] > 0.2


# Runs


@pytest.fixture(scope="module")
def run(config_in, tmp_path_factory):
    """Make the configuration of a run on a small corpus that all runs of this module share."""
    folder = tmp_path_factory.mktemp("squad")
    write_squad(folder / "data" / "set", train=150, dev=30, seed=0)

    def make(checkpoints, **changes):
        return config_in(
            checkpoints,
            task={"name": "squad_v2", "path": "set", "max_length": 20, "stride": 4},
            workspace__data_roots=(str(folder / "data"),),
            **changes,
        )

    return make


@pytest.mark.slow
def test_tiny_learns_to_answer_and_when_not_to(run, tmp_path, recorder):
    config = run(tmp_path, length={"epochs": 12}, batch={"global_size": 16}, evaluation__every_epochs=4)
    outcome = train(config, recorder, NeverStop())
    assert set(recorder.series("f1")) == {116, 232, 348}
    assert set(outcome.summary) >= SCORES | {"train_loss", "validation_loss"}
    assert outcome.summary["train_loss"] < 0.5 * recorder.series("loss")[1]
    assert outcome.summary["f1"] > 0.8
    assert recorder.facts["data"]["stride"] == 4


def test_every_score_is_defined():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Scores of squad_v2\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.split("\n") if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == SCORES | {"validation_loss"}


@pytest.mark.slow
def test_two_workers_score_as_one(run, launch, tmp_path, recorder):
    few = {"length": {"steps": 2}, "model__dropout": 0.0, "optimizer": {"learning_rate": 1e-9}}
    ended = launch([run(tmp_path / "two", parallel={"strategy": "ddp", "workers": 2}, **few)])
    together = ended.results[0]["runs"][0]["summary"]
    alone = train(run(tmp_path / "one", **few), recorder, NeverStop()).summary
    names = (*SCORES, "validation_loss")
    assert [together[name] for name in names] == pytest.approx([alone[name] for name in names], rel=1e-3)
