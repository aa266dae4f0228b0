"""What one run trains, as frozen pydantic models.

The experiment spec (`service.spec`) is built from these sections, so a section's fields are
described once, here, with their owner. Importing this module imports neither torch nor
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from cuda_ext import storage
from trainers.availability import AVAILABLE

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]


LAYERS: Mapping[str, int] = MappingProxyType({"tiny": 2, "mini": 4, "small": 4, "medium": 8, "base": 12})
"""Encoder layers of the presets."""

MAX_LENGTH = 512
"""Tokens of the longest sequence: the positions of the published models."""

MICRO_BATCHES_PER_STAGE = 4
"""Of a pipeline whose micro-batch is `auto`: by the formula at most a fifth of a step is bubble then."""


class Section(BaseModel):
    """A closed, frozen group of fields: unknown keys and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def _available(kind: str, value: str) -> str:
    """Refuse a word of the vocabulary that this version cannot run yet.

    Raises:
        ValueError: naming the value and the choices that do run.
    """
    if value not in AVAILABLE[kind]:
        raise ValueError(
            f"'{value}' is not available in this version; choose one of: " + ", ".join(AVAILABLE[kind])
        )
    return value


class TaskName(StrEnum):
    """What is learned: data, head and metrics."""

    imdb = "imdb"
    squad_v2 = "squad_v2"
    wikiqa = "wikiqa"
    tariff = "tariff"
    mlm = "mlm"


HEADLINES: Mapping[TaskName, str] = MappingProxyType(
    {
        TaskName.imdb: "accuracy",
        TaskName.squad_v2: "f1",
        TaskName.wikiqa: "map",
        TaskName.tariff: "accuracy",
        TaskName.mlm: "validation_loss",
    }
)
"""The metric by which runs of a task are judged first; a loss is better when it is lower."""

NO_HUB_DATASET = frozenset({TaskName.tariff})
"""Tasks of which the hub has no dataset: they need a path."""


class Precision(StrEnum):
    """The number format of the forward and backward pass."""

    fp32 = "fp32"
    tf32 = "tf32"
    fp16 = "fp16"
    bf16 = "bf16"


class Strategy(StrEnum):
    """How a step is spread over workers."""

    single = "single"
    ddp = "ddp"
    pipeline = "pipeline"


class Compression(StrEnum):
    """What data-parallel workers send of their gradients."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    powersgd = "powersgd"
    onebit = "onebit"


def _usual_length(task: Mapping[str, Any]) -> int:
    return 128 if task.get("name") == TaskName.mlm else MAX_LENGTH


class Task(Section):
    """What is learned, and from which data."""

    name: TaskName
    """Task: data format, head and metrics."""
    path: str | None = Field(default=None, max_length=4096)
    """Dataset: a folder or file under a data root, or `hub:<owner>/<name>`; unset = the task's hub id."""
    max_length: int = Field(default_factory=_usual_length, ge=8, le=MAX_LENGTH)
    """Longest sequence, in tokens: texts are cut, squad_v2 makes windows; unset = 512, of mlm 128."""
    too_long: Literal["cut", "error"] | None = None
    """imdb, wikiqa and tariff only: what a text of more tokens is, cut or an error; unset = cut."""
    train_examples: int | None = Field(default=None, ge=1)
    """How many training examples (squad_v2, wikiqa: questions) to draw, balanced by label; unset = all."""
    validation_examples: int | None = Field(default=None, ge=1)
    """How many validation examples (squad_v2, wikiqa: questions) to draw, balanced by label; unset = all."""
    test: Literal["auto", "none"] = "auto"
    """auto = a test part is scored once, at the end; none = no test part: its file serves as validation."""
    test_examples: int | None = Field(default=None, ge=1)
    """How many test examples (squad_v2, wikiqa: questions) to draw, balanced by label; unset = all."""
    overlap: Literal["error", "drop", "allow"] | None = None
    """An example in two parts: error, drop from the first, or allow; unset = drop (test none: allow)."""
    validation_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the training data held out for each part that the dataset has no file for."""
    split_seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the subset and of the split; the same for all runs, so that they see the same data."""
    level: Literal[2, 4, 6, 8, 10] | None = None
    """tariff only: digits of the code that is learned; unset = 6."""
    stride: int | None = Field(default=None, ge=1, le=512)
    """squad_v2 only: tokens that neighbouring windows share; unset = 128, or a third of short windows."""
    max_answer_tokens: int | None = Field(default=None, ge=1, le=512)
    """squad_v2 only: longest answer, in tokens; unset = 30."""
    masked_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """mlm only: share of a sequence's tokens that are to be guessed; unset = 0.15."""
    whole_word: bool | None = None
    """mlm only: mask all pieces of a word together; unset = no."""

    @model_validator(mode="after")
    def _own_fields(self) -> Task:
        for field, owners in _FIELDS_OF_TASKS.items():
            if getattr(self, field) is not None and self.name not in owners:
                raise ValueError(
                    f"{field} belongs to task {', '.join(owners)}, not {self.name}; "
                    f"remove task.{field} or set task.name: {owners[0]}"
                )
        if self.test == "none" and self.test_examples is not None:
            raise ValueError(
                f"test_examples {self.test_examples} has no test part to draw from with test none; "
                "remove task.test_examples or set task.test: auto"
            )
        if self.stride is not None and self.stride > self.max_length // 2:
            raise ValueError(
                f"stride {self.stride} is more than half of max_length {self.max_length}; "
                f"lower task.stride to {self.max_length // 2} or raise task.max_length"
            )
        return self


