"""The official file layouts of the tasks, and what a task's files hold. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trainers.config import Task, TaskName, Workspace
from trainers.data import squad, tariffs, wikiqa
from trainers.data.parts import rule_identity
from trainers.data.plain_texts import plain_texts
from trainers.data.sources import Layout, labelled_folders, open_source, source_identity

OFFICIAL: Mapping[TaskName, Sequence[Layout]] = MappingProxyType(
    {
        TaskName.imdb: (labelled_folders,),
        TaskName.squad_v2: (squad.official,),
        TaskName.wikiqa: (wikiqa.official,),
        TaskName.tariff: (tariffs.official,),
        TaskName.mlm: (plain_texts,),
    }
)
"""By task, the layouts that are tried before tables of rows."""


def data_identity(task: Task, workspace: Workspace) -> dict[str, str | int | float]:
    """What the files of `task.path` hold: number, size and hash by part, as a run's record has them.

    With the rule by which they make a test part.

    Raises:
        BadDataError: as `open_source`, where a run would find no data either.
    """
    source = open_source(task, workspace, hub_id="", layouts=OFFICIAL[task.name])
    return {**source_identity(source), **rule_identity(source.parts, task.test)}
