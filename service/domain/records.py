"""Records of the store: what every reader of the database gets, what the API sends, what the client reads.

Times are Unix seconds (float, UTC). A `StoredRecord` is built from a row by `from_row`, by name. What the
API sends is `Serializable`: a field that is added here is in its JSON, in OpenAPI and in the client.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, Generic, Self, TypeVar
from urllib.parse import parse_qsl, urlencode

from pydantic import computed_field

from service.domain.grid import REFERENCE_CELL, Point
from service.domain.serialization import Number, Serializable
from service.domain.shares import StartForecast
from service.domain.states import ExperimentState, RunState
from trainers.errors import FailureClass
from trainers.reporting import Stream as Stream

Item = TypeVar("Item")


class ViewKind(StrEnum):
    """What a view is of."""

    list = "list"  # The list of experiments, or the table of an experiment's runs
    dashboard = "dashboard"  # Chosen figures of some experiments


VIEW_PARAMETERS: Final[Mapping[ViewKind, tuple[str, ...]]] = {
    ViewKind.list: (
        *("table", "filter", "state", "order_by", "columns"),
        *("group", "baseline", "difference"),
    ),
    ViewKind.dashboard: ("experiments", "filter", "panel"),
}
"""Parameters of the page's address that a view keeps; `table=runs` = of an experiment's runs."""
_REPEATED = frozenset({"panel"})  # Parameters of which a view may have several
LONGEST_VIEW_NAME: Final = 80
LONGEST_VIEW_QUERY: Final = 8_000
MOST_VIEWS: Final = 200  # Of one owner


@dataclass(frozen=True, slots=True)
class StoredRecord(Serializable):
    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Self:
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class TaggedRecord(StoredRecord):
    """Something with tags, which `tags_text` stores."""

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Self:
        columns = {name: row[name] for name in cls.__dataclass_fields__}
        return cls(**columns | {"tags": columns["tags"].split()})


@dataclass(frozen=True, slots=True)
class Experiment(TaggedRecord):
    """One submitted experiment; lists carry no spec text and no series."""

    id: int  # Number of the experiment
    name: str  # Name for people; not unique
    owner: str  # Who submitted it
    state: ExperimentState  # State in its life cycle
    priority: int  # 0 to 100; higher runs first
    attempt: int  # Ray Jobs started for it so far; the fence for every write of a driver
    spec_sha256: str  # Hash of the canonical spec
    run_count: int  # Runs in its grid
    submission_id: str | None  # Ray Job that carries the driver of the current attempt
    lease_owner: str | None  # Process that holds the lease
    lease_until_s: float | None  # When the lease ends without a heartbeat
    cancel_requested_s: float | None  # When someone asked to cancel it
    pause_requested_s: float | None  # When someone asked to pause it
    not_before_s: float  # Earliest time of the next claim; set by the delay before a retry
    failure_class: FailureClass | None  # Class of the failure it ended with
    failure_message: str | None  # The failure in one line
    created_s: float  # When it was submitted
    queued_s: float  # When it last joined the queue
    started_s: float | None  # When its driver first started
    ended_s: float | None  # When it ended
    project: str  # Project that it belongs to
    pool: str  # Pool whose clusters may run it
    tags: list[str]  # Words for finding it, in alphabetical order
    notes: str  # Notes of people
    archived_s: float | None  # When it was archived; null = it is not


def tags_text(tags: Collection[str]) -> str:
    """Tags in order, each between spaces, so that a pattern finds a whole one."""
    return "".join(f" {tag}" for tag in sorted(set(tags))) + " " * bool(tags)


@dataclass(frozen=True, slots=True)
class Run(TaggedRecord):
    """One point of the grid with one seed, with its latest progress and figures."""

    id: int  # Number of the run
    experiment_id: int  # Its experiment
    index: int  # Position in the grid's order, from 0
    cell: str
    """Hash of the axis values; runs that differ by seed or repeat alone share it. `reference`: the run
    repeats the first cell to tell how the machine drifts, and is in no comparison."""
    seed: int  # Its seed
    repeat: int  # Which run of its cell with this seed, from 0
    point: Point  # Axis values by dotted name
    state: RunState  # State in its life cycle
    attempt: int  # Attempts opened so far; the fence for every write of a worker
    own_failures: int  # Failures of the run itself
    infrastructure_failures: int  # Failures of machines under it
    not_before_s: float  # Earliest time of the next attempt
    failure_class: FailureClass | None  # Class of the last failure
    failure_message: str | None  # The last failure in one line
    cancel_requested_s: float | None  # When someone asked to cancel it
    step: int  # Optimizer updates done
    total_steps: int | None  # Optimizer updates in all; null until known
    phase: str | None  # What it is doing now
    checkpoint: str | None  # Last verified checkpoint
    checkpoint_step: int | None  # Step of that checkpoint
    started_s: float | None  # When its first attempt started
    ended_s: float | None  # When it ended
    # Known at submission:
    task: str  # Task
    student: str  # Preset, folder or hub id of the model
    precision: str  # Number format of forward and backward
    optimizer: str  # Update rule
    implementation: str  # How the update rule is executed
    global_batch_size: int  # Examples per update; 0 = the largest that fits, not found yet
    strategy: str  # How a step is spread over workers
    workers: int  # Worker processes: of the newest attempt, and before that the most that it may have
    hardware: str  # Hardware by its catalogue name
    teacher: str | None  # Model that it is distilled from: a folder, hub id or `run:<id>`; null = none
    # From the summary; None until known:
    accuracy: Number | None  # Accuracy, 0 to 1
    f1: Number | None  # F1, 0 to 1
    train_loss: Number | None  # Last training loss
    validation_loss: Number | None  # Last validation loss
    total_time_s: Number | None  # From start to end, in seconds
    train_time_s: Number | None  # The same without validation, in seconds
    cost_usd: Number | None  # Cost, in USD
    energy_kwh: Number | None  # Energy, in kWh
    energy_provenance: str | None  # Whether the energy was counted, sampled or modelled
    node_energy_kwh: Number | None  # Energy of its share of whole nodes, in kWh
    node_energy_source: str | None
    """Where the nodes' power was read: `redfish`, `ipmi`, `counters and idle_w`; null = nowhere."""
    co2_kg: Number | None  # CO2 of the nodes' energy, else the devices', at its site, in kg
    samples_per_s: Number | None  # Throughput, in examples per second
    tokens_per_s: Number | None  # Throughput, in tokens per second without padding
    peak_memory_mib: Number | None  # Peak memory, in MiB
    exact_match: Number | None  # Share of questions answered exactly, 0 to 1
    map: Number | None  # Mean average precision, 0 to 1
    mrr: Number | None  # Mean reciprocal rank, 0 to 1
    top5_accuracy: Number | None  # Share with the right class among the first five, 0 to 1
    mfu_pct: Number | None  # Model FLOPs utilisation, in percent of the hardware's peak
    headline: str | None  # Metric by which its task is judged first
    score: Number | None  # Value of that metric at the last evaluation
    test_score: Number | None
    """Its value on the test part, scored once with the best checkpoint; null = none, or not yet."""
    validation_examples: int | None
    """What the metric on the validation part is a mean over: examples, or questions."""
    test_examples: int | None  # The same of the test part
    best_score: Number | None  # Its best value over all evaluations
    best_step: int | None  # Step of the best evaluation
    best_checkpoint: str | None  # Checkpoint of the best evaluation
    reused_from: int | None
    """Run whose figures these are, because it has the same settings and data; null = its own."""
    waits_for: str | None  # What a run that is next in line waits for, and who holds it; null = nothing
    neighbours_foreign_pct: Number | None
    """Share of the time in which processes outside the cluster used its node noticeably; null = not known."""
    neighbours_other_experiment_pct: Number | None  # The same for other experiments
    neighbours_same_experiment_pct: Number | None  # The same for other runs of its experiment
    first_attempt: int
    """First attempt of the present measurement; earlier ones belong to measurements that it replaced."""
    name: str  # Name that people gave it; empty = none
    starred: bool  # Whether people starred it
    tags: list[str]  # Words for finding it, in alphabetical order
    notes: str  # Notes of people

    @property
    def is_reference(self) -> bool:
        return self.cell == REFERENCE_CELL


