"""People: they talk to the API over HTTP, repeat what got no answer, and remember what they were told."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.campaign.checker import CardSource
from tests.faults.campaign.plan import Request, Round

_TIMEOUT_S = 8.0
_AGAIN_S = 0.05
_PATHS = {
    "pause": "experiments/{}/pause", "resume": "experiments/{}/resume", "cancel": "experiments/{}/cancel",
    "retry": "experiments/{}/retry", "delete": "experiments/{}",
    "cancel_run": "runs/{}/cancel", "retry_run": "runs/{}/retry",
}  # fmt: skip


class Gone(Exception):
    """The round is over; no answer is waited for any longer."""


@dataclass(slots=True)
class Memory:
    """What all clients of a round were told; thread-safe.

    Attributes:
        told: for the checker.
        problems: answers that no client should get, one line each.
    """

    told: CardSource
    problems: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _submitted: int = 0

    def next_number(self) -> int:
        """Number of the next experiment of the round."""
        with self._lock:
            self._submitted += 1
            return self._submitted

    def submitted(self, key: str, id: int, runs: int) -> None:
        """A submit was acknowledged."""
        with self._lock:
            self.told.submits[key] = (id, runs)

    def asked(self, act: str, id: int, *, acknowledged: bool) -> None:
        """A request was acknowledged, or got no answer."""
        with self._lock:
            (self.told.requests if acknowledged else self.told.perhaps)[act, id] += 1

    def problem(self, line: str) -> None:
        """An answer is none of those that are expected."""
        with self._lock:
            self.problems.append(line)


class Client:
    """One person.

    Args:
        url: of the API.
        memory: of the round.
    """

    def __init__(self, url: str, memory: Memory) -> None:
        self._http = httpx.Client(
            base_url=f"{url}/api/v1/", timeout=_TIMEOUT_S, trust_env=False, verify=False
        )
        self._memory = memory

    def close(self) -> None:
        """End its connections."""
        self._http.close()

    def submit(self, round: Round) -> int:
        """Submit the next experiment of the round, until that is acknowledged; returns its id."""
        number = self._memory.next_number()
        key = f"{round.name}-{number}"
        while not self._memory.over.is_set():
            answer = self._send(
                "POST", "experiments", content=round.spec(number), headers={"Idempotency-Key": key}
            )
            if answer is not None and answer.status_code == 201:
                document = answer.json()
                self._memory.submitted(key, document["id"], document["run_count"])
                return int(document["id"])
            if answer is not None and answer.status_code < 500:
                self._memory.problem(f"submit {key}: {answer.status_code} {answer.text[:300]}")
                raise Gone
            time.sleep(_AGAIN_S)
        raise Gone

    def ask(self, act: str, id: int) -> None:
        """Ask for something once."""
        answer = self._send("DELETE" if act == "delete" else "POST", _PATHS[act].format(id))
        if answer is None or answer.status_code >= 500:
            self._memory.asked(act, id, acknowledged=False)
        elif answer.status_code < 300:
            self._memory.asked(act, id, acknowledged=True)
        elif answer.status_code not in (404, 409):
            self._memory.problem(f"{act} {id}: {answer.status_code} {answer.text[:300]}")

    def runs(self, id: int) -> list[int]:
        """Returns the runs of an experiment, as far as the API says."""
        answer = self._send("GET", f"experiments/{id}/runs")
        if answer is None or answer.status_code != 200:
            return []
        return [int(run["id"]) for run in answer.json()["items"]]

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response | None:
        try:
            answer = self._http.request(method, path, **arguments)
        except httpx.HTTPError:
            return None  # It was killed, or is stopped.
        if answer.status_code == 500:
            self._memory.problem(f"{method} {path}: 500 {answer.text[:300]}")
        return answer


@dataclass(slots=True)
class History:
    """Experiments that some clients share.

    Attributes:
        experiments: known to them, the oldest first.
        begun: there is one, or there will be none.
    """

    experiments: list[int] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)


def take_part(client: Client, round: Round, history: History, requests: list[Request]) -> None:
    """Make one client's requests, in order; who does not begin with a submission waits for the first one."""
    if requests[0].act != "submit":
        history.begun.wait()
    for request in requests:
        time.sleep(request.after_s)
        try:
            if request.act == "submit" or not history.experiments:
                history.experiments.append(client.submit(round))
                history.begun.set()
                continue
            known = list(history.experiments)
            id = known[-1 - int(request.choice[0] ** 2 * len(known))]  # Mostly the newest: it is at work.
            if request.act.endswith("_run"):
                runs = client.runs(id)
                if not runs:
                    continue
                id = runs[int(request.choice[1] * len(runs))]
            client.ask(request.act, id)
        except Gone:
            history.begun.set()
            return
