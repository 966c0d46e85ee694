"""How much another process on the GPU slows down while kvd saturates the bus, and by which way."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from gpu_device import Gpu
from gpu_engine import Engine, pool_bytes
from harness import Daemon, median

SECONDS = 2.0
# Fragments, and below which length the kernel moves them.
WAYS = {"dma": (2 * 2**20, 0), "kernel": (8192, 2**20)}


class Neighbour:
    """Another process that computes on the GPU; ended with the context.

    Raises:
        RuntimeError: where the context begins: it cannot, with the reason.
    """

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "gpu_matmul.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._answer()
        if answer != "ready":
            self._end()
            raise RuntimeError(answer or "the process that computes does not start")
        return self

    def tflops(self, seconds: float) -> float:
        """What it reaches now."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()


class Saturated:
    """Loads and stores without a pause, on a thread, while the context lasts.

    Attributes:
        rates: GB/s of both directions together, in turn.
    """

    def __init__(self, gpu: Gpu, engine: Engine) -> None:
        self._gpu = gpu
        self._engine = engine
        self._stop = threading.Event()
        self._failed: Exception | None = None
        self.rates: list[float] = []

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._move)
        self._thread.start()
        return self

    def _move(self) -> None:
        try:
            self._gpu.use()
            keys, _ = self._engine.store()
            while not (self.rates and self._stop.is_set()):  # one figure at least
                keys, gbps = self._engine.both(keys)
                self.rates.append(gbps)
        except Exception as error:  # noqa: BLE001  # raised where the context ends
            self._failed = error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed


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
    with (
        Neighbour() as neighbour,
        Daemon(pool_bytes(fragment, nbytes), log=log) as daemon,
        Engine(gpu, daemon, fragment, nbytes) as engine,
    ):
        engine.store()
        if "the kernel does not work here" in log.read_text("utf-8", "replace"):
            raise RuntimeError("the kernel does not work on this device")
        _beside(neighbour, gpu, engine, 1)
        return _beside(neighbour, gpu, engine, rounds)


def _beside(neighbour: Neighbour, gpu: Gpu, engine: Engine, rounds: int) -> dict[str, float]:
    alone, beside, rates = [], [], []
    for _ in range(rounds):
        alone.append(neighbour.tflops(SECONDS))
        with Saturated(gpu, engine) as traffic:
            beside.append(neighbour.tflops(SECONDS))
        rates += traffic.rates
    return {
        "alone_tflops": median(alone),
        "beside_tflops": median(beside),
        "loss_percent": 100 * (1 - median(beside) / median(alone)),
        "kvd_GBps": median(rates),
    }
