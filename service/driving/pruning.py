"""Which queued runs cannot succeed, given the outcome of others, and which live runs diverge."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from service.specs.experiment import ExperimentSpec

WINDOW = 10
"""Points that are averaged before a loss is called high."""


def memory_key(spec: ExperimentSpec) -> str:
    """Key of runs whose memory use differs by the micro-batch alone; takes a resolved spec without axes."""
    return json.dumps(
        {
            "task": [spec.task.name, spec.task.max_length],
            "model": spec.model.model_dump(mode="json"),
            "distils": spec.model.teacher is not None,
            "precision": spec.precision,
            "numerics": spec.numerics.model_dump(mode="json"),
            "optimizer": [spec.optimizer.name, spec.optimizer.implementation],
            "parallel": spec.parallel.model_dump(mode="json"),
            "hardware": spec.hardware,
            "resources": spec.resources.model_dump(mode="json"),
        },
        sort_keys=True,
    )


def does_not_fit(spec: ExperimentSpec, failed: ExperimentSpec) -> str | None:
    """Returns why a run cannot fit into memory, given one that ran out of it; None = it may fit."""
    if memory_key(spec) != memory_key(failed) or spec.micro_size < failed.micro_size:
        return None
    return f"does not fit (by {failed.micro_size}): micro-batch {failed.micro_size} ran out of memory here"


DATA_AXES = ("task.", "model.student")
"""What the fields begin with that decide about a run's examples: the tokenizer is the student's."""


def data_key(spec: ExperimentSpec) -> str:
    """Key of runs that read the same data and so share a mistake in it; `spec` is resolved, without axes."""
    return f"{spec.model.student}\n{spec.task.model_dump_json()}"


def data_vary(spec: ExperimentSpec) -> bool:
    """Returns whether an axis changes the data, so that runs need not share a mistake in it."""
    return any(name.startswith(DATA_AXES) for name in spec.search.axes)


def diverges(losses: Sequence[float], factor: float) -> bool:
    """Returns whether a loss's newest window averages above `factor` (> 1) times its lowest window."""
    if len(losses) < 2 * WINDOW:
        return False
    if not all(map(math.isfinite, losses[-WINDOW:])):
        return True
    means = [
        math.fsum(losses[start : start + WINDOW]) / WINDOW
        for start in range(0, len(losses) - WINDOW + 1, WINDOW)
    ]
    lowest = min(mean for mean in means if math.isfinite(mean))
    return math.fsum(losses[-WINDOW:]) / WINDOW > factor * lowest
