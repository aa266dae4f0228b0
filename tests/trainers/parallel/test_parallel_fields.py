"""What a spec may say of workers, stages and replicas."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from trainers.config import TrainingSections

PIPELINE = {"strategy": "pipeline", "workers": 2}


@pytest.mark.parametrize(
    ("parallel", "changes", "said"),
    [
        ({"strategy": "ddp", "workers": 2, "stages": 2}, {}, "stages belongs to strategy pipeline, not ddp"),
        ({"strategy": "single", "engine": "torch"}, {}, "engine belongs to strategy pipeline, not single"),
        ({"strategy": "pipeline"}, {}, "needs at least 2 workers"),
        ({**PIPELINE, "workers": 6, "stages": 4}, {}, "workers 6 is not divisible by stages 4"),
        ({**PIPELINE, "workers": 3}, {}, "3 stages need at least 3 layers, but model.name tiny has 2"),
        (
            {**PIPELINE, "schedule": "interleaved"},
            {},
            "2 stages with 4 model chunks need at least 4 layers, .*; .* or set parallel.schedule: 1f1b",
        ),
        ({**PIPELINE, "workers": 6, "stages": 2}, {}, r"global_size 8 is not divisible by .* 3; .*such as 9"),
        ({**PIPELINE, "workers": 4, "stages": 2}, {"batch__micro_size": 3}, "micro_size 3 does not divide"),
        (
            {**PIPELINE, "engine": "deepspeed", "schedule": "gpipe"},
            {},
            "engine deepspeed has only the schedule 1f1b, not gpipe",
        ),
        ({**PIPELINE, "workers": {"min": 2, "max": 4}}, {}, "set parallel.stages"),
        ({**PIPELINE, "partition": "time"}, {"deterministic": True}, "partition time .* by measured times"),
        (PIPELINE, {"model__compile": True}, "model.compile needs a whole encoder"),
        (
            PIPELINE,
            {"model__teacher": "teachers/mini", "distillation": {"hidden_weight": 1.0}},
            "distillation.hidden_weight compares inner layers",
        ),
    ],
)
def test_what_cannot_be_is_said_with_the_spec(configure, parallel, changes, said):
    with pytest.raises(ValidationError, match=said):
        configure(parallel=parallel, **changes)


def test_shares_follow_replicas_and_auto_makes_enough_micro_batches(configure):
    grid = configure(parallel={**PIPELINE, "workers": 4, "stages": 2}, batch={"global_size": 64})
    assert (grid.parallel.stage_count, grid.parallel.replicas) == (2, 2)
    assert (grid.share, grid.micro_size, grid.accumulation) == (32, 4, 8)
    few = configure(parallel=PIPELINE, batch={"global_size": 6})
    assert (few.micro_size, few.accumulation) == (1, 6)
    apart = configure(parallel={"strategy": "ddp", "workers": 4}, batch={"global_size": 64})
    assert (apart.parallel.replicas, apart.share, apart.micro_size) == (4, 16, 16)


def test_elastic_pipelines_have_whole_replicas():
    parallel = {**PIPELINE, "workers": {"min": 2, "max": 6}, "stages": 2}
    sections = {"task": {"name": "imdb"}, "model": {"name": "tiny"}, "batch": {"global_size": 8}}
    assert TrainingSections.model_validate({**sections, "parallel": parallel}).worker_numbers == (4, 2)
    parallel["workers"]["max"] = 7
    with pytest.raises(ValidationError, match="workers 7 is not divisible by stages 2"):
        TrainingSections.model_validate({**sections, "parallel": parallel})
