"""docs/operations.md lists every setting and every exit code."""

from __future__ import annotations

import re
from pathlib import Path

from service.cli.terminal import ExitCode
from service.config.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_setting_is_documented_and_no_other() -> None:
    documented = set(re.findall(r"^\| `(STILLHOUSE_[A-Z_]+)` \|", PAGE, re.MULTILINE))
    assert documented == {f"STILLHOUSE_{name.upper()}" for name in Settings.model_fields}


def test_every_exit_code_is_documented_and_no_other() -> None:
    section = PAGE.split("## Exit codes")[1].split("\n## ")[0]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}
