from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from trainers.parallel_kinds import COMPRESSIONS, NONE, STRATEGIES, CompressionInfo, StrategyInfo
from trainers.registry import NameIn, Section, described

MICRO_BATCHES_PER_STAGE = 4
"""Of a pipeline whose micro-batch is `auto`: by the formula at most a fifth of a step is bubble then."""

MAX_WORKERS = 4096

_NUMBER = {"type": "integer", "minimum": 1, "maximum": MAX_WORKERS}
_RANGE = {
    "type": "object",
    "properties": {"min": _NUMBER, "max": _NUMBER},
    "required": ["min", "max"],
    "additionalProperties": False,
}
_NUMBER_OR_RANGE = {"anyOf": [_NUMBER, _RANGE]}


class Parallel(Section):
    """How a step is spread over workers."""

    strategy: Annotated[str, NameIn(STRATEGIES), described(STRATEGIES)] = "single"
    """How a step is spread over workers:"""
    workers: Annotated[int, WithJsonSchema(_NUMBER_OR_RANGE)] = Field(default=1, ge=1, le=MAX_WORKERS)
    """Worker processes (one device each); `{min: 1, max: 4}` = the most that have room at each attempt."""
    min_workers: int | None = Field(default=None, ge=1, le=MAX_WORKERS)
    """Fewest workers of an elastic run, the `min` of `workers`; unset = always exactly `workers`."""
    activation_checkpointing: bool = False
    """Keep only the input of each encoder layer for the backward pass, which computes the rest again."""
    bucket_mib: int = Field(default=25, ge=1, le=4096)
    """ddp only: gradients that are sent together, in MiB; smaller begin earlier, larger waste less."""
    compression: Annotated[str, NameIn(COMPRESSIONS), described(COMPRESSIONS)] = NONE.name
    """ddp only: what workers send of their gradients; onebit needs optimizer adan."""
    compression_warmup: float = Field(default=0.2, gt=0.0, lt=1.0)
    """powersgd and onebit only: share of all steps whose gradients are sent whole, at the beginning."""
    powersgd_rank: int = Field(default=4, ge=1, le=256)
    """powersgd only: columns of the two factors that a matrix is sent as."""
    stages: int | None = Field(default=None, ge=2, le=256)
    """pipeline only: workers that a model's layers are dealt out to; unset = all. The rest are replicas."""
    engine: Literal["torch", "deepspeed"] | None = None
    """pipeline only: library that runs the schedule; unset = torch."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | None = None
    """pipeline with engine torch only: order of the passes on a stage; unset = 1f1b."""
    partition: Literal["uniform", "parameters", "time"] | None = None
    """pipeline only: what stages have alike; encoder layers, parameters or measured time; unset = uniform."""
    stage_timeout_s: float = Field(default=600.0, ge=1.0, le=86_400.0)
    """pipeline only: a stage that says nothing for so long, in seconds, is taken for dead."""

    @model_validator(mode="before")
    @classmethod
    def _range(cls, fields: Any) -> Any:
        """`workers: {min: 1, max: 4}` is a short form of `workers: 4` and `min_workers: 1`."""
        workers = fields.get("workers") if isinstance(fields, Mapping) else None
        if not isinstance(workers, Mapping):
            return fields
        if workers.keys() != {"min", "max"}:
            shown = ", ".join(map(str, workers)) or "nothing"
            raise ValueError(
                f"workers has {shown}; a range needs min and max, such as workers: {{min: 1, max: 4}}"
            )
        if "min_workers" in fields:
            raise ValueError("workers is a range, but min_workers is also set; remove min_workers")
        for name, value in workers.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WORKERS:
                raise ValueError(f"workers.{name} is {value!r}; give a whole number from 1 to {MAX_WORKERS}")
        return {**fields, "workers": workers["max"], "min_workers": workers["min"]}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        exchanging = " or ".join(info.name for info in STRATEGIES.values() if info.exchanges)
        if not self.strategy_info.several and self.workers != 1:
            raise ValueError(
                f"strategy {self.strategy} has one worker, not {self.workers}; "
                "set parallel.strategy: ddp or parallel.workers: 1 (if strategy is an axis, make workers "
                "one too, with search.when: {parallel.workers: {parallel.strategy: [ddp]}})"
            )
        if self.compression != NONE.name and not self.strategy_info.exchanges:
            raise ValueError(
                f"compression {self.compression} belongs to strategy {exchanging}, not {self.strategy}; "
                f"remove parallel.compression or set parallel.strategy: {exchanging}"
            )
        if self.min_workers is not None:
            if not self.strategy_info.several:
                raise ValueError(
                    f"strategy {self.strategy} has one worker, not a range; set parallel.strategy: ddp"
                )
            if self.min_workers > self.workers:
                raise ValueError(
                    f"the minimum of {self.min_workers} workers exceeds the maximum of {self.workers}; "
                    "lower min or raise max of parallel.workers"
                )
        return self

    @model_validator(mode="after")
    def _pipeline(self) -> Self:
        if not self.strategy_info.staged:
            staged = " or ".join(info.name for info in STRATEGIES.values() if info.staged)
            for field in ("stages", "engine", "schedule", "partition"):
                if getattr(self, field) is not None:
                    raise ValueError(
                        f"{field} belongs to strategy {staged}, not {self.strategy}; "
                        f"remove parallel.{field} or set parallel.strategy: {staged}"
                    )
            return self
        if self.workers < 2:
            raise ValueError(
                f"strategy {self.strategy} needs at least 2 workers, one for each stage; "
                "raise parallel.workers or set parallel.strategy: single"
            )
        if self.workers % self.stage_count:
            raise ValueError(
                f"workers {self.workers} is not divisible by stages {self.stage_count}; "
                f"set parallel.workers to a multiple of {self.stage_count}"
            )
        if self.min_workers is not None and self.stages is None:
            raise ValueError(
                "a pipeline with a range of workers needs a number of stages; "
                "set parallel.stages, or a single number in parallel.workers"
            )
        if self.engine == "deepspeed" and self.schedule not in (None, "1f1b"):
            raise ValueError(
                f"engine deepspeed has only the schedule 1f1b, not {self.schedule}; "
                "remove parallel.schedule or set parallel.engine: torch"
            )
        return self

    @property
    def strategy_info(self) -> StrategyInfo:
        return STRATEGIES[self.strategy]

    @property
    def compression_info(self) -> CompressionInfo:
        return COMPRESSIONS[self.compression]

    @property
    def stage_count(self) -> int:
        """Workers that share one model's layers; 1 = each worker has all of them."""
        if not self.strategy_info.staged:
            return 1
        return self.workers if self.stages is None else self.stages

    @property
    def replicas(self) -> int:
        """Copies of the model, which share the examples of a step."""
        return self.workers // self.stage_count

    @property
    def chunks(self) -> int:
        """Model chunks that the layers are cut into; some schedules give a stage two of them."""
        return self.stage_count * (2 if self.schedule in ("interleaved", "zero_bubble") else 1)


def require_layers(parallel: Parallel, layers: int, whose: str) -> None:
    """Raises ValueError for a pipeline with more stages than layers."""
    if parallel.chunks <= layers:
        return
    chunks = "" if parallel.chunks == parallel.stage_count else f" with {parallel.chunks} model chunks"
    raise ValueError(
        f"{parallel.stage_count} stages{chunks} need at least {parallel.chunks} layers, but {whose} has "
        f"{layers}; lower parallel.stages, or parallel.workers if that is unset"
        + (", or set parallel.schedule: 1f1b" if chunks else "")
    )