@dataclass(frozen=True, slots=True)
class FigureOfGroup(Serializable):
    """A figure over the runs of a group that have it."""

    count: int  # Runs with a value
    mean: Number | None  # Mean over them; null without any
    sd: Number | None  # Sample standard deviation; null below two values
    least: Number | None  # Least value
    greatest: Number | None  # Greatest value


@dataclass(frozen=True, slots=True)
class GroupOfRuns(Serializable):
    """Runs that are alike in what they are grouped by."""

    values: list[int | Number | str | None]  # What they share, in the order of `by`; null = they have none
    offset: int  # Runs in the groups before it: its first run's place in the list ordered by `by`
    count: int  # How many runs it has
    states: dict[RunState, int]  # How many of them are in each state
    figures: dict[str, FigureOfGroup]  # Figures by name


_NAMES = [field.name for field in fields(Run)]
SUMMARY_FIELDS: Final = tuple(_NAMES[_NAMES.index("accuracy") : _NAMES.index("reused_from")])
"""Fields of `Run` that are filled from the summary: figures, but for a few texts and counts."""


@dataclass(frozen=True, slots=True)
class Attempt(StoredRecord):
    """One try at a run."""

    run_id: int  # Run that it is an attempt at
    number: int  # From 1
    experiment_attempt: int  # Attempt of the experiment that it ran under
    state: RunState  # How it stands or how it ended
    started_s: float  # When it was opened
    ended_s: float | None  # When it ended
    resumed_from_step: int | None  # Step of the checkpoint that it began from; null = from the start
    last_step: int  # Last optimizer update that it reported
    node: str | None  # Machine that it ran on
    pid: int | None  # Its process on that machine
    workers: int  # Worker processes that it had
    placement: str | None  # Devices that it ran on; null = it never got to run
    failure_class: FailureClass | None  # Class of the failure it ended with
    failure_message: str | None  # The failure in one line
    facts: dict[str, Any] | None
    """What makes it reproducible: versions, commit, fingerprints, hardware, threads, resolved config."""
    summary: dict[str, int | Number | str | None] | None
    """Figures that the run ended with here, where it was measured again since; else null."""


