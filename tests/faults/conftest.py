"""How much of each fault a session tries; CI tries a little."""

from __future__ import annotations

import pytest


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """Processes to kill on each database."""
    return int(request.config.getoption("--kills"))


@pytest.fixture
def histories(request: pytest.FixtureRequest) -> int:
    """Random concurrent histories on each database."""
    return int(request.config.getoption("--histories"))
