"""The changes to the code that ran, kept next to an attempt's checkpoints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainers.checkpoints.manifest import PATCH
from trainers.telemetry import facts
from trainers.telemetry.facts import write_patch


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one committed file, whose code is in a folder below."""
    root = tmp_path / "checkout"
    (root / "code").mkdir(parents=True)
    git(root, "init", "-q")
    (root / "train.py").write_text("rate = 1\nsteps = 2\n")
    git(root, "add", "train.py")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_a_patch_turns_the_commit_into_the_code_that_ran(checkout, tmp_path):
    (checkout / "train.py").write_text("rate = 3\nsteps = 2\n")
    (checkout / "notes.txt").write_text("not kept")
    write_patch(tmp_path / "run", checkout / "code")
    patch = tmp_path / "run" / PATCH
    lines = patch.read_text().splitlines()
    assert lines[0] == "# untracked: notes.txt"
    assert {"-rate = 1", "+rate = 3"} <= set(lines) and "not kept" not in patch.read_text()
    git(checkout, "checkout", "-q", "train.py")
    git(checkout, "apply", str(patch))
    assert (checkout / "train.py").read_text() == "rate = 3\nsteps = 2\n"


def test_code_as_committed_or_without_git_leaves_nothing(checkout, tmp_path):
    write_patch(tmp_path / "run", checkout)
    write_patch(tmp_path / "run", tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()


def test_a_large_patch_is_cut_off_at_a_line(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "_MOST_BYTES", 4096)
    monkeypatch.setattr(facts, "_MOST_NAMES", 2)
    (checkout / "train.py").write_text("".join(f"line {n}\n" for n in range(5000)))
    for name in "abc":
        (checkout / name).touch()
    write_patch(tmp_path / "run", checkout)
    content = (tmp_path / "run" / PATCH).read_bytes()
    assert content.startswith(
        b"# untracked: a\n# untracked: b\n# untracked: and 1 others\n# cut off after 4 KiB\n"
    )
    assert len(content) <= 4096 + 200 and content.endswith(b"\n")
    assert content.splitlines()[-1].startswith(b"+line ")
