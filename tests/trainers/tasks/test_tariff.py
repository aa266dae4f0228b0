"""Customs codes: official files, levels, splits, scores, every named failure."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawing import scaled
from trainers.config import TaskConfig
from trainers.data.selection import held_out_by_text
from trainers.data.sources import open_source
from trainers.entrypoint import train
from trainers.errors import BadDataError
from trainers.models.origin import Preset
from trainers.reporting import NeverStop
from trainers.tasks import base
from trainers.tasks.classification.task import UNSEEN, Labelled
from trainers.tasks.tariff.task import CodeScoring

GOODS = {
    "0101": ("Horses, asses, mules", "horse", "donkey", "mule", "pony"),
    "0102": ("Bovine animals", "cow", "ox", "buffalo", "bull"),
    "0901": ("Coffee", "coffee bean", "espresso", "roast coffee", "decaf coffee"),
    "0902": ("Tea", "green tea", "black tea", "oolong", "tea leaf"),
}
HARMONIZED = (
    "section,hscode,description,parent,level\n"
    'I,01,"Animals; live",TOTAL,2\nI,0101,"Horses, asses",01,4\nI,010121,Horses; pure-bred,0101,6\n'
    "TOTAL,TOTAL,Total of all HS2022 commodities,TOTAL,5\n"
)
US = (
    "HTS Number,Indent,Description,Unit of Quantity\n"
    '"0101","0","Live horses, asses, mules and hinnies:",""\n"","1","Horses:",""\n'
    '"0101.21.00","2","Purebred breeding animals",""\n"0101.21.00.10","3","Males",""\n'
    '"0101.30.00.00","1","Asses",""\n'
)
UK = [
    {
        "commodity_code": "0101210000",
        "description": "Horses for reproduction.",
        "original_description": "",
        "synonyms": ["pedigree horses"],
        "colloquial_terms": "stud horses",
        "known_brands": [],
    }
]
SCORES = {
    "validation_loss", "accuracy", "f1", "precision_macro", "recall_macro", "top5_accuracy", "unseen_pct",
    "accuracy_level_2", "accuracy_level_4",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data" / "codes"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def coded(configure, folder):
    """A configuration on a table of goods, at six digits."""
    with (folder / "train.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "code"])
        for heading, names in GOODS.items():
            for i, name in enumerate(names):
                for manner in ("fresh", "old", "fine"):
                    writer.writerow([f"{manner} {name}", f"{heading}.{10 + i % 2}"])
        writer.writerow(["Animals", "01"])
    return configure(
        task={"name": "tariff", "path": "codes", "max_length": 16},
        workspace__data_roots=(str(folder.parent),),
        workspace__cache=str(folder.parent.parent / "cache"),
    )


def rows(configure, folder, path="codes", level=2):
    config = configure(
        task={"name": "tariff", "path": path, "level": level}, workspace__data_roots=(str(folder.parent),)
    )
    source = open_source(config.task, config.workspace)
    return [(row.fields["text"], row.fields["code"]) for row in source.rows("train")]


def prepare(config):
    lines: list[str] = []
    return base.build("tariff").prepare(config, Preset("tiny"), lines.append), lines


def test_harmonized_system(configure, folder):
    (folder / "anything.csv").write_text(HARMONIZED)
    assert rows(configure, folder) == [
        ("Animals; live", "01"),
        ("Horses, asses", "0101"),
        ("Horses; pure-bred", "010121"),
    ]


def test_a_row_of_the_us_tariff_is_described_by_those_above_it(configure, folder):
    (folder / "htscode.csv").write_text("\ufeff" + US)
    heading = "Live horses, asses, mules and hinnies"
    assert rows(configure, folder, "codes/htscode.csv") == [
        (heading, "0101"),
        (f"{heading}: Horses: Purebred breeding animals", "0101.21.00"),
        (f"{heading}: Horses: Purebred breeding animals: Males", "0101.21.00.10"),
        (f"{heading}: Asses", "0101.30.00.00"),
    ]


def test_every_phrase_of_a_uk_commodity_is_an_example(configure, folder):
    (folder / "uk.json").write_text(json.dumps(UK))
    phrases = ["Horses for reproduction.", "pedigree horses", "stud horses"]
    assert rows(configure, folder) == [(phrase, "0101210000") for phrase in phrases]


def test_byte_order_marks_do_not_hide_official_files(configure, folder):
    (folder / "a.csv").write_text(HARMONIZED, encoding="utf-8-sig")
    (folder / "c.json").write_text(json.dumps(UK), encoding="utf-8-sig")
    assert len(rows(configure, folder)) == 3 + 3


def test_a_long_field_does_not_hide_the_other_files(configure, folder):
    (folder / "a.csv").write_text(HARMONIZED)
    (folder / "b.csv").write_text("x" * 200_000)
    assert len(rows(configure, folder)) == 3


def test_official_files_of_a_folder_are_taken_together(configure, folder):
    (folder / "a.csv").write_text(HARMONIZED)
    (folder / "b.csv").write_text(US)
    (folder / "c.json").write_text(json.dumps(UK))
    (folder / "sections.csv").write_text("section,name\nI,animals\n")
    assert len(rows(configure, folder)) == 3 + 4 + 3


@pytest.mark.parametrize(("level", "classes", "left_out"), [(2, 2, 0), (4, 4, 1), (6, 8, 1)])
def test_codes_are_cut_to_the_level_and_shorter_ones_left_out(coded, level, classes, left_out):
    config = coded.model_copy(update={"task": coded.task.model_copy(update={"level": level})})
    data, lines = prepare(config)
    assert len(data.head.classes) == classes
    assert all(len(code) == level for code in data.head.classes)
    assert len(data.train) + len(data.validation) == 61 - left_out
    said = f"train: {left_out} of 61 rows left out: the code has fewer digits than task.level"
    assert (said in lines) == bool(left_out)
    assert (said in prepare(config)[1]) == bool(left_out)  # also when it comes from the cache


def test_no_code_as_long_as_the_level_is_refused(coded):
    config = coded.model_copy(update={"task": coded.task.model_copy(update={"level": 10})})
    with pytest.raises(BadDataError, match="no row of the train part is usable: the code has fewer digits"):
        prepare(config)


def table_of(folder, name, codes):
    rows = "".join(f"fine good {i},{code}\n" for i, code in enumerate(codes))
    (folder / name).write_text("text,code\n" + rows)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"train.csv": ["010121"] * 9},
            r"train: all examples \(8\) have code 010121 at level 6, .* raise task\.level or add rows of",
        ),
        (
            {"train.csv": ["010121", "020230"] * 4, "validation.csv": ["010129", "020220"]},
            r"validation: no code of 2 examples is in the training part, .* put the same codes into",
        ),
        (
            {"train.csv": [f"0101{i}" for i in range(21, 29)]},
            r"no label with two texts: too few .*; lower task\.level or add examples",
        ),
    ],
)
def test_codes_that_cannot_be_learned_are_refused(coded, folder, parts, message):
    for name, codes in parts.items():
        table_of(folder, name, codes)
    with pytest.raises(BadDataError, match=message):
        prepare(coded)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", "text,code\nhorse,1x\n", r"line 2, field code: '1x' is not a customs code; write 2, 4"),
        ("train.csv", "text,code\nhorse,101\n", r"field code: '101' is not a customs code; .* leading zero"),
        ("train.csv", "text,code\nhorse,010121000010\n", r"is not a customs code"),
        ("train.csv", "text,code\n ,0101\n", r"train\.csv, line 2, field text: empty"),
        ("train.csv", "words,code\nhorse,0101\n", r"field text: missing \(found: words, code\)"),
        ("train.csv", "text,number\nhorse,0101\n", r"field code: missing \(found: text, number\)"),
        ("train.csv", "text,code\nhorse\n", r"train\.csv, line 2: 1 fields, but the header has 2"),
        ("train.jsonl", '{"text": "horse", "code": 101}\n', r"field code: 101 is a number; .* leading zeros"),
        ("a.csv", US.replace('"1","Asses"', '"x","Asses"'), r"line 6, field Indent: 'x' is not a whole"),
        ("a.csv", US.replace("Asses", ""), r"a\.csv, line 6, field Description: empty"),
        ("a.csv", HARMONIZED.replace("Horses; pure-bred", ""), r"a\.csv, line 4, field description: empty"),
        ("a.csv", HARMONIZED.replace(",0101,", ",01O1,"), r"line 3, field code: '01O1' is not a customs"),
        ("a.json", "[{]", r"a\.json, line 1, column 3: not a JSON list of commodities"),
        ("a.json", f"[{'9' * 5000}]", r"a\.json: cannot be read \(Exceeds the limit"),
        ("a.json", "[7]", r"a\.json, item 1: a JSON int, not an object"),
        ("a.json", '[{"commodity_code": "01"}]', r"item 1, field description: missing"),
        ("a.json", '[{"description": "x"}]', r"item 1, field commodity_code: missing"),
        (
            "a.json",
            '[{"commodity_code": "01", "description": "x", "synonyms": 7}]',
            r"a\.json, item 1, field synonyms: a int, not a list of texts",
        ),
        (
            "a.json",
            '[{"commodity_code": "01", "description": "x", "synonyms": [7]}]',
            r"a\.json, item 1, field synonyms: a int, not a string",
        ),
        ("notes.csv", "a,b\n1,2\n", "no dataset found"),
    ],
)  # fmt: skip
def test_malformed_files_are_named(configure, folder, recorder, name, content, message):
    (folder / name).write_text(content)
    config = configure(
        task={"name": "tariff", "path": "codes", "level": 2},
        workspace__data_roots=(str(folder.parent),),
        workspace__cache=str(folder.parent.parent / "cache"),
    )
    with pytest.raises(BadDataError, match=message):
        train(config, recorder, NeverStop())


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match="level"):
        TaskConfig(name="tariff", level=5)


def test_there_is_no_dataset_on_the_hub(configure, recorder):
    with pytest.raises(BadDataError, match=r"task tariff has no dataset on the hub; set task\.path"):
        train(configure(task={"name": "tariff"}), recorder, NeverStop())


texts_and_labels = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=2, max_size=120)


@settings(max_examples=scaled(200))
@given(texts_and_labels, st.floats(0.01, 0.9), st.integers(0, 100))
def test_no_text_is_in_both_parts_and_every_first_label_is_trained_on(pairs, fraction, seed):
    texts, labels = (np.array(column) for column in zip(*pairs, strict=True))
    first = dict(reversed(pairs))
    if len(set(first.values())) == len(first):
        with pytest.raises(BadDataError, match="no label with two texts"):
            held_out_by_text(texts, labels, fraction, seed)
        return
    train_rows, validation_rows = held_out_by_text(texts, labels, fraction, seed)
    assert sorted([*train_rows, *validation_rows]) == list(range(len(pairs)))
    assert not set(texts[train_rows]) & set(texts[validation_rows])
    assert {first[text] for text in texts[train_rows]} == set(first.values())


def test_the_held_out_part_is_balanced():
    labels = np.repeat(np.arange(50), np.arange(4, 54))
    _, validation_rows = held_out_by_text(np.arange(len(labels)), labels, 0.2, 0)
    assert len(validation_rows) == round(0.2 * len(labels))
    share = np.bincount(labels[validation_rows], minlength=50) / np.arange(4, 54)
    assert share[5:].min() > 0
    assert share[20:].max() < 0.3


def phrase(text: str, code: str) -> Labelled:
    return Labelled((text,), int(code), (code,))


def test_codes_that_training_lacks_count_as_wrong():
    phrases = {
        "train": [phrase("a", "0101"), phrase("b", "0102"), phrase("c", "0901")],
        "validation": [phrase("d", "0102"), phrase("e", "0103")],
    }
    tariff, config = base.build("tariff"), TaskConfig(name="tariff", level=4)
    chosen = tariff.draw(phrases, config)
    assert tariff.head(phrases, chosen, config).classes == ("0101", "0102", "0901")
    scores = CodeScoring(np.array([102, 103]), [101, 102, 901], 4).score(
        np.array([[1, 0, 2, 0.6, 0.3, 0.1], [1, 0, 2, 0.5, 0.3, 0.2]], dtype=np.float32)
    )
    assert scores["accuracy"] == 0.5
    assert scores["accuracy_level_2"] == 1.0
    assert scores["unseen_pct"] == 50.0
    assert scores["recall_macro"] == 0.5  # of 0102 and 0103, which occur
    assert scores["top5_accuracy"] == 0.5


def test_loss_of_an_unseen_code_is_that_of_knowing_nothing():
    class Two:
        labels, weights = torch.tensor([0, UNSEEN]), None

    loss = base.build("tariff").loss(torch.tensor([[100.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 0.0]]), Two())
    assert float(loss) == pytest.approx(np.log(4))


@settings(max_examples=scaled(50))
@given(st.integers(0, 2**32 - 1))
def test_scores_are_those_of_a_plain_count(seed):
    rng = np.random.default_rng(seed)
    codes = np.unique(rng.integers(10_000, 30_000, 12))
    right = rng.choice(codes, 30)
    logits = torch.from_numpy(rng.normal(size=(30, len(codes))))
    scoring = CodeScoring(right, codes.tolist(), 6)
    scores = scoring.score(scoring.observe(logits, None).numpy())
    order = np.argsort(-logits.numpy(), axis=1)
    assert scores["accuracy"] == np.mean(codes[order[:, 0]] == right)
    assert scores["top5_accuracy"] == np.mean([r in codes[o[:5]] for r, o in zip(right, order, strict=True)])
    for level in (2, 4):
        cut = 10 ** (6 - level)
        assert scores[f"accuracy_level_{level}"] == np.mean(codes[order[:, 0]] // cut == right // cut)


@pytest.mark.slow
def test_tiny_learns_the_goods(coded, recorder):
    config = coded.model_copy(
        update={
            "task": coded.task.model_copy(update={"validation_fraction": 0.3}),
            "length": coded.length.model_copy(update={"steps": None, "epochs": 30}),
        }
    )
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary.keys() >= SCORES
    assert outcome.summary["accuracy_level_2"] > 0.8
    assert outcome.summary["top5_accuracy"] >= outcome.summary["accuracy"] > 0.4
    assert outcome.summary["unseen_pct"] == 0.0


def test_published_files_are_read_whole(configure, real_data):
    config = configure(
        task={"name": "tariff", "path": "tariff", "level": 6, "max_length": 16},
        workspace__data_roots=(str(real_data),),
    )
    source = open_source(config.task, config.workspace)
    phrases = [base.build("tariff").example(row, config.task) for row in source.rows("train")]
    assert len(phrases) == 59_079
    assert len({one.labels for one in phrases if one}) > 5_600


def test_every_score_is_defined():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Scores of tariff\n")[1].split("\n## ")[0]
    first_cells = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", first_cells)) == SCORES | {"accuracy_level_6", "accuracy_level_8"}
