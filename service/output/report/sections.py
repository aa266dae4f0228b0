"""The report as sections of blocks: the words and tables that the page and the Markdown share. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from service.analysis import answers
from service.analysis.drift import drifts
from service.analysis.ranking import label_of
from service.domain.formats import (
    axis_value,
    duration,
    figure,
    point_text,
    scale_for,
    short_names,
    title,
    utc,
)
from service.domain.grid import varied_fields
from service.domain.metrics import finite
from service.domain.neighbours import in_words
from service.domain.records import Run
from service.output import ledger_words
from service.output.answer_words import (
    configuration,
    kernel_cells,
    ratio,
    scales_of,
    scaling_rows,
    time_to_rows,
    weights,
)
from service.output.plots.material import Unanswered, answered
from service.output.plots.plot import Plot
from service.output.report.contents import MOST_ROWS, OF_SIGNS, ReportContents, description_of
from trainers.tasks.info import NO_LOSS

Answer = TypeVar("Answer")

MOST_IN_MATRIX = 12
"""Most labels of a confusion matrix that is written out; of more the most frequent confusions are."""
_OF_BITS = (
    "bits_per_weight", "bits_per_weight_with_embeddings", "weight_memory_mib", "example_ms_p50", "score",
    "test_score",
)  # fmt: skip
"""Figures of the section about bits, of a run's summary."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Sentences; `strong` for the most important ones."""

    text: str
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Code:
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; `numbers` are the right-aligned columns."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()


Block = Paragraph | Bullets | Code | Table | Plot


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: slice = slice(0)) -> Table:
    """Cuts long tables; `numbers` are the columns of numbers."""
    return Table(headings, rows[:MOST_ROWS], frozenset(range(len(headings))[numbers]))


@dataclass(frozen=True, slots=True)
class ReportSection:
    id: str
    title: str
    blocks: list[Block] = field(default_factory=list)


_METHOD = Bullets(
    [
        "A configuration is one combination of axis values; its runs differ only in their seed, "
        "or repeat one. Only "
        "runs that trained to full length count.",
        "A claim pairs seeds that both sides ran. Paired: t-test of the differences. Unpaired: Welch's "
        "t-test. Two-sided, at 5%, corrected over all pairs on a metric (Holm, Shaffer). The spread "
        "between seeds is floored at the figure's resolution: agreement between seeds alone proves "
        "nothing.",
        "Repeats of a seed count once, with their mean. Of time, cost, energy, memory and throughput each "
        "repeat counts, unless seeds differ by more than their repeats.",
        "If per-example scores are available, a claim needs seeds and examples (a two-way test); "
        "otherwise it covers only further seeds on the same examples.",
        "Equivalent means: two one-sided t-tests show the difference to be within the "
        f"margin ({NO_LOSS:g} of accuracy).",
        "The effect of an axis is the claim about two of its values, averaged within each seed over the "
        "cells that every value has. Interactions are tested within seeds; those of time, cost and "
        "energy on logarithms.",
        "Cost is the price of the devices x the time they were held; energy is labelled as measured "
        "or modelled, and the two are never combined in one number.",
    ]
)
_NO_CAVEATS = "No known caveats apply to these numbers."


def sections(contents: ReportContents) -> list[ReportSection]:
    """In the report's order; empty sections are left out."""

    def plots(prefix: str) -> list[Block]:
        return [plot for plot in contents.figures if plot.id.startswith(prefix)]

    def told(answer: Answer | Unanswered, tell: Callable[[Answer], Iterable[Block]]) -> list[Block]:
        return [Paragraph(answer.reason)] if isinstance(answer, Unanswered) else [*tell(answer)]

    frontier, speedup = answered(contents.frontier), partial(_speedup, contents)
    by_time = [*plots("breakdown"), *plots("step-"), *plots("timeline"), *_drift(contents)]
    every = [
        ReportSection("answer", "Answer", [*_answer(contents)]),
        ReportSection("question", "Question", [*_question(contents)]),
        ReportSection("results", "Results", told(contents.comparison, _results)),
        ReportSection("trade-offs", "The price of accuracy", told(frontier, _frontier) + plots("tradeoff-")),
        ReportSection("verdicts", "Tested claims", told(contents.verdicts, _verdicts)),
        ReportSection("effects", "Effects by axis", told(contents.effects, _effects) + plots("effect-")),
        ReportSection("speed-ups", "Speed-up over the baseline", told(contents.speedup, speedup)),
        ReportSection("scores", "Other weightings", told(contents.scores, _scores)),
        ReportSection("curves", "Learning curves", plots("curve-")),
        ReportSection("bits", "Bits", [*_bits(contents)]),
        ReportSection("labels", "Results by label", [*_labels(contents), *plots("confusion")]),
        ReportSection("time", "Time breakdown", by_time),
        ReportSection("kernels", "Kernels", [*_kernels(contents)]),
        ReportSection("ledger", "Total cost", [*_ledger(contents)]),
        ReportSection("method", "Method", [_METHOD]),
        ReportSection("environment", "Environment", [*_environment(contents)]),
        ReportSection("caveats", "Caveats", [Bullets(contents.caveats or [_NO_CAVEATS])]),
        ReportSection("reproduce", "How to reproduce this", [*_reproduce(contents)]),
    ]
    return [section for section in every if section.blocks]


