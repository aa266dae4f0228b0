"""A comparison of markets shows what interruptions cost, and what the cheaper market saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from service.analysis.question import Question
from service.analysis.run_table import read_run_table
from service.config.settings import Settings
from service.domain.states import RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import AliveRow, NewExperiment, RecordBatch, Store
from trainers.errors import FailureClass

SPOT = {"price_usd_per_hour": 1.0, "price_date": "2026-05-01", "price_source": "a test"}
ENTRY = {
    **SPOT, "device": "cuda", "accelerator_type": "A100", "tdp_w": 300.0, "precisions": ["fp32"],
    "price_usd_per_hour": 3.0, "markets": {"spot": SPOT},
}  # fmt: skip


def test_interruptions_of_a_market_are_in_its_row_and_in_words(tmp_path: Path, sqlite_template: Path) -> None:
    shutil.copy(sqlite_template, tmp_path / "stillhouse.db")
    (tmp_path / "hardware.yaml").write_text(yaml.safe_dump({"Fast": ENTRY}))
    now = [1_000_000.0]
    store = Store.open(Settings(data_dir=tmp_path), clock=lambda: now[0])
    catalogue = store.settings.catalogue()
    axes = {"hardware": [{"name": "Fast", "market": market} for market in ("on-demand", "spot")]}
    spec = validate({"name": "x", "task": {"name": "imdb"}, "search": {"axes": axes}}, catalogue)
    plans, text = list(spec.runs(catalogue)), spec.canonical_json()
    store.submissions.submit(NewExperiment(spec, plans, spec_text=text, owner="ada"))
    (claimed,) = Queue(store).claim("s", lease_s=1e6)
    store.drivers.started(claimed.id, 1, "node", 1)

    def train(run_id: int, *, from_step: int = 0, from_s: float | None = None, ends: bool) -> None:
        number = store.attempts.open(run_id, 1)
        facts = {"resumed_from_s": from_s}
        store.attempts.run_started(run_id, number, total_steps=100, resumed_from_step=from_step, facts=facts)
        now[0] += 3600.0
        store.recording.record(RecordBatch(alive=[AliveRow(run_id, number, now[0])]))
        if ends:
            store.attempts.finish_run(run_id, number, RunState.succeeded, summary={"cost_usd": 1.0})
            return
        failure = FailureClass.preempted, "its node goes"
        store.attempts.finish_run(run_id, number, RunState.failed, failure=failure, retry_delay_s=0.0)

    on_demand, spot = store.runs.all_of(claimed.id)
    train(on_demand.id, ends=True)
    train(spot.id, ends=False)
    train(spot.id, from_step=50, from_s=now[0] - 1800.0, ends=True)
    assert store.accounting.account(spot.id).total.cost_usd == pytest.approx(2.0)
    answer = Question(read_run_table(store, [claimed.id])).compare()
    rows = {row.label: row.interruptions for row in answer.rows}
    assert rows["hardware=Fast@on-demand"] is None
    found = rows["hardware=Fast@spot"]
    assert found is not None
    assert (found.attempts, found.lost_s) == (1, pytest.approx(1800.0))
    assert (found.cost_usd, found.on_demand_usd) == (pytest.approx(2.0), pytest.approx(4.5))
    assert (
        "hardware=Fast@spot: 1 interruption cost 30 min 00 s and $0.50 of $2.00; on demand the same runs "
        "would have cost $4.50, $2.50 more"
    ) in answer.notes
    store.close()
