"""Profiles of Hypothesis, and how many examples a test draws under each: `make test-all` draws them all."""

from __future__ import annotations

import hypothesis

for _name, _examples in {"quick": 10, "project": 25, "many": 100}.items():
    hypothesis.settings.register_profile(_name, deadline=None, max_examples=_examples)  # Machines are busy.
hypothesis.settings.load_profile("project")


def scaled(examples: int) -> int:
    """Returns how many of so many examples to draw: all with the profile `many`, a quarter by default."""
    return max(5, examples * hypothesis.settings().max_examples // 100)
