"""What `benchmarks.fairness` counts."""

import pytest

from benchmarks.fairness import DAY_S, DEVICES, LOW, NORMAL, Fifo, Submission, within_share
from service.domain.metrics import Span

PART_H = DEVICES["h100"] * 24 / 8 / 4
"""Hours of H100 per day of each of four users, in a project with an eighth of all weight."""


def submission(
    id: int, hours: float, *, user: str = "speech-0", hardware: str = "h100", priority: int = NORMAL
) -> Submission:
    work_s = 3600.0 * hours
    forecast = Span(work_s, work_s, work_s)
    return Submission(id, "speech", user, 0.0, hardware, 1, (work_s,), forecast, 600.0, 60.0, priority)


@pytest.mark.parametrize("priority", [LOW, NORMAL])
def test_what_waits_counts_as_asked_for_at_every_priority(priority: int) -> None:
    few = submission(100, PART_H / 2, priority=LOW)
    of_others = [submission(101, PART_H, user="speech-1"), submission(102, PART_H, hardware="v100")]
    much = submission(103, PART_H, priority=priority)
    before = [submission(n, DAY_S / 3600.0, user="speech-1") for n in range(DEVICES["h100"])]
    for behind, is_within in [([], True), (of_others, True), ([much], False)]:
        cluster = Fifo({("", ""): [*before, few, *behind]}, frozenset(), 1.0)
        cluster.run()
        assert cluster.experiments[few.id].first_start_s is None
        assert within_share(few, cluster, 1.0) is is_within
