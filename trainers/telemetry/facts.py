"""The facts needed to repeat a run."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from trainers.device_kinds import kind_of

_PACKAGES = ("stillhouse", "torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy")
_GIT_LIMIT_S = 5.0


def environment_facts(device: torch.device) -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        **_revision(Path(__file__).resolve().parent),
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
    try:
        commit, status = (
            subprocess.run(
                ["git", "-C", str(folder), *arguments],
                capture_output=True,
                text=True,
                timeout=_GIT_LIMIT_S,
                check=True,
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git_commit": commit, "git_dirty": bool(status)}
