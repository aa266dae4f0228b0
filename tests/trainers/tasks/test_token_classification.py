"""Tagged texts: layouts, spans, pieces, entity scores by seqeval's rules, every named failure."""

from __future__ import annotations

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainers.checkpoints import predictions
from trainers.config import TaskConfig
from trainers.data import tokenizers
from trainers.data.batches import collate
from trainers.entrypoint import train
from trainers.errors import BadDataError
from trainers.model_kinds.heads import IGNORED
from trainers.models.origin import Preset
from trainers.reporting import NeverStop
from trainers.tasks import base
from trainers.tasks.token_classification.task import (
    EntityCounts,
    EntityScoring,
    entities,
    first_pieces,
    repaired,
    tags_of,
    words_of,
)

TAGS = ("O", "B-a", "I-a", "B-b", "I-b")


@pytest.fixture
def tag(on_folder):
    return partial(on_folder, "token_classification")


def write(folder, rows, part="train"):
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentences(count):
    drawn = random.Random(0)
    rows = []
    for _ in range(count):
        tokens = drawn.choices(["we", "saw", "it", "near", "there", "once"], k=5)
        tags = ["O"] * 5
        place = drawn.randrange(4)
        if drawn.random() < 0.5:
            tokens[place], tags[place] = drawn.choice(["oslo", "rome"]), "B-city"
        else:
            tokens[place : place + 2], tags[place : place + 2] = ["john", "doe"], ["B-person", "I-person"]
        rows.append({"tokens": tokens, "tags": tags})
    return rows


def prepare(config):
    return base.build("token_classification").prepare(config, Preset("tiny"), lambda line: None)


def refused(config, match):
    with pytest.raises(BadDataError, match=match):
        prepare(config)


def test_wnut17_as_published(configure, real_data):
    config = configure(
        task={"name": "token_classification", "path": "wnut17", "max_length": 32, "test": "auto"},
        workspace__data_roots=(str(real_data),),
    )
    data = prepare(config)
    assert len(data.train) > 3300
    assert (len(data.validation), len(data.test)) == (1009, 1287)
    assert data.head.classes[:3] == ("O", "B-corporation", "I-corporation")
    assert len(data.head.classes) == 13


def test_columns_between_spaces_with_comments_and_documents(tag, folder):
    text = "-DOCSTART- -X- O\n\n# id = 1\nJohn NNP I-person\nsleeps VBZ O\n\nOslo NNP B-city\n"
    (folder / "my.train.conll").write_text(text * 12)
    data = prepare(tag())
    assert data.head.classes == ("O", "B-city", "I-city", "B-person", "I-person")


def test_columns_may_be_chosen_by_position(tag, folder):
    (folder / "train.tsv").write_text("1\tOslo\tB-city\t_\n2\tis\tO\t_\n\n" * 12)
    assert prepare(tag(columns={"tokens": 1, "tags": 2})).head.classes == ("O", "B-city", "I-city")


def test_two_files_for_one_part_are_refused(tag, folder):
    for name in ("a.train.conll", "b.train.conll"):
        (folder / name).write_text("Oslo B-city\n\n" * 3)
    refused(tag(), r"a\.train\.conll and b\.train\.conll could both be the train part")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "line 2, field tags: 1 tags for 2 tokens"),
        ({"tokens": [], "tags": []}, "field tokens: empty"),
        ({"tokens": ["a", 3], "tags": ["O", "O"]}, "'3' is a int, not a string"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "field tokens: 'a b' is not a JSON list"),
        (
            {"tokens": ["a"], "tags": ["PER"]},
            "'PER' is not O, B-<label> or I-<label>; convert the tags to BIO",
        ),
        ({"tokens": ["a"], "tags": [3]}, "'3' is not O, .*; set task.labels to the tags in their order"),
        (
            {"text": "ab", "spans": [{"start": 1, "end": 3, "label": "x"}]},
            "x from 1 to 3 is outside the text of 2",
        ),
        (
            {"text": "a b", "spans": [{"start": 1, "end": 2, "label": "x"}]},
            "1 to 2 has no label or holds only",
        ),
        ({"text": "ab", "spans": [[0, 1, "x"]]}, "is not an object with start, end and label"),
        (
            {
                "text": "a b c",
                "spans": [{"start": 0, "end": 3, "label": "x"}, {"start": 2, "end": 5, "label": "y"}],
            },
            "field spans: x up to 3 and y from 2 overlap",
        ),
    ],
)
def test_rows_that_mean_nothing_are_refused(tag, folder, row, match):
    write(folder, [sentences(1)[0], row])
    refused(tag(), match)


