"""The pipeline of `deepspeed`: its schedule is 1F1B.

DeepSpeed orders the passes, sends hidden states and their gradients between stages, and sums
gradients over replicas and those of a tied parameter over its copies. What a layer computes, the loss,
the update, evaluation and checkpoints are those of every strategy: the optimizer that DeepSpeed
is given takes no step.
"""

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn

from trainers.data.batches import Batch
from trainers.errors import BadSpecError
from trainers.models.student import Output
from trainers.parallel.pipeline.layers import ModelLayer, sent_dtype
from trainers.parallel.pipeline.replica import PipelineReplica
from trainers.parallel.replica import LossOf, Setup
from trainers.telemetry.timeline import Phase
from trainers.workers import Workers


class DeepSpeedPipeline(PipelineReplica):
    name = "pipeline, deepspeed"

    _made: tuple[object, tuple[Any, ...]] = (None, ())
    """The process groups that DeepSpeed made for the last run of this process, and the world they are of."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._batch: Batch | None = None
        self._following: Iterator[Batch] = iter(())
        self._loss: Callable[[torch.Tensor, Batch], torch.Tensor] | None = None
        deepspeed = load(self._device)
        # DeepSpeed takes a process' device from its environment, which a run leaves as it was.
        os.environ["LOCAL_RANK"] = str(self._device.index or 0)
        # It prints what it does, and sends tied weights in a way that autograd would record.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            _send_in(self._groups.line, self._workers)
            module = self._module()
            self._engine: Any = deepspeed.initialize(
                model=module,
                optimizer=torch.optim.SGD(module.parameters(), lr=0.0),  # takes no step
                config={
                    # One micro-batch, as far as it knows: it would divide losses by their number.
                    "train_batch_size": self._workers.replicas,
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": 1,
                    "gradient_allreduce_op": "sum",
                },
            )[0]
        # Its names of modules, for messages, would keep this model alive when the run has ended.
        deepspeed.utils.debug.debug_clear_module_and_param_names()
        self._engine._INSTRUCTION_MAP = self._instructions()
        self._keep(module, timedelta(seconds=setup.config.parallel.stage_timeout_s))

    def _run(self, micro_batches: list[Batch], loss_of: LossOf, factor: float) -> torch.Tensor:
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)

        def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
            with self._arithmetic.context():
                found = loss_of(Output(logits), batch)
            loss_sum.add_(found.detach())
            return found * factor

        engine = self._engine
        self._following, self._loss = iter(micro_batches), loss
        engine.micro_batches = len(micro_batches)
        engine.total_loss, engine._compute_loss = None, True
        # Read by the first stage; the others are sent their input.
        engine.set_dataiterator(iter([(batch.input_ids, None) for batch in micro_batches]))
        # As its `train_batch` does, which also exchanges a mean loss.
        engine._exec_schedule(engine._train_schedule())
        self._batch, self._loss = None, None
        return loss_sum

    def _exchange(self) -> None: ...

    def apply(self, layer: ModelLayer, hidden: torch.Tensor | None, *, sent: bool) -> torch.Tensor:
        """Returns a layer's forward pass over the current micro-batch; `sent` to the next stage or not.

        Hidden states travel in the format of autocast, as with the other engine: DeepSpeed describes each
        message, and a gradient returns in the format of its tensor.
        """
        assert self._batch is not None
        with self._arithmetic.context():
            hidden = None if hidden is None else hidden.to(self._hidden_dtype())
            after = layer.apply(hidden, self._batch)
            return after.to(sent_dtype(self._device)) if sent else after

    def sends(self, number: int) -> bool:
        chunk = self._layout.chunks[self._workers.stage]
        return number == chunk.stop - 1 and self._workers.stage < self._workers.stages - 1

    def _loss_of(self, logits: torch.Tensor, _labels: None) -> torch.Tensor:
        assert self._batch is not None and self._loss is not None
        return self._loss(logits, self._batch)

    def _module(self) -> Any:
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

        workers, layout = self._workers, self._layout

        class Divided(PipelineModule):  # type: ignore[misc]
            def _partition_layers(self, method: str) -> None:
                self.parts = [0, *(chunk.stop for chunk in layout.chunks)]
                chunk = layout.chunks[workers.stage]
                self._set_bounds(chunk.start, chunk.stop)

        def spec(number: int) -> LayerSpec:
            # A spec of another stage's layer is never built.
            built = (_PipelineLayer, self, number, self._own.get(number))
            return (
                TiedLayerSpec("table", *built, tied_weight_attr="tied")
                if number in layout.ties
                else LayerSpec(*built)
            )

        return Divided(
            list(map(spec, range(layout.chunks[-1].stop))),
            topology=PipeDataParallelTopology(num_pp=workers.stages, num_dp=workers.replicas),
            loss_fn=self._loss_of,
            dynamic_shape=True,
        )

    def _instructions(self) -> Mapping[type, Callable[..., None]]:
        from deepspeed.runtime.pipe import schedule

        theirs: Mapping[type, Callable[..., None]] = self._engine._INSTRUCTION_MAP
        phases = {schedule.ForwardPass: Phase.forward, schedule.BackwardPass: Phase.backward} | dict.fromkeys(
            (schedule.ReduceTiedGrads, schedule.ReduceGrads), Phase.communication
        )

        def timed(kind: type) -> Callable[..., None]:
            def run(engine: Any, **buffer: int) -> None:
                if kind is schedule.ForwardPass:
                    self._batch = next(self._following)
                self._timeline.enter(phases.get(kind, Phase.bubble))
                theirs[kind](engine, **buffer)

            return run

        # Its optimizer step would also clear the gradients.
        skipped = [schedule.OptimizerStep]
        if self._workers.replicas == 1:
            skipped.append(schedule.ReduceGrads)  # it would copy all of them twice
        return {kind: timed(kind) for kind in theirs} | dict.fromkeys(skipped, lambda _engine, **_: None)

    def _keep(self, module: Any, timeout: timedelta) -> None:
        """Gives DeepSpeed's process groups the run's timeout, and drops those of the run before."""
        grid = module._grid
        made = {
            id(group): group
            for group in (
                module.world_group,
                grid.ds_model_proc_group,
                grid.dp_proc_group,
                grid.pp_proc_group,
                grid.slice_proc_group,
                *(tied["group"] for tied in module.tied_comms.values()),
            )
        }
        for group in made.values():
            distributed.distributed_c10d._set_pg_timeout(timeout, group)
        world, groups = DeepSpeedPipeline._made
        if world is distributed.group.WORLD:
            for group in groups:
                distributed.destroy_process_group(group)
        DeepSpeedPipeline._made = (distributed.group.WORLD, tuple(made.values()))


def load(device: torch.device) -> ModuleType:
    """Imports DeepSpeed; raises BadSpecError if it is not installed.

    When it first sees a process group on the CPU, DeepSpeed compiles an operator for collectives in
    shared memory. That takes a minute on two idle cores, and leaves a lock behind when its process is
    killed, for which every later run on the machine would wait without end. A pipeline does not need it,
    because hidden states go from one process to one other: so it is not built.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed
    except ImportError as error:
        raise BadSpecError(
            f"parallel.engine deepspeed cannot be imported on this worker ({error}); install the package "
            "`deepspeed` there, or set parallel.engine: torch"
        ) from None
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # DeepSpeed would find out which operators can be built, by running compilers.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.comm.init_distributed(deepspeed.accelerator.get_accelerator().communication_backend_name())
    module: ModuleType = deepspeed
    return module


def _send_in(line: Any, workers: Workers) -> None:
    """Makes DeepSpeed's engine send in the group of a replica's stages, which has the run's timeout."""
    from deepspeed.runtime.pipe import engine, p2p

    def send(tensor: torch.Tensor, stage: int) -> None:
        distributed.send(tensor, workers.at(stage=stage, replica=workers.replica), line)

    def receive(tensor: torch.Tensor, stage: int) -> None:
        distributed.recv(tensor, workers.at(stage=stage, replica=workers.replica), line)

    engine.p2p = SimpleNamespace(init_process_groups=p2p.init_process_groups, send=send, recv=receive)


class _PipelineLayer(nn.Module):
    def __init__(self, replica: DeepSpeedPipeline, number: int, layer: ModelLayer) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layer.modules)
        if layer.tied is not None:
            self.tied = layer.tied
        self._replica, self._number, self._layer = replica, number, layer
        self._sent = replica.sends(number)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._replica.apply(self._layer, hidden if self._number else None, sent=self._sent)
