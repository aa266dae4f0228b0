"""Teachers that do not fit, and what is said of them."""

from __future__ import annotations

import json

import pytest

from tests.trainers.distillation.conftest import (
    rewrite_config,
    rewrite_weights,
    with_span_head,
    without_head,
)
from trainers.config import Distillation
from trainers.data import tokenizers
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.reporting import NeverStop, NullSink


def refused(config, match: str) -> None:
    with pytest.raises(BadSpecError, match=match) as caught:
        train(config, NullSink(), NeverStop())
    assert "\n" not in str(caught.value)


def test_preset_as_a_teacher(distil):
    refused(distil(model__teacher="mini"), r"model\.teacher 'mini' is a preset, whose weights are random")


def test_missing_teacher(distil):
    refused(
        distil(model__teacher="nobody"), r"model\.teacher 'nobody' is not a preset .* does not exist under"
    )


@pytest.mark.parametrize(
    ("distillation", "reason"),
    [
        ({"hidden_weight": 1.0}, "hidden states and relations are compared token by token"),
        ({"cache_logits": False}, "distillation.cache_logits is false"),
    ],
)
def test_another_vocabulary_where_more_than_cached_logits_is_needed(
    distil, copied, teacher, distillation, reason
):
    tokenizer = tokenizers.train_wordpiece(["Only these few words."], 60)
    tokenizer.save(str(copied / tokenizers.FILE))
    pieces = tokenizer.get_vocab_size()
    refused(
        distil(model__name=str(teacher), model__teacher=str(copied), distillation=distillation),
        rf"different vocabulary than the student: {pieces} and \d+ pieces, first difference at \d+ \('.*"
        rf"it can teach only by cached logits of whole texts, but {reason}",
    )


def test_same_vocabulary_in_another_file_is_accepted(distil, copied, teacher):
    file = copied / tokenizers.FILE
    file.write_text(json.dumps(json.loads(file.read_text()), indent=3))
    assert file.read_bytes() != (teacher / tokenizers.FILE).read_bytes()
    config = distil(model__name=str(teacher), model__teacher=str(copied), length={"steps": 1})
    assert train(config, NullSink(), NeverStop()).status == "completed"


@pytest.mark.slow
def test_headless_teacher_is_refused_for_its_logits_alone(distil, copied):
    rewrite_weights(copied, without_head)
    refused(
        distil(model__teacher=str(copied)),
        r"was trained to predict nothing, as it has no head, but the task needs classes.*fine-tune it",
    )
    settings = {"soft_weight": 0.0, "hidden_weight": 1.0}
    config = distil(model__teacher=str(copied), distillation=settings, length={"steps": 1})
    assert train(config, NullSink(), NeverStop()).status == "completed"


def test_teacher_of_another_kind_of_task(distil, copied):
    rewrite_weights(copied, with_span_head)
    refused(
        distil(model__teacher=str(copied)),
        r"trained to predict spans of a text, but the task needs classes",
    )


def test_teacher_of_other_classes(distil, copied):
    rewrite_config(copied, id2label={"0": "cat", "1": "dog"})
    refused(distil(model__teacher=str(copied)), r"calls class 0 'cat', but the task calls it 'negative'")


def test_teacher_may_spell_classes_as_files_do(distil, copied):
    rewrite_config(copied, id2label={"0": "NEG", "1": "POS"})
    config = distil(model__teacher=str(copied), length={"steps": 1})
    assert train(config, NullSink(), NeverStop()).status == "completed"


def test_teacher_of_swapped_classes(distil, copied):
    rewrite_config(copied, id2label={"0": "POS", "1": "NEG"})
    refused(distil(model__teacher=str(copied)), r"calls class 0 'POS', but the task calls it 'negative'")


@pytest.mark.parametrize("keys", [("a", "b"), ("0", "5")])
def test_teacher_whose_classes_are_not_numbered(distil, copied, keys):
    rewrite_config(copied, id2label=dict(zip(keys, ("negative", "positive"), strict=True)))
    refused(
        distil(model__teacher=str(copied)),
        rf"id2label has the keys {keys[0]}, {keys[1]}; number its classes 0 to 1",
    )


def test_teacher_without_layers(distil, copied):
    rewrite_config(copied, num_hidden_layers=0)
    settings = {"soft_weight": 0.0, "hidden_weight": 1.0}
    refused(
        distil(model__teacher=str(copied), distillation=settings),
        r"num_hidden_layers is 0; give a whole number of at least 1",
    )


def test_teacher_of_more_classes(distil, copied):
    rewrite_config(copied, id2label={"0": "negative", "1": "positive", "2": "neutral"})
    refused(distil(model__teacher=str(copied)), r"has 3 classes, but the task has 2")


@pytest.mark.slow
def test_teacher_of_unnamed_classes_is_taken_at_its_numbers(distil, copied, recorder):
    rewrite_config(copied, id2label={"0": "LABEL_0", "1": "LABEL_1"})
    train(distil(model__teacher=str(copied), length={"steps": 1}), recorder, NeverStop())
    assert any("classes have no names" in line for line in recorder.logs)


def test_teacher_whose_pooler_is_gone(distil, copied):
    rewrite_weights(
        copied, lambda weights: {name: w for name, w in weights.items() if not name.startswith("bert.pooler")}
    )
    refused(distil(model__teacher=str(copied)), r"has no weight bert\.pooler.* for task imdb; fine-tune")


@pytest.mark.parametrize("settings", [{"soft_weight": 0.5}, {"soft_weight": 0.0, "hidden_weight": 1.0}])
def test_teacher_with_too_few_positions(distil, copied, settings):
    rewrite_config(copied, max_position_embeddings=32)
    refused(
        distil(model__teacher=str(copied), distillation=settings),
        r"has 32 positions, fewer than task\.max_length 48; lower task\.max_length to 32",
    )


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ([0], r"layer_map has 1 layers, but the student has 2"),
        ([0, 1, 2], r"layer_map has 3 layers, but the student has 2"),
        ([0, 4], r"layer_map has layer 4, but the teacher has 4; use 0 to 3"),
    ],
)
def test_layer_map_that_does_not_fit(distil, layers, match):
    refused(distil(distillation={"hidden_weight": 1.0, "layer_map": layers}), match)


def test_fp16_teacher_on_a_cpu(distil):
    refused(
        distil(distillation={"teacher_precision": "fp16"}),
        r"distillation\.teacher_precision fp16 needs a GPU",
    )


def test_first_stage_without_anything_to_learn():
    with pytest.raises(ValueError, match=r"hidden_first_fraction 0\.5 has no loss to train first"):
        Distillation(hidden_first_fraction=0.5)