_FIELDS_OF_TASKS = {
    "too_long": (TaskName.imdb, TaskName.wikiqa, TaskName.tariff),
    "level": (TaskName.tariff,),
    "stride": (TaskName.squad_v2,),
    "max_answer_tokens": (TaskName.squad_v2,),
    "masked_fraction": (TaskName.mlm,),
    "whole_word": (TaskName.mlm,),
}


class Model(Section):
    """The model that is trained."""

    student: Identifier | Annotated[str, Field(max_length=4096)] = "mini"
    """A preset (tiny mini small medium base), a folder under a model root, `hub:<id>`, or `run:<id>`."""
    layers: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = Field(default=None, min_length=1)
    """Of a student with weights, the layers that are kept, 0-based and in this order; unset = all."""
    teacher: str | None = Field(default=None, max_length=4096)
    """Frozen source model for distillation: a folder, `hub:<id>` or `run:<id>`; unset = no distillation."""
    encoder: Literal["huggingface", "fused", "binary"] = "huggingface"
    """Implementation of the encoder layers."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout probability of hidden states and attention, dimensionless; 0 = off."""
    compile: bool = False
    """Compile the model with torch.compile; the first steps take longer."""

    @field_validator("encoder")
    @classmethod
    def _runnable(cls, value: str) -> str:
        return _available("model.encoder", value)


class Distillation(Section):
    """What the student learns from its teacher; used when `model.teacher` is set.

    The loss of an example is `(1 - soft_weight)` x the task's loss, plus each weight x its part.
    """

    temperature: float = Field(default=2.0, gt=0.0, le=100.0)
    """Softens the distributions of teacher and student, dimensionless; 1 = as they are."""
    soft_weight: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of the divergence from the teacher's distribution; the task's own loss has the rest of 1."""
    hidden_weight: float = Field(default=0.0, ge=0.0, le=1e4)
    """Weight of the squared distance of mapped hidden states; 0 = off."""
    embedding_weight: float = Field(default=0.0, ge=0.0, le=1e4)
    """Weight of the squared distance of the embeddings' output; 0 = off."""
    relation_weight: float = Field(default=0.0, ge=0.0, le=1e4)
    """Weight of the divergence of the last mapped layer's query, key and value relations; 0 = off."""
    cosine_weight: float = Field(default=0.0, ge=0.0, le=1e4)
    """Weight of 1 - cosine of the last mapped layer's hidden states; 0 = off."""
    layer_map: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = Field(default=None, min_length=1)
    """The teacher's layer for each of the student's, 0-based; unset = evenly spread, the last to the last."""
    schedule: Literal["constant", "linear"] = "constant"
    """Weights over the run: constant, or falling linearly to 0 while the task's loss rises to 1."""
    hidden_first_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Two stages: share of the steps that first learn all but logits and task; 0 = one stage."""
    teacher_precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Number format of the teacher; auto = the fastest half precision that the device has, else fp32."""
    cache_logits: bool = True
    """Keep the teacher's logits on disk and compute each once, where the task's input never changes."""

    @model_validator(mode="after")
    def _stages(self) -> Distillation:
        inside = (self.hidden_weight, self.embedding_weight, self.relation_weight, self.cosine_weight)
        if self.hidden_first_fraction and not any(inside):
            raise ValueError(
                f"hidden_first_fraction {self.hidden_first_fraction} has nothing to learn first; set one of "
                "hidden_weight, embedding_weight, relation_weight and cosine_weight, or remove it"
            )
        return self


