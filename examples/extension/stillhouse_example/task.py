from __future__ import annotations

from trainers.config import TaskConfig
from trainers.tasks.base import Facts
from trainers.tasks.classification import LabelFields
from trainers.tasks.classification.task import Classification


class SmsSpam(Classification):
    def fields(self, task: TaskConfig) -> LabelFields:
        return LabelFields(labels=("ham", "spam"))

    def settings(self, task: TaskConfig) -> Facts:
        return {}
