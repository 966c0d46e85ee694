"""A process that keeps the GPU busy with matrix products, as an engine does.

For each line with a number of seconds on standard input it answers with the TFLOP/s of bf16
products in that time; it ends with its input. Where it cannot it says why instead of `ready`.
"""

import sys
import time

import torch

SIZE, AT_A_TIME = 8192, 8


def main() -> None:
    """Say `ready`, then answer."""
    if not torch.cuda.is_available():
        print("torch sees no GPU", flush=True)
        return
    left = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(left)
    run(left, right, product, seconds=2.0)
    print("ready", flush=True)
    for line in sys.stdin:
        print(run(left, right, product, float(line)), flush=True)


def run(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, seconds: float) -> float:
    """TFLOP/s, measured for about so long."""
    done = 0
    torch.cuda.synchronize()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(AT_A_TIME):
            torch.matmul(left, right, out=product)
        done += AT_A_TIME
        torch.cuda.synchronize()
    return done * 2 * SIZE**3 / (time.perf_counter() - started) / 1e12


if __name__ == "__main__":
    main()