class OptimizerName(StrEnum):
    """The update rule."""

    adamw = "adamw"
    adan = "adan"


class Implementation(StrEnum):
    """How the update rule is executed; the result is the same to rounding."""

    auto = "auto"
    single_unfused = "single_unfused"
    multi_unfused = "multi_unfused"
    single_fused = "single_fused"
    multi_fused = "multi_fused"


DEFAULT_WARMUP = 0.1
"""Share of the steps that are warm-up where nothing is set."""


class Optimizer(Section):
    """The update rule, its hyperparameters and its schedule."""

    name: OptimizerName = OptimizerName.adamw
    """Update rule. Adan: arXiv 2208.06677, in the official code's convention of betas."""
    implementation: Implementation = Implementation.auto
    """How the step is executed; auto = the fastest that is available here."""
    learning_rate: float = Field(default=1e-4, gt=0.0, le=10.0)
    """Peak learning rate, dimensionless."""
    betas: tuple[float, ...] | None = None
    """Decay rates: two for adamw, three for adan; unset = (0.9, 0.999) or (0.98, 0.92, 0.99)."""
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    """Added to the denominator, dimensionless."""
    weight_decay: float = Field(default=0.01, ge=0.0, le=10.0)
    """Decoupled weight decay, dimensionless; 0 = off. Not applied to biases and LayerNorm."""
    no_prox: bool = False
    """Adan only: decay as in AdamW instead of the proximal form."""
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """Clip gradients to this global L2 norm; 0 = no clipping."""
    warmup_fraction: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the steps (of each stage's, with two) over which the rate rises linearly from 0; 0 = none;
    unset = 0.1, or `warmup_steps`."""
    warmup_steps: int | None = Field(default=None, ge=0, le=100_000_000)
    """The same as a number of steps; unset = `warmup_fraction`."""
    schedule: Literal["linear", "constant"] = "linear"
    """After the warm-up: linear decay to 0, or constant."""
    masters: Literal["fp32", "split"] = "fp32"
    """What completes half parameters to fp32: a copy, or (adan, bf16) the lower 16 bits alone."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Format that the moments m and v are kept in; bf16 is for adan only, whose n stays fp32."""

    @model_validator(mode="after")
    def _consistent(self) -> Optimizer:
        _available(f"optimizer.implementation[{self.name}]", self.implementation)
        for field in ("masters", "moments"):
            self._require_served(field)
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and warmup_fraction {self.warmup_fraction:g} are both "
                "set; remove one"
            )
        wanted = 2 if self.name is OptimizerName.adamw else 3
        if self.betas is not None:
            if len(self.betas) != wanted:
                raise ValueError(
                    f"betas has {len(self.betas)} values, but {self.name} takes {wanted}; "
                    "change optimizer.betas or optimizer.name"
                )
            for beta in self.betas:
                if not 0.0 <= beta < 1.0:
                    raise ValueError(f"beta {beta} is outside [0, 1); change optimizer.betas")
        if self.no_prox and self.name is not OptimizerName.adan:
            raise ValueError(
                f"no_prox belongs to adan, not {self.name}; "
                "remove optimizer.no_prox or set optimizer.name: adan"
            )
        return self

    def _require_served(self, field: str) -> None:
        """Refuse a way of storing things that the update rule does not have."""
        value = str(getattr(self, field))
        served = AVAILABLE[f"optimizer.{field}[{self.name}]"]
        if value not in served:
            owners = [name for name in OptimizerName if value in AVAILABLE[f"optimizer.{field}[{name}]"]]
            raise ValueError(
                f"{field} {value} belongs to {', '.join(owners)}, not {self.name}; "
                f"set optimizer.name: {owners[0]} or optimizer.{field}: {served[0]}"
            )

    def warmup_of(self, total_steps: int) -> int:
        """Steps of warm-up in a run, or a stage, of so many steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        fraction = DEFAULT_WARMUP if self.warmup_fraction is None else self.warmup_fraction
        return math.ceil(fraction * total_steps)


class Batch(Section):
    """How many examples one step sees."""

    global_size: int = Field(default=16, ge=1, le=65536)
    """Examples per optimizer update, over all workers and accumulation steps."""
    micro_size: int | Literal["auto"] = "auto"
    """Examples per forward-backward on one worker; auto = the worker's whole share of the global batch."""
    base_size: int = Field(default=1, ge=1, le=65536)
    """Batch that statistical efficiency is relative to, in examples; 1 = relative to single examples."""

    @field_validator("micro_size")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 65536:
            raise ValueError(f"{value} is outside [1, 65536]; give a size or 'auto'")
        return value


