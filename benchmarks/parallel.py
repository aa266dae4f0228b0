"""Ways to train on two cores, side by side in one run.

    python -m benchmarks.parallel [--rounds R] [--steps N] [--only WORDS] [--results FILE]

Each variant is a run of this project (`trainers.entrypoint.train`) with the same model, data and
global batch; two worker processes with one CPU thread each are started once and train the variants in
turn, round after round, so that a slow minute of the machine meets all of them. A run traces its last
steps (`telemetry.trace_steps`), and everything about time is read from that trace; the figures are
medians over the traced steps of all rounds, and ratios are medians of the ratios of a round.

- single: one worker trains the whole batch, the other is idle;
- share x2: both train half of the batch each at the same time and exchange nothing: the arithmetic of
  ddp x2 without its communication, on the same two cores;
- ddp x2, and with compressed gradients; pipeline x2 with both engines, 1F1B and m micro-batches, and by
  GPipe, whose stages do not wait for each other's answer after each pass.

`ddp_overhead_pct` is the step of ddp x2 by that of share x2, less 1: all that being data-parallel
costs, exposed communication included; the two take turns three times in a round. `exposed_ms` is the
communication that no computation hides.

The bubble is the time of a stage from the beginning of a step's passes until they are done on all
stages in which it computes nothing, as a share of that time, mean over the stages. The formula
(p-1)/(m+p-1) is that of stages which take equally long and send in no time; what else is in the measured
one is sending, and the imbalance of the stages (as many parameters in each, but embeddings and head cost
another time per parameter than layers). All texts are longer than a sequence, so that all passes are alike.

The estimate of ddp x2 is that of `stillhouse profile`, from layer times of two processes at once and a
fit of the all-reduce between them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from service.planner.step_time import LayerCost, Link, Step, estimate
from trainers.checkpoints.manifest import TRACE
from trainers.config import RunConfig
from trainers.measuring.figures import StepTimes
from trainers.measuring.local_group import GroupError, LocalGroup
from trainers.measuring.profile import (
    MIB,
    alone,
    exchange_times,
    fit,
    layer_times_together,
    mean_step,
)
from trainers.reporting import NullSink, Point
from trainers.synthetic import write_corpus

WORKERS = 2
GLOBAL = 32
MAX_LENGTH = 128
_REVIEWS = 8
"""That make one text: each has some 25 words."""
WARM_UP = 3
MICRO_BATCHES = (1, 2, 4, 8)
_COMPARED = ("share x2", "ddp x2")
_TURNS = 3
COMPRESSIONS = ("fp16", "bf16", "powersgd", "onebit")


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


def variants() -> list[Variant]:
    """Everything that is measured, in the order of a round."""
    ddp = {"strategy": "ddp", "workers": WORKERS}
    found = [
        Variant("single"),
        Variant("share x2", both=True),
        Variant("ddp x2", ddp),
        *(Variant(f"ddp x2 {way}", {**ddp, "compression": way}) for way in COMPRESSIONS),
    ]
    pipeline = {"strategy": "pipeline", "workers": WORKERS}
    for engine in ("torch", "deepspeed"):
        for count in MICRO_BATCHES:
            found.append(Variant(f"pipeline x2 {engine} m={count}", {**pipeline, "engine": engine}, count))
    for count in MICRO_BATCHES[2:]:
        found.append(Variant(f"pipeline x2 gpipe m={count}", {**pipeline, "schedule": "gpipe"}, count))
    return found


def in_turns(chosen: Sequence[Variant]) -> list[Variant]:
    """A round: the two that `ddp_overhead_pct` compares take turns, all others come once."""
    pair = [variant for variant in chosen if variant.name in _COMPARED]
    return [*pair * _TURNS, *(variant for variant in chosen if variant not in pair)]


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


def config_of(variant: Variant, folder: Path, steps: int) -> RunConfig:
    """The run of a variant."""
    size = GLOBAL // WORKERS if variant.both else GLOBAL
    replicas = WORKERS if variant.parallel.get("strategy") == "ddp" else 1
    return RunConfig.model_validate(
        {
            "task": {
                "name": "imdb", "path": str(folder / "texts"), "max_length": MAX_LENGTH,
                "validation_examples": 2, "test": "none",
            },
            "model": {"student": "mini"},
            "optimizer": {"learning_rate": 1e-4, **variant.optimizer},
            "batch": {"global_size": size, "micro_size": size // replicas // variant.micro_batches},
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


def write_texts(folder: Path, count: int) -> None:
    """Synthetic reviews, so many of a kind in each text that it is longer than a sequence."""
    write_corpus(folder, train=count * _REVIEWS, test=2 * _REVIEWS, seed=0)
    for file in folder.glob("*.jsonl"):
        by_label: dict[int, list[str]] = defaultdict(list)
        for line in file.read_text(encoding="utf-8").splitlines():
            review = json.loads(line)
            by_label[review["label"]].append(review["text"])
        rows = [
            {"text": " ".join(texts[at : at + _REVIEWS]), "label": label}
            for label, texts in by_label.items()
            for at in range(0, len(texts), _REVIEWS)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
            file = Path(config.workspace.checkpoints) / TRACE
            if not together or rank == 0:
                answer = {**outcome.summary, **sink.values}, json.loads(file.read_text(encoding="utf-8"))
    distributed.barrier()
    return answer


def run(group: LocalGroup, variant: Variant, folder: Path, steps: int) -> Ran:
    """Train a variant once."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        config = config_of(variant, folder, steps)
        config = config.model_copy(
            update={"workspace": config.workspace.model_copy(update={"checkpoints": own})}
        )
        ranks = tuple(range(WORKERS)) if variant.both or config.parallel.workers > 1 else (0,)
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


