from __future__ import annotations

import math
from typing import Any

from pydantic import Field, ValidationError, model_validator

from trainers.config.batch import Batch, Length
from trainers.config.measurement import Checkpointing, Evaluation, Telemetry
from trainers.config.model import LAYERS, Distillation, Model
from trainers.config.numerics import Numerics, Precision
from trainers.config.optimizer import Optimizer
from trainers.config.parallel import MICRO_BATCHES_PER_STAGE, Parallel, require_layers
from trainers.config.section import Section
from trainers.config.stages import PREVIOUS_STAGE, Stages, merged
from trainers.config.task import Task
from trainers.model_kinds.encoders import ENCODERS
from trainers.optimizers import OPTIMIZERS
from trainers.parallel_kinds import COMPRESSIONS, POWERSGD, STRATEGIES


class TrainingSections(Section):
    """The sections that describe training: shared by a spec and by each resolved run."""

    task: Task
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
    batch: Batch = Batch()
    """How many examples one step sees."""
    length: Length = Length(epochs=1)
    """When training ends."""
    parallel: Parallel = Parallel()
    """How a step is spread over workers."""
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

    @model_validator(mode="after")
    def _half_parameters(self) -> TrainingSections:
        if self.numerics.parameters == "half" and self.precision not in (Precision.fp16, Precision.bf16):
            raise ValueError(
                f"numerics.parameters half needs precision fp16 or bf16, not {self.precision}; "
                "change precision, or set numerics.parameters: fp32"
            )
        return self

    @model_validator(mode="after")
    def _encoder_computes(self) -> TrainingSections:
        encoder = ENCODERS[self.model.encoder]
        if self._is_resolved:
            encoder.require_precision(self.precision)
        encoder.require_evaluation(self.numerics.evaluation)
        if self.parallel.strategy_info.staged and not encoder.pipelines:
            unstaged = " or ".join(info.name for info in STRATEGIES.values() if not info.staged)
            raise ValueError(
                f"model.encoder {encoder.name} cannot be divided into pipeline stages; set "
                f"parallel.strategy: {unstaged}, or another model.encoder"
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
        """Returns the sections of a stage (from 1) as plain values, without `stages`.

        Raises:
            ValueError: They contradict each other.
        """
        assert self.stages is not None
        own = {name: getattr(self, name) for name in TrainingSections.model_fields if name != "stages"}
        plain = {
            name: value.model_dump() if isinstance(value, Section) else value for name, value in own.items()
        }
        found = merged(plain, self.stages[number - 1], number)
        if number > 1:
            found["model"] = {**found["model"], "teacher": PREVIOUS_STAGE}
        try:
            trains = TrainingSections.model_validate(self._judged(found)).trains
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            reason = str(first["msg"]).removeprefix("Value error, ")
            raise ValueError(f"stage {number}: {where + ': ' if where else ''}{reason}") from None
        if not trains:
            raise ValueError(
                f"stage {number} has length.steps 0 and trains nothing; raise it, or remove the stage"
            )
        return found

    @property
    def _is_resolved(self) -> bool:
        return self.precision in tuple(Precision)  # A spec's may be `auto`.

    def steps_of(self, examples: int) -> int:
        """Returns the optimizer updates of a run, all stages included."""
        lengths = [stage.length for stage in self.each_stage()]
        return sum(length.total_steps(examples, self.batch.global_size) for length in lengths)

    @property
    def trains(self) -> bool:
        """Whether there are steps; a run without evaluates the model that it is given."""
        return self.length.steps != 0

    @model_validator(mode="after")
    def _evaluates(self) -> TrainingSections:
        if self.trains:
            return self
        unused = (
            ("model.teacher", self.model.teacher, None, "trains a student"),
            ("telemetry.profile_steps", self.telemetry.profile_steps, 0, "profiles training steps"),
            ("telemetry.kernel_counters", self.telemetry.kernel_counters, False, "counts training steps"),
            ("telemetry.trace_steps", self.telemetry.trace_steps, 0, "traces training steps"),
            ("parallel.partition", self.parallel.partition, None, "measures training steps"),
        )
        for field, value, without, what in unused:
            if value != without and not (field == "parallel.partition" and value != "time"):
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
    def _masters(self) -> TrainingSections:
        kind, plain = self.optimizer.masters, self.optimizer.info.plain_masters
        if kind not in (None, plain) and self.stored not in self.optimizer.info.masters[kind]:
            wanted = self.optimizer.info.masters[kind][0]
            raise ValueError(
                f"optimizer.masters {kind} completes parameters stored in {wanted}, but these are stored "
                f"in {self.stored}; set precision: {wanted} with numerics.parameters: half, "
                f"or optimizer.masters: {plain}"
            )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> TrainingSections:
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
        size, micro = self.batch.global_size, self.batch.micro_size
        stages = self.parallel.stage_count
        if workers % stages:
            return f"parallel.workers {workers} is not divisible by parallel.stages {stages}"
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
                "masters; "
                "set numerics.parameters: fp32 or parallel.engine: torch"
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
        return self.batch.global_size // (self.worker_numbers[0] // self.parallel.stage_count)

    @property
    def micro_size(self) -> int:
        """Examples per forward-backward on one worker, `auto` resolved (elastic: at the most workers).

        More micro-batches mean less waiting in a pipeline: there `auto` makes at least
        `MICRO_BATCHES_PER_STAGE` of them for each stage, where the share allows it. With `micro_tokens` it
        is the number that fits when all are as long as `task.max_length`.
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
        """Forward-backward passes per optimizer update on one worker (elastic: at the most workers).

        With `micro_tokens` there may be fewer.
        """
        return math.ceil(self.share / self.micro_size)
