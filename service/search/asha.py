"""`search.name: asha`: asynchronous successive halving over a grid or a random sample."""

from __future__ import annotations

from service.search.halving import Halving
from service.search.protocol import Judge, Samples
from service.search.registry import SearchInfo
from service.search.section import Search
from trainers.figures import Better


class Asha(Search):
    """Runs that are judged at rungs; the worse ones end there."""

    @property
    def least_share(self) -> float:
        """Every run reaches the first rung."""
        return self.first_rung

    def judge(self, better: Better) -> Judge:
        """Judges by `metric` at rungs."""
        return Halving(self.first_rung, self.reduction, better)


ASHA = SearchInfo(
    name="asha",
    summary="either, the worse ones ended at rungs",
    section=Asha,
    samples=Samples.optional,
    ends_runs_early=True,
)
