"""Ways to train on two cores, side by side in one run.

    python -m benchmarks.parallel [--rounds R] [--steps N] [--only WORDS]

Each variant is a run of this project (`trainers.entrypoint.train`) with the same model, data and
global batch; two worker processes with one CPU thread each are started once and train the variants in
turn, round after round, so that a slow minute of the machine meets all of them. A run traces its last
steps (`telemetry.trace_steps`), and everything about time is read from that trace; the figures are
medians over the traced steps of all rounds, and ratios are medians of the ratios of a round.

- single: one worker trains the whole batch, the other is idle;
- share x2: both train half of the batch each at the same time and exchange nothing: the arithmetic of
  ddp x2 without its communication, on the same two cores;
- ddp x2, also in buckets of 1 MiB and with compressed gradients; pipeline x2 with both engines, 1F1B and m
  micro-batches, and by GPipe, whose stages do not wait for each other's answer after each pass;
- pipeline x4: one layer on each of four stages, in a group of four worker processes.

`rows` has each variant. `ddp_overhead_pct` is the step of ddp x2 by that of share x2, less 1: all that being
data-parallel costs, exposed communication included; the two take turns three times in a round. `exposed_ms`
is the communication that no computation hides.

The bubble is the time of a stage from the beginning of a step's passes until they are done on all
stages in which it computes nothing, as a share of that time, mean over the stages. The formula
(p-1)/(m+p-1) is that of stages which take equally long and send in no time; what else is in the measured
one is sending, and the imbalance of the stages (as many parameters in each, but embeddings and head cost
another time per parameter than layers). All texts are longer than a sequence, so that all passes are alike.
`bubble_error_pct` is the largest error of the formula where there are at least 4 micro-batches. Where there
are more stages than cores, stages take turns on a core: the measured bubble then holds what other stages
compute, which the formula does not know. Such rows say `oversubscribed` and have no error.

The estimate of each ddp x2 variant is that of `stillhouse profile`, from layer times of two processes at
once, a fit of the all-reduce between them and the compression's own time. `estimator_error_pct` is that of
ddp x2, `estimator_error_pct_by_variant` that of all; `onebit_bytes_ratio` the bytes of onebit by those of
ddp x2. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import Benchmark
from service.planner.step_time import estimate, exchange_of, link_of, step_of
from trainers.checkpoints.manifest import TRACE, attempt_folder
from trainers.config import RunConfig
from trainers.data.synthetic import write_corpus
from trainers.profiling import Profile
from trainers.profiling.step_costs import (
    MIB,
    GroupError,
    LocalGroup,
    compression_cost,
    measure_group,
)
from trainers.reporting import NullSink, Point

BENCHMARK = Benchmark(
    "parallel",
    __doc__,
    fields=(
        "rows", "ddp_overhead_pct", "bubble_error_pct", "onebit_bytes_ratio", "estimator_error_pct",
        "estimator_error_pct_by_variant",
    ),
    also=("estimate", "size", "threads_per_worker", "rounds", "steps", "seconds"),
)  # fmt: skip
WORKERS = 2
CORES = len(os.sched_getaffinity(0))
STAGES = 4
"""Of the pipeline that has more stages than two cores can run at once."""
_REVIEWS = 8
"""That make one text: each has some 25 words."""
WARM_UP = 3
_COMPARED = ("share x2", "ddp x2")
_MANY = 4
"""Micro-batches from which on a pipeline's bubble is compared with its formula."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained.

    Attributes:
        global_size: examples of a step.
        max_length: tokens of each.
        micro_batches: of the pipelines.
        compressions: of gradients.
        schedules: of the pipeline of four stages.
        turns: of the two that `ddp_overhead_pct` compares, in a round.
    """

    global_size: int
    max_length: int
    micro_batches: tuple[int, ...]
    compressions: tuple[str, ...]
    schedules: tuple[str, ...]
    turns: int


FULL = Size(32, 128, (1, 2, 4, 8), ("fp16", "bf16", "powersgd", "onebit"), ("1f1b", "gpipe"), turns=3)
SMOKE = Size(8, 8, (4,), ("fp16", "onebit"), ("1f1b",), turns=1)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    Attributes:
        name: of its row.
        parallel: the spec's section.
        micro_batches: of a step on one worker.
        optimizer: of the spec.
        both: both workers train a run of their own, half of the batch each.
    """

    name: str
    parallel: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"name": "adan"})
    both: bool = False

    @property
    def pipeline(self) -> bool:
        """Whether the layers are dealt out."""
        return self.parallel.get("strategy") == "pipeline"

    @property
    def estimated(self) -> bool:
        """Whether `stillhouse profile` estimates it."""
        return self.parallel.get("strategy") == "ddp"

    @property
    def processes(self) -> int:
        """Workers of the group that it runs in."""
        return max(WORKERS, self.parallel.get("workers", 1))