@dataclass(frozen=True, slots=True)
class Placement(StoredRecord):
    """Devices that an experiment held for its workers, one run after the other."""

    id: str  # Ray's id of the placement group
    hardware: str
    workers: int
    devices: float  # Number of devices held; a part of one where runs share it
    price_usd_per_hour: float  # Of all its devices
    power_w: float  # Of all its devices
    placed_s: float  # Ray reserved them, Unix time
    ready_s: float | None  # The workers could take their first run; None = not yet, or they never could
    released_s: float | None  # Ray had them back; None = they are held
    seen_s: float  # Last known to be held


@dataclass(frozen=True, slots=True)
class Event(StoredRecord):
    """Something that happened to an experiment."""

    experiment_id: int  # Its experiment
    number: int  # From 1, in the order of commits, without gaps
    run_id: int | None  # Run that it happened to; null = the experiment as a whole
    attempt: int | None  # Attempt of that run, or of the experiment
    at_s: float  # When it happened
    kind: str  # An `EventKind`; a newer server may send others
    message: str  # What happened, in one line
    data: dict[str, Any] | None  # Figures that belong to it, by name
    actor: str | None  # User who caused it; null = the service itself


@dataclass(frozen=True, slots=True)
class LogLine(StoredRecord):
    """One line of a run's log."""

    run_id: int  # Its run
    attempt: int  # Attempt that wrote it
    number: int  # Rising in the order of the lines of an attempt
    at_s: float  # When it was written
    level: str  # debug, info, warning or error
    message: str  # The text
    stream: str = "log"  # log = a line of its own; stdout or stderr = written there by the run or a library

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cursor(self) -> int:
        """Place among all lines of the run; give it as `after` for the lines that follow."""
        return (self.attempt << 32) + self.number


