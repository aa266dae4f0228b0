"""From rows to decisions: scores, frontiers and tested claims about configurations.

Pure: arrays and records in, frozen results out. `run_table` is what an answer rests on, `question` is
where people's questions arrive, from REST, the command line and the report alike. `score` ranks by
weights, `frontier` keeps what nothing dominates, `claims` says whether a difference is real and how
sure that is, `effects` what each axis does, `recommend` which configuration to use. Whatever cannot
be answered raises `AnalysisError` in one line that names what is missing.
"""

from service.analysis.errors import AnalysisError

__all__ = ["AnalysisError"]
