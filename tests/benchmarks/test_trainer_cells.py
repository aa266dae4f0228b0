"""What the cells of `benchmarks.trainer` measure: the steps of a run as users have them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import trainer as benchmark
from benchmarks.allocations import ALLOCATIONS, allocating, planned_bytes
from benchmarks.trainer import GROUP, Cell, Meter, Size, Workplace
from cuda_ext import encoder as kernels
from service.config.hardware import CATALOGUE
from tests.trainers.tape import Tape
from trainers.config import Precision
from trainers.data.batches import StepBatch
from trainers.data.segments import StaticRow, StaticShape, up_to_multiple
from trainers.device_kinds import CPU, DEVICE_KINDS
from trainers.device_kinds.backend import Backend
from trainers.device_kinds.counters import Device
from trainers.loop.steps import Transfer
from trainers.loop.trainer import Trainer
from trainers.parallel.recorded import _STEPS_AHEAD
from trainers.telemetry.gradient_noise import EVERY_STEPS
from trainers.telemetry.profiling import WARM_STEPS

SIZE = Size(layers=1, hidden=64, length=32, steps=50, profiled=GROUP, batches=(4,))
FULL_LENGTHS = replace(benchmark.FULL, layers=1, hidden=64)
PROFILED = range(WARM_STEPS, WARM_STEPS + GROUP)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace.written(tmp_path, SIZE, CATALOGUE["cpu"].pricing(1), examples=SIZE.steps * 4)


def test_the_timed_steps_are_read_late(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those whose gradients are compared, and those of the profiled window."""
    monkeypatch.setattr("trainers.loop.trainer.kind_of", lambda device: SimpleNamespace(behind_host=True))
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


@pytest.mark.skipif(kernels.why_unavailable("cpu") is not None, reason="there are no encoder kernels here")
@pytest.mark.parametrize("examples", [SIZE.steps * 4, SIZE.steps], ids=["one epoch", "short last batches"])
def test_no_pass_is_recorded_in_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, examples: int
) -> None:
    """Neither in the profiled window nor in the timed one; all micro-batches there are replayed."""
    tape = Tape()
    kind = replace(CPU, name="taped", host_dropout=False, load=cache(Backend))
    monkeypatch.setitem(DEVICE_KINDS, "taped", kind)
    monkeypatch.setattr(Backend, "recorder", lambda self, device: tape)
    pricing = CATALOGUE["cpu"].pricing(1).model_copy(update={"device": "taped"})
    place = Workplace.written(tmp_path, replace(SIZE, length=256), pricing, examples=examples)
    recorded, replayed = [], []
    take = Trainer.train_step

    def step(self: Trainer, batch: StepBatch) -> bool:
        recorded.append(tape.recorded)
        before = tape.replayed
        try:
            return take(self, batch)
        finally:
            replayed.append(tape.replayed - before)

    monkeypatch.setattr(Trainer, "train_step", step)
    meter = Meter(Device(), lambda: None, SIZE.first, SIZE.steps)
    benchmark.ours(place.config(Cell(Precision.fp32, "fused_graphs", 4)), place, meter)
    assert set(recorded) == {tape.recorded}
    assert tape.recorded >= 2 * 3
    # Those whose gradients are compared are launched.
    assert replayed == [0 if step % EVERY_STEPS < 2 else 2 for step in range(SIZE.steps)]


@pytest.fixture(scope="module")
def full_lengths(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Texts as long as IMDb's for all cells, as the benchmark has them."""
    examples = FULL_LENGTHS.steps * max(benchmark.BATCHES)
    folder = tmp_path_factory.mktemp("full-lengths")
    return Workplace.written(folder, FULL_LENGTHS, CATALOGUE["H200"].pricing(1), examples=examples)


@pytest.mark.parametrize("batch", benchmark.BATCHES)
def test_the_shapes_of_a_full_cell_are_known_ahead(full_lengths: Workplace, batch: int) -> None:
    """A few dozen rows, each in memory of its own before the first step."""
    place = full_lengths
    config = place.config(Cell(Precision.bf16, "fused_graphs", batch))
    prepared = place.prepared(config)
    layout = StaticRow(
        StaticShape(None, prepared.pad_id, batch + 1, 512), 8, up_to_multiple(513 * batch + 2, 8)
    )
    batches = place.batches(config, prepared)
    rows = [
        layout(batches[step].micro_batches[0].padded(), seed=0, epoch=0)
        for step in range(config.length.steps)
    ]
    assert config.length.steps <= _STEPS_AHEAD
    assert 8 <= len({row.shape for row in rows}) <= 40


def test_other_allocations_repeat_the_most_important_cells() -> None:
    cells = benchmark.ordered(benchmark.PRECISIONS, benchmark.BATCHES, ALLOCATIONS)
    plain = benchmark.ordered(benchmark.PRECISIONS, benchmark.BATCHES)
    assert [cell for cell in cells if cell.allocation == "caching"] == plain
    repeated = [str(cell) for cell in cells if cell.allocation != "caching"]
    assert len(repeated) == 2 * len(benchmark.ALLOCATED) * len(benchmark.BATCHES)
    assert repeated[0] == "bf16-fused-32-expandable"
    assert cells.index(Cell(Precision.tf32, "fused", 32)) > len(repeated)
    assert len({str(cell) for cell in cells}) == len(cells)


def test_one_allocation_fits_the_batch_with_the_most_tokens() -> None:
    assert planned_bytes(1000, 1600, 30, [10, 30, 45]) == 1000 + 900
    assert planned_bytes(1000, 1601, 30, [31]) == 1000 + 622  # rounded up
    assert planned_bytes(1000, 900, 30, [60]) == 1000


def test_a_plan_is_made_of_a_traced_run(place: Workplace) -> None:
    config = place.config(Cell(Precision.fp32, "huggingface", 4))
    planned = benchmark.planned(config, place)
    assert planned > 16 * 100_000  # at least what its parameters need
    assert not Path(f"{config.workspace.checkpoints}-traced").exists()


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_an_allocation_holds_for_one_cell(allocation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: asked.append("empty"))
    monkeypatch.setattr("torch.cuda.memory._set_allocator_settings", asked.append)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    stats = {"num_device_alloc": 3, "reserved_bytes.all.peak": 5 * 2**20}
    monkeypatch.setattr("torch.cuda.memory_stats", lambda: stats)
    monkeypatch.setattr("torch.empty", lambda size, **given: asked.append((size, given["device"])))
    with allocating(allocation, lambda: 4096) as figures:
        stats["num_device_alloc"] += 2
        assert figures() == {"device_allocations": 2, "reserved_mib": 5.0}
    inside = {
        "caching": [], "planned": [(4096, "cuda")], "expandable": ["expandable_segments:True"],
    }[allocation]  # fmt: skip
    after = ["expandable_segments:False"] if allocation == "expandable" else []
    assert asked == ["empty", *inside, "empty", *after]
