"""Training steps of BERT-base on texts as long as IMDb's reviews: precisions, encoders, batches, and peers.

    python -m benchmarks.trainer --state cells.jsonl --limit-s 540

A cell is a precision, a contender and a batch size. It trains 200 steps with AdamW and clipped gradients:
through `trainers.entrypoint.train` (contenders `eager`, `huggingface`, `packed`, `fused`, our encoders, and
`fused_graphs`, whose passes are replayed as CUDA graphs), or through `transformers.Trainer` on the same
batches from weights of the same origin (`hf_trainer_eager`, `hf_trainer_sdpa`; they need `accelerate`). Texts
are generated: a word is a token, and lengths are drawn as in `benchmarks.encoders`.

On a GPU, some cells are repeated with activations from expandable segments and from one planned allocation
(`--allocations`, `benchmarks.allocations`): `device_allocations` and `reserved_mib` say what that saves.

Cells are in order of importance, so that a time limit cuts off the least important ones. With `--state` each
finished cell is appended to a file, and the next start continues after the last one.

The last line is one JSON object. `cells` has one row per finished cell, timed after the profiled window;
passes of `fused_graphs` are recorded before the first step: `step_ms` and its quartiles over groups of ten
steps, `parts_ms` by phase, `examples_per_s`, `launches_per_step`, `host_gap_pct` (share of the profiled
window in which no kernel ran; profiling slows the host, and the window's steps are read at once, so this is
an upper bound), the `kernels` that take most of it, `mfu_pct`, `joules_per_example` by the GPU's counter
(`energy_error_pct`: one refresh of the counter relative to the window) and `peak_memory_mib`. `not_run` names
the missing cells, `failed` those that ended in an error. `targets` judges the cells of an H200; the time of
three epochs is that of 75,000 examples at the measured rate.

Without a GPU, the cells are those of the smallest model that a CPU can run. What comes before the device is
rehearsed for every cell at its real size: `rehearsed` counts configurations, models and batches.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import DataLoader

from benchmarks.allocations import ALLOCATIONS, allocating, planned_bytes
from benchmarks.encoders import drawn_lengths
from benchmarks.options import Benchmark
from service.config.hardware import CATALOGUE
from trainers.config import DevicePricing, Precision, RunConfig
from trainers.data import tokenizers
from trainers.data.batches import Batch, TrainingBatches
from trainers.data.segments import Packing
from trainers.device_kinds.counters import MIB, Device, other_device
from trainers.entrypoint import train
from trainers.model_kinds.encoders import ENCODERS
from trainers.models import origin, student
from trainers.process import reset_process
from trainers.reporting import Measurement, NeverStop, NullSink, Point
from trainers.tasks import base
from trainers.tasks.base import Prepared
from trainers.telemetry.profiling import WARM_STEPS
from trainers.telemetry.timeline import TRAINING

BENCHMARK = Benchmark("trainer", __doc__, fields=("cells", "not_run", "failed", "targets", "rehearsed"))
PRECISIONS = (Precision.bf16, Precision.tf32, Precision.fp16, Precision.fp32)
"""The most important first; a CPU runs the last."""
BATCHES = (32, 64, 16)
GROUP = 10
"""Steps that are timed together."""
COUNTER_REFRESH_S = 0.1
"""Longest time between two refreshes of NVML's energy counter."""
EPOCHS_OF_IMDB = 3 * 25_000
"""Examples of three epochs."""
PEERS = {"hf_trainer_eager": "eager", "hf_trainer_sdpa": "huggingface"}
"""The Hugging Face Trainer with the layers of one of the encoders that it has itself."""
GRAPHS = {"fused_graphs": "fused"}
"""An encoder whose passes are replayed, `model.cuda_graphs`; a CPU has no such cell."""
CONTENDERS = (
    "fused", "huggingface", "fused_graphs", "hf_trainer_eager", "hf_trainer_sdpa", "packed", "eager",
)  # fmt: skip
"""The most important first."""
ALLOCATED = ("fused", "huggingface")
"""Contenders that are measured with each allocation, in the most important precision."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured at once.

    Attributes:
        precision: of forward and backward.
        contender: one of `CONTENDERS`.
        batch: examples of a step.
        allocation: where activations come from, one of `ALLOCATIONS`.
    """

    precision: Precision
    contender: str
    batch: int
    allocation: str = ALLOCATIONS[0]

    def __str__(self) -> str:
        name = f"{self.precision}-{self.contender}-{self.batch}"
        return name if self.allocation == ALLOCATIONS[0] else f"{name}-{self.allocation}"


