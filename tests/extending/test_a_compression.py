"""A gradient compression is one entry of `COMPRESSIONS`: that is enough to choose it and to train with it."""

from __future__ import annotations

import pytest

from service.config.document import SpecError
from service.planner.step_time import assumed_compression, payload_of
from service.specs.experiment import json_schema, validate
from tests.extending.with_coarse import COARSE, train_rank
from tests.trainers.forked import workers
from trainers.config import Parallel
from trainers.parallel_kinds import COMPRESSIONS

PARALLEL = {"strategy": "ddp", "workers": 2, "compression": "coarse"}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPRESSIONS, COARSE.name, COARSE)


@pytest.mark.slow
def test_two_workers_train_with_it(configure, tmp_path):
    config = configure(parallel=PARALLEL)
    (tmp_path / "run.json").write_text(config.model_dump_json())
    assert workers(2, train_rank, tmp_path) == [0, 0]
    assert 0.0 < float((tmp_path / "loss").read_text()) < 1.0


def test_its_traffic_and_time_are_forecast():
    parallel = Parallel.model_validate(PARALLEL)
    assert payload_of(parallel)((8, 8)) == 64.0
    assert assumed_compression(parallel, bandwidth_gb_s=1.0).pack_ms_per_mib > 0.0


def test_the_published_schema_offers_it():
    compression = json_schema()["$defs"]["Parallel"]["properties"]["compression"]
    assert compression["enum"] == ["none", "fp16", "bf16", "powersgd", "onebit", "coarse"]
    assert "coarse = rounded to multiples" in compression["description"]


def test_what_it_does_not_work_with_is_refused():
    recorded = {"encoder": "packed", "cuda_graphs": True}
    spec = {"name": "coarse", "task": {"name": "imdb"}, "parallel": PARALLEL, "model": recorded}
    with pytest.raises(SpecError, match=r"which parallel\.compression coarse does not"):
        validate(spec)
