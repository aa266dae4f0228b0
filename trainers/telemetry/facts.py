"""The facts needed to repeat a run."""

import contextlib
import os
import platform
import subprocess
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from trainers.checkpoints.manifest import PATCH
from trainers.data.storage import Place, put
from trainers.device_kinds import kind_of

_PACKAGES = ("stillhouse", "torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy")
_GIT_LIMIT_S = 5.0
_MOST_BYTES, _MOST_NAMES = 256 << 10, 100  # Of a patch that is kept, and of untracked files
_CODE = Path(__file__).resolve().parent


def environment_facts(device: torch.device) -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        **_revision(_CODE),
        **kind_of(device).backend.facts(device),
    }


@cache  # What this process has loaded stays as it is, and reading it takes 0.1 s.
def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def _revision(folder: Path) -> dict[str, object]:
    commit, status = (
        _git(folder, *arguments).decode(errors="replace").strip()
        for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    return {"git_commit": commit, "git_dirty": bool(status)} if commit else {}


def write_patch(folder: Place, code: Path = _CODE) -> None:
    """Writes how code differs from its commit next to an attempt's checkpoints; nothing where it does not."""
    if patch := _patch(code):
        put(folder / PATCH, patch)


@cache  # A process keeps the code that it has imported, whatever becomes of the files.
def _patch(code: Path) -> bytes:
    patch = _git(code, "diff", "HEAD", "--no-color", "--no-ext-diff", ":/")
    names = _git(code, "ls-files", "--others", "--exclude-standard", "--full-name", ":/").splitlines()
    lines = [b"# untracked: " + name for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        lines.append(b"# untracked: and %d others" % (len(names) - _MOST_NAMES))
    if len(patch) > _MOST_BYTES:
        lines.append(b"# cut off after %d KiB" % (_MOST_BYTES >> 10))
        patch = patch[: patch.rindex(b"\n", 0, _MOST_BYTES) + 1]
    return b"".join(line + b"\n" for line in lines) + patch


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(folder), *arguments]
    with tempfile.TemporaryFile() as answer:
        try:
            subprocess.run(
                command, stdout=answer, stderr=subprocess.DEVNULL, timeout=_GIT_LIMIT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return b""
        answer.seek(0)
        return answer.read(_MOST_BYTES + 1)
