"""What projects have used in a calendar month, for their budgets. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from service.domain.serialization import Serializable


@dataclass(frozen=True, slots=True)
class Month:
    """A calendar month in UTC, such as `2026-11`; `end_s` belongs to the next month."""

    name: str
    start_s: float
    end_s: float


def month_of(now_s: float) -> Month:
    now = datetime.fromtimestamp(now_s, UTC)
    start = datetime(now.year, now.month, 1, tzinfo=UTC)
    end = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return Month(f"{start:%Y-%m}", start.timestamp(), end.timestamp())


def month_named(name: str) -> Month:
    """Raises `ValueError` where the name is not a month's."""
    try:
        return month_of(datetime.fromisoformat(f"{name}-01T00:00:00+00:00").timestamp())
    except ValueError:
        raise ValueError(f"{name!r} is not a month such as 2026-11") from None


@dataclass(frozen=True, slots=True)
class Spending(Serializable):
    """What devices took while they were held, lost work included."""

    usd: float = 0.0
    """Their price."""
    kwh: float = 0.0
    """Energy at their rated power."""
    device_hours: float = 0.0
    """Device time, in hours."""
