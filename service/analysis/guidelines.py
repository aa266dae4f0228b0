"""Guidelines from finished experiments: their claims by axis, collected and counted.

Nothing is tested here. Each claim is one that `compare ID --by AXIS --claims` makes of one experiment, so a
guideline cannot contradict the comparison that it quotes. Experiments that vary an axis on the same task and
hardware stand together; where their claims disagree, the guideline says so and does not decide.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from service.analysis.answers import (
    EVERYTHING,
    AnalysisError,
    BadQuestion,
    ComparisonAnswer,
    Evidence,
    EvidenceSource,
    Finding,
    Guide,
    Guideline,
    Selection,
    TestedPair,
)
from service.analysis.question import Question
from service.analysis.run_table import RunTable, UnitScores, no_scores, read_run_table
from service.domain.access import EVERYTHING as ALL_PROJECTS
from service.domain.access import Visibility
from service.domain.metrics import Metric
from service.domain.records import Experiment
from service.domain.states import EXPERIMENT_STATES_WITH_RESULT
from service.store import Store

Found = TypeVar("Found")

_ALPHA = 0.05
_MIRRORED: Mapping[Finding, Finding] = {"A is better": "B is better", "B is better": "A is better"}


def read_guide(
    store: Store,
    *,
    project: str | None = None,
    by: Sequence[str] = (),
    metrics: Sequence[str] = (),
    selection: Selection = EVERYTHING,
    limit: int = 100,
    visible: Visibility = ALL_PROJECTS,
    unit_scores: UnitScores = no_scores,
) -> Guide:
    """Reads the newest experiments that ended with results, at most `limit`, and collects what they claim.

    Args:
        project: Only its experiments; None = all that are visible.
        by: Axes; none = each that an experiment varies.
        metrics: Names of figures; none = those that `compare` shows.
        visible: Projects that the reader sees.
        unit_scores: Reads a run's scores of the test part's units, as for `compare`.

    Raises:
        BadQuestion: no experiment varies an axis of `by`, or has a figure of `metrics`.
        AnalysisError: no finished experiment varies an axis.
    """
    with_result = ", ".join(f"'{state}'" for state in sorted(EXPERIMENT_STATES_WITH_RESULT))
    condition = f"state in ({with_result})"
    if project is not None:
        quoted = project.replace("'", "''")
        condition += f" and project = '{quoted}'"
    page = store.experiments.page(filter=condition, page_size=limit, visible=visible)
    tables = (
        (experiment, read_run_table(store, [experiment.id], selection, unit_scores=unit_scores))
        for experiment in sorted(page.items, key=lambda each: each.id)
    )
    guide = guide_of(tables, by=by, metrics=metrics)
    if page.next_page_token is None:
        return guide
    read = f"only the newest {limit:,} finished experiments were read; raise the limit for more"
    return replace(guide, notes=(*guide.notes, read))


def guide_of(
    tables: Iterable[tuple[Experiment, RunTable]], *, by: Sequence[str] = (), metrics: Sequence[str] = ()
) -> Guide:
    """Collects the claims of these experiments, the oldest first; see `read_guide`."""
    collected = _Collected(by, metrics)
    for experiment, table in tables:
        if table.runs:
            collected.add(experiment, table)
    return collected.guide()


class _Collected:
    def __init__(self, by: Sequence[str], metrics: Sequence[str]) -> None:
        self._by, self._metrics = by, metrics
        self._evidence: dict[tuple[str, str, str, str, frozenset[str]], list[Evidence]] = {}
        self._directions: dict[str, Metric] = {}
        self._sources: list[EvidenceSource] = []
        self._left_out: dict[str, str] = {}
        self._measured_by: dict[int, int] = {}  # Experiment that first had a run's figures, by the run's id
        self._axes: dict[str, None] = {}
        self._named: set[str] = set()  # Words of `by` and `metrics` that some experiment has
        self._unknown: dict[str, BadQuestion] = {}
        self._families: set[tuple[int, str, str, str]] = set()

    def add(self, experiment: Experiment, table: RunTable) -> None:
        measured = {run.id if run.reused_from is None else run.reused_from for run in table.finished}
        earlier = {self._measured_by[id] for id in measured if id in self._measured_by}
        if measured and measured <= self._measured_by.keys():
            others = ", ".join(map(str, sorted(earlier)))
            self._left_out[str(experiment.id)] = f"its runs are reused, and count in experiment {others}"
            return
        self._measured_by |= dict.fromkeys(measured - self._measured_by.keys(), experiment.id)
        tasks = dict.fromkeys(run.task for run in table.runs)
        answers = [answer for task in tasks for answer in self._of_task(experiment.id, task, table)]
        if not answers:
            return
        notes = [f"some of its runs are reused from experiment {id}" for id in sorted(earlier)]
        notes += dict.fromkeys(note for answer in answers for note in answer.notes)
        self._sources.append(_source(experiment, table, notes))

    def _of_task(self, id: int, task: str, table: RunTable) -> Iterator[ComparisonAnswer]:
        """Adds the claims of the comparisons of one task by axis, and yields these."""
        try:
            of_task = replace(table, runs=tuple(run for run in table.runs if run.task == task), references=())
            question = Question(of_task)
            chosen = [name for name in self._metrics if self._found(question.metric, name)]
            varied = [
                axis
                for axis in question.axes
                if len({repr(run.point[axis]) for run in of_task.runs if axis in run.point}) > 1
            ]
            self._axes |= dict.fromkeys(varied)
            if self._by:
                wanted = [self._found(partial(question.axis, parameter="by"), name) for name in self._by]
                varied = [axis for axis in dict.fromkeys(wanted) if axis in varied]
        except AnalysisError as error:
            self._left_out[str(id)] = str(error)
            return
        if self._metrics and not chosen:
            return
        depends = _interactions(question, chosen) if varied else {}
        hardware = ", ".join(sorted({run.hardware for run in of_task.finished if run.hardware}))
        for axis in varied:
            try:
                answer = question.compare(by=[axis], metrics=chosen, claims=True, untested=True)
            except AnalysisError as error:
                self._left_out[f"{id}, {axis}"] = str(error)
                continue
            self._directions |= {metric.name: metric for metric in answer.metrics}
            for pair in answer.claims:
                group = (axis, task, hardware, pair.metric, frozenset((pair.a, pair.b)))
                self._evidence.setdefault(group, []).append(
                    Evidence(id, pair, depends.get((axis, pair.metric), ()))
                )
                if pair.claim is not None:
                    self._families.add((id, axis, task, pair.metric))
            yield answer

    def _found(self, find: Callable[[str], Found], word: str) -> Found | None:
        try:
            found = find(word)
        except BadQuestion as error:
            self._unknown[word] = error
            return None
        self._named.add(word)
        return found

    def guide(self) -> Guide:
        for name in self._by:
            if name not in self._named:
                known = ", ".join(self._axes) or "none"
                raise BadQuestion("by", f"no finished experiment varies '{name[:100]}'; axes: {known}")
        for name in self._metrics:
            if name not in self._named and name in self._unknown:
                raise self._unknown[name]
        if not self._evidence:
            reasons = "; ".join(f"experiment {of}: {reason}" for of, reason in self._left_out.items())
            raise AnalysisError("no finished experiment varies an axis" + (f": {reasons}" if reasons else ""))
        guidelines = [
            _guideline(group[:3], self._directions[group[3]], evidence)
            for group, evidence in self._evidence.items()
        ]
        of_axis = Counter(
            axis for axis, _ in {(each.axis, of.experiment_id) for each in guidelines for of in each.evidence}
        )
        groups = {(each.axis, each.task, each.hardware): None for each in guidelines}
        order = {group: at for at, group in enumerate(groups)}
        guidelines.sort(
            key=lambda each: (-of_axis[each.axis], each.axis, order[each.axis, each.task, each.hardware])
        )
        return Guide(tuple(guidelines), tuple(self._sources), self._left_out, self._notes())

    def _notes(self) -> tuple[str, ...]:
        notes = [
            "each claim is that of its own experiment (compare ID --by AXIS --claims); experiments are "
            "counted, not tested together"
        ]
        if len(self._families) > 1:
            notes.append(
                f"{len(self._families)} families of claims are quoted, one per experiment, axis and figure: "
                f"where nothing differs, about {_ALPHA:.0%} of families make a false claim"
            )
        return tuple(notes)


def _interactions(question: Question, metrics: Sequence[str]) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """By axis and metric, other axes on which `effects` finds the axis' effect to depend."""
    try:
        items = question.effects(metrics=metrics).items
    except AnalysisError:
        return {}
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for model in (item.model for item in items):
        for term in model.terms:
            if len(term.axes) == 2 and term.p_value < _ALPHA:
                for axis, other in (term.axes, reversed(term.axes)):
                    found[axis, model.metric] = (*found.get((axis, model.metric), ()), other)
    return found


