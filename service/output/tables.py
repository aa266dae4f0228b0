from __future__ import annotations

from enum import StrEnum


class TableFormat(StrEnum):
    """File format of an exported table of runs."""

    csv = "csv"
    """Comma-separated, a header line, UTF-8; cells that a spreadsheet would run begin with '."""
    parquet = "parquet"
    """Apache Parquet, typed columns, zstd."""
    jsonl = "jsonl"
    """One JSON object per line."""
