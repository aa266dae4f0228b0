"""What can be drawn of some experiments: kinds of plots, metrics and axes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from service.domain.formats import title
from service.domain.metrics import better_of
from service.output.figures.figure import Choices, Drawable, unit_of
from service.output.figures.registry import listed
from service.store import Store


def choices(store: Store, experiment_ids: Sequence[int]) -> Choices:
    ids = list(dict.fromkeys(experiment_ids))
    axes: dict[str, None] = {}
    for id in ids:
        _, canonical = store.experiment_spec(id)
        axes |= dict.fromkeys(json.loads(canonical)["search"]["axes"])
    return Choices(
        listed(),
        [_drawable(name) for name in store.point_names(ids)],
        [_drawable(name) for name in store.figure_names(ids)],
        list(axes),
    )


def _drawable(name: str) -> Drawable:
    return Drawable(name, title(name), unit_of(name), better_of(name))
