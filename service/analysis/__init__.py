"""From rows to decisions: scores, frontiers and tested claims about configurations.

Pure: arrays and records in, frozen results out. `score` ranks by weights, `frontier` keeps what
nothing dominates, `claims` says whether a difference is real and how sure that is. Whatever
cannot be answered raises `AnalysisError` in one line that names what is missing.
"""

from service.analysis.errors import AnalysisError

__all__ = ["AnalysisError"]