def variants(size: Size) -> list[Variant]:
    """Everything that is measured, in the order of a round."""
    ddp = {"strategy": "ddp", "workers": WORKERS}
    found = [
        Variant("single"),
        Variant("share x2", both=True),
        Variant("ddp x2", ddp),
        Variant("ddp x2 bucket 1 MiB", {**ddp, "bucket_mib": 1}),
        *(Variant(f"ddp x2 {way}", {**ddp, "compression": way}) for way in size.compressions),
    ]
    pipeline = {"strategy": "pipeline", "workers": WORKERS}
    for engine in ("torch", "deepspeed"):
        for count in size.micro_batches:
            found.append(Variant(f"pipeline x2 {engine} m={count}", {**pipeline, "engine": engine}, count))
    many = [count for count in size.micro_batches if count >= _MANY]
    for count in many:
        found.append(Variant(f"pipeline x2 gpipe m={count}", {**pipeline, "schedule": "gpipe"}, count))
    four = {"strategy": "pipeline", "workers": STAGES}
    for count in many:
        for schedule in size.schedules:
            found.append(Variant(f"pipeline x4 {schedule} m={count}", {**four, "schedule": schedule}, count))
    return found


def in_turns(chosen: Sequence[Variant], turns: int) -> list[Variant]:
    """A round: the two that `ddp_overhead_pct` compares take turns, all others come once."""
    pair = [variant for variant in chosen if variant.name in _COMPARED]
    return [*pair * turns, *(variant for variant in chosen if variant not in pair)]


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run of a variant said.

    Attributes:
        steps_ms: of each traced step, the longest worker's.
        exposed_ms: communication per step that nothing hides, mean over workers.
        bubble: measured share; None for a run without stages.
        summary: of the run, rank 0's, with the last points.
    """

    steps_ms: tuple[float, ...]
    exposed_ms: float
    bubble: float | None
    summary: Mapping[str, Any]

    @property
    def step_ms(self) -> float:
        """Median."""
        return statistics.median(self.steps_ms)


def config_of(variant: Variant, size: Size, folder: Path, steps: int) -> RunConfig:
    """The run of a variant."""
    examples = size.global_size // WORKERS if variant.both else size.global_size
    replicas = WORKERS if variant.parallel.get("strategy") == "ddp" else 1
    return RunConfig.model_validate(
        {
            "task": {
                "name": "imdb", "path": str(folder / "texts"), "max_length": size.max_length,
                "validation_examples": 2, "test": "none",
            },
            "model": {"name": "mini"},
            "optimizer": {"learning_rate": 1e-4, **variant.optimizer},
            "batch": {"global_size": examples, "micro_size": examples // replicas // variant.micro_batches},
            "length": {"steps": WARM_UP + steps},
            "parallel": dict(variant.parallel),
            "telemetry": {"trace_steps": steps},
            "checkpoint": {"every_s": 0.0},
            "evaluation": {"every_epochs": 1000},
            "threads": 1,
            "seed": 0,
            "rates": {
                "hardware": "cpu", "device": "cpu", "price_usd_per_hour": 0.05,
                "price_date": "2026-11-21", "tdp_w": 7.5,
            },
            "workspace": {
                "checkpoints": str(folder / "checkpoints"), "cache": str(folder / "cache"),
                "data_roots": (str(folder),),
            },
        }
    )  # fmt: skip


class LastPoints(NullSink):
    """Keeps the last value of each metric: after a compression's warm-up, unlike a run's mean."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def points(self, points: Sequence[Point]) -> None:
        """Keep the last ones."""
        self.values |= {point.name: point.value for point in points}


