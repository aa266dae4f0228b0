"""Logits that are computed once and kept on disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainers.conftest import Recorder
from tests.trainers.distillation.conftest import (
    FP32,
    assert_close,
    forbidden,
    rewrite_weights,
    series,
)
from trainers.data.batches import Batch
from trainers.distillation.logit_cache import CachedLogits
from trainers.distillation.teacher import LoadedTeacher, Teacher
from trainers.entrypoint import train
from trainers.errors import NotFiniteError
from trainers.reporting import NeverStop, NullSink


@pytest.mark.slow
def test_second_run_does_not_load_the_teacher(distil, recorder, monkeypatch):
    train(distil(), recorder, NeverStop())
    assert recorder.facts["teacher_logits"] == "computed once, cached on disk"
    assert any("logits for 90 examples" in line for line in recorder.logs)
    first = recorder.series("loss")
    monkeypatch.setattr(Teacher, "load", forbidden)
    for seed in (0, 1):
        again = Recorder()
        train(distil(f"again-{seed}", seed=seed), again, NeverStop())
        assert (again.series("loss") == first) is (seed == 0)


@pytest.mark.slow
@pytest.mark.parametrize("precision, rel", [("fp32", 1e-4), ("auto", 2e-3)])
def test_kept_logits_are_those_of_each_step(distil, precision, rel):
    # Rounding depends on the width of a batch, which is another where logits are kept.
    kept, computed = (
        series(distil(str(cache), distillation={"cache_logits": cache, "teacher_precision": precision}))
        for cache in (True, False)
    )
    assert_close(kept, computed, rel=rel)


def test_changed_teacher_is_asked_anew(distil, copied, tmp_path, monkeypatch):
    config = distil(model__teacher=str(copied))
    train(config, NullSink(), NeverStop())
    rewrite_weights(copied, lambda weights: weights | {"classifier.bias": weights["classifier.bias"] + 1})
    monkeypatch.setattr(Teacher, "load", forbidden)
    with pytest.raises(AssertionError, match="the teacher was loaded"):
        train(config, NullSink(), NeverStop())
    assert len(list((tmp_path / "cache" / "teacher-logits").glob("*/logits.npy"))) == 1


def test_logits_that_are_not_finite_are_not_kept(distil, copied, tmp_path):
    rewrite_weights(copied, lambda weights: weights | {"classifier.weight": torch.full((2, 256), 3e38)})
    with pytest.raises(NotFiniteError, match="non-finite logits in fp32; its weights are damaged"):
        train(distil(model__teacher=str(copied), distillation=FP32), NullSink(), NeverStop())
    assert not list((tmp_path / "cache" / "teacher-logits").glob("*/logits.npy"))


@pytest.mark.slow
def test_second_stage_reads_kept_logits(distil, monkeypatch):
    settings = {"soft_weight": 0.5, "hidden_weight": 1.0, "hidden_first_fraction": 0.5}
    asked = []
    call = LoadedTeacher.__call__

    def counted(self, batch, *, with_hidden):
        asked.append(with_hidden)
        return call(self, batch, with_hidden=with_hidden)

    train(distil(distillation=settings), NullSink(), NeverStop())
    monkeypatch.setattr(LoadedTeacher, "__call__", counted)
    train(distil("again", distillation=settings, seed=1), NullSink(), NeverStop())
    assert asked == [True] * 3


def test_kept_span_logits_are_ragged(tmp_path):
    logits = np.arange(16, dtype=np.float32).reshape(8, 2)
    kept = CachedLogits(logits, np.array([0, 3, 8]))
    rows = torch.tensor([1, 0])
    batch = Batch(torch.zeros(2, 6, dtype=torch.long), None, None, rows, rows, 2, 8, 12)
    found = kept(batch, seed=0, epoch=0).teacher_logits.numpy()
    assert found.shape == (2, 6, 2)
    assert (found[0, :5] == logits[3:]).all()
    assert (found[1, :3] == logits[:3]).all()
    assert found[0, 5:].sum() == found[1, 3:].sum() == 0