@dataclass(frozen=True, slots=True)
class PointRow(StoredRecord):
    """One metric value at one step; `value` may be NaN or infinite."""

    name: str
    step: int
    attempt: int
    at_s: float
    value: float


@dataclass(frozen=True, slots=True)
class MeasurementRow(StoredRecord):
    """A quantity with its unit over a window."""

    run_id: int  # Its run
    attempt: int  # Attempt that measured it
    name: str  # What was measured
    value: Number  # Value in that unit
    unit: str  # Unit of the value
    provenance: str  # counter, sampled or modelled
    scope: str  # What it covers: a device, a process, the run
    start_s: float  # Start of the window
    end_s: float  # End of the window


@dataclass(frozen=True, slots=True)
class Page(Serializable, Generic[Item]):
    """One page of a list."""

    items: list[Item]  # At most `page_size` of them
    next_page_token: str | None  # Give this as `page_token` for the next page; null on the last
    total: int | None = None  # Items of the whole list, where `offset` was given


@dataclass(frozen=True, slots=True)
class Items(Serializable, Generic[Item]):
    """A list without pages."""

    items: list[Item]  # All of them, or as many as `limit` allows


@dataclass(frozen=True, slots=True)
class DeletedExperiment(Serializable):
    """An experiment that was deleted and can be restored."""

    id: int  # Its number
    name: str  # Name for people
    owner: str  # Who submitted it
    project: str  # Project that it belongs to
    state: ExperimentState  # How it ended
    run_count: int  # Runs that it has
    deleted_s: float  # When it was deleted, Unix time
    restorable_until_s: float  # When its rows and files are removed, Unix time


@dataclass(frozen=True, slots=True)
class SampledSeries:
    """All points of one metric, or the extremes of buckets of `bucket_steps` each."""

    points: list[PointRow]
    bucket_steps: int | None


@dataclass(frozen=True, slots=True)
class MetricSeries(Serializable):
    """One metric over steps, as columns of equal length."""

    steps: list[int]  # Optimizer updates, rising
    values: list[Number]  # Values at those steps
    at_s: list[float]  # When each was measured
    attempts: list[int]  # Attempt that each comes from
    bucket_steps: int | None = None
    """Null: these are all points. Else the series is sampled: of each bucket of so many steps these are the
    points with the least and the greatest value and the first NaN."""

    @classmethod
    def of(cls, rows: Sequence[PointRow], bucket_steps: int | None = None) -> Self:
        return cls(
            steps=[row.step for row in rows],
            values=[row.value for row in rows],
            at_s=[row.at_s for row in rows],
            attempts=[row.attempt for row in rows],
            bucket_steps=bucket_steps,
        )


@dataclass(frozen=True, slots=True)
class Points(Serializable):
    """Points of one run by metric name."""

    run_id: int  # The run
    series: dict[str, MetricSeries]  # By name; a name without points is left out
    next_step: int | None = None  # With `exact`, the `min_step` of the next page; null on the last


@dataclass(frozen=True, slots=True)
class NewSeries(Serializable):
    """Points of one metric that a live stream has not sent before, as columns of equal length."""

    steps: list[int]  # Optimizer updates, rising
    values: list[Number]  # Values at those steps
    at_s: list[float]  # When each was measured
    bucket_steps: int | None = None
    """Null: these are all new points. Else, as in an answer of points, the extremes of buckets of so many
    steps."""

    @classmethod
    def of(cls, rows: Sequence[PointRow], bucket_steps: int | None = None) -> Self:
        return cls(
            [row.step for row in rows], [row.value for row in rows], [row.at_s for row in rows], bucket_steps
        )