def _answer(contents: ReportContents) -> Iterable[Block]:
    chosen = contents.recommendation
    if isinstance(chosen, Unanswered):
        yield Paragraph(f"No recommendation: {chosen.reason}.", strong=True)
        return
    yield Paragraph(f"Use {point_text(chosen.winner_point) or 'the only configuration'}.", strong=True)
    yield Paragraph(chosen.text)
    if chosen.per is not None:
        none = [[value, "none", "-", reason] for value, reason in chosen.per.left_out.items()]
        rows = [
            [value, point_text(of.winner_point), figure(of.objective, of.value), of.sure]
            for value, of in chosen.per.choices.items()
        ]
        yield _table([chosen.per.axis, "best", title(chosen.objective), "confidence"], [*rows, *none])
        yield Paragraph(chosen.per.text)
    if chosen.excluded:
        points = _points(contents)
        rows = [[configuration(points[label]), reason] for label, reason in chosen.excluded.items()]
        yield _table(["not chosen", "why"], rows)


def _question(contents: ReportContents) -> Iterable[Block]:
    run_table = contents.run_table
    for experiment, spec in zip(run_table.experiments, contents.specs, strict=True):
        if description := description_of(spec):
            yield Paragraph(description)
        took = ""
        if experiment.ended_s and experiment.started_s:
            took = f" after {duration(experiment.ended_s - experiment.started_s)}"
        yield Paragraph(
            f"Experiment {experiment.id}, “{experiment.name}”, by {experiment.owner}: "
            f"{experiment.run_count:,} runs, submitted {utc(experiment.created_s)}, {experiment.state}{took}."
        )
    seeds = sorted({run.seed for run in run_table.runs})
    values = {
        axis: list(dict.fromkeys(axis_value(run.point.get(axis)) for run in run_table.runs))
        for axis in run_table.axes
    }
    listed = ", ".join(map(str, seeds[:20])) + (", ..." if len(seeds) > 20 else "")
    rows = [
        ["task", run_table.runs[0].task],
        *([name, ", ".join(of)] for name, of in _fixed(contents).items()),
        *([f"axis {axis}", ", ".join(of)] for axis, of in values.items()),
        ["seeds", f"{len(seeds)}: {listed}"],
        *(
            [["repeats of a seed", f"{repeats}"]]
            if (repeats := 1 + max(r.repeat for r in run_table.runs)) > 1
            else []
        ),
    ]
    yield Table(["what", "values"], rows)


def _fixed(contents: ReportContents) -> dict[str, list[str]]:
    axes = {field.partition(".")[0] for field in varied_fields(contents.run_table.axes)}
    runs = contents.run_table.runs
    columns = {
        "model": ("model", "student"),
        "precision": ("precision", "precision"),
        "optimizer": ("optimizer", "optimizer"),
        "batch": ("batch", "global_batch_size"),
        "hardware": ("hardware", "hardware"),
        "workers": ("parallel", "workers"),
    }
    return {
        name: list(dict.fromkeys(str(getattr(run, column)) for run in runs))
        for name, (section, column) in columns.items()
        if section not in axes
    }


