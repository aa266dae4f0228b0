"""What goes over the wire: one response shape per resource, apart from the store's records.

Times are Unix seconds (UTC). A number that is not finite is the string "NaN", "Infinity" or
"-Infinity", because JSON has no word for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from service.hardware import Hardware, aliases_of
from service.preview import PlannedRun
from service.records import Attempt, Event, Experiment, LogLine, MeasurementRow, QueueEntry, Run
from service.states import ExperimentState, RunState
from trainers.errors import FailureClass

Number = Annotated[
    float,
    WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]}
    ),
]
AxisValue = str | int | float | bool | None


class Shape(BaseModel):
    """Base of all responses: built from a record's attributes, NaN and infinities as strings."""

    model_config = ConfigDict(
        from_attributes=True, use_attribute_docstrings=True, ser_json_inf_nan="strings", frozen=True
    )


class ExperimentShape(Shape):
    """One experiment as lists show it: no spec text, no series."""

    id: int
    """Number of the experiment."""
    name: str
    """Name for people; not unique."""
    owner: str
    """Who submitted it."""
    state: ExperimentState
    """Where it is in its life."""
    priority: int
    """0 to 100; higher runs first."""
    attempt: int
    """Ray Jobs started for it so far."""
    spec_sha256: str
    """Hash of the canonical spec."""
    run_count: int
    """Runs in its grid."""
    submission_id: str | None
    """Ray Job of the current attempt."""
    lease_owner: str | None
    """Process that holds the lease."""
    lease_until_s: float | None
    """When the lease ends without a heartbeat."""
    cancel_requested_s: float | None
    """When somebody asked to cancel it."""
    pause_requested_s: float | None
    """When somebody asked to pause it."""
    not_before_s: float
    """Earliest time of the next claim."""
    failure_class: FailureClass | None
    """Class of the failure it ended with."""
    failure_message: str | None
    """The failure in one line."""
    created_s: float
    """When it was submitted."""
    queued_s: float
    """When it last joined the queue."""
    started_s: float | None
    """When its driver first started."""
    ended_s: float | None
    """When it ended."""
    run_states: dict[RunState, int]
    """How many of its runs are in each state; states without runs are left out."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "id": 12,
                "name": "precision-by-batch",
                "owner": "ada",
                "state": "running",
                "priority": 50,
                "attempt": 1,
                "spec_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
                "run_count": 8,
                "submission_id": "stillhouse-12-1",
                "lease_owner": "driver-4711",
                "lease_until_s": 1790000031.5,
                "cancel_requested_s": None,
                "pause_requested_s": None,
                "not_before_s": 0.0,
                "failure_class": None,
                "failure_message": None,
                "created_s": 1790000000.0,
                "queued_s": 1790000000.0,
                "started_s": 1790000004.2,
                "ended_s": None,
                "run_states": {"succeeded": 3, "running": 2, "queued": 3},
            }
        }
    )

    @classmethod
    def of(cls, experiment: Experiment, run_states: Mapping[RunState, int]) -> Self:
        """The shape of a record with the states of its runs."""
        return cls(**_fields(experiment), run_states=_present(run_states))


class Totals(Shape):
    """What an experiment has used so far: all devices that it held, lost work and overhead included."""

    cost_usd: Number
    """Money, in USD."""
    energy_kwh: Number
    """Energy, in kWh."""
    device_hours: Number
    """Device time from placed to released, in hours."""
    overhead_usd: Number
    """The part of the money that no configuration caused, such as starting worker processes."""


class Waiting(Shape):
    """Where a queued experiment stands."""

    position: int
    """From 1, in the order of claims."""
    reason: str
    """Why it waits, in one line."""


class ExperimentDetailShape(ExperimentShape):
    """One experiment with its totals and, while it waits, its place in the queue."""

    totals: Totals
    """What its runs have used so far."""
    waiting: Waiting | None
    """Its place in the queue; null when it does not wait."""

    @classmethod
    def with_totals(
        cls,
        experiment: Experiment,
        run_states: Mapping[RunState, int],
        totals: Any,
        waiting: QueueEntry | None,
    ) -> Self:
        """The shape of a record with everything that the store knows of it as a whole."""
        return cls(
            **_fields(experiment),
            run_states=_present(run_states),
            totals=Totals.model_validate(totals),
            waiting=Waiting.model_validate(waiting) if waiting else None,
        )


class ExperimentPage(Shape):
    """One page of experiments."""

    items: list[ExperimentShape]
    """At most `page_size` of them."""
    next_page_token: str | None
    """Give this as `page_token` for the next page; null on the last."""


class RunShape(Shape):
    """One run: a point of the grid with one seed, with its progress and latest figures."""

    id: int
    """Number of the run."""
    experiment_id: int
    """Its experiment."""
    index: int
    """Position in the grid's order, from 0."""
    cell: str
    """Hash of the axis values; runs that differ by seed alone share it. `reference`: the run repeats the
    first cell to tell how the machine drifts, and is in no comparison."""
    seed: int
    """Its seed."""
    point: dict[str, AxisValue]
    """Axis values by dotted name."""
    state: RunState
    """Where it is in its life."""
    attempt: int
    """Attempts opened so far."""
    own_failures: int
    """Failures of the run itself."""
    infrastructure_failures: int
    """Failures of machines under it."""
    not_before_s: float
    """Earliest time of the next attempt."""
    failure_class: FailureClass | None
    """Class of the last failure."""
    failure_message: str | None
    """The last failure in one line."""
    cancel_requested_s: float | None
    """When somebody asked to cancel it."""
    step: int
    """Optimizer updates done."""
    total_steps: int | None
    """Optimizer updates in all; null until known."""
    phase: str | None
    """What it is doing."""
    checkpoint: str | None
    """Last verified checkpoint."""
    checkpoint_step: int | None
    """Step of that checkpoint."""
    started_s: float | None
    """When its first attempt started."""
    ended_s: float | None
    """When it ended."""
    task: str
    """Task."""
    student: str
    """Preset, folder or hub id of the model."""
    precision: str
    """Number format of forward and backward."""
    optimizer: str
    """Update rule."""
    implementation: str
    """How the update rule is executed."""
    global_batch_size: int
    """Examples per update."""
    strategy: str
    """How a step is spread over workers."""
    workers: int
    """Worker processes: of the newest attempt, and before that the most that it may have."""
    """Worker processes."""
    hardware: str
    """Hardware by its catalogue name."""
    teacher: str | None
    """Model that it is distilled from: a folder, hub id or `run:<id>`; null = none."""
    accuracy: Number | None
    """Accuracy, 0 to 1."""
    f1: Number | None
    """F1, 0 to 1."""
    train_loss: Number | None
    """Last training loss."""
    validation_loss: Number | None
    """Last validation loss."""
    total_time_s: Number | None
    """Start to end."""
    train_time_s: Number | None
    """Without validation."""
    cost_usd: Number | None
    """Money."""
    energy_kwh: Number | None
    """Energy."""
    energy_provenance: str | None
    """Whether the energy was counted, sampled or modelled."""
    samples_per_s: Number | None
    """Throughput in examples."""
    tokens_per_s: Number | None
    """Throughput in real tokens."""
    peak_memory_mib: Number | None
    """Largest memory."""
    exact_match: Number | None
    """Share of questions answered exactly, 0 to 1."""
    map: Number | None
    """Mean average precision, 0 to 1."""
    mrr: Number | None
    """Mean reciprocal rank, 0 to 1."""
    top5_accuracy: Number | None
    """Share with the right class among the first five, 0 to 1."""
    mfu_pct: Number | None
    """Model FLOPs utilisation, in percent of the hardware's peak."""
    headline: str | None
    """Metric by which its task is judged first."""
    score: Number | None
    """Value of that metric at the last evaluation."""
    test_score: Number | None
    """Its value on the test part, scored once with the best checkpoint; null = none, or not yet."""
    validation_examples: int | None
    """What the metric on the validation part is a mean over: examples, or questions."""
    test_examples: int | None
    """The same of the test part."""
    best_score: Number | None
    """Its best value over all evaluations."""
    best_step: int | None
    """Step of the best evaluation."""
    best_checkpoint: str | None
    """Checkpoint of the best evaluation."""
    waits_for: str | None
    """What it waits for while its turn has come and there is no room, and who holds it; null = nothing."""
    reused_from: int | None
    """Run whose figures these are, because it has the same settings and data; null = its own."""
    neighbours_foreign_pct: Number | None
    """Share of the time in which processes outside the cluster used its node noticeably; null = not known."""
    neighbours_other_experiment_pct: Number | None
    """The same for other experiments."""
    neighbours_same_experiment_pct: Number | None
    """The same for other runs of its experiment."""
    first_attempt: int
    """First attempt of the present measurement; earlier ones belong to measurements that it replaced."""

    @classmethod
    def of(cls, run: Run) -> Self:
        """The shape of a record."""
        return cls.model_validate(run)


