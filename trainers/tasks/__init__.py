"""The registry of tasks. A further task is one file here and one line in `TASKS`."""

from __future__ import annotations

from trainers.config import TaskName
from trainers.tasks.base import Task
from trainers.tasks.imdb import Imdb

TASKS: dict[TaskName, type[Task]] = {
    TaskName.imdb: Imdb,
}


def build(name: TaskName) -> Task:
    """The task of that name."""
    return TASKS[name]()
