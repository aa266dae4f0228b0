"""A model family is one entry of `FAMILIES`: adding it there is enough to train and to judge its models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.specs.experiment import validate
from service.specs.model_fit import model_problems
from tests.trainers.family_models import tokenizer_of
from trainers.data.batches import Batch
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.model_kinds.families import FAMILIES, Attention, FamilyInfo
from trainers.models.architectures import Bert
from trainers.reporting import NeverStop


class BagConfig(PreTrainedConfig):
    """A bag of words, refined in layers."""

    model_type = "bag"

    def __init__(self, vocab_size: int = 100, width: int = 16, depth: int = 2, **others: Any) -> None:
        super().__init__(**others)
        self.vocab_size, self.width, self.depth = vocab_size, width, depth


class BagModel(PreTrainedModel):
    """Embeddings and Linears."""

    config_class = BagConfig
    base_model_prefix = "bag"
    supports_gradient_checkpointing = True

    def __init__(self, config: BagConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.depth))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(self, input_ids: torch.Tensor, output_hidden_states: bool = False) -> BaseModelOutput:
        hidden = self.embeddings(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return BaseModelOutput(last_hidden_state=hidden)


class BagForSequenceClassification(PreTrainedModel):
    """The same with classes."""

    config_class = BagConfig
    base_model_prefix = "bag"

    def __init__(self, config: BagConfig) -> None:
        super().__init__(config)
        self.bag = BagModel(config)
        self.classifier = nn.Linear(config.width, config.num_labels)
        self.post_init()


class Bag(Bert):
    """Texts are the means of their tokens."""

    implementation = "eager"

    def inputs(self, batch: Batch, config: PreTrainedConfig) -> dict[str, Any]:
        return {"input_ids": batch.input_ids}

    def averages(self, config: PreTrainedConfig) -> bool:
        return True

    def text_logits(self, model: Any, text: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        logits: torch.Tensor = model.classifier(text)
        return logits


BAG = FamilyInfo(
    name="bag",
    summary="bag of words",
    config=f"{__name__}:BagConfig",
    models=f"{__name__}:Bag",
    architecture=f"{__name__}:Bag",
    heads={"ForSequenceClassification": ("classifier.",)},
    layer_count="depth",
    hidden_size="width",
    attention_heads="depth",
    positions="longest",
    feed_forward="width",
    hidden_dropouts=(),
    attention_dropouts=(),
    layers="layers",
    relations=(),
    attention=Attention.own,
    token_types=False,
    pipelines=False,
    selects_layers=False,
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, BAG.name, BAG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as its library writes it."""
    path = tmp_path / "models" / "bag"
    tokenizer = tokenizer_of("bert")
    BagForSequenceClassification(BagConfig(vocab_size=len(tokenizer), longest=64)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_it_trains_and_its_library_loads_the_result(folder, configure, recorder):
    config = configure(model={"name": "bag"}, workspace__model_roots=(str(folder.parent),))
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary["steps"] == 6
    loaded, about = BagForSequenceClassification.from_pretrained(outcome.checkpoint, output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"]
    assert loaded.config.model_type == "bag"


@dataclass(frozen=True)
class _Refused:
    field: str
    reason: str
    spec: dict[str, Any]


REFUSED = (
    _Refused(
        "parallel.strategy",
        "bag of words models such as 'bag' cannot be split into pipeline stages; use single or ddp",
        {"parallel": {"strategy": "pipeline", "workers": 2}},
    ),
    _Refused(
        "model.layers",
        "the layers of bag of words models such as 'bag' depend on their place and cannot be chosen; remove "
        "model.layers",
        {"model": {"name": "bag", "layers": [1]}},
    ),
    _Refused(
        "task.max_length",
        "'bag' has 64 positions, fewer than task.max_length 128; lower task.max_length to 64",
        {"task": {"name": "imdb", "max_length": 128}},
    ),
    _Refused(
        "distillation.relation_weight",
        "bag of words models such as 'bag' have no query, key and value relations to distil; set "
        "distillation.relation_weight: 0",
        {"model": {"name": "bag", "teacher": "bag"}, "distillation": {"relation_weight": 1.0}},
    ),
)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.field)
def test_what_it_cannot_do_is_refused_at_submission(folder, refused):
    document = {
        "name": "bags",
        "task": {"name": "imdb", "max_length": 64},
        "model": {"name": "bag"},
        **refused.spec,
    }
    specs = [plan.spec for plan in validate(document).runs(CATALOGUE)]
    settings = Settings(model_roots=str(folder.parent))
    assert [(problem.path, problem.message) for problem in model_problems(specs, settings.roots)] == [
        (refused.field, refused.reason)
    ]


def test_a_family_that_is_not_registered_is_refused_with_the_known_ones(folder, configure, recorder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "jar"}))
    config = configure(model={"name": "bag"}, workspace__model_roots=(str(folder.parent),))
    with pytest.raises(
        BadSpecError, match=r"model_type is 'jar'; models that can be trained are bert, .*, bag"
    ):
        train(config, recorder, NeverStop())
    specs = [
        plan.spec
        for plan in validate({"name": "jars", "model": {"name": "bag"}, "task": {"name": "imdb"}}).runs(
            CATALOGUE
        )
    ]
    problems = model_problems(specs, Settings(model_roots=str(folder.parent)).roots)
    assert [problem.path for problem in problems] == ["model.name"]
