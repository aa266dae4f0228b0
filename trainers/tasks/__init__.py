"""The registry of tasks. A further task is one file here and one line in `TASKS`."""

from __future__ import annotations

from trainers.config import TaskName
from trainers.tasks.base import Task
from trainers.tasks.imdb import Imdb
from trainers.tasks.mlm import Mlm
from trainers.tasks.squad_v2 import SquadV2
from trainers.tasks.tariff import Tariff
from trainers.tasks.wikiqa import WikiQa

TASKS: dict[TaskName, type[Task]] = {
    TaskName.imdb: Imdb,
    TaskName.squad_v2: SquadV2,
    TaskName.wikiqa: WikiQa,
    TaskName.tariff: Tariff,
    TaskName.mlm: Mlm,
}


def build(name: TaskName) -> Task:
    """The task of that name."""
    return TASKS[name]()
