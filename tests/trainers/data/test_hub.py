"""Datasets of the hub, read by `datasets` from a server that speaks the hub's protocol."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    command = [sys.executable, "-m", "tests.trainers.data.hub_reader", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def numbers_of(found: Any, part: str = "train") -> list[int]:
    return [int(text.split()[1]) for text in found["texts"][part]]


def test_an_id_may_name_a_configuration(found: Any) -> None:
    assert list(found["small"]["texts"]) == ["train", "test"]
    assert numbers_of(found["small"]) == list(range(50))
    assert numbers_of(found["small"], "test") == list(range(900, 910))
    assert numbers_of(found["large"]) == list(range(80))


def test_splits_are_parts_as_the_spec_says(found: Any) -> None:
    assert numbers_of(found["swapped"]) == list(range(900, 910))
    assert numbers_of(found["swapped"], "test") == list(range(50))
    assert found["lost"]["error"].endswith(
        "has no 'training', which task.parts names (found: train, test); name one of these"
    )


def test_a_dataset_that_is_not_there_is_said(found: Any) -> None:
    assert found["first"]["error"].startswith("hub dataset 'team/texts' cannot be loaded (")
    assert found["first"]["error"].endswith("check the id and the network, or give a local path")


def test_another_commit_is_other_data(found: Any) -> None:
    before, after = found["small"]["identity"], found["changed"]["identity"]
    assert numbers_of(found["changed"]) == [*range(30), *range(50, 70)]
    assert before["train.size_bytes"] == after["train.size_bytes"]
    assert before["train.sha256"] != after["train.sha256"]


def test_what_was_loaded_once_is_read_offline(found: Any) -> None:
    assert found["offline"] == found["changed"]


def test_a_streamed_corpus_continues_from_the_commit_that_it_began_with(found: Any, folder: Path) -> None:
    assert found["cut"]
    whole, cut = (
        {path.name: path.read_bytes() for path in (folder / name).glob("[a-z]*")} for name in ("whole", "cut")
    )
    assert len(whole) == 3
    assert cut == whole
    manifest = json.loads(whole["manifest.json"])
    assert len(manifest["sources"][0]["revision"]) == 40
    assert manifest["sources"][0]["kept"] == 50
