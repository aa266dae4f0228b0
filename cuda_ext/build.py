"""Compiles the kernels: on first use with a cache and a lock, or ahead of time.

    python -m cuda_ext.build                 # everything this machine can build, into the user's cache
    python -m cuda_ext.build --in-package    # next to the package, for images that other users run

The cache is `$STILLHOUSE_KERNEL_CACHE`, else `$XDG_CACHE_HOME/stillhouse/kernels`, else
`~/.cache/stillhouse/kernels`. A library is found by the hash of its sources, flags, compiler and torch
version. `TORCH_CUDA_ARCH_LIST` chooses targets; `FORCE_CUDA=1` builds the CUDA library where no GPU is.
"""

import argparse
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

from cuda_ext import BuildError

SOURCES = Path(__file__).parent / "csrc"
PACKAGED = Path(__file__).parent / "_built"

_BINDING = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-O2")
_COMMON = (*_BINDING[:-1], "-O3")
# The loops keep NaN and infinity; only errno and traps, which no one reads, are given up for vector code.
# Vectors wider than the registers never cross an object's border, which is what GCC would note about them.
_LOOPS = (*_COMMON, "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
_INSTRUCTION_SETS = {
    "scalar": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
}
_VPOPCNTDQ = "-mavx512vpopcntdq"
# A product and its bias are rounded one after the other, as PyTorch rounds them. Integer sums are not made
# a tree, which would not fit the registers.
BINARY_LOOPS = (*_LOOPS, "-ffp-contract=off", "-fno-tree-reassoc")
"""Flags of the products with packed weights, whose sums have one order on every processor."""
_BINDINGS = ("adan_cpu", "encoder_cpu", "binary_cpu")
ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
"""Compute capabilities that the CUDA kernels are built and checked for where none is asked for."""
_PTX = "+PTX"  # Ending of a target whose code the driver also translates for newer devices
_LAUNCHERS = ("ccache", "sccache", "distcc")


@dataclass(frozen=True)
class Unit:
    name: str
    compiler: str
    source: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    kind: str
    units: tuple[Unit, ...]
    link: tuple[str, ...]
    targets: tuple[str, ...] = ()

    @functools.cached_property
    def key(self) -> str:
        """Hash of everything that the library depends on."""
        digest = hashlib.sha256()
        for part in (torch.__version__, platform.machine(), sys.platform, repr(self.units), repr(self.link)):
            digest.update(part.encode() + b"\0")
        for command in sorted({unit.compiler for unit in self.units}):
            digest.update(compiler_version(command).encode() + b"\0")
        for path in sorted(SOURCES.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:20]

    @property
    def file_name(self) -> str:
        return f"{self.kind}-{self.key}.so"


def cache_folder() -> Path:
    if chosen := os.environ.get("STILLHOUSE_KERNEL_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stillhouse" / "kernels"


def compiler() -> str:
    """The C++ compiler: `$CXX`, else c++, g++ or clang++ on the path."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    raise BuildError("no C++ compiler found; install g++ or set CXX")


@functools.cache
def compiler_version(command: str) -> str:
    """Part of a library's key: a compiler upgraded in place makes another library."""
    try:
        query = [*shlex.split(command), "--version"]
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"{command} does not run ({error}); set CXX or CUDA_HOME") from error


def _torch_folder() -> Path:
    # Environments that link to one torch share a library.
    return Path(torch.__file__).resolve().parent


def _torch_include() -> tuple[str, ...]:
    root = _torch_folder() / "include"
    return (f"-I{root}", f"-I{root / 'torch' / 'csrc' / 'api' / 'include'}")


def _torch_link(*extra: str) -> tuple[str, ...]:
    # No -fopenmp here: the OpenMP symbols then resolve to the runtime that torch has loaded. A second
    # runtime in one process would bring a second pool of spinning threads.
    library = _torch_folder() / "lib"
    return (f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_cpu", "-lc10", *extra)


def cpu_plan() -> Plan:
    cxx = compiler()
    x86 = platform.machine() in ("x86_64", "AMD64")
    sets = _INSTRUCTION_SETS if x86 else {"scalar": ()}
    # NEON, which every 64-bit ARM has; `scalar` is then compiled without its intrinsics.
    arm = {"neon": ("-DSTILLHOUSE_NEON",)} if platform.machine() in ("aarch64", "arm64") else {}
    binary_sets = sets | ({"avx512": (*sets["avx512"], _VPOPCNTDQ)} if x86 else arm)
    binding = (*_BINDING, *_torch_include())
    units = (
        *(Unit(name, cxx, f"{name}.cpp", (*binding, "-fopenmp")) for name in _BINDINGS),
        *(
            Unit(f"{source}_{name}", cxx, f"{source}.cpp", (*common, *flags, f"-DSTILLHOUSE_ISA={name}"))
            for source, common, its_sets in (
                ("encoder_attention", _LOOPS, sets),
                ("encoder_rows", _LOOPS, sets),
                ("adan_cpu_chunk", _LOOPS, sets),
                ("binary_rows", BINARY_LOOPS, binary_sets),
            )
            for name, flags in its_sets.items()
        ),
    )
    return Plan("cpu", units, _torch_link())


def wanted_architectures() -> tuple[str, ...]:
    """Targets of the CUDA library: `TORCH_CUDA_ARCH_LIST`, else the GPUs here, else all we check for.

    Unless they are listed, the newest one also serves devices that come after it.
    """
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return tuple(listed.replace(";", " ").replace(",", " ").split())
    if torch.cuda.is_available():
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        *older, newest = (f"{major}.{minor}" for major, minor in sorted(capabilities))
    else:
        *older, newest = ARCHITECTURES
    return (*older, newest + _PTX)


def _architecture_flags(architectures: tuple[str, ...]) -> tuple[str, ...]:
    flags: list[str] = []
    for architecture in architectures:
        number = architecture.removesuffix(_PTX).replace(".", "")
        if not number.rstrip("af").isdigit():
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST names {architecture!r}; write numbers such as 9.0 or 9.0+PTX"
            )
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if architecture.endswith(_PTX):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(flags)


def nvcc() -> str:
    """The CUDA compiler: under `$CUDA_HOME`, else on the path, else /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return candidate
    raise BuildError("nvcc not found; install the CUDA toolkit or set CUDA_HOME")


@functools.cache
def toolkit(nvcc_path: str) -> tuple[Path, str]:
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cu"
        probe.touch()
        dry = subprocess.run(
            [nvcc_path, "--dryrun", "-c", str(probe)], capture_output=True, text=True, check=False
        )
    version = subprocess.run([nvcc_path, "--version"], capture_output=True, text=True, check=False).stdout
    tops = [line.split("TOP=", 1)[1].strip() for line in dry.stderr.splitlines() if "TOP=" in line]
    if not tops or "release " not in version:
        raise BuildError(f"{nvcc_path} does not report its toolkit's folder or release; set CUDA_HOME")
    return Path(tops[0]).resolve(), version.split("release ", 1)[1].split(",", 1)[0]


CUDA_UNITS = ("adan_cuda", "adan_cuda_float32", "adan_cuda_bfloat16", "adan_cuda_float16", "binary_cuda")
"""Objects of the CUDA library; `adan_cuda_variants` is one for benchmarks, in the place of the second."""


def cuda_units(
    nvcc_path: str, architectures: tuple[str, ...], *extra: str, units: Sequence[str] = CUDA_UNITS
) -> tuple[Unit, ...]:
    """The CUDA objects; none includes a torch header, so they compile where torch has no CUDA."""
    chosen = (*_host_compiler(), *_architecture_flags(architectures), *extra)
    flags = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", *chosen)
    return tuple(Unit(name, nvcc_path, f"{name}.cu", flags) for name in units)


def _host_compiler() -> tuple[str, ...]:
    words = shlex.split(os.environ.get("CXX", ""))
    named = next((word for word in words if Path(word).name not in _LAUNCHERS), None)
    return () if named is None or not shutil.which(named) else (f"-ccbin={shutil.which(named)}",)


def why_no_cuda() -> str | None:
    """Why the CUDA library cannot be used or built here, as far as is known without compiling."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available() and os.environ.get("FORCE_CUDA", "0") != "1":
        return "no CUDA device is visible (FORCE_CUDA=1 builds without one)"
    return None


def cuda_plan(*, variants: bool = False) -> Plan:
    """`variants` adds kernels of Adan that are only measured (`benchmarks.adan_variants`)."""
    if reason := why_no_cuda():
        raise BuildError(reason)
    nvcc_path = nvcc()
    root, release = toolkit(nvcc_path)
    built_for = str(torch.version.cuda)
    if release.split(".")[0] != built_for.split(".")[0]:
        raise BuildError(
            f"nvcc is CUDA {release}, but torch is built for CUDA {built_for}; set CUDA_HOME to a "
            "matching toolkit"
        )
    architectures = wanted_architectures()
    names = [
        "adan_cuda_variants" if variants and name == "adan_cuda_float32" else name for name in CUDA_UNITS
    ]
    binding_flags = (*_BINDING, *_torch_include(), f"-I{root / 'include'}")
    units = (
        Unit("binding_cuda", compiler(), "binding_cuda.cpp", binding_flags),
        *cuda_units(nvcc_path, architectures, units=names),
    )
    runtime = (f"-L{root / 'lib64'}", f"-Wl,-rpath,{root / 'lib64'}", "-lcudart")
    return Plan("cuda", units, _torch_link("-ltorch_cuda", "-lc10_cuda", *runtime), architectures)


def library(kind: str) -> Path:
    """Returns the library `cpu` or `cuda`, built now if not there yet; raises BuildError."""
    if packaged := _packaged(kind):
        return packaged
    return compile_plan(_plan(kind), cache_folder())


def is_built(kind: str) -> bool:
    """Whether `library(kind)` would find it without compiling."""
    if _packaged(kind):
        return True
    try:
        plan = _plan(kind)
    except BuildError:
        return False
    return (cache_folder() / plan.file_name).exists()


def _plan(kind: str) -> Plan:
    return {"cpu": cpu_plan, "cuda": cuda_plan}[kind]()


def _source_digest() -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _packaged(kind: str) -> Path | None:
    """A prebuilt library fits if sources, torch and, for CUDA, a target of this GPU agree.

    It is not looked up by the plan's key: an image need not have a compiler, or the environment that chose
    the targets.
    """
    note = PACKAGED / f"{kind}.json"
    if not note.exists():
        return None
    facts = json.loads(note.read_text())
    path = PACKAGED / str(facts["file"])
    if facts["sources"] != _source_digest() or facts["machine"] != platform.machine() or not path.exists():
        return None
    if kind == "cuda":
        if why_no_cuda():
            return None
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            if not any(_runs_on(target, major, minor) for target in facts["targets"]):
                return None
    return path


def _runs_on(target: str, major: int, minor: int) -> bool:
    number = target.removesuffix(_PTX).rstrip("af")
    built_major, built_minor = (int(part) for part in number.split("."))
    same_family = built_major == major and built_minor <= minor
    return same_family or (target.endswith(_PTX) and (built_major, built_minor) <= (major, minor))


def compile_plan(plan: Plan, folder: Path) -> Path:
    """Compiles and links into `folder`, once over all processes; returns the library's path."""
    path = folder / plan.file_name
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(folder / f"{plan.file_name}.lock"):
            if not path.exists():
                _compile(plan, path)
    except OSError as error:
        raise BuildError(f"cannot write {folder} ({error}); set STILLHOUSE_KERNEL_CACHE") from error
    return path


def _compile(plan: Plan, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{plan.kind}-") as folder:
        outputs = [Path(folder) / f"{unit.name}.o" for unit in plan.units]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(compile_unit, plan.units, outputs))
        linked = Path(folder) / path.name
        run([*shlex.split(compiler()), "-shared", *map(str, outputs), "-o", str(linked), *plan.link])
        linked.replace(path)  # atomic: a reader sees the whole library or none


def compile_unit(unit: Unit, output: Path) -> str:
    command = shlex.split(unit.compiler)
    return run([*command, *unit.flags, "-c", str(SOURCES / unit.source), "-o", str(output)])


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    if done.returncode != 0:
        last = " | ".join(line.strip() for line in printed.strip().splitlines()[-4:])
        raise BuildError(f"{Path(command[0]).name} exited with {done.returncode}: {last}")
    return printed


def build_ahead(kind: str, *, in_package: bool = False) -> Path:
    plan = _plan(kind)
    path = compile_plan(plan, PACKAGED if in_package else cache_folder())
    if in_package:
        facts = {
            "file": path.name,
            "sources": _source_digest(),
            "machine": platform.machine(),
            "targets": plan.targets,
        }
        PACKAGED.chmod(0o755)  # Who installs the package is not who runs it.
        (PACKAGED / f"{kind}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return path


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 when nothing could be built, or with `--complete` not everything."""
    parser = argparse.ArgumentParser("python -m cuda_ext.build", description="Compile Stillhouse's kernels.")
    for flag, text in (
        ("--complete", "fail unless there are kernels for all that this torch computes on"),
        ("--in-package", "next to the package instead of in the user's cache"),
    ):
        parser.add_argument(flag, action="store_true", help=text)
    options = parser.parse_args(arguments)
    missing = []
    for kind in ("cpu", "cuda"):
        try:
            print(f"{kind}: {build_ahead(kind, in_package=options.in_package)}")
        except BuildError as error:
            print(f"{kind}: not built: {error}")
            missing.append(kind)
    if options.complete:
        return 1 if "cpu" in missing or ("cuda" in missing and torch.version.cuda) else 0
    return 1 if len(missing) == 2 else 0


if __name__ == "__main__":
    sys.exit(main())
