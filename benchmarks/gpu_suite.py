"""Everything that needs a GPU, in parts of at most ten minutes: build, measure, test, sanitise.

    python -m benchmarks.gpu_suite                                  # all parts
    python -m benchmarks.gpu_suite --parts build,adan
    python -m benchmarks.gpu_suite --parts trainer --wheels build/wheels

Parts are `build` (kernels, registers and spills), `adan` (`benchmarks.optimizer`), `tests` (`tests/gpu` and
`tests/cuda_ext`), `trainer` (`benchmarks.trainer`), `encoders` (`benchmarks.layer_kernels` and
`benchmarks.encoders`), `sanitise` (compute-sanitizer) and `service` (`benchmarks.gpu_sweep`, where Ray is
installed).

Each part is complete in itself and writes `<part>.json` to the output folder after each of its steps: device,
driver, versions, date, how each step went, its figures, and the targets of an H200 with whether they are met.
A part that is done is skipped; one that a time limit or an error ended continues at its first step that is
not done, and `trainer` at its first cell. `--again` starts over. A step runs in a process of its own, with
its output in `<part>-<step>.log`; a failure does not stop the next. The last line is one JSON object:
`parts`, and `targets` of all of them.

torch, transformers, triton, pytest and numpy are enough, with the wheels that `make gpu-wheels` fetches:
those in `--wheels` whose packages are not installed are unpacked into the output folder.

Without a GPU, each part says what it would do and why it cannot, and rehearses what comes before the device:
the CPU kernels are built, the CUDA and Triton sources are compiled where nvcc and triton are installed, the
tests are collected, and configurations, models and batches are made. No target is met or missed then.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.options import Benchmark, environment

ROOT = Path(__file__).parents[1]
BENCHMARK = Benchmark("gpu_suite", __doc__, fields=("parts", "targets"))
OUTPUT = ROOT / "build" / "gpu-suite"
LIMIT_S = 570.0
"""Of a part: ten minutes with the start of the command."""
TRAINERS_NEED = ("pydantic", "orjson", "filelock", "typing_extensions", "tokenizers", "safetensors")

# What the step should reach on an H200, BERT-base: (name, limit, whether less is better).
ADAN_TARGETS: tuple[tuple[str, float, bool], ...] = (
    ("fp32_step_ms", 1.25, True),
    ("fp32_step_stretch_ms", 1.10, True),
    ("bandwidth_fraction", 0.90, False),
    ("official_over_multi_fused", 1.4, False),
    ("multi_fused_over_adamw", 1.5, True),
    ("launches", 1, True),
    ("clip_unscale_skip_ms", 0.15, True),
    ("bfloat16_split_ms", 1.02, True),
)
ENCODER_TARGETS: tuple[tuple[str, float, bool], ...] = (
    ("fused_vs_bucketed", 1.5, False),
    ("fused_vs_eager_padded", 4.0, False),
)


class Status(StrEnum):
    """How a step went."""

    done = "done"
    failed = "failed"
    unfinished = "unfinished"
    """The time limit came first; the next start continues."""


@dataclass(frozen=True, slots=True)
class Here:
    """The machine, and how much is run on it.

    Attributes:
        gpu: name of the GPU; None = no CUDA device is visible.
        capability: of the GPU, such as `9.0`.
        folder: output.
        smoke: the smallest size of everything.
        limit_s: of a part.
    """

    gpu: str | None
    capability: str
    folder: Path
    smoke: bool
    limit_s: float

    @property
    def device(self) -> str:
        """Name that results are filed under: those of another device are not continued."""
        return self.gpu or "cpu"


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a part.

    Attributes:
        name: in the part's file.
        command: of a process of its own.
        limit_flag: option by which the command is given the time that is left; None = it has none.
        result: its last line is the JSON object of its figures.
    """

    name: str
    command: Sequence[str]
    limit_flag: str | None = None
    result: bool = False


Steps = Callable[[Here], tuple[list[Step], list[str]]]
"""Returns the steps of a part here, and what is left out and why, in a line each."""


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _smoke(here: Here) -> list[str]:
    return ["--smoke"] if here.smoke else []


