"""The forms in which a table of runs is exported."""

from __future__ import annotations

from enum import StrEnum


class TableFormat(StrEnum):
    """How a table is written."""

    csv = "csv"
    """Comma-separated, a header line, UTF-8; cells that a spreadsheet would run begin with '."""
    parquet = "parquet"
    """Apache Parquet, typed columns, zstd."""
    jsonl = "jsonl"
    """One JSON object per line."""
