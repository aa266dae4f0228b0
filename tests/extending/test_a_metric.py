"""A metric with a column is declared by the trainers and a field of `Run`: the rest follows from these."""

from __future__ import annotations

import pytest

from service.db import schema
from service.domain.metrics import METRICS
from service.domain.records import SUMMARY_FIELDS
from trainers.metrics import DECLARED


@pytest.mark.parametrize("name", SUMMARY_FIELDS)
def test_a_field_of_the_summary_is_a_column_of_runs(name: str) -> None:
    assert name in schema.runs.c


@pytest.mark.parametrize("name", SUMMARY_FIELDS)
def test_runs_are_compared_by_what_is_declared_with_a_direction(name: str) -> None:
    compared = {metric.name: metric.better for metric in METRICS}
    declared = DECLARED.get(name)
    assert compared.get(name) == (declared.better if declared is not None else None)
