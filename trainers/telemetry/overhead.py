"""What an attempt spends that its configuration did not cause, kept apart from the run's figures."""

from __future__ import annotations

import time

from trainers.reporting import Measurement, Provenance, Sink
from trainers.telemetry.instruments import Instruments
from trainers.telemetry.timeline import OVERHEAD, Phase

OVERHEAD_TIME = "overhead_time_s"
"""Measurement of one stretch, with its phase as scope; in a summary, the sum over all."""
OVERHEAD_SCOPE = "overhead"
"""Scope of `window_energy_kwh` that covers overhead; no other window does."""


class OverheadMeter:
    """A timeline's `Boundary`: cuts the instruments' windows, and reports each stretch as it ends.

    A stretch is reported at once because an attempt that is killed later has been paid for it too.
    """

    def __init__(self, instruments: Instruments, sink: Sink) -> None:
        self._instruments, self._sink = instruments, sink
        self._epoch_s = time.time() - time.perf_counter()

    def __call__(self, ended: Phase, began_s: float, ended_s: float) -> None:
        self._instruments.cut(overhead=ended in OVERHEAD, at_s=ended_s)
        if ended in OVERHEAD:
            self._sink.measurement(
                Measurement(
                    OVERHEAD_TIME,
                    ended_s - began_s,
                    "s",
                    Provenance.counter,
                    ended.value,
                    self._epoch_s + began_s,
                    self._epoch_s + ended_s,
                )
            )
