"""Builds a run's parts in the order that they depend on each other."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from trainers import distillation
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.store import CheckpointStore
from trainers.config import RunConfig
from trainers.data import storage
from trainers.data.batches import TrainingBatches, collate, epoch_order
from trainers.data.cache import counted_by, preparing
from trainers.data.segments import up_to_multiple
from trainers.data.storage import Place
from trainers.dry_runs import micro_batch
from trainers.dry_runs.micro_batch import BatchSearch, DryRun, StageDryRun
from trainers.errors import BadSpecError
from trainers.loop import snapshot
from trainers.loop.evaluation import Evaluator, FinalTest
from trainers.loop.progress import Progress
from trainers.loop.run_figures import RunFigures
from trainers.loop.run_parts import RunData, RunParts, RunTelemetry, TrainedModel
from trainers.loop.run_worker import RunWorker
from trainers.loop.snapshot import ModelState
from trainers.loop.stages import EndedStage
from trainers.loop.trainer import Trainer
from trainers.model_kinds.encoders import Quantisation
from trainers.model_kinds.families import Attention
from trainers.models import dropout, origin, parity, student
from trainers.models.fit import student_misfits
from trainers.models.latent import Latent
from trainers.models.parity import EncoderParity
from trainers.models.precision import HalfEmbedding
from trainers.parallel import partition_stages
from trainers.parallel.replica import Replica, Setup
from trainers.process import seed_all
from trainers.reporting import Fence, RunHistory, Sink, Stop
from trainers.tasks.base import build, trained_as
from trainers.telemetry.facts import environment_facts, write_patch
from trainers.telemetry.flops import flop_count_of
from trainers.telemetry.gradient_noise import GradientNoise, source_for
from trainers.telemetry.heartbeat import Heartbeat, HeartbeatFile
from trainers.telemetry.histograms import Histograms
from trainers.telemetry.instruments import Instruments, overhead_meter
from trainers.telemetry.profiling import StepProfiler
from trainers.telemetry.timeline import Phase
from trainers.telemetry.tracing import tracer_for
from trainers.telemetry.usage import RunUsage
from trainers.update import Update, idle, loss_scale_for
from trainers.update import build as build_optimizer

_CALIBRATED = 16  # Examples that learned scales begin from


def assemble(
    config: RunConfig,
    sink: Sink,
    stop: Stop,
    *,
    history: RunHistory,
    began_s: float,
    instruments: Instruments,
    fence: Fence | None = None,
    before: EndedStage | None = None,
    last: bool = True,
) -> Trainer:
    """Returns a trainer at the run's newest checkpoint, or at its beginning.

    The worker's part began at `began_s` of `time.perf_counter()`. `before` is the previous stage, if there
    is one; the run ends with the `last`.
    """
    worker = RunWorker(config, sink, began_s, instruments)
    timeline = worker.timeline
    folder, scratch = storage.place(config.workspace.checkpoints), Path(config.workspace.cache)
    checkpoints = CheckpointStore(folder, config.checkpoint.keep, fence, scratch)
    heartbeat = Heartbeat(history.opened_s, history.lives)
    if worker.workers.rank == 0 and isinstance(folder, Path):
        heartbeat = HeartbeatFile(folder, history.opened_s)
    instruments.attach(worker.device, alive=heartbeat.beat)
    timeline.boundary = overhead_meter(instruments, worker.sink)
    timeline.enter(Phase.setup)
    with counted_by(lambda: timeline.within(Phase.preparation)):
        trainer = RunBuilder(worker, checkpoints, before, last=last).build(stop, heartbeat, history)
        with timeline.within(Phase.warm_up):
            worker.workers.all_gather(None)  # begin together
            if worker.workers.rank == 0 and not trainer.saving.nothing_saved:
                checkpoints.prune(trainer.progress.step)  # What a killed attempt did not come to
            instruments.prepared()
    return trainer


class RunBuilder:
    """Builds the parts of one attempt; `build` lists the phases, each of which needs those before it."""

    def __init__(
        self, worker: RunWorker, checkpoints: CheckpointStore, before: EndedStage | None, *, last: bool
    ) -> None:
        self.worker, self.checkpoints, self.before, self.last = worker, checkpoints, before, last
        # As given; with a resolved micro-batch size after `choose_micro_batch`.
        self.config = worker.config

    def build(self, stop: Stop, heartbeat: Heartbeat, history: RunHistory) -> Trainer:
        self.find_checkpoint(history)
        self.prepare_data()
        self.build_model()
        self.install_encoder()
        self.add_teacher_and_optimizer()
        self.choose_micro_batch()
        self.gather_data()
        self.restore(heartbeat, history)
        self.replicate()
        self.report_start()
        self.seed()
        return self.finish(stop)

    def find_checkpoint(self, history: RunHistory) -> None:
        workers = self.worker.workers
        # Rank 0 verifies and decides, so that all workers resume from the same checkpoint.
        newest = None
        if workers.rank == 0:
            # Those of an earlier stage are in another folder.
            known = history.checkpoint_step if self.before is None else None
            newest = self.checkpoints.newest(self.worker.warn, on_record=known)
        self.newest: Place | None = workers.broadcast(newest)
        if self.newest is not None:
            self.worker.timeline.resume()

    def prepare_data(self) -> None:
        config, worker = self.config, self.worker
        worker.warn_of_other_device()
        self.task = build(config.task.name, worker.encoder.cross_entropy)
        worker.sink.progress(step=0, total_steps=0, phase="preparing")
        place = self.origin = origin.locate(config.model.name, config.workspace)
        fields = place.config(origin.VOCABULARY_SIZE)
        for misfit in student_misfits(config, str(place), place.family, fields):
            raise BadSpecError(misfit.reason)
        tokenizer = distillation.tokenizer_origin(config, place)
        self.prepared = self.task.prepare(config, tokenizer, worker.log)
        if not self.last:
            self.prepared = replace(self.prepared, test_units=None)
        limit, longest = config.batch.micro_tokens, int(self.prepared.train.lengths.max(initial=0))
        if limit is not None and config.trains and longest > limit:
            raise BadSpecError(
                f"batch.micro_tokens {limit} is below the longest training example of {longest} tokens; "
                f"raise it to at least {longest}, or lower task.max_length"
            )

    def build_model(self) -> None:
        config, prepared = self.config, self.prepared
        self.student = student.build(
            self.origin,
            head=prepared.head,
            vocabulary_size=prepared.vocabulary_size,
            dropout=config.model.dropout,
            max_length=config.task.max_length,
            pad_id=prepared.pad_id,
            layers=config.model.layers,
            attention_dropout=config.model.attention_dropout,
        )
        if (quantisation := self.worker.encoder.quantisation) is not None:
            self.student = quantisation.prepared(self.student, config.model.binary)

    def install_encoder(self) -> None:
        """Puts the student on the worker's device, with the encoder of the run."""
        config, worker, model = self.config, self.worker, self.student
        if worker.encoder.packs and not (config.trains and config.model.drops_attention):
            config.rates.kind.backend.attend_without_dropout(worker.device)
        self.parity = self._parity()
        worker.encoder.install(model.model)
        quantisation = worker.encoder.quantisation
        if quantisation is not None and quantisation.awaits_data(model):
            self._calibrate(quantisation)
        if config.numerics.embeddings == "fp16":
            model.encoder.get_input_embeddings().__class__ = HalfEmbedding
        if not config.trains:
            # Before the model reaches the device, which never holds weights in another format.
            worker.arithmetic.prepare(model)
            worker.inference.keep(model)
        model.to(worker.device)
        if config.parallel.activation_checkpointing:
            model.checkpoint_activations()
        if config.model.compile:
            model.compile_layers()
        elif config.rates.kind.host_dropout and worker.encoder.host_dropout:
            dropout.install(model, attention=model.architecture.family.attention is Attention.full)
        if config.trains:
            worker.arithmetic.prepare(model)
        model.freeze(config.model.frozen)

    def _calibrate(self, quantisation: Quantisation) -> None:
        """Sets learned scales without a value from the run's first examples.

        On the CPU, before the model has a number format of its own; the result is the same on all workers.
        """
        config, worker, prepared, model = self.config, self.worker, self.prepared, self.student
        rows = epoch_order(prepared.train.lengths, config.seed, 0, config.batch.size)
        batch = collate(prepared.train, rows[: min(_CALIBRATED, len(rows))], prepared.pad_id, worker.multiple)
        transform = worker.laid_out(prepared.transform, prepared, len(batch.rows))
        if transform is not None:
            batch = transform(batch, seed=config.seed, epoch=0)
        with preparing(), quantisation.calibrating(model):
            model(batch)

    def _parity(self) -> EncoderParity | None:
        """Compares an encoder that packs with the default one, on rank 0; None = not compared."""
        config, worker, prepared = self.config, self.worker, self.prepared
        if not (worker.encoder.packs and config.trains and worker.workers.rank == 0):
            return None
        batch = parity.compared(prepared.train, prepared.pad_id, worker.multiple)
        transform = worker.laid_out(prepared.transform, prepared, len(batch.rows))
        assert transform is not None
        with preparing():
            record = parity.measure(
                self.student,
                lambda student: worker.encoder.install(student.model),
                transform(batch, seed=config.seed, epoch=0).to(worker.device),
                self.task.loss,
                encoder=worker.encoder.name,
                arithmetic=worker.arithmetic,
                reference_loss=build(config.task.name).loss,
            )
        if not record.passed:
            worker.warn(
                f"model.encoder {record.encoder} differs from the default by more than rounding explains: "
                f"hidden states {record.hidden_max_abs:.1e} ({record.hidden_rounding:.1e}), gradients "
                f"{record.gradient_max_rel:.1e} ({record.gradient_rounding:.1e}), gradients of dropped "
                f"attention {record.dropout_mismatch or 0.0:.1e} (of 1 with other masks); use another "
                "model.encoder"
            )
        return record

    def add_teacher_and_optimizer(self) -> None:
        config, worker = self.config, self.worker
        self.parameters = self.student.parameter_count
        # From here on the model has this worker's layers alone, and so has its optimizer.
        with preparing():  # layers may be timed
            self.partition = partition_stages(
                config, self.student, worker.workers, worker.device, worker.arithmetic
            )
        self.distilled = distillation.set_up(
            config,
            trained_as(config.task, worker.encoder.cross_entropy),
            self.prepared,
            self.student,
            device=worker.device,
            arithmetic=worker.arithmetic,
            multiple=worker.multiple,
            computes_loss=self.partition is None or self.partition.computes_loss,
            report=worker.log,
            warn=worker.warn,
        )
        module = self.distilled.module
        with preparing():  # its kernels may be built, and are checked
            self.built = (
                build_optimizer(config.optimizer, module, self.student.layers_above)
                if config.trains
                else idle(module)
            )
        if self.built.fallback is not None:
            worker.warn(
                f"optimizer.implementation: {self.built.implementation} runs, because {self.built.fallback}"
            )
        self.state = ModelState(
            self.student, self.distilled.projections, self.built.optimizer, self.built.names
        )

    def choose_micro_batch(self) -> None:
        """Resolves the micro-batch size, compiles for it and warms up."""
        config, worker, device = self.config, self.worker, self.worker.device
        self.forget_micro_size: Callable[[], None] = lambda: None
        if not config.trains:
            self.config = micro_batch.with_size(config, config.micro_size)
            return
        described = self.student.model.config.to_dict()
        kind: Callable[..., DryRun] = DryRun
        if self.partition is not None:
            kind = partial(
                StageDryRun,
                partition=self.partition,
                stage=worker.workers.stage,
                width=self.student.shape.hidden,
            )
        dry_run = kind(
            config,
            self.distilled.module,
            self.distilled.objective,
            worker.arithmetic,
            self.prepared.train,
            device=device,
            pad_id=self.prepared.pad_id,
            multiple=worker.multiple,
            transform=worker.laid_out(self.distilled.transform, self.prepared, config.micro_size),
        )
        described = {**described, "longest example": dry_run.longest}
        if config.batch.is_found:
            search = BatchSearch(config, worker.workers, device, described, worker.instruments.peak_within)
            self.config = search.found(dry_run.at_size, len(self.prepared.train))
            size, self.forget_micro_size = self.config.micro_size, search.forget
            worker.log(f"batch.global_size largest: {self.config.batch.size} examples")
        else:
            size = micro_batch.choose(config, worker.workers, device, described, dry_run.at_size)
            width = up_to_multiple(dry_run.longest, worker.multiple)
            self.config = micro_batch.in_tokens(config, size, device, width)
            self.forget_micro_size = partial(micro_batch.forget, config, device, described)
        if config.model.compile:
            try:
                with preparing():
                    dry_run.compile(size)
            except torch.OutOfMemoryError:
                self.forget_micro_size()
                raise
        key = micro_batch.key_of(self.config, device, {**described, "micro size": size})
        micro_batch.warm_up_once(key, worker.workers, worker.timeline, lambda: dry_run.rehearse(size))

    def gather_data(self) -> None:
        config, worker, prepared = self.config, self.worker, self.prepared
        identity = {**prepared.identity, **self.distilled.identity}
        final_test = None
        if prepared.test_units is not None:
            final_test = FinalTest(self.task, prepared, worker, self.checkpoints, identity)
        batches = TrainingBatches(
            prepared.train,
            seed=config.seed,
            global_size=config.batch.size,
            micro_size=config.micro_size,
            replica=worker.workers.replica,
            replicas=worker.workers.replicas,
            pad_id=prepared.pad_id,
            multiple=worker.multiple,
            transform=worker.trained_as(self.distilled.transform, prepared, config),
            micro_tokens=config.batch.micro_tokens,
            packs=worker.encoder.packs,
        )
        self.data = RunData(
            self.task,
            batches,
            Evaluator(self.task, prepared, worker),
            final_test,
            prepared.tokenizer,
            identity,
        )
        self.total_steps = config.length.total_steps(len(prepared.train), config.batch.size)

    def restore(self, heartbeat: Heartbeat, history: RunHistory) -> None:
        """Restores model, optimizer, counters and timeline, but no generators; finds what was lost since."""
        timeline, before = self.worker.timeline, self.before
        self.progress, self.kept_until_s = Progress(), None if before is None else before.ended_s
        self.saved = None if self.newest is None else self.checkpoints.load(self.newest)
        if self.saved is not None:
            self.progress = snapshot.restore(self.saved, self.state, self.data.identity)
            self.kept_until_s = float(self.saved.state["taken_s"])
            timeline.carry_over(self.saved.state["spent_s"])
        elif before is not None:
            self.progress = replace(self.progress, **before.counters)
            self.progress.usage = RunUsage(**before.usage)
            timeline.carry_over(before.spent_s)
        self._restore_best()
        lost = heartbeat.look_back(kept_until_s=self.kept_until_s, submitted_s=history.submitted_s)
        timeline.carry_over({Phase.lost_since_checkpoint: lost.lost_s})
        self.progress.usage.queue_s += lost.queue_s

    def _restore_best(self) -> None:
        progress, workers, marked = self.progress, self.worker.workers, False
        if workers.rank == 0:
            if progress.best is not None:
                best = CheckpointId(progress.best_attempt, progress.best_step)
                marked = self.checkpoints.mark_best(best, self.task.info.headline, progress.best)
            if not marked:
                self.checkpoints.forget_best()
        if not workers.broadcast(marked):
            progress.best, progress.best_step, progress.best_attempt = None, -1, 0

    def replicate(self) -> None:
        """Wraps the model after its weights are restored, so that replicas begin equal."""
        config, worker = self.config, self.worker
        optimizer, module = self.built.optimizer, self.distilled.module
        source = source_for(config, worker.workers, optimizer, module, worker.device)
        self.noise = GradientNoise(source, config.batch.size / config.batch.base_size)
        setup = Setup(
            config,
            self.student,
            module,
            self.partition,
            optimizer,
            source,
            self.total_steps,
            worker.workers,
            worker.device,
            worker.arithmetic,
            worker.timeline,
        )
        self.replica: Replica = config.parallel.strategy_info.replicate(setup)
        if not config.trains:
            self.replica.name = config.parallel.strategy

    def report_start(self) -> None:
        config, worker, prepared, place = self.config, self.worker, self.prepared, self.origin
        student_sha256 = None
        if isinstance(place, origin.Folder):
            student_sha256 = origin.digest(place, config.workspace, tokenizer=True)
        facts: dict[str, object] = {
            **environment_facts(worker.device),
            **worker.instruments.facts(),
            "config": json.loads(worker.config.model_dump_json()),
            "device_shared": config.rates.shared,
            "workers": worker.workers.world,
            "compression": config.parallel.compression,
            "precision_implementation": worker.arithmetic.name,
            "evaluation_precision": worker.inference.name,
            "data": self.data.identity,
            "train_examples": len(prepared.train),
            "validation_examples": len(prepared.validation),
            "test_examples": 0 if prepared.test is None else len(prepared.test),
            "vocabulary_size": prepared.vocabulary_size,
            "student_sha256": student_sha256,
            "compiled": config.model.compile,
            "attention": self.student.attention,
            **({} if self.parity is None else {"encoder_parity": asdict(self.parity)}),
            "parameters": self.parameters,
            **self.distilled.facts,
            **self.built.facts(),
            **self.replica.facts(),
            "resumed_from_s": self.kept_until_s,
            "global_size": config.batch.size,
            "micro_size": config.batch.micro_size,
            "micro_tokens": config.batch.micro_tokens,
            "accumulation": config.accumulation,
            "gradient_noise": self.noise.source.name,
        }
        if worker.workers.rank == 0:
            with contextlib.suppress(OSError):  # A run does not fail for its record.
                write_patch(self.checkpoints.own_folder)
        step = self.progress.step
        worker.sink.started(total_steps=self.total_steps, resumed_from_step=step, facts=facts)

    def seed(self) -> None:
        """Comes last, because building draws random numbers too."""
        workers, seed = self.worker.workers, self.config.seed
        if self.saved is None:
            seed_all(seed, rank=workers.rank)
        else:
            device = self.worker.device
            snapshot.restore_random(
                self.saved, rank=workers.rank, world=workers.world, seed=seed, device=device
            )

    def finish(self, stop: Stop) -> Trainer:
        config, worker = self.config, self.worker
        quantisation = worker.encoder.quantisation
        latent = Latent() if quantisation is None else quantisation.latent_of(self.student)
        update = Update(
            self.distilled.module,
            self.built.optimizer,
            loss_scale_for(config),
            worker.arithmetic.half,
            config.optimizer.max_grad_norm,
            self.replica.counted(),
            latent,
        )
        wanted = config.telemetry
        telemetry = RunTelemetry(
            timeline=worker.timeline,
            noise=self.noise,
            figures=RunFigures(
                config,
                worker.instruments,
                flop_count_of(self.student.model.config, self.prepared.head).with_frozen(config.model.frozen),
                teacher_precision=self.distilled.teacher_precision,
                first=worker.workers.first,
                timeline=worker.timeline,
                truncated_pct=100.0 * float(self.prepared.train.cut.mean()),
            ),
            profiler=StepProfiler(
                wanted, self.total_steps, worker.device, worker.timeline, alone=worker.workers.world == 1
            ),
            tracer=tracer_for(
                wanted.trace_steps,
                profiled_steps=wanted.profile_steps,
                steps_left=self.total_steps - self.progress.step,
                timeline=worker.timeline,
            ),
            histograms=Histograms(
                self.replica.student,
                0 if worker.workers.rank else wanted.histogram_steps,
                self.total_steps,
                self.checkpoints.own_folder,
                worker.timeline,
                partial(worker.sink.log, "warning"),
            ),
        )
        # A run that does not train needs a checkpoint if the file of its model is not all of it, or if
        # predictions of the test part name its weights.
        keeps_untrained = (
            bool(self.student.fresh)
            or config.model.layers is not None
            or self.prepared.test_units is not None
        )
        parts = RunParts(
            config=config,
            workers=worker.workers,
            device=worker.device,
            total_steps=self.total_steps,
            progress=self.progress,
            data=self.data,
            model=TrainedModel(
                self.state, self.distilled.objective, self.replica, update, latent, self.parameters
            ),
            telemetry=telemetry,
            store=self.checkpoints,
            resumed_from=self.newest,
            keep_untrained=keeps_untrained,
            forget_micro_size=self.forget_micro_size,
        )
        trainer = Trainer(parts, worker.sink, stop)
        if self.saved is not None:
            trainer.continue_from(self.saved)
        return trainer
