"""What tests of distillation share: a teacher that was trained, students of it, and losses in memory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from tests.trainers.conftest import Recorder
from trainers.config import Distillation
from trainers.data.batches import Batch
from trainers.distillation import plan
from trainers.distillation.objective import DistillationObjective
from trainers.distillation.projected_student import ProjectedStudent, RelationTap
from trainers.distillation.teacher import LoadedTeacher
from trainers.entrypoint import train
from trainers.model_kinds.heads import IGNORED, ClassHead, VocabularyHead
from trainers.models.origin import Preset
from trainers.models.student import build
from trainers.reporting import NeverStop, NullSink
from trainers.tasks import TASKS
from trainers.tasks.classification.task import Imdb

FP32 = {"teacher_precision": "fp32"}
"""The same on CPUs with and without bf16, which `auto` would use."""
INSIDE = {"hidden_weight": 1.0, "embedding_weight": 0.5, "relation_weight": 1.0, "cosine_weight": 0.5}


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A model root, which all processes of one run of tests share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "models-of-teachers"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def teacher(models, config_in) -> Path:
    """A model that was trained on the corpus: 4 layers, width 256. One process trains it for all."""
    trained = models / "teacher.txt"
    with FileLock(models / "teacher.lock"):
        if not trained.exists():
            config = config_in(
                models / "mini", model__name="mini", length={"epochs": 4}, optimizer__learning_rate=5e-4
            )
            outcome = train(config, NullSink(), NeverStop())
            assert outcome.summary["accuracy"] > 0.9
            trained.write_text(str(outcome.checkpoint))
    return Path(trained.read_text())


@pytest.fixture
def distil(config_in, models, teacher, tmp_path):
    """Make the configuration of a run with a teacher, with checkpoints and a cache of the test's own."""

    def make(to: str = "checkpoints", **changes):
        return config_in(
            tmp_path / to,
            **{
                "model__teacher": str(teacher),
                "workspace__model_roots": (str(models), str(tmp_path)),
                "workspace__cache": str(tmp_path / "cache"),
                **changes,
            },
        )

    return make


@pytest.fixture
def copied(teacher, tmp_path) -> Path:
    """A copy of the teacher, to be changed: without the manifest that seals it."""
    ignored = shutil.ignore_patterns("manifest.json")
    return Path(shutil.copytree(teacher, tmp_path / "copied", ignore=ignored))


def rewrite_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def rewrite_weights(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(weights), file)


def without_head(weights):
    return {name: tensor for name, tensor in weights.items() if not name.startswith("classifier.")}


def with_span_head(weights):
    return without_head(weights) | {
        "qa_outputs.weight": torch.zeros(2, 256),
        "qa_outputs.bias": torch.zeros(2),
    }


def series(config) -> dict[str, dict[int, float]]:
    """Losses of a run by name and step."""
    recorder = Recorder()
    train(config, recorder, NeverStop())
    names = {point.name for point in recorder.seen if point.name.endswith("loss")}
    return {name: recorder.series(name) for name in names - {"validation_loss"}}


def assert_close(one, other, rel=2e-3):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=rel, abs=1e-5), name


def forbidden(*_arguments: object, **_settings: object):
    raise AssertionError("the teacher was loaded")


class Zero(Imdb):
    """A task whose loss is nothing, for heads of other shapes."""

    def loss(self, logits, batch):
        return logits.float().sum() * 0.0


def an_objective(*, head=None, labels=None, **weights):
    """A batch of two, the objective and what is trained: 2 layers of 128 from 4 layers of 256."""
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (2, 5))
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    found = labels if labels is not None else torch.tensor([0, 1])
    guessed = (found != IGNORED).flatten().nonzero()[:, 0] if isinstance(head, VocabularyHead) else None
    batch = Batch(ids * mask, mask, None, found, torch.arange(2), 2, 8, 10, guessed=guessed)
    head = head or ClassHead(("negative", "positive"))
    shape = {"head": head, "vocabulary_size": 60, "dropout": 0.0, "max_length": 16, "pad_id": 0}
    student, big = build(Preset("tiny"), **shape), build(Preset("mini"), **shape)
    config = Distillation(**{"soft_weight": 0.0, **weights})
    compared = plan.comparison(config, student.shape, big.shape)
    assert (compared.layer_map, compared.relation_heads) == ((1, 3), 4)
    levels = range(3) if config.hidden_weight else ()
    projected = ProjectedStudent(student, 256, levels=levels, relations=compared.related)
    tap = RelationTap(big, compared.related_in_teacher) if compared.related else None
    loaded = LoadedTeacher(big.eval(), tap, torch.device("cpu"), with_head=True)
    task = (Imdb if isinstance(head, ClassHead) else Zero)(TASKS["imdb"])
    objective = DistillationObjective(task, config, head, projected, loaded, compared, cached_logits=False)
    objective.begin_step(0, 1)
    return batch, objective, projected
