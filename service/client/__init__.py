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

from service.answers import (
    Cluster,
    Ended,
    Experiment,
    ExperimentChanged,
    ExperimentDetail,
    ExperimentPage,
    Forecast,
    Happened,
    HardwareEntry,
    NewLine,
    NewPoints,
    NewSeries,
    Node,
    Preview,
    Queue,
    QueueEntry,
    RunChanged,
    RunEnded,
    RunPage,
    Series,
    Totals,
    Validated,
    Waiting,
)
from service.client.answers import AnswerCalls
from service.client.experiments import ExperimentCalls
from service.client.installation import InstallationCalls
from service.client.runs import RunCalls
from service.client.wire import ApiError, ClientError, Unreachable
from service.preview import PlannedRun
from service.records import Attempt, Event, LogLine, MeasurementRow, Run

__all__ = [
    "ApiError",
    "Attempt",
    "Client",
    "ClientError",
    "Cluster",
    "Ended",
    "Event",
    "Experiment",
    "ExperimentChanged",
    "ExperimentDetail",
    "ExperimentPage",
    "Forecast",
    "Happened",
    "HardwareEntry",
    "LogLine",
    "MeasurementRow",
    "NewLine",
    "NewPoints",
    "NewSeries",
    "Node",
    "PlannedRun",
    "Preview",
    "Queue",
    "QueueEntry",
    "Run",
    "RunChanged",
    "RunEnded",
    "RunPage",
    "Series",
    "Totals",
    "Unreachable",
    "Validated",
    "Waiting",
]


class Client(ExperimentCalls, RunCalls, AnswerCalls, InstallationCalls):
    """One connection pool to one server; thread-safe.

    Args: see `service.client.wire.Wire`.
    """