def ordered(
    precisions: Sequence[Precision], batches: Sequence[int], allocations: Sequence[str] = ALLOCATIONS[:1]
) -> list[Cell]:
    """Returns all cells, the most important first: other allocations follow the first precision's."""
    cells = [
        [
            Cell(precision, contender, batch, allocation)
            for allocation, batch, contender in itertools.product(own, batches, contenders)
        ]
        for place, precision in enumerate(precisions)
        for own, contenders in (
            (allocations[:1], CONTENDERS),
            (allocations[1:] if place == 0 else (), ALLOCATED),
        )
    ]
    return list(itertools.chain.from_iterable(cells))


@dataclass(frozen=True, slots=True)
class Size:
    """How much a cell trains.

    Attributes:
        layers, hidden: of the BERT.
        length: longest example in tokens.
        steps: of a cell.
        profiled: steps of the profiled window, after `WARM_STEPS`.
        batches: examples of a step.
    """

    layers: int
    hidden: int
    length: int
    steps: int
    profiled: int
    batches: Sequence[int]

    @property
    def first(self) -> int:
        """Step after which time and energy are measured."""
        return 2 * GROUP + WARM_STEPS if self.profiled else 1


FULL = Size(12, 768, 512, 200, GROUP, BATCHES)
SMOKE = Size(2, 128, 24, 4, 0, (4,))
"""What a CPU runs of it."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """A model folder, generated texts, and the device that trains on them.

    Attributes:
        size: of model and cells.
        folder: with `model` and `data`.
        pricing: catalogue entry of the device.
    """

    size: Size
    folder: Path
    pricing: DevicePricing

    @classmethod
    def written(cls, folder: Path, size: Size, pricing: DevicePricing, *, examples: int) -> Workplace:
        """Writes a BERT with random weights, its tokenizer, and as many training examples."""
        vocabulary = [*tokenizers.SPECIAL, *(f"w{number}" for number in range(origin.VOCABULARY_SIZE - 5))]
        (folder / "model").mkdir(parents=True)
        transformers.BertModel(
            transformers.BertConfig(
                vocab_size=len(vocabulary),
                hidden_size=size.hidden,
                num_hidden_layers=size.layers,
                num_attention_heads=size.hidden // 64,
                intermediate_size=4 * size.hidden,
            )
        ).save_pretrained(folder / "model")
        described = json.loads(tokenizers.train_wordpiece(["w0 w1"], 100).to_str())
        described["model"]["vocab"] = {word: number for number, word in enumerate(vocabulary)}
        (folder / "model" / tokenizers.FILE).write_text(json.dumps(described), encoding="utf-8")
        for part, count, seed in (("train", examples, 0), ("test", 64, 1)):
            _write_texts(folder / "data" / f"{part}.jsonl", drawn_lengths(count, seed), seed)
        return cls(size, folder, pricing)

    def config(self, cell: Cell) -> RunConfig:
        """Returns the run of a cell; peers take data, batch and optimizer from it."""
        recorded = cell.contender in GRAPHS
        encoder = {**PEERS, **GRAPHS}.get(cell.contender, cell.contender)
        return RunConfig.model_validate(
            {
                "task": {
                    "name": "imdb", "path": "data", "max_length": self.size.length, "test": "none",
                    "validation_examples": 32,
                },
                "model": {"name": "model", "encoder": encoder, "cuda_graphs": recorded},
                "precision": cell.precision,
                # The first steps of fp16 look for a loss scale.
                "numerics": {"not_finite": "skip"},
                "optimizer": {"name": "adamw", "learning_rate": 1e-5, "max_grad_norm": 1.0},
                "batch": {"global_size": cell.batch, "micro_size": cell.batch},
                "length": {"steps": self.size.steps},
                "evaluation": {"every_epochs": 10_000},
                "checkpoint": {"every_s": 0.0, "keep": 1},
                "telemetry": {"profile_steps": self.size.profiled},
                "log_every_steps": GROUP if self.size.profiled else 1,
                "seed": 0,
                "rates": self.pricing,
                "workspace": {
                    "checkpoints": str(self.folder / "checkpoints" / str(cell)),
                    "cache": str(self.folder / "cache"),
                    "data_roots": (str(self.folder),),
                    "model_roots": (str(self.folder),),
                },
            }
        )  # fmt: skip

    def prepared(self, config: RunConfig) -> Prepared:
        """Returns the tokens, from the cache after the first cell."""
        found = origin.locate(config.model.name, config.workspace)
        return base.build(config.task.name).prepare(config, found, lambda line: None)

    def batches(self, config: RunConfig, prepared: Prepared) -> TrainingBatches:
        """Returns the batches of a run, by step, as its trainer makes them."""
        packs, multiple = ENCODERS[config.model.encoder].packs, self.pricing.kind.width_multiple
        return TrainingBatches(
            prepared.train,
            seed=config.seed,
            global_size=config.batch.global_size,
            micro_size=config.micro_size,
            replica=0,
            replicas=1,
            pad_id=prepared.pad_id,
            multiple=multiple,
            transform=Packing(None, prepared.pad_id, multiple) if packs else None,
            packs=packs,
        )

    def model(self, config: RunConfig, prepared: Prepared) -> student.Student:
        """Returns the model of a run on the CPU."""
        built = student.build(
            origin.locate(config.model.name, config.workspace),
            head=prepared.head,
            vocabulary_size=prepared.vocabulary_size,
            dropout=config.model.dropout,
            max_length=config.task.max_length,
            pad_id=prepared.pad_id,
        )
        ENCODERS[config.model.encoder].install(built.model)
        return built


def _write_texts(path: Path, lengths: Sequence[int], seed: int) -> None:
    """Writes texts of as many tokens, two of them special, with labels in turn."""
    words = np.random.default_rng(seed)
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, length in enumerate(lengths):
            drawn = words.integers(origin.VOCABULARY_SIZE - 5, size=length - 2)
            row = {"text": " ".join(f"w{word}" for word in drawn), "label": number % 2}
            file.write(json.dumps(row) + "\n")


@dataclass(slots=True)
class Meter:
    """Time and energy of a cell's steps, with the device idle at the first and the last reading.

    Attributes:
        counters: of the device.
        wait: waits for it.
        first, last: steps after which both are read.
    """

    counters: Device
    wait: Callable[[], None]
    first: int
    last: int
    times_s: dict[int, float] = field(default_factory=dict)
    energy_j: dict[int, float | None] = field(default_factory=dict)

    def after(self, step: int) -> None:
        """Reads what is due after a step, counted from 1."""
        if step < self.first or step > self.last:
            return
        if step in (self.first, self.last):
            self.wait()
            self.energy_j[step] = self.counters.energy_j()
        self.times_s[step] = time.perf_counter()

    def figures(self, batch: int) -> dict[str, Any]:
        """Returns step time, rate and energy."""
        steps, seconds = self.last - self.first, self.times_s[self.last] - self.times_s[self.first]
        groups = [
            1e3 * (end_s - begin_s) / (end - begin)
            for (begin, begin_s), (end, end_s) in pairwise(sorted(self.times_s.items()))
        ]
        quartiles = statistics.quantiles(groups, n=4, method="inclusive") if len(groups) > 1 else groups * 3
        figures: dict[str, Any] = {
            "step_ms": round(1e3 * seconds / steps, 3),
            "step_ms_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
            "examples_per_s": round(batch * steps / seconds, 1),
        }
        begin_j, end_j = self.energy_j[self.first], self.energy_j[self.last]
        if begin_j is not None and end_j is not None:
            figures["joules_per_example"] = round((end_j - begin_j) / (batch * steps), 4)
            figures["energy_error_pct"] = round(100.0 * COUNTER_REFRESH_S / seconds, 1)
        return figures


class _Steps(NullSink):
    """Reads a meter after each report of a run, and keeps the kernels of its profiled window."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.kernels: dict[str, dict[str, float]] = {}

    def measurement(self, measurement: Measurement) -> None:
        kind, _, name = measurement.scope.partition(":")
        if kind == "kernel" and measurement.name in ("kernel_ms_per_step", "launches_per_step"):
            self.kernels.setdefault(name, {})[measurement.name] = round(measurement.value, 3)

    def points(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.name == "loss":
                self._meter.after(point.step)


def ours(config: RunConfig, place: Workplace, meter: Meter) -> dict[str, Any]:
    """Trains a cell of one of our encoders; returns what its own telemetry measured."""
    steps = _Steps(meter)
    summary = train(config, steps, NeverStop()).summary
    timed = place.size.steps - place.size.profiled
    figures: dict[str, Any] = {
        "parts_ms": {
            phase.value: round(1e3 * float(summary[f"{phase.value}_time_s"] or 0.0) / timed, 3)
            for phase in TRAINING
        },
        "padding_pct": summary["padding_pct"],
        "peak_memory_mib": summary["peak_memory_mib"],
        "mfu_pct": summary.get("mfu_pct"),
        "launches_per_step": summary.get("kernel_launches_per_step"),
        "kernels": steps.kernels,
    }
    active = summary.get("kernel_active_ratio")
    figures["host_gap_pct"] = None if active is None else 100.0 * (1.0 - float(active))
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in figures.items()}


