"""A typed client of the HTTP API: the same records that the store has, over the network.

    with Client("http://127.0.0.1:8400") as client:
        experiment = client.submit(Path("spec.yaml").read_bytes())
        for message in client.follow(experiment.id):
            ...

What can be repeated safely is repeated when the network or the database falters; a submission is
safe because it carries an idempotency key. Everything else that the server refuses is an
`ApiError` with its stable type.
"""

from __future__ import annotations

from service.client.access import AccessCalls, LoginRefused
from service.client.analysis import AnswerCalls
from service.client.credentials import UnsafeCredentials
from service.client.experiments import ExperimentCalls
from service.client.installation import InstallationCalls
from service.client.live import (
    Ended,
    ExperimentChanged,
    Happened,
    NewLine,
    NewPoints,
    RunChanged,
    RunEnded,
)
from service.client.notices import NoticeCalls
from service.client.people import PeopleCalls
from service.client.runs import RunCalls
from service.client.wire import ApiError, ClientError, Unreachable
from service.config.hardware import HardwareEntry
from service.domain.records import (
    Attempt,
    Event,
    ExperimentDetail,
    ExperimentStatus,
    LogLine,
    MeasurementRow,
    MetricSeries,
    NewSeries,
    Page,
    QueueEntry,
    QueueListing,
    QueuePosition,
    Run,
    Totals,
    WaitingAtWork,
)
from service.planner.forecast import Forecast, Span
from service.planner.preview import PlannedRun, Preview, Validated
from service.scheduling.cluster import Cluster, ClusterNode, Pool

__all__ = [
    "ApiError",
    "Attempt",
    "Client",
    "ClientError",
    "Cluster",
    "ClusterNode",
    "Ended",
    "Event",
    "ExperimentChanged",
    "ExperimentDetail",
    "ExperimentStatus",
    "Forecast",
    "Happened",
    "HardwareEntry",
    "LogLine",
    "LoginRefused",
    "MeasurementRow",
    "MetricSeries",
    "NewLine",
    "NewPoints",
    "NewSeries",
    "Page",
    "PlannedRun",
    "Pool",
    "Preview",
    "QueueEntry",
    "QueueListing",
    "QueuePosition",
    "Run",
    "RunChanged",
    "RunEnded",
    "Span",
    "Totals",
    "Unreachable",
    "UnsafeCredentials",
    "Validated",
    "WaitingAtWork",
]


class Client(
    ExperimentCalls, RunCalls, AnswerCalls, PeopleCalls, InstallationCalls, NoticeCalls, AccessCalls
):
    """One connection pool to one server; thread-safe.

    Args: see `service.client.wire.Wire`.
    """
