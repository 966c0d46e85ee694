"""How much another process on the GPU slows down while kvd saturates the bus, and by which way.

Copy engines work beside the multiprocessors. A kernel of the lane does not: without MPS the
contexts of two processes take turns, each with the whole GPU for its time slice, so what the
lane's kernel takes shows in the longest kernels of the other process. With MPS they share.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gpu_device import Gpu
from gpu_engine import GpuEngine, pool_bytes
from gpu_figures import spread
from harness import Daemon

PRODUCTS_SECONDS, DECODE_SECONDS = 1.0, 0.5
# Fragments, and below which length the kernel moves them.
WAYS = {"dma": (2 * 2**20, 0), "kernel": (8192, 2**20)}
DECODE = ("p50", "p99", "longest")

T = TypeVar("T")
Ask = Callable[[str, float], list[float]]


@contextmanager
def neighbour() -> Iterator[Ask]:
    """Yield what asks another process on the GPU, which works meanwhile; see gpu_neighbour.py.

    Raises:
        RuntimeError: it cannot compute, with the reason.
    """
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "gpu_neighbour.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def ask(what: str, seconds: float) -> list[float]:
        asked.write(f"{what} {seconds}\n")
        asked.flush()
        return [float(number) for number in answers.readline().split()]

    try:
        answer = answers.readline().strip()
        if answer != "ready":
            raise RuntimeError(answer or "the process that computes does not start")
        yield ask
    finally:
        process.kill()
        process.communicate()


def measure(gpu: Gpu, way: str, nbytes: int, rounds: int, log: Path) -> dict[str, Any]:
    """TFLOP/s and the time of small kernels alone and beside kvd, kvd's GB/s meanwhile.

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
    os.environ["LANE_CUDA"] = f"kernel={below}"
    samples: dict[str, list[float]] = {}

    def keep(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    with (
        neighbour() as ask,
        Daemon(pool_bytes(fragment, nbytes), log=log) as daemon,
        GpuEngine(gpu, daemon, fragment, nbytes) as engine,
    ):
        engine.move(store=True)
        if "the kernel does not work here" in log.read_text("utf-8", "replace"):
            raise RuntimeError("the kernel does not work on this device")
        for number in range(rounds + 1):
            (alone,) = ask("products", PRODUCTS_SECONDS)
            (beside,), rates = _beside(lambda: ask("products", PRODUCTS_SECONDS), gpu, engine)
            quiet = ask("decode", DECODE_SECONDS)
            busy, more = _beside(lambda: ask("decode", DECODE_SECONDS), gpu, engine)
            if not number:
                continue
            keep("alone_tflops", alone)
            keep("beside_tflops", beside)
            keep("loss_percent", 100 * (1 - beside / alone))
            for name, by_itself, with_kvd in zip(DECODE, quiet, busy, strict=True):
                keep(f"decode_alone_{name}_us", by_itself)
                keep(f"decode_beside_{name}_us", with_kvd)
            for rate in rates + more:
                keep("kvd_GBps", rate)
    return {name: spread(values) for name, values in samples.items()}


def _beside(work: Callable[[], T], gpu: Gpu, engine: GpuEngine) -> tuple[T, list[float]]:
    """What the work finds while kvd loads and stores without a pause, and kvd's GB/s."""
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
            found = work()
        finally:
            stop.set()
        return found, saturating.result()
