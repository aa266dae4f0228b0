"""A step of a run, measured: its layers, its exchange, and a data-parallel run's step."""

import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import cuda_ext
from trainers.checkpoints.manifest import TRACE, newest_file
from trainers.config import Parallel, RunConfig
from trainers.device_kinds import kind_of
from trainers.errors import BadSpecError
from trainers.loop.assembly import assemble
from trainers.loop.trainer import Trainer
from trainers.models.student import Student
from trainers.parallel.exchange import exchange_for
from trainers.process import environment_restored, reset_process
from trainers.profiling import CompressionCost, ExchangeCost, LayerTime, Profile, StepTimes
from trainers.reporting import NeverStop, NullSink, RunHistory
from trainers.telemetry.instruments import Instruments

LIMIT_S = 300.0  # Longest wait for one piece of work
MIB = 1 << 20
SIZES_MIB = (0.25, 1.0, 4.0, 16.0)  # Messages that the cost of an exchange is fitted to
_REPEATS = 7
_MATRIX = (1024, 1024)  # Whose gradient a compression is timed on: 4 MiB
_WARM_UP_STEPS = 5  # Of a compression that is timed; its warm-up is a share of them


class GroupError(RuntimeError):
    """A worker ended, or its work did; the message is the worker's traceback where there is one."""