@dataclass(frozen=True, slots=True)
class LatestPoint(Serializable):
    """The last value of a metric."""

    step: int  # Optimizer update
    value: Number  # Value at that step


@dataclass(frozen=True, slots=True)
class RunProgress(Serializable):
    """A run as a live stream sends it."""

    run: Run  # The run as it is now
    latest: dict[str, LatestPoint]  # Last point of each metric, by name
    line: LogLine | None = None  # Newest line of its log while it prepares its data; else null


@dataclass(frozen=True, slots=True)
class ModelTrial(Serializable):
    """What a run's model can be asked on its page."""

    each: str  # Field of an example that each line typed is
    shared: tuple[str, ...]  # Fields that all lines have in common
    optional: tuple[str, ...]  # Those of them that may be left out
    shown: str  # How an answer is shown: labels, number, tags, text, ranking
    most_texts: int  # Most lines of one request
    longest_text: int  # Most characters of a line or field


@dataclass(frozen=True, slots=True)
class ModelAnswer(Serializable):
    """What a model answers to one example, or to all lines of a ranking."""

    prediction: Any  # As the task has it: a label, labels, a number, tags, a text, or line numbers by rank
    probabilities: Any  # By label, of the likeliest 20, or of each line; null where the task has none


@dataclass(frozen=True, slots=True)
class RunSummary(Serializable):
    """Everything that a run reported as a whole."""

    run_id: int  # The run
    values: dict[str, Number | int | str | None]
    """By name, as `docs/metrics.md` defines them; empty until the run ends."""


_OF_EXPERIMENT = tuple(field.name for field in fields(Experiment))


@dataclass(frozen=True, slots=True)
class ExperimentStatus(Experiment):
    """One experiment with the states of its runs, as lists show it: no spec text, no series."""

    run_states: dict[RunState, int]
    """How many of its runs are in each state; states without runs are left out."""

    @classmethod
    def of(cls, experiment: Experiment, run_counts: Mapping[RunState, int], **more: Any) -> Self:
        record = {name: getattr(experiment, name) for name in _OF_EXPERIMENT}
        return cls(**record, run_states={state: n for state, n in run_counts.items() if n}, **more)


@dataclass(frozen=True, slots=True)
class ExperimentCost(Serializable):
    """What an experiment costs: so far, and until it ends."""

    so_far_usd: Number  # All devices that it held, lost work and overhead included, in USD
    rest_usd: Number | None
    """Forecast of what is still to come, from the pace of its own runs, in USD; null before
    any has made a step."""


@dataclass(frozen=True, slots=True)
class ListedExperiment(ExperimentStatus):
    """One experiment as lists of experiments and the stream of all of them show it."""

    cost: ExperimentCost | None  # What it costs; null in a list that did not ask for costs


@dataclass(frozen=True, slots=True)
class DeletedId(Serializable):
    """An experiment that was deleted while it was followed."""

    id: int  # Its number


@dataclass(frozen=True, slots=True)
class QueueCounts(Serializable):
    """The queue of all pools, after a change of its order or of what the clusters have."""

    waiting: int  # Experiments that wait
    active: int  # Experiments that are starting or running


@dataclass(frozen=True, slots=True)
class ManyChanges(Serializable):
    """More has changed than is sent one by one: lists are to be read again."""

    at_s: float  # Time of the changes, by the database's clock


