"""Registries and their entries."""

from __future__ import annotations

import pickle

import pytest

from trainers.registry import Deferred, by_name


def test_a_deferred_function_travels_to_other_processes_by_its_path():
    sent = pickle.loads(pickle.dumps(Deferred("math:hypot")))
    assert sent(3, 4) == 5.0


def test_two_entries_of_one_name_are_refused():
    entry = type("Entry", (), {"name": "a"})()
    with pytest.raises(ValueError, match="two entries have one name: a, a"):
        by_name(entry, entry)