def build_steps(here: Here) -> tuple[list[Step], list[str]]:
    """The kernels of this machine, and the registers and spills of all of them."""
    complete = ["--complete"] if here.gpu else []
    steps, left_out = [Step("kernels", _python("cuda_ext.build", *complete))], []
    if here.gpu or shutil.which("nvcc"):
        steps.append(Step("registers", _python("tests.cuda_ext.kernel_check", here.capability)))
    else:
        left_out.append("nvcc is not installed: the CUDA sources were not compiled")
    if importlib.util.find_spec("triton"):
        target = f"sm_{here.capability.replace('.', '')}"
        steps.append(Step("triton_registers", _python("tests.cuda_ext.encoder_check", target)))
    else:
        left_out.append("triton is not installed: the encoder's kernels were not compiled")
    return steps, left_out


def adan_steps(here: Here) -> tuple[list[Step], list[str]]:
    """One optimizer step of BERT-base."""
    device, size = ("cuda", _smoke(here)) if here.gpu else ("cpu", ["--smoke"])
    command = _python("benchmarks.optimizer", "--device", device, *size)
    left_out = []
    if here.gpu and importlib.util.find_spec("adan") is None:
        left_out.append("the official package adan is not installed: its step was not timed")
    steps = [Step("optimizer", command, result=True)]
    if here.gpu:
        variants = _python("benchmarks.optimizer", "--variants", "--architectures", here.capability)
        steps.append(Step("optimizer_variants", variants, result=True))
    return steps, left_out


def test_commands(chosen: Sequence[str], *options: str) -> list[list[str]]:
    """The kernel tests alone, without the project's other test fixtures and their packages.

    Args:
        chosen: folders or files.
        options: of pytest.
    """
    return [
        [
            sys.executable, "-m", "pytest", path, "-q", "-c", os.devnull, "--rootdir", str(ROOT),
            "--confcutdir", "/".join(path.split("/")[:2]), "--import-mode=importlib",
            "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning", *options,
        ]
        for path in chosen
    ]  # fmt: skip


def test_steps(here: Here) -> tuple[list[Step], list[str]]:
    """The tests of what only a GPU runs, and those of the kernels, file by file."""
    folders = [ROOT / "tests" / name for name in ("gpu", "cuda_ext")]
    if here.gpu is None or here.smoke:
        chosen = ["tests/gpu", "tests/cuda_ext"]
        return [
            Step(f"collect_{Path(path).name}", command)
            for path, command in zip(chosen, test_commands(chosen, "--collect-only"), strict=True)
        ], []
    files = [str(path.relative_to(ROOT)) for folder in folders for path in sorted(folder.glob("test_*.py"))]
    names = [path.removeprefix("tests/").removesuffix(".py").replace("/", "_") for path in files]
    return [Step(name, command) for name, command in zip(names, test_commands(files, "-rs"), strict=True)], []


def trainer_steps(here: Here) -> tuple[list[Step], list[str]]:
    """The cells of `benchmarks.trainer`, which continues by itself."""
    state = ["--state", str(here.folder / "trainer-cells.jsonl")]
    command = _python("benchmarks.trainer", *state, *_smoke(here))
    return [Step("cells", command, limit_flag="--limit-s", result=True)], []


def encoder_steps(here: Here) -> tuple[list[Step], list[str]]:
    """The kernels of a layer, and the ratios of our encoders on the GPU."""
    size = [*_smoke(here), "--cuda-only"] if here.gpu else ["--smoke"]
    return [
        Step("layer_kernels", _python("benchmarks.layer_kernels", *_smoke(here)), result=True),
        Step("encoders", _python("benchmarks.encoders", *size), result=True),
    ], []


SANITISERS = ("memcheck", "racecheck", "initcheck")


def sanitiser_command(tool: str, kind: str) -> list[str]:
    """compute-sanitizer over small steps of every kernel."""
    only = ["--kernel-name", "kernel_substring=adan_kernel"] if kind == "racecheck" else []
    target = _python("benchmarks.gpu_suite", "--sanitise-target")
    return [tool, "--tool", kind, "--error-exitcode", "9", *only, *target]


