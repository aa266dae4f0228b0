"""Calls about experiments: submit, list, follow, steer, export."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from service.client.live import Ended, ExperimentChanged, Happened, RunChanged
from service.client.runs import run_changed
from service.client.wire import Wire, api_error, encoded, given, read, reading
from service.domain.ledger import Ledger
from service.domain.records import (
    DeletedExperiment,
    Event,
    ExperimentDetail,
    ExperimentStatus,
    Page,
)
from service.domain.states import TERMINAL_EXPERIMENT_STATES


class ExperimentCalls(Wire):
    """The part of the client that asks for experiments."""

    def submit(
        self, text: str | bytes, *, idempotency_key: str | None = None, owner: str | None = None
    ) -> ExperimentStatus:
        """Submit a spec, YAML or JSON; repeated safely until the server has answered.

        Args:
            text: the spec.
            idempotency_key: submitting again under it answers the same experiment; None = a new one.
            owner: name to submit under; with a token, only an administrator may name another.

        Raises:
            ApiError: the spec is refused; `errors` names each field.
            Unreachable: no one answered.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        if owner is not None:
            headers["Stillhouse-Owner"] = owner
        answer = self._call(
            "POST", "/api/v1/experiments", repeat=True, content=encoded(text), headers=headers
        )
        return read(ExperimentStatus, answer)

    def experiments(
        self,
        *,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int = 50,
        page_token: str | None = None,
    ) -> Page[ExperimentStatus]:
        """One page of experiments, the newest first unless `order_by` says otherwise."""
        return self._get(Page[ExperimentStatus], "/experiments", filter, order_by, page_size, page_token)

    def all_experiments(
        self, *, filter: str | None = None, order_by: str | None = None
    ) -> Iterator[ExperimentStatus]:
        """All experiments, page by page as they are read."""
        token: str | None = None
        while True:
            page = self.experiments(filter=filter, order_by=order_by, page_size=1000, page_token=token)
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def experiment(self, id: int) -> ExperimentDetail:
        """One experiment with its totals and its place in the queue."""
        return self._get(ExperimentDetail, f"/experiments/{id}")

    def ledger(self, id: int) -> Ledger:
        """What every attempt at an experiment's runs is charged."""
        return self._get(Ledger, f"/experiments/{id}/ledger")

    def spec(self, id: int, form: Literal["submitted", "canonical"] = "submitted") -> str:
        """The spec's text as submitted, or its canonical JSON."""
        answer = self._call("GET", f"/api/v1/experiments/{id}/spec", repeat=True, params={"form": form})
        return answer.decode()

    def cancel(self, id: int) -> ExperimentDetail:
        """Ask for an experiment's end; one that has ended is answered as it is."""
        return self._steer(f"/experiments/{id}/cancel", repeat=True)

    def pause(self, id: int) -> ExperimentDetail:
        """Hold an experiment."""
        return self._steer(f"/experiments/{id}/pause", repeat=True)

    def resume(self, id: int) -> ExperimentDetail:
        """Let a paused experiment go on."""
        return self._steer(f"/experiments/{id}/resume", repeat=True)

    def retry(self, id: int, *, disturbed: bool = False) -> ExperimentDetail:
        """Queue an ended experiment's runs without a result again, or those whose result was disturbed."""
        return self._steer(
            f"/experiments/{id}/retry", repeat=False, params=given(disturbed=disturbed or None)
        )

    def set_priority(self, id: int, priority: int) -> ExperimentDetail:
        """Move an experiment among what waits; 0 to 100, higher goes first."""
        answer = self._call(
            "PUT", f"/api/v1/experiments/{id}/priority", repeat=True, json={"priority": priority}
        )
        return read(ExperimentDetail, answer)

    def delete(self, id: int, *, now: bool = False) -> None:
        """Delete an experiment that has ended; with `now`, free its space at once, past restoring."""
        self._call("DELETE", f"/api/v1/experiments/{id}", repeat=False, params=given(now=now or None))

    def deleted_experiments(self) -> list[DeletedExperiment]:
        """Deleted experiments that can be restored, those first whose results are removed first."""
        return self._items(DeletedExperiment, "/deleted-experiments", {})

    def restore(self, id: int) -> ExperimentDetail:
        """Show a deleted experiment to everyone again."""
        return self._steer(f"/experiments/{id}/restore", repeat=False)

    def tag(self, id: int, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> ExperimentDetail:
        """Add tags to an experiment and take others away."""
        body = {"add": list(add), "remove": list(remove)}
        return read(
            ExperimentDetail, self._call("PATCH", f"/api/v1/experiments/{id}/tags", repeat=True, json=body)
        )

    def annotate(self, id: int, notes: str) -> ExperimentDetail:
        """Replace the notes of an experiment."""
        answer = self._call("PUT", f"/api/v1/experiments/{id}/notes", repeat=True, json={"notes": notes})
        return read(ExperimentDetail, answer)

    def archive(self, id: int, archived: bool = True) -> ExperimentDetail:
        """Archive an experiment, or take it back."""
        body = {"archived": archived}
        answer = self._call("PUT", f"/api/v1/experiments/{id}/archive", repeat=True, json=body)
        return read(ExperimentDetail, answer)

    def events(self, id: int, *, after: int = 0, limit: int = 500) -> list[Event]:
        """What happened to an experiment after event number `after`."""
        return self._items(Event, f"/experiments/{id}/events", {"after": after, "limit": limit})

    def follow(
        self, id: int, *, after: int = 0
    ) -> Iterator[Happened | RunChanged | ExperimentChanged | Ended]:
        """What happens to an experiment until it ends, across reconnects; no event is left out.

        Args:
            id: the experiment.
            after: number of the last event that the caller has seen.

        Raises:
            ApiError: there is no such experiment.
            Unreachable: the server stayed away.
        """
        for kind, payload in self._stream(f"/api/v1/experiments/{id}/stream", str(after) if after else None):
            if kind == "event":
                yield Happened(read(Event, payload))
            elif kind == "run":
                yield run_changed(payload)
            elif kind == "experiment":
                yield ExperimentChanged(read(ExperimentStatus, payload))
            elif kind == "end":
                yield Ended(read(ExperimentStatus, payload))

    def wait(self, id: int, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until an experiment has ended.

        Raises:
            TimeoutError: it had not ended after `timeout_s`.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (experiment := self.experiment(id)).state not in TERMINAL_EXPERIMENT_STATES:
            if until is not None and time.monotonic() + every_s > until:
                raise TimeoutError(f"experiment {id} is {experiment.state} after {timeout_s:g} s")
            self._sleep(every_s)
        return experiment

    def export(
        self,
        path: Path,
        *,
        experiment_id: int | None = None,
        format: Literal["csv", "parquet", "jsonl"] = "csv",
        filter: str | None = None,
        order_by: str | None = None,
    ) -> None:
        """Write runs as a table to a file; nothing is left of it when the answer breaks off.

        Args:
            path: File to write.
            experiment_id: runs of this experiment; None = all.
            format: Format of the table.
            filter: conditions in MLflow's grammar.
            order_by: order of the rows.
        """
        with path.open("wb") as file:
            try:
                for chunk in self.export_chunks(
                    experiment_id, format=format, filter=filter, order_by=order_by
                ):
                    file.write(chunk)
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def export_chunks(
        self,
        experiment_id: int | None = None,
        *,
        format: Literal["csv", "parquet", "jsonl"] = "csv",
        filter: str | None = None,
        order_by: str | None = None,
    ) -> Iterator[bytes]:
        """A table of runs as it comes."""
        place = "/runs/export" if experiment_id is None else f"/experiments/{experiment_id}/export"
        params = given(format=format, filter=filter, order_by=order_by)
        with (
            reading(self.url),
            self._http.stream("GET", f"/api/v1{place}", params=params) as answer,
        ):
            if answer.status_code != 200:
                raise api_error(answer.status_code, answer.read())
            yield from answer.iter_bytes()

    def _steer(
        self, place: str, *, repeat: bool, params: Mapping[str, Any] | None = None
    ) -> ExperimentDetail:
        return read(ExperimentDetail, self._call("POST", f"/api/v1{place}", repeat=repeat, params=params))
