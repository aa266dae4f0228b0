"""Codes that people read from one screen and type on another."""

from __future__ import annotations

import secrets

_ALPHABET = "BCDFGHJKLMNPQRSTVWXZ"
"""No vowels, so no words; no digits, so nothing that looks like another character."""
_LENGTH = 8
USER_CODE_PATTERN = f"^[{_ALPHABET}]{{4}}-[{_ALPHABET}]{{4}}$"


def new_user_code() -> str:
    """Returns a code of 34 random bits, `WDJB-MJHT` for instance."""
    letters = "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))
    return f"{letters[:4]}-{letters[4:]}"


def normalised(text: str) -> str:
    """Returns a code as it is stored, however it was typed; another text when it is none."""
    letters = "".join(text.upper().split()).replace("-", "")
    return f"{letters[:4]}-{letters[4:]}"