def sanitise_steps(here: Here) -> tuple[list[Step], list[str]]:
    """compute-sanitizer's tools; without them, or without a GPU, what they would look at runs alone."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if here.gpu and Path(tool).is_file():
        return [Step(kind, sanitiser_command(tool, kind)) for kind in SANITISERS], []
    target = Step("target", _python("benchmarks.gpu_suite", "--sanitise-target"))
    if here.gpu:
        return [target], ["compute-sanitizer is not installed: the kernels ran without it"]
    return [target], []


def service_steps(here: Here) -> tuple[list[Step], list[str]]:
    """One sweep through Ray."""
    if importlib.util.find_spec("ray") is None:
        return [], ["Ray is not installed: no sweep was run"]
    if here.gpu is None:
        validated = "from benchmarks.gpu_sweep import check; check()"
        return [Step("spec", [sys.executable, "-c", validated])], []
    return [Step("sweep", _python("benchmarks.gpu_sweep", *_smoke(here)), result=True)], []


def sanitise_target() -> None:
    """Every kernel at first and later steps, over sizes with tails, aligned and not."""
    import torch

    from cuda_ext import Adan

    device = "cuda" if torch.cuda.is_available() else "cpu"
    combinations: list[tuple[torch.dtype, str]] = [
        (torch.float32, "auto"),
        (torch.bfloat16, "fp32"),
        (torch.bfloat16, "split"),
        (torch.bfloat16, "none"),
        (torch.float16, "fp32"),
        (torch.float16, "none"),
    ]
    for dtype, master in combinations:
        for moments in (torch.float32, torch.bfloat16):
            params = []
            for size in (1, 3, 1023, 1025, 9000):
                for offset in (0, 1):
                    memory = torch.randn(size + offset, device=device).to(dtype)
                    params.append(torch.nn.Parameter(memory[offset:]))
            optimizer = Adan(
                params,
                implementation="multi_fused",
                master_weights=master,
                moments_dtype=moments,
                max_grad_norm=1.0,
            )
            for _ in range(3):
                for param in params:
                    param.grad = torch.randn_like(param)
                optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"all kernels ran on {device}")


def adan_targets(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the targets of the optimizer's step."""
    benchmark = figures["optimizer"]
    ms, ratios, variants = benchmark["ms"], benchmark["ratios"], benchmark["variants_ms"]
    extra = variants.get("multi_fused_clip_unscale_skip")
    measured = {
        "fp32_step_ms": ms["multi_fused"],
        "fp32_step_stretch_ms": ms["multi_fused"],
        "bandwidth_fraction": benchmark["bandwidth_fraction"],
        "official_over_multi_fused": ratios.get("official_over_multi_fused"),
        "multi_fused_over_adamw": ratios["multi_fused_over_adamw"],
        "launches": benchmark["launches"],
        "clip_unscale_skip_ms": None if extra is None else round(extra - ms["multi_fused"], 3),
        "bfloat16_split_ms": variants.get("multi_fused_bfloat16_split"),
    }
    return judged(ADAN_TARGETS, measured)


