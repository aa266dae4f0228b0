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