class Group:
    """This process as a member of an open process group, whose members all do the same in the same order."""

    spare_cores = 0
    """Cores that no worker computes on; a worker of a cluster has the cores that it has reserved."""

    def __init__(self) -> None:
        self.workers = distributed.get_world_size()

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns what a function returns on every worker, by rank; all call it at once."""
        answers: list[Any] = [None] * self.workers
        distributed.all_gather_object(answers, work(*arguments))
        return answers


class LocalGroup(Group):
    """Processes of this machine that wait for work; a context that ends them.

    They have gloo and one CPU thread each, so that two of them on two cores stand for two workers with a core
    each. `run` raises `GroupError` when a worker raises, ends, or takes longer than the limit.
    """

    def __init__(self, workers: int, *, limit_s: float = LIMIT_S) -> None:
        self.workers, self._limit_s = workers, limit_s
        self.spare_cores = max(0, (os.cpu_count() or 1) - workers)
        self._folder = tempfile.TemporaryDirectory(prefix="stillhouse-group-")
        # Not forked: a fork of a process that has computed already has torch's threads half there.
        context, address = multiprocessing.get_context("spawn"), f"file://{self._folder.name}/rendezvous"
        self._pools = [
            ProcessPoolExecutor(1, context, _join, (address, rank, workers, limit_s))
            for rank in range(workers)
        ]
        self._others = multiprocessing.active_children()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in {*multiprocessing.active_children()} - {*self._others}:
            process.kill()  # It may wait for one that is gone.
        for pool in self._pools:
            pool.shutdown()
        self._folder.cleanup()

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        futures = [pool.submit(work, *arguments) for pool in self._pools]
        if wait(futures, self._limit_s, FIRST_EXCEPTION).not_done:
            wait(futures, 5.0)  # One that fails leaves the others waiting for it.
        problems = [(rank, problem) for rank, one in enumerate(futures) if (problem := _problem(one))]
        if problems:
            raise GroupError("\n".join(f"worker {rank} {problem}" for rank, problem in problems))
        return [future.result() for future in futures]


def _join(address: str, rank: int, workers: int, limit_s: float) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=limit_s)
    distributed.init_process_group("gloo", address, rank=rank, world_size=workers, timeout=limit)


def _problem(future: Future[Any]) -> str | None:
    if not future.done():
        return "has not responded"
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        return "has exited"
    return None if error is None else f"failed: {''.join(traceback.format_exception(error))}"


class _Stamps:
    """When a micro-batch passed each boundary between layers, forward and back; the host waits at each."""

    def __init__(self, student: Student, device: torch.device) -> None:
        self._device = device
        architecture = student.architecture
        embeddings = student.encoder.embeddings
        self.parts: dict[str, nn.Module] = {
            "embeddings": embeddings,
            **{f"layer {number}": layer for number, layer in enumerate(architecture.layers(student.model))},
            "head": architecture.head_modules(student.model)[-1][1],
        }
        self.begin_s = 0.0
        self.forward: dict[str, float] = {}
        self.backward: dict[str, float] = {}
        self._hooks = [embeddings.register_forward_pre_hook(self._begin)]
        for name, part in self.parts.items():
            self._hooks.append(part.register_forward_hook(self._left(name)))
        for parameter in embeddings.parameters():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._ended))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def times(self) -> list[tuple[str, float, float]]:
        """(part, forward s, backward s) of the last micro-batch, without the loss."""
        names = list(self.parts)
        times, entered_s = [], self.begin_s
        for number, name in enumerate(names):
            before = names[number - 1] if number else "end"
            backward_s = self.backward[before] - self.backward[name]
            times.append((name, self.forward[name] - entered_s, backward_s))
            entered_s = self.forward[name]
        return times

    def now(self) -> float:
        kind_of(self._device).backend.synchronize(self._device)
        return time.perf_counter()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self.begin_s = self.now()

    def _left(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not isinstance(tensor, torch.Tensor):
                tensor = tensor.logits
            self.forward[name] = self.now()
            if tensor.requires_grad:

                def reached(gradient: torch.Tensor) -> None:
                    self.backward[name] = self.now()

                tensor.register_hook(reached)

        return hook

    def _ended(self, parameter: torch.Tensor) -> None:
        self.backward["end"] = self.now()


def layer_times(config: RunConfig, *, steps: int, warm_up: int) -> StepTimes:
    """Trains some steps of a single worker in this process, alone, and times the layers by medians."""
    if config.model.compile:
        raise BadSpecError("with model.compile the layers cannot be timed; set it to false")
    with (
        tempfile.TemporaryDirectory(prefix="stillhouse-layers-") as folder,
        assembled(_with_checkpoints(config, folder)) as trainer,
    ):
        student = trainer.model.state.student
        student.train()
        stamps = _Stamps(student, trainer.device)
        times: list[list[tuple[str, float, float]]] = []
        whole_s: list[float] = []
        try:
            for step in range(warm_up + steps):
                began_s = time.perf_counter()
                batch = trainer.data.batches[step]
                trainer.train_step(batch)
                if step >= warm_up:
                    times.append(stamps.times())
                    whole_s.append(stamps.now() - began_s)
        finally:
            stamps.remove()
        trained = _trained(stamps.parts, student)
        layers = tuple(
            LayerTime(
                name,
                forward_ms=1e3 * statistics.median(row[position][1] for row in times),
                backward_ms=1e3 * statistics.median(row[position][2] for row in times),
                gradient_bytes=sum(parameter.nbytes for parameter in trained[name]),
                shapes=tuple(tuple(parameter.shape) for parameter in reversed(trained[name])),
            )
            for position, name in enumerate(stamps.parts)
        )
        examples = config.batch.size
        return StepTimes(layers, 1e3 * statistics.median(whole_s), len(batch.micro_batches), examples)


def _trained(parts: Mapping[str, nn.Module], student: Student) -> dict[str, list[nn.Parameter]]:
    """Returns trained parameters of each part; those of no other part (the pooler) are the head's."""
    trained: dict[str, list[nn.Parameter]] = {}
    for name, part in {**parts, "head": student}.items():
        others = {parameter for own in trained.values() for parameter in own}
        trained[name] = [p for p in part.parameters() if p.requires_grad and p not in others]
    return trained


@contextmanager
def assembled(config: RunConfig) -> Iterator[Trainer]:
    began_s = time.perf_counter()
    with environment_restored(), Instruments(config, began_s) as instruments:
        reset_process(config)
        yield assemble(
            config, NullSink(), NeverStop(), history=RunHistory(), began_s=began_s, instruments=instruments
        )


def alone(config: RunConfig, examples: int) -> RunConfig:
    """Returns the run as one worker with so many examples per step would train it."""
    micro = config.batch.micro_size
    if isinstance(micro, int) and examples % micro:
        micro = "auto"
    return _changed(
        config,
        parallel=Parallel(),
        batch=config.batch.model_copy(update={"global_size": examples, "micro_size": micro}),
    )


