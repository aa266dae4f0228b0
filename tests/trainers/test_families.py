"""Models of every family: loaded from what transformers writes, trained, and written for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel

from tests.trainers.family_models import TEXTS, write_model
from trainers.data import tokenizers
from trainers.data.batches import Batch, collate
from trainers.data.tokens import tokenise
from trainers.entrypoint import train
from trainers.models.architectures import imported
from trainers.models.families import FAMILIES
from trainers.models.heads import ClassHead, Head, SpanHead, VocabularyHead
from trainers.models.origin import Folder
from trainers.models.student import Student, build
from trainers.reporting import NeverStop

HEADS: tuple[Head, ...] = (ClassHead(("no", "yes")), SpanHead(), VocabularyHead())
every_family = pytest.mark.parametrize("family", FAMILIES)
every_head = pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)


def student_of(folder: Path, head: Head, *, dropout: float = 0.0, max_length: int = 64) -> Student:
    tokenizer = tokenizers.load(folder)
    return build(
        Folder(folder),
        head=head,
        vocabulary_size=tokenizers.vocabulary_size(tokenizer),
        dropout=dropout,
        max_length=max_length,
        pad_id=tokenizers.SpecialTokens.of(tokenizer, folder).id_of("pad_token"),
    ).eval()


def batch_of(folder: Path, *, pairs: bool = False) -> Batch:
    """The texts as this project encodes them; every third token is to be guessed."""
    tokenizer = tokenizers.load(folder)
    texts = list(zip(TEXTS, TEXTS[::-1], strict=True)) if pairs else TEXTS
    data = tokenise(texts, np.zeros(len(TEXTS), dtype=np.int64), tokenizer, 64, lambda done: None)
    pad_id = tokenizers.SpecialTokens.of(tokenizer, folder).id_of("pad_token")
    batch = collate(data, np.arange(len(TEXTS)), pad_id, 8)
    return replace(batch, guessed=torch.arange(0, batch.input_ids.numel(), 3))


def theirs(model: PreTrainedModel, folder: Path, head: Head, batch: Batch, *, pairs: bool) -> torch.Tensor:
    """The logits that transformers computes of the texts, encoded by its own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    columns = (list(TEXTS), list(TEXTS[::-1])) if pairs else (list(TEXTS),)
    encoded = tokenizer(*columns, padding=True, pad_to_multiple_of=8, return_tensors="pt")
    assert torch.equal(encoded["input_ids"], batch.input_ids)
    with torch.no_grad():
        output = model(**encoded)
    if head.reads == "span":
        return torch.stack([output.start_logits, output.end_logits], -1)
    if head.reads == "guessed":
        assert batch.guessed is not None
        found: torch.Tensor = output.logits.flatten(0, 1)[batch.guessed]
        return found
    return output.logits


@every_family
@every_head
@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
def test_logits_are_those_of_transformers(family, head, pairs, tmp_path):
    written = write_model(tmp_path, family, head)
    model = student_of(tmp_path, head)
    assert model.fresh == []
    batch = batch_of(tmp_path, pairs=pairs)
    with torch.no_grad():
        ours = model(batch).logits
    expected = theirs(written, tmp_path, head, batch, pairs=pairs)
    real = torch.ones(len(expected), dtype=torch.bool)
    if head.reads in ("span", "guessed") and batch.attention_mask is not None:
        real = batch.attention_mask if head.reads == "span" else batch.attention_mask.flatten()[batch.guessed]
    torch.testing.assert_close(ours[real], expected[real], rtol=1e-4, atol=1e-4)
    assert float(expected[real].std()) > 0.01


@every_family
@every_head
def test_transformers_loads_what_is_written(family, head, tmp_path):
    write_model(tmp_path / "published", family, HEADS[0])
    model = student_of(tmp_path / "published", head)
    exported = tmp_path / "exported"
    exported.mkdir()
    model.write_config(exported)
    save_file(model.weights(), exported / "model.safetensors", metadata={"format": "pt"})
    loaded, about = imported(FAMILIES[family].models + head.suffix).from_pretrained(
        exported, output_loading_info=True
    )
    assert not about["missing_keys"] and not about["unexpected_keys"]
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@every_family
def test_an_encoder_without_prefix_and_head_is_loaded(family, tmp_path):
    head = HEADS[0]
    written = write_model(tmp_path, family, head)
    written.base_model.save_pretrained(tmp_path)
    model = student_of(tmp_path, head)
    encoder = model.encoder.state_dict()
    for name, tensor in written.base_model.state_dict().items():
        assert torch.equal(encoder[name], tensor), name
    assert model.fresh
    assert not any(name.startswith(model.architecture.encoder_prefix(model.model)) for name in model.fresh)


@every_family
def test_it_trains_and_continues_bitwise_after_a_stop(family, tmp_path, configure, recorder):
    write_model(tmp_path / "models" / "own", family, HEADS[0])
    settings: dict[str, Any] = {
        "model": {"student": "own", "dropout": 0.1},
        "workspace__model_roots": (str(tmp_path / "models"),),
    }
    whole = configure(**settings, workspace__checkpoints=str(tmp_path / "whole"))
    ended = train(whole, recorder, NeverStop())
    assert ended.summary["steps"] == 6
    recorder.stop_after = 3
    train(configure(**settings), recorder, recorder)
    recorder.stop_after = None
    resumed = train(configure(**settings), recorder, NeverStop())
    assert 0 < recorder.resumed_from < 6
    assert resumed.summary["train_loss"] == ended.summary["train_loss"]
    first, second = (
        sorted(Path(config.workspace.checkpoints).rglob("model.safetensors"))[-1]
        for config in (whole, configure(**settings))
    )
    assert first.read_bytes() == second.read_bytes()