def _results(answer: answers.ComparisonAnswer) -> Iterable[Block]:
    scales = scales_of(answer)
    units = {name: f" ({scale.unit})" if scale.unit else "" for name, scale in scales.items()}
    numbers = ["runs", *(title(name) + unit for name, unit in units.items())]
    rows = []
    for position, row in enumerate(answer.rows):
        remarks = [f"{count} {reason}" for reason, count in row.failures.items()]
        if row.incomplete:
            remarks.append(f"{row.incomplete} ended early")
        if row.shared:
            remarks.append(f"{row.shared} shared a device")
        if row.disturbed:
            remarks.append(in_words(row.disturbed, row.finished, row.disturbed_by))
        cells = [
            scale.spread(row.figures[name]) + ("*" if answer.best.get(name) == position else "")
            for name, scale in scales.items()
        ]
        axes = [axis_value(row.point[axis]) for axis in answer.axes]
        rows.append([*axes, f"{row.finished}/{row.planned}", *cells, ", ".join(remarks)])
    headings = [*short_names(answer.axes).values(), *numbers, "remarks"]
    yield _table(headings, rows, slice(len(answer.axes), -1))
    several = any(s.sd is not None for row in answer.rows for s in row.figures.values() if s is not None)
    yield Paragraph(
        f"Mean ± standard deviation between seeds{', of times between runs' if answer.agreement else ''}. "
        "* marks the best mean; not tested for significance."
        if several
        else "One seed per configuration: the spread is unknown. * marks the best value; not tested for "
        "significance."
    )
    if len(answer.rows) > MOST_ROWS:
        yield Paragraph(f"The first {MOST_ROWS} of {len(answer.rows)} configurations; the bundle has all.")


def _kernels(contents: ReportContents) -> Iterable[Block]:
    rows = () if isinstance(contents.comparison, Unanswered) else contents.comparison.kernels
    if not rows:
        return
    headings, cells = kernel_cells(rows)
    named = [[configuration(row.point), row.kernel, *of] for row, of in zip(rows, cells, strict=True)]
    yield _table(["configuration", "kernel", *headings], named, slice(2, None))
    yield Paragraph(
        "Profiled steps of the first worker, means over runs. Grid in blocks and block in threads, as "
        "launched for most of the kernel's time; counters are read in a step of their own."
    )


def _bits(contents: ReportContents) -> Iterable[Block]:
    groups: dict[str, list[Run]] = {}
    for run in contents.run_table.finished:
        groups.setdefault(label_of(run.point), []).append(run)
    summaries = contents.run_table.summaries
    if not any("bits_per_weight" in summary for summary in summaries.values()):
        return
    rows = []
    for runs in groups.values():
        values: dict[str, list[float]] = {}
        for name in _OF_BITS:
            numbers = [finite(summaries.get(run.id, {}).get(name)) for run in runs]
            values[name] = [number for number in numbers if number is not None]
        for name in OF_SIGNS:
            series = [contents.points.get(run.id, {}).get(name) for run in runs]
            values[name] = [float(points[-1].value) for points in series if points]
        shown = [figure(name, sum(of) / len(of)) if of else "-" for name, of in values.items()]
        rows.append([configuration(runs[0].point), *shown])
    yield _table(["configuration", *map(title, (*_OF_BITS, *OF_SIGNS))], rows, slice(1, None))
    yield Paragraph(
        "Means over seeds. Stored bits of the encoder's weights and of all, embeddings included; memory as "
        "measured in the last evaluation; the last share of flipped and of undecided signs."
    )


def _labels(contents: ReportContents) -> Iterable[Block]:
    by_label = contents.by_label
    if by_label is None:
        return
    counts, several = by_label.counts, len(by_label.runs) > 1
    yield Paragraph(
        f"Test part of {point_text(by_label.point) or 'the only configuration'}, "
        f"{', '.join(f'run:{run}' for run in by_label.runs[:5])}{', ...' * (len(by_label.runs) > 5)}"
        f"{'; counts are added up over seeds' if several else ''}."
    )
    rows = [
        [label, f"{true:,}", f"{predicted:,}", *(_share(hits, of) for of in (predicted, true)),
         _share(2 * hits, true + predicted)]
        for label, true, predicted, hits in zip(
            counts.labels, counts.true, counts.predicted, counts.hits, strict=True
        )
        if true or predicted
    ]  # fmt: skip
    yield _table(["label", "true", "predicted", "precision", "recall", "F1"], rows, slice(1, None))
    if not counts.confusion:
        return
    if len(counts.labels) <= MOST_IN_MATRIX:
        yield Paragraph("Confusion matrix, true labels in rows and predicted labels in columns:")
        matrix = [
            [label, *(f"{count:,}" for count in row)]
            for label, row in zip(counts.labels, counts.confusion, strict=True)
        ]
        yield _table(["true", *counts.labels], matrix, slice(1, None))
        return
    wrong = sorted(
        (-count, true, predicted)
        for true, row in enumerate(counts.confusion)
        for predicted, count in enumerate(row)
        if count and true != predicted
    )
    if wrong:
        yield Paragraph("Most frequent confusions:")
        rows = [
            [counts.labels[true], counts.labels[predicted], f"{-count:,}", _share(-count, counts.true[true])]
            for count, true, predicted in wrong[:MOST_IN_MATRIX]
        ]
        yield _table(["true", "predicted", "count", "share of true"], rows, slice(2, None))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "–"


