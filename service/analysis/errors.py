"""The error of a question that the rows cannot answer."""

from __future__ import annotations


class AnalysisError(ValueError):
    """The rows cannot answer the question; the message names what is missing or wrong."""
