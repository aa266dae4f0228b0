"""The host of drivers: a Ray job that imports everything once, and forks the driver of each experiment.

    python -m service.driving.host --name stillhouse-drivers-1f2e --settings TOKEN

An experiment is the host's whose row names its job; the host starts its driver, and ends the attempt of one
that dies. The process that forks has neither threads nor connections: each driver makes its own, and is a job
of its own to Ray. Drivers do not outlive their host.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path

from service.config import logs
from service.config.settings import Settings
from service.domain.records import Experiment
from service.recording.outages import wait_out
from service.scheduling import driver_settings
from service.scheduling.scheduler import end_lost_attempt
from service.store import Store, StoreOutage

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # How often the host looks for experiments
LEAVE_S = 15.0  # How long a driver may take to end when its attempt has
IDLE_S = 300.0  # How long a host without experiments waits for another
_FORKS_DIED = 255  # multiprocessing's exit code of all processes when the one that forks them has died
_RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


class DriverHost:
    """The drivers of one host; `start` forks one."""

    def __init__(self, store: Store, name: str, start: Callable[[Experiment], BaseProcess]) -> None:
        self._store, self._name, self._start = store, name, start
        self._processes: dict[tuple[int, int], BaseProcess] = {}
        self._over_s: dict[tuple[int, int], float] = {}  # Since when attempts have been seen to be over
        self._busy_s = time.monotonic()

    def run(self) -> None:
        """Returns when there has been nothing to do for a while."""
        while time.monotonic() - self._busy_s < IDLE_S:
            try:
                self.run_once()
            except (StoreOutage, OSError) as error:  # Drivers that run continue meanwhile.
                logger.warning("trying again: %s", error)
            time.sleep(LOOK_S)

    def run_once(self) -> None:
        # Before the experiments are read, so that what a driver wrote at its end is known.
        codes = {key: process.exitcode for key, process in self._processes.items()}
        if _FORKS_DIED in codes.values():
            logger.error("the process that forks drivers has died, and its drivers end with this host")
            os._exit(1)
        own = {(each.id, each.attempt): each for each in self._store.drivers.carried_by(self._name)}
        self._store.database.rest()  # Seldom used: no connection is held for it.
        now = time.monotonic()
        for key, code in codes.items():
            if code is not None:
                if key in own:
                    why = f"the driver ended without a result (exit code {code})"
                    end_lost_attempt(self._store, own.pop(key), why)
                del self._processes[key]
                self._over_s.pop(key, None)
            elif key not in own and now - self._over_s.setdefault(key, now) > LEAVE_S:
                logger.warning("the driver of experiment %d, attempt %d, does not end; killing it", *key)
                self._processes[key].kill()
        for key in own.keys() - self._processes.keys():
            if own[key].lease_until_s is not None:  # Else no scheduler counts on it any more.
                self._processes[key] = self._start(own[key])
        if self._processes:
            self._busy_s = now


def fork(settings: Settings, experiment: Experiment) -> BaseProcess:
    """Starts the driver of an experiment, with a log of its own next to the host's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["service.driving.preloaded"])
    output = Path("/proc/self/fd/1").resolve()
    name = f"job-driver-stillhouse-{experiment.id}-{experiment.attempt}.log"
    log = output.with_name(name) if output.is_file() else None
    options = ["--experiment", str(experiment.id), "--attempt", str(experiment.attempt)]
    options += ["--name", experiment.name]
    process = context.Process(target=drive, args=(options, settings, log), daemon=True)
    process.start()
    logger.info("experiment %d, attempt %d: process %d", experiment.id, experiment.attempt, process.pid)
    return process


def drive(options: list[str], settings: Settings, log: Path | None) -> None:
    """What a forked process runs."""
    threading.Thread(target=_end_with_host, name="host", daemon=True).start()
    if log is not None:
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    os.environ.pop(_RAY_JOB_CONFIG, None)  # The host's: this is another job.
    import ray

    from service.driving import driver

    ray._raylet.setproctitle(shlex.join(["python", "-m", driver.__name__, *options]))
    try:
        sys.exit(driver.main(options, settings))
    finally:
        ray.shutdown()  # As at the end of other processes.


def _end_with_host() -> None:
    host = multiprocessing.parent_process()
    assert host is not None
    host.join()
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m service.driving.host", description=__doc__)
    parser.add_argument("--name", required=True, help="of the Ray job")
    parser.add_argument("--settings", metavar="TOKEN", required=True, help="to take them by")
    options = parser.parse_args()
    settings = driver_settings.take(options.settings)
    logs.set_up("host", settings.log_format)
    os.environ["MALLOC_ARENA_MAX"] = "1"  # Else each of a driver's threads gets memory of its own to grow in.
    with closing(wait_out(lambda: Store.open(settings, pool_size=1), "the host")) as store:
        DriverHost(store, options.name, lambda experiment: fork(settings, experiment)).run()


if __name__ == "__main__":
    main()
