"""Whatever a client sends, the answer is one that the OpenAPI document declares, and never a 5xx."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.fuzz import fuzz


@pytest.mark.slow
def test_every_answer_is_as_declared(tmp_path: Path) -> None:
    found = fuzz(tmp_path, examples=3)
    assert found["clean"], found["output"]
    assert found["operations"]["tested"] > 40
    assert set(found["phases"].values()) == {"success"}
