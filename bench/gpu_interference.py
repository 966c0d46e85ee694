"""How much another process on the GPU slows down while kvd saturates the bus, and by which way."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gpu_device import Gpu
from gpu_engine import GpuEngine, pool_bytes
from harness import Daemon, median

SECONDS = 2.0
# Fragments, and below which length the kernel moves them.
WAYS = {"dma": (2 * 2**20, 0), "kernel": (8192, 2**20)}


@contextmanager
def neighbour() -> Iterator[Callable[[], float]]:
    """Yield what measures the TFLOP/s that another process on the GPU reaches now.

    Raises:
        RuntimeError: it cannot compute, with the reason.
    """
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "gpu_matmul.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def tflops() -> float:
        asked.write(f"{SECONDS}\n")
        asked.flush()
        return float(answers.readline())

    try:
        answer = answers.readline().strip()
        if answer != "ready":
            raise RuntimeError(answer or "the process that computes does not start")
        yield tflops
    finally:
        process.kill()
        process.communicate()


def measure(gpu: Gpu, way: str, nbytes: int, rounds: int, log: Path) -> dict[str, float]:
    """TFLOP/s alone and beside kvd, the loss in percent, kvd's GB/s meanwhile.

    Args:
        gpu: where kvd moves.
        way: one of WAYS.
        nbytes: to move at a time.
        rounds: alone and beside kvd in turn, after a first one that does not count.
        log: the daemon's.

    Raises:
        RuntimeError: torch sees no GPU, or the kernel does not work on it.
    """
    fragment, below = WAYS[way]
    os.environ["LANE_KERNEL_BELOW"] = str(below)
    alone, beside, rates = [], [], []
    with (
        neighbour() as tflops,
        Daemon(pool_bytes(fragment, nbytes), log=log) as daemon,
        GpuEngine(gpu, daemon, fragment, nbytes) as engine,
    ):
        engine.move(store=True)
        if "the kernel does not work here" in log.read_text("utf-8", "replace"):
            raise RuntimeError("the kernel does not work on this device")
        for number in range(rounds + 1):
            by_itself = tflops()
            with_kvd, meanwhile = _beside(tflops, gpu, engine)
            if number:
                alone.append(by_itself)
                beside.append(with_kvd)
                rates += meanwhile
    return {
        "alone_tflops": median(alone),
        "beside_tflops": median(beside),
        "loss_percent": 100 * (1 - median(beside) / median(alone)),
        "kvd_GBps": median(rates),
    }


def _beside(tflops: Callable[[], float], gpu: Gpu, engine: GpuEngine) -> tuple[float, list[float]]:
    """The neighbour's TFLOP/s while kvd loads and stores without a pause, and kvd's GB/s."""
    stop = threading.Event()

    def saturate() -> list[float]:
        gpu.use()
        keys, _ = engine.move(store=True)
        rates: list[float] = []
        while not (rates and stop.is_set()):  # one figure at least
            keys, gbps = engine.move(keys, store=True)
            rates.append(gbps)
        return rates

    with ThreadPoolExecutor(1) as threads:
        saturating = threads.submit(saturate)
        try:
            found = tflops()
        finally:
            stop.set()
        return found, saturating.result()
