from __future__ import annotations

from service.search.halving import Halving
from service.search.protocol import Judge, Samples
from service.search.registry import SearchInfo
from service.search.section import Search
from trainers.metrics import Better


class Asha(Search):
    """Runs that are judged at rungs; the worse ones end there."""

    @property
    def least_share(self) -> float:
        return self.first_rung

    def judge(self, better: Better) -> Judge:
        return Halving(self.first_rung, self.reduction, better)


ASHA = SearchInfo(
    name="asha",
    summary="either, the worse ones ended at rungs",
    section=Asha,
    samples=Samples.optional,
    ends_runs_early=True,
)
