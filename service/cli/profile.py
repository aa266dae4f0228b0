"""The command that estimates a data-parallel step: `profile`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.connection import checked_settings, connected, run_id
from service.cli.specs import spec_errors, spec_text
from service.cli.terminal import Answer, ExitCode, Failure, argument, console, note, option, print_table

if TYPE_CHECKING:
    from service.config.hardware import Hardware
    from service.config.settings import Settings
    from service.planner.step_time import Estimate, Exchange, Link, Step
    from service.specs.experiment import ExperimentSpec
    from trainers.config import RunConfig
    from trainers.profiling import Profile

WORKERS = (1, 2, 4, 8)  # Numbers of workers to estimate
CPU_MEMORY_GB_S = 10.0  # Assumed of one virtual CPU


def profile(
    target: str = argument(..., "A spec, or a run such as run:42.", metavar="FILE|RUN"),
    assignments: list[str] | None = option(
        None, "Change a field of a spec. Repeatable.", "--set", metavar="KEY=VALUE"
    ),
    steps: int = option(5, "Steps to measure.", min=1, max=1000),
    warm_up: int = option(2, "Steps before the measured ones.", min=0, max=1000),
    check: bool = option(True, "Also train a data-parallel run of two workers, and compare."),
    on_cluster: bool = option(False, "Measure in a worker group on nodes of the spec's hardware."),
    timeout_s: float = option(
        900.0, "With --on-cluster: give up after this many seconds.", "--timeout", min=1.0
    ),
    estimate: bool = option(False, "Measure nothing: use only parameters, arithmetic and rates."),
    link_gb_s: float | None = option(None, "Bandwidth of a worker's link, in GB/s.", min=1e-3),
    tflops: float | None = option(None, "With --estimate: rate of matrix products, in TFLOP/s.", min=1e-4),
) -> Answer:
    """Estimate a step on 1, 2, 4 and 8 workers from layer times measured here or on the cluster."""
    from service.config.hardware import lookup
    from service.planner.step_time import estimate as estimated
    from service.planner.step_time import exchange_of

    if on_cluster and estimate:
        raise Failure("--estimate measures nothing; give --estimate or --on-cluster")
    settings = checked_settings()
    catalogue = settings.catalogue()
    spec, seed = _chosen(target, assignments or [], catalogue)
    config = _config(spec, seed, settings, catalogue)
    hardware = lookup(spec.hardware, catalogue)
    measured, own = None, set[int]()
    if estimate:
        if spec.model.frozen:
            raise Failure("--estimate counts every layer as trained; remove model.frozen, or --estimate")
        step, exchange, notes = _assumed(config, hardware, tflops)
        link = _assumed_link(hardware, link_gb_s)
        notes.append(f"link {link.bandwidth_gb_s:g} GB/s (--link-gb-s)")
    else:
        measured = (
            _measured_on_cluster(config, spec, settings, steps, warm_up, check, timeout_s)
            if on_cluster
            else _measured(config, steps, warm_up, check)
        )
        step, link, notes = _of(measured, config, hardware, link_gb_s)
        exchange = exchange_of(config.parallel, measured.compression)
        own = {measured.exchange.workers} if measured.exchange is not None else own
    size, micro = config.batch.size, config.batch.micro_size
    estimates = [
        estimated(
            step,
            link,
            workers,
            global_size=size,
            micro_batches=1 if micro == "auto" else max(1, size // workers // int(micro)),
            exchange=exchange,
        )
        for workers in sorted({*WORKERS, *own})
    ]
    comparison = None
    if measured is not None and measured.exchange is not None and measured.measured_ms is not None:
        predicted_ms = next(one.step_ms for one in estimates if one.workers == measured.exchange.workers)
        comparison = {
            "workers": measured.exchange.workers,
            "predicted_ms": predicted_ms,
            "measured_ms": measured.measured_ms,
            "error_pct": 100.0 * (predicted_ms / measured.measured_ms - 1.0),
        }
    shown = ("name", "forward_ms", "backward_ms", "gradient_bytes")
    document = {
        "measured": measured is not None,
        "global_size": size,
        "layers": [{name: getattr(layer, name) for name in shown} for layer in step.layers],
        "exchange": exchange,
        "rest_ms": step.rest_ms,
        "examples": step.examples,
        "link": link,
        "estimates": estimates,
        "comparison": comparison,
        "notes": notes,
    }
    lines = [partial(_print, step, estimates), *(partial(note, line) for line in notes)]
    lines.append(partial(note, _sent(config, exchange, estimates[1])))
    if comparison is None:
        return Answer(document, *lines)
    return Answer(
        document,
        *lines,
        f"ddp x{comparison['workers']}: predicted {comparison['predicted_ms']:.1f} ms, measured "
        f"{comparison['measured_ms']:.1f} ms: {comparison['error_pct']:+.1f}%",
    )


def _chosen(
    target: str, assignments: list[str], catalogue: Mapping[str, Hardware]
) -> tuple[ExperimentSpec, int]:
    """Returns the resolved spec of the run, or of the first run that a file would make, and its seed."""
    from service.scheduling.admission import read_spec

    if target.startswith("run:"):
        number = run_id(target)
        if assignments:
            raise Failure("--set changes a spec and has no effect on a run; remove it")
        with connected() as client:
            run = client.run(number)
            text = client.spec(run.experiment_id, "canonical").encode()
        point: Mapping[str, Any] | None = run.point
        seed: int | None = run.seed
    else:
        text, point, seed = spec_text(Path(target), assignments), None, None
    with spec_errors(target):
        for plan in read_spec(text, catalogue).runs(catalogue):
            if plan.refusal is None and (point is None or plan.point == point) and seed in (None, plan.seed):
                return plan.spec, plan.seed
    raise Failure(f"{target}: its experiment's spec has no such run that can be trained")


def _config(
    spec: ExperimentSpec, seed: int, settings: Settings, catalogue: Mapping[str, Hardware]
) -> RunConfig:
    from service.scheduling.run_plan import run_config
    from service.specs.models import referenced_runs

    if referenced_runs(spec):
        raise Failure(
            "the model comes from a run; write it to a folder with `stillhouse export-model` and use that"
        )
    if spec.batch.is_found:
        raise Failure(
            "batch.global_size largest is found by a run; set a number, such as --set batch.global_size=32"
        )
    return run_config(
        spec,
        experiment_id=0,
        run_id=0,
        seed=seed,
        workers=spec.parallel.workers,
        settings=settings,
        catalogue=catalogue,
    )


def _measured(config: RunConfig, steps: int, warm_up: int, check: bool) -> Profile:
    from trainers.entrypoint import profile as measure
    from trainers.errors import TrainingError

    pairs = config.rates.kind.counted_in_cpus and (os.cpu_count() or 1) > 1 and config.batch.size % 2 == 0
    note(f"measures {warm_up + steps} steps" + (", in two processes at once" if pairs else ""))
    try:
        return measure(config, workers=2 if pairs else 1, steps=steps, warm_up=warm_up, check=check and pairs)
    except TrainingError as error:
        raise Failure(str(error), ExitCode.not_succeeded) from None
    except RuntimeError as error:
        raise Failure(str(error).strip().splitlines()[-1], ExitCode.not_succeeded) from None


def _measured_on_cluster(
    config: RunConfig,
    spec: ExperimentSpec,
    settings: Settings,
    steps: int,
    warm_up: int,
    check: bool,
    timeout_s: float,
) -> Profile:
    from service.scheduling.ray_jobs import DashboardRayJobs, JobRefused, RayUnreachable
    from service.scheduling.run_plan import shapes_of
    from service.workers.profiling import ProfileFailed, ProfileOrder, measure_on_cluster

    workers = max(2, spec.parallel.workers)
    if config.batch.size % workers:
        raise Failure(
            f"batch.global_size {config.batch.size} is not divisible by {workers} workers; change "
            "it or parallel.workers"
        )
    shape = replace(shapes_of(spec, settings.catalogue())[0], workers=workers)
    note(f"measures {warm_up + steps} steps in {workers} workers of the cluster on {spec.hardware}")
    order = ProfileOrder(config, shape, steps, warm_up, check)
    try:
        return measure_on_cluster(DashboardRayJobs(settings.ray_dashboard_url), order, timeout_s=timeout_s)
    except RayUnreachable as error:
        raise Failure(str(error), ExitCode.unreachable) from None
    except (ProfileFailed, JobRefused) as error:
        raise Failure(str(error), ExitCode.not_succeeded) from None


def _of(
    measured: Profile, config: RunConfig, hardware: Hardware, link_gb_s: float | None
) -> tuple[Step, Link, list[str]]:
    from service.planner.step_time import Link, link_of, step_of

    exchange = measured.exchange
    step = step_of(measured.step, config.parallel)
    if exchange is None:
        link = _assumed_link(hardware, link_gb_s)
        return step, link, ["measured with one process", f"link {link.bandwidth_gb_s:g} GB/s assumed"]
    notes = [
        f"layer times of {exchange.workers} workers at once; on one machine they share its memory bandwidth"
    ]
    if link_gb_s is not None:
        return step, Link(link_gb_s), [*notes, f"link {link_gb_s:g} GB/s (--link-gb-s)"]
    link = link_of(exchange)
    notes.append(
        f"all-reduce between them: {exchange.message_ms:.2f} ms per message and {exchange.ms_per_mib:.2f} ms "
        f"per MiB; it takes {exchange.taken:.0%} of its time from a worker that is computing"
    )
    notes.append("further workers are estimated with a core and a link each like these")
    return step, link, notes


def _assumed(config: RunConfig, hardware: Hardware, tflops: float | None) -> tuple[Step, Exchange, list[str]]:
    from service.planner.forecast import CPU_GFLOPS, MFU
    from service.planner.step_time import Rates, assumed, assumed_compression, exchange_of, payload_of
    from trainers.entrypoint import model_shape
    from trainers.errors import TrainingError

    try:
        shape = model_shape(config)
    except TrainingError as error:
        raise Failure(str(error)) from None
    peak = (hardware.peak_tflops or {}).get(config.precision)
    if tflops is None:
        tflops = CPU_GFLOPS / 1e3 if peak is None else MFU * peak
    memory_gb_s = hardware.bandwidth_gb_s or CPU_MEMORY_GB_S
    step = assumed(
        shape,
        tokens=config.task.max_length,
        examples=config.batch.size,
        optimizer_passes=config.optimizer.info.states.passes,
        rates=Rates(tflops, memory_gb_s),
        payload=payload_of(config.parallel),
    )
    exchange = exchange_of(config.parallel, assumed_compression(config.parallel, bandwidth_gb_s=memory_gb_s))
    how = "assumed" if peak is None else f"{tflops / peak:.0%} of the catalogue's {peak:g}"
    notes = [
        f"nothing was measured: {tflops:g} TFLOP/s ({how}; --tflops), memory {memory_gb_s:g} GB/s, every "
        f"example {config.task.max_length} tokens long",
        "in it: the layers' products, the embeddings' and the optimizer's bytes; not in it: data, "
        "other kernels",
    ]
    return step, exchange, notes


def _assumed_link(hardware: Hardware, link_gb_s: float | None) -> Link:
    from service.planner.step_time import Link

    return Link(link_gb_s if link_gb_s is not None else hardware.kind.link_gb_s)


def _print(step: Step, estimates: list[Estimate]) -> None:
    layers = []
    for layer in step.layers:
        both = (f"{layer.forward_ms:.2f} ms", f"{layer.backward_ms:.2f} ms")
        layers.append((layer.name, *both, f"{layer.gradient_bytes / (1 << 20):.2f} MiB"))
    layers.append(("the rest of a step", f"{step.rest_ms:.2f} ms", "", ""))
    numbers = ("forward", "backward", "gradients")
    print_table(("layer", *numbers), layers, right=numbers)
    console().print()
    rows = []
    for each in estimates:
        times = (f"{ms:.1f} ms" for ms in (each.step_ms, each.communication_ms, each.exposed_ms))
        rows.append((each.workers, *times, f"{each.speed_up:.2f}"))
    columns = ("workers", "step", "exchange", "exposed", "speed-up")
    print_table(columns, rows, right=columns)


def _sent(config: RunConfig, exchange: Exchange, two: Estimate) -> str:
    parts = [f"{two.buckets} bucket{'s' if two.buckets != 1 else ''} of {config.parallel.bucket_mib} MiB"]
    if exchange.pack_ms_per_mib or exchange.unpack_ms_per_mib:
        parts.append(
            f"compression {config.parallel.compression}: {two.sent_bytes / 2**20:.2f} MiB are sent, and "
            f"packing takes {two.compression_ms:.1f} ms of a step after its warm-up"
        )
    return "gradients in " + "; ".join(parts)
