"""What a grid will take before it runs: time, money and energy with a 90% interval and its basis. Pure.

- **Work** of a run is optimizer steps x global batch x `task.max_length`: the positions computed at most.
- A run is forecast from finished runs of the same task, dataset, student, teacher (or none), hardware,
  workers, CPUs per worker, strategy, encoder and precision; of those, from the nearest by `LIKENESS`.
- **Time** = median start-up + work x median of (time - start-up - lost time) / work. Energy = time x median
  of energy / time; the price is the catalogue's.
- **Interval**: Student's t on logarithms of the rates, and never narrower than the tier's `floor`.
- **Without history**, time = arithmetic / (peak x devices x utilisation), with a utilisation between
  `LEAST_MFU` and `MOST_MFU`, and at the low end texts that fill a quarter of `max_length`.
- Runs of one sweep err in the same direction, so ends of intervals are added, not averaged.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from service.config.hardware import Hardware, find
from service.domain.metrics import Span
from service.domain.serialization import Serializable
from service.specs.experiment import ExperimentSpec
from trainers.config import SHARERS, Precision, Site, TaskConfig
from trainers.telemetry.flops import FlopCount, Tally
from trainers.telemetry.usage import J_PER_KWH

MFU, LEAST_MFU, MOST_MFU = 0.25, 0.05, 0.6
"""Share of the published peak that BERT training reaches: in the middle, and between these."""
CPU_GFLOPS, LEAST_CPU_GFLOPS, MOST_CPU_GFLOPS = 30.0, 5.0, 100.0
"""What one virtual CPU does in fp32, for which there is no published peak; in GFLOP/s."""
LEAST_FILLED = 0.25  # Share of `max_length`, at the low end
SETUP_S = 2.0  # Where there is no history
_FEWEST_FOR_SPREAD = 3


@dataclass(frozen=True, slots=True)
class Likeness:
    words: str  # What is the same beyond the rule's fields
    floor: float  # Least factor between the estimate and an end of its interval


NO_SITE = Site()
LIKENESS = (
    Likeness("the same batch, optimizer and text length", 1.10),
    Likeness("the same text length, another batch or optimizer", 1.4),
    Likeness("another text length", 2.0),
)  # Nearest first


@dataclass(frozen=True, slots=True)
class Past:
    """A finished run, its axis values written into the spec."""

    spec: ExperimentSpec
    steps: int
    total_time_s: float
    setup_time_s: float
    energy_kwh: float | None


@dataclass(frozen=True, slots=True)
class RunForecast:
    time_s: Span
    cost_usd: Span
    energy_kwh: Span
    device_hours: Span
    basis: str
    from_history: bool


@dataclass(frozen=True, slots=True)
class Forecast(Serializable):
    """What a whole grid will take; 90% intervals."""

    runs: int  # Runs that are forecast
    cost_usd: Span  # Cost, in USD; 0 where nothing is forecast
    energy_kwh: Span  # Energy, in kWh; 0 where nothing is forecast
    device_hours: Span  # Device time, in hours summed over runs; 0 where nothing is forecast
    co2_kg: Span | None  # CO2 of that energy at the pool's site, in kg; null = not known
    basis: tuple[str, ...]  # What it rests on, in words, each with its number of runs
    unknown: tuple[str, ...]  # Why other runs are not forecast, in words
    warnings: tuple[str, ...]  # What does not fit into the budget, in words


@dataclass(frozen=True, slots=True)
class GridForecast(Forecast):
    shortest: RunForecast | None  # The cheapest single run; None = none is forecast


@dataclass(frozen=True, slots=True)
class Cell:
    """A grid point, or a sample that stands for several."""

    spec: ExperimentSpec
    runs: float  # Number of runs that it stands for
    student: FlopCount | None  # Of its encoder; None = not known without reading the model


CountExamples = Callable[[TaskConfig], int | None]


def nothing_counted(task: TaskConfig) -> None:
    """Datasets are not read."""


def forecast(
    spec: ExperimentSpec,
    cells: Sequence[Cell],
    past: Sequence[Past],
    catalogue: Mapping[str, Hardware],
    site: Site = NO_SITE,
    count: CountExamples = nothing_counted,
) -> GridForecast:
    """Returns the forecast of a grid; `cells` are all grid points, or a sample that stands for all.

    `count` looks up how many training examples a dataset has that no run has read.
    """
    total = dict.fromkeys(("cost_usd", "energy_kwh", "device_hours"), Span(0.0, 0.0, 0.0))
    basis: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    shortest: RunForecast | None = None
    counted = 0.0
    by_kind: dict[tuple[object, ...], list[Past]] = {}
    for one in past:
        by_kind.setdefault(_kind(one.spec), []).append(one)
    for cell in cells:
        if not cell.runs:
            continue
        found = forecast_run(cell.spec, cell.student, by_kind.get(_kind(cell.spec), ()), catalogue, count)
        if isinstance(found, str):
            unknown[found] += round(cell.runs)
            continue
        counted += cell.runs
        basis[found.basis] += round(cell.runs)
        for name in total:
            total[name] += getattr(found, name) * cell.runs
        if shortest is None or found.cost_usd.low < shortest.cost_usd.low:
            shortest = found
    said = [f"{count:,} run{'s' * (count != 1)} from {words}" for words, count in basis.most_common()]
    if spec.search.info.ends_runs_early:
        share = spec.search.least_share
        total = {name: Span(span.low * share, span.middle, span.high) for name, span in total.items()}
        said.append(
            f"the search stops runs early: the low end assumes that all stop at {share:.0%}, the middle "
            "that none do"
        )
    co2_of_kwh = site.co2_kg(1.0)
    return GridForecast(
        runs=round(counted),
        **total,
        co2_kg=None if co2_of_kwh is None else total["energy_kwh"] * co2_of_kwh,
        shortest=shortest,
        basis=tuple(said),
        unknown=tuple(f"{count:,} run{'s' * (count != 1)}: {why}" for why, count in unknown.most_common()),
        warnings=tuple(_warnings(spec, total, counted)),
    )


def forecast_run(
    spec: ExperimentSpec,
    student: FlopCount | None,
    past: Sequence[Past],
    catalogue: Mapping[str, Hardware],
    count: CountExamples = nothing_counted,
) -> RunForecast | str:
    """Returns the forecast of one run of a spec without axes, or why there is none."""
    hardware = find(spec.hardware, catalogue)
    if hardware is None:
        return f"hardware '{spec.hardware}' is not in the catalogue"
    steps = _steps(spec, past, count)
    if steps is None:
        return (
            "the size of the dataset is unknown until it is read; set length.steps or "
            "task.train_examples, or run it once"
        )
    tier, like = _nearest(spec, past)
    if not spec.trains and not like and spec.task.validation_examples is None:
        return (
            "it only evaluates, on an unknown number of examples until the dataset is read; set "
            "task.validation_examples, or run it once"
        )
    work = _work(spec, steps)
    devices = spec.parallel.workers * (spec.resources.cpus_per_worker if hardware.kind.counted_in_cpus else 1)
    charged = devices / SHARERS if spec.queue.share_device else devices
    watts = Span(1.0, 1.0, 1.0) * (hardware.modelled_w * charged)
    if like:
        time_s = _from_history(work, like, tier)
        drawn = [p.energy_kwh * J_PER_KWH / p.total_time_s for p in like if p.energy_kwh and p.total_time_s]
        if drawn:
            middle = statistics.median(drawn)
            watts = Span(min(min(drawn), middle / 1.05), middle, max(max(drawn), middle * 1.05))
        basis = f"{len(like)} similar finished run{'s' * (len(like) != 1)} ({tier.words})"
    else:
        estimate = _from_catalogue(spec, student, work, devices, hardware)
        if isinstance(estimate, str):
            return estimate
        time_s, basis = estimate
        watts = Span(0.3 * watts.low, watts.middle, watts.high)
    hours = time_s * (1 / 3600)
    return RunForecast(
        time_s=time_s,
        cost_usd=hours * (charged * hardware.price_usd_per_hour),
        energy_kwh=Span(
            hours.low * watts.low / 1000, hours.middle * watts.middle / 1000, hours.high * watts.high / 1000
        ),
        device_hours=hours * charged,
        basis=basis,
        from_history=bool(like),
    )


def of_its_kind(spec: ExperimentSpec, past: Iterable[Past]) -> list[Past]:
    kind = _kind(spec)
    return [one for one in past if _kind(one.spec) == kind]


def _kind(spec: ExperimentSpec) -> tuple[object, ...]:
    return (
        spec.task.name, spec.task.path, spec.model.name, spec.model.layers, spec.model.frozen,
        spec.model.teacher is None, spec.model.encoder, spec.hardware, spec.precision, spec.parallel.workers,
        spec.parallel.strategy,
        spec.resources.cpus_per_worker, spec.queue.share_device, spec.trains,
        # Where nothing is trained the evaluation is the work; elsewhere it comes with the steps.
        None if spec.trains else (spec.task.validation_examples, spec.numerics.evaluation),
    )  # fmt: skip


def _nearest(spec: ExperimentSpec, past: Sequence[Past]) -> tuple[Likeness, list[Past]]:
    tiers: dict[Likeness, list[Past]] = {likeness: [] for likeness in LIKENESS}
    for one in past:
        if (one.spec.trains and one.steps <= 0) or one.total_time_s <= 0:
            continue
        if one.spec.task.max_length != spec.task.max_length:
            tiers[LIKENESS[2]].append(one)
        else:
            tiers[LIKENESS[int(_update(one.spec) != _update(spec))]].append(one)
    return next((tier for tier in tiers.items() if tier[1]), (LIKENESS[-1], []))


def _update(spec: ExperimentSpec) -> tuple[object, ...]:
    return spec.batch.size, spec.optimizer.name, spec.optimizer.implementation


def _from_history(work: float, like: Sequence[Past], tier: Likeness) -> Span:
    logs = [
        math.log(max(1e-12, one.total_time_s - one.setup_time_s) / _work(one.spec, one.steps)) for one in like
    ]
    middle = statistics.median(logs)
    spread = math.log(tier.floor)
    if len(logs) >= _FEWEST_FOR_SPREAD:
        sd = statistics.stdev(logs)
        spread = max(spread, _t90(len(logs) - 1) * sd * math.sqrt(1 + 1 / len(logs)))
    setup_s = statistics.median(one.setup_time_s for one in like)
    return Span(
        setup_s / 1.5 + work * math.exp(middle - spread),
        setup_s + work * math.exp(middle),
        setup_s * 1.5 + work * math.exp(middle + spread),
    )


def _t90(freedom: int) -> float:
    """Student's t at 95% (the interval holds 90%); between the table's degrees of freedom, the wider."""
    table = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 7: 1.895, 10: 1.812, 20: 1.725, 60: 1.671}
    return table[max(known for known in table if known <= freedom)]


def _work(spec: ExperimentSpec, steps: int) -> float:
    examples = steps * spec.batch.size if spec.trains else spec.task.validation_examples or 1
    return float(examples * spec.task.max_length)


def _from_catalogue(
    spec: ExperimentSpec, student: FlopCount | None, work: float, devices: int, hardware: Hardware
) -> tuple[Span, str] | str:
    if student is None:
        return f"no similar run has finished, and the size of '{spec.model.name}' is unknown until it is read"
    if spec.model.layers is not None:
        student = replace(student, layers=len(spec.model.layers))
    student = student.with_frozen(spec.model.frozen)
    examples = spec.micro_size if spec.trains else spec.evaluation.batch_size
    batch = Tally.full(examples, spec.task.max_length)
    flops = (student.training(batch) if spec.trains else student.forward(batch)) * work / batch.tokens
    if hardware.kind.counted_in_cpus:
        rates = Span(LEAST_CPU_GFLOPS, CPU_GFLOPS, MOST_CPU_GFLOPS) * (1e9 * devices)
        words = (
            f"counted arithmetic at {CPU_GFLOPS:g} GFLOP/s per CPU (assumed; {LEAST_CPU_GFLOPS:g} to "
            f"{MOST_CPU_GFLOPS:g}): no similar run has finished"
        )
    else:
        peak = (hardware.peak_tflops or {}).get(Precision(spec.precision))
        if peak is None:
            return (
                f"no similar run has finished, and {hardware.name} has no published peak in {spec.precision}"
            )
        rates = Span(LEAST_MFU, MFU, MOST_MFU) * (peak * 1e12 * devices)
        words = (
            f"counted arithmetic at {MFU:.0%} of {hardware.name}'s peak ({LEAST_MFU:.0%} to "
            f"{MOST_MFU:.0%}): no similar run has finished"
        )
    time_s = Span(
        SETUP_S / 3 + LEAST_FILLED * flops / rates.high,
        SETUP_S + flops / rates.middle,
        SETUP_S * 3 + flops / rates.low,
    )
    return time_s, words


def _steps(spec: ExperimentSpec, past: Sequence[Past], count: CountExamples) -> int | None:
    if spec.length.steps is not None:
        return spec.length.steps
    examples = spec.task.train_examples
    if examples is None:
        # Steps of an epoch x batch: at most a batch more than there are.
        told = [
            one.steps * one.spec.batch.size / one.spec.length.epochs
            for one in past
            if one.spec.length.epochs is not None and one.spec.task.train_examples is None
        ]
        if told:
            examples = round(min(told))
        elif spec.task.path is None:
            examples = spec.task.info.hub_examples
        else:
            examples = count(spec.task)
    return None if examples is None else spec.steps_of(examples)


LIMITS = (
    ("cost_usd", "cost_usd", "USD"),
    ("energy_kwh", "energy_kwh", "kWh"),
    ("hours", "device_hours", "h"),
)  # Of a budget: its field, the forecast's, and the unit


def _warnings(spec: ExperimentSpec, total: Mapping[str, Span], runs: float) -> list[str]:
    said = []
    happens = "pauses" if spec.budget.when_reached == "hold" else "ends"
    if spec.budget.runs is not None and spec.budget.runs < spec.run_count():
        said.append(
            f"budget.runs {spec.budget.runs:,} is less than the {spec.run_count():,} runs of the grid; "
            f"after that many the experiment {happens}"
        )
    for field, name, unit in LIMITS:
        limit, span = getattr(spec.budget, field), total[name]
        if limit is None or span.high <= limit:
            continue
        fits = f"; about {runs * limit / span.middle:,.0f} of {runs:,.0f} runs fit" if span.middle else ""
        how = "will be" if span.low > limit else "is likely to be" if span.middle > limit else "may be"
        said.append(
            f"budget.{field} {limit:g} {how} reached: the forecast is {span.middle:.3g} {unit} "
            f"({span.low:.3g} to {span.high:.3g}){fits}, then the experiment {happens}"
        )
    return said


def too_small(spec: ExperimentSpec, found: GridForecast) -> list[tuple[str, str]]:
    """Returns (field, message) for each budget limit that not even the smallest run fits into, given history.

    A sweep that merely exceeds its budget is not refused: a budget is there to end it.
    """
    one = found.shortest
    if one is None or not one.from_history:
        return []
    problems = []
    for field, name, unit in LIMITS:
        limit, span = getattr(spec.budget, field), getattr(one, name)
        least = span.low * spec.search.least_share
        if limit is not None and least > limit:
            problems.append(
                (
                    f"budget.{field}",
                    f"{limit:g} {unit} is less than the smallest run needs ({span.middle:.3g}, at least "
                    f"{least:.3g}, by {one.basis}); raise it, or shorten the runs",
                )
            )
    return problems