def _guideline(group: tuple[str, str, str], metric: Metric, evidence: Sequence[Evidence]) -> Guideline:
    first = evidence[0].pair
    verdicts = [_verdict(of.pair, first) for of in evidence]
    counts = dict(Counter(verdicts).most_common())
    decided = [verdict for verdict in counts if verdict not in ("undecided", "untested")]
    finding: Finding = "undecided" if "undecided" in counts else "untested"
    if decided:
        finding = decided[0] if len(decided) == 1 else "conflicting"
    claims = [of.pair.claim for of in evidence if of.pair.claim is not None]
    changes = [change for of in evidence if (change := _change(of.pair, first)) is not None]
    seeds = [count for claim in claims for count in (claim.seeds_a, claim.seeds_b)]
    return Guideline(
        *group,
        metric=metric,
        a=first.a,
        b=first.b,
        a_point=first.a_point,
        b_point=first.b_point,
        finding=finding,
        counts={str(verdict): count for verdict, count in counts.items()},
        smallest=min(changes, default=None),
        largest=max(changes, default=None),
        seeds_fewest=min(seeds, default=1),
        seeds_most=max(seeds, default=1),
        evidence=tuple(evidence),
    )


def _verdict(pair: TestedPair, first: TestedPair) -> Finding:
    if pair.claim is None:
        return "untested"
    verdict = pair.claim.verdict
    return verdict if pair.a == first.a else _MIRRORED.get(verdict, verdict)


