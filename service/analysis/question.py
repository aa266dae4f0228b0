"""Questions about an experiment, answered from its runs. Pure.

REST, the command line and the report all come here, so that they give the same numbers.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from service.analysis.answers import (
    MOST_KERNELS,
    AnalysisError,
    BadQuestion,
    Claim,
    ComparedRow,
    ComparisonAnswer,
    Definitions,
    EffectsAnswer,
    FittedEffects,
    FrontierAnswer,
    FrontierMember,
    KernelRow,
    Recommendation,
    ScalingRow,
    ScoreAnswer,
    SeedAgreement,
    SpeedupAnswer,
    SpeedupRow,
    TestedPair,
    TimeTo,
)
from service.analysis.cells import Side, sides
from service.analysis.claims import MOST_PAIRS, Family
from service.analysis.comparison import compare, only_best
from service.analysis.effects import effects, sentences
from service.analysis.ranking import (
    OCCUPANCY,
    STRATEGIES,
    Configuration,
    frontier,
    label_of,
    rank,
    sensitivity,
    strategies,
)
from service.analysis.recommend import Rules, recommend, recommend_per
from service.analysis.repeats import agreement, agreement_notes
from service.analysis.rows import Rows, is_at
from service.analysis.speedup import WorkerShape, is_rate, ratio_of, scales, scaling, times_to_target
from service.analysis.words import correction_words, steps_words, test_words
from service.config.suggestions import nearest
from service.domain.ledger import interruptions
from service.domain.metrics import MARGINS, Metric, scale_of, spent_metrics
from service.domain.neighbours import counted
from service.domain.records import PointRow, Run
from trainers.metrics import TEST_SCORES, Better
from trainers.tasks.info import NO_LOSS

_LOSER = {"A is better": "b", "B is better": "a"}

KernelFigures = Mapping[int, Mapping[str, Mapping[str, float]]]  # By run id, kernel and figure

Curves = Mapping[int, Sequence[PointRow]]  # Evaluations by run id, in the order of steps


class Question(Rows):
    """A table of comparable runs; each method is one answer.

    All raise `BadQuestion` for words that no run has, and `AnalysisError` where the runs give no answer.
    """

    # -- Tables and claims -----------------------------------------------------------------

    def compare(
        self,
        *,
        by: Sequence[str] = (),
        metrics: Sequence[str] = (),
        a: str | None = None,
        b: str | None = None,
        claims: bool = False,
        untested: bool = False,
        margins: Mapping[str, float] | None = None,
        alpha: float = 0.05,
        kernels: KernelFigures | None = None,
    ) -> ComparisonAnswer:
        """Sets runs side by side by axis and, on request, tests claims.

        Args:
            by: Axes that make the rows, averaged over the others; none = all, or those that `a` and `b` name.
            metrics: Names of figures; none = time, cost, energy and the task's headline.
            a, b: Two sides to test, such as `precision=fp32`; both or neither.
            claims: Test every pair of rows.
            untested: Answer also when no pair can be tested yet, with the reason for each, instead of
                raising.
            margins: Differences that count as none, by metric; None = `MARGINS`.
            kernels: Figures of each kernel by run; None = not wanted.
        """
        chosen = self._metrics(metrics)
        if (a is None) != (b is None):
            raise BadQuestion("b" if b is None else "a", "give both a and b, or neither")
        pair = None if a is None or b is None else (self._point(a, "a"), self._point(b, "b"))
        if pair is not None:
            if list(pair[0]) != list(pair[1]):
                raise BadQuestion("b", "a and b name different axes; name the same ones in both")
            if pair[0] == pair[1]:
                raise BadQuestion("b", "a and b are the same; a comparison needs two sides")
        axes = self._axes(by) if by or pair is None else tuple(pair[0])
        table = compare(self.run_table.runs, axes, chosen, self._column, self._company)
        rows = table.rows
        tested: tuple[TestedPair, ...] = ()
        notes = self._notes(chosen)
        notes += [f"{row.label}: {row.interruptions.words}" for row in rows if row.interruptions]
        agreed = tuple(self._agreement())
        notes += agreement_notes(agreed, self._to_agree)
        if claims or pair is not None:
            tested, more = self._claims(axes, chosen, pair, self._margins(margins), _level(alpha))
            if not untested and all(answer.claim is None for answer in tested):
                raise AnalysisError(tested[0].text)
            notes += more
        if kernels is not None and not kernels:
            notes.append("no run was profiled on a GPU; submit with telemetry.profile_steps, such as 5")
        launched = tuple(self._kernels(rows, kernels)) if kernels else ()
        best = dict(self._best(table))
        for pair_of in tested:
            if pair_of.claim is not None and pair_of.claim.verdict in _LOSER:
                worse = getattr(pair_of, _LOSER[pair_of.claim.verdict])
                if pair_of.metric in best and rows[best[pair_of.metric]].label == worse:
                    del best[pair_of.metric]
        return replace(
            table,
            best=best,
            claims=tested,
            notes=tuple(notes),
            kernels=launched,
            agreement=agreed,
        )

    @property
    def _to_agree(self) -> list[str]:
        """Figures that repeats of a seed have in common if training is deterministic."""
        return [name for name in ("train_loss", self.judged_by.name) if self._has(name)]

    def _agreement(self) -> Iterator[SeedAgreement]:
        runs = self.run_table.runs
        if not any(run.repeat for run in runs):
            return
        whole = [at for at, run in enumerate(runs) if self._is_finished[at] and run.reused_from is None]
        columns = {name: self._column(name)[whole].tolist() for name in (*self._to_agree, "total_time_s")}
        times = columns.pop("total_time_s")
        yield from agreement([runs[at] for at in whole], columns, times)

    def _company(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Fields of a row about others on its runs' devices, and about interruptions of these."""
        table = self.run_table
        causes = [table.disturbed[run.id] for run in runs if run.id in table.disturbed]
        return {
            "shared": sum(run.id in table.shared for run in runs),
            "disturbed": len(causes),
            "disturbed_by": counted(causes),
            "interruptions": interruptions([table.on_markets.get(run.id) for run in runs if run.attempt]),
        }

    def _kernels(self, rows: Sequence[ComparedRow], kernels: KernelFigures) -> Iterator[KernelRow]:
        for row in rows:
            runs = [run for run in self._finished if run.id in kernels and is_at(run.point, row.point)]
            values: dict[str, dict[str, list[float]]] = {}
            for run in runs:
                for kernel, figures in kernels[run.id].items():
                    for name, value in figures.items():
                        values.setdefault(kernel, {}).setdefault(name, []).append(value)
            means = {
                kernel: {name: math.fsum(of) / len(of) for name, of in figures.items()}
                for kernel, figures in values.items()
            }
            longest = sorted(means, key=lambda kernel: -means[kernel].get("kernel_ms_per_step", 0.0))
            for kernel in longest[:MOST_KERNELS]:
                count = sum(kernel in kernels[run.id] for run in runs)
                yield KernelRow(row.label, row.point, kernel, count, means[kernel])

    def _best(self, table: ComparisonAnswer) -> Mapping[str, int]:
        """The row of the best mean by metric, over the cells that all rows have, of whole runs."""
        if table.axes == self.axes and not any(row.incomplete for row in table.rows):
            return table.best
        best: dict[str, int] = {}
        cells = self.cells(table.metrics)
        positions = {label_of(row.point): at for at, row in enumerate(table.rows)}
        for metric in table.metrics:
            try:
                every, _ = sides(cells, table.axes, [metric.name])
            except AnalysisError:
                continue  # No cell is on every side.
            means = {
                side.label: statistics.fmean(of)
                for side in every
                if (of := side.values[metric.name].values())
            }
            winner = only_best(means, metric)
            if winner in positions:
                best[metric.name] = positions[winner]
        return best

    def claims_against(self, label: str, metrics: Sequence[str]) -> tuple[TestedPair, ...]:
        """Returns one configuration, even one picked from the figures, against each other one."""
        chosen = self._metrics(metrics)
        every, _ = sides(self.cells(chosen), self.axes, [metric.name for metric in chosen])
        pairs = [(label, side.label) for side in every if side.label != label]
        return self._tested(every, pairs, chosen, MARGINS, 0.05)

    def _claims(
        self,
        axes: Sequence[str],
        metrics: Sequence[Metric],
        pair: tuple[Mapping[str, Any], Mapping[str, Any]] | None,
        margins: Mapping[str, float],
        alpha: float,
    ) -> tuple[tuple[TestedPair, ...], list[str]]:
        cells = self.cells(metrics)
        if pair is not None:
            for name, point in zip("ab", pair, strict=True):
                if not any(is_at(cell.point, point) for cell in cells):
                    raise BadQuestion(name, f"no run has {label_of(point)} together")
            cells = [c for c in cells if any(is_at(c.point, point) for point in pair)]
            axes = tuple(pair[0])
        every, notes = sides(cells, axes, [metric.name for metric in metrics])
        if len(every) < 2:
            raise AnalysisError(
                f"{', '.join(axes) or 'the experiment'} has only one value; a comparison needs two"
            )
        if pair is not None:
            pairs = [tuple(label_of(self._full(point, every)) for point in pair)]
        else:
            pairs = list(itertools.combinations([side.label for side in every], 2))
        if len(pairs) > MOST_PAIRS:
            raise BadQuestion(
                "by",
                f"{len(every)} configurations make {len(pairs):,} pairs, more than the limit of "
                f"{MOST_PAIRS}; group by an axis, or name two sides as a and b",
            )
        tested = self._tested(every, [(one, other) for one, other in pairs], metrics, margins, alpha)
        return tested, notes

    def _tested(
        self,
        every: Sequence[Side],
        pairs: Sequence[tuple[str, str]],
        metrics: Sequence[Metric],
        margins: Mapping[str, float],
        alpha: float,
    ) -> tuple[TestedPair, ...]:
        points = {side.label: side.point for side in every}
        answers: list[TestedPair] = []
        made: Claim | None
        for metric in metrics:
            if not any(side.values.get(metric.name) for side in every):
                continue  # Named in the notes: no run has it.
            family = self._family(every, metric, margins.get(metric.name), alpha)
            for a, b in pairs:
                try:
                    made = family.claim(a, b)
                except AnalysisError as error:
                    made, text = None, f"{a} (A) against {b} (B): {error}"
                else:
                    text = claim_words(a, b, made)
                answers.append(TestedPair(a, b, points[a], points[b], metric.name, made, text))
        if not answers:
            raise AnalysisError(f"no run has {' or '.join(metric.name for metric in metrics)} yet")
        return tuple(answers)

    def _family(self, every: Sequence[Side], metric: Metric, margin: float | None, alpha: float) -> Family:
        return Family(
            metric.name,
            {side.label: side.values.get(metric.name, {}) for side in every},
            better=metric.better,
            margin=margin,
            alpha=alpha,
            resolution=self.resolution(metric.name),
            scores=self._unit_scores(metric.name, every),
        )

    # -- Rankings --------------------------------------------------------------------------

    def score(
        self,
        *,
        strategy: str | None = None,
        weights: Mapping[str, float] | None = None,
        as_published: bool = False,
    ) -> ScoreAnswer:
        """Ranks configurations by weighted score.

        Args:
            strategy: One of `STRATEGIES`; None without weights = `balance`.
            weights: The user's own, by metric (`accuracy`, or `my_figure:higher`).
            as_published: A strategy weighs figures as its source defines them, without validation.
        """
        notes: list[str] = []
        if strategy is not None and weights:
            raise BadQuestion("strategy", "give a strategy or your own weights, not both")
        if as_published and weights:
            raise BadQuestion(
                "as_published", "as_published applies to strategies; set a strategy, or drop as_published"
            )
        definitions = None
        if weights:
            criteria = tuple(self._criterion(name, weight) for name, weight in weights.items())
            if sum(criterion.weight for criterion in criteria) == 0:
                raise BadQuestion("weight", "all weights are 0, so all configurations score the same")
        else:
            strategy = strategy or "balance"
            if strategy not in STRATEGIES:
                raise BadQuestion(
                    "strategy",
                    f"unknown strategy '{strategy[:100]}'; {nearest(strategy[:100], STRATEGIES)}",
                )
            definitions = Definitions.published if as_published else Definitions.stillhouse
            criteria = strategies(definitions)[strategy]
            absent = {c: f"no run has {c.metric}" for c in criteria if not self._has(c.metric)}
            for criterion in criteria:
                name = criterion.metric
                if name in OCCUPANCY and criterion not in absent and self._some_lack(name):
                    absent[criterion] = f"not every configuration has {name}"
            if len(absent) < len(criteria):
                notes += [
                    f"{reason}, so its weight of {criterion.weight:g} is ignored"
                    for criterion, reason in absent.items()
                ]
                criteria = tuple(criterion for criterion in criteria if criterion not in absent)
        metrics = [Metric(criterion.metric, criterion.better) for criterion in criteria]
        candidates, left_out = self._candidates(metrics)
        weighted = [criterion.metric for criterion in criteria if criterion.weight > 0]
        return ScoreAnswer(
            strategy=strategy,
            definitions=definitions,
            criteria=criteria,
            ranking=tuple(rank(candidates, criteria)),
            sensitivity={
                metric: tuple(sensitivity(candidates, criteria, metric))
                for metric in (weighted if len(weighted) > 1 else ())
            },
            left_out=left_out,
            notes=(*notes, *self._notes(metrics)),
        )

    def frontier(self, *, metrics: Sequence[str] = ()) -> FrontierAnswer:
        chosen = self._metrics(metrics)
        # A figure that no one asked for by name may be missing everywhere; the notes say so.
        present = chosen if metrics else [m for m in chosen if self._has(m.name)] or chosen
        candidates, left_out = self._candidates(present)
        dominated = frontier(candidates, {metric.name: metric.better for metric in present})
        members = [
            FrontierMember(c.label, c.point, {m.name: c.mean(m.name) or 0.0 for m in present})
            for c in candidates
        ]
        return FrontierAnswer(
            metrics=tuple(present),
            members=tuple(member for member in members if member.label not in dominated),
            others=tuple(member for member in members if member.label in dominated),
            dominated=dominated,
            left_out=left_out,
            notes=tuple(self._notes(chosen)),
        )

    def recommend(
        self,
        *,
        objective: str = "cost_usd",
        within: Mapping[str, float] | None = None,
        at_most: Mapping[str, float] | None = None,
        at_least: Mapping[str, float] | None = None,
        per: str | None = None,
    ) -> Recommendation:
        """Returns the best configuration on `objective` that meets every constraint, and how sure that is.

        Args:
            objective: Metric to be best on.
            within: Allowed distance from the best mean, by metric; None = `NO_LOSS` of the task's headline.
            at_most, at_least: Bounds of means, by metric.
            per: Choose also among the configurations with each value of this axis; None = not.
        """
        axis = None if per is None else self.axis(per, "per")
        if within is None:
            within = {self.judged_by.name: NO_LOSS}
        target = self._metric(objective, "objective")
        bounds = {"within": within, "at_most": at_most or {}, "at_least": at_least or {}}
        constraints = [
            self._constraint(name, "within_of_best" if parameter == "within" else parameter, bound, parameter)
            for parameter, of in bounds.items()
            for name, bound in of.items()
        ]
        metrics = list(dict.fromkeys([target, *(Metric(c.metric, c.better) for c in constraints)]))
        cells = self.cells(metrics)
        every, _ = sides(cells, self.axes, [metric.name for metric in metrics])

        @functools.cache
        def family(name: str, better: Better, margin: float | None) -> Family:
            return self._family(every, Metric(name, better), margin, 0.05)

        rules = Rules(target.name, target.better, constraints, family)
        answer = recommend(cells, rules)
        of_values = None
        if axis is not None:
            groups: dict[str, list[Configuration]] = {}
            for cell in cells:
                groups.setdefault(label_of({axis: cell.point.get(axis)}), []).append(cell)
            if len(groups) < 2:
                raise BadQuestion("per", f"{axis} has only one value; leave it out")
            of_values = recommend_per(axis, groups, answer, rules)
        chosen = {each.name: getattr(answer, each.name) for each in fields(answer)}
        return Recommendation(**chosen, per=of_values, notes=tuple(self._notes(metrics)))

    # -- Effects and speed-ups -------------------------------------------------------------

    def effects(self, *, metrics: Sequence[str] = (), alpha: float = 0.05) -> EffectsAnswer:
        chosen = self._metrics(metrics)
        cells = self.cells(chosen)
        items: list[FittedEffects] = []
        unanswered: dict[str, str] = {}
        for metric in chosen:
            margin = MARGINS.get(metric.name)
            try:
                model = effects(
                    metric.name,
                    cells,
                    scale=scale_of(metric.name),
                    resolution=self.resolution(metric.name),
                    family=partial(self._family, metric=metric, margin=margin, alpha=_level(alpha)),
                )
            except AnalysisError as error:
                unanswered[metric.name] = str(error)
                continue
            items.append(FittedEffects(model, sentences(model, alpha=alpha, margin=margin)))
        if not items:
            raise AnalysisError(next(iter(unanswered.values())))
        return EffectsAnswer(tuple(items), unanswered, tuple(self._notes(chosen)))

    def speedup(
        self,
        *,
        baseline: str | None = None,
        metrics: Sequence[str] = (),
        curves: Curves | None = None,
        target: tuple[str, float] | None = None,
    ) -> SpeedupAnswer:
        """Returns every configuration against a baseline, and how soon each reaches a target.

        Args:
            baseline: Axis values that name one configuration; None = the first of the grid.
            metrics: Names of figures; none = time, cost, energy.
            curves: Evaluations of the target's metric by run.
            target: Metric and value; None = the best mean of the task's headline less `NO_LOSS`.
        """
        chosen = self._metrics(metrics or spent_metrics(self.run_table.runs))
        judged = self._metric(target[0], "target") if target else self.validated_by
        if target and judged.name in TEST_SCORES:
            raise BadQuestion(
                "target",
                f"{judged.name} has one value, at the end of a run; name a figure of the validation part, "
                f"such as {self.validated_by.name}",
            )
        cells = self.cells([*chosen, judged])
        base = self._baseline(cells, baseline)
        if not any(base.figures[metric.name] for metric in chosen):
            reasons = "; ".join(sorted(set(base.failures.values())))
            raise AnalysisError(
                f"the baseline {base.label} has no result" + (f": {reasons}" if reasons else "")
            )
        resolutions = {metric.name: self.resolution(metric.name) for metric in chosen}
        rows, left_out = [], {}
        for cell in cells:
            if any(cell.figures[metric.name] for metric in chosen):
                ratios = {metric.name: ratio_of(metric, base, cell, resolutions) for metric in chosen}
                rows.append(SpeedupRow(cell.label, cell.point, ratios))
            else:
                left_out[cell.label] = "; ".join(sorted(set(cell.failures.values()))) or "has no figure"
        time_to = self._time_to(cells, base.label, curves, judged, target and target[1]) if curves else None
        notes = self._notes(chosen)
        if time_to is not None:
            notes.append("time to the target counts from the start of a run, including interruptions")
        of_workers = self._scaling(chosen, by_name=bool(metrics)) if scales(self.axes) else ()
        return SpeedupAnswer(
            base.label, tuple(chosen), tuple(rows), time_to, left_out, tuple(notes), of_workers
        )

    def _scaling(self, metrics: Sequence[Metric], *, by_name: bool) -> tuple[ScalingRow, ...]:
        """Of times and throughputs; of the throughput too, unless figures were asked for by name."""
        rates = [metric for metric in metrics if is_rate(metric.name)]
        if not by_name and self._has("samples_per_s"):
            rates.append(self._metric("samples_per_s", "metric"))
        shapes: dict[str, set[WorkerShape]] = {}
        for run in self._finished:
            examples = run.total_steps and run.total_steps * run.global_batch_size
            shape = WorkerShape(run.workers, run.global_batch_size, examples)
            shapes.setdefault(label_of(run.point), set()).add(shape)
        # Runs that were given unlike numbers of workers have no efficiency.
        alike = {label: of.pop() for label, of in shapes.items() if len(of) == 1}
        resolutions = {metric.name: self.resolution(metric.name) for metric in rates}
        return tuple(scaling(self.cells(rates), alike, rates, resolutions))

    def _time_to(
        self,
        cells: Sequence[Configuration],
        baseline: str,
        curves: Curves,
        metric: Metric,
        target: float | None,
    ) -> TimeTo | None:
        if target is None:
            means = [mean for cell in cells if (mean := cell.mean(metric.name)) is not None]
            if not means:
                return None
            value = max(means) - NO_LOSS if metric.better == "higher" else min(means) + NO_LOSS
        else:
            value = target
        times: dict[str, list[float | None]] = {}
        for run in self._finished:
            evaluated = [row for row in curves.get(run.id, ()) if math.isfinite(row.value)]
            if not evaluated or run.started_s is None:
                continue
            reached = (
                row for row in evaluated
                if (row.value >= value if metric.better == "higher" else row.value <= value)
            )  # fmt: skip
            first = next(reached, None)
            times.setdefault(label_of(run.point), []).append(
                None if first is None else max(0.0, first.at_s - run.started_s)
            )
        return TimeTo(metric.name, value, times_to_target(times, baseline)) if times else None

    def _baseline(self, cells: Sequence[Configuration], text: str | None) -> Configuration:
        if text is None:
            return cells[0]
        point = self._point(text, "baseline")
        matches = [cell for cell in cells if is_at(cell.point, point)]
        if len(matches) != 1:
            raise BadQuestion(
                "baseline", f"'{text[:200]}' names {len(matches)} configurations; name one, with all its axes"
            )
        return matches[0]


def claim_words(a: str, b: str, claim: Claim) -> str:
    if claim.verdict == "undecided":
        verdict = "undecided"
        if claim.reversed:
            verdict += ", because the means over all seeds point the other way"
        if claim.more_seeds is not None:
            verdict += f": about {claim.more_seeds} more seed{'s' * (claim.more_seeds != 1)} needed"
    else:
        verdict = claim.verdict
    change = f"{claim.relative:+.1%}, " if claim.relative is not None else ""
    p_value = (
        f"p = {claim.p_equivalent:.2g} for within {claim.margin:g}"
        if claim.verdict == "equivalent"
        else f"p = {claim.p_value:.2g}"
    )
    test = test_words(claim) + steps_words(claim)
    return (
        f"{a} (A) against {b} (B): {verdict}; {claim.metric} {claim.mean_a:.4g} against {claim.mean_b:.4g} "
        f"({change}difference {claim.low:.3g} to {claim.high:.3g}), {p_value} "
        f"({test}{correction_words(claim)})"
    )


def _level(alpha: float) -> float:
    if not 0 < alpha < 1:
        raise BadQuestion("alpha", f"alpha {alpha:g} is not between 0 and 1")
    return alpha
