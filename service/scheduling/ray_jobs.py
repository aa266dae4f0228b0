"""Ray Jobs as the scheduler needs them.

Every method raises `RayUnreachable` when Ray does not answer, and `RayUnavailable` when it answers that it
cannot do its work at present: neither is ever a statement about a job.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from service.scheduling.cluster import ClusterNode, ClusterSnapshot

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_LOG_BYTES = 20_000
_FEW = 32  # So many jobs are asked about one by one
_MEANT = ("Terminated due to", "Expected termination")  # Of a node that was drained, idle or told to end
_GCS_PORT = 6379  # Ray's default
_GCS_TIMEOUT_S = 2.0
_GCS_AGAIN_S = 60.0  # How long the GCS is left alone after it did not answer
_REFUSALS = frozenset({400, 422})
_NO_AGENT = "No available agent"
_RELAYED = re.compile(r"Request failed with status code (\d{3})")


class RayUnreachable(Exception):
    """Ray does not answer; what it runs continues, and nothing is known about it."""


class RayUnavailable(RayUnreachable):
    """Ray answers, and cannot do what it was asked at present: ask again later."""


class JobRefused(Exception):
    """Ray answered that the job is not valid."""


class JobState(StrEnum):
    pending = "PENDING"
    running = "RUNNING"
    succeeded = "SUCCEEDED"
    failed = "FAILED"  # Its process ended with another code than 0, or Ray lost it
    stopped = "STOPPED"

    @property
    def ended(self) -> bool:
        return self in (JobState.succeeded, JobState.failed, JobState.stopped)


@dataclass(frozen=True, slots=True)
class RayJob:
    """What Ray reports about a job; `message` is one line or empty."""

    submission_id: str
    state: JobState
    message: str
    metadata: Mapping[str, str]


class DashboardRayJobs:
    """The jobs of the cluster behind a Ray dashboard (`http://host:port`).

    Authentication follows Ray's own variables (`RAY_AUTH_MODE`, `RAY_AUTH_TOKEN_PATH`).
    """

    def __init__(self, dashboard_url: str) -> None:
        self.dashboard_url = dashboard_url.rstrip("/")
        self._client: Any = None
        self._gcs: Any = None
        self._gcs_away_s = float("-inf")
        self._lost: frozenset[str] = frozenset()  # Ray's ids of nodes that have gone

    def submit(self, submission_id: str, entrypoint: str, *, metadata: Mapping[str, str]) -> None:
        """Starts a job; does nothing when that id is already known, whatever became of it.

        The dashboard shows `metadata`; `job_name` is the column "Name" of its list.

        Raises:
            RayUnreachable: it may have been started or not: submit again.
            JobRefused: Ray would refuse it again.
        """
        try:
            self._call(
                "submit_job", entrypoint=entrypoint, submission_id=submission_id, metadata=dict(metadata)
            )
        except _Answer as answer:
            if "already exists" in answer.text:
                return
            if answer.refuses:
                raise JobRefused(_last_line(answer.text)) from None
            raise answer.unavailable() from None

    def hand_over(self, content: bytes) -> str:
        """Keeps something secret for a job that is about to be submitted; returns the token to take it by."""
        token = f"{secrets.token_hex(16)}.zip"
        place = f"/api/packages/gcs/{token}"
        self._call("_do_request", "GET", place)  # From now on, Ray would remove it after ten minutes.
        answer = self._call("_do_request", "PUT", place, data=content)
        if answer.status_code != 200:
            raise _Answer(answer.status_code, answer.text).unavailable()
        return token

    def status(self, submission_id: str) -> RayJob | None:
        """Returns None if Ray knows no job of that id."""
        found = self._ask("get_job_info", submission_id)
        return None if found is None else self._as_job(found)

    def known(self, submission_ids: Sequence[str]) -> dict[str, RayJob]:
        """Returns those of the jobs that Ray knows, by id."""
        if len(submission_ids) <= _FEW:
            # Ray's list has every job since its head started, and grows with them.
            asked = {id: self.status(id) for id in submission_ids}
            return {id: job for id, job in asked.items() if job is not None}
        try:
            details = self._call("list_jobs")
        except _Answer as answer:
            raise answer.unavailable() from None
        wanted = set(submission_ids)
        return {job.submission_id: self._as_job(job) for job in details if job.submission_id in wanted}

    def stop(self, submission_id: str) -> None:
        """Asks a job to end; does nothing when it has ended or is not known."""
        self._ask("stop_job", submission_id)

    def logs(self, submission_id: str) -> str:
        """Returns the end of what the job's process has printed; empty when it is not known."""
        return str(self._ask("get_job_logs", submission_id) or "")[-_LOG_BYTES:]

    def cluster(self, at_s: float) -> ClusterSnapshot:
        """Returns what the cluster has; `reachable` is False when Ray does not answer (raises nothing)."""
        try:
            nodes = self._get("/api/v0/nodes?detail=1&limit=10000")["data"]["result"]["result"]
        except (RayUnreachable, _Answer) as error:
            logger.warning("the cluster cannot be inspected: %s", error)
            return ClusterSnapshot(at_s, False, self.dashboard_url, ())
        free, drains = self._free_and_draining(nodes)
        self._lost = frozenset(node["node_id"] for node in nodes if node["state"] == "DEAD")
        return ClusterSnapshot(
            at_s,
            True,
            self.dashboard_url,
            tuple(
                ClusterNode(
                    id=node["node_id"],
                    name=node["node_name"] or node["node_ip"],
                    alive=node["state"] == "ALIVE",
                    resources=node["resources_total"] or {},
                    available={
                        name: free[node["node_id"]].get(name, 0.0)
                        for name in (node["resources_total"] if node["node_id"] in free else ())
                    },
                    labels=node.get("labels") or {},
                    draining=node["node_id"] in drains
                    or (node.get("state_message") or "").startswith(_MEANT),
                    drain_deadline_s=drains.get(node["node_id"]),
                    message=node.get("state_message"),
                )
                for node in nodes
            ),
        )

    def _free_and_draining(
        self, nodes: Sequence[Mapping[str, Any]]
    ) -> tuple[Mapping[str, Mapping[str, float]], Mapping[str, float | None]]:
        """Returns what is free of each node, and when draining nodes go: Unix seconds, None = no deadline.

        Both are by Ray's id of the node, and empty when they are not known. The dashboard shows neither under
        both versions of Ray's autoscaler, so the head's GCS is asked; not by Ray's own client, which ends its
        process when the GCS is away.
        """
        import grpc
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import gcs_service_pb2 as messages
        from ray.core.generated.gcs_service_pb2_grpc import NodeResourceInfoGcsServiceStub

        if time.monotonic() - self._gcs_away_s < _GCS_AGAIN_S:
            return {}, {}
        head = next((node["node_ip"] for node in nodes if node["is_head_node"]), "127.0.0.1")
        address = os.environ.get("RAY_ADDRESS") or f"{head}:{_GCS_PORT}"
        try:
            if self._gcs is None:
                self._gcs = NodeResourceInfoGcsServiceStub(init_grpc_channel(address))
            free = self._gcs.GetAllAvailableResources(
                messages.GetAllAvailableResourcesRequest(), timeout=_GCS_TIMEOUT_S
            )
            draining = self._gcs.GetDrainingNodes(messages.GetDrainingNodesRequest(), timeout=_GCS_TIMEOUT_S)
        except grpc.RpcError as error:
            self._gcs, self._gcs_away_s = None, time.monotonic()
            logger.warning(
                "cannot ask Ray at %s what is free and which nodes drain (set RAY_ADDRESS): %s",
                address,
                error.code(),
            )
            return {}, {}
        drains = {
            node.node_id.hex(): at_ms / 1e3 if (at_ms := node.draining_deadline_timestamp_ms) else None
            for node in draining.draining_nodes
        }
        return {node.node_id.hex(): node.resources_available for node in free.resources_list}, drains

    def _as_job(self, found: Any) -> RayJob:
        state, message = JobState(str(found.status)), _last_line(found.message or "")
        if not state.ended and found.driver_node_id in self._lost:
            # A head that keeps its state looks after the jobs of the one before it only once it gets another.
            state, message = JobState.failed, "its node was lost"
        return RayJob(found.submission_id, state, message, found.metadata or {})

    def _ask(self, method: str, submission_id: str) -> Any:
        """Returns the answer about a job; None if Ray knows none of that id."""
        try:
            return self._call(method, submission_id)
        except _Answer as answer:
            if answer.status == 404:
                return None
            raise answer.unavailable() from None

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        import requests
        from ray.exceptions import AuthenticationError

        try:
            if self._client is None:
                self._client = _client(self.dashboard_url)
            return getattr(self._client, method)(*args, **kwargs)
        except AuthenticationError as error:
            raise RayUnreachable(
                f"Ray at {self.dashboard_url} requires a token: {_first_line(str(error))}"
            ) from None
        except (requests.RequestException, ConnectionError) as error:
            raise RayUnreachable(
                f"cannot reach Ray at {self.dashboard_url}: {type(error).__name__}"
            ) from None

    def _get(self, path: str) -> Any:
        answer = self._call("_do_request", "GET", path)
        if answer.status_code != 200:
            raise _Answer(answer.status_code, answer.text)
        return answer.json()


