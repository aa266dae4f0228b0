"""Compiling once, finding it again, and doing without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks import adan_variants
from cuda_ext import BuildError, build, native
from tests.cuda_ext import kernel_check
from tests.cuda_ext.kernel_check import KernelResources


def test_what_is_compiled_is_found_without_a_compiler_run(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str]) -> str:
        raise AssertionError(f"ran {command}")

    monkeypatch.setattr(build, "run", refuse)
    begin = time.perf_counter()
    assert build.library("cpu").exists()
    assert time.perf_counter() - begin < 0.5
    assert build.is_built("cpu")


def test_a_changed_source_is_another_library(
    kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.cpu_plan().key
    for source in build.SOURCES.iterdir():
        if source.is_file():
            (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "adan_update.h").write_text("// changed\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.cpu_plan().key != before


def test_two_who_need_the_library_compile_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def slow(plan: build.Plan, path: Path) -> None:
        compiled.append(path)
        time.sleep(0.2)
        path.write_bytes(b"library")

    monkeypatch.setattr(build, "_compile", slow)
    plan = build.Plan("cpu", (), ())
    threads = [threading.Thread(target=build.compile_plan, args=(plan, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


def test_a_compiler_error_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "broken.cpp").write_text("this is no C++\n")
    plan = build.Plan("cpu", (build.Unit("broken", build.compiler(), "broken.cpp", ()),), ())
    with pytest.raises(BuildError, match=r"exited with 1: .*error") as caught:
        build.compile_plan(plan, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_without_a_compiler_the_unfused_step_runs_with_one_warning(tmp_path: Path) -> None:
    script = """
import torch, warnings
from cuda_ext import Adan
param = torch.nn.Parameter(torch.zeros(5))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = Adan([param], implementation="single_fused")
    param.grad = torch.ones(5)
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
print(optimizer.implementation, [str(w.message) for w in caught if w.category is RuntimeWarning])
"""
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "STILLHOUSE_KERNEL_CACHE": str(tmp_path),
        "PYTHONPATH": str(Path(build.__file__).parents[1]),
    }
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    expected = (
        "Adan runs single_unfused instead of single_fused: no C++ compiler found; install g++ or set CXX"
    )
    assert done.stdout.strip() == f"single_unfused ['{expected}']"


def test_a_library_beside_the_package_needs_no_compiler(
    kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PACKAGED", tmp_path)
    built = build.library("cpu")
    monkeypatch.setattr(build, "compile_plan", lambda plan, folder: Path(folder / built.name))
    (tmp_path / built.name).write_bytes(built.read_bytes())
    tmp_path.chmod(0o700)
    build.build_ahead("cpu", in_package=True)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    assert build.library("cpu") == tmp_path / built.name
    note = json.loads((tmp_path / "cpu.json").read_text())
    (tmp_path / "cpu.json").write_text(json.dumps({**note, "sources": "of another day"}))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build.library("cpu")


def test_targets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    assert build.wanted_architectures() == ("8.0", "9.0+PTX")
    flags = build._architecture_flags(build.wanted_architectures())
    assert flags == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    )
    with pytest.raises(BuildError, match="Hopper"):
        build._architecture_flags(("Hopper",))


def test_without_a_list_the_newest_target_also_serves_devices_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: False)
    assert build.wanted_architectures()[-2:] == ("10.0", "12.0+PTX")
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(build.torch.cuda, "get_device_capability", lambda i: [(9, 0), (8, 0)][i])
    assert build.wanted_architectures() == ("8.0", "9.0+PTX")


def test_a_compiler_upgraded_in_place_makes_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(compiler))

    def key(version: str) -> str:
        compiler.write_text(f"#!/bin/sh\necho {version}\n")
        compiler.chmod(0o755)
        build.compiler_version.cache_clear()
        return build.cpu_plan().key

    assert key("12.2") != key("13.1")
    assert key("12.2") == key("12.2")
    build.compiler_version.cache_clear()


@pytest.mark.parametrize("launcher", ["", "ccache "])
def test_nvcc_takes_the_host_compiler_that_cxx_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    host = tmp_path / "g++-12"
    host.touch(mode=0o755)
    monkeypatch.setenv("CXX", f"{launcher}{host}")
    assert all(f"-ccbin={host}" in unit.flags for unit in build.cuda_units("nvcc", ("9.0",)))
    monkeypatch.delenv("CXX")
    assert not any("-ccbin" in flag for unit in build.cuda_units("nvcc", ("9.0",)) for flag in unit.flags)


@pytest.mark.parametrize(("cuda", "code"), [("13.0", 1), (None, 0)])
def test_a_complete_build_lacks_nothing_that_torch_computes_on(
    cuda: str | None, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ahead(kind: str, *, in_package: bool) -> Path:
        if kind == "cuda":
            raise BuildError("nvcc not found")
        return tmp_path

    monkeypatch.setattr(build, "build_ahead", ahead)
    monkeypatch.setattr(build.torch.version, "cuda", cuda)
    assert build.main(["--complete"]) == code
    assert build.main([]) == 0


@pytest.mark.parametrize(
    ("target", "capability", "fits"),
    [("8.0", (8, 6), True), ("8.6", (8, 0), False), ("8.0", (9, 0), False), ("8.0+PTX", (9, 0), True)],
)
def test_a_target_runs_on_its_own_family_or_by_ptx(
    target: str, capability: tuple[int, int], fits: bool
) -> None:
    assert build._runs_on(target, *capability) is fits


def test_the_assemblers_report_is_read() -> None:
    log = """
