"""How much a busy process on the GPU and kvd slow each other down.

`python gpu_beside.py` is the busy process: it computes as an engine does, with torch. It answers
each line of a word and seconds with a line of numbers:

- `products`: TFLOP/s of bf16 matrix products;
- `decode`: of steps of 512 small kernels, each timed on the device from the end of the one before:
  p50, p99 and longest of a kernel in µs, then p50 and longest of a step by the clock in ms.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from gpu_device import Gpu
    from gpu_figures import Spread

SECONDS = 0.5  # of an answer
FRAGMENT = 65536
IDLE_LOADS = 50
DECODE = ("kernel_p50_us", "kernel_p99_us", "kernel_longest_us", "step_p50_ms", "step_longest_ms")
SIZE, AT_A_TIME = 8192, 8  # of the products
# 64 MiB a matrix, several in turn: more than a cache holds, each read in 20 to 30 µs.
ROWS, COLUMNS, MATRICES = 8192, 4096, 8
STEP_KERNELS = 512

Keep = Callable[[str, float], None]
T = TypeVar("T")


class Helper:
    """A process of a benchmark that answers lines with lines; killed with the context.

    Args:
        program: a file beside this one.
        arguments: its own.
        pass_fds: descriptors that it inherits.
    """

    def __init__(self, program: str, *arguments: object, pass_fds: Sequence[int] = ()) -> None:
        self._name = f"{program} {' '.join(map(str, arguments))}".strip()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )

    def send_line(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def read_line(self) -> str:
        """Wait for its next line.

        Raises:
            RuntimeError: it ended, or the line says why it cannot answer.
        """
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("error: "):
            raise RuntimeError(answer.removeprefix("error: ") or f"{self._name} ended")
        return answer

    def ask(self, what: str, seconds: float = SECONDS) -> list[float]:
        """The numbers with which the busy process answers."""
        self.send_line(f"{what} {seconds}")
        return [float(number) for number in self.read_line().split()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def answering(role: Callable[..., Iterable[object]], *arguments: object) -> None:
    """Be a Helper: print each answer of `role`, or why there is none."""
    try:
        for answer in role(*arguments):
            print(answer, flush=True)
    except Exception as error:  # noqa: BLE001  # it is the answer
        print(f"error: {error}", flush=True)


@contextmanager
def neighbour() -> Iterator[Helper]:
    """The busy process, once it is warm.

    Raises:
        RuntimeError: it cannot compute, with the reason.
    """
    with Helper(Path(__file__).name) as helper:
        helper.read_line()
        yield helper


def measure(gpu: "Gpu", nbytes: int, rounds: int, log: Path) -> "Mapping[str, Spread]":
    """Both alone; then both at once, while kvd loads single chunks and while it only stores.

    Args:
        gpu: where kvd moves.
        nbytes: of the engine's chunks, and to store at a time.
        rounds: after a first one that does not count.
        log: the daemon's.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    # The busy process needs none of these.
    from gpu_engine import GpuEngine, pool_bytes  # noqa: PLC0415
    from gpu_figures import Samples  # noqa: PLC0415
    from harness import Daemon  # noqa: PLC0415

    with (
        neighbour() as busy,
        Daemon(pool_bytes(FRAGMENT, nbytes), log=log) as daemon,
        GpuEngine(gpu, daemon, FRAGMENT, nbytes) as engine,
    ):
        newest, _ = engine.move(store=True)

        def load() -> float:
            return engine.load_one(newest[0])

        def store() -> float:
            nonlocal newest
            newest, gbps = engine.move(store=True)
            return gbps

        samples = Samples()
        for number in range(rounds + 1):
            keep: Keep = samples.keep if number else lambda _name, _value: None
            gpu.warm(0.1)
            for _ in range(IDLE_LOADS):
                keep("load_alone_us", load())
            keep("stores_alone_GBps", store())
            (alone,) = busy.ask("products")
            keep("products_alone_TFLOPs", alone)
            _keep_decode(keep, "alone", busy.ask("decode"))
            for name, work in (("load_us", load), ("stores_GBps", store)):
                what = name.partition("_")[0]
                (beside,), values = _beside(lambda: busy.ask("products"), gpu, work)
                keep(f"products_beside_{what}_loss_percent", 100 * (1 - beside / alone))
                steps, more = _beside(lambda: busy.ask("decode"), gpu, work)
                _keep_decode(keep, f"beside_{what}", steps)
                for value in values + more:
                    keep(f"{name.replace('_', '_beside_')}", value)
    return samples.spreads()


def _keep_decode(keep: Keep, when: str, answer: Sequence[float]) -> None:
    for name, value in zip(DECODE, answer, strict=True):
        keep(f"decode_{when}_{name}", value)


def _beside(ask: Callable[[], T], gpu: "Gpu", work: Callable[[], float]) -> tuple[T, list[float]]:
    """The answer of the busy process, and what kvd's work measured again and again meanwhile."""
    stop = threading.Event()

    def work_on() -> list[float]:
        gpu.use()
        values = [work()]
        while not stop.is_set():
            values.append(work())
        return values

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work_on)
        try:
            answer = ask()
        finally:
            stop.set()
        return answer, working.result()


class Neighbour:
    """The matrices of the busy process, warmed up.

    Raises:
        RuntimeError: torch sees no GPU.
    """

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  # only the busy process has it

        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")

        def noise(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self._torch: Any = torch
        self._left, self._right = noise(SIZE, SIZE), noise(SIZE, SIZE)
        self._product = torch.empty_like(self._left)
        self._weights = [noise(ROWS, COLUMNS) for _ in range(MATRICES)]
        self._vector = noise(COLUMNS)
        self._out = torch.empty_like(self._weights[0][:, 0])
        self._products(1.0)
        self._decode(0.2)

    def answers(self) -> Iterator[str]:
        """`ready`, then an answer to each line of standard input."""
        yield "ready"
        ask = {"products": self._products, "decode": self._decode}
        for line in sys.stdin:
            what, seconds = line.split()
            yield " ".join(map(str, ask[what](float(seconds))))

    def _products(self, seconds: float) -> list[float]:
        torch, done = self._torch, 0
        torch.cuda.synchronize()
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            for _ in range(AT_A_TIME):
                torch.matmul(self._left, self._right, out=self._product)
            done += AT_A_TIME
            torch.cuda.synchronize()
        return [done * 2 * SIZE**3 / (time.perf_counter() - started) / 1e12]

    def _decode(self, seconds: float) -> list[float]:
        torch = self._torch
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEP_KERNELS + 1)]
        kernels: list[float] = []
        steps: list[float] = []
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            began = time.perf_counter()
            marks[0].record()
            for number in range(STEP_KERNELS):
                torch.mv(self._weights[number % MATRICES], self._vector, out=self._out)
                marks[number + 1].record()
            torch.cuda.synchronize()
            steps.append(1e3 * (time.perf_counter() - began))
            kernels += [1e3 * before.elapsed_time(after) for before, after in pairwise(marks)]
        kernels.sort()
        steps.sort()
        p50, p99 = kernels[len(kernels) // 2], kernels[len(kernels) * 99 // 100]
        return [p50, p99, kernels[-1], steps[len(steps) // 2], steps[-1]]


if __name__ == "__main__":
    answering(lambda: Neighbour().answers())