class Length(Section):
    """When training ends: exactly one of the two."""

    epochs: float | None = Field(default=None, gt=0.0, le=10_000)
    """Passes over the training data."""
    steps: int | None = Field(default=None, ge=0, le=100_000_000)
    """Optimizer updates; 0 = no training: the model is evaluated as it is given."""

    @model_validator(mode="after")
    def _one_of(self) -> Length:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps")
        return self

    def total_steps(self, examples: int, global_size: int) -> int:
        """Optimizer updates for a dataset of `examples`, dropping no example of an epoch."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * math.ceil(examples / global_size)))


MAX_WORKERS = 4096

_NUMBER = {"type": "integer", "minimum": 1, "maximum": MAX_WORKERS}
_NUMBER_OR_RANGE = {
    "anyOf": [
        _NUMBER,
        {
            "type": "object",
            "properties": {"min": _NUMBER, "max": _NUMBER},
            "required": ["min", "max"],
            "additionalProperties": False,
        },
    ]
}


class Parallel(Section):
    """How a step is spread over workers."""

    strategy: Strategy = Strategy.single
    """single = one worker; ddp = replicas that average gradients; pipeline = layers in stages."""
    workers: Annotated[int, WithJsonSchema(_NUMBER_OR_RANGE)] = Field(default=1, ge=1, le=MAX_WORKERS)
    """Worker processes (one device each); `{min: 1, max: 4}` = the most that have room at each attempt."""
    min_workers: int | None = Field(default=None, ge=1, le=MAX_WORKERS)
    """Fewest workers of an elastic run, the `min` of `workers`; unset = always exactly `workers`."""
    activation_checkpointing: bool = False
    """Keep only the input of each encoder layer for the backward pass, which computes the rest again."""
    bucket_mib: int = Field(default=25, ge=1, le=4096)
    """ddp only: gradients that are sent together, in MiB; smaller begin earlier, larger waste less."""
    compression: Compression = Compression.none
    """ddp only: what workers send of their gradients; onebit is 1-bit Adan and needs optimizer adan."""
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
                f"workers has {shown}; a range has min and max, such as workers: {{min: 1, max: 4}}"
            )
        if "min_workers" in fields:
            raise ValueError("workers is a range and min_workers is set too; remove min_workers")
        for name, value in workers.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WORKERS:
                raise ValueError(f"workers.{name} is {value!r}; give a whole number from 1 to {MAX_WORKERS}")
        return {**fields, "workers": workers["max"], "min_workers": workers["min"]}

    @model_validator(mode="after")
    def _consistent(self) -> Parallel:
        if self.strategy is Strategy.single and self.workers != 1:
            raise ValueError(
                f"strategy single has one worker, not {self.workers}; "
                "set parallel.strategy: ddp or parallel.workers: 1 (where strategy is an axis, make workers "
                "one too, with search.when: {parallel.workers: {parallel.strategy: [ddp]}})"
            )
        if self.compression is not Compression.none and self.strategy is not Strategy.ddp:
            raise ValueError(
                f"compression {self.compression} belongs to strategy ddp, not {self.strategy}; "
                "remove parallel.compression or set parallel.strategy: ddp"
            )
        if self.min_workers is not None:
            if self.strategy is Strategy.single:
                raise ValueError("strategy single has one worker, not a range; set parallel.strategy: ddp")
            if self.min_workers > self.workers:
                raise ValueError(
                    f"the fewest workers, {self.min_workers}, are more than the most, {self.workers}; "
                    "lower min or raise max of parallel.workers"
                )
        return self

    @model_validator(mode="after")
    def _pipeline(self) -> Parallel:
        if self.strategy is not Strategy.pipeline:
            for field in ("stages", "engine", "schedule", "partition"):
                if getattr(self, field) is not None:
                    raise ValueError(
                        f"{field} belongs to strategy pipeline, not {self.strategy}; "
                        f"remove parallel.{field} or set parallel.strategy: pipeline"
                    )
            return self
        if self.workers < 2:
            raise ValueError(
                "strategy pipeline needs at least 2 workers, one for each stage; "
                "raise parallel.workers or set parallel.strategy: single"
            )
        if self.workers % self.stage_count:
            raise ValueError(
                f"workers {self.workers} does not divide by stages {self.stage_count}; "
                f"set parallel.workers to a multiple of {self.stage_count}"
            )
        if self.min_workers is not None and self.stages is None:
            raise ValueError(
                "a pipeline with a range of workers needs its number of stages; "
                "set parallel.stages, or a single number in parallel.workers"
            )
        if self.engine == "deepspeed" and self.schedule not in (None, "1f1b"):
            raise ValueError(
                f"engine deepspeed has the schedule 1f1b alone, not {self.schedule}; "
                "remove parallel.schedule or set parallel.engine: torch"
            )
        return self

    @property
    def stage_count(self) -> int:
        """Workers that share one model's layers; 1 = each worker has all of them."""
        if self.strategy is not Strategy.pipeline:
            return 1
        return self.workers if self.stages is None else self.stages

    @property
    def replicas(self) -> int:
        """Copies of the model, which share the examples of a step."""
        return self.workers // self.stage_count

    @property
    def pieces(self) -> int:
        """Parts that a model's layers are cut into; a worker has several in some schedules."""
        return self.stage_count * (2 if self.schedule in ("interleaved", "zero_bubble") else 1)