ptxas info    : Compiling entry function '_Z1kv' for 'sm_90'
ptxas info    : Function properties for _Z1kv
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 57 bytes smem
"""
    found = kernel_check.parse(log)
    assert found == [KernelResources("sm_90", "_Z1kv", 64, 20, 57)]
    assert not kernel_check.within_limits(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first run with new sources compiles; later ones read what it found
def test_no_cuda_kernel_spills_on_any_target() -> None:
    """Compiles all kernels for all targets; the result is cached by the sources' hash."""
    try:
        build.nvcc()
    except BuildError as error:
        pytest.skip(str(error))
    found = kernel_check.kernel_resources()
    assert {row.target for row in found} == {f"sm_{name.replace('.', '')}" for name in build.ARCHITECTURES}
    assert len(found) == len(build.ARCHITECTURES) * 19
    assert [row for row in found if row.spill_bytes] == []
    assert max(row.registers for row in found) <= kernel_check.REGISTER_LIMIT


def test_cuda_12_compiles_every_kernel_for_a_v100_without_spills() -> None:
    """`make kernels` brings the compiler."""
    try:
        kernel_check.nvrtc_release()
    except BuildError as error:
        pytest.skip(str(error))
    found = kernel_check.kernel_resources((kernel_check.VOLTA,))
    assert {row.target for row in found} == {"sm_70"}
    assert len(found) == 19
    assert [row for row in found if row.spill_bytes] == []
    assert max(row.registers for row in found) <= kernel_check.REGISTER_LIMIT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_variant_compiles_for_an_h200() -> None:
    try:
        build.nvcc()
    except BuildError as error:
        pytest.skip(str(error))
    found = adan_variants.variant_resources(("9.0",))
    assert [row.variant for row in found] == [variant.name for variant in adan_variants.VARIANTS]
    assert all(row.occupancy_pct > 0 for row in found)
    assert all(row.spill_bytes == 0 for row in found if row.variant == "shipped")
    staged = [row for row in found if row.variant == "cp.async, three stages"]
    assert all(row.shared_bytes > 3 * 6 * 16 * 128 for row in staged), "its vectors are in shared memory"


def test_the_library_that_trains_has_no_variants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "why_no_cuda", lambda: None)
    monkeypatch.setattr(build, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "toolkit", lambda nvcc: (tmp_path, "13.0"))
    monkeypatch.setattr(build.torch.version, "cuda", "13.0")
    trains, compared = (
        {unit.name for unit in build.cuda_plan(variants=variants).units} for variants in (False, True)
    )
    assert trains - compared == {"adan_cuda_float32"}
    assert compared - trains == {"adan_cuda_variants"}


def test_the_image_has_the_kernels_or_is_not_built() -> None:
    stages = (Path(build.__file__).parents[1] / "docker" / "Dockerfile").read_text().split("\nFROM ")
    (kernels,) = (stage for stage in stages if stage.startswith("base AS kernels"))
    final = stages[-1]
    assert "FORCE_CUDA=1" in kernels
    assert "python -m cuda_ext.build --in-package --complete" in kernels
    assert "COPY --from=kernels" in final
    assert "native.require('cuda' if torch.version.cuda else 'cpu')" in final


def test_a_failure_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(kind: str) -> Path:
        asked.append(kind)
        raise BuildError("no luck")

    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_unavailable", {})
    monkeypatch.setattr(build, "library", fail)
    assert native.why_unavailable("cpu") == "no luck"
    assert native.why_unavailable("cpu") == "no luck"
    assert asked == ["cpu"]