@dataclass(frozen=True, slots=True)
class Totals(Serializable):
    """What an experiment has used so far: all devices that it held, lost work and overhead included."""

    cost_usd: Number  # Cost, in USD
    energy_kwh: Number
    """Energy, in kWh: as the attempts reported it; rated power x time for what none of them reported."""
    device_hours: Number  # Device time from placed to released, in hours
    overhead_usd: Number
    """The part of the cost that no configuration caused, such as starting worker processes."""
    co2_kg: Number | None = None
    """CO2 of that energy, by PUE and carbon intensity of the pool's site, in kg; null = not declared."""


@dataclass(frozen=True, slots=True)
class QueuePosition(Serializable):
    """Where a queued experiment stands."""

    position: int  # From 1, in the order of claims
    reason: str  # Why it waits, in one line
    start: StartForecast | None
    """When it will start, and what decides about it; null = not forecast, as for what is far back."""


@dataclass(frozen=True, slots=True)
class QueueEntry(QueuePosition):
    """One waiting experiment: where it stands and why it waits."""

    experiment: ExperimentStatus | None
    """The experiment; null when it is of a project that the reader does not see."""


@dataclass(frozen=True, slots=True)
class WaitingAtWork(Serializable):
    """An experiment with a driver, and with runs that wait for capacity."""

    experiment: ExperimentStatus | None
    """The experiment; null when it is of a project that the reader does not see."""
    reason: str  # What its runs wait for, in one line


@dataclass(frozen=True, slots=True)
class QueueListing(Serializable):
    """One page of what waits, in the order in which it would be claimed."""

    items: list[QueueEntry]  # At most `page_size` waiting experiments, the next to be claimed first
    next_page_token: str | None  # Give this as `page_token` for the next page; null on the last
    total: int  # How many experiments wait in all
    schedulers_alive: list[str]  # Schedulers with a recent heartbeat; without one nothing is claimed
    at_work: list[WaitingAtWork]
    """Experiments that have a driver, and runs that wait for capacity; on the first page."""


@dataclass(frozen=True, slots=True)
class PartOf(Serializable):
    """Where an experiment belongs in a study."""

    id: int  # Number of the study
    name: str  # Name of the study
    part: str  # Name of the part that the experiment is


@dataclass(frozen=True, slots=True)
class ExperimentDetail(ExperimentStatus):
    """One experiment with its totals and, while it waits, its place in the queue."""

    totals: Totals  # What its runs have used so far
    study: PartOf | None  # Study that it is a part of; null = none
    waiting: QueuePosition | None  # Its place in the queue; null when it does not wait


@dataclass(frozen=True, slots=True)
class View(StoredRecord):
    """The list of experiments, the table of an experiment's runs, or a dashboard, as someone has saved it."""

    id: int  # Number of the view
    kind: ViewKind  # list or dashboard
    name: str  # Name for people; an owner has one view of a kind and name
    owner: str  # User who saved it
    project: str | None  # Project that it is meant for; null = none in particular
    shared: bool  # Whether everyone who sees the project sees the view
    query: str  # What is shown, as the query of the page's address
    created_s: float  # When it was first saved, in Unix seconds


def sought_batch(facts: Mapping[str, Any]) -> bool:
    """Whether a run with these facts found its batch, by `batch.global_size: largest`."""
    return isinstance(facts.get("config", {}).get("batch", {}).get("global_size"), str)


def canonical_query(text: str, kind: ViewKind = ViewKind.list) -> str:
    """Returns a view's parameters in order, without empty ones; `ValueError` for unknown or repeated ones."""
    known = VIEW_PARAMETERS[kind]
    parameters: dict[str, list[str]] = {name: [] for name in known}
    for name, value in parse_qsl(text.removeprefix("?"), max_num_fields=100):
        if name not in known:
            raise ValueError(f"'{name[:50]}' is not part of a view; use {', '.join(known)}")
        if parameters[name] and name not in _REPEATED:
            raise ValueError(f"'{name}' is there twice; keep one of them")
        parameters[name].append(value)
    return urlencode([(name, value) for name, values in parameters.items() for value in values])
