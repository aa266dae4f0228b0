"""What one run trains, as frozen pydantic models.

The experiment spec (`service.specs.experiment`) consists of these sections. Importing this module imports
neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, JsonValue, ValidationError, ValidationInfo, field_validator, model_validator

from trainers.config.model import LAYERS, Distillation, Model, require_layer_map
from trainers.config.optimizer import DEFAULT_WARMUP, Optimizer
from trainers.config.parallel import MAX_WORKERS, MICRO_BATCHES_PER_STAGE, Parallel, require_layers
from trainers.config.sections import (
    ASSUMED_BATCH,
    MAX_BATCH,
    BatchConfig,
    Checkpointing,
    Evaluation,
    Length,
    Numerics,
    Precision,
    Telemetry,
)
from trainers.config.site import Site
from trainers.config.task import MAX_LENGTH, TaskConfig
from trainers.device_kinds import DEVICE_KINDS, DeviceKind
from trainers.model_kinds.encoders import ENCODERS
from trainers.optimizers import OPTIMIZERS
from trainers.parallel_kinds import COMPRESSIONS, POWERSGD, STRATEGIES, unstaged
from trainers.registry import Identifier, NameIn, Section

Stage = dict[str, JsonValue]
Stages = Annotated[tuple[Stage, ...], Field(min_length=2, max_length=16)]

PREVIOUS_STAGE = "previous-stage"
"""Stands for the folder of a teacher that is there once the stage before has ended."""
_SECTIONS = ("model", "distillation", "optimizer", "length", "evaluation", "numerics")
_PARTS = {"numerics": frozenset({"evaluation"})}  # The fields that a stage may change, where not all
_REPLACED = frozenset({"length"})  # Sections whose fields exclude each other: a stage gives the whole of one
_OF_THE_RUN = {
    "name": "starts from the best checkpoint of the stage before",
    "teacher": "learns from the best checkpoint of the stage before",
    "layers": "has the layers and the width of the stage before",
    "compile": "has the layers of the stage before",
}
"""Fields of `model` that are the same in all stages, and why."""


def merged(sections: Mapping[str, Any], stage: Stage, number: int) -> dict[str, Any]:
    """Returns the sections of a stage (from 1): the run's, with the stage's own fields in them."""
    for name, fields in stage.items():
        if name not in _SECTIONS or not isinstance(fields, dict):
            raise ValueError(
                f"stage {number} changes {name}; a stage has fields of its own in {', '.join(_SECTIONS)} "
                "alone, such as {model: {encoder: binary}}"
            )
        if (parts := _PARTS.get(name)) is not None and (others := sorted(fields.keys() - parts)):
            raise ValueError(
                f"stage {number} sets {name}.{others[0]}, but all stages train in the same format; a stage "
                f"sets {name}.{' and '.join(sorted(parts))} alone"
            )
    model = stage.get("model")
    for field, reason in _OF_THE_RUN.items():
        if isinstance(model, dict) and field in model:
            raise ValueError(
                f"stage {number} sets model.{field}, but a stage {reason}; remove it, or set it for the "
                "whole run"
            )
    whole = dict(sections)
    for name, fields in stage.items():
        whole[name] = fields if name in _REPLACED else _merged(whole.get(name) or {}, fields)
    if number > 1 and whole["model"]["binary"].get("split"):
        raise ValueError(
            f"stage {number} sets model.binary.split, which doubles the width of the stage before; split in "
            "the first stage, or in a run of its own"
        )
    return whole


def _merged(before: Any, changes: Any) -> Any:
    if not (isinstance(before, dict) and isinstance(changes, dict)):
        return changes
    return {**before, **{name: _merged(before.get(name), value) for name, value in changes.items()}}


class TrainingSections(Section):
    """The sections that describe training: shared by a spec and by each resolved run."""

    task: TaskConfig
    """What is learned, and from which data."""
    model: Model = Model()
    """The model that is trained."""
    distillation: Distillation = Distillation()
    """What the student learns from its teacher."""
    precision: Precision = Precision.fp32
    """Number format of forward and backward; parameters are fp32 unless `numerics.parameters` is half."""
    numerics: Numerics = Numerics()
    """Half precision in detail."""
    optimizer: Optimizer = Optimizer()
    """Update rule and schedule."""
    parallel: Parallel = Parallel()
    """How a step is spread over workers."""
    batch: BatchConfig = BatchConfig()
    """How many examples one step sees."""
    length: Length = Length(epochs=1)
    """When training ends."""
    evaluation: Evaluation = Evaluation()
    """When the model is evaluated."""
    checkpoint: Checkpointing = Checkpointing()
    """How often a resumable checkpoint is written."""
    telemetry: Telemetry = Telemetry()
    """What is measured during training."""
    stages: Stages | None = None
    """Train in stages, each from the best checkpoint of the one before, which is also its teacher. Each lists
    what it changes, such as `{model: {binary: {activation_bits: 4}}, length: {epochs: 1}}`; unset = one."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of each worker; unset = the CPUs that the worker reserves."""
    deterministic: bool = False
    """Deterministic kernels: a resumed run ends bitwise where the uninterrupted one ends."""
    log_every_steps: int = Field(default=1, ge=1)
    """Report points each time this many steps have passed."""

    @field_validator("batch")
    @classmethod
    def _global_size(cls, batch: BatchConfig, info: ValidationInfo) -> BatchConfig:
        parallel = info.data.get("parallel")
        if batch.per_worker_size is None or parallel is None:
            return batch
        if parallel.min_workers is not None:
            raise ValueError(
                "per_worker_size would change the batch with the number of workers, which varies from "
                f"parallel.min_workers {parallel.min_workers}; set batch.global_size instead"
            )
        size = batch.per_worker_size * parallel.replicas
        if "global_size" in batch.model_fields_set and batch.global_size != size:
            raise ValueError(
                f"per_worker_size {batch.per_worker_size} makes a global batch of {size}, but global_size is "
                f"{batch.global_size}; remove one of them"
            )
        if size > MAX_BATCH:
            raise ValueError(
                f"per_worker_size {batch.per_worker_size} makes a global batch of {size}, more than "
                f"{MAX_BATCH}; lower it, or use fewer workers"
            )
        return batch.model_copy(update={"global_size": size})

    @model_validator(mode="after")
    def _half_parameters(self) -> TrainingSections:
        if self.numerics.parameters == "half" and self.precision not in (Precision.fp16, Precision.bf16):
            raise ValueError(
                f"numerics.parameters half needs precision fp16 or bf16, not {self.precision}; "
                "change precision, or set numerics.parameters: fp32"
            )
        if self.numerics.embeddings == "fp16":
            if self.numerics.parameters == "half":
                raise ValueError(
                    "numerics.embeddings fp16 rounds parameters of fp32, but numerics.parameters is half; "
                    "remove one of them"
                )
            if ENCODERS[self.model.encoder].quantises:
                raise ValueError(
                    f"numerics.embeddings fp16 is not for model.encoder {self.model.encoder}, which has its "
                    "own setting; set model.binary.embeddings: fp16 instead"
                )
        return self

    @model_validator(mode="after")
    def _encoder_computes(self) -> TrainingSections:
        encoder = ENCODERS[self.model.encoder]
        if self._is_resolved:
            encoder.require_precision(self.precision)
        encoder.require_evaluation(self.numerics.evaluation)
        if self.parallel.strategy_info.staged and not encoder.pipelines:
            raise ValueError(
                f"model.encoder {encoder.name} cannot be divided into pipeline stages; set "
                f"parallel.strategy: {unstaged()}, or another model.encoder"
            )
        return self

    @model_validator(mode="after")
    def _freezes(self) -> TrainingSections:
        encoder = ENCODERS[self.model.encoder]
        if self.model.frozen and self.parallel.strategy_info.staged:
            raise ValueError(
                "model.frozen may leave a pipeline stage without anything to train; set parallel.strategy: "
                f"{unstaged()}, or model.frozen: []"
            )
        if self.model.frozen and encoder.quantises:
            raise ValueError(
                f"model.frozen does not work with model.encoder {encoder.name}, which trains what its layers "
                "are quantised by; set model.frozen: [], or another model.encoder"
            )
        return self

    @model_validator(mode="after")
    def _recorded(self) -> TrainingSections:
        if not self.model.cuda_graphs:
            return self
        without = "set model.cuda_graphs: false, or"
        if self.parallel.strategy_info.staged:
            raise ValueError(
                f"model.cuda_graphs records whole passes, not those of a pipeline's stages; {without} "
                "parallel.strategy: ddp"
            )
        if not self.parallel.compression_info.after_passes:
            *others, last = (info.name for info in COMPRESSIONS.values() if info.after_passes)
            raise ValueError(
                "model.cuda_graphs exchanges gradients after the recorded passes, which parallel.compression "
                f"{self.parallel.compression} does not; {without} parallel.compression: "
                f"{', '.join(others)} or {last}"
            )
        if self.parallel.activation_checkpointing:
            raise ValueError(
                "model.cuda_graphs does not work with parallel.activation_checkpointing, which draws dropout "
                f"again in the backward pass; {without} parallel.activation_checkpointing: false"
            )
        if self.task.info.head.reads == "guessed":
            raise ValueError(
                f"model.cuda_graphs needs steps of equal shape, but task {self.task.name} guesses another "
                f"number of tokens in each; {without} another task.name"
            )
        return self

    @model_validator(mode="after")
    def _chain(self) -> TrainingSections:
        for number in range(1, len(self.stages or ()) + 1):
            self.stage_sections(number)
        return self

    def each_stage(self) -> list[TrainingSections]:
        """Returns the sections of each stage; of a run without stages itself."""
        if self.stages is None:
            return [self]
        return [
            TrainingSections.model_validate(self._judged(self.stage_sections(number)))
            for number in range(1, len(self.stages) + 1)
        ]

    def _judged(self, sections: dict[str, Any]) -> dict[str, Any]:
        return {**sections, "precision": sections["precision"] if self._is_resolved else Precision.fp32}

    def stage_sections(self, number: int) -> dict[str, Any]:
        """Returns the sections of a stage (from 1) as plain values; ValueError if they contradict."""
        assert self.stages is not None
        own = {name: getattr(self, name) for name in TrainingSections.model_fields if name != "stages"}
        plain = {
            name: value.model_dump() if isinstance(value, Section) else value for name, value in own.items()
        }
        sections = merged(plain, self.stages[number - 1], number)
        if number > 1:
            sections["model"] = {**sections["model"], "teacher": PREVIOUS_STAGE}
        try:
            trains = TrainingSections.model_validate(self._judged(sections)).trains
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            reason = str(first["msg"]).removeprefix("Value error, ")
            raise ValueError(f"stage {number}: {where + ': ' if where else ''}{reason}") from None
        if not trains:
            raise ValueError(
                f"stage {number} has length.steps 0 and trains nothing; raise it, or remove the stage"
            )
        return sections

    @property
    def _is_resolved(self) -> bool:
        return self.precision in tuple(Precision)  # A spec's may be `auto`.

    def steps_of(self, examples: int) -> int:
        """Returns the optimizer updates of a run, all stages included."""
        lengths = [stage.length for stage in self.each_stage()]
        return sum(length.total_steps(examples, self.batch.size) for length in lengths)

    def with_batch(self, size: int) -> Self:
        """Returns the sections with the batch that a run found, in one pass; unchanged if none was sought."""
        if not self.batch.is_found:
            return self
        return self.model_copy(update={"batch": self.batch.model_copy(update={"global_size": size})})

    @property
    def trains(self) -> bool:
        """Whether there are steps; a run without evaluates the model that it is given."""
        return self.length.steps != 0

    @model_validator(mode="after")
    def _evaluates(self) -> TrainingSections:
        if self.trains:
            return self
        partition = "time" if self.parallel.partition == "time" else None
        unused = (
            ("model.teacher", self.model.teacher, "trains a student"),
            ("model.frozen", list(self.model.frozen), "leaves parts out of training"),
            ("telemetry.profile_steps", self.telemetry.profile_steps, "profiles training steps"),
            ("telemetry.kernel_counters", self.telemetry.kernel_counters, "counts training steps"),
            ("telemetry.trace_steps", self.telemetry.trace_steps, "traces training steps"),
            ("telemetry.histogram_steps", self.telemetry.histogram_steps, "looks at training steps"),
            ("parallel.partition", partition, "measures training steps"),
        )
        for field, value, what in unused:
            if value:
                raise ValueError(
                    f"length.steps 0 trains nothing, but {field} {value} {what}; remove {field}, "
                    "or raise length.steps"
                )
        return self

    @property
    def stored(self) -> str:
        """Format of parameters and gradients."""
        return self.precision.value if self.numerics.parameters == "half" else Precision.fp32.value

    @property
    def state_bytes(self) -> int:
        """Bytes that the optimizer keeps for each trained parameter, masters included."""
        optimizer = self.optimizer
        masters = optimizer.info.masters_of(self.stored, optimizer.masters)
        return optimizer.info.states.size_bytes(self.stored, masters, optimizer.moments)

    @model_validator(mode="after")
    def _optimizer_fits(self) -> TrainingSections:
        kind, plain = self.optimizer.masters, self.optimizer.info.plain_masters
        if kind not in (None, plain) and self.stored not in self.optimizer.info.masters[kind]:
            wanted = self.optimizer.info.masters[kind][0]
            raise ValueError(
                f"optimizer.masters {kind} completes parameters stored in {wanted}, but these are stored "
                f"in {self.stored}; set precision: {wanted} with numerics.parameters: half, "
                f"or optimizer.masters: {plain}"
            )
        warmup, steps = self.optimizer.warmup_steps, self.length.steps
        if warmup is not None and steps and warmup >= steps:
            raise ValueError(
                f"optimizer.warmup_steps {warmup} leaves no step of length.steps {steps}; lower it below "
                f"{steps}, or raise length.steps"
            )
        return self

    @model_validator(mode="after")
    def _compressible(self) -> TrainingSections:
        compression, other = self.parallel.compression_info, f"parallel.compression: {POWERSGD.name}"
        freezes = compression.freezes_second_moment
        if freezes and not self.optimizer.info.freezes_second_moment:
            able = [info.name for info in OPTIMIZERS.values() if info.freezes_second_moment]
            raise ValueError(
                f"parallel.compression {compression.name} is {compression.summary} and needs optimizer.name "
                f"{' or '.join(able)}, not {self.optimizer.name}; set optimizer.name: {able[0]}, or {other}"
            )
        if freezes and self.distillation.hidden_first_fraction:
            raise ValueError(
                f"parallel.compression {compression.name} freezes second moments that "
                f"distillation.hidden_first_fraction {self.distillation.hidden_first_fraction} "
                f"leaves at 0 for the head; set it to 0, or {other}"
            )
        if compression.rounds and self.numerics.parameters == "half":
            raise ValueError(
                f"parallel.compression {compression.name} has nothing to compress: with numerics.parameters "
                f"half the gradients are already {self.precision}; set parallel.compression: none"
            )
        return self

    @model_validator(mode="after")
    def _finds_batch(self) -> TrainingSections:
        if not self.batch.is_found:
            return self
        micro = None if self.batch.micro_size == "auto" else self.batch.micro_size
        staged = self.parallel.strategy if self.parallel.strategy_info.staged else None
        unlike: tuple[tuple[str, object, str], ...] = (
            ("batch.micro_size", micro, "divides a step into several passes"),
            ("batch.micro_tokens", self.batch.micro_tokens, "divides a step into several passes"),
            ("parallel.strategy", staged, "divides a step into several passes"),
            ("parallel.min_workers", self.parallel.min_workers, "changes the workers between attempts"),
            ("stages", len(self.stages or ()) or None, "would each have a batch of their own"),
            ("length.steps", None if self.trains else 0, "trains nothing"),
        )
        for field, value, what in unlike:
            if value is not None:
                raise ValueError(
                    f"batch.global_size largest is what fits in one pass of training, but {field} {value} "
                    f"{what}; set batch.global_size to a number, or change {field}"
                )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainingSections:
        fewest, most = self.parallel.min_workers, self.parallel.workers
        if fewest is None:
            if (reason := self._undivided(most)) is not None:
                raise ValueError(reason)
        elif not self.worker_numbers:
            raise ValueError(
                f"no number of workers from {fewest} to {most} divides the batch: {self._undivided(most)}"
            )
        return self

    def _undivided(self, workers: int) -> str | None:
        """Returns why the global batch cannot be spread over so many workers, and what to change."""
        size, micro = self.batch.size, self.batch.micro_size
        stages = self.parallel.stage_count
        if workers % stages:
            return f"parallel.workers {workers} is not divisible by parallel.stages {stages}"
        if self.batch.is_found:
            return None
        # In a pipeline all workers of a replica see the same examples.
        replicas = workers // stages
        whom = "parallel.workers" if stages == 1 else "parallel.workers / parallel.stages ="
        if size % replicas:
            return (
                f"batch.global_size {size} is not divisible by {whom} {replicas}; "
                f"use a multiple of {replicas}, such as {math.ceil(size / replicas) * replicas}"
            )
        share = size // replicas
        if isinstance(micro, int) and share % micro:
            return (
                f"batch.micro_size {micro} does not divide a worker's share of {share} examples "
                f"(batch.global_size {size} / {whom} {replicas}); choose a divisor of {share}"
            )
        return None

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """Numbers of workers that an attempt may have, largest first: divisors of the global batch."""
        most = self.parallel.workers
        fewest = self.parallel.min_workers or most
        return tuple(number for number in range(most, fewest - 1, -1) if self._undivided(number) is None)

    @model_validator(mode="after")
    def _fits_a_pipeline(self) -> TrainingSections:
        if not self.parallel.strategy_info.staged:
            return self
        known = LAYERS.get(self.model.name)
        if known is not None:
            require_layers(self.parallel, known, f"model.name {self.model.name}")
        elif self.model.layers is not None:
            require_layers(self.parallel, len(self.model.layers), "model.layers")
        if self.batch.micro_tokens is not None:
            raise ValueError(
                f"batch.micro_tokens {self.batch.micro_tokens} gives each step another number of "
                "micro-batches, but a pipeline's schedule has one; set batch.micro_size, or another "
                "parallel.strategy"
            )
        if self.model.compile:
            raise ValueError(
                "model.compile needs a whole encoder, which no pipeline stage has; "
                "set model.compile: false or another parallel.strategy"
            )
        if self.parallel.partition == "time" and self.deterministic:
            raise ValueError(
                "parallel.partition time divides layers by measured times, which differ between attempts; "
                "set parallel.partition: uniform, or deterministic: false"
            )
        if self.parallel.engine == "deepspeed" and self.numerics.parameters == "half":
            raise ValueError(
                "numerics.parameters half does not work with engine deepspeed, which would keep its own "
                "masters; set numerics.parameters: fp32 or parallel.engine: torch"
            )
        if self.model.teacher is not None:
            for field in ("hidden_weight", "embedding_weight", "relation_weight", "cosine_weight"):
                if getattr(self.distillation, field):
                    raise ValueError(
                        f"distillation.{field} compares inner layers, but the pipeline stage that has the "
                        f"teacher sees only logits; set distillation.{field}: 0 or "
                        "another parallel.strategy"
                    )
        return self

    @property
    def share(self) -> int:
        """Examples of a step on one replica (elastic: at the most workers)."""
        return max(1, self.batch.size // (self.worker_numbers[0] // self.parallel.stage_count))

    @property
    def micro_size(self) -> int:
        """Examples per forward-backward on one worker, `auto` resolved (elastic: at the most workers).

        In a pipeline `auto` makes at least `MICRO_BATCHES_PER_STAGE` micro-batches for each stage, where the
        share allows it. With `micro_tokens` it is what fits when all are as long as `task.max_length`.
        """
        if self.batch.micro_size != "auto":
            return int(self.batch.micro_size)
        if self.batch.micro_tokens is not None:
            return min(self.share, max(1, self.batch.micro_tokens // self.task.max_length))
        stages = self.parallel.stage_count
        if stages == 1:
            return self.share
        wanted = min(MICRO_BATCHES_PER_STAGE * stages, self.share)
        return self.share // next(count for count in range(wanted, self.share + 1) if self.share % count == 0)

    @property
    def accumulation(self) -> int:
        """Most forward-backward passes per optimizer update on one worker (elastic: at the most workers)."""
        return math.ceil(self.share / self.micro_size)


SHARERS = 4
"""Most runs on one device, or on the CPUs of one run, where they may share it; each pays for its part."""


class DeviceRates(Section):
    """Price, power and peaks of one device, as its entry in the catalogue has them."""

    device: Annotated[str, NameIn(DEVICE_KINDS)]
    """Kind of the device."""
    tdp_w: float = Field(gt=0.0)
    """Thermal design power of one device, in watts; the basis of modelled energy where its driver reports no
    power limit."""
    power_fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Measured mean power in training / power limit, for modelled energy; unset = 1, not measured."""
    price_usd_per_hour: float = Field(ge=0.0)
    """List price of one device, in USD per hour."""
    price_date: str
    """Date of the price, ISO 8601."""
    peak_tflops: dict[Precision, Annotated[float, Field(gt=0.0)]] | None = None
    """Published peak of one device for dense products, by precision, in TFLOP/s; the basis of MFU."""
    bandwidth_gb_s: float | None = Field(default=None, gt=0.0)
    """Published memory bandwidth of one device, in GB/s; unset = not known."""
    reported_as: tuple[str, ...] = ()
    """Names that the device's driver gives it, without the maker's; empty = not checked."""

    @property
    def kind(self) -> DeviceKind:
        return DEVICE_KINDS[self.device]

    @property
    def modelled_w(self) -> float:
        return self.tdp_w * self.power_fraction


class DevicePricing(DeviceRates):
    """What the hardware of a run costs, for the cost and energy figures."""

    hardware: str
    """Name of the hardware in the catalogue."""
    devices_per_worker: int = Field(default=1, ge=1)
    """Devices that one worker occupies: its reserved CPUs of a kind counted in CPUs, else 1."""
    shared: bool = False
    """Other runs may use the devices at the same time: their counters are not this run's alone."""

    @property
    def charged_devices(self) -> float:
        """Devices that a worker is charged for: a share of those that are shared."""
        return self.devices_per_worker / SHARERS if self.shared else self.devices_per_worker


class Workspace(Section):
    """Where a run reads and writes."""

    checkpoints: str
    """Folder, or URL in an object store, for this run's checkpoints; each attempt has a folder in it."""
    cache: str
    """Folder on the worker's node for tokenised data and copies from a store, shared by all runs."""
    cache_max_bytes: int | None = None
    """Most bytes of that folder's entries, but for those in use; unset = half of its disk."""
    prepared: str = ""
    """Folder or URL where nodes find tokens, vocabularies and teachers' logits of others; empty = none."""
    data_roots: tuple[str, ...] = ()
    """Folders, and URLs in an object store, that dataset paths may lie in."""
    model_roots: tuple[str, ...] = ()
    """Folders and URLs that model paths may lie in, and those of checkpoints that the run starts from."""
    offline: bool = False
    """Never ask the hub; a hub id must then be in the local hub cache."""


class RunConfig(TrainingSections):
    """One run, fully resolved: what `trainers.entrypoint.train` needs and nothing else."""

    seed: int = Field(ge=0, lt=2**32)
    """Seed of initialisation, data order and dropout."""
    rates: DevicePricing
    """Price and power of the hardware."""
    workspace: Workspace
    """Where the run reads and writes."""
    site: Site = Site()
    """Where its devices stand."""
    memory_gib: float | None = None
    """Host memory that a worker reserves, in GiB; unset = its CPUs' share of the host's."""

    @model_validator(mode="after")
    def _one_number_of_workers(self) -> RunConfig:
        if self.parallel.min_workers is not None:
            raise ValueError("an attempt needs a single number of workers; set parallel.workers to it")
        return self
