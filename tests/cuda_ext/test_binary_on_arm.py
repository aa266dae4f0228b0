"""The NEON kernels, compiled for 64-bit ARM and run in an emulator: the same bits as plain C++."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cuda_ext.build import BINARY_LOOPS

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = Path(__file__).parents[2] / "cuda_ext" / "csrc"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason=f"{COMPILER} or {EMULATOR} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)",
)
def test_products_with_packed_weights_are_the_same_on_arm(tmp_path: Path) -> None:
    objects = []
    for name, flags in (("scalar", ()), ("neon", ("-DSTILLHOUSE_NEON",))):
        objects.append(tmp_path / f"{name}.o")
        source = ("-c", str(SOURCES / "binary_rows.cpp"), "-o", str(objects[-1]))
        subprocess.run([COMPILER, *BINARY_LOOPS, *flags, f"-DSTILLHOUSE_ISA={name}", *source], check=True)
    program = tmp_path / "binary_on_arm"
    driver = Path(__file__).parent / "arm" / "binary_on_arm.cpp"
    subprocess.run(
        [
            COMPILER,
            *BINARY_LOOPS,
            "-static",
            f"-I{SOURCES}",
            str(driver),
            *map(str, objects),
            "-o",
            str(program),
        ],
        check=True,
    )
    ran = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "300 shapes\n"), ran.stdout + ran.stderr