def hf_trainer(config: RunConfig, place: Workplace, meter: Meter) -> dict[str, Any]:
    """Trains a cell of the Hugging Face Trainer on our batches."""
    reset_process(config)
    if config.precision is Precision.tf32:
        torch.set_float32_matmul_precision("high")
    prepared = place.prepared(config)
    batches = place.batches(config, prepared)
    examples = [_fields(batches[step].micro_batches[0]) for step in range(place.size.steps)]

    class OnOurBatches(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
            return DataLoader(examples, batch_size=None, pin_memory=torch.cuda.is_available())  # type: ignore[arg-type]

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % config.log_every_steps == 0:
                meter.after(state.global_step)

    backend, device = place.pricing.kind.backend, place.pricing.kind.backend.device(place.pricing.hardware)
    backend.restart_peak(device)
    with tempfile.TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=config.batch.global_size,
            max_steps=place.size.steps,
            learning_rate=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.optimizer.max_grad_norm,
            bf16=config.precision is Precision.bf16,
            fp16=config.precision is Precision.fp16,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=device.type == "cpu",
            seed=config.seed,
        )
        OnOurBatches(
            model=place.model(config, prepared).model,
            args=arguments,
            train_dataset=examples,
            callbacks=[Ends()],
        ).train()
    return {"peak_memory_mib": round(backend.peak_mib(device), 1)}


