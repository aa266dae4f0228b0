"""Specs that follow from results: a model trained further, settings trained on all data, further seeds.

Each is an experiment of its own: a run's figures never change once it has ended.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from service.config.document import Problem, SpecError
from service.domain.records import Run
from service.search import SEARCHES, Search
from service.search.protocol import Samples
from service.specs.models import RUN

_LONGEST_NAME = 100


def continued(run: Run, config: Mapping[str, Any], length: Mapping[str, float | int]) -> str:
    """Returns the spec that trains a run's best checkpoint further, with a fresh optimizer and schedule."""
    if config["stages"] is not None:
        message = f"run {run.id} trains in stages; name run:{run.id} as model.name of a spec with one stage"
        raise SpecError([Problem("invalid-value", "stages", message)])
    how = " and ".join(f"{value:g} {unit}" for unit, value in length.items())
    # The model has the layers and the width that these made of the one that the run started from.
    model = {**config["model"], "name": f"{RUN}{run.id}", "layers": None}
    if config["model"]["binary"].get("split"):
        model["binary"] = {**config["model"]["binary"], "split": False}
    return _text(
        f"Continues run {run.id} for {how}, from its best checkpoint.",
        config,
        "continued",
        {"model": model, "length": dict(length)},
    )


def retrained(run: Run, config: Mapping[str, Any], on: Literal["all"]) -> str:
    """Returns the spec that trains a run's settings, which were chosen, on validation data as well."""
    task = {**config["task"], "train_on": on}
    about = f"Trains the settings of run {run.id} on its training and validation data."
    return _text(about, config, on, {"task": task})


def _text(about: str, config: Mapping[str, Any], ending: str, changes: Mapping[str, Any]) -> str:
    name = f"{config['name'][: _LONGEST_NAME - len(ending) - 1]} {ending}"
    document = {**config, "name": name, "description": about, "reuse": False, **changes}
    return f"# {about}\n{json.dumps(document, indent=2, ensure_ascii=False)}\n"


def next_seeds(used: Iterable[int], count: int) -> list[int]:
    excluded = set(used)
    return list(itertools.islice((seed for seed in itertools.count() if seed not in excluded), count))


def further_spec(
    spec: Mapping[str, Any], seeds: Sequence[int], points: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Returns the same experiment with other seeds.

    A search whose runs the axes alone decide keeps only the given points; none = all that it has.
    """
    document = {**spec, "seeds": list(seeds)}
    search = dict(spec.get("search") or {})
    axes = dict(search.get("axes") or {})
    if points and SEARCHES[search.get("name", Search().name)].samples is Samples.unused:
        for axis in axes:
            wanted = [point[axis] for point in points if axis in point]
            if wanted:
                axes[axis] = [value for value in axes[axis] if value in wanted]
        document["search"] = {**search, "axes": axes}
    return document
