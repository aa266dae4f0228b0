"""The tests that are carried to a GPU, on a machine that has torch and pytest and nothing else of ours."""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path

import pytest

from benchmarks.gpu_suite import ROOT
from benchmarks.gpu_suite import test_commands as commands_of_tests

OURS = ("pydantic", "pydantic_core", "orjson", "transformers", "tokenizers", "safetensors", "pyarrow")
WITHOUT = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec

@classmethod
def without(_, name, path=None, target=None):
    return None if name.split(".")[0] in {OURS!r} else find(name, path, target)

PathFinder.find_spec = without
"""


@pytest.mark.slow
def test_adan_stands_alone_and_the_others_say_what_they_lack(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    [command] = commands_of_tests(["tests/gpu"])
    done = subprocess.run(
        [*command, "--collect-only", "-rs"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_adan_cuda.py::" in done.stdout
    assert "the trainers need pydantic, orjson, tokenizers" in done.stdout
    assert "test_steps_cuda.py::" not in done.stdout


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (
            "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set one",
            UserWarning,
        ),
        ("Synchronization debug mode is a prototype feature and does not yet detect all", UserWarning),
        (
            "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
            UserWarning,
        ),
        ("The pynvml package is deprecated. Please install nvidia-ml-py instead.", FutureWarning),
    ],
)
def test_what_only_a_gpu_warns_of_is_no_error(words: str, kind: type[Warning]) -> None:
    warnings.warn(words, kind, stacklevel=1)
    with pytest.raises(UserWarning, match="anything else"):
        warnings.warn("anything else", UserWarning, stacklevel=1)