class _Answer(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        # The head reports every answer of the agent that starts jobs as an error of its own.
        relayed = _RELAYED.search(text)
        self.status = int(relayed[1]) if relayed else status
        self.text = text

    @property
    def refuses(self) -> bool:
        return self.status in _REFUSALS and _NO_AGENT not in self.text

    def unavailable(self) -> RayUnavailable:
        return RayUnavailable(f"Ray answered {self.status}: {_last_line(self.text)}")


def _client(url: str) -> Any:
    """Returns Ray's client with time limits and with error statuses that can be told apart."""
    from ray.job_submission import JobSubmissionClient

    class JobClient(JobSubmissionClient):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            # Past the base class, which would take RAY_ADDRESS for the url, and ask its head.
            super(JobSubmissionClient, self).__init__(address=url)
            self._check_connection_and_version()

        def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=_TIMEOUT_S, **kwargs)

        def _raise_error(self, response: Any) -> None:
            raise _Answer(response.status_code, response.text)

    return JobClient()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip(" .")]
    return lines[-1] if lines else ""


def wait_until_ended(
    jobs: DashboardRayJobs, submission_id: str, timeout_s: float, *, poll_s: float = 0.2
) -> RayJob | None:
    """Waits until a job has ended or is no longer known (None); raises `TimeoutError` if it has not."""
    deadline = time.monotonic() + timeout_s
    while True:
        job = jobs.status(submission_id)
        if job is None or job.state.ended:
            return job
        if time.monotonic() > deadline:
            raise TimeoutError(f"job {submission_id} is {job.state} after {timeout_s:g} s")
        time.sleep(poll_s)
