"""What importing a package must not load: `import api.app` and the client stay light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

LARGE = {"torch", "ray", "transformers"}
ABSENT = {
    "import trainers.entrypoint": {*LARGE, "numpy"},
    "import trainers.config, trainers.metrics": LARGE,
    "import service.specs.experiment": {*LARGE, "sqlalchemy"},
    "import service.cli.app, service.cli.progress, service.cli.answer_tables, service.scheduling.admission": {
        *LARGE, "sqlalchemy", "fastapi"
    },
    "import service.cli": LARGE,
    "import api.server": {*LARGE, "authlib", "jinja2", "joserfc"},
    "import api.server, service.client": {*LARGE, "pyarrow"},
    "import api.app": LARGE,
    "from trainers.tasks import TASKS, base\nfor name in TASKS: base.build(name)": LARGE,
    "import service.workers.process_group, ray.train.v2.api.data_parallel_trainer": {"torch"},
}  # fmt: skip
"""What is not loaded after a statement. One process executes them all, in this order."""
PROGRAM = """
import json, os, sys
found = []
for statement, absent in json.loads(sys.argv[1]):
    exec(statement)
    loaded = sorted(set(absent) & set(sys.modules))
    found.append({"loaded": loaded, "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG")})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What was there after each statement."""
    statements = json.dumps([(statement, sorted(absent)) for statement, absent in ABSENT.items()])
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, statements],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(ABSENT, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("statement", ABSENT)
def test_import_leaves_out(found: dict[str, dict[str, Any]], statement: str) -> None:
    assert found[statement]["loaded"] == []


def test_cublas_is_deterministic_before_torch_can_have_asked(found: dict[str, dict[str, Any]]) -> None:
    assert found["import trainers.entrypoint"]["cublas"] == ":4096:8"
