"""Calls about the installation: specs before they are submitted, the queue, hardware, the cluster."""

from __future__ import annotations

from dataclasses import replace

import httpx

from service.client.wire import Wire, encoded, given, read
from service.config.hardware import HardwareEntry
from service.domain.records import QueueEntry, QueueListing, WaitingAtWork
from service.domain.shares import Share
from service.planner.forecast import Forecast
from service.planner.preview import PlannedRun, Preview, Validated
from service.scheduling.cluster import Cluster


class InstallationCalls(Wire):
    """The part of the client that asks for specs, the queue, hardware and the cluster."""

    def validate(self, text: str | bytes) -> Validated:
        """Every check of a submission; nothing is stored.

        Raises:
            ApiError: the spec is refused; `errors` names each field.
        """
        return read(
            Validated, self._call("POST", "/api/v1/specs/validate", repeat=True, content=encoded(text))
        )

    def preview(self, text: str | bytes, *, limit: int = 100) -> Preview:
        """The first `limit` runs that a spec would make.

        Raises:
            ApiError: the spec is refused; `errors` names each field.
        """
        items: list[PlannedRun] = []
        token: str | None = None
        forecast: Forecast | None = None
        notes: tuple[str, ...] = ()
        while True:
            params = given(page_size=min(1000, limit - len(items)), page_token=token)
            answer = self._call(
                "POST", "/api/v1/specs/preview", repeat=True, content=encoded(text), params=params
            )
            page = read(Preview, answer)
            items += page.items
            forecast, notes = forecast or page.forecast, notes or page.notes
            token = page.next_page_token
            if token is None or len(items) >= limit:
                return replace(page, items=items, next_page_token=token, forecast=forecast, notes=notes)

    def queue(self, *, limit: int = 1000) -> QueueListing:
        """The first `limit` experiments that wait, and why; and what waits for capacity at work."""
        items: list[QueueEntry] = []
        at_work: list[WaitingAtWork] = []
        token: str | None = None
        while True:
            page = self._get(
                QueueListing, "/queue", page_size=min(1000, limit - len(items)), page_token=token
            )
            items += page.items
            at_work += page.at_work
            token = page.next_page_token
            if token is None or len(items) >= limit:
                return replace(page, items=items, at_work=at_work)

    def hardware(self) -> list[HardwareEntry]:
        """The hardware catalogue."""
        return self._items(HardwareEntry, "/hardware", {})

    def cluster(self) -> Cluster:
        """The pool `default` with its Ray cluster, and all pools, as their schedulers last saw them."""
        return self._get(Cluster, "/cluster")

    def shares(self) -> list[Share]:
        """Who is entitled to which part of the devices, and who has it."""
        return self._items(Share, "/shares", {})

    def healthy(self) -> bool:
        """Whether the server answers, tried once."""
        try:
            return self._http.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False
