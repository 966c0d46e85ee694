"""The copy kernel: its source on the processor, its translation through the assembler.

The threads of kvd_move share nothing, so running them one after the other is a
run of the kernel. What a GPU makes of it is for the tests that have one.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvd.lane.devices.cuda.copier import KERNEL

SOURCE = KERNEL.with_suffix(".cu")
MADE = re.match(
    r"// kernel.cu of sha256 (\w+), translated by nvcc ([\d.]+)\n", KERNEL.read_text("ascii")
)

SHIM = """
#include <cstdint>
struct dim3_ { unsigned x; };
static dim3_ blockIdx, threadIdx, blockDim, gridDim;
struct alignas(16) uint4 { uint32_t x, y, z, w; };
#include "kernel.cu"
extern "C" void run_kvd_move(const kvd_run* runs, uint32_t count, unsigned grid, unsigned block) {
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) kvd_move(runs, count);
}
"""


def test_every_byte_of_every_run_is_moved(tmp_path: Path) -> None:
    """Any alignment of either side, any length: the runs' bytes arrive and no others change."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    shim, library = tmp_path / "shim.cpp", tmp_path / "kernel.so"
    shim.write_text(SHIM, "ascii")
    source = SOURCE.read_text("utf-8").replace('extern "C" __global__', "static")
    (tmp_path / "kernel.cu").write_text(source, "utf-8")
    command = [compiler, "-O1", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    subprocess.run(
        [*command, "-shared", "-fPIC", str(shim), "-o", str(library)], check=True, timeout=100
    )
    kernel = ctypes.CDLL(str(library))
    rng = np.random.default_rng(7)
    size, count = 2**20, 60
    source_bytes = rng.integers(0, 256, size, dtype=np.uint8)
    target, wanted = np.full(size, 0xEE, np.uint8), np.full(size, 0xEE, np.uint8)
    runs = np.zeros((count, 3), np.uint64)
    for index in range(count):
        shared = int(rng.integers(0, 16))
        skew = 0 if index % 2 else int(rng.integers(0, 16))
        begin, end = index * 16384 + shared, index * 16384 + shared + skew
        length = int(rng.choice([1, 15, 16, 17, 4096, 5000, 8192, 9999]))
        runs[index] = (source_bytes.ctypes.data + begin, target.ctypes.data + end, length)
        wanted[end : end + length] = source_bytes[begin : begin + length]
    kernel.run_kvd_move(ctypes.c_void_p(runs.ctypes.data), count, 8, 64)
    np.testing.assert_array_equal(target, wanted)


def toolkit(name: str) -> str:
    """A program of the CUDA toolkit; skips where there is none."""
    places = sorted(map(str, Path("/usr/local").glob("cuda*/bin")))
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *places]))
    if found is None:
        pytest.skip(f"the CUDA toolkit's {name} is not here")
    return found


def test_the_translation_is_of_this_source() -> None:
    """Whoever changes kernel.cu translates it anew."""
    assert MADE is not None
    assert hashlib.sha256(SOURCE.read_bytes()).hexdigest() == MADE[1]


@pytest.mark.parametrize("architecture", ["sm_70", "sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_translation_is_taken_by_the_assembler(tmp_path: Path, architecture: str) -> None:
    """The embedded PTX is whole and asks for nothing that a device since Volta lacks."""
    assembler = toolkit("ptxas")
    cubin = tmp_path / "kernel.cubin"
    command = [assembler, f"-arch={architecture}", str(KERNEL), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    if "is not defined for option" in done.stderr:
        pytest.skip(f"this assembler does not know {architecture}")
    assert done.returncode == 0, done.stderr
    assert b"kvd_move" in cubin.read_bytes()
