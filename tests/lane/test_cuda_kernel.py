"""The copy kernel: its source on the processor, its translation through the assembler.

Each of the kernel's threads is one of the processor's here; those of a warp meet where it says
so. What a GPU makes of it is for the tests that have one.
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

from kvd.lane.devices.cuda.move_kernel import KERNEL

SOURCE = KERNEL.with_suffix(".cu")
MADE = re.match(
    r"// kernel.cu of sha256 (\w+), translated by nvcc ([\d.]+)\n", KERNEL.read_text("ascii")
)

WARP = 32
SHIM = """
#include <barrier>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>
struct dim3_ { unsigned x; };
static thread_local dim3_ blockIdx, threadIdx;
static dim3_ blockDim, gridDim;
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct Warp { std::barrier<> meet{32}; uint64_t told[32]; };
static thread_local Warp* warp_;
static uint64_t __shfl_sync(unsigned, uint64_t mine, unsigned lane) {
  warp_->told[threadIdx.x % 32] = mine;
  warp_->meet.arrive_and_wait();
  const uint64_t theirs = warp_->told[lane];
  warp_->meet.arrive_and_wait();
  return theirs;
}
static uint4 __ldcs(const uint4* from) { return *from; }
static void __stcs(uint4* to, uint4 value) { *to = value; }
#include "kernel.cu"
extern "C" void run_kvd_move(const uint64_t* list, uint32_t count, unsigned grid, unsigned block) {
  gridDim.x = grid;
  blockDim.x = block;
  std::vector<Warp> warps(grid * block / 32);
  std::vector<std::thread> threads;
  for (unsigned b = 0; b < grid; b++)
    for (unsigned t = 0; t < block; t++)
      threads.emplace_back([&, b, t] {
        blockIdx.x = b;
        threadIdx.x = t;
        warp_ = &warps[(b * block + t) / 32];
        kvd_move(list, count);
      });
  for (std::thread& thread : threads) thread.join();
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel's source, compiled for this processor."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    shim, library = folder / "shim.cpp", folder / "kernel.so"
    shim.write_text(SHIM, "ascii")
    source = SOURCE.read_text("utf-8").replace('extern "C" __global__', "static")
    (folder / "kernel.cu").write_text(source.replace("__device__", "static"), "utf-8")
    command = [compiler, "-std=c++20", "-O1", "-pthread", "-Wno-unknown-pragmas"]
    command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    subprocess.run(
        [*command, "-shared", "-fPIC", str(shim), "-o", str(library)], check=True, timeout=100
    )
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize(
    ("count", "blocks", "warps"),
    [(60, 2, 2), (1, 2, 1), (3, 2, 2), (100, 1, 1), (67, 2, 1)],
    ids=["many", "one", "fewer than warps", "more than a warp fetches at once", "uneven shares"],
)
def test_every_byte_of_every_run_is_moved(
    kernel: ctypes.CDLL, count: int, blocks: int, warps: int
) -> None:
    """Any number, alignment and length: the runs' bytes arrive and no others change."""
    rng = np.random.default_rng(count)
    size = count * 16384
    source_bytes = rng.integers(0, 256, size, dtype=np.uint8)
    target, wanted = np.full(size, 0xEE, np.uint8), np.full(size, 0xEE, np.uint8)
    runs = np.zeros((3, count), np.uint64)
    for index in range(count):
        shared = int(rng.integers(0, 16))
        skew = 0 if index % 2 else int(rng.integers(0, 16))
        begin, end = index * 16384 + shared, index * 16384 + shared + skew
        length = int(rng.choice([1, 15, 16, 17, 2048, 4096, 4100, 5000, 8192, 9999]))
        runs[:, index] = (source_bytes.ctypes.data + begin, target.ctypes.data + end, length)
        wanted[end : end + length] = source_bytes[begin : begin + length]
    kernel.run_kvd_move(ctypes.c_void_p(runs.ctypes.data), count, blocks, warps * WARP)
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
