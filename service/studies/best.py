"""What a part takes from those that it needs: runs of the same seed, the best run, and arms at their best."""

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from service.analysis.answers import AnalysisError, BadQuestion
from service.analysis.best_over import AtBest
from service.analysis.question import Question
from service.analysis.ranking import label_of
from service.analysis.run_table import RunTable, read_run_table
from service.config.document import parse
from service.domain.grid import AxisValue, FieldValue, labels
from service.domain.records import Run
from service.domain.states import RunState
from service.domain.studies import StudyPart
from service.specs.experiment import validate
from service.specs.models import RUN, by_seed
from service.specs.study import ModelSource, PartSpec, tuned_document
from service.store import Store
from service.studies import NotPossible


def written(
    store: Store, parts: Mapping[str, PartSpec], name: str, known: Mapping[str, StudyPart]
) -> tuple[dict[str, Any], str | None]:
    """Returns a part's spec with what others found, and what was chosen for it, in words."""
    part, words = parts[name], dict[str, None]()

    def model_of(source: ModelSource) -> str:
        table = read_run_table(store, [_experiment_of(known[source.part])])
        if source.by_seed:
            last_first = sorted(table.finished, key=lambda run: -run.repeat)
            runs = {run.seed: run.id for run in last_first}
            if missing := [str(seed) for seed in part.seeds if seed not in runs]:
                raise NotPossible(f"part {source.part} has no result for seed {', '.join(missing)}")
            return by_seed({seed: runs[seed] for seed in part.seeds})
        run, words_of = _best(table, source.part)
        words[words_of] = None
        return f"{RUN}{run.id}"

    try:
        base = part if part.tuned is None else parts[part.tuned]
        document = base.with_models(functools.cache(model_of))
        if part.tuned is not None:
            cells, words_of = _at_best(store, part, _experiment_of(known[part.tuned]))
            document, words = tuned_document(part, document, cells), {words_of: None, **words}
        return document, "; ".join(words) or None
    except (AnalysisError, BadQuestion) as error:
        raise NotPossible(str(error)) from None


def _experiment_of(part: StudyPart) -> int:
    assert part.experiment is not None
    return part.experiment.id


def _best(table: RunTable, part: str) -> tuple[Run, str]:
    """Returns the best run by its task's metric on validation, never on test."""
    metric = Question(table).validated_by
    valued = [
        (float(value), run)
        for value, run in zip(table.column(metric.name), table.runs, strict=True)
        if run.state is RunState.succeeded and value == value
    ]
    if not valued:
        raise NotPossible(f"no run of part {part} has {metric.name} on validation")
    pick = max if metric.better == "higher" else min
    value, run = pick(valued, key=lambda pair: pair[0])
    words = f"the best of {len(valued)} of part {part} by {metric.name} on validation ({value:.4g})"
    return run, f"run {run.id} is {words}"


def _at_best(store: Store, part: PartSpec, tuned_by: int) -> tuple[list[dict[str, FieldValue]], str]:
    """Returns the best cell of each arm, as values by field."""
    text, _ = store.experiments.spec(tuned_by)  # The canonical spec has linked fields in another order.
    spec = validate(parse(text.encode()), store.settings.catalogue())
    table, infeasible = read_run_table(store, [tuned_by]), store.runs.refusals(tuned_by)
    settings = {run.cell: spec.search.settings(run.point) for run in table.runs if run.cell not in infeasible}
    # By field, whichever are linked: an arm is all fields but those that were tuned.
    runs = [replace(run, point=_point_of(settings[run.cell])) for run in table.runs if run.cell in settings]
    tuning = AtBest(Question(replace(table, runs=tuple(runs))), part.over).tuning
    for arm, why in tuning.left_out.items():
        raise NotPossible(f"part {part.tuned} has no best {', '.join(part.over)} for {arm}: {why}")
    cells = {json.dumps(run.point, sort_keys=True): run.cell for run in runs}
    chosen = [
        settings[cells[json.dumps({**best.point, **best.chosen}, sort_keys=True)]] for best in tuning.best
    ]
    values = "; ".join(f"{best.label}: {label_of(best.chosen)}" for best in tuning.best)
    words = (
        f"{', '.join(part.over)} was chosen on validation by mean {tuning.metric.name}, among "
        f"{tuning.best[0].tried} cells per arm of experiment {tuned_by}, and the arms are compared with "
        f"fresh seeds ({values})"
    )
    for best in tuning.best:
        if best.fewer_seeds:
            words += f"; {best.label}: not eligible, with fewer results: {'; '.join(best.fewer_seeds)}"
    return chosen, words


def _point_of(settings: Mapping[str, Any]) -> dict[str, AxisValue]:
    return {name: labels([value])[0] for name, value in settings.items()}