class Evaluation(Section):
    """When the model is evaluated; never inside the timed region."""

    every_epochs: float = Field(default=1.0, gt=0.0, le=10_000)
    """Evaluate each time this many epochs have passed, and at the end."""
    batch_size: int = Field(default=64, ge=1, le=65536)
    """Examples per forward pass on one worker."""


class Checkpointing(Section):
    """What a killed run loses at most."""

    every_steps: int | None = Field(default=None, ge=1)
    """Write a checkpoint each time this many steps have passed; unset = by time alone."""
    every_s: float = Field(default=30.0, ge=0.0)
    """Write a checkpoint when this many seconds have passed since the last; 0 = by steps alone."""
    keep: int = Field(default=2, ge=1, le=100)
    """How many of the newest checkpoints stay on disk."""


class Numerics(Section):
    """Half precision in detail, and what to do when numbers are not finite."""

    parameters: Literal["fp32", "half"] = "fp32"
    """half = parameters and gradients in the format of `precision`, with the optimizer's fp32 masters."""
    evaluation: Literal["same", "fp32", "half", "fp16", "bf16"] = "same"
    """Number format of evaluation; same = as in training, half (the training's), fp16, bf16 = weights and
    arithmetic in it."""
    initial_loss_scale: float = Field(default=65536.0, ge=1.0, le=2.0**24)
    """fp16 only: loss scale at the first step, dimensionless."""
    loss_scale_growth_steps: int = Field(default=2000, ge=1, le=1_000_000)
    """fp16 only: steps without overflow after which the scale doubles; an overflow halves it."""
    not_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """When loss or gradients are not finite: end the run, skip the step, or resume from a checkpoint."""
    not_finite_limit: int = Field(default=20, ge=1, le=10_000)
    """Steps in a row (skip) or times in all (roll_back) after which the run ends all the same."""


class Telemetry(Section):
    """What is measured beside the training."""

    sample_every_s: float = Field(default=0.5, ge=0.0, le=60.0)
    """Pause between samples of power, utilisation and memory, in seconds; 0 = off."""
    profile_steps: int = Field(default=0, ge=0, le=100)
    """Steps of a profiled window (kernels, launches, occupancy), outside the timed region; 0 = off."""
    trace_steps: int = Field(default=0, ge=0, le=1000)
    """Steps of which every worker's phases are kept as a timeline, after the first ones; 0 = off."""
    gradient_noise: bool = True
    """Estimate the gradient noise scale, and with it statistical efficiency and goodput."""


def require_layers(parallel: Parallel, layers: int, whose: str) -> None:
    """Refuse a pipeline with more stages than there are layers to deal out.

    Raises:
        ValueError: naming the fields to change.
    """
    if parallel.pieces <= layers:
        return
    pieces = "" if parallel.pieces == parallel.stage_count else f" of {parallel.pieces} pieces"
    raise ValueError(
        f"{parallel.stage_count} stages{pieces} need at least {parallel.pieces} layers, and {whose} has "
        f"{layers}; lower parallel.stages, or parallel.workers where that is unset"
        + (", or set parallel.schedule: 1f1b" if pieces else "")
    )


