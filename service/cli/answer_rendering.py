"""Answers as text for people: tables that fit into 80 columns, or lines where they would not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from service.analysis.words import test_words
from service.cli.rendering import grid_table, print_fitting
from service.domain.formats import duration, figure, kernel_figure, point_text, scale_for, title
from trainers.telemetry.kernels import KERNEL_FIGURES

if TYPE_CHECKING:
    from service.analysis.answers import (
        Claim,
        EffectsAnswer,
        FrontierAnswer,
        FrontierMember,
        KernelRow,
        Ratio,
        ScoreAnswer,
        SpeedupAnswer,
        TestedPair,
    )

_MARKS = {"A is better": "green", "B is better": "green", "equivalent": "cyan", "undecided": "yellow"}


def print_claims(pairs: Sequence[TestedPair], console: Console) -> None:
    """Tested claims, metric by metric; A is the first of a pair, and a difference is A less B."""
    for metric in dict.fromkeys(pair.metric for pair in pairs):
        of = [pair for pair in pairs if pair.metric == metric]
        tested = [pair for pair in of if pair.claim is not None]
        console.print()
        if tested:
            table = grid_table("A", "B", title(metric), "A - B", "p", right=("A - B", "p"))
            lines = []
            for pair in tested:
                claim = pair.claim
                assert claim is not None  # It is one of the tested.
                a, b, difference = _side(pair.a_point), _side(pair.b_point), _difference(claim)
                p_value = f"{claim.p_equivalent if claim.verdict == 'equivalent' else claim.p_value:.2g}"
                verdict = Text(_verdict(claim), style=_MARKS[claim.verdict])
                table.add_row(a, b, verdict, difference, p_value)
                lines.append(f"{title(metric)}: {verdict}, {difference}, p = {p_value}\n  A {a}\n  B {b}")
            print_fitting(console, table, lines)
        for pair in of:
            if pair.claim is None:
                _dim(console, pair.text)
    made = [pair.claim for pair in pairs if pair.claim is not None]
    if made:
        said = ", ".join(dict.fromkeys(map(test_words, made)))
        corrected = max(claim.claims for claim in made)
        if corrected > 1:
            said += f", corrected over {corrected} claims"
        _dim(console, f"A - B: difference with its 95% interval; p: {said}")
    if close := sum(claim.at_resolution for claim in made):
        _dim(
            console,
            f"in {close} of {len(made)} claims the seeds spread less than the figure's resolution, "
            "which is used as their spread",
        )


def _verdict(claim: Claim) -> str:
    if claim.verdict == "undecided" and claim.more_seeds is not None:
        return f"undecided: about {claim.more_seeds} more seed{'s' * (claim.more_seeds != 1)}"
    if claim.verdict == "equivalent":
        return f"equivalent (±{claim.margin:g})"
    return claim.verdict


def _difference(claim: Claim) -> str:
    scale = scale_for(claim.metric, [claim.mean_a, claim.mean_b])
    if claim.relative is None:
        return f"{scale.text(claim.difference)} {scale.unit}".rstrip()
    assert claim.relative_low is not None  # It has ends where it has a middle.
    assert claim.relative_high is not None
    high = "no bound" if math.isinf(claim.relative_high) else f"{claim.relative_high:+.1%}"
    return f"{claim.relative:+.1%} ({claim.relative_low:+.1%}, {high})"


def _side(point: Mapping[str, Any]) -> str:
    return point_text(point) or "all runs"


def print_kernels(rows: Sequence[KernelRow], console: Console) -> None:
    """One line per kernel of each row; columns of counters only where some kernel has them."""
    if not rows:
        return
    names = [name for name in KERNEL_FIGURES if any(name in row.figures for row in rows)]
    for label in dict.fromkeys(row.label for row in rows):
        of = [row for row in rows if row.label == label]
        console.print()
        console.print(Text(point_text(of[0].point) or "all runs", style="bold"))
        headings = [KERNEL_FIGURES[name].heading for name in names]
        table, lines = grid_table(*headings, right=headings), []
        table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=40)
        for row in of:
            cells = [kernel_figure(row.figures.get(name)) for name in names]
            table.add_row(*cells, Text(row.kernel))
            told = ", ".join(f"{heading} {cell}" for heading, cell in zip(headings, cells, strict=True))
            lines.append(f"{row.kernel}\n  {told}")
        print_fitting(console, table, lines)


def print_frontier(answer: FrontierAnswer, console: Console) -> None:
    """Members with their figures, then who dominates the rest."""
    names = [metric.name for metric in answer.metrics]
    table = grid_table("on the frontier", *map(title, names), right=[title(name) for name in names])
    for member in answer.members:
        table.add_row(_side(member.point), *(figure(name, member.values[name]) for name in names))
    print_fitting(console, table, [_member_line(member, names) for member in answer.members])
    points = {member.label: member.point for member in (*answer.members, *answer.others)}
    for label, dominators in answer.dominated.items():
        others = f" and {len(dominators) - 1} more" if len(dominators) > 1 else ""
        _dim(
            console,
            f"{_side(points[label])} is dominated by {_side(points[dominators[0]])}{others}",
        )
    _left_out(answer.left_out, console)


def _member_line(member: FrontierMember, names: Sequence[str]) -> str:
    figures = ", ".join(f"{title(name)} {figure(name, member.values[name])}" for name in names)
    return f"{_side(member.point)}: {figures}"


def print_effects(answer: EffectsAnswer, console: Console) -> None:
    """One line per value of each axis, with its interval, and what makes the model doubtful."""
    for item in answer.items:
        model = item.model
        _line(console, f"{title(model.metric)} (the axes explain {model.r_squared:.1%} of the variance)")
        for sentence in item.sentences:
            _line(console, f"  {sentence}")
        for check in model.checks:
            _dim(console, f"  {check}")
    for name, reason in answer.unanswered.items():
        _dim(console, f"{title(name)}: {reason}")


_DEFINED_BY = {
    "stillhouse": "Stillhouse; use --as-published for the published study's",
    "published": "the published study: training time without validation, occupancy over wall time",
}


def print_score(answer: ScoreAnswer, console: Console) -> None:
    """The ranking with its parts, then where the winner changes."""
    names = [criterion.metric for criterion in answer.criteria]
    table = grid_table("configuration", "score", *map(title, names), right=["score", *map(title, names)])
    for scored in answer.ranking:
        table.add_row(
            _side(scored.point), f"{scored.score:.3f}", *(f"{scored.parts[name]:+.3f}" for name in names)
        )
    print_fitting(console, table, [f"{s.score:.3f}  {_side(s.point)}" for s in answer.ranking])
    weights = ", ".join(f"{title(c.metric)} {c.weight:g}" for c in answer.criteria)
    _dim(console, f"weights: {weights}; lower is better")
    if answer.definitions is not None:
        _dim(console, f"time and occupancy as defined by {_DEFINED_BY[answer.definitions]}")
    points = {scored.label: scored.point for scored in answer.ranking}
    for metric, ranges in answer.sensitivity.items():
        if len(ranges) == 1:
            _dim(console, f"the winner is the same for any weight of {title(metric)}")
            continue
        parts = [f"{_side(points[r.winner])} from {r.low:.0%} to {r.high:.0%}" for r in ranges]
        _dim(console, f"winner by share of {title(metric)} in the weights: {'; '.join(parts)}")
    _left_out(answer.left_out, console)


def print_speedup(answer: SpeedupAnswer, console: Console) -> None:
    """How many times better than the baseline, then the time to the target."""
    names = [metric.name for metric in answer.metrics]
    table = grid_table("configuration", *map(title, names), right=[title(name) for name in names])
    for row in answer.rows:
        table.add_row(_side(row.point), *(_ratio(row.ratios[name]) for name in names))
    print_fitting(
        console,
        table,
        [
            f"{_side(row.point)}: " + ", ".join(f"{title(n)} {_ratio(row.ratios[n])}" for n in names)
            for row in answer.rows
        ],
    )
    _dim(console, f"factor relative to {answer.baseline}, with 95% intervals from two seeds on")
    if answer.time_to is not None:
        points = {row.label: row.point for row in answer.rows}
        console.print()
        reached = grid_table("configuration", "reached target", "mean time", "speed-up",
                             right=("reached target", "mean time", "speed-up"))  # fmt: skip
        lines = []
        for to in answer.time_to.rows:
            side = _side(points.get(to.label, {}))
            cells = (
                f"{to.reached}/{to.of}",
                duration(to.mean_s),
                f"{to.speedup:.2f}x" if to.speedup else "-",
            )
            reached.add_row(side, *cells)
            lines.append(f"{side}: {cells[0]} reached the target, {cells[1]}, {cells[2]}")
        print_fitting(console, reached, lines)
        _dim(console, f"time until {title(answer.time_to.metric)} reached {answer.time_to.target:.4g}")
    _left_out(answer.left_out, console)


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.ratio:.2f}x"
    return f"{ratio.ratio:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _left_out(left_out: Mapping[str, str], console: Console) -> None:
    for label, reason in left_out.items():
        _dim(console, f"left out {label}: {reason}")


def _line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _dim(console: Console, text: str) -> None:
    console.print(Text(text, style="dim"), soft_wrap=True)