def _fields(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns a batch as transformers' models take it."""
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask.long()
    return {"input_ids": batch.input_ids, "attention_mask": mask, "labels": batch.labels}


def planned(config: RunConfig, place: Workplace) -> int:
    """Returns the bytes of one allocation for all steps, of a run of the first ones."""
    steps = place.size.first
    prepared = place.prepared(config)
    batches = place.batches(config, prepared)
    tokens = [_tokens(batches[step].micro_batches[0]) for step in range(place.size.steps)]
    workspace = config.workspace.model_copy(update={"checkpoints": f"{config.workspace.checkpoints}-traced"})
    update = {"length": config.length.model_copy(update={"steps": steps}), "workspace": workspace}
    traced = config.model_copy(update=update)
    summary = train(traced, NullSink(), NeverStop()).summary
    shutil.rmtree(workspace.checkpoints, ignore_errors=True)
    gc.collect()
    # Parameters and gradients in fp32, and the two moments of AdamW.
    static_bytes = 16 * int(summary["parameters"] or 0)
    peak_bytes = int(float(summary["peak_memory_mib"] or 0.0) * MIB)
    return planned_bytes(static_bytes, peak_bytes, max(tokens[:steps]), tokens)


def _tokens(batch: Batch) -> int:
    return batch.input_ids.numel()


def measured(cell: Cell, place: Workplace) -> dict[str, Any]:
    """Returns the figures of a cell."""
    config = place.config(cell)
    backend = place.pricing.kind.backend
    device = backend.device(place.pricing.hardware)
    wait = partial(backend.synchronize, device)
    meter = Meter(backend.counters(device), wait, place.size.first, place.size.steps)
    run = hf_trainer if cell.contender in PEERS else ours
    begin = time.perf_counter()
    if device.type == "cuda":
        with allocating(cell.allocation, lambda: planned(config, place)) as allocator:
            found = run(config, place, meter) | allocator()
    else:
        found = run(config, place, meter)
    shutil.rmtree(config.workspace.checkpoints, ignore_errors=True)  # 1.3 GB each
    gc.collect()
    backend.free_cache()
    return {
        "precision": cell.precision.value,
        "contender": cell.contender,
        "batch": cell.batch,
        "allocation": cell.allocation,
        **meter.figures(cell.batch),
        **found,
        "whole_cell_s": round(time.perf_counter() - begin, 1),
    }


@dataclass(slots=True)
class Finished:
    """Rows of finished cells, by name; in a file, where one is given, those of this device.

    Attributes:
        path: JSON lines; None = nothing is kept.
        device: name of the device.
        rows: so far.
    """

    path: Path | None
    device: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with_name = _parsed(line)
                if with_name.get("device") == self.device:
                    self.rows[with_name["cell"]] = with_name["row"]

    def add(self, cell: Cell, row: dict[str, Any]) -> None:
        """Keeps a row at once: the next cell may be the one that the time limit ends."""
        self.rows[str(cell)] = row
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"device": self.device, "cell": str(cell), "row": row}) + "\n")


