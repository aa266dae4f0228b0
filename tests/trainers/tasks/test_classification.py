"""Any labelled texts: columns, labels, pairs, several labels, scores, every named failure."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn import metrics
from sklearn.utils.class_weight import compute_sample_weight

from trainers.checkpoints import predictions
from trainers.checkpoints.predictions import LabelCounts
from trainers.config import TaskConfig
from trainers.data.batches import collate
from trainers.distillation.losses import soft_labels
from trainers.entrypoint import train
from trainers.errors import BadDataError, BadSpecError
from trainers.models.origin import Preset
from trainers.reporting import NeverStop
from trainers.tasks import base
from trainers.tasks.classification.task import SeveralLabelsScoring
from trainers.tasks.scores import calibration_error, matthews

WORDS = {"sports": "ball goal team", "science": "atom cell star", "business": "bank share profit"}


@pytest.fixture
def classify(on_folder):
    return partial(on_folder, "classification")


def write(folder, part, rows):
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def topics(count, **names):
    text, label = names.get("text", "text"), names.get("label", "label")
    rows = []
    for number in range(count):
        name = list(WORDS)[number % 3]
        words = WORDS[name].split()
        rows.append({label: name, text: f"{words[number % 3]} {words[(number // 3) % 3]} number {number}"})
    return rows


def prepare(config):
    lines: list[str] = []
    return base.build("classification").prepare(config, Preset("tiny"), lines.append), lines


def refused(config, match):
    with pytest.raises(BadDataError, match=match):
        prepare(config)


def test_sst2_as_published(classify, folder):
    write(
        folder,
        "train",
        [{"label": n % 2, "sentence": f"a film {n} {'good' if n % 2 else 'bad'}"} for n in range(40)],
    )
    data, _ = prepare(classify(columns={"text": "sentence"}))
    assert data.head.classes == ("0", "1")


def test_without_columns_the_error_says_what_to_set(classify, folder):
    write(folder, "train", [{"label": 1, "sentence": "good"}, {"label": 0, "sentence": "bad"}])
    refused(
        classify(), r"field text: missing \(found: label, sentence\); set task.columns.text to one of these"
    )


def test_a_column_that_does_not_exist_is_named(classify, folder):
    write(folder, "train", topics(6))
    refused(
        classify(columns={"text": "sentence"}),
        r"line 1: no column 'sentence', which task.columns.text names \(found: label, text\)",
    )


def test_errors_name_the_columns_of_the_file(classify, folder):
    write(folder, "train", [{"label": "a", "sentence": "x"}, {"label": "b", "sentence": ""}])
    refused(classify(columns={"text": "sentence"}), "line 2, field sentence: empty")


def test_files_without_a_header_are_read_by_position(classify, folder):
    lines = [f'"{n % 4 + 1}","title {n}","body of {n}"' for n in range(40)]
    (folder / "train.csv").write_text("\n".join(lines))
    data, _ = prepare(classify(columns={"label": 0, "text": 1, "text_pair": 2}))
    assert data.head.classes == ("1", "2", "3", "4")
    assert data.train.second_at is not None


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"txt": "sentence"}, "columns names the field 'txt', which task classification does not read"),
        ({"text": 0, "label": "y"}, "columns mixes names and positions"),
    ],
)
def test_columns_that_mean_nothing_are_refused(columns, match):
    with pytest.raises(ValidationError, match=match):
        TaskConfig(name="classification", columns=columns)


def test_labels_that_are_listed_are_numbered_in_that_order(classify, folder):
    write(folder, "train", topics(30))
    data, _ = prepare(classify(labels=("science", "sports", "business")))
    assert data.head.classes == ("science", "sports", "business")


def test_numbers_mean_positions_in_the_listed_labels(classify, folder):
    write(folder, "train", [{"text": f"t {n} {n % 3}", "label": n % 3} for n in range(30)])
    data, _ = prepare(classify(labels=("low", "middle", "high")))
    assert data.head.classes == ("low", "middle", "high")
    assert set(data.train.labels.tolist()) == {0, 1, 2}


def test_a_label_beyond_the_list_is_refused(classify, folder):
    write(folder, "train", [*topics(6), {"text": "x", "label": "art"}])
    refused(
        classify(labels=tuple(WORDS)), "line 7, field label: unknown label 'art'; use one of sports, science"
    )


def test_numbers_as_labels_are_sorted_by_value(classify, folder):
    write(folder, "train", [{"text": f"t {n}", "label": n % 12} for n in range(48)])
    data, _ = prepare(classify())
    assert data.head.classes == tuple(map(str, range(12)))


def test_a_label_that_only_validation_has_is_refused(classify, folder):
    write(folder, "train", topics(12))
    write(folder, "validation", [{"text": "a painting", "label": "art"}, {"text": "ball", "label": "sports"}])
    refused(
        classify(test="none"), "validation: label 'art' is not in the training part, so it cannot be learned"
    )


def test_one_class_is_nothing_to_learn(classify, folder):
    write(folder, "train", [{"text": f"ball {n}", "label": "sports"} for n in range(12)])
    refused(classify(), "all examples .* have label sports, so there is nothing to learn")


def test_rows_with_and_without_a_second_text_are_refused(classify, folder):
    rows = topics(12)
    rows[5]["text_pair"] = "and more"
    write(folder, "train", rows)
    refused(classify(), "some rows have a text_pair and others have none")


def test_several_labels_are_a_row_of_zeros_and_ones(classify, folder):
    labels = ["joy,anger", "", "fear", "joy"]
    write(folder, "train", [{"text": f"text {n}", "label": labels[n % 4]} for n in range(40)])
    data, _ = prepare(classify(multi_label=True))
    assert data.head.classes == ("anger", "fear", "joy")
    assert data.head.multi_label
    assert {tuple(row) for row in data.train.labels.tolist()} == {(1, 0, 1), (0, 0, 0), (0, 1, 0), (0, 0, 1)}


def test_labels_that_are_not_a_list_are_refused(classify, folder):
    write(folder, "train", [{"text": "x", "label": 3}])
    refused(classify(multi_label=True), "field label: '3' is not a list of labels; write a list, or a text")


def test_a_label_listed_twice_is_refused():
    with pytest.raises(ValidationError, match="labels lists 'a' twice"):
        TaskConfig(name="classification", labels=("a", "b", "a"))


def learned(config, recorder):
    train(config, recorder, NeverStop())
    return {one.name: one.value for one in recorder.measurements}


@pytest.mark.parametrize("several", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tiny_learns_the_topics(classify, folder, recorder, several):
    rows = topics(240)
    if several:
        rows = [{**row, "label": [row["label"], "short"]} for row in rows]
        rows[0]["label"] = rows[0]["label"][:1]
    write(folder, "train", rows)
    config = classify(multi_label=several)
    config = config.model_copy(
        update={
            "length": config.length.model_copy(update={"steps": 60, "epochs": None}),
            "batch": config.batch.model_copy(update={"global_size": 16}),
            "optimizer": config.optimizer.model_copy(update={"learning_rate": 3e-3}),
        }
    )
    values = learned(config, recorder)
    assert values["accuracy"] > 0.9
    assert values["matthews"] > 0.8


def test_a_constant_prediction_correlates_with_nothing():
    assert matthews(np.zeros(10, dtype=np.int64), np.arange(10) % 2, 2) == 0.0


def test_calibration_error_is_zero_where_confidence_is_accuracy_and_one_where_it_is_always_wrong():
    right = np.arange(100) % 4 != 0
    assert calibration_error(np.full(100, 0.75), right) == pytest.approx(0.0)
    assert calibration_error(np.ones(10), np.zeros(10, dtype=np.bool_)) == pytest.approx(1.0)


def test_soft_labels_are_zero_for_the_teachers_own_logits_and_positive_for_others():
    torch.manual_seed(0)
    teacher = torch.randn(8, 5, dtype=torch.float64)
    assert float(soft_labels(teacher, teacher, 2.0)) == pytest.approx(0.0, abs=1e-5)
    assert float(soft_labels(teacher + 1.0, teacher, 2.0)) > 0.1


def test_predictions_name_the_classes():
    labels = np.array([[1, 0], [0, 0]])
    judged = SeveralLabelsScoring(labels, ("joy", "anger")).judge(
        np.array([[0.9, 0.2], [0.1, 0.7]], np.float32), {}
    )
    assert judged.predictions == [["joy"], ["anger"]]
    assert judged.truths == [["joy"], []]
    assert judged.scores.tolist() == [1.0, 0.0]


def weights_of(config):
    data, _ = prepare(config)
    assert data.validation.weights is None
    return data.train.labels, data.train.weights


def test_balanced_weights_are_scikit_learns(classify, folder):
    write(
        folder, "train", [{"text": f"t {n}", "label": "rare" if n % 5 == 0 else "common"} for n in range(50)]
    )
    labels, weights = weights_of(classify(class_weights="balanced"))
    expected = compute_sample_weight("balanced", labels)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.mean() == pytest.approx(1.0)


def test_weights_by_label_apply_to_that_label(classify, folder):
    write(folder, "train", topics(30))
    labels, weights = weights_of(classify(class_weights={"science": 3}))
    assert set(zip(labels.tolist(), weights.tolist(), strict=True)) == {(0, 1.0), (1, 3.0), (2, 1.0)}


def test_of_several_labels_a_weight_applies_where_the_label_is(classify, folder):
    write(
        folder, "train", [{"text": f"t {n}", "label": ["a", "b"] if n % 4 == 0 else ["a"]} for n in range(40)]
    )
    labels, weights = weights_of(classify(multi_label=True, class_weights={"b": 2.5}))
    np.testing.assert_array_equal(weights, np.where(labels * [0, 1] == 1, 2.5, 1.0))


def test_a_weight_of_an_unknown_label_is_refused(classify, folder):
    write(folder, "train", topics(30))
    with pytest.raises(
        BadSpecError, match=r"class_weights weighs 'art', which is not a label of the training"
    ):
        prepare(classify(class_weights={"art": 2}))
    with pytest.raises(ValidationError, match="class_weights weighs 'art', which labels does not list"):
        TaskConfig(name="classification", labels=("a", "b"), class_weights={"art": 2})


@pytest.mark.parametrize("weight", [0, -1, float("nan")])
def test_a_weight_that_is_not_positive_is_refused(weight):
    with pytest.raises(ValidationError, match="class_weights"):
        TaskConfig(name="classification", class_weights={"a": weight})


def test_the_weighted_loss_of_a_global_batch_does_not_depend_on_how_it_is_divided(classify, folder):
    write(folder, "train", topics(30))
    data, _ = prepare(classify(class_weights={"science": 3.0, "sports": 0.5}))
    task, whole = base.build("classification"), collate(data.train, np.arange(12), data.pad_id, 1)
    torch.manual_seed(0)
    logits = torch.randn(12, 3)
    parts = [collate(data.train, rows, data.pad_id, 1) for rows in np.split(np.arange(12), [1, 6])]
    divided = sum(
        float(task.loss(piece, part)) for piece, part in zip(logits.split([1, 5, 6]), parts, strict=True)
    )
    assert float(task.loss(logits, whole)) == pytest.approx(divided, rel=1e-6)
    weights = torch.tensor([1.0, 3.0, 0.5])
    expected = torch.nn.functional.cross_entropy(logits, whole.labels, weight=weights, reduction="sum")
    assert float(task.loss(logits, whole)) == pytest.approx(float(expected), rel=1e-6)


def test_the_record_of_a_run_has_its_confusion_matrix(classify, folder, recorder, tmp_path):
    write(folder, "train", topics(60))
    train(classify(test="auto"), recorder, NeverStop())
    file = next((tmp_path / "checkpoints").rglob("test.parquet"))
    labels = predictions.read_record(file).labels
    pairs = [(one.truth, one.prediction) for one in predictions.read(file)]
    assert list(labels.labels) == ["business", "science", "sports"]
    expected = metrics.confusion_matrix(*zip(*pairs, strict=True), labels=labels.labels)
    assert labels.confusion == expected.tolist()
    assert labels.true == expected.sum(1).tolist()


def test_ten_thousand_classes_are_counted_without_a_matrix():
    counts = LabelCounts.of_classes(np.array([1, 1]), np.array([1, 0]), [str(n) for n in range(10_000)])
    assert (counts.true[:2], counts.hits[:2], counts.confusion) == ([1, 1], [0, 1], [])
