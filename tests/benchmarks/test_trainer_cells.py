"""What the cells of `benchmarks.trainer` measure: the steps of a run as users have them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import trainer as benchmark
from benchmarks.trainer import GROUP, Cell, Meter, Size, Workplace
from service.config.hardware import CATALOGUE
from trainers.config import Precision
from trainers.telemetry.devices import Device
from trainers.telemetry.gradient_noise import EVERY_STEPS
from trainers.telemetry.profiling import WARM_STEPS
from trainers.trainer import Trainer
from trainers.transfer import Transfer

SIZE = Size(layers=1, hidden=64, length=32, steps=50, profiled=GROUP, batches=(4,))
PROFILED = range(WARM_STEPS, WARM_STEPS + GROUP)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace.written(tmp_path, SIZE, CATALOGUE["cpu"].pricing(1), examples=SIZE.steps * 4)


def test_the_timed_steps_are_read_late(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those whose gradients are compared, and those of the profiled window."""
    monkeypatch.setattr("trainers.trainer.kind_of", lambda device: SimpleNamespace(behind_host=True))
    late: Counter[int] = Counter()
    begin = Transfer.__init__

    def begun(self: Transfer, *given: object) -> None:
        begin(self, *given)  # type: ignore[arg-type]
        late[len(steps) - 1] += 1

    steps: list[object] = []
    take = Trainer.train_step
    monkeypatch.setattr(
        Trainer, "train_step", lambda self, batch: (steps.append(batch), take(self, batch))[1]
    )
    monkeypatch.setattr(Transfer, "__init__", begun)
    meter = Meter(Device(), lambda: None, SIZE.first, SIZE.steps)
    benchmark.ours(place.config(Cell(Precision.fp32, "huggingface", 4)), place, meter)
    at_once = {step for step in range(SIZE.steps) if step % EVERY_STEPS < 2} | set(PROFILED)
    assert set(late) == set(range(SIZE.steps)) - at_once
    assert SIZE.first > PROFILED[-1]
    assert meter.figures(4)["step_ms"] > 0.0
