"""Pools: Ray clusters with schedulers of their own, by name. Pure.

A pool exists once a scheduler was started for it; nothing else declares it. `default` always exists.
"""

from __future__ import annotations

from collections.abc import Collection

from service.config.document import Problem, SpecError
from service.domain.access import DEFAULT_POOL


def order_of_pool(pool: str) -> tuple[bool, str]:
    """Sorts pools for people: `default` first, the others by name."""
    return pool != DEFAULT_POOL, pool


def start_command(pool: str) -> str:
    if pool == DEFAULT_POOL:
        return "stillhouse scheduler"
    return f"stillhouse scheduler --pool {pool} --ray-address URL"


def no_scheduler(pool: str, serving: Collection[str]) -> str | None:
    """Returns that no living scheduler serves a pool, and how to start one; None = one does."""
    if pool in serving:
        return None
    named = f" of pool '{pool}'" if serving or pool != DEFAULT_POOL else ""
    return f"no scheduler{named} is running; start one with: {start_command(pool)}"


def require_pool(pool: str, known: Collection[str]) -> None:
    """Refuses a pool that no scheduler was ever started for.

    Raises:
        SpecError: with the known pools, and how to start another.
    """
    if pool == DEFAULT_POOL or pool in known:
        return
    names = ", ".join(sorted({DEFAULT_POOL, *known}, key=order_of_pool))
    problem = f"there is no pool '{pool}', but {names}; for a new one, run: {start_command(pool)}"
    raise SpecError([Problem("invalid-value", "pool", problem)])
