"""Measuring a step on nodes of the cluster: a Ray Job with the worker group of a run.

The job opens a worker group as a run does (process group over NCCL on GPUs, gloo on CPUs), measures in it,
and prints the profile as its last line, which the command line reads from the job's log.

    python -m service.workers.profiling ORDER
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from service.scheduling.ray_jobs import DashboardRayJobs, wait_until_ended
from service.scheduling.run_plan import Shape
from trainers.config import RunConfig
from trainers.data.storage import place
from trainers.profiling import Profile

_RESULT = "stillhouse-profile: "
_FAILURE = "stillhouse-profile-failed: "


class ProfileFailed(Exception):
    """The cluster could not measure; the message is one line."""


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """What a job measures; `check` trains a data-parallel run too."""

    config: RunConfig
    shape: Shape
    steps: int
    warm_up: int
    check: bool

    def encode(self) -> str:
        """Returns the order as one word of a command line."""
        return base64.urlsafe_b64encode(zlib.compress(_ORDER.dump_json(self))).decode()

    @staticmethod
    def decode(word: str) -> ProfileOrder:
        return _ORDER.validate_json(zlib.decompress(base64.urlsafe_b64decode(word)))


_ORDER = TypeAdapter(ProfileOrder)


def measure_on_cluster(jobs: DashboardRayJobs, order: ProfileOrder, *, timeout_s: float) -> Profile:
    """Submits a job that measures, and waits for its result; after `timeout_s` it is stopped.

    Raises `ProfileFailed` or `RayUnreachable`.
    """
    shape = order.shape
    cluster = jobs.cluster(time.time())
    if cluster.reachable and not shape.fits(cluster.nodes):
        each = ", ".join(f"{amount:g} {name}" for name, amount in shape.resources)
        where = "".join(f" on nodes with {name}={value}" for name, value in shape.labels)
        raise ProfileFailed(
            f"the cluster has no room for {shape.workers} workers of {each}{where}; choose other hardware "
            "or fewer workers"
        )
    submission_id = f"stillhouse-profile-{uuid.uuid4().hex[:12]}"
    command = shlex.join([sys.executable, "-m", "service.workers.profiling", order.encode()])
    jobs.submit(submission_id, command, metadata={"job_name": "profile"})
    try:
        job = wait_until_ended(jobs, submission_id, timeout_s)
    except TimeoutError:
        raise ProfileFailed(
            f"no measurement within {timeout_s:g} s; its workers may be busy with other runs: raise --timeout"
        ) from None
    finally:
        jobs.stop(submission_id)  # does nothing to a job that has ended
    return profile_in(jobs.logs(submission_id), "" if job is None else job.message)


def profile_in(log: str, message: str) -> Profile:
    for line in reversed(log.splitlines()):
        if line.startswith(_RESULT):
            return TypeAdapter(Profile).validate_json(line.removeprefix(_RESULT))
        if line.startswith(_FAILURE):
            raise ProfileFailed(line.removeprefix(_FAILURE))
    raise ProfileFailed(f"the job ended without a profile{': ' + message if message else ''}")


def main(word: str) -> None:
    import ray

    order = ProfileOrder.decode(word)
    address = os.environ.get("RAY_ADDRESS")
    ray.init(logging_level="warning", runtime_env={"env_vars": {"RAY_ADDRESS": address}} if address else None)
    try:
        document = measure(order)
    except Exception as error:
        from service.workers.worker_attempt import failure_of

        failures = dict(getattr(error, "worker_failures", None) or {0: error})
        print(_FAILURE + failure_of(failures[min(failures)])[1], flush=True)  # noqa: T201
        raise SystemExit(1) from error
    print(_RESULT + json.dumps(document), flush=True)  # noqa: T201


def measure(order: ProfileOrder) -> dict[str, Any]:
    from service.workers.worker_group import fit

    folder = place(order.config.workspace.checkpoints)
    if not isinstance(folder, Path):  # What Train writes needs a folder.
        folder = Path(order.config.workspace.cache)
    folder.mkdir(parents=True, exist_ok=True)
    shared = Path(tempfile.mkdtemp(prefix="profile-", dir=folder))
    try:
        config = {"order": order.encode(), "shared": str(shared)}
        result = fit(_measure_in_group, config, order.shape, shared.name, shared / "ray")
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    return dict(result.return_value)  # rank 0's


def _measure_in_group(config: Mapping[str, Any]) -> dict[str, Any]:
    from ray.train._internal.utils import get_address_and_port
    from ray.train.collective import broadcast_from_rank_zero

    from service.workers.process_group import process_group, take_own_device
    from trainers.entrypoint import make_ready, profile_in_group

    take_own_device()
    order = ProfileOrder.decode(config["order"])
    make_ready(order.shape.device)
    address, port = broadcast_from_rank_zero(get_address_and_port())
    with process_group(address, port, device=order.shape.device):
        profile = profile_in_group(
            order.config,
            shared=Path(config["shared"]) / "run",
            steps=order.steps,
            warm_up=order.warm_up,
            check=order.check,
        )
    return asdict(profile)


if __name__ == "__main__":
    main(sys.argv[1])
