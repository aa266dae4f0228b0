"""Specs that follow from a run: one that trains its model further, one that trains its settings on all data.

Each is an experiment of its own: a run's figures never change once it has ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from service.config.document import Problem, SpecError
from service.domain.records import Run
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
        run,
        config,
        "continued",
        {"model": model, "length": dict(length)},
    )


def retrained(run: Run, config: Mapping[str, Any], on: Literal["all"]) -> str:
    """Returns the spec that trains a run's settings, which were chosen, on validation data as well."""
    task = {**config["task"], "train_on": on}
    return _text(
        f"Trains the settings of run {run.id} on its training and validation data.",
        run,
        config,
        on,
        {"task": task},
    )


def _text(about: str, run: Run, config: Mapping[str, Any], ending: str, changes: Mapping[str, Any]) -> str:
    name = f"{config['name'][: _LONGEST_NAME - len(ending) - 1]} {ending}"
    document = {**config, "name": name, "description": about, "seeds": [run.seed], "reuse": False, **changes}
    return f"# {about}\n{json.dumps(document, indent=2, ensure_ascii=False)}\n"