def _frontier(answer: answers.FrontierAnswer) -> Iterable[Block]:
    names = ", ".join(title(metric.name) for metric in answer.metrics)
    yield Paragraph(
        f"{len(answer.members)} of {len(answer.members) + len(answer.others)} configurations are not "
        f"dominated on {names}."
    )
    points = {member.label: member.point for member in (*answer.members, *answer.others)}
    metrics = [metric.name for metric in answer.metrics]
    rows = [
        [point_text(m.point) or m.label, *(figure(name, m.values[name]) for name in metrics)]
        for m in answer.members
    ]
    yield _table(["on the frontier", *map(title, metrics)], rows, slice(1, None))
    if answer.dominated:
        rows = [
            [point_text(points[label]), "; ".join(point_text(points[by]) for by in dominators[:3])]
            for label, dominators in answer.dominated.items()
        ]
        yield _table(["dominated", "by"], rows)


def _verdicts(answer: tuple[answers.TestedPair, ...]) -> Iterable[Block]:
    yield Paragraph(
        "The recommended configuration (A) against every other one (B). Differences are A - B; intervals "
        "are of 95% each; p-values are corrected over all pairs of configurations on a metric, because the "
        "figures that are tested also chose A."
    )
    untested: dict[str, list[str]] = {}
    for metric in dict.fromkeys(pair.metric for pair in answer):
        of = [pair for pair in answer if pair.metric == metric]
        for pair in of:
            if pair.claim is None:
                untested.setdefault(point_text(pair.b_point), []).append(title(metric))
        rows = [_claim_row(pair.b_point, pair.claim) for pair in of if pair.claim is not None]
        if rows:
            yield Paragraph(f"{title(metric).capitalize()}:")
            yield _table(["B", "verdict", "A - B", "interval", "p"], rows, slice(2, None))
    if untested:
        yield Paragraph("A claim needs at least two seeds with a result; missing for:")
        lacking = [f"{point}: {', '.join(metrics)}" for point, metrics in untested.items()]
        yield Bullets(lacking[:MOST_ROWS])


def _claim_row(b_point: Mapping[str, Any], claim: answers.Claim) -> list[str]:
    scale = scale_for(claim.metric, [claim.mean_a, claim.mean_b])
    verdict: str = claim.verdict
    if claim.more_seeds is not None:
        verdict += f": about {claim.more_seeds} more seed{'s' * (claim.more_seeds != 1)} needed"
    elif claim.verdict == "equivalent":
        verdict += f" within {claim.margin:g}"
    p_value = claim.p_equivalent if claim.verdict == "equivalent" else claim.p_value
    return [
        point_text(b_point),
        verdict,
        f"{claim.relative:+.1%}" if claim.relative is not None else "",
        f"{_signed(scale, claim.low)} to {_signed(scale, claim.high)} {scale.unit}".rstrip(),
        f"{p_value:.2g}",
    ]


def _signed(scale: Any, value: float) -> str:
    return f"{'+' if value > 0 else ''}{scale.text(value)}"


def _effects(answer: answers.EffectsAnswer) -> Iterable[Block]:
    for item in answer.items:
        yield Paragraph(
            f"{title(item.model.metric).capitalize()} (the axes explain {item.model.r_squared:.1%} of "
            "the variance):"
        )
        yield Bullets(item.sentences)
    for name, reason in answer.unanswered.items():
        yield Paragraph(f"{title(name)}: {reason}.")


def _speedup(contents: ReportContents, answer: answers.SpeedupAnswer) -> Iterable[Block]:
    metrics = [metric.name for metric in answer.metrics]
    rows = [
        [point_text(row.point) or row.label, *(ratio(row.ratios[name], " to ") for name in metrics)]
        for row in answer.rows
    ]
    points = _points(contents)
    yield Paragraph(
        f"Factor relative to {configuration(points[answer.baseline])}, with 95% intervals; 2x is twice as "
        "fast, or half the cost."
    )
    yield _table(["configuration", *map(title, metrics)], rows, slice(1, None))
    if answer.scaling:
        yield Paragraph(
            "Scaling efficiency: the speed-up divided by how many times more workers there are; strong at "
            "equal global batch, weak at equal batch per worker. 100% is linear."
        )
        headings, scaled = scaling_rows(answer.scaling, " to ")
        yield _table(headings, scaled, slice(2, None))
    if answer.time_to is not None:
        yield Paragraph(
            f"Time until {title(answer.time_to.metric)} first reached {answer.time_to.target:.4g} at an "
            "evaluation, from the start of the run; a mean only if every seed reached it."
        )
        headings = ["configuration", "seeds that reached it", "mean time", "speed-up"]
        yield _table(headings, time_to_rows(answer.time_to, points), slice(1, None))


