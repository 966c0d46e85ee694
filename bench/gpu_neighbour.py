"""A process that keeps the GPU busy as an engine does: with matrix products, or with decoding.

For each line with a word and a number of seconds on standard input it answers with a line of
numbers; it ends with its input. `products 1.0`: the TFLOP/s of bf16 products in that time.
`decode 1.0`: the microseconds that a kernel takes which reads a matrix, one after the other as
in a decode step: p50, p99, the longest. Where it cannot it says why instead of `ready`.
"""

import sys
import time
from itertools import pairwise

import torch

SIZE, AT_A_TIME = 8192, 8
# 64 MiB a matrix, some of them in turn: more than a cache holds, read in 20 to 30 µs.
ROWS, COLUMNS, MATRICES = 8192, 4096, 8
CHAIN = 512  # kernels enqueued before any is looked at: none waits for this process


class Neighbour:
    """The matrices, warmed up."""

    def __init__(self) -> None:
        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self._left, self._right = noise(SIZE, SIZE), noise(SIZE, SIZE)
        self._product = torch.empty_like(self._left)
        self._weights = [noise(ROWS, COLUMNS) for _ in range(MATRICES)]
        self._vector = noise(COLUMNS)
        self._out = torch.empty_like(self._weights[0][:, 0])
        self.products(2.0)
        self.decode(0.2)

    def products(self, seconds: float) -> list[float]:
        """TFLOP/s, measured for about so long."""
        done = 0
        torch.cuda.synchronize()
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            for _ in range(AT_A_TIME):
                torch.matmul(self._left, self._right, out=self._product)
            done += AT_A_TIME
            torch.cuda.synchronize()
        return [done * 2 * SIZE**3 / (time.perf_counter() - started) / 1e12]

    def decode(self, seconds: float) -> list[float]:
        """Microseconds a kernel, from the end of the one before to its own: p50, p99, longest."""
        marks = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            for _ in range(CHAIN + 1)
        ]
        took: list[float] = []
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            marks[0].record()
            for number in range(CHAIN):
                torch.mv(self._weights[number % MATRICES], self._vector, out=self._out)
                marks[number + 1].record()
            torch.cuda.synchronize()
            took += [1e3 * before.elapsed_time(after) for before, after in pairwise(marks)]
        took.sort()
        return [took[len(took) // 2], took[len(took) * 99 // 100], took[-1]]


def main() -> None:
    """Say `ready`, then answer."""
    if not torch.cuda.is_available():
        print("torch sees no GPU", flush=True)
        return
    neighbour = Neighbour()
    ask = {"products": neighbour.products, "decode": neighbour.decode}
    print("ready", flush=True)
    for line in sys.stdin:
        what, seconds = line.split()
        print(*ask[what](float(seconds)), flush=True)


if __name__ == "__main__":
    main()
