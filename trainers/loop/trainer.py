"""The training loop: `train -> train_step -> Replica.gradients`."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from trainers.checkpoints.store import Snapshot
from trainers.data.batches import Batch, Prefetcher, StepBatch
from trainers.device_kinds import kind_of
from trainers.errors import NotFiniteError
from trainers.loop import snapshot
from trainers.loop.evaluation import FinalTest
from trainers.loop.progress import StepRates
from trainers.loop.run_parts import RunParts
from trainers.loop.saving import Saving
from trainers.loop.snapshot import EXCHANGE
from trainers.loop.steps import Launched, Number, StepSums, Transfer, is_finite, stop_reason
from trainers.metrics import on_test
from trainers.models.latent import counts_signs
from trainers.process import seed_all
from trainers.reporting import Measurement, Point, Sink, Stop, StopReason, TrainingOutcome
from trainers.telemetry import tracing
from trainers.telemetry.flops import Tally, tally
from trainers.telemetry.gradient_noise import StepNorms
from trainers.telemetry.profiling import TOP
from trainers.telemetry.timeline import Phase
from trainers.update import counts_underflow, learning_rate, rate_factor_for, restart


class Trainer:
    """One attempt at a run, of parts restored from a checkpoint if there is one; `sink` is real on rank 0."""

    def __init__(self, parts: RunParts, sink: Sink, stop: Stop) -> None:
        self.config, self.workers, self.device = parts.config, parts.workers, parts.device
        self.data, self.model, self.telemetry = parts.data, parts.model, parts.telemetry
        self.store, self.keep_untrained, self.progress = parts.store, parts.keep_untrained, parts.progress
        self.timeline, self.total_steps = parts.telemetry.timeline, parts.total_steps
        self.forget_micro_size = parts.forget_micro_size
        self.sink, self.stop = sink, stop
        self.saving = Saving(parts, sink)
        per_epoch = self.data.batches.steps_per_epoch
        self.rate_factor = rate_factor_for(self.config.optimizer)
        self.evaluate_every = self.config.evaluation.interval(per_epoch)
        if self.config.task.train_on == "all":
            self.evaluate_every = max(1, self.total_steps)  # No checkpoint is better than the last.
        self.stopping: StopReason | None = None
        self.launched: Launched | None = None
        """The last step, if the host has yet to read its numbers: the next step does, or a boundary."""
        # A step's numbers are then read in the next step, so that the device never waits for the host.
        self.reads_late = (
            kind_of(self.device).behind_host
            and self.model.replica.concludes_late
            and self.model.update.skips_on_device
        )
        if self.reads_late:
            self.model.update.decide_on_device()
        self.tested: Mapping[str, float] | None = None
        self.rates = StepRates(self.timeline, self.progress)
        # Points are reported once, also where steps are trained again after going back.
        self.reported_step, self.scored_step = self.progress.step, -1
        self.warm = False
        self.working = "training" if self.config.trains else "validating"

    def continue_from(self, taken: Snapshot) -> None:
        """Restores everything but model and optimizer, after `snapshot.restore` and `progress`."""
        self.model.update.scale.restore(self.progress.loss_scale)
        self.model.update.follow_scale()
        self.rate_factor.restore(self.progress.rate_factor)
        self.telemetry.noise.restore(self.progress.noise)
        self.data.batches.take_detour(self.progress.roll_backs)
        self.model.replica.restore_exchange(taken.tensors.get(EXCHANGE, {}))

    def train(self) -> TrainingOutcome:
        """Trains to the end or until stopped; raises TrainingError, with no checkpoint in flight."""
        try:
            with self.model.replica.watched():
                self.sink.log("info", f"begins at step {self.progress.step:,} of {self.total_steps:,}")
                self._train()
                outcome = self._outcome()
                ended = "ended" if self.stopping is None else f"stopped ({self.stopping})"
                self.sink.log("info", f"{ended} at step {self.progress.step:,} of {self.total_steps:,}")
                return outcome
        except BaseException:
            self.saving.keep_last()
            raise
        finally:
            self.saving.close()

    def _train(self) -> None:
        progress, profiler = self.progress, self.telemetry.profiler
        self._poll_stop()
        self._measure()  # what came before the first step, also of an attempt that is killed later
        self.model.state.student.train()
        with self.timeline.within(Phase.warm_up):
            coming = range(progress.step, self.total_steps)
            self.model.replica.prepare(map(self.data.batches.__getitem__, coming), self.model.objective.loss)
        self._say(self.working)
        if self._evaluates_first:
            self.evaluate()
        batches = Prefetcher(self._prepare, progress.step, self.total_steps)
        try:
            while True:
                if self._at_boundary():
                    if not self._finish_step():
                        batches = self._start_over(batches)
                    # Rare work first. Each evaluation finds its step saved: it need not be trained again
                    # when the evaluation is interrupted, and is kept when it is the best.
                    if self.saving.whole:
                        self.saving.end()
                    if self._checkpoint_due():
                        self.save()
                    if self._evaluation_due():
                        self.evaluate()
                    if self.stopping or progress.step >= self.total_steps:
                        break

                step = self._next_step
                with profiler.around(step), self.telemetry.tracer.around(step):
                    self.timeline.enter(Phase.data_wait)
                    batch, counted = batches.next()
                    applied = self.train_step(batch)
                    teacher_flops = self.model.objective.teacher_flops()
                    self.telemetry.figures.count(counted, teacher_flops, timed=not profiler.active)
                self._report_profile()
                self._report_trace()
                if not applied:
                    batches = self._start_over(batches)
        finally:
            batches.close()
            profiler.close()
        self.saving.end()
        nowhere = self.stopping is not None and self.saving.checkpoint is None and self.config.trains
        if progress.step > self.saving.step or nowhere:
            self.save()  # stopped while evaluating
            self.saving.end()
        if self._trained and self.data.final_test is not None:
            self.test(self.data.final_test)

    def _start_over(
        self, batches: Prefetcher[tuple[StepBatch, Tally]]
    ) -> Prefetcher[tuple[StepBatch, Tally]]:
        batches.close()
        self.roll_back()
        return Prefetcher(self._prepare, self.progress.step, self.total_steps)

    @property
    def _next_step(self) -> int:
        return self.progress.step + (self.launched is not None)

    def _at_boundary(self) -> bool:
        """Whether something may be due before the next step that needs the last one's numbers."""
        if self.launched is None or self.stopping or self.saving.due or self.saving.whole:
            return True
        step, every = self._next_step, self.config.checkpoint.every_steps
        if self._looked_at(step):
            return True
        saves = every is not None and step % every == 0
        return step >= self.total_steps or step % self.evaluate_every == 0 or saves

    def _looked_at(self, step: int) -> bool:
        """Whether a step is profiled or traced: it ends before the next one begins."""
        return self.telemetry.profiler.covers(step) or self.telemetry.tracer.covers_next

    def _prepare(self, step: int) -> tuple[StepBatch, Tally]:
        batch = self.data.batches[step]
        return batch.pinned(self.device), tally(batch.micro_batches)

    def train_step(self, batch: StepBatch) -> bool:
        """Runs one optimizer update; returns False when the run must go back to a checkpoint.

        If the device runs behind the host, it decides itself whether the step is applied, and the host
        reads the step's numbers during the next one, after launching its passes. Devices of several workers
        decide by the same sums.
        """
        config, step = self.config, self._next_step
        objective, replica, update = self.model.objective, self.model.replica, self.model.update
        noise, scale = self.telemetry.noise, self.model.update.scale
        report = (step + 1) % config.log_every_steps == 0
        stage = objective.stage(step, self.total_steps)
        if step == stage.start:
            # Not at the end of the stage before: resumed from a checkpoint there, a run comes by here too.
            restart(update.optimizer)  # its moments come from a different loss
            self.progress.rate_factor = {}
            self.rate_factor.restore({})
            noise.source.forget()
        objective.begin_step(step, self.total_steps)
        self.model.latent.begin_step(
            step, self.total_steps, counts=counts_signs(step, config.log_every_steps)
        )
        noise.source.begin_step(step)
        replica.begin_step(step, scale.value)
        loss_sum = replica.gradients(batch, objective.loss, update.next_scale)
        sent = replica.launched()
        if not self._finish_step():
            return False

        self.telemetry.histograms.look(step, scale.value)
        self.timeline.enter(Phase.optimizer)
        noise.source.before_update()
        seen = noise.source.sum()
        underflow_due = report and counts_underflow(step, config.log_every_steps)
        underflow_pct = update.underflow_pct() if underflow_due else None
        squares = update.squares()
        per_epoch = self.data.batches.steps_per_epoch
        rate = learning_rate(config.optimizer, step - stage.start, len(stage), per_epoch)
        rate *= self.rate_factor.value
        timed = not self.telemetry.profiler.active

        self.timeline.enter(Phase.communication)
        part = self._part(
            loss_sum,
            # Replicas have the same gradients, and the workers of one the same batch.
            squares / self.workers.replicas,
            counted=batch.micro_batches if self.workers.first else (),
            noise=0.0 if seen is None else seen,
            # Rank 0 reports its own.
            underflow_pct=0.0 if underflow_pct is None or self.workers.rank else underflow_pct,
        )
        launched = Launched(batch, rate, underflow_pct is not None, timed=timed, sent=sent, sums=part)
        # What is compared from step to step needs the norms at once.
        if self.reads_late and not (noise.source.looks or self._looked_at(step)):
            sums = part.with_numbers(self.workers.sum_on_device(part.numbers(), self.device))
            assert isinstance(sums.loss_sum, torch.Tensor)
            assert isinstance(sums.squares, torch.Tensor)
            self.timeline.enter(Phase.optimizer)
            update.apply_if_finite(sums.loss_sum, sums.squares, rate)
            update.clear()
            self.timeline.enter(Phase.communication)
            self.launched = replace(launched, sums=sums, transfer=Transfer(sums.numbers(), self.device))
            return True
        # One transfer: on a GPU the host waits here, and nowhere else in a step.
        totals = self._agree(part.with_numbers(self.workers.sum(part.numbers(), self.device)))
        self.timeline.settle()
        return self._conclude(launched, totals)

    def _finish_step(self) -> bool:
        """Reads the previous step's numbers if pending; returns False to go back to a checkpoint."""
        launched, self.launched = self.launched, None
        if launched is None or launched.transfer is None:
            return True
        self.timeline.enter(Phase.communication)
        totals = self._agree(launched.sums.with_numbers(launched.transfer.read()))
        self.timeline.settle_passed()
        return self._conclude(launched, totals)

    def _conclude(self, launched: Launched, totals: StepSums[float]) -> bool:
        """Applies a step unless the device has, and reports it; returns False to go back to a checkpoint."""
        update, batch, step = self.model.update, launched.batch, self.progress.step
        loss_scale = update.scale.value  # The host has read all steps before, which led to it.
        norm = math.sqrt(totals.squares) / loss_scale
        if launched.transfer is None:
            self.timeline.enter(Phase.optimizer)
        if is_finite(totals):
            if launched.transfer is None:
                divisor = update.apply(norm, launched.rate)
                if batch.global_examples == self.config.batch.size:
                    self.telemetry.noise.add(StepNorms(totals.noise, norm, loss_scale, divisor))
            update.scale.applied()
            self.progress.not_finite_in_a_row = 0
        elif not self._skip(totals.loss_sum / batch.global_examples, norm):
            return False
        if launched.transfer is None:
            update.follow_scale()
            update.clear()

        self.timeline.enter(Phase.communication)
        self.progress.count(
            loss_sum=totals.loss_sum,
            samples=batch.global_examples,
            tokens=int(totals.tokens),
            padded_tokens=int(totals.padded_tokens),
            new_epoch=step % self.data.batches.steps_per_epoch == 0,
            timed=launched.timed,
        )
        self.stopping = stop_reason(totals)
        if not is_finite(totals):
            self.model.replica.discard()
        sent = launched.sent()
        self.progress.bytes_sent += sent.bytes
        self.progress.hidden_communication_s += sent.hidden_s if launched.timed else 0.0
        if (step + 1) % self.config.log_every_steps == 0:
            own: dict[str, float] = {}
            if launched.reports_underflow:
                own["underflow_pct"] = totals.underflow_pct
            if update.scale.dynamic:
                own["loss_scale"] = loss_scale
            if update.scale.dynamic or self.config.numerics.not_finite != "stop":
                own["skipped_steps"] = self.progress.skipped_steps
            self._report_step(totals.loss_sum / batch.global_examples, norm, launched.rate, own)
        return True

    def evaluate(self) -> None:
        """Scores the validation part, unless a stop comes first."""
        self.timeline.enter(Phase.validation)
        self._say("validating")
        if not self.warm:
            with self.timeline.within(Phase.warm_up):
                self.data.evaluator.warm_up(self.model.replica)
            self.warm = True
        observed = self.data.evaluator.observe(self.model.replica, self._poll_stop)
        if observed is None:
            return
        self.saving.end()  # Evaluating took time enough for most of it.
        self.timeline.enter(Phase.validation)
        scores = self.data.evaluator.scores(observed)
        self.progress.costs = dict(observed.costs)
        info = self.data.task.info
        step = self.progress.step
        self.progress.judge(
            scores,
            info.headline,
            higher_is_better=info.higher_is_better,
            attempt=self.saving.attempt,
            may_be_best=step > 0 or not self.config.trains,
        )
        if step > 0:  # An evaluation at the start changes nothing of the training.
            self.rate_factor.evaluated(scores["validation_loss"])
            self.progress.rate_factor = self.rate_factor.to_state()
        if step > self.scored_step:
            self.scored_step = step
            self.sink.points([Point(name, step, value) for name, value in scores.items()])
            figures = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
            self.sink.log("info", f"step {step:,} of {self.total_steps:,}: {figures}")
        if self.progress.best_step == step:
            self.saving.mark_best()
        self._say(self.working)

    @property
    def _trained(self) -> bool:
        progress = self.progress
        return progress.step >= self.total_steps and progress.evaluated_step == progress.step

    def test(self, final_test: FinalTest) -> None:
        """Scores the test part with the best checkpoint, unless a stop comes first; nothing follows it."""
        self.timeline.enter(Phase.test)
        self._say("testing")
        self.tested = final_test.score(self.model.replica, self.progress, self._poll_stop)

    def save(self) -> None:
        """Begins a checkpoint of this step, after the one in flight; every worker takes part."""
        self.saving.end()
        self.timeline.enter(Phase.checkpoint)
        self._say("saving")
        self._measure()
        self.saving.begin()
        self._say(self.working)

    def _checkpoint_due(self) -> bool:
        progress, every = self.progress, self.config.checkpoint
        if not self.config.trains:
            return self.keep_untrained and self.saving.nothing_saved
        if progress.step == self.saving.step:
            # A run that may have to go back needs a place to go back to.
            needed = self.stopping is not None or self.config.numerics.not_finite == "roll_back"
            return needed and self.saving.nothing_saved
        if self.stopping or progress.step >= self.total_steps or self._evaluation_due():
            return True
        return self.saving.due or (every.every_steps is not None and progress.step % every.every_steps == 0)

    @property
    def _evaluates_first(self) -> bool:
        """Whether the weights that training starts from are evaluated now, before any checkpoint."""
        progress = self.progress
        due = self.config.evaluation.at_start and self.config.trains and not self.stopping
        return due and progress.step == 0 and progress.evaluated_step < 0

    def _evaluation_due(self) -> bool:
        progress = self.progress
        if self.stopping or progress.evaluated_step == progress.step:
            return False
        if progress.step == 0 and self.config.trains:
            return False
        return progress.step >= self.total_steps or progress.step % self.evaluate_every == 0

    def _poll_stop(self) -> bool:
        """Sums over all workers outside steps; returns whether to stop."""
        part = self._part()
        sums = self._agree(part.with_numbers(self.workers.sum(part.numbers(), self.device)))
        self.stopping = stop_reason(sums)
        return self.stopping is not None

    def _skip(self, loss: float, grad_norm: float) -> bool:
        """Handles non-finite loss or gradients, the same way on every worker; returns False to roll back.

        A skipped step is not applied but counts: data order and learning rate advance.
        """
        progress = self.progress
        # A finite loss whose gradients overflow: the scale was too high, and that is no failure.
        if math.isfinite(loss) and self.model.update.scale.back_off():
            progress.skipped_steps += 1
            return True
        policy, step = self.config.numerics, progress.step + 1
        what = f"step {step}: loss {loss}, gradient norm {grad_norm}"
        if policy.not_finite == "skip" and progress.not_finite_in_a_row + 1 < policy.not_finite_limit:
            progress.skipped_steps += 1
            progress.not_finite_in_a_row += 1
            self.sink.log("warning", f"{what}; the step is skipped")
            return True
        if policy.not_finite == "roll_back" and progress.roll_backs + 1 < policy.not_finite_limit:
            self.sink.log("warning", f"{what}; rolling back")
            return False
        self.sink.points([Point("loss", step, loss), Point("grad_norm", step, grad_norm)])
        advice = "lower optimizer.learning_rate, set optimizer.max_grad_norm, or use precision fp32"
        if policy.not_finite != "stop":
            count = "steps in a row" if policy.not_finite == "skip" else "times"
            advice = (
                f"that was the last of numerics.not_finite_limit {policy.not_finite_limit} {count}; "
                "lower optimizer.learning_rate or use precision fp32"
            )
        raise NotFiniteError(
            f"step {step}: loss {loss} and gradient norm {grad_norm} are not both finite; {advice}"
        )

    def roll_back(self) -> None:
        """Continues from the newest checkpoint with another data order and other dropout.

        The same batches and dropout would lead to the same numbers. Usage since stays counted, and an
        evaluation of the restored step stays valid.
        """
        progress = self.progress
        self.saving.end()
        self.timeline.enter(Phase.checkpoint)
        path = self.saving.newest()
        taken = self.store.load(path)
        self.launched = None
        restored = snapshot.restore(taken, self.model.state, self.data.identity)
        self.model.update.clear()
        progress.go_back_to(restored)
        self.continue_from(taken)
        detour = np.random.SeedSequence([self.config.seed, progress.roll_backs]).generate_state(1)
        seed_all(int(detour[0]), rank=self.workers.rank)
        self.saving.step, self.saving.checkpoint = progress.step, path
        self.sink.log(
            "warning", f"rolled back to step {progress.step}; continuing with a different data order"
        )

    def _part(
        self,
        loss_sum: Number = 0.0,
        squares: Number = 0.0,
        *,
        counted: Sequence[Batch] = (),
        noise: Number = 0.0,
        underflow_pct: Number = 0.0,
    ) -> StepSums[Number]:
        """Returns this worker's part of the sums; `counted` are the micro-batches that it counts."""
        reason = self.stop.requested()
        due, whole = self.saving.votes()
        return StepSums(
            loss_sum=loss_sum,
            squares=squares,
            tokens=sum(micro.tokens for micro in counted),
            padded_tokens=sum(micro.padded_tokens for micro in counted),
            noise=noise,
            underflow_pct=underflow_pct,
            checkpoint_due=due,
            checkpoint_whole=whole,
            stops=tuple(one is reason for one in StopReason),
            objective=tuple(self.model.objective.local_sums()),
        )

    def _agree(self, sums: StepSums[float]) -> StepSums[float]:
        self.saving.due, self.saving.whole = sums.checkpoint_due > 0, sums.checkpoint_whole > 0
        self.model.objective.agree(sums.objective)
        return sums

    def _report_step(self, loss: float, grad_norm: float, rate: float, own: Mapping[str, float]) -> None:
        step = self.progress.step
        if step <= self.reported_step:
            return
        self.reported_step = step
        at_s = time.time()
        rates = self.rates.read()
        values = (
            ("loss", loss),
            ("learning_rate", rate),
            ("grad_norm", grad_norm),
            *rates.items(),
            *self.telemetry.noise.figures(rates.get("samples_per_s")).items(),
            *self.telemetry.figures.shown().items(),
            ("epoch", step / self.data.batches.steps_per_epoch),
            *own.items(),
            *self.model.objective.parts().items(),
            *self.model.latent.points().items(),
        )
        self.sink.points([Point(name, step, value, at_s) for name, value in values])
        self._say("training")

    def _measure(self, *, last: bool = False) -> None:
        self._send(self.telemetry.figures.update(self.progress, self.workers, last=last))

    def _send(self, measurements: Iterable[Measurement]) -> None:
        for measurement in measurements:
            self.sink.measurement(measurement)

    def _report_profile(self) -> None:
        recorded = self.telemetry.profiler.take()
        if recorded is None:
            return
        self.timeline.enter(Phase.profiling)
        gathered = self.workers.all_gather((recorded.trace, recorded.profiled.kernels[:TOP]))
        if self.workers.rank:
            return
        self.progress.usage.profiled |= recorded.profiled.figures()
        try:
            tracing.write_kernels(self.store.own_folder, [trace for trace, _ in gathered])
        except OSError as error:
            self.sink.log("warning", f"the kernel trace was not saved: {error}")
        if recorded.uncounted is not None:
            self.sink.log("warning", f"kernels have no counters: {recorded.uncounted}")
        window = recorded.start_s, recorded.end_s
        bandwidth_gb_s = self.config.rates.bandwidth_gb_s
        self._send(recorded.profiled.measurements(*window, bandwidth_gb_s=bandwidth_gb_s))
        for rank, (_, kernels) in enumerate(gathered[1:], 1):
            for kernel in kernels:
                self._send(kernel.measurements(rank, *window))

    def _report_trace(self) -> None:
        spans = self.telemetry.tracer.take()
        if spans is None:
            return
        self.timeline.enter(Phase.profiling)
        row = f"worker {self.workers.rank}"
        if self.workers.stages > 1:
            row += f", stage {self.workers.stage}"
        traced = tracing.gather(spans, row, self.workers, self.device)
        if self.workers.rank:
            return
        about = {
            "strategy": self.model.replica.name,
            "stages": self.workers.stages,
            "micro_batches": self.config.accumulation,
        }
        try:
            tracing.write(self.store.own_folder, tracing.chrome_trace(traced, about))
        except OSError as error:
            self.sink.log("warning", f"the trace was not saved: {error}")
        self._send(tracing.measurements(traced))

    def _say(self, phase: str) -> None:
        self.sink.progress(step=self.progress.step, total_steps=self.total_steps, phase=phase)

    def _outcome(self) -> TrainingOutcome:
        progress = self.progress
        self.timeline.enter(Phase.communication)
        self._measure(last=True)
        done = self._trained and (self.data.final_test is None or self.tested is not None)
        summary = self.telemetry.figures.summary(progress, self.model.parameters)
        rate = summary.get("samples_per_s")
        summary |= self.telemetry.noise.figures(rate if isinstance(rate, float) else None)
        summary |= self.model.latent.figures()
        summary["validation_examples"] = self.data.evaluator.units
        price = self.config.site.storage_usd_per_gb_month
        if price and self.workers.rank == 0 and (stored_gb := self.store.stored_gb()) is not None:
            summary |= {"stored_gb": stored_gb, "storage_usd_per_month": stored_gb * price}
        if self.data.final_test is not None and self.tested is not None:
            summary |= {**self.tested, "test_examples": self.data.final_test.units}
        self._send(self.telemetry.figures.measurements(summary, progress))
        summary |= self._judgement()
        return TrainingOutcome(
            status="completed" if done else "stopped",
            stop_reason=None if done else self.stopping,
            step=progress.step,
            total_steps=self.total_steps,
            summary=summary,
            checkpoint=str(self.saving.checkpoint) if self.saving.checkpoint else None,
        )

    def _judgement(self) -> dict[str, float | int | str | None]:
        progress = self.progress
        found = progress.best_step >= 0
        kept = found and (self.config.trains or self.saving.checkpoint is not None)
        name = on_test(self.data.task.info.headline)
        tested = {} if self.tested is None or name is None else {"test_score": self.tested[name]}
        return {
            "headline": self.data.task.info.headline,
            "score": progress.scores.get(self.data.task.info.headline),
            **tested,
            "best_score": progress.best,
            "best_step": progress.best_step if found else None,
            "best_checkpoint": (str(self.saving.best.path(self.store.folder)) if kept else None),
        }
