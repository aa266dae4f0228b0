"""What importing a package must not load: `import api.app` and the client stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("service.specs.experiment", {"torch", "ray", "sqlalchemy", "transformers"}),
        ("trainers.config", {"torch", "ray", "transformers"}),
        ("trainers.metrics", {"torch", "ray", "transformers"}),
        ("trainers.entrypoint", {"torch", "ray", "transformers"}),
        ("api.app", {"torch", "ray", "transformers"}),
        ("service.cli", {"torch", "ray", "transformers"}),
    ],
)
def test_import_leaves_out(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*(name for name in {sorted(absent)!r} if name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_the_rows_of_every_task_are_read_without_torch() -> None:
    code = (
        "import sys; from trainers.tasks import TASKS, base\n"
        "for name in TASKS: base.build(name)\n"
        "print(*(name for name in ('torch', 'transformers', 'ray') if name in sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