def encoder_targets(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the targets of the fused encoder."""
    return judged(ENCODER_TARGETS, figures["encoders"]["cuda"])


def trainer_targets(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the targets that `benchmarks.trainer` has judged."""
    found: dict[str, dict[str, Any]] = figures["cells"]["targets"]
    return found


def judged(
    targets: Sequence[tuple[str, float, bool]], measured: Mapping[str, float | None]
) -> dict[str, dict[str, Any]]:
    """Returns each target with its limit, what was measured, and whether it is met; None = not measured."""
    return {
        name: {
            "limit": limit,
            "measured": (value := measured.get(name)),
            "met": None if value is None else (value <= limit if at_most else value >= limit),
        }
        for name, limit, at_most in targets
    }


def no_targets(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns none."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the suite.

    Attributes:
        name: value of `--parts`.
        does: what it does on a GPU, in a line.
        steps: see `Steps`.
        targets: judges its figures, by step, on an H200.
        trains: its steps import the trainers, and with them `TRAINERS_NEED`.
    """

    name: str
    does: str
    steps: Steps
    targets: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]] = no_targets
    trains: bool = False


PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(
            name="build",
            does="build the CUDA kernels for this GPU and read their registers and spills",
            steps=build_steps,
        ),
        Part(
            name="adan",
            does="time Adan's step of BERT-base next to AdamW and the official Adan, with its energy",
            steps=adan_steps,
            targets=adan_targets,
        ),
        Part(name="tests", does="run tests/gpu and tests/cuda_ext on the GPU", steps=test_steps),
        Part(
            name="trainer",
            does="train BERT-base in 84 cells of precision, encoder or Hugging Face Trainer, and batch",
            steps=trainer_steps,
            targets=trainer_targets,
            trains=True,
        ),
        Part(
            name="encoders",
            does="time the kernels of a layer, and compare encoders of BERT-base in bf16 at up to 512 tokens",
            steps=encoder_steps,
            targets=encoder_targets,
            trains=True,
        ),
        Part(
            name="sanitise",
            does=f"run compute-sanitizer ({', '.join(SANITISERS)}) over every kernel of Adan",
            steps=sanitise_steps,
        ),
        Part(
            name="service",
            does="run a sweep through Ray and compare its runs by the GPU's energy counter",
            steps=service_steps,
            trains=True,
        ),
    )
}


@dataclass(slots=True)
class Record:
    """The file of a part: what it has done so far.

    Attributes:
        path: JSON.
        fields: as they are written.
    """

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def opened(cls, part: Part, here: Here, *, again: bool) -> Record:
        """Returns what an earlier start did on the same device at the same size, or an empty record."""
        record = cls(here.folder / f"{part.name}.json")
        key = {"part": part.name, "device": here.device, "smoke": here.smoke}
        if not again and record.path.exists():
            found = json.loads(record.path.read_text(encoding="utf-8"))
            if all(found.get(name) == value for name, value in key.items()):
                record.fields = found
        record.fields = {"complete": False, "steps": {}, "figures": {}, "targets": {}, **record.fields, **key}
        return record

    def is_done(self, step: Step) -> bool:
        """Whether an earlier start finished a step."""
        return bool(self.fields["steps"].get(step.name, {}).get("status") == Status.done)

    def write(self) -> None:
        """Replaces the file; a reader sees the one or the other."""
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps({**self.fields, "environment": environment()}, indent=1) + "\n")
        draft.replace(self.path)


def run_part(part: Part, here: Here, *, again: bool, clock: Callable[[], float] = time.monotonic) -> Record:
    """Runs the steps of a part that are not done, and writes its file after each.

    Args:
        part: Part of the suite.
        here: the machine.
        again: start over.
        clock: in seconds.
    """
    record = Record.opened(part, here, again=again)
    print(f"== {part.name}", flush=True)
    if record.fields["complete"]:
        date = record.fields["environment"]["date"]
        print(f"   done on {date}: {record.path}; --again repeats it", flush=True)
        return record
    begin = clock()
    if again:
        (here.folder / "trainer-cells.jsonl").unlink(missing_ok=True)
    missing = [name for name in TRAINERS_NEED if part.trains and importlib.util.find_spec(name) is None]
    if missing:
        steps: list[Step] = []
        left_out = [f"the trainers need {', '.join(missing)}: fetch them with make gpu-wheels, give --wheels"]
    else:
        steps, left_out = part.steps(here)
    if here.gpu is None:
        left_out.insert(0, f"would {part.does}; no CUDA device is visible")
    for line in left_out:
        print(f"   left out: {line}", flush=True)
    record.fields["left_out"] = left_out
    for step in steps:
        if not record.is_done(step):
            run_step(step, part, here, record, here.limit_s - (clock() - begin))
            record.write()
    done = all(record.is_done(step) for step in steps) and not missing
    record.fields["complete"] = done
    if done and here.gpu is not None and "H200" in here.gpu and not here.smoke:
        record.fields["targets"] = part.targets(record.fields["figures"])
    record.write()
    return record


def run_step(step: Step, part: Part, here: Here, record: Record, left_s: float) -> None:
    """Runs a step in a process of its own, for as long as the part has time left."""
    begin = time.monotonic()
    log = here.folder / f"{part.name}-{step.name}.log"
    command = list(step.command)
    if step.limit_flag is not None:
        command += [step.limit_flag, f"{max(1.0, 0.95 * left_s - 15.0):.0f}"]
    note = ""
    try:
        status = Status.done if _exit_code(command, log, left_s) == 0 else Status.failed
    except subprocess.TimeoutExpired:
        status, note = Status.unfinished, f"the part's limit of {here.limit_s:.0f} s came first"
    except OSError as error:
        status, note = Status.failed, str(error)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    figures = _last_object(lines) if step.result else None
    if figures is not None:
        record.fields["figures"][step.name] = figures
        if status is Status.done and figures.get("not_run"):
            status, note = Status.unfinished, f"{len(figures['not_run'])} cells are left for the next start"
    elif step.result and status is Status.done:
        status, note = Status.failed, "its last line is not a JSON object"
    if status is Status.failed:
        print("\n".join(lines[-30:]))
    note = note or (step.name if step.result else (lines[-1] if lines else ""))[:500]
    seconds = round(time.monotonic() - begin, 1)
    record.fields["steps"][step.name] = {
        "status": status.value, "seconds": seconds, "note": note, "command": command,
    }  # fmt: skip
    print(f"   {step.name}: {status.value} in {seconds} s: {note}", flush=True)


def _exit_code(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Runs a command with its output in a file; past the limit it ends with all that it started.

    Raises:
        subprocess.TimeoutExpired: the limit came first.
        OSError: it cannot be started.
    """
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(max(1.0, limit_s))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _last_object(lines: Sequence[str]) -> dict[str, Any] | None:
    """Returns the JSON object in the last line, without its record of the machine; None = it is none."""
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return {name: value for name, value in found.items() if name != "environment"}


def unpack(wheels: Path, into: Path) -> list[str]:
    """Unpacks the wheels whose packages are not installed, and lets this process' children import them.

    Args:
        wheels: folder of files such as `pydantic-2.14.3-py3-none-any.whl`.
        into: folder for the packages.

    Returns:
        Names of the packages.
    """
    unpacked = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            unpacked.append(name)
    return unpacked


def _import_from(folder: Path) -> None:
    """Lets this process and its children import packages of a folder that are not installed."""
    sys.path.append(str(folder))
    paths = [os.environ[name] for name in ("PYTHONPATH",) if os.environ.get(name)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(folder)])


def _parts(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: parts are {', '.join(PARTS)}")
    return names


def main() -> None:
    """Runs the parts and prints the outcome; exit code 1 when a step failed or a package is missing."""
    parser = BENCHMARK.parser()
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help="comma-separated; default: all")
    parser.add_argument("--output", type=Path, help=f"folder for results and logs (default {OUTPUT})")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for packages that are missing")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="longest time of a part")
    parser.add_argument("--again", action="store_true", help="start over what is done")
    parser.add_argument("--sanitise-target", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sanitise_target:
        sanitise_target()
        return
    with ExitStack() as stack:
        folder = options.output or OUTPUT
        if options.output is None and options.smoke:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="stillhouse-gpu-suite-")))
        folder.mkdir(parents=True, exist_ok=True)
        if options.wheels is not None:
            site = folder.resolve() / f"packages-{sys.version_info[0]}.{sys.version_info[1]}"
            if unpacked := unpack(options.wheels, site):
                print(f"unpacked: {', '.join(unpacked)}", flush=True)
            _import_from(site)
        records = suite(options, folder.resolve())
    result = {
        "device": records[0].fields["device"] if records else None,
        "parts": {record.fields["part"]: summary(record) for record in records},
        "targets": {name: row for record in records for name, row in record.fields["targets"].items()},
    }
    BENCHMARK.report(result, options)
    steps = [step for record in records for step in record.fields["steps"].values()]
    failed = any(step["status"] == Status.failed for step in steps)
    lacking = any(not record.fields["complete"] and not record.fields["steps"] for record in records)
    sys.exit(1 if failed or lacking else 0)


def summary(record: Record) -> dict[str, Any]:
    """Returns what the last line has of a part."""
    fields = record.fields
    steps = {name: step["status"] for name, step in fields["steps"].items()}
    return {"complete": fields["complete"], "steps": steps, "left_out": fields.get("left_out", [])}


def suite(options: argparse.Namespace, folder: Path) -> list[Record]:
    """Runs the chosen parts with results in the folder."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    capability = "{}.{}".format(*torch.cuda.get_device_capability()) if gpu else "9.0"
    here = Here(gpu, capability, folder, options.smoke, options.limit_s)
    return [run_part(PARTS[name], here, again=options.again) for name in options.parts]


if __name__ == "__main__":
    main()
