"""The jobs of a Ray cluster, in memory; they pass the same tests as the real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.ray_jobs import DashboardRayJobs, JobState, RayJob, RayUnreachable


@dataclass(slots=True)
class _FakeJob:
    job: RayJob
    entrypoint: str
    looked_at: int = 0
    output: str = ""


class FakeRayJobs(DashboardRayJobs):
    """Jobs in memory: a job runs from the second look at it until `end` is called."""

    def __init__(self, nodes: tuple[ClusterNode, ...] = ()) -> None:
        super().__init__("")
        self.nodes = nodes
        self.unreachable = False  # Set to make every call behave as if Ray were away
        self.after_submit: Callable[[], None] = lambda: None
        """Called when a job has been taken, before `submit` returns: raise here to die there."""
        self.submitted: list[str] = []  # Submission ids in the order in which jobs were started, each once
        self.handed_over: dict[str, bytes] = {}
        self._jobs: dict[str, _FakeJob] = {}

    def hand_over(self, content: bytes) -> str:
        self._check()
        token = f"token-{len(self.handed_over)}"
        self.handed_over[token] = content
        return token

    def submit(self, submission_id: str, entrypoint: str, *, metadata: Mapping[str, str]) -> None:
        self._check()
        if submission_id not in self._jobs:
            job = RayJob(submission_id, JobState.pending, "", dict(metadata))
            self._jobs[submission_id] = _FakeJob(job, entrypoint)
            self.submitted.append(submission_id)
        self.after_submit()

    def status(self, submission_id: str) -> RayJob | None:
        self._check()
        found = self._jobs.get(submission_id)
        if found is None:
            return None
        found.looked_at += 1
        if found.job.state is JobState.pending and found.looked_at > 1:
            found.job = replace(found.job, state=JobState.running)
        return found.job

    def known(self, submission_ids: Sequence[str]) -> dict[str, RayJob]:
        self._check()
        return {id: job for id in submission_ids if (job := self.status(id)) is not None}

    def stop(self, submission_id: str) -> None:
        self._check()
        found = self._jobs.get(submission_id)
        if found is not None and not found.job.state.ended:
            found.job = replace(found.job, state=JobState.stopped, message="stopped")

    def logs(self, submission_id: str) -> str:
        self._check()
        found = self._jobs.get(submission_id)
        return found.output if found else ""

    def cluster(self, at_s: float) -> ClusterSnapshot:
        if self.unreachable:
            return ClusterSnapshot(at_s, False, None, ())
        return ClusterSnapshot(at_s, True, None, self.nodes)

    def end(self, submission_id: str, *, code: int = 0, output: str = "") -> None:
        found = self._jobs[submission_id]
        state = JobState.succeeded if code == 0 else JobState.failed
        found.job = replace(found.job, state=state, message=f"exit code {code}")
        found.output += output

    def entrypoint(self, submission_id: str) -> str:
        return self._jobs[submission_id].entrypoint

    def forget(self) -> None:
        """Forgets all jobs, as a restarted head does."""
        self._jobs.clear()

    def _check(self) -> None:
        if self.unreachable:
            raise RayUnreachable("Ray is unavailable")
