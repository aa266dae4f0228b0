"""Upkeep of the service's database: deleted experiments are removed, old points downsampled."""

from __future__ import annotations

import logging
import threading

from service.config.settings import Settings
from service.store import Store
from service.store.base import until_stopped

logger = logging.getLogger(__name__)

EVERY_S, PRUNE_EVERY_S = 5.0, 3600.0  # Between looks for what was deleted, and for points that became old
PAUSE_S = 0.01  # Time between two transactions, in which others write
_DAY_S = 86_400.0


class Upkeep:
    """Several processes may run it at the same time, and one may die at any moment.

    What is left to do is read from the database.
    """

    def __init__(self, store: Store, settings: Settings, *, pause_s: float = PAUSE_S) -> None:
        self._store = store
        self._settings = settings
        self._pause_s = pause_s
        self._pruned_s = float("-inf")

    def run(self, stop: threading.Event) -> None:
        until_stopped(lambda: self.run_once(stop), EVERY_S, "removals of rows and files", stop)

    def run_once(self, stop: threading.Event) -> None:
        for experiment_id in self._store.removal.deleted_experiments():
            try:
                for _ in self._store.removal.removing(experiment_id):
                    if stop.wait(self._pause_s):
                        return
            except OSError as error:
                logger.warning("experiment %d stays until its files can be removed: %s", experiment_id, error)
            else:
                logger.info("experiment %d is removed", experiment_id)
        now_s, days = self._store.clock(), self._settings.prune_after_days
        if days is None or 0.0 <= now_s - self._pruned_s < PRUNE_EVERY_S:
            return
        self.prune(days * _DAY_S, self._settings.prune_keep_every, stop)
        if not stop.is_set():
            self._pruned_s = now_s

    def prune(self, older_than_s: float, keep_every: int, stop: threading.Event) -> tuple[int, int]:
        """Downsamples experiments that ended longer ago than this; returns how many, and points removed.

        Points of multiples of `keep_every` steps are kept, and those that samples show. `stop` interrupts it;
        the next call continues.
        """
        experiments = points = 0
        for experiment_id, ended_s in self._store.removal.experiments_to_prune(
            ended_before_s=self._store.clock() - older_than_s, keep_every=keep_every
        ):
            for gone in self._store.removal.pruning(experiment_id, ended_s, keep_every):
                points += gone
                if stop.wait(self._pause_s):
                    return experiments, points
            experiments += 1
        if experiments:
            logger.info("%d points of %d old experiments are removed", points, experiments)
        return experiments, points
