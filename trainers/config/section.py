"""What all sections of a spec have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trainers.availability import AVAILABLE

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]


class Section(BaseModel):
    """A closed, frozen group of fields: unknown keys and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def require_available(kind: str, value: str) -> str:
    """Refuse a word of the vocabulary that this version cannot run yet.

    Raises:
        ValueError: naming the value and the choices that do run.
    """
    if value not in AVAILABLE[kind]:
        raise ValueError(
            f"'{value}' is not available in this version; choose one of: " + ", ".join(AVAILABLE[kind])
        )
    return value