def _parsed(line: str) -> dict[str, Any]:
    """Returns a line of the state file; nothing of one that was being written when the process ended."""
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return found


def run_cells(
    cells: Sequence[Cell],
    finished: Finished,
    measure: Callable[[Cell], dict[str, Any]],
    *,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measures the cells that are not finished, in order, as far as the time limit allows.

    Args:
        cells: the most important first.
        finished: rows of earlier starts.
        measure: gives a cell's row.
        limit_s: no cell begins that would not fit, judged by the longest so far.
        clock: in seconds.
    """
    begin, longest_s = clock(), 0.0
    failed: dict[str, str] = {}
    not_run: list[str] = []
    for cell in cells:
        if str(cell) in finished.rows:
            continue
        if not_run or clock() - begin + longest_s > limit_s:
            not_run.append(str(cell))
            continue
        cell_began = clock()
        try:
            finished.add(cell, measure(cell))
        except Exception as error:  # the other cells do not depend on this one
            failed[str(cell)] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        longest_s = max(longest_s, clock() - cell_began)
        print(f"{cell}: {failed.get(str(cell)) or json.dumps(finished.rows[str(cell)])}", flush=True)
    if not_run:
        print(
            f"the time limit of {limit_s:.0f} s leaves out {len(not_run)} of {len(cells)} cells: "
            f"{', '.join(not_run)}; start again with the same --state to continue",
            flush=True,
        )
    rows = {str(cell): finished.rows[str(cell)] for cell in cells if str(cell) in finished.rows}
    return {"cells": rows, "not_run": not_run, "failed": failed}


def targets(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns each target of an H200 in bf16 with its limit, what was measured, and whether it is met.

    A target whose cells are missing is neither met nor missed.
    """

    def rate(contender: str, batch: int) -> float | None:
        row = cells.get(str(Cell(Precision.bf16, contender, batch)))
        return None if row is None else float(row["examples_per_s"])

    def seconds(*contenders: str) -> float | None:
        tried = itertools.product(contenders, BATCHES)
        rates = [found for contender, batch in tried if (found := rate(contender, batch)) is not None]
        return EPOCHS_OF_IMDB / max(rates) if rates else None

    rows_of_32 = (cells.get(str(Cell(Precision.bf16, own, 32)), {}) for own in (*ENCODERS, *GRAPHS))
    used = [float(row["mfu_pct"]) for row in rows_of_32 if row.get("mfu_pct") is not None]
    ratios = []
    for batch in BATCHES:
        mine = [found for own in (*ENCODERS, *GRAPHS) if (found := rate(own, batch)) is not None]
        if mine and (peer := rate("hf_trainer_eager", batch)) is not None:
            ratios.append(max(mine) / peer)
    judged = (
        ("imdb_3_epochs_s", seconds("huggingface"), 60.0, True),
        ("imdb_3_epochs_fused_s", seconds("fused", *GRAPHS), 32.0, True),
        ("speedup_over_hf_eager_autocast", min(ratios, default=None), 2.0, False),
        ("mfu_pct_batch_32", max(used, default=None), 35.0, False),
    )
    return {
        name: {
            "limit": limit,
            "measured": None if value is None else round(value, 3),
            "met": None if value is None else (value <= limit if at_most else value >= limit),
        }
        for name, value, limit, at_most in judged
    }


def rehearse(folder: Path, size: Size) -> dict[str, int]:
    """Goes through all that precedes the device, for every cell of a GPU; returns how much was made."""
    place = Workplace.written(folder, size, CATALOGUE["H200"].pricing(1), examples=4 * max(size.batches))
    cells = ordered(PRECISIONS, size.batches)
    configs = {cell: place.config(cell) for cell in cells}
    prepared = place.prepared(configs[cells[0]])
    batches = 0
    for cell, config in configs.items():
        if cell.precision is cells[0].precision:
            batches += len(place.batches(config, prepared)[0].micro_batches)
    encoders = {config.model.encoder: config for config in configs.values()}
    for config in encoders.values():
        place.model(config, prepared)
    return {"configurations": len(configs), "models": len(encoders), "batches": batches}


def pricing_of(name: str | None) -> DevicePricing:
    """Returns the catalogue entry of a GPU, by the name that its driver gives it, or of the CPUs here."""
    if name is None:
        return CATALOGUE["cpu"].pricing(os.cpu_count() or 1)
    for entry in CATALOGUE.values():
        if entry.kind.nvml and entry.reported_as and not other_device(name, entry.reported_as):
            return entry.pricing(1)
    # Its steps are timed all the same; without peak rates they have no MFU, and nothing here is modelled.
    unknown = {"hardware": name, "peak_tflops": None, "bandwidth_gb_s": None, "reported_as": ()}
    return CATALOGUE["H200"].pricing(1).model_copy(update=unknown)


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns all figures."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    transformers.utils.logging.set_verbosity_error()
    size = FULL if name is not None and not given.smoke else SMOKE
    precisions = PRECISIONS if name is not None else PRECISIONS[-1:]
    figures: dict[str, Any] = {"device": name or "cpu", "rehearsed": None, "targets": {}}
    if name is None:
        figures["rehearsed"] = rehearse(folder / "rehearsal", SMOKE if given.smoke else FULL)
        print(f"no CUDA device: rehearsed {figures['rehearsed']}; cells of the smallest model follow")
    cells = ordered(precisions, size.batches, given.allocations if name is not None else ALLOCATIONS[:1])
    if name is None:
        cells = [cell for cell in cells if cell.contender not in GRAPHS]
    if importlib.util.find_spec("accelerate") is None:
        figures["left_out"] = "accelerate is not installed: the Hugging Face Trainer was not run"
        print(figures["left_out"], flush=True)
        cells = [cell for cell in cells if cell.contender not in PEERS]
    examples = size.steps * max(size.batches)
    place = Workplace.written(folder / "cells", size, pricing_of(name), examples=examples)
    finished = Finished(given.state, figures["device"])
    figures |= run_cells(cells, finished, lambda cell: measured(cell, place), limit_s=given.limit_s)
    if name is not None and "H200" in name:
        figures["targets"] = targets(figures["cells"])
    return figures


def main() -> None:
    """Command line; exit code 1 when a cell failed."""
    parser = BENCHMARK.parser()
    parser.add_argument("--state", type=Path, help="file of finished cells, for the next start")
    parser.add_argument(
        "--allocations",
        nargs="+",
        choices=ALLOCATIONS,
        default=ALLOCATIONS,
        help="where a GPU's activations come from; the first in all cells, others in the most important",
    )
    parser.add_argument("--limit-s", type=float, default=540.0, help="no cell begins that would not fit")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stillhouse-trainer-") as folder:
        figures = measure(given, Path(folder))
    BENCHMARK.report(figures, given)
    raise SystemExit(1 if figures["failed"] else 0)


if __name__ == "__main__":
    main()
