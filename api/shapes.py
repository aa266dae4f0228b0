"""What goes over the wire and is not of the domain: a request's body, and the state of this process.

All other answers are the domain's own dataclasses (`service.domain.serialization.Serializable`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from service.domain.serialization import Serializable


class Priority(BaseModel):
    """A new place among others."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"priority": 80}})

    priority: int = Field(ge=0, le=100, strict=True, description="0 to 100; higher runs first.")


@dataclass(frozen=True, slots=True)
class Health(Serializable):
    """Whether this process answers."""

    status: str
    """Always `ok`."""


@dataclass(frozen=True, slots=True)
class Readiness(Serializable):
    """Whether this process can do its work."""

    ready: bool
    """Whether requests can be answered now."""
    database: str
    """`ok`, or what is wrong."""
    schedulers_alive: int
    """Schedulers with a recent heartbeat; 0 does not make the API unready."""