def train_variant(config: RunConfig, ranks: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """On a worker: train, and say the summary and the trace; None where it has nothing to do."""
    from torch import distributed

    from trainers.entrypoint import train
    from trainers.reporting import NeverStop

    rank = distributed.get_rank()
    distributed.barrier()
    answer = None
    if rank in ranks:
        together = config.parallel.workers > 1
        with tempfile.TemporaryDirectory() as own:
            if not together:
                workspace = config.workspace.model_copy(update={"checkpoints": own})
                config = config.model_copy(update={"workspace": workspace})
            sink = LastPoints()
            outcome = train(config, sink, NeverStop())
            file = attempt_folder(Path(config.workspace.checkpoints), 1) / TRACE
            if not together or rank == 0:
                answer = {**outcome.summary, **sink.values}, json.loads(file.read_text(encoding="utf-8"))
    distributed.barrier()
    return answer


def run(group: LocalGroup, variant: Variant, size: Size, folder: Path, steps: int) -> Ran:
    """Train a variant once."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        config = config_of(variant, size, folder, steps)
        config = config.model_copy(
            update={"workspace": config.workspace.model_copy(update={"checkpoints": own})}
        )
        ranks = tuple(range(group.workers)) if variant.both or config.parallel.workers > 1 else (0,)
        answers = [answer for answer in group.run(train_variant, config, ranks) if answer is not None]
    spans: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)  # by worker and step
    for number, (_, document) in enumerate(answers):
        for event in document["traceEvents"]:
            if event.get("cat") == "phase":
                spans[number + event["pid"], event["args"]["step"]].append(event)
    by_step: dict[int, list[float]] = defaultdict(list)
    for (_, step), of in spans.items():
        by_step[step].append(sum(event["dur"] for event in of) / 1e3)
    exposed = [
        sum(event["dur"] for event in of if event["name"] == "communication") / 1e3 for of in spans.values()
    ]
    return Ran(
        tuple(max(of) for of in by_step.values()),
        statistics.fmean(exposed),
        statistics.fmean(_bubble(of) for of in spans.values()) if variant.pipeline else None,
        answers[0][0],
    )


def _bubble(spans: Sequence[Mapping[str, Any]]) -> float:
    """Share of a stage's part of a step, all passes and the waits before, between and after them."""
    took = {
        name: sum(event["dur"] for event in spans if event["name"] == name)
        for name in ("forward", "backward", "bubble")
    }
    return took["bubble"] / sum(took.values())


def row(variant: Variant, size: Size, taken: Sequence[Ran], single: Sequence[Ran]) -> dict[str, Any]:
    """A variant's figures: medians over its rounds."""
    step_ms = statistics.median(one.step_ms for one in taken)
    found: dict[str, Any] = {
        "variant": variant.name,
        "step_ms": step_ms,
        "samples_per_s": 1e3 * size.global_size / step_ms,
        "exposed_ms": statistics.median(one.exposed_ms for one in taken),
    }
    if single:
        found["speed_up"] = statistics.median(
            single[number * len(single) // len(taken)].step_ms / one.step_ms
            for number, one in enumerate(taken)
        )
    if variant.pipeline:
        measured = statistics.median(one.bubble for one in taken if one.bubble is not None)
        stages = variant.processes
        formula = (stages - 1) / (variant.micro_batches + stages - 1)
        found |= {
            "stages": stages,
            "micro_batches": variant.micro_batches,
            "bubble_pct": 100 * measured,
            "bubble_formula_pct": 100 * formula,
        }
        if stages > CORES:
            found["oversubscribed"] = f"{stages} stages on {CORES} cores"
        else:
            found["bubble_error_pct"] = 100 * (measured / formula - 1)
    for name in ("bytes_sent_per_step", "statistical_efficiency", "goodput"):
        values = [one.summary[name] for one in taken if isinstance(one.summary.get(name), int | float)]
        if values:
            found[name] = statistics.median(values)
    return found


def predicted(
    group: LocalGroup, measured: Profile, variant: Variant, size: Size, folder: Path, steps: int
) -> tuple[float, dict[str, Any]]:
    """Milliseconds of a variant's step as `stillhouse profile` estimates it, and what it is made of.

    Args:
        measured: of the same round; its layers and its link are those of every variant.
    """
    config = config_of(variant, size, folder, steps)
    cost = measured.exchange
    assert cost is not None
    own = compression_cost(group, config, cost)
    found = estimate(
        step_of(measured.step, config.parallel),
        link_of(cost),
        WORKERS,
        global_size=size.global_size,
        exchange=exchange_of(config.parallel, own),
    )
    return found.step_ms, {
        "compute_ms": found.compute_ms,
        "communication_ms": found.communication_ms,
        "compression_ms": found.compression_ms,
        "exposed_ms": found.exposed_ms,
        "buckets": found.buckets,
        "gradients_mib": sum(layer.gradient_bytes for layer in measured.step.layers) / MIB,
        "sent_mib": found.sent_bytes / MIB,
        "message_ms": cost.message_ms,
        "ms_per_mib": cost.ms_per_mib,
        "taken": cost.taken,
    }


@dataclass(slots=True)
class Results:
    """What was measured, by variant.

    Attributes:
        profile: of this round.
        taken: each time that it was trained.
        estimates: of its step, with what each is made of.
        refused: why it did not run.
    """

    profile: Profile | None = None
    taken: dict[str, list[Ran]] = field(default_factory=lambda: defaultdict(list))
    estimates: dict[str, list[tuple[float, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    refused: dict[str, str] = field(default_factory=dict)


def measure(chosen: Sequence[Variant], size: Size, folder: Path, rounds: int, steps: int) -> Results:
    """Trains the variants in turn, round after round, first those of two workers and then those of four."""
    results = Results()
    began_s = time.monotonic()
    for processes in sorted({variant.processes for variant in chosen}):
        turns = in_turns([variant for variant in chosen if variant.processes == processes], size.turns)
        with LocalGroup(processes) as group:
            run(group, Variant("warm-up"), size, folder, 1)  # imports, tokenised data
            for number in range(rounds):
                results.profile = None
                for variant in turns:
                    if variant.name not in results.refused:
                        _take(results, group, variant, size, folder, steps)
                passed_s = time.monotonic() - began_s
                print(f"{processes} workers, round {number + 1}: {passed_s:.0f} s", flush=True)
    return results


def _take(
    results: Results, group: LocalGroup, variant: Variant, size: Size, folder: Path, steps: int
) -> None:
    """Trains a variant once, and estimates its step in the same minute."""
    try:
        results.taken[variant.name].append(run(group, variant, size, folder, steps))
        if variant.estimated:
            if results.profile is None:
                config = config_of(variant, size, folder, steps)
                results.profile = measure_group(
                    group, config, steps=steps, warm_up=WARM_UP, check=False, shared=folder
                )
            results.estimates[variant.name].append(
                predicted(group, results.profile, variant, size, folder, steps)
            )
    except (GroupError, ValueError) as error:
        results.refused[variant.name] = str(error).strip().splitlines()[-1]
        if isinstance(error, GroupError) and "has not responded" in str(error):
            raise


def main() -> None:
    """Measures everything and prints one JSON object as the last line."""
    parser = BENCHMARK.parser()
    parser.size("--rounds", 3, smoke=1)
    parser.size("--steps", 5, smoke=1, help="traced steps of a run")
    parser.add_argument("--only", default="", help="variants whose name has one of these words, by comma")
    given = parser.parse_args()
    size = SMOKE if given.smoke else FULL
    words = [word for word in given.only.split(",") if word]
    chosen = [v for v in variants(size) if not words or any(word in v.name for word in words)]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stillhouse-parallel-") as name:
        folder = Path(name)
        write_corpus(folder / "texts", train=size.global_size * 16, test=2, seed=0, reviews=_REVIEWS)
        results = measure(chosen, size, folder, given.rounds, given.steps)
    for variant, reason in results.refused.items():
        print(f"{variant}: {reason}")
    if given.smoke and results.refused:
        raise SystemExit(f"these variants did not run: {', '.join(results.refused)}")
    taken = results.taken
    rows = [row(v, size, taken[v.name], taken["single"]) for v in chosen if taken[v.name]]
    for one in rows:
        print(_line(one))
    answer = {
        "rows": rows,
        **figures(rows, results),
        "size": asdict(size),
        "threads_per_worker": 1,
        "rounds": given.rounds,
        "steps": given.steps,
        "seconds": time.monotonic() - began_s,
    }
    BENCHMARK.report(answer, given)


def _line(one: Mapping[str, Any]) -> str:
    """A variant's figures for people."""
    line = (
        f"{one['variant']:28} {one['step_ms']:8.1f} ms  {one['samples_per_s']:7.1f}/s  exposed "
        f"{one['exposed_ms']:6.1f} ms"
    )
    if "bubble_pct" in one:
        line += f"  bubble {one['bubble_pct']:5.1f}% (formula {one['bubble_formula_pct']:.1f}%"
        line += f"; not comparable: {one['oversubscribed']})" if "oversubscribed" in one else ")"
    return line


def figures(rows: Sequence[Mapping[str, Any]], results: Results) -> dict[str, Any]:
    """The figures that the benchmark exists for; None where a variant did not run."""
    by_name = {one["variant"]: one for one in rows}
    ddp, share = results.taken.get("ddp x2", ()), results.taken.get("share x2", ())
    overhead = [100 * (d.step_ms / s.step_ms - 1) for d, s in zip(ddp, share, strict=False)]
    bubbles = [
        one["bubble_error_pct"]
        for one in rows
        if one.get("micro_batches", 0) >= _MANY and "bubble_error_pct" in one
    ]
    plain, onebit = (by_name.get(name, {}).get("bytes_sent_per_step") for name in ("ddp x2", "ddp x2 onebit"))
    errors = {
        name: statistics.median(
            100 * (ms / ran.step_ms - 1) for (ms, _), ran in zip(found, results.taken[name], strict=False)
        )
        for name, found in results.estimates.items()
    }
    return {
        "ddp_overhead_pct": statistics.median(overhead) if overhead else None,
        "bubble_error_pct": max(bubbles, key=abs) if bubbles else None,
        "onebit_bytes_ratio": onebit / plain if plain and onebit else None,
        "estimator_error_pct": errors.get("ddp x2"),
        "estimator_error_pct_by_variant": errors,
        "estimate": {name: found[-1][1] for name, found in results.estimates.items()},
    }


if __name__ == "__main__":
    main()