def test_a_line_without_a_tag_is_refused(tag, folder):
    (folder / "train.conll").write_text("Oslo\tB-city\nis\n")
    refused(tag(), r"train\.conll, line 2: 1 columns instead of 2")


def test_a_type_that_only_validation_has_is_refused(tag, folder):
    write(folder, sentences(20))
    write(folder, [{"tokens": ["x"], "tags": ["B-art"]}], "validation")
    refused(tag(), "validation: label 'art' is not in the training part")


def test_no_entity_is_nothing_to_learn(tag, folder):
    write(folder, [{"tokens": ["a", str(n)], "tags": ["O", "O"]} for n in range(12)])
    refused(tag(), r"train: no example \(\d+\) has an entity, so there is nothing to learn")


def test_numbers_mean_positions_in_the_listed_tags(tag, folder):
    write(folder, [{"tokens": ["Oslo", str(n)], "tags": [1, 0]} for n in range(12)])
    data = prepare(tag(labels=("O", "B-city", "I-city")))
    assert set(data.train.token_labels.tolist()) == {IGNORED, 0, 1}


def test_a_listed_tag_that_is_no_bio_tag_is_refused():
    with pytest.raises(ValidationError, match="labels lists 'PER', which is not O"):
        TaskConfig(name="token_classification", labels=("O", "PER"))


def test_spans_become_tags_of_words_and_divide_them():
    text = "New York-based Rick's show."
    spans = [(0, 8, "city"), (15, 19, "person")]
    words = words_of(text, spans)
    assert [text[start:end] for start, end in words] == [
        "New",
        "York",
        "-",
        "based",
        "Rick",
        "'",
        "s",
        "show",
        ".",
    ]
    assert tags_of(words, spans)[:5] == ("B-city", "I-city", "O", "O", "B-person")
    inside = [(1, 3, "x")]
    assert [text[start:end] for start, end in words_of(text, inside)][:3] == ["N", "ew", "York"]


@given(st.text(alphabet="ab -.é\n", min_size=1, max_size=20), st.data())
def test_every_span_comes_back_from_its_tags(text, data):
    edges = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    spans = [(start, end, "x") for start, end in pairs if text[start:end].strip()]
    words = words_of(text, spans)
    found = [(words[first][0], words[last - 1][1]) for first, last, _ in entities(tags_of(words, spans))]
    kept = [text[start:end] for start, end in found]
    assert kept == [text[start:end].strip() for start, end, _ in spans]


def test_the_first_piece_of_a_word_has_its_tag(tag, folder, minilm):
    write(folder, [{"tokens": ["Redondo", "\u200d", "is", "x" * 150], "tags": ["B-city", "O", "O", "O"]}] * 4)
    from trainers.models.origin import Folder

    data = base.build("token_classification").prepare(tag(overlap="allow"), Folder(minilm), lambda line: None)
    batch = collate(data.train, np.array([0]), 0, 1)
    tokenizer = tokenizers.load(minilm)
    pieces = [tokenizer.id_to_token(number) for number in batch.input_ids[0].tolist()]
    labels = dict(zip(range(len(pieces)), batch.labels[0].tolist(), strict=True))
    assert pieces[:5] == ["[CLS]", "red", "##ond", "##o", "is"]
    assert [labels[place] for place in range(6)] == [IGNORED, 1, IGNORED, IGNORED, 0, 0]
    assert labels[len(pieces) - 1] == IGNORED  # [SEP]
    assert data.train.columns["seen"][:4].tolist() == [True, False, True, True]


def test_a_piece_that_holds_the_space_before_a_word_belongs_to_the_word():
    assert first_pieces([(0, 3), (4, 6)], [(0, 3), (3, 5), (5, 6)]).tolist() == [0, 1]


def test_words_beyond_the_limit_are_predicted_as_outside(tag, folder):
    write(folder, [{"tokens": [*"abcdefghij", "oslo"], "tags": ["O"] * 10 + ["B-city"]} for _ in range(6)])
    data = prepare(tag(max_length=8, overlap="allow"))
    logits = torch.zeros(1, 8, 3)
    logits[:, :, 1] = 1.0
    batch = collate(data.validation, np.array([0]), 0, 1)
    observed = data.scoring.observe(logits, batch).numpy()
    judged = data.scoring.judge(np.repeat(observed, len(data.validation), 0), {})
    assert judged.predictions[0] == ["B-city"] * 6 + ["O"] * 5
    assert judged.truths[0][-1] == "B-city"


