"""Answers as text for people: tables that fit into 80 columns, or lines where they would not."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from service.analysis import answers
from service.analysis.words import test_words
from service.cli.terminal import console, print_rows, say, say_dim
from service.domain.formats import axis_value, figure, scale_for, short_names, three_digits, title, utc
from service.domain.records import MeasurementRow, Run
from service.output.answer_words import (
    configuration,
    kernel_cells,
    ratio,
    scales_of,
    scaling_rows,
    time_to_rows,
    weights,
)
from trainers.telemetry.kernels import KERNEL_FIGURES

_MOST_PAIRS = 24  # Of an axis, with figures: beyond them a guide lists only what is decided
_VERDICT_STYLES = {
    "A is better": "green",
    "B is better": "green",
    "equivalent": "cyan",
    "undecided": "yellow",
}


def print_comparison(answer: answers.ComparisonAnswer) -> None:
    """Prints mean ± standard deviation over seeds, with the best mean marked `*`, and notes on them."""
    scales = scales_of(answer)
    headings = {
        name: f"{title(name)}\n{scale.unit}" if scale.unit else title(name) for name, scale in scales.items()
    }
    rows, lines = [], []
    for position, row in enumerate(answer.rows):
        cells = []
        lines.append(f"{configuration(row.point)} ({row.finished} of {row.planned} runs)")
        for name, scale in scales.items():
            best = answer.best.get(name) == position
            text = scale.spread(row.figures[name])
            cells.append(Text(text + ("*" if best else " "), style="bold green" if best else ""))
            lines.append(f"  {title(name)} {text} {scale.unit}".rstrip() + " *" * best)
        axes = [axis_value(row.point[axis]) for axis in answer.axes]
        rows.append((*axes, f"{row.finished}/{row.planned}", *cells))
    numbers = ["runs", *headings.values()]
    print_rows([*short_names(answer.axes).values(), *numbers], rows, right=numbers, lines=lines)
    for line in _comparison_notes(answer):
        say_dim(line)


def _comparison_notes(answer: answers.ComparisonAnswer) -> list[str]:
    spreads = [spread for row in answer.rows for spread in row.figures.values() if spread is not None]
    notes = []
    if any(spread.sd is not None for spread in spreads):
        runs = ", of times between runs" if answer.agreement else ""
        notes.append(
            f"mean ± standard deviation between seeds{runs}; * best mean; not tested for significance"
        )
    elif spreads:
        notes.append("* best value; not tested for significance")
    for row in answer.rows:
        name = configuration(row.point)
        notes += [f"{name}: {count} failed ({reason})" for reason, count in row.failures.items()]
        if row.incomplete:
            notes.append(f"{name}: {row.incomplete} ended early, counted as incomplete results")
    return [*notes, *answer.notes]


def print_tuning(tuning: answers.Tuning) -> None:
    """Prints the values at which each row is best, and by what."""
    console().print()
    name = tuning.metric.name
    numbers = [f"validation {title(name)}", "seeds", "tried"]
    rows = [
        (
            configuration(of.point),
            configuration(of.chosen),
            figure(name, of.mean),
            str(of.seeds),
            str(of.tried),
        )
        for of in tuning.best
    ]
    print_rows(("configuration", "best", *numbers), rows, right=numbers)


def print_published(answer: answers.PublishedComparison) -> None:
    """Prints printed and own figures, what own runs lack, and which conditions differ."""
    console().print()
    say("; ".join(f"{name} {value}" for name, value in answer.source.items()))
    numbers = ["printed", "own", "own / printed"]
    rows = []
    for of in answer.figures:
        ratio_text = three_digits(of.ratio)
        if of.ratio_low is not None and of.ratio_high is not None:
            ratio_text += f" ({three_digits(of.ratio_low)}-{three_digits(of.ratio_high)})"
        values = (figure(of.metric, value) for value in (of.printed, of.mean))
        rows.append((of.label, title(of.metric), *values, ratio_text))
    print_rows(("printed for", "figure", *numbers), rows, right=numbers)
    for label, reason in answer.missing.items():
        say_dim(f"missing {label}: {reason}")
    for condition in answer.conditions:
        if condition.differs is None:
            say_dim(f"{condition.name}: {condition.printed} in print; own runs do not report it")
        elif condition.differs:
            say_dim(f"{condition.name}: {condition.printed} in print, {', '.join(condition.own)} in own runs")


def print_claims(pairs: Sequence[answers.TestedPair]) -> None:
    """Prints tested claims by metric; A is the first of a pair, and a difference is A less B."""
    for metric in dict.fromkeys(pair.metric for pair in pairs):
        of_metric = [pair for pair in pairs if pair.metric == metric]
        rows, lines = [], []
        for pair in of_metric:
            if (claim := pair.claim) is None:
                continue
            a, b = configuration(pair.a_point), configuration(pair.b_point)
            difference = _difference(claim)
            p_value = f"{claim.p_equivalent if claim.verdict == 'equivalent' else claim.p_value:.2g}"
            verdict = Text(_verdict(claim), style=_VERDICT_STYLES[claim.verdict])
            rows.append((a, b, verdict, difference, p_value))
            lines.append(f"{title(metric)}: {verdict}, {difference}, p = {p_value}\n  A {a}\n  B {b}")
        console().print()
        if rows:
            print_rows(("A", "B", title(metric), "A - B", "p"), rows, right=("A - B", "p"), lines=lines)
        for pair in of_metric:
            if pair.claim is None:
                say_dim(pair.text)
    claims = [pair.claim for pair in pairs if pair.claim is not None]
    if claims:
        tests = ", ".join(dict.fromkeys(map(test_words, claims)))
        corrected = max(claim.claims for claim in claims)
        if corrected > 1:
            tests += f", corrected over {corrected} claims"
        say_dim(f"A - B: difference with its 95% interval; p: {tests}")
    if close := sum(claim.at_resolution for claim in claims):
        say_dim(
            f"in {close} of {len(claims)} claims the seeds spread less than the figure's resolution, "
            "which is used as their spread"
        )


def _verdict(claim: answers.Claim) -> str:
    if claim.verdict == "undecided" and claim.more_seeds is not None:
        return f"undecided: about {claim.more_seeds} more seed{'s' * (claim.more_seeds != 1)}"
    if claim.verdict == "equivalent":
        return f"equivalent (±{claim.margin:g})"
    return claim.verdict


def _difference(claim: answers.Claim) -> str:
    scale = scale_for(claim.metric, [claim.mean_a, claim.mean_b])
    if claim.relative is None:
        return f"{scale.text(claim.difference)} {scale.unit}".rstrip()
    assert claim.relative_low is not None  # It has ends where it has a middle.
    assert claim.relative_high is not None
    high = "no bound" if math.isinf(claim.relative_high) else f"{claim.relative_high:+.1%}"
    return f"{claim.relative:+.1%} ({claim.relative_low:+.1%}, {high})"


def longest_kernels(run: Run, measured: Iterable[MeasurementRow]) -> list[answers.KernelRow]:
    """Returns the kernels with the most time in the newest profiled window of a run."""
    prefix, figures = "kernel:", dict[str, dict[str, float]]()
    rows = [row for row in measured if row.scope.startswith(prefix) and row.name in KERNEL_FIGURES]
    newest = max((row.attempt for row in rows), default=0)
    for row in rows:
        if row.attempt == newest:
            figures.setdefault(row.scope.removeprefix(prefix), {})[row.name] = row.value
    longest = sorted(figures, key=lambda kernel: -figures[kernel].get("kernel_ms_per_step", 0.0))
    return [
        answers.KernelRow("", run.point, kernel, 1, figures[kernel])
        for kernel in longest[: answers.MOST_KERNELS]
    ]


def print_kernels(kernels: Sequence[answers.KernelRow]) -> None:
    """Prints the kernels of each row; columns of counters only where some kernel has them."""
    headings, cells = kernel_cells(kernels)
    for label, point in {kernel.label: kernel.point for kernel in kernels}.items():
        console().print()
        console().print(Text(configuration(point), style="bold"))
        of_kernels = zip(kernels, cells, strict=True)
        rows = [(*figures, each.kernel) for each, figures in of_kernels if each.label == label]
        print_rows((*headings, "kernel"), rows, right=headings, lead=len(headings), cut={"kernel": 40})


def _print_recommendation(answer: answers.Recommendation) -> None:
    say(answer.text)
    for label, reason in answer.excluded.items():
        say(f"  excluded {label}: {reason}")
    if answer.per is not None:
        for value, choice in answer.per.choices.items():
            say(f"{value}: {choice.text}")
        for value, reason in answer.per.left_out.items():
            say(f"{value}: no recommendation: {reason}")
        say(answer.per.text)


def _print_frontier(answer: answers.FrontierAnswer) -> None:
    names = [metric.name for metric in answer.metrics]
    titles = [title(name) for name in names]
    rows = [
        (configuration(member.point), *(figure(name, member.values[name]) for name in names))
        for member in answer.members
    ]
    print_rows(("on the frontier", *titles), rows, right=titles)
    points = {member.label: member.point for member in (*answer.members, *answer.others)}
    for label, dominators in answer.dominated.items():
        others = f" and {len(dominators) - 1} more" if len(dominators) > 1 else ""
        winner = configuration(points[dominators[0]])
        say_dim(f"{configuration(points[label])} is dominated by {winner}{others}")
    _print_left_out(answer.left_out)


def _print_effects(answer: answers.EffectsAnswer) -> None:
    for item in answer.items:
        model = item.model
        heading = f"{title(model.metric)} (the axes explain {model.r_squared:.1%} of the variance)"
        say(heading)
        for sentence in item.sentences:
            say(f"  {sentence}")
        for check in model.checks:
            say_dim(f"  {check}")
    for name, reason in answer.unanswered.items():
        say_dim(f"{title(name)}: {reason}")


_DEFINED_BY = {
    "stillhouse": "Stillhouse; use --as-published for those of Chen and Sköld",
    "published": "Chen and Sköld (2023): figures without validation, occupancy over wall time",
}


def _print_score(answer: answers.ScoreAnswer) -> None:
    names = [criterion.metric for criterion in answer.criteria]
    numbers = ["score", *map(title, names)]
    rows = []
    for scored in answer.ranking:
        cells = (f"{scored.parts[name]:+.3f}" for name in names)
        rows.append((configuration(scored.point), f"{scored.score:.3f}", *cells))
    print_rows(("configuration", *numbers), rows, right=numbers)
    say_dim(f"weights: {weights(answer)}; lower is better")
    if answer.definitions is not None:
        say_dim(f"time and occupancy as defined by {_DEFINED_BY[answer.definitions]}")
    points = {scored.label: scored.point for scored in answer.ranking}
    for metric, ranges in answer.sensitivity.items():
        if len(ranges) == 1:
            say_dim(f"the winner is the same for any weight of {title(metric)}")
            continue
        parts = [f"{configuration(points[r.winner])} from {r.low:.0%} to {r.high:.0%}" for r in ranges]
        say_dim(f"winner by share of {title(metric)} in the weights: {'; '.join(parts)}")
    _print_left_out(answer.left_out)


def _print_speedup(answer: answers.SpeedupAnswer) -> None:
    names = [metric.name for metric in answer.metrics]
    titles = [title(name) for name in names]
    rows: list[tuple[str, ...]] = [
        (configuration(row.point), *(ratio(row.ratios[name], "-") for name in names)) for row in answer.rows
    ]
    print_rows(("configuration", *titles), rows, right=titles)
    say_dim(f"factor relative to {answer.baseline}, with 95% intervals from two seeds on")
    if answer.scaling:
        console().print()
        headings, scaled = scaling_rows(answer.scaling, "-")
        print_rows(headings, scaled, right=headings[2:])
        say_dim("speed-up / workers: strong at equal global batch, weak at equal batch per worker")
    if answer.time_to is not None:
        points = {row.label: row.point for row in answer.rows}
        console().print()
        numbers = ("reached target", "mean time", "speed-up")
        print_rows(("configuration", *numbers), time_to_rows(answer.time_to, points), right=numbers)
        say_dim(f"time until {title(answer.time_to.metric)} reached {answer.time_to.target:.4g}")
    _print_left_out(answer.left_out)


def _print_tasks(answer: answers.TasksAnswer) -> None:
    points = {standing.label: standing.point for standing in answer.standings}
    numbers = ["mean rank", "wins", *(of.task for of in answer.tasks)]
    rows = [
        (
            configuration(of.point),
            f"{of.mean_rank:.2f}{_between(of.low, of.high)}",
            f"{of.wins}/{len(answer.tasks)}",
            *(figure(each.metric.name, of.means[each.task]) for each in answer.tasks),
        )
        for of in answer.standings
    ]
    print_rows(("configuration", *numbers), rows, right=numbers)
    say_dim("; ".join(f"{of.task}: {title(of.metric.name)}" for of in answer.tasks))
    console().print()
    pairs = [
        (configuration(points[of.a]), configuration(points[of.b]),
         f"{of.probability:.2f}{_between(of.low, of.high)}")
        for of in answer.improvements
    ]  # fmt: skip
    print_rows(("A", "B", "A is better"), pairs, right=("A is better",))
    say_dim("probability that a run of A is better than one of B, mean over tasks")
    _print_left_out(answer.left_out)


def _print_guide(answer: answers.Guide) -> None:
    sources = {source.id: source for source in answer.sources}
    groups: dict[tuple[str, str, str], list[answers.Guideline]] = {}
    for each in answer.guidelines:
        groups.setdefault((each.axis, each.task, each.hardware), []).append(each)
    without = []
    for (axis, task, hardware), every in groups.items():
        place = f"{task} on {hardware or 'unknown hardware'}"
        tested = sum(each.finding != "untested" for each in every)
        left_out = ("untested", "undecided")[: 1 + (tested > _MOST_PAIRS)]
        of = [each for each in every if each.finding not in left_out]
        for finding in left_out:
            if rest := [each for each in every if each.finding == finding]:
                without.append(f"{axis}, {place}: {finding}: {_in_one_line(rest)}")
        if not of:
            continue
        ids = sorted({evidence.experiment_id for each in of for evidence in each.evidence})
        ends = [end for id in ids if (end := sources[id].ended_s) is not None]
        until = f", until {utc(max(ends))[:10]}" if ends else ""
        say(f"{axis}: {place}")
        say_dim(f"  {len(ids)} experiment{'s' * (len(ids) != 1)} ({', '.join(map(str, ids))}){until}")
        rows, lines = [], []
        for each in of:
            a, b = configuration(each.a_point), configuration(each.b_point)
            found = Text(_found(each), style=_VERDICT_STYLES.get(each.finding, "yellow"))
            seeds = _range(each.seeds_fewest, each.seeds_most, str)
            difference = _range(each.smallest, each.largest, "{:+.1%}".format)
            if len(each.evidence) == 1 and (claim := each.evidence[0].pair.claim) is not None:
                difference = _difference(claim)
            figure_name = title(each.metric.name)
            rows.append((axis_value(each.a_point[axis]), axis_value(each.b_point[axis]), figure_name, found,
                         difference, seeds))  # fmt: skip
            lines.append(f"{figure_name}: {found}, {difference}, seeds {seeds}\n  A {a}\n  B {b}")
        numbers = ("A - B", "seeds")
        print_rows(("A", "B", "figure", "finding", *numbers), rows, right=numbers, lines=lines)
        for each in of:
            name = title(each.metric.name)
            if each.finding == "conflicting":
                said = (f"experiment {of.experiment_id}: {_said(of.pair)}" for of in each.evidence)
                say_dim(f"{name}, {axis_value(each.a_point[axis])} or {axis_value(each.b_point[axis])}: "
                        f"{'; '.join(said)}")  # fmt: skip
            for evidence in each.evidence:
                if evidence.depends_on:
                    others = ", ".join(evidence.depends_on)
                    say_dim(f"{name} in experiment {evidence.experiment_id}: how much depends on {others}")
        console().print()
    if without:
        say("nothing decided; untested = no experiment has two seeds of both values")
    for line in without:
        say_dim(f"  {line}")
    for source in answer.sources:
        parts = [
            f"{source.runs} of {source.planned} run{'s' * (source.planned != 1)}",
            f"{source.seeds} seed{'s' * (source.seeds != 1)}",
            ", ".join((*source.models, *source.devices)),
            f"{source.disturbed} disturbed" if source.disturbed else "",
            f"energy {', '.join(source.energy)}" if source.energy else "",
        ]
        ended = "" if source.ended_s is None else f", {utc(source.ended_s)[:10]}"
        say_dim(f"experiment {source.id} {source.name}{ended}: {', '.join(filter(None, parts))}")
    for of_experiment, reason in answer.left_out.items():
        say_dim(f"left out experiment {of_experiment}: {reason}")


def _in_one_line(guidelines: Sequence[answers.Guideline]) -> str:
    """`8, 16, 32 by time, cost; experiment 5`."""
    points = [point for each in guidelines for point in (each.a_point, each.b_point)]
    values = dict.fromkeys(axis_value(point[guidelines[0].axis]) for point in points)
    figures = dict.fromkeys(title(each.metric.name) for each in guidelines)
    ids = sorted({evidence.experiment_id for each in guidelines for evidence in each.evidence})
    experiments = f"experiment{'s' * (len(ids) != 1)} {', '.join(map(str, ids))}"
    return f"{', '.join(values)} by {', '.join(figures)}; {experiments}"


def _found(guideline: answers.Guideline) -> str:
    """The verdict of one experiment; else `A is better 2, undecided 1`."""
    claim = guideline.evidence[0].pair.claim
    if len(guideline.evidence) == 1 and claim is not None:
        alone = claim.seeds_a == claim.seeds_b == 1
        return f"{claim.verdict}, for this seed" if alone else _verdict(claim)
    if guideline.finding == "conflicting":
        return guideline.finding
    return ", ".join(f"{verdict} {count}" for verdict, count in guideline.counts.items())


def _said(pair: answers.TestedPair) -> str:
    """`fp32 is better`, or the verdict where no side is."""
    if pair.claim is None:
        return "untested"
    better = {"A is better": pair.a_point, "B is better": pair.b_point}.get(pair.claim.verdict)
    if better is None:
        return pair.claim.verdict
    return f"{', '.join(map(axis_value, better.values()))} is better"


def _range(low: Any, high: Any, text: Callable[[Any], str]) -> str:
    if low is None or high is None:
        return "-"
    return text(low) if low == high else f"{text(low)} to {text(high)}"


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" ({low:.2f}-{high:.2f})"


def _print_left_out(left_out: Mapping[str, str]) -> None:
    for label, reason in left_out.items():
        say_dim(f"left out {label}: {reason}")


PRINTERS: Mapping[str, Callable[[Any], None]] = {
    "recommend": _print_recommendation,
    "frontier": _print_frontier,
    "effects": _print_effects,
    "score": _print_score,
    "speedup": _print_speedup,
    "tasks": _print_tasks,
    "guide": _print_guide,
}
