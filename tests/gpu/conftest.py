"""On a machine with torch and pytest alone, what the trainers need is missing: their tests skip by name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

STANDS_ALONE = "test_adan_cuda.py"
TRAINERS_NEED = ("pydantic", "orjson", "tokenizers", "transformers", "safetensors", "pyarrow")


class _Skipped(pytest.Module):
    """A module that is not imported, because packages are missing."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        missing = [name for name in TRAINERS_NEED if find_spec(name) is None]
        pytest.skip(f"the trainers need {', '.join(missing)}", allow_module_level=True)
        yield from ()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Stands in for the modules that import the trainers where that would fail."""
    if module_path.name == STANDS_ALONE or all(find_spec(name) for name in TRAINERS_NEED):
        return None
    return _Skipped.from_parent(parent, path=module_path)
