"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest

from cuda_ext import IMPLEMENTATIONS, native


@pytest.fixture(scope="session")
def kernels() -> None:
    """The CPU kernels, compiled once; tests that need them are skipped where no compiler is."""
    if reason := native.why_unavailable("cpu"):
        pytest.skip(f"no CPU kernels here: {reason}")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, kernels: None) -> str:
    """Each of the four implementations."""
    return str(request.param)


@pytest.fixture(params=["single_fused", "multi_fused"])
def fused(request: pytest.FixtureRequest, kernels: None) -> str:
    """Each of the fused implementations."""
    return str(request.param)


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set that the CPU kernels are compiled for and this processor has."""
    monkeypatch.setenv("STILLHOUSE_CPU_CAPABILITY", request.param)
    if native.cpu_capability() != request.param:
        pytest.skip(f"this processor has no {request.param}")
    return str(request.param)
