"""From rows to decisions: scores, frontiers and tested claims about configurations.

Pure: arrays and records in, frozen results out. `question` is where questions arrive, from REST, the command
line and the report alike; `run_table` is what an answer rests on. What cannot be answered raises
`AnalysisError` in one line that names what is missing.
"""

from service.analysis.answers import AnalysisError
