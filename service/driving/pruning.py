"""Which queued runs cannot succeed, given what others have shown; and which running ones diverge."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from service.specs.experiment import ExperimentSpec

WINDOW = 10
"""Points that are averaged before a loss is called high."""


def memory_key(spec: ExperimentSpec) -> str:
    """What decides about memory besides the micro-batch: runs that share it need more for more examples.

    Args:
        spec: the run's resolved spec, without axes.
    """
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
    """Returns why a run cannot fit into memory, given one that did not; None when it may.

    Args:
        spec: Spec of a queued run.
        failed: Spec of the run that ran out of memory.
    """
    if memory_key(spec) != memory_key(failed) or spec.micro_size < failed.micro_size:
        return None
    return f"does not fit (by {failed.micro_size}): micro-batch {failed.micro_size} ran out of memory here"


DATA_AXES = ("task.", "model.student")
"""What the fields begin with that decide about a run's examples: the tokenizer is the student's."""


def data_key(spec: ExperimentSpec) -> str:
    """Returns what decides whether a run's data can be used: runs that share it share a mistake in them.

    Args:
        spec: the run's resolved spec, without axes.
    """
    return f"{spec.model.student}\n{spec.task.model_dump_json()}"


def data_vary(spec: ExperimentSpec) -> bool:
    """Returns whether an axis changes the data, so that a mistake in those of one run may not be others'.

    Args:
        spec: Spec of the experiment.
    """
    return any(name.startswith(DATA_AXES) for name in spec.search.axes)


def diverges(losses: Sequence[float], factor: float) -> bool:
    """Returns whether a loss has risen for good: its newest window's mean is `factor` times the lowest one's.

    Args:
        losses: by step, in order.
        factor: Ratio above which a loss counts as diverging, above 1.
    """
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
