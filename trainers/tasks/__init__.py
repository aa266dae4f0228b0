"""The registry of tasks. Imports no torch: a task's class is imported when a run starts."""

from trainers import extensions
from trainers.registry import by_name
from trainers.tasks.classification import CLASSIFICATION, IMDB
from trainers.tasks.info import DeclaredMetric, OwnFields, TaskInfo
from trainers.tasks.mlm import MLM
from trainers.tasks.regression import REGRESSION
from trainers.tasks.squad_v2 import SQUAD_V2
from trainers.tasks.tariff import TARIFF
from trainers.tasks.token_classification import TOKEN_CLASSIFICATION
from trainers.tasks.wikiqa import WIKIQA

TASKS: dict[str, TaskInfo] = by_name(
    CLASSIFICATION, REGRESSION, TOKEN_CLASSIFICATION, IMDB, SQUAD_V2, WIKIQA, TARIFF, MLM
)
"""All values of `task.name`.

Add others before `trainers.config` and `trainers.metrics` are imported: these compose the section `task` of a
spec and the table of scores from the entries.
"""
extensions.add(TASKS, extensions.TASKS, TaskInfo)

METRICS: dict[str, DeclaredMetric] = {}  # All values of `task.metrics`: those of other packages
extensions.add(METRICS, extensions.METRICS, DeclaredMetric)
