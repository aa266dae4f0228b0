"""Limits of projects: contradictions, and who may use a priority."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from service.config.hardware import CATALOGUE
from service.domain.access import Role
from service.specs.fields import PRIORITIES
from service.specs.project_limits import (
    NO_LIMITS,
    ProjectLimits,
    limit_problems,
    queue_cap_problem,
    refused_priority,
)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"weight": 0}, "greater than 0"),
        ({"weight": float("nan")}, "finite"),
        ({"guaranteed": {"cpu": -1}}, "greater than or equal to 0"),
        ({"ceiling": {"cpu": -1}}, "greater than or equal to 0"),
        ({"concurrent_runs_per_user": -1}, "greater than or equal to 0"),
        ({"quota": {}}, "not permitted"),
        ({"priorities": {"member": "top"}}, "'urgent'"),
    ],
)
def test_a_field_has_its_range(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ProjectLimits.model_validate(document)


@pytest.mark.parametrize(
    ("document", "path", "words"),
    [
        ({"guaranteed": {"cpus": 2}}, "guaranteed.cpus", "did you mean 'cpu'?"),
        ({"guaranteed": {"cpu": 4}, "ceiling": {"cpu": 3}}, "ceiling.cpu", "below the 4 guaranteed"),
        ({"ceiling": {"cpu": 2}}, "ceiling.cpu", "below the 3 in use; pause experiments"),
    ],
)
def test_a_contradiction_is_one_line(document: dict[str, Any], path: str, words: str) -> None:
    (problem,) = limit_problems(ProjectLimits.model_validate(document), CATALOGUE, {"cpu": 3.0})
    assert problem.path == path
    assert words in problem.message and "\n" not in problem.message


def test_a_priority_above_the_roles_is_refused_with_who_may_use_it() -> None:
    limits = ProjectLimits(priorities={Role.member: "normal"})
    reason = refused_priority(limits, "nlp", Role.member, PRIORITIES["high"])
    assert reason is not None
    assert "high is above normal" in reason and "maintainer may use it" in reason
    assert refused_priority(limits, "nlp", Role.member, PRIORITIES["normal"]) is None
    assert refused_priority(limits, "nlp", Role.maintainer, PRIORITIES["urgent"]) is None
    assert refused_priority(NO_LIMITS, "nlp", Role.member, PRIORITIES["urgent"]) is None


def test_a_queue_cap_counts_what_waits_and_what_comes() -> None:
    assert queue_cap_problem("nlp", "ada", 3, 2, 5) is None
    problem = queue_cap_problem("nlp", "ada", 3, 3, 5)
    assert problem is not None and "3 are queued, 3 would be added" in problem.message