def row(variant: Variant, taken: Sequence[Ran], single: Sequence[Ran]) -> dict[str, Any]:
    """A variant's figures: medians over its rounds."""
    size = GLOBAL // WORKERS if variant.both else GLOBAL
    step_ms = statistics.median(one.step_ms for one in taken)
    found: dict[str, Any] = {
        "variant": variant.name,
        "step_ms": step_ms,
        "samples_per_s": 1e3 * size * (WORKERS if variant.both else 1) / step_ms,
        "exposed_ms": statistics.median(one.exposed_ms for one in taken),
    }
    if single:
        found["speed_up"] = statistics.median(
            single[number * len(single) // len(taken)].step_ms / one.step_ms
            for number, one in enumerate(taken)
        )
    if variant.pipeline:
        measured = statistics.median(one.bubble for one in taken if one.bubble is not None)
        formula = (WORKERS - 1) / (variant.micro_batches + WORKERS - 1)
        found |= {
            "micro_batches": variant.micro_batches,
            "bubble_pct": 100 * measured,
            "bubble_formula_pct": 100 * formula,
            "bubble_error_pct": 100 * (measured / formula - 1),
        }
    for name in ("bytes_sent_per_step", "statistical_efficiency", "goodput"):
        values = [one.summary[name] for one in taken if isinstance(one.summary.get(name), int | float)]
        if values:
            found[name] = statistics.median(values)
    return found


def predicted(group: LocalGroup, folder: Path, steps: int) -> tuple[float, dict[str, Any]]:
    """Milliseconds of a step of ddp x2 as `stillhouse profile` estimates it, and what it is made of."""
    config = config_of(Variant("single"), folder, steps)
    times: StepTimes = mean_step(
        group.run(layer_times_together, alone(config, GLOBAL // WORKERS), steps, WARM_UP)
    )
    cost = fit(WORKERS, group.run(exchange_times))
    layers = tuple(
        LayerCost(layer.name, layer.forward_ms, layer.backward_ms, layer.gradient_bytes)
        for layer in times.layers
    )
    step = Step(layers, times.rest_ms, times.micro_batches, times.examples)
    link = Link.measured(WORKERS, message_ms=cost.message_ms, ms_per_mib=cost.ms_per_mib, taken=cost.taken)
    found = estimate(step, link, WORKERS, global_size=GLOBAL)
    gradients_mib = sum(layer.gradient_bytes for layer in layers) / MIB
    return found.step_ms, {
        "compute_ms": found.compute_ms,
        "communication_ms": found.communication_ms,
        "exposed_ms": found.exposed_ms,
        "gradients_mib": gradients_mib,
        "message_ms": cost.message_ms,
        "ms_per_mib": cost.ms_per_mib,
        "taken": cost.taken,
    }


def main() -> None:
    """Measure everything and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="traced steps of a run")
    parser.add_argument("--only", default="", help="variants whose name has one of these words, by comma")
    parser.add_argument("--results", type=Path, help="write the JSON object there too")
    arguments = parser.parse_args()
    words = [word for word in arguments.only.split(",") if word]
    chosen = [v for v in variants() if not words or any(word in v.name for word in words)]
    began_s = time.monotonic()
    taken: dict[str, list[Ran]] = defaultdict(list)
    estimates: list[tuple[float, dict[str, Any]]] = []
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="stillhouse-parallel-") as name:
        folder = Path(name)
        write_texts(folder / "texts", GLOBAL * 16)
        with LocalGroup(WORKERS) as group:
            run(group, Variant("warm-up"), folder, 1)  # imports, tokenised data
            for number in range(arguments.rounds):
                for variant in in_turns(chosen):
                    if variant.name in refused:
                        continue
                    try:
                        taken[variant.name].append(run(group, variant, folder, arguments.steps))
                        if variant.name == "ddp x2":  # the estimate is of the same minute
                            estimates.append(predicted(group, folder, arguments.steps))
                    except (GroupError, ValueError) as error:
                        refused[variant.name] = str(error).strip().splitlines()[-1]
                        if isinstance(error, GroupError) and "has not answered" in str(error):
                            raise
                print(f"round {number + 1}: {time.monotonic() - began_s:.0f} s", flush=True)
    for variant, reason in refused.items():
        print(f"{variant}: {reason}")
    rows = [row(v, taken[v.name], taken["single"]) for v in chosen if taken[v.name]]
    for one in rows:
        print(
            f"{one['variant']:28} {one['step_ms']:8.1f} ms  {one['samples_per_s']:7.1f}/s  exposed "
            f"{one['exposed_ms']:6.1f} ms"
            + (
                f"  bubble {one['bubble_pct']:5.1f}% (formula {one['bubble_formula_pct']:.1f}%)"
                if "bubble_pct" in one
                else ""
            )
        )
    answer = {"rows": rows, **figures(rows, taken, estimates), "machine": _machine(arguments)}
    answer["seconds"] = time.monotonic() - began_s
    if arguments.results:
        arguments.results.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(answer))


def figures(
    rows: Sequence[Mapping[str, Any]],
    taken: Mapping[str, Sequence[Ran]],
    estimates: Sequence[tuple[float, Mapping[str, Any]]],
) -> dict[str, Any]:
    """The figures that the benchmark exists for; None where a variant did not run."""
    by_name = {one["variant"]: one for one in rows}
    ddp, share = taken.get("ddp x2", ()), taken.get("share x2", ())
    overhead = [100 * (d.step_ms / s.step_ms - 1) for d, s in zip(ddp, share, strict=False)]
    bubbles = [
        one["bubble_error_pct"] for one in rows if one.get("micro_batches", 0) >= 4 and "bubble_pct" in one
    ]
    plain, onebit = (by_name.get(name, {}).get("bytes_sent_per_step") for name in ("ddp x2", "ddp x2 onebit"))
    errors = [100 * (ms / d.step_ms - 1) for (ms, _), d in zip(estimates, ddp, strict=False)]
    return {
        "ddp_overhead_pct": statistics.median(overhead) if overhead else None,
        "bubble_error_pct": max(bubbles, key=abs) if bubbles else None,
        "onebit_bytes_ratio": onebit / plain if plain and onebit else None,
        "estimator_error_pct": statistics.median(errors) if errors else None,
        "estimate": dict(estimates[-1][1]) if estimates else None,
    }


def _machine(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads_per_worker": 1,
        "model": "mini",
        "global_size": GLOBAL,
        "max_length": MAX_LENGTH,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
    }


if __name__ == "__main__":
    main()
