"""Runs on a tiny corpus, for extensions that are added from outside the packages."""

from __future__ import annotations

from tests.trainers.conftest import config_in, configure, recorder, shared

__all__ = ["config_in", "configure", "recorder", "shared"]