def by_hand(true, predicted):
    """Entities by seqeval's tables of prefixes for IOB2: what may start and what may continue."""

    def of(tags):
        found, open_at = set(), None
        for place, one in enumerate([*tags, "O"]):
            prefix, kind = one[0], one[2:]
            continues = open_at is not None and prefix == "I" and kind == open_at[1]
            if open_at is not None and not continues:
                found.add((open_at[0], place, open_at[1]))
                open_at = None
            if prefix == "B":
                open_at = (place, kind)
        return found

    pairs = [(of(ours), of(theirs)) for ours, theirs in zip(true, predicted, strict=True)]
    hits = sum(len(ours & theirs) for ours, theirs in pairs)
    return hits, sum(len(theirs) for _, theirs in pairs), sum(len(ours) for ours, _ in pairs)


drawn_tags = st.lists(
    st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1, max_size=8),
    min_size=1,
    max_size=6,
)


@given(drawn_tags)
def test_entities_are_those_of_a_reference(pairs):
    true = [[ours for ours, _ in sentence] for sentence in pairs]
    predicted = [[theirs for _, theirs in sentence] for sentence in pairs]
    counts = EntityCounts()
    for ours, theirs in zip(true, predicted, strict=True):
        counts.add(ours, theirs)
    hits, said, right = by_hand(true, predicted)
    scores = counts.scores()
    assert scores["entity_precision"] == pytest.approx(hits / said if said else 0.0)
    assert scores["entity_recall"] == pytest.approx(hits / right if right else 0.0)


def test_scores_that_seqeval_gave():
    """Recorded with seqeval 1.2.2, mode="strict", scheme=IOB2."""
    true = [["B-a", "I-a", "O", "B-b"], ["O", "B-a", "B-a", "I-a"], ["B-b", "I-b", "I-b", "O"]]
    predicted = [["B-a", "I-a", "O", "I-b"], ["O", "B-a", "I-a", "I-a"], ["B-b", "I-b", "O", "B-a"]]
    counts = EntityCounts()
    for ours, theirs in zip(true, predicted, strict=True):
        counts.add(ours, theirs)
    assert {name: round(value, 6) for name, value in counts.scores().items()} == SEQEVAL


SEQEVAL = {
    "entity_f1": 0.222222,
    "entity_precision": 0.25,
    "entity_recall": 0.2,
    "entity_f1_macro": 0.166667,
}


def test_older_tags_are_read_as_entities():
    assert repaired(["I-a", "I-a", "O", "I-b", "I-a", "B-a"]) == ("B-a", "I-a", "O", "B-b", "B-a", "B-a")


def test_shares_of_the_f1_have_it_as_mean():
    tags = np.array([1, 2, 0, 3, 0, 1])
    scoring = EntityScoring(tags, np.array([3, 3]), np.ones(6, dtype=np.bool_), TAGS)
    observed = np.array([[1, 2, 0], [3, 0, 0]], dtype=np.float32)
    judged = scoring.judge(observed, {})
    assert judged.scores.mean() == pytest.approx(scoring.score(observed)["entity_f1"])
    assert judged.labels is not None
    assert (judged.labels.labels, judged.labels.true, judged.labels.hits) == (["a", "b"], [2, 1], [1, 1])


@pytest.mark.slow
def test_tiny_learns_entities(tag, folder, recorder, tmp_path):
    write(folder, sentences(240))
    config = tag(test="auto")
    config = config.model_copy(
        update={
            "length": config.length.model_copy(update={"steps": 60, "epochs": None}),
            "batch": config.batch.model_copy(update={"global_size": 16}),
            "optimizer": config.optimizer.model_copy(update={"learning_rate": 3e-3}),
        }
    )
    summary = train(config, recorder, NeverStop()).summary
    assert summary["entity_f1"] > 0.9
    file = next((tmp_path / "checkpoints").rglob("test.parquet"))
    assert predictions.read_record(file).labels.labels == ["city", "person"]
    kept = list(predictions.read(file))
    assert np.mean([one.score for one in kept]) == pytest.approx(summary["test_entity_f1"])
    assert kept[0].prediction[0][:1] in "OBI"