def require_layer_map(layer_map: Sequence[int], student_layers: int) -> None:
    """Refuse a layer map that is not as long as the student is deep.

    Raises:
        ValueError: with both numbers.
    """
    if len(layer_map) != student_layers:
        raise ValueError(
            f"distillation.layer_map has {len(layer_map)} layers, and the student {student_layers}; "
            "give one of the teacher's layers for each of the student's, or remove it"
        )


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
    """What is measured beside the training."""
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

    @property
    def trains(self) -> bool:
        """Whether there are steps; a run without evaluates the model that it is given."""
        return self.length.steps != 0

    @model_validator(mode="after")
    def _evaluates(self) -> TrainingSections:
        if self.trains:
            return self
        unused = (
            ("model.teacher", self.model.teacher, None, "is what a student learns from"),
            ("telemetry.profile_steps", self.telemetry.profile_steps, 0, "profiles steps of training"),
            ("telemetry.trace_steps", self.telemetry.trace_steps, 0, "traces steps of training"),
            ("parallel.partition", self.parallel.partition, None, "divides by time in training"),
        )
        for field, value, without, what in unused:
            if value != without and not (field == "parallel.partition" and value != "time"):
                raise ValueError(
                    f"length.steps 0 trains nothing, and {field} {value} {what}; remove {field}, "
                    "or raise length.steps"
                )
        return self

    @property
    def stored(self) -> str:
        """Format that parameters and gradients are stored in."""
        return self.precision.value if self.numerics.parameters == "half" else Precision.fp32.value

    @model_validator(mode="after")
    def _masters(self) -> TrainingSections:
        kind, default = self.optimizer.masters, Optimizer.model_fields["masters"].default
        if kind != default and self.stored not in storage.MASTERS[kind]:
            wanted = storage.MASTERS[kind][0]
            raise ValueError(
                f"optimizer.masters {kind} completes parameters stored in {wanted}, and these are stored in "
                f"{self.stored}; set precision: {wanted} with numerics.parameters: half, "
                f"or optimizer.masters: {default}"
            )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> TrainingSections:
        warmup, steps = self.optimizer.warmup_steps, self.length.steps
        if warmup is not None and steps and warmup >= steps:
            raise ValueError(
                f"optimizer.warmup_steps {warmup} leaves none of the {steps} steps of length.steps; "
                f"lower it below {steps}, or raise length.steps"
            )
        return self

    @model_validator(mode="after")
    def _compressible(self) -> TrainingSections:
        compression = self.parallel.compression
        if compression is Compression.onebit and self.optimizer.name is not OptimizerName.adan:
            raise ValueError(
                f"parallel.compression onebit is 1-bit Adan and needs optimizer.name adan, not "
                f"{self.optimizer.name}; set optimizer.name: adan, or parallel.compression: powersgd"
            )
        if compression is Compression.onebit and self.distillation.hidden_first_fraction:
            raise ValueError(
                "parallel.compression onebit freezes second moments that distillation.hidden_first_fraction "
                f"{self.distillation.hidden_first_fraction} leaves at 0 for the head; set it to 0, or "
                "parallel.compression: powersgd"
            )
        halves = (Compression.fp16, Compression.bf16)
        if compression in halves and self.numerics.parameters == "half":
            raise ValueError(
                f"parallel.compression {compression} has nothing to compress: with numerics.parameters half "
                f"gradients are {self.precision} already; set parallel.compression: none"
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
        """Why the global batch cannot be spread over so many workers, and what to change."""
        size, micro = self.batch.global_size, self.batch.micro_size
        stages = self.parallel.stage_count
        if workers % stages:
            return f"parallel.workers {workers} does not divide by parallel.stages {stages}"
        # In a pipeline all workers of a replica see the same examples.
        replicas = workers // stages
        whom = "parallel.workers" if stages == 1 else "parallel.workers / parallel.stages ="
        if size % replicas:
            return (
                f"batch.global_size {size} does not divide by {whom} {replicas}; "
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
        """How many workers an attempt may have, the most first: those that the global batch divides by."""
        most = self.parallel.workers
        fewest = self.parallel.min_workers or most
        return tuple(number for number in range(most, fewest - 1, -1) if self._undivided(number) is None)

    @model_validator(mode="after")
    def _fits_a_pipeline(self) -> TrainingSections:
        if self.parallel.strategy is not Strategy.pipeline:
            return self
        known = LAYERS.get(self.model.student)
        if known is not None:
            require_layers(self.parallel, known, f"model.student {self.model.student}")
        elif self.model.layers is not None:
            require_layers(self.parallel, len(self.model.layers), "model.layers")
        if self.model.compile:
            raise ValueError(
                "model.compile compiles a whole encoder, and no stage of a pipeline has one; "
                "set model.compile: false or another parallel.strategy"
            )
        if self.parallel.partition == "time" and self.deterministic:
            raise ValueError(
                "parallel.partition time divides layers by a measurement, which no attempt repeats; "
                "set parallel.partition: uniform, or deterministic: false"
            )
        if self.parallel.engine == "deepspeed" and self.numerics.parameters == "half":
            raise ValueError(
                "numerics.parameters half is not for engine deepspeed, which would keep masters of its own; "
                "set numerics.parameters: fp32 or parallel.engine: torch"
            )
        if self.model.teacher is not None:
            for field in ("hidden_weight", "embedding_weight", "relation_weight", "cosine_weight"):
                if getattr(self.distillation, field):
                    raise ValueError(
                        f"distillation.{field} compares layers inside the model, and the stage of a pipeline "
                        f"that has the teacher sees logits alone; set distillation.{field}: 0 or "
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

        A pipeline's stages wait for each other the less the more micro-batches a step has: there
        `auto` makes at least `MICRO_BATCHES_PER_STAGE` of them for each stage, where the share allows it.
        """
        if self.batch.micro_size != "auto":
            return int(self.batch.micro_size)
        stages = self.parallel.stage_count
        if stages == 1:
            return self.share
        wanted = min(MICRO_BATCHES_PER_STAGE * stages, self.share)
        return self.share // next(count for count in range(wanted, self.share + 1) if self.share % count == 0)

    @property
    def accumulation(self) -> int:
        """Forward-backward passes per optimizer update on one worker (elastic: at the most workers)."""
        return self.share // self.micro_size


class Rates(Section):
    """What the hardware of a run costs, for the cost and energy figures."""

    hardware: str
    """Name of the hardware in the catalogue."""
    device: Literal["cpu", "cuda"]
    """Torch device type that a worker uses."""
    price_usd_per_hour: float = Field(ge=0.0)
    """Price of one device, in USD per hour."""
    price_date: str
    """Date of the price, ISO 8601."""
    tdp_w: float = Field(gt=0.0)
    """Thermal design power of one device, in watts; the basis of modelled energy where its driver reports no
    power limit."""
    devices_per_worker: int = Field(default=1, ge=1)
    """Devices that one worker occupies: its reserved CPUs on `cpu`, else 1."""
    shared: bool = False
    """Other runs may use the devices at the same time: their counters are not this run's alone."""
    peak_tflops: dict[Precision, Annotated[float, Field(gt=0.0)]] | None = None
    """Published peak of one device for dense products, by precision, in TFLOP/s; the basis of MFU."""
    bandwidth_gb_s: float | None = Field(default=None, gt=0.0)
    """Published memory bandwidth of one device, in GB/s; unset = not known."""
    reported_as: tuple[str, ...] = ()
    """Names that the device's driver gives it, without the maker's; empty = not checked."""


class Workspace(Section):
    """Where a run reads and writes on the worker's file system."""

    checkpoints: str
    """Folder for this run's checkpoints, shared by all attempts and workers of the run."""
    cache: str
    """Folder for tokenised data, shared by all runs."""
    data_roots: tuple[str, ...] = ()
    """Folders that dataset paths may lie in."""
    model_roots: tuple[str, ...] = ()
    """Folders that model paths may lie in."""
    offline: bool = False
    """Never ask the hub; a hub id must then be in the local hub cache."""


class RunConfig(TrainingSections):
    """One run, fully resolved: what `trainers.entrypoint.train` needs and nothing else."""

    seed: int = Field(ge=0, lt=2**32)
    """Seed of initialisation, data order and dropout."""
    rates: Rates
    """Price and power of the hardware."""
    workspace: Workspace
    """Where the run reads and writes."""

    @model_validator(mode="after")
    def _one_number_of_workers(self) -> RunConfig:
        if self.parallel.min_workers is not None:
            raise ValueError("an attempt has one number of workers; set parallel.workers to it")
        return self