def _change(pair: TestedPair, first: TestedPair) -> float | None:
    """The claim's relative difference, from A to B as in the first claim."""
    claim = pair.claim
    if claim is None or claim.relative is None or pair.a == first.a:
        return None if claim is None else claim.relative
    return -claim.difference / abs(claim.mean_a) if claim.mean_a else None


def _source(experiment: Experiment, table: RunTable, notes: Sequence[str]) -> EvidenceSource:
    finished = table.finished
    ids = {run.id for run in finished}
    devices = {
        str(facts.get("gpu") or facts.get("cpu") or facts.get("device"))
        for facts, of in table.environments
        if ids.intersection(of)
    }
    ends = [run.ended_s for run in finished if run.ended_s is not None]
    return EvidenceSource(
        id=experiment.id,
        name=experiment.name,
        project=experiment.project,
        ended_s=max(ends, default=experiment.ended_s),
        tasks=_distinct(run.task for run in finished),
        models=_distinct(run.student for run in finished),
        hardware=_distinct(run.hardware for run in finished),
        devices=tuple(sorted(devices)),
        runs=len(finished),
        planned=len(table.runs),
        seeds=len({run.seed for run in finished}),
        disturbed=sum(run.id in table.disturbed for run in finished),
        energy=_distinct(run.energy_provenance for run in finished),
        notes=tuple(notes),
    )


def _distinct(words: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in words if word))