class RunPage(Shape):
    """One page of runs."""

    items: list[RunShape]
    """At most `page_size` of them."""
    next_page_token: str | None
    """Give this as `page_token` for the next page; null on the last."""


class Series(Shape):
    """One metric over steps, as columns of equal length."""

    steps: list[int]
    """Optimizer updates, rising."""
    values: list[Number]
    """Values at those steps."""
    at_s: list[float]
    """When each was measured."""
    attempts: list[int]
    """Attempt that each comes from."""


class PointsShape(Shape):
    """Points of one run by metric name."""

    run_id: int
    """The run."""
    series: dict[str, Series]
    """By name; a name without points is left out."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "run_id": 40,
                "series": {
                    "loss": {
                        "steps": [1, 2, 3],
                        "values": [0.70, 0.66, "NaN"],
                        "at_s": [1790000001.1, 1790000001.4, 1790000001.7],
                        "attempts": [1, 1, 1],
                    }
                },
            }
        }
    )


class MeasurementShape(Shape):
    """A quantity with its unit over a window."""

    run_id: int
    attempt: int
    name: str
    """What was measured."""
    value: Number
    unit: str
    """Unit of the value."""
    provenance: str
    """counter, sampled or modelled."""
    scope: str
    """What it covers: a device, a process, the run."""
    start_s: float
    end_s: float


class Measurements(Shape):
    """All measurements of a run."""

    items: list[MeasurementShape]

    @classmethod
    def of(cls, rows: list[MeasurementRow]) -> Self:
        """The shape of the rows."""
        return cls(items=[MeasurementShape.model_validate(row) for row in rows])


class SummaryShape(Shape):
    """Everything that a run reported as a whole."""

    run_id: int
    values: dict[str, Number | int | str | None]
    """By name, as `docs/metrics.md` defines them."""


class AttemptShape(Shape):
    """One try at a run."""

    run_id: int
    number: int
    """From 1."""
    experiment_attempt: int
    """Attempt of the experiment that it ran under."""
    state: RunState
    """How it stands or how it ended."""
    started_s: float
    ended_s: float | None
    resumed_from_step: int | None
    """Step of the checkpoint that it began from; null = from the start."""
    last_step: int
    node: str | None
    pid: int | None
    workers: int
    """Worker processes that it had."""
    placement: str | None
    """Devices that it ran on; null = it never got to run."""
    failure_class: FailureClass | None
    failure_message: str | None
    facts: dict[str, Any] | None
    """What makes it reproducible: versions, commit, fingerprints, hardware, resolved config."""
    summary: dict[str, Number | str | None] | None
    """Figures that the run ended with here, where it was measured again since; else null."""


class Attempts(Shape):
    """All attempts of a run, the first one first."""

    items: list[AttemptShape]

    @classmethod
    def of(cls, attempts: list[Attempt]) -> Self:
        """The shape of the records."""
        return cls(items=[AttemptShape.model_validate(attempt) for attempt in attempts])


class LogLineShape(Shape):
    """One line for people."""

    run_id: int
    attempt: int
    number: int
    """Rising in the order of the lines of an attempt."""
    cursor: int
    """Place among all lines of the run; give it as `after` for the lines that follow."""
    at_s: float
    level: str
    message: str


class LogLines(Shape):
    """Lines of a run, the oldest first."""

    items: list[LogLineShape]

    @classmethod
    def of(cls, lines: list[LogLine]) -> Self:
        """The shape of the records."""
        return cls(items=[LogLineShape.model_validate(line) for line in lines])


class EventShape(Shape):
    """Something that happened to an experiment."""

    experiment_id: int
    number: int
    """From 1, in the order of commits, without gaps."""
    run_id: int | None
    attempt: int | None
    at_s: float
    kind: str
    """Dotted word, `run.started` for instance."""
    message: str
    data: dict[str, Any] | None


class Events(Shape):
    """Events of an experiment, the oldest first."""

    items: list[EventShape]

    @classmethod
    def of(cls, events: list[Event]) -> Self:
        """The shape of the records."""
        return cls(items=[EventShape.model_validate(event) for event in events])


class QueueEntryShape(Shape):
    """One waiting experiment: where it stands and why it waits."""

    position: int
    """From 1, in the order of claims."""
    reason: str
    """Why it waits, in one line."""
    experiment: ExperimentShape


class QueueShape(Shape):
    """Everything that waits, in the order in which it would be claimed."""

    items: list[QueueEntryShape]
    schedulers_alive: list[str]
    """Schedulers with a recent heartbeat; without one nothing is claimed."""


class HardwareShape(Shape):
    """One kind of device of the catalogue."""

    name: str
    """Name used in specs."""
    device: str
    """cpu, cuda or tpu."""
    accelerator_type: str | None
    """Ray accelerator type that selects a node with it."""
    memory_gib: float | None
    bandwidth_gb_s: float | None
    tdp_w: float
    price_usd_per_hour: float
    """List price of one device."""
    price_date: str
    price_source: str
    precisions: list[str]
    """Precisions that it computes in hardware."""
    peak_tflops: dict[str, float] | None
    """Published peak for dense products by precision, in TFLOP/s."""
    source: str | None
    """Data sheet of memory, bandwidth, power and peaks; null = no data sheet."""
    without_data_sheet: list[str]
    """Figures that no data sheet gives."""
    aliases: list[str]
    """Short names that specs may use for it."""

    @classmethod
    def of(cls, entry: Hardware, catalogue: Mapping[str, Hardware]) -> HardwareShape:
        """The shape of a catalogue's entry."""
        figures = entry.model_dump(mode="json", include=set(cls.model_fields))
        return cls(
            **figures,
            without_data_sheet=list(entry.without_data_sheet),
            aliases=aliases_of(entry.name, catalogue),
        )


