from __future__ import annotations

from service.search.protocol import Samples
from service.search.registry import SearchInfo
from service.search.section import Search

GRID = SearchInfo(name="grid", summary="every combination", section=Search, samples=Samples.unused)
RANDOM = SearchInfo(name="random", summary="`samples` of them", section=Search, samples=Samples.required)
