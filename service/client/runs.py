"""Calls about runs: lists, figures, curves, logs, live follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from service.client.live import NewLine, NewPoints, RunChanged, RunEnded
from service.client.wire import Wire, api_error, given, read, reading
from service.domain.ledger import Account
from service.domain.records import (
    Attempt,
    LogLine,
    MeasurementRow,
    MetricSeries,
    NewSeries,
    Page,
    Points,
    Run,
    RunProgress,
    RunSummary,
)
from service.domain.serialization import adapter
from service.output.model_archive import unpack


class RunCalls(Wire):
    """The part of the client that asks for runs."""

    def runs(
        self,
        *,
        experiment_id: int | None = None,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int = 100,
        page_token: str | None = None,
    ) -> Page[Run]:
        """One page of runs: of one experiment in grid order, or of all, the newest first."""
        place = "/runs" if experiment_id is None else f"/experiments/{experiment_id}/runs"
        return self._get(Page[Run], place, filter, order_by, page_size, page_token)

    def all_runs(
        self, *, experiment_id: int | None = None, filter: str | None = None, order_by: str | None = None
    ) -> Iterator[Run]:
        """All runs, page by page as they are read."""
        token: str | None = None
        while True:
            page = self.runs(
                experiment_id=experiment_id,
                filter=filter,
                order_by=order_by,
                page_size=1000,
                page_token=token,
            )
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def run(self, id: int) -> Run:
        """One run."""
        return self._get(Run, f"/runs/{id}")

    def cancel_run(self, id: int) -> Run:
        """Ask for a run's end; one that has ended is answered as it is."""
        return read(Run, self._call("POST", f"/api/v1/runs/{id}/cancel", repeat=True))

    def retry_run(self, id: int) -> Run:
        """Queue a run without a result again."""
        return read(Run, self._call("POST", f"/api/v1/runs/{id}/retry", repeat=False))

    def points(
        self,
        id: int,
        names: Sequence[str] = (),
        *,
        min_step: int | None = None,
        max_step: int | None = None,
        max_points: int | None = None,
    ) -> dict[str, MetricSeries]:
        """Points of a run by metric; a long series is sampled to about `max_points` (server: 1000)."""
        params = given(name=list(names) or None, min_step=min_step, max_step=max_step, max_points=max_points)
        answer = self._call("GET", f"/api/v1/runs/{id}/points", repeat=True, params=params)
        return read(Points, answer).series

    def all_points(self, id: int, name: str) -> Iterator[MetricSeries]:
        """Every point of a metric, page by page as they are read."""
        place: int | None = 0
        while place is not None:
            params = {"name": name, "exact": True, "min_step": place, "max_points": 10_000}
            answer = read(Points, self._call("GET", f"/api/v1/runs/{id}/points", repeat=True, params=params))
            yield from answer.series.values()
            place = answer.next_step

    def measurements(self, id: int) -> list[MeasurementRow]:
        """Quantities of a run with unit and provenance."""
        return self._items(MeasurementRow, f"/runs/{id}/measurements", {})

    def account(self, id: int) -> Account:
        """What every attempt at a run is charged."""
        return self._get(Account, f"/runs/{id}/ledger")

    def summary(self, id: int) -> dict[str, float | int | str | None]:
        """Everything that a run reported as a whole; empty until it ends."""
        return self._get(RunSummary, f"/runs/{id}/summary").values

    def export_model(
        self, id: int, folder: Path, *, checkpoint: Literal["best", "last"] = "best"
    ) -> dict[str, Any]:
        """Write a run's model to a folder that transformers loads; whole and verified, or not at all.

        Args:
            id: the run.
            folder: does not exist yet, or is empty.
            checkpoint: Checkpoint of the best evaluation, or the newest.

        Returns:
            The manifest: run, checkpoint, step, and each file's size and SHA-256.

        Raises:
            ApiError: there is no such run (`not-found`) or checkpoint (`no-model`).
            BrokenModel: what arrived is not what the manifest says.
            OSError: the folder is not empty or cannot be written.
        """
        with (
            reading(self.url),
            self._http.stream("GET", f"/api/v1/runs/{id}/model", params={"checkpoint": checkpoint}) as answer,
        ):
            if answer.status_code != 200:
                raise api_error(answer.status_code, answer.read())
            return unpack(answer.iter_bytes(), folder)

    def trace(self, id: int) -> bytes:
        """The timeline of a run's traced steps, as JSON in Chrome's trace-event format.

        Raises:
            ApiError: there is no such run (`not-found`) or it has no timeline (`no-trace`).
        """
        return self._call("GET", f"/api/v1/runs/{id}/trace", repeat=True)

    def kernel_trace(self, id: int, rank: int = 0) -> bytes:
        """The profiler's trace of a worker's profiled steps, as JSON in Chrome's trace-event format.

        Raises:
            ApiError: there is no such run (`not-found`) or none of this worker (`no-trace`).
        """
        return self._call("GET", f"/api/v1/runs/{id}/trace/kernels", params={"rank": rank}, repeat=True)

    def predictions(self, id: int, file: Path, *, format: Literal["parquet", "jsonl"] = "parquet") -> int:
        """Write the predictions of a run's test part to a file, replacing it when all have arrived.

        Returns:
            Bytes written.

        Raises:
            ApiError: there is no such run (`not-found`) or it has none (`no-predictions`).
            OSError: the file cannot be written.
        """
        draft = file.with_name(f".{file.name}.draft")
        try:
            with (
                reading(self.url),
                self._http.stream(
                    "GET", f"/api/v1/runs/{id}/predictions", params={"format": format}
                ) as answer,
            ):
                if answer.status_code != 200:
                    raise api_error(answer.status_code, answer.read())
                with draft.open("wb") as stream:
                    for chunk in answer.iter_bytes():
                        stream.write(chunk)
            size = draft.stat().st_size
            draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)
        return size

    def attempts(self, id: int) -> list[Attempt]:
        """Each try at a run, the first one first."""
        return self._items(Attempt, f"/runs/{id}/attempts", {})

    def logs(
        self, id: int, *, after: int | None = None, limit: int = 1000, attempt: int | None = None
    ) -> list[LogLine]:
        """Lines of a run's log after the line whose `cursor` is `after`."""
        return self._items(LogLine, f"/runs/{id}/logs", given(after=after, limit=limit, attempt=attempt))

    def follow_run(self, id: int) -> Iterator[RunChanged | NewPoints | NewLine | RunEnded]:
        """A run's points and log lines until it ends, across reconnects.

        Raises:
            ApiError: the run does not exist.
            Unreachable: the server stayed away.
        """
        for kind, payload in self._stream(f"/api/v1/runs/{id}/stream", None):
            if kind == "run":
                yield run_changed(payload)
            elif kind == "points":
                yield NewPoints(adapter(dict[str, NewSeries]).validate_json(payload))
            elif kind == "log":
                yield NewLine(read(LogLine, payload))
            elif kind == "end":
                yield RunEnded(run_changed(payload).run)


def run_changed(payload: bytes) -> RunChanged:
    """A run's change from its live form."""
    progress = read(RunProgress, payload)
    latest = {name: point.value for name, point in progress.latest.items()}
    return RunChanged(progress.run, latest, progress.line)