def _scores(by_strategy: Mapping[str, answers.ScoreAnswer]) -> Iterable[Block]:
    yield Paragraph(
        "The best weighted sum of max-normalised metrics, for different weights of time, cost, energy "
        "and occupancy. Accuracy is not included; the recommendation above treats it as a constraint."
    )
    rows = []
    for name, answer in by_strategy.items():
        ranked = [f"{point_text(each.point)} ({each.score:.3f})" for each in answer.ranking[:2]]
        best, second = ranked if len(ranked) > 1 else (*ranked, "-")
        rows.append([name.replace("_", " "), weights(answer), best, second])
    yield _table(["strategy", "weights", "best (score)", "second"], rows)


def _drift(contents: ReportContents) -> Iterable[Block]:
    for experiment, of in drifts(contents.run_table.references):
        yield Paragraph(f"Drift in experiment {experiment}: {of.sentence()}.")


def _ledger(contents: ReportContents) -> Iterable[Block]:
    ledgers = [ledger for ledger in contents.ledgers if ledger.total.attempts]
    if not ledgers:
        return
    yield Bullets(
        [
            f"Experiment {ledger.experiment_id}, {sentence}."
            for ledger in ledgers
            for sentence in ledger_words.sentences(ledger.total, ledger.overhead)
        ]
    )
    # Runs that went through at once have nothing to tell beyond their row in the results.
    accounts = [run for ledger in ledgers for run in ledger.runs if run.total.retries or run.total.lost_s]
    if accounts:
        rows = [
            [f"run:{run.run_id}", str(charge.attempt), *ledger_words.cells(charge)]
            for run in accounts
            for charge in run.charges
        ]
        headings = ["run", "attempt", *ledger_words.HEADINGS]
        yield Table(headings, rows[:MOST_ROWS], frozenset({1, 3, 4, 5, 6, 7}))
    yield Paragraph(f"Devices are charged from placed to released, busy or not; {ledger_words.LEGEND}.")


def _environment(contents: ReportContents) -> Iterable[Block]:
    environments = contents.run_table.environments
    if not environments:
        yield Paragraph("No run reported where it ran.")
        return
    names = list(dict.fromkeys(name for facts, _ in environments for name in facts))
    shown = environments[:6]
    yield Table(
        ["", *(f"{len(runs)} run{'s' * (len(runs) != 1)}" for _, runs in shown)],
        [[name.replace("_", " "), *(_fact(facts.get(name)) for facts, _ in shown)] for name in names],
    )
    if len(environments) > len(shown):
        yield Paragraph(f"{len(environments) - len(shown)} more environments are in the bundle.")
    first = next(iter(contents.run_table.data.values()), None)
    if first:
        yield Table(["data", ""], [[name, _fact(value)] for name, value in first.items()])


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return "-" if value is None else str(value)


def _reproduce(contents: ReportContents) -> Iterable[Block]:
    run_table = contents.run_table
    ids = " ".join(str(experiment.id) for experiment in run_table.experiments)
    facts_of = [facts for facts, _ in run_table.environments]
    commits = list(dict.fromkeys(str(facts["git_commit"]) for facts in facts_of if "git_commit" in facts))
    yield Paragraph(
        "Submit the spec again with the same version of the code, with the same data under the configured "
        "folders"
        + (f" (commit {commits[0][:12]})" if len(commits) == 1 else "")
        + ". `stillhouse export --bundle` packs all rows, points and facts with checksums."
    )
    lines = [
        f"stillhouse submit spec-{experiment.id}.yaml   # sha256 {experiment.spec_sha256[:16]}"
        for experiment in run_table.experiments
    ]
    lines.append(f"stillhouse report {ids} -o report.html")
    lines.append(f"stillhouse export {run_table.experiments[0].id} --bundle experiment.zip")
    yield Code("\n".join(lines))
    for experiment, spec in zip(run_table.experiments, contents.specs, strict=True):
        yield Paragraph(f"spec-{experiment.id}.yaml:")
        yield Code(spec.rstrip())


def _points(contents: ReportContents) -> dict[str, Mapping[str, Any]]:
    return {label_of(run.point): run.point for run in contents.run_table.runs}