def data_parallel(config: RunConfig, workers: int, *, compression_warmup: float = 0.2) -> RunConfig:
    """Returns the run, data-parallel, with its buckets and its compression."""
    same = {name: getattr(config.parallel, name) for name in ("bucket_mib", "compression", "powersgd_rank")}
    parallel = Parallel(strategy="ddp", workers=workers, compression_warmup=compression_warmup, **same)
    return _changed(config, parallel=parallel)


def _with_checkpoints(config: RunConfig, folder: str) -> RunConfig:
    workspace = config.workspace.model_copy(update={"checkpoints": folder})
    return config.model_copy(update={"workspace": workspace})


def _changed(config: RunConfig, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({**dict(config), **sections})


def measure(config: RunConfig, *, workers: int, steps: int, warm_up: int, check: bool) -> Profile:
    """Measures in this process, or in several of this machine; see `measure_group`."""
    if workers == 1:
        whole = alone(config, config.batch.size)
        return Profile(layer_times(whole, steps=steps, warm_up=warm_up), None, None)
    with LocalGroup(workers) as group, tempfile.TemporaryDirectory(prefix="stillhouse-steps-") as folder:
        return measure_group(
            group, config, steps=steps, warm_up=warm_up, check=check, shared=Path(folder) / "run"
        )


def measure_group(
    group: Group, config: RunConfig, *, steps: int, warm_up: int, check: bool, shared: Path
) -> Profile:
    """Returns the layer times of workers that compute at once, and the cost of their exchange.

    The number of workers divides `config.batch.size`. `check` trains a data-parallel run too, in the
    folder `shared`, which all workers see, and times its steps.
    """
    share = alone(config, config.batch.size // group.workers)
    times = mean_step(group.run(_layer_times_together, share, steps, warm_up))
    # A GPU's exchanges are not computed by the processor; elsewhere an idle core may do them.
    idle = not config.rates.kind.counted_in_cpus or group.spare_cores > 0
    exchange = fit(group.workers, group.run(exchange_times, config), idle=idle)
    compression = compression_cost(group, config, exchange)
    measured_ms = None
    if check:
        # The compression's warm-up must end before the steps that count.
        warmup = max(warm_up, 1) / (warm_up + steps + 1)
        run = data_parallel(config, group.workers, compression_warmup=warmup)
        run = _changed(
            _with_checkpoints(run, str(shared)),
            length=config.length.model_copy(update={"steps": warm_up + steps, "epochs": None}),
            telemetry=config.telemetry.model_copy(update={"trace_steps": steps, "profile_steps": 0}),
            checkpoint=config.checkpoint.model_copy(update={"every_s": 0.0, "every_steps": None}),
        )
        measured_ms = statistics.median(group.run(_traced_steps_ms, run)[0])
    return Profile(times, exchange, measured_ms, compression)


def compression_cost(group: Group, config: RunConfig, exchange: ExchangeCost) -> CompressionCost | None:
    """Returns the time for the run's compression besides the exchange; None without compression."""
    traits = config.parallel.compression_info
    if not any(traits.passes):
        return None
    run = data_parallel(config, group.workers)
    times = [row for worker in group.run(compression_times, run) for row in worker]
    sent_mib = traits.payload(_MATRIX, 4, run.parallel) / MIB
    exchange_ms = traits.messages * exchange.message_ms + exchange.ms_per_mib * sent_mib
    own_ms = max(0.0, statistics.median(whole for _, whole in times) - exchange_ms)
    # Where the call returns with the result, its parts cannot be told apart.
    called = traits.waits or traits.answers_last
    pack_ms = own_ms / 2 if called else min(own_ms, statistics.median(begun for begun, _ in times))
    matrix_mib = 4 * math.prod(_MATRIX) / MIB
    return CompressionCost(pack_ms / matrix_mib, (own_ms - pack_ms) / matrix_mib)


def compression_times(config: RunConfig) -> list[tuple[float, float]]:
    """On a worker: (ms until the exchange of a bucket has begun, ms until it has ended), by repeat."""
    backend = config.rates.kind.backend
    device = backend.device(config.rates.hardware)
    model = nn.Linear(_MATRIX[1], _MATRIX[0], bias=False, device=device)
    optimizer = cuda_ext.Adan(model.parameters(), lr=1e-4)
    exchange = exchange_for(config, model, optimizer, _WARM_UP_STEPS)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    marks: list[float] = []

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        backend.synchronize(device)
        marks.append(time.perf_counter())
        reduced = exchange.start(bucket)
        marks.append(time.perf_counter())
        return reduced

    parallel.register_comm_hook(None, hook)
    batch = torch.randn(2, _MATRIX[1], device=device)
    times: list[tuple[float, float]] = []
    for step in range(_WARM_UP_STEPS + _REPEATS):
        exchange.begin_step(step, 1.0)
        distributed.barrier()
        marks.clear()
        parallel(batch).square().sum().backward()
        backend.synchronize(device)
        began_s, begun_s = marks
        times.append((1e3 * (begun_s - began_s), 1e3 * (time.perf_counter() - began_s)))
        optimizer.step()
        optimizer.zero_grad()
    return times[_WARM_UP_STEPS + 1 :]


def mean_step(workers: list[StepTimes]) -> StepTimes:
    """Returns workers that compute at once as one: a step waits for all, so each part takes their mean."""
    layers = tuple(
        replace(
            same[0],
            forward_ms=statistics.fmean(layer.forward_ms for layer in same),
            backward_ms=statistics.fmean(layer.backward_ms for layer in same),
        )
        for same in zip(*(worker.layers for worker in workers), strict=True)
    )
    return replace(workers[0], layers=layers, step_ms=statistics.fmean(one.step_ms for one in workers))


def _layer_times_together(config: RunConfig, steps: int, warm_up: int) -> StepTimes:
    distributed.barrier()
    return layer_times(config, steps=steps, warm_up=warm_up)


def exchange_times(config: RunConfig) -> list[tuple[float, float, float]]:
    """(MiB, wall ms, CPU ms of this process) of a gradient bucket's exchange, by size."""
    backend = config.rates.kind.backend
    device = backend.device(config.rates.hardware)
    times = []
    for size_mib in SIZES_MIB:
        bucket = torch.zeros(int(size_mib * MIB) // 4, device=device)
        walls_s, cpus_s = [], []
        for _ in range(_REPEATS + 2):
            distributed.barrier()
            backend.synchronize(device)
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            distributed.all_reduce(bucket.mul_(0.5), async_op=True).wait()
            backend.synchronize(device)
            walls_s.append(time.perf_counter() - wall_s)
            cpus_s.append(time.process_time() - cpu_s)
        times.append((size_mib, 1e3 * statistics.median(walls_s[2:]), 1e3 * statistics.median(cpus_s[2:])))
    return times


def fit(workers: int, times: list[list[tuple[float, float, float]]], *, idle: bool) -> ExchangeCost:
    """Returns a line of least relative error through all exchanges; `idle` cores compute them for free."""
    rows = [row for worker in times for row in worker]
    # Weighted by 1 / ms, or the largest message alone would decide.
    a = sum(1 / ms**2 for _, ms, _ in rows)
    b = sum(mib / ms**2 for mib, ms, _ in rows)
    c = sum(mib**2 / ms**2 for mib, ms, _ in rows)
    p, q = sum(1 / ms for _, ms, _ in rows), sum(mib / ms for mib, ms, _ in rows)
    slope = (a * q - b * p) / (a * c - b * b)
    message_ms = max(0.0, (p - b * slope) / a)
    share = 0.0 if idle else min(1.0, sum(cpu for _, _, cpu in rows) / sum(ms for _, ms, _ in rows))
    return ExchangeCost(workers, message_ms, max(slope, 1e-9), share)


def _traced_steps_ms(config: RunConfig) -> list[float]:
    """Trains; returns the milliseconds of each step from the run's own trace, on the first worker."""
    with assembled(config) as trainer:
        trainer.train()
    if distributed.get_rank():
        return []
    file = newest_file(Path(config.workspace.checkpoints), TRACE)
    assert file is not None
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return [event["dur"] / 1e3 for event in events if event.get("cat") == "step" and event["pid"] == 0]
