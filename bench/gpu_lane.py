"""What a CUDA lane costs beside its copies."""

import mmap
import os
import time
from pathlib import Path

import numpy as np
from gpu_device import Gpu
from gpu_engine import GpuEngine, pool_bytes
from harness import Daemon, fresh_keys, median

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.pinning import PinnedPool

GIB = 2**30
SECONDS = 120.0
LATENCY_FRAGMENT, LATENCY_BYTES = 4096, 8 * 2**20  # a chunk of 128 KiB, as in latency.py


def registration(gpu: Gpu, nbytes: int, rounds: int) -> dict[str, float]:
    """Seconds per GiB: of one registration of touched memory; of a new pool until it is pinned.

    Raises:
        RuntimeError: the pool is not pinned.
    """
    pinned, ready = [], []
    for _ in range(rounds):
        with mmap.mmap(-1, nbytes) as memory:
            touched = np.frombuffer(memory, np.uint8)
            touched[:] = 1
            address = touched.ctypes.data
            started = time.perf_counter()
            driver.register_host(address, nbytes)
            pinned.append((time.perf_counter() - started) * GIB / nbytes)
            driver.unregister_host(address)
            del touched
        descriptor = os.memfd_create("kvd-bench-pool")
        try:
            started = time.perf_counter()
            os.posix_fallocate(descriptor, 0, nbytes)
            pool = PinnedPool(descriptor, nbytes, gpu.context)
            while (
                pool.pinned < nbytes and not pool.error and time.perf_counter() < started + SECONDS
            ):
                time.sleep(0.001)
            ended = pool.pinned == nbytes
            ready.append((time.perf_counter() - started) * GIB / nbytes)
            error = pool.error
            pool.close()
        finally:
            os.close(descriptor)
        if error or not ended:
            raise RuntimeError(error or f"the pool is not pinned within {SECONDS:g} s")
    return {
        "register_s_per_gib": median(pinned),
        "allocate_and_register_s_per_gib": median(ready),
    }


def latency(gpu: Gpu, jobs: int, log: Path) -> dict[str, float]:
    """Microseconds from submission to seen finished of jobs of one chunk; and the lane's memory.

    The device memory that is gone once the lane runs is its context and what it keeps there.
    """
    fragment, nbytes = LATENCY_FRAGMENT, LATENCY_BYTES
    with Daemon(pool_bytes(fragment, nbytes), log=log) as daemon:
        before = gpu.free_bytes()
        with GpuEngine(gpu, daemon, fragment, nbytes) as engine:
            context = before - gpu.free_bytes() - engine.device_bytes
            keys, _ = engine.move(store=True)
            engine.move(keys)
            gpu.warm()
            chosen = (keys * (jobs // len(keys) + 1))[:jobs]
            loads = engine.one_chunk(chosen, store=False)
            stores = engine.one_chunk(fresh_keys(jobs), store=True)
    return {
        "store_p50_us": float(np.percentile(stores, 50)),
        "store_p99_us": float(np.percentile(stores, 99)),
        "load_p50_us": float(np.percentile(loads, 50)),
        "load_p99_us": float(np.percentile(loads, 99)),
        "context_mib": context / 2**20,
    }