class Catalogue(Shape):
    """All kinds of devices that specs may name."""

    items: list[HardwareShape]


class NodeShape(Shape):
    """One machine of the cluster."""

    id: str
    name: str
    alive: bool
    resources: dict[str, float]
    """All that it has, by Ray resource name."""
    available: dict[str, float]
    """What of that is free."""
    labels: dict[str, str] = {}
    """What it is called, by Ray label name."""


class ClusterShape(Shape):
    """The Ray cluster as the scheduler last saw it."""

    at_s: float | None
    """When the scheduler looked; null when none ever did."""
    age_s: float | None
    """How long ago that was."""
    reachable: bool
    """Whether Ray answered."""
    dashboard_url: str | None
    nodes: list[NodeShape]
    totals: dict[str, float]
    """Sum over living nodes, by Ray resource name."""


class Validated(Shape):
    """A spec that is valid."""

    valid: bool
    """Always true; an invalid spec is answered by a problem."""
    name: str
    sha256: str
    """Hash of the canonical spec."""
    run_count: int
    spec: dict[str, Any]
    """The spec with all defaults filled in."""


class PlannedRunShape(Shape):
    """One run of a grid before it is submitted."""

    index: int
    cell: str
    seed: int
    point: dict[str, AxisValue]
    hardware: str
    workers: int
    """Worker processes; of an elastic run, the most."""
    min_workers: int
    """The fewest; the same unless the run is elastic."""
    cpus: int
    """CPUs that it reserves in all, at the most workers."""
    accelerators: int
    """Accelerators that it reserves in all."""
    memory_gib: float | None
    """Memory that it reserves in all; null = not reserved."""
    price_usd_per_hour: float
    """Price of all its devices, at the most workers."""
    min_price_usd_per_hour: float
    """The same at the fewest."""
    feasible: bool
    """Whether it is valid and the cluster could serve it."""
    reason: str | None
    """Why it is not feasible."""
    at_a_time: int | None
    """Runs like it that the idle cluster holds at a time; null = not known."""
    at_a_time_shared: int | None
    """The same with `measure: shared`; null = it is shared, or not known."""
    reused_from: int | None
    """Run whose figures it takes, instead of training; null = it is trained."""
    not_reused: str | None
    """Why a run with the same settings is not reused; null = there is none, or `reuse` is not set."""

    @classmethod
    def of(cls, run: PlannedRun) -> Self:
        """The shape of a planned run."""
        return cls.model_validate(run)


class Health(Shape):
    """Whether this process answers."""

    status: str


class Readiness(Shape):
    """Whether this process can do its work."""

    ready: bool
    database: str
    """`ok`, or what is wrong."""
    schedulers_alive: int
    """Schedulers with a recent heartbeat; 0 does not make the API unready."""


class Priority(BaseModel):
    """A new place among others."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"priority": 80}})

    priority: int = Field(ge=0, le=100, strict=True, description="0 to 100; higher runs first.")


def _present(counts: Mapping[RunState, int]) -> dict[RunState, int]:
    return {state: count for state, count in counts.items() if count}


def _fields(record: Experiment) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}
